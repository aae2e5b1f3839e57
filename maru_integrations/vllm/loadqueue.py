"""Loads that wait for the loader: their order, their pieces, their deadlines, and that each is answered exactly once.

Pure: no thread, no I/O, the clock is a parameter. Whoever shares it between threads locks around every call.

Order is first come, first served, and a load that nobody else waits behind is moved in one go. A large one that a short
one waits for is asked to yield: it ends with the piece that it is at, a few whole chunks, and before its next piece one
load that has a single piece left goes first. So nothing small waits for all of something large, and a large load takes
at most twice as long.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from enum import Enum
from typing import Any

from attrs import define, evolve, frozen

from maru_core.brake import Pull
from maru_integrations.vllm.copies import ChunkShape
from maru_integrations.vllm.metadata import CANCELLED, LATE, LoadOp
from maru_integrations.vllm.waits import Wait


class Phase(Enum):
    """What is being done for a load right now."""

    WAITING = "waiting"
    #: Its objects are looked at; no page is touched.
    READING = "reading"
    #: Its pages may be written to at any moment: until that ends, nobody may be told that it is over.
    COPYING = "copying"
    ENDED = "ended"


@define(eq=False)
class LoadJob:
    """One load. ``cuts`` are the ends of its pieces, in objects from its first; all before ``good`` are proven.

    ``fence`` is what its copies come after; ``wait`` is that of vLLM's thread, which hears of an end once per step.
    ``released``: its request was reported before all of it is there. From then on it has no deadline: steps wait for
    it, and vLLM may be unable to take back what is computed on one that is given up. ``unread``: its request is gone
    since, and no step has read its blocks or will: they may be somebody else's, who must not hear that they failed.
    """

    op: LoadOp
    fence: Any
    cuts: tuple[int, ...]
    expires: float
    wait: Wait
    arrived: float
    good: int = 0
    phase: Phase = Phase.WAITING
    cancelled: bool = False
    released: bool = False
    unread: bool = False
    overtaken: bool = False

    @property
    def pieces_left(self) -> int:
        """Pieces that have not been moved, or not as a whole."""
        return sum(end > self.good for end in self.cuts)

    @property
    def piece(self) -> range:
        """Objects of the next piece, counted from the load's first: after them it may be asked to yield."""
        return range(self.good, next(end for end in self.cuts if end > self.good))

    @property
    def rest(self) -> range:
        """Objects that are to be moved."""
        return range(self.good, self.cuts[-1])


@frozen(eq=False)
class Ended:
    """A load that is over: ``good`` of its objects, from the front, arrived and are proven.

    When that is not all, ``reason`` is that of LoadResult, and ``why`` is for people.
    """

    job: LoadJob
    good: int
    reason: str = ""
    why: str = ""


def cut(chunks: int, shape: ChunkShape, piece_bytes: int) -> tuple[int, ...]:
    """Ends, in objects, of the pieces of ``chunks`` chunks: whole chunks, of ``piece_bytes`` at most or one chunk."""
    step = max(1, piece_bytes // max(1, shape.nbytes))
    return tuple(end * shape.objects for end in (*range(step, chunks, step), chunks)) if chunks else ()


class LoadQueue:
    """At most one load is being worked on. Each method says which loads ended by it; no load ends twice."""

    def __init__(self) -> None:
        self._jobs: list[LoadJob] = []
        #: What is being worked on, ended or not.
        self._working: LoadJob | None = None

    @property
    def jobs(self) -> tuple[LoadJob, ...]:
        """Loads that have not ended, in the order in which they came."""
        return tuple(self._jobs)

    @property
    def is_empty(self) -> bool:
        """Whether every load has ended."""
        return not self._jobs

    def add(self, op: LoadOp, fence: Any, cuts: tuple[int, ...], now: float) -> LoadJob:
        """Queue a load of at least one piece."""
        expires = now + op.deadline if op.deadline > 0 else math.inf
        job = LoadJob(op, fence, cuts, expires, Wait(expires, now), now)
        self._jobs.append(job)
        return job

    def take(self) -> LoadJob | None:
        """The load that is to be moved now, in phase READING; ``None`` when there is none."""
        if not self._jobs:
            return None
        job = self._jobs[0]
        short = None
        if job.good and not job.overtaken:
            short = next((other for other in self._jobs[1:] if other.pieces_left == 1), None)
        job.overtaken = short is not None
        taken = self._working = short or job
        taken.phase = Phase.READING
        return taken

    def following(self, job: LoadJob) -> LoadJob | None:
        """The load that will be taken after ``job`` if nothing happens until that has ended."""
        short = next((other for other in self._jobs if other is not job and other.pieces_left == 1), None)
        if short is not None and self._may_yield(job):
            return short  # the job will yield to it
        return next((other for other in self._jobs if other is not job), None)

    def begin_copy(self, job: LoadJob, now: float) -> tuple[bool, list[Ended]]:
        """Whether its pages may be written to now; not when the load has ended, was cancelled or is too late."""
        if job.phase is Phase.ENDED:
            return False, []
        reason = self._unwanted(job, now)
        if reason:
            return False, [self._end(job, reason)]
        job.phase = Phase.COPYING
        return True, []

    def end_copy(self, job: LoadJob) -> None:
        """Nothing of its pages will be written to any more."""
        if job.phase is Phase.COPYING:
            job.phase = Phase.READING

    def pull(self, now: float) -> Pull:
        """What the copy that is under way, if there is one, is asked for."""
        job = next((job for job in self._jobs if job.phase is Phase.COPYING), None)
        if job is None:
            return Pull.GO_ON
        if self._unwanted(job, now):
            return Pull.STOP
        if self._may_yield(job) and any(other.pieces_left == 1 for other in self._jobs if other is not job):
            return Pull.YIELD
        return Pull.GO_ON

    def moved(
        self, job: LoadJob, good: int, now: float, reason: str = "", why: str = "", tried: int | None = None
    ) -> list[Ended]:
        """``tried`` objects of its rest were moved (``None``: a piece), of which ``good``, from the front, are proven.

        ``why`` the others are not.
        """
        self._working = None
        if job.phase is Phase.ENDED:
            return []
        tried = len(job.piece) if tried is None else tried
        job.good += good
        if good < tried or why:
            # What was stopped on purpose says nothing against its objects.
            reason = (self._unwanted(job, now) or reason) if why else ""
            return [self._end(job, reason, why or "what was copied is not what was granted")]
        if not job.rest:
            return [self._end(job)]
        unwanted = self._unwanted(job, now)
        if unwanted:
            return [self._end(job, unwanted)]
        if not tried or job.released:  # it would be asked again and again; and nobody can wait for another turn
            return [self._end(job, "", "the transfer stopped although nobody asked it to")]
        job.phase = Phase.WAITING
        return []

    def release(self, job: LoadJob) -> bool:
        """Whether its request may go on now, before the load has ended; not once the load was cancelled."""
        if job.phase is Phase.ENDED or job.cancelled or job.released:
            return False
        job.released = True
        return True

    def wants(self, job: LoadJob) -> bool:
        """Whether somebody waits for a load that was released."""
        return job.phase is not Phase.ENDED and not job.cancelled

    def cancel(self, load_ids: Collection[int], *, unread: bool = False) -> list[Ended]:
        """Nobody waits for these any more. One that is being copied ends soon. ``unread``: see :class:`LoadJob`."""
        ended = []
        for job in self.jobs:
            if job.op.load_id in load_ids:
                # vLLM keeps the blocks of one that was not released until it was answered.
                job.unread |= unread and job.released and not job.cancelled
                job.cancelled = True
                if job.phase is not Phase.COPYING:
                    ended.append(self._end(job, CANCELLED))
        return ended

    def look(self, now: float) -> list[Ended]:
        """vLLM's thread looks, once per step: what it could hear of only after its deadline is late from now on."""
        for job in self._jobs:
            if job.wait.is_over(now):
                job.expires = min(job.expires, now)
        return self.expire(now)

    def expire(self, now: float) -> list[Ended]:
        """Loads whose deadline has passed; one that is being copied ends soon."""
        reasons = [(job, self._unwanted(job, now)) for job in self._jobs if job.phase is not Phase.COPYING]
        return [self._end(job, reason) for job, reason in reasons if reason]

    def overdue(self, now: float) -> LoadJob | None:
        """The load that is being worked on although nobody wants more of it, or not this late.

        It has ended unless it is being copied or was released.
        """
        job = self._working
        return job if job is not None and (job.cancelled or job.expires <= now) else None

    def end_waiting(self, why: str) -> list[Ended]:
        """End everything but what is being copied, or was released: its turn will not come in time."""
        waiting = [job for job in self.jobs if job.phase is not Phase.COPYING and not job.released]
        return [evolve(self._end(job, LATE), why=why) for job in waiting]

    def end_all(self, reason: str, why: str) -> list[Ended]:
        """End everything; for when nobody works on it any more."""
        self._working = None
        return [self._end(job, reason, why) for job in self.jobs]

    @staticmethod
    def _may_yield(job: LoadJob) -> bool:
        return job.pieces_left > 1 and not job.released

    def _unwanted(self, job: LoadJob, now: float) -> str:
        if job.cancelled:
            return CANCELLED
        return LATE if job.expires <= now and not job.released else ""

    def _end(self, job: LoadJob, reason: str = "", why: str = "") -> Ended:
        job.phase = Phase.ENDED
        self._jobs.remove(job)
        if reason == LATE:
            why = f"not loaded within its deadline of {job.op.deadline:g} s"
        return Ended(job, job.good, reason, why)
