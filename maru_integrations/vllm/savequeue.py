"""Stores that wait for the saver: their order, their pieces, how much may wait, and that each is answered exactly once.

Pure: no thread, no I/O. Whoever shares it between threads locks around every call. Order is first come, first served.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from enum import Enum
from typing import Any

from attrs import define, frozen

from maru_core.brake import Pull
from maru_integrations.vllm.metadata import ERROR, LATE, PREEMPTED, QUEUE_FULL, StoreOp


class Step(Enum):
    """What is being done for a store right now."""

    WAITING = "waiting"
    #: Room is asked for, or what was copied is committed; no page is read.
    TALKING = "talking"
    #: Its pages are being read.
    COPYING = "copying"
    ENDED = "ended"


@define(eq=False)
class StoreJob:
    """One store. ``cuts`` are the ends of its pieces, in objects; ``kept`` counts those that are in the pool.

    ``fence`` is what its copies come after. ``void``: what is being copied may be overwritten and must not be
    committed. ``began``: when the work on its piece did; ``told``: when it was told to stop because that takes too
    long, both in seconds of one clock.
    """

    op: StoreOp
    fence: Any
    weights_epoch: int
    cuts: tuple[int, ...]
    nbytes: int
    kept: int = 0
    moved: int = 0
    step: Step = Step.WAITING
    cancelled: bool = False
    void: bool = False
    began: float = -math.inf
    told: float | None = None

    @property
    def piece(self) -> range:
        """Objects of the next piece."""
        return range(self.cuts[self.moved - 1] if self.moved else 0, self.cuts[self.moved])

    @property
    def is_last_piece(self) -> bool:
        """Whether nothing comes after that."""
        return self.moved + 1 == len(self.cuts)


@frozen
class Saved:
    """A store that is over: what it reads from now on, if it does, is thrown away.

    ``reason`` is one of metadata's when not all was kept.
    """

    op: StoreOp
    kept: int
    reason: str


class SaveQueue:
    """At most one store is being worked on. Methods say which stores ended by them; none ends twice.

    ``limit``: bytes that may wait behind the first one, which is being worked on or will be at once. A store that would
    exceed it is dropped, unless nothing else waits: what came before is the head of its prefix and worth more than what
    comes behind it. The first does not count because its time is not the bus's: it waits for the step that computes
    what it stores, two steps of a long prefill where they are scheduled asynchronously, and by then the next prompt is
    complete.

    ``timeout``: seconds after which the work on one piece is late, and told to stop. One that goes on for ``grace``
    seconds more is *stuck*: it ends with all that waits, and until it returns whatever comes is dropped at once.
    """

    def __init__(self, limit: int, timeout: float = math.inf, grace: float = 0.0) -> None:
        self._limit = limit
        self._timeout = timeout
        self._grace = grace
        self._jobs: list[StoreJob] = []
        #: What is being worked on, ended or not.
        self._working: StoreJob | None = None
        self._stuck = False

    @property
    def jobs(self) -> tuple[StoreJob, ...]:
        """Stores that have not ended, in the order in which they came."""
        return tuple(self._jobs)

    @property
    def is_empty(self) -> bool:
        """Whether every store has ended, and no work on one goes on that was given up."""
        return not self._jobs and not self._stuck

    @property
    def waiting_bytes(self) -> int:
        """Bytes of all stores behind the first."""
        return sum(job.nbytes for job in self._jobs[1:])

    @property
    def stuck(self) -> StoreJob | None:
        """The store that was answered although the work on it has not returned."""
        return self._working if self._stuck else None

    def add(self, op: StoreOp, fence: Any, weights_epoch: int, cuts: tuple[int, ...], nbytes: int) -> list[Saved]:
        """Queue a store of at least one piece, or drop it."""
        if self._stuck:
            return [Saved(op, 0, LATE)]
        if len(self._jobs) > 1 and self.waiting_bytes + nbytes > self._limit:
            return [Saved(op, 0, QUEUE_FULL)]
        self._jobs.append(StoreJob(op, fence, weights_epoch, cuts, nbytes))
        return []

    def take(self, now: float) -> StoreJob | None:
        """The store whose next piece is to be copied now; ``None`` when there is none."""
        if not self._jobs:
            return None
        job = self._working = self._jobs[0]
        job.step, job.began = Step.TALKING, now
        return job

    def begin_copy(self, job: StoreJob) -> bool:
        """Whether its pages may be read now; not when it was cancelled."""
        if job.cancelled or job.step is Step.ENDED:
            return False
        job.step = Step.COPYING
        return True

    def pull(self) -> Pull:
        """What the copy that is under way, if there is one, is asked for."""
        stopped = self._stuck or any(job.cancelled and job.step is Step.COPYING for job in self._jobs)
        return Pull.STOP if stopped else Pull.GO_ON

    def end_copy(self, job: StoreJob) -> None:
        """Its pages are read no more."""
        if job.step is Step.COPYING:
            job.step = Step.TALKING

    def moved(self, job: StoreJob, kept: int, reason: str) -> list[Saved]:
        """Its piece was dealt with: ``kept`` of its objects are in the pool now; with a ``reason`` the store ends."""
        self._working, self._stuck = None, False
        if job.step is Step.ENDED:
            return []
        job.kept += kept
        job.moved += 1
        if reason or job.cancelled or job.moved == len(job.cuts):
            reason = reason or (PREEMPTED if job.moved < len(job.cuts) else "")
            return [self._end(job, LATE if reason == PREEMPTED and job.told is not None else reason)]
        job.step = Step.WAITING
        return []

    def cancel(self, request_ids: Collection[str]) -> list[Saved]:
        """These requests lose their blocks. A store of theirs that is being worked on ends soon."""
        ended = []
        for job in self.jobs:
            if job.op.request_id in request_ids:
                job.cancelled = True
                if job.step is Step.WAITING:
                    ended.append(self._end(job, PREEMPTED))
        return ended

    def copying(self, request_ids: Collection[str]) -> bool:
        """Whether pages of these requests are being read."""
        return any(job.step is Step.COPYING and job.op.request_id in request_ids for job in self._jobs)

    def void(self, request_ids: Collection[str]) -> None:
        """Pages of these that are being read may be overwritten from now on: what is read must not be committed."""
        for job in self._jobs:
            if job.step is Step.COPYING and job.op.request_id in request_ids:
                job.void = True

    def look(self, now: float) -> list[Saved]:
        """vLLM's thread looks, once per step: work that is late is told to stop, and is stuck when it goes on.

        The time for that begins with the look: after a long step it may be about to return.
        """
        job = self._working
        if job is None or self._stuck:
            return []
        if job.told is None:
            if now - job.began >= self._timeout:
                job.cancelled, job.told = True, now
            return []
        if now - job.told < self._grace:
            return []
        job.void = self._stuck = True
        return [self._end(waiting, LATE) for waiting in self.jobs]

    def end_all(self, reason: str = ERROR) -> list[Saved]:
        """End everything that is queued; for when nobody works on it any more."""
        self._working, self._stuck = None, False
        return [self._end(job, reason) for job in self.jobs]

    def _end(self, job: StoreJob, reason: str) -> Saved:
        job.step = Step.ENDED
        self._jobs.remove(job)
        return Saved(job.op, job.kept, reason)
