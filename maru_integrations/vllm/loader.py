"""The thread that loads parked requests between steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing
from functools import partial
from typing import Any

from maru_core import logs
from maru_core.brake import Brake, Pull
from maru_core.contracts import LoadsByLayer, PreparedCopies, PreparedLayeredLoad
from maru_core.errors import BackendError, TransferError, Unavailable
from maru_core.foreign import show
from maru_integrations.vllm.answers import Answers
from maru_integrations.vllm.checking import Checking, threads
from maru_integrations.vllm.copies import ChunkShape, chunks_of, failed_blocks, problem_of
from maru_integrations.vllm.helper import Helper
from maru_integrations.vllm.loadqueue import Ended, LoadJob, LoadQueue, cut
from maru_integrations.vllm.metadata import CANCELLED, LATE, UNAVAILABLE, LoadOp
from maru_integrations.vllm.moving import Link, Planned, carry_out, leading, plan, plan_layers
from maru_integrations.vllm.nextload import NextLoad, Plan
from maru_integrations.vllm.overlap import LoadsInUse
from maru_integrations.vllm.release import Outlook
from maru_integrations.vllm.releasing import LoaderSettings, Releases, Underway
from maru_integrations.vllm.streams import Lane, on_lane
from maru_integrations.vllm.stuck import StuckWatch

#: How long vLLM's thread waits for a load that is in use before it looks at deadlines again, in seconds.
_PATIENCE = 0.1

#: Why a load is refused while another one is stuck.
_BEHIND = "a load before it was told to stop and has not returned"


class Loader:
    """Owns the link's loading transfer. All methods are for vLLM's thread.

    None but ``cancel``, ``drain``, ``wait_layer`` and ``settle`` blocks, for loads that were released, and ``close``.

    Invariants: every load that was submitted is answered once, as good only as far as its bytes were proven after the
    copy; none is answered while its pages may still be written to. One that fails after its release, and that somebody
    wants, is copied once more before it is answered. A call that does not return has the thread and its transfer to
    itself until it does: meanwhile all other loads fail at once.
    """

    def __init__(
        self,
        link: Callable[[], Link],
        shape: ChunkShape,
        answers: Answers,
        lane: Lane,
        settings: LoaderSettings,
        on_late_failure: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``link`` connects if need be and raises MaruError. ``on_late_failure``: a load failed after its release."""
        self._link = link
        self._shape = shape
        self._answers = answers
        self._lane = lane
        self._settings = settings
        self._on_late_failure = on_late_failure
        self._clock = clock
        self._log = logs.get_logger(__name__)
        self._ready = threading.Condition()
        self._queue = LoadQueue()
        #: Of the copy that is under way; set from what the queue says whenever that may have changed.
        self._brake = Brake()
        self._closing = False
        self._helper = Helper("maru-load", self._run)
        #: Only the loader's thread touches this.
        self._next = NextLoad()
        self._watch = StuckWatch()
        #: What the thread moves bytes with, for people.
        self._engine = ""
        self._told_plain = False
        self._releases = Releases(self._ready, self._queue, answers, settings, clock)
        #: Loads that may have been released.
        self.in_use = LoadsInUse(lane.queues)

    # -- on vLLM's thread ------------------------------------------------------------------------------------------

    def submit(self, ops: Sequence[LoadOp]) -> None:
        """Load these when their turn comes, after what the calling thread's stream was told so far."""
        if not ops:
            return
        why = "the thread that loads has been ended" if self._closing else ""
        try:
            fence = self._lane.fence()
        except Exception as error:  # noqa: BLE001 - the device's; whatever it is, these loads failed
            why = f"no event of the device: {error}"
        if why:
            for op in ops:
                self._refuse(op, why, UNAVAILABLE)
            return
        for op in ops:
            problem = problem_of(op, self._shape)
            chunks = chunks_of(op, self._shape)
            if problem is not None or chunks < 1:
                self._refuse(op, problem or "nothing to load")
                continue
            whole = self._early(op) and not self._told_plain
            cuts = cut(chunks, self._shape, chunks * self._shape.nbytes if whole else self._settings.piece_bytes)
            now = self._clock()
            with self._ready:
                stuck = self._watch.stuck is not None and self._queue.overdue(now) is self._watch.stuck
                if not stuck:
                    self._queue.add(op, fence, cuts, now)
                    self._set_brake()
                    self._ready.notify()
            if stuck:
                self._refuse(op, _BEHIND, LATE)
        self._revive()

    def _refuse(self, op: LoadOp, why: str, reason: str = "") -> None:
        self._log.warning("maru.load_error", request=op.request_id, error=why)
        self._answers.load_ended(op, 0, failed_blocks(op, self._shape, 0), reason)

    def cancel(self, load_ids: Collection[int]) -> None:
        """Nobody waits for these: stop soon. Those whose requests went on already are stopped before this returns.

        Their requests are gone, and no step has read those blocks; of requests that may have run ``drain`` comes first.
        """
        if not load_ids:
            return
        self._stop(load_ids, unread=True)

    def _stop(self, load_ids: Collection[int], *, unread: bool) -> None:
        with self._ready:
            ended = self._queue.cancel(load_ids, unread=unread)
            self._set_brake()
        self._deliver(ended)
        # A load that is not released yet will not be any more, and its blocks stay until it was answered.
        while not self.in_use.drain(lambda op: op.load_id in load_ids and self._is_released(op.load_id), _PATIENCE):
            self.poll()  # which tells of a load that does not stop, and ends what nobody works on any more

    def drain(self, request_ids: Collection[str]) -> None:
        """Before this returns, no released load writes to blocks of these requests any more."""
        if not request_ids:
            return
        with self._ready:
            jobs = [job for job in self._queue.jobs if job.released and job.op.request_id in request_ids]
        self._stop([job.op.load_id for job in jobs], unread=False)

    def release(self, computing: int, outlook: Callable[[], Outlook]) -> None:
        """A step of so many requests ends: let a request go on whose load is under way, if that is due."""
        self._releases.release(computing, outlook)

    def poll(self) -> None:
        """Answer for what is past its deadline, or has nobody left to work on it."""
        if self._queue.is_empty and self._watch.is_idle:
            return  # only this thread adds loads, so there are none
        now = self._clock()
        with self._ready:
            ended = self._queue.look(now)
            self._set_brake()
            if self._helper.has_died:
                ended += self._abandon("the thread that loads ended")
            if self._watch.look(self._queue.overdue(now), now, self._engine):
                ended += self._queue.end_waiting(_BEHIND)
        self._deliver(ended)

    def close(self, timeout: float = 2.0) -> bool:
        """End the thread; whether it ended in time. What was not loaded is answered as failed."""
        with self._ready:
            self._closing = True
            ended = self._queue.cancel({job.op.load_id for job in self._queue.jobs})
            self._set_brake()
            self._ready.notify_all()
        self._deliver(ended)
        self.in_use.stop()
        return self._helper.join(timeout)

    def wait_layer(self, layer: int) -> None:
        """What the calling thread's stream runs later comes after that layer of all loads in use.

        One that failed is waited for as a whole, with its repetition: what it then lacks was answered as failed.
        """
        while not self.in_use.wait_layer(layer, _PATIENCE):
            self.poll()

    def settle(self) -> list[LoadOp]:
        """Before this returns, every load that the step's forward pass may have read has ended and been answered.

        Returns those of which it may have read what was not there, although they may be answered as good.
        """
        while not self.in_use.settle(_PATIENCE):
            self.poll()
        return self.in_use.take_undefined()

    def _early(self, op: LoadOp) -> bool:
        return op.overlap and self._settings.releases_early

    def _set_brake(self) -> None:
        self._brake.pull = self._queue.pull(self._clock())
        if self._brake.pull is Pull.STOP:
            self._releases.stop()

    def _is_released(self, load_id: int) -> bool:
        with self._ready:
            return any(job.released for job in self._queue.jobs if job.op.load_id == load_id)

    def _revive(self) -> None:
        ended: list[Ended] = []
        with self._ready:
            if self._closing or not self._queue.jobs:
                return
            try:
                self._helper.start()
            except RuntimeError as error:  # the next load tries again
                ended = self._abandon(f"the thread that loads: {error}")
        self._deliver(ended)

    def _abandon(self, why: str) -> list[Ended]:
        for job in self._queue.jobs:
            self._queue.end_copy(job)
        return self._queue.end_all(UNAVAILABLE, why)

    # -- on the loader's thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        with self._lane.entered(), ThreadPoolExecutor(threads(), "maru-check") as beside:
            try:
                while self._turn(beside):
                    pass
            finally:
                self._next.forget()

    def _turn(self, beside: ThreadPoolExecutor) -> bool:
        """Wait for a load and work on it; False when there will be none any more."""
        with self._ready:
            # A plan holds buffers: one whose load ended meanwhile is let go of before there is anything else to do.
            while not self._queue.jobs and not self._closing and not self._next.is_planned:
                self._ready.wait()
            if self._closing:
                return False
            ended = self._queue.expire(self._clock())
            job = self._queue.take()
        self._deliver(ended)
        self._next.forget(unless=job)
        if job is not None:
            self._work(job, beside)
        return True

    def _plan_ahead(self, job: LoadJob, link: Link, beside: ThreadPoolExecutor) -> None:
        """Have the next load planned while this one is copied, so that its copy begins where this one ends."""
        with self._ready:
            after = self._queue.following(job)
        if after is None:
            return
        by_layer = self._early(after.op) and isinstance(link.transfer, LoadsByLayer)
        how: Plan[Any] = self._plan_layers if by_layer else self._plan
        self._next.plan(after, link, how, beside)

    def _plan(self, link: Link, job: LoadJob) -> Planned[PreparedCopies]:
        return plan(link, job.op, self._shape, self._chunks(job))

    def _plan_layers(self, link: Link, job: LoadJob) -> Planned[PreparedLayeredLoad]:
        return plan_layers(link, job.op, self._shape, self._chunks(job))

    def _chunks(self, job: LoadJob) -> range:
        """What is left of a load. A chunk counts with all of its objects: what was moved of one is moved again."""
        return range(job.rest.start // self._shape.objects, job.rest.stop // self._shape.objects)

    def _work(self, job: LoadJob, beside: ThreadPoolExecutor) -> None:
        tried, good, reason, why = 0, 0, "", ""
        start = time.perf_counter()
        try:
            tried, good = self._move(job, beside)
        except BaseException as error:  # noqa: BLE001 - whatever it is, this load failed and the next ones go on
            why = show(error)
            # Then the objects are not at fault.
            reason = UNAVAILABLE if isinstance(error, Unavailable | BackendError) else ""
        if tried:
            self._answers.loads_took(tried * self._shape.nbytes // self._shape.objects, time.perf_counter() - start)
        with self._ready:
            ended = self._queue.moved(job, good, self._clock(), reason, why, tried)
        self._deliver(ended)

    def _move(self, job: LoadJob, beside: ThreadPoolExecutor) -> tuple[int, int]:
        """Objects of the rest that were copied, and that are proven."""
        link = self._link()
        self._engine = link.name
        if self._early(job.op):
            if isinstance(link.transfer, LoadsByLayer):
                try:
                    return self._move_by_layer(job, link, beside)
                except BaseException as error:
                    why = show(error)
                    if not self._must_repeat(job):
                        raise
                return self._repeat(job, link, beside, why)
            if not self._told_plain:
                self._told_plain = True
                self._log.warning(
                    "maru.no_overlap",
                    reason=f"the transfer engine ({type(link.transfer).__name__}) does not load layer by layer",
                    effect="requests go on when all layers are there",
                )
        return self._move_plainly(job, link, beside)

    def _must_repeat(self, job: LoadJob) -> bool:
        with self._ready:
            return job.released and self._queue.wants(job)

    def _repeat(self, job: LoadJob, link: Link, beside: ThreadPoolExecutor, why: str) -> tuple[int, int]:
        """Somebody computes on it already: write every byte again, which changes none that had arrived."""
        self.in_use.repeat(job.op.load_id)
        self._log.warning(
            "maru.load_repeated", request=job.op.request_id, error=why, effect="the step that reads it waits for that"
        )
        return self._move_plainly(job, link, beside)

    def _move_plainly(self, job: LoadJob, link: Link, beside: ThreadPoolExecutor) -> tuple[int, int]:
        copying, least = partial(self._copying, job), len(job.piece)
        planned = self._next.take(job, link, self._plan)
        with closing(planned.load):
            begun = partial(self._plan_ahead, job, link, beside)
            moved, good = carry_out(planned, copying, self._brake, least, beside, begun)
        if good == moved < planned.count:
            moved = good = moved // self._shape.objects * self._shape.objects
        return moved, good

    def _move_by_layer(self, job: LoadJob, link: Link, beside: ThreadPoolExecutor) -> tuple[int, int]:
        """The whole load; its request may go on before it is complete, so every object is proven before that."""
        planned = self._next.take(job, link, self._plan_layers)
        located = planned.located
        with closing(planned.load), located.reading(), self._copying(job) as allowed:
            if not allowed:
                return 0, 0
            began, nbytes = self._clock(), planned.count * self._shape.nbytes // self._shape.objects
            # First, so that the bus waits for nothing that can be done meanwhile.
            load = planned.load.begin()
            self.in_use.begin(job.op, load)
            underway = Underway(job, load, began, nbytes)
            sound = True
            try:
                sound = self._releases.follow(underway, Checking.begin(beside, located.check, planned.count))
                if sound:
                    self._plan_ahead(job, link, beside)
            finally:
                try:
                    load.finish()
                    self._releases.arrived(underway)
                except TransferError:
                    if sound:
                        raise
                finally:
                    self._releases.ended()
        if not sound:  # what comes before the first that is not sound may be used
            return self._move_plainly(job, link, beside)
        return planned.count, leading(located.verify())

    def _copying(self, job: LoadJob) -> AbstractContextManager[bool]:
        return on_lane(self._lane, job.fence, partial(self._begin_copy, job), partial(self._end_copy, job))

    def _begin_copy(self, job: LoadJob) -> bool:
        with self._ready:
            allowed, ended = self._queue.begin_copy(job, self._clock())
            self._set_brake()
        self._deliver(ended)
        return allowed

    def _end_copy(self, job: LoadJob) -> None:
        with self._ready:
            self._queue.end_copy(job)

    # -- on either ---------------------------------------------------------------------------------------------------

    def _deliver(self, ended: Sequence[Ended]) -> None:
        for end in ended:
            op, failed = end.job.op, failed_blocks(end.job.op, self._shape, end.good)
            if failed:
                self._tell_failure(op, end)
                if end.job.released:
                    self._on_late_failure()
            elif self._settings.log_timing:
                took = round((self._clock() - end.job.arrived) * 1000, 2)
                self._log.info("maru.load", request=op.request_id, objects=end.good, ms=took, early=end.job.released)
            self._answers.load_ended(op, end.good, () if end.job.unread else failed, end.reason)
            self.in_use.end(op.load_id)

    def _tell_failure(self, op: LoadOp, end: Ended) -> None:
        if end.reason != CANCELLED:
            self._log.warning("maru.load_error", request=op.request_id, objects_loaded=end.good, error=end.why)
