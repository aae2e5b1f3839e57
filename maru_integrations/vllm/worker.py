"""Worker side of the connector: what is done in a step, what is handed to the threads beside it, and the fences."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Sequence

from attrs import define, frozen

from maru_core import logs
from maru_core.errors import BackendError, TransferError, Unavailable
from maru_core.foreign import pass_interrupt, show
from maru_integrations.vllm.answers import Answers
from maru_integrations.vllm.copies import ChunkShape, chunks_of, failed_blocks, items_of, problem_of
from maru_integrations.vllm.loader import Loader
from maru_integrations.vllm.metadata import (
    ERROR,
    LOAD_FAILED,
    PREEMPTED,
    UNAVAILABLE,
    LoadOp,
    MaruConnectorMetadata,
    StoreOp,
)
from maru_integrations.vllm.moving import Link, fetch, write
from maru_integrations.vllm.overlap import LayerHooks
from maru_integrations.vllm.release import Rhythm
from maru_integrations.vllm.releasing import LoaderSettings
from maru_integrations.vllm.saver import Saver, SaverSettings
from maru_integrations.vllm.streams import Lane

#: Steps that may have been planned before vLLM heard that a load failed whose request was computing already. More than
#: any engine has in flight; those steps store nothing.
_STEPS_IN_FLIGHT = 8


@frozen
class Threads:
    """What is done beside the steps; ``None``: within them. ``lane`` makes the lane of one thread.

    ``ahead``: vLLM submits a step before it hands out the tokens of the one before.
    """

    lane: Callable[[], Lane]
    loads: LoaderSettings | None = None
    stores: SaverSettings | None = None
    ahead: bool = False


@define
class Patience:
    """How long a step waits for the server in order to store, and how rarely once that was in vain."""

    #: For one answer, in seconds.
    seconds: float = 0.5
    _pause: float = 1.0
    _until: float = -math.inf

    def allows(self, now: float) -> bool:
        """Whether to ask the server at all."""
        return now >= self._until

    def failed(self, start: float, now: float) -> None:
        """No answer came. After a wait for nothing: ask no more for a second, each time twice as long, up to 30 s."""
        if now - start >= self.seconds:
            self._until, self._pause = now + self._pause, min(30.0, self._pause * 2)

    def answered(self) -> None:
        """It answers."""
        self._pause = 1.0


class MaruWorker:
    """One per rank, on vLLM's thread of this worker.

    Invariants: every load is answered once, as good only when its bytes were proven after the copy to be those that
    were granted; nothing is stored that a step computed while a load that it may have read failed; blocks that vLLM
    gives away are neither read nor written to any more.
    """

    def __init__(
        self,
        opener: Callable[[], Link],
        answers: Answers,
        shape: ChunkShape,
        *,
        layer_names: Sequence[str] = (),
        threads: Threads | None = None,
        log_timing: bool = False,
    ) -> None:
        """``layer_names`` in true layer order."""
        self._opener = opener
        self._answers = answers
        self._shape = shape
        self._log_timing = log_timing
        self._log = logs.get_logger(__name__)
        self._link: Link | None = None
        self._connecting = threading.Lock()
        self._hooks = LayerHooks(layer_names)
        self._rhythm = Rhythm()
        #: Requests that this step computes.
        self._computing = 0
        self._loader: Loader | None = None
        self._saver: Saver | None = None
        #: Whether a step may have to wait before a layer: only then does anybody need to be told of each.
        self.waits_by_layer = threads is not None and threads.loads is not None and threads.loads.releases_early
        #: Whether a step that has queued all that it reads may leave it to the next one to wait for the loads' ends.
        self._may_settle_later = False
        if threads is not None and threads.loads is not None:
            lane = threads.lane()
            self._may_settle_later = lane.queues and threads.ahead
            self._rhythm = Rhythm(queues=lane.queues)
            self._loader = Loader(self.connect, shape, answers, lane, threads.loads, on_late_failure=self._failed_late)
        if threads is not None and threads.stores is not None:
            self._saver = Saver(self.connect, shape, answers, threads.lane(), threads.stores)
        #: A load that this step's forward pass needed failed.
        self._load_failed = False
        #: A load failed after its release. Set by any thread, taken by vLLM's.
        self._has_failed_late = False
        self._distrusted_steps = 0
        #: What the step that runs, or the last one, reads had not ended when it began: it waits for that, or the next.
        self._is_unsettled = False
        self._settles_later = False
        #: Loads that this step's forward pass reads layer by layer while they arrive.
        self._read_early: list[LoadOp] = []
        #: Asynchronous stores of a step whose ``wait_for_save`` has not come (0.22 leaves it out of empty steps).
        self._announced: list[StoreOp] = []
        self._weights_epoch = 0
        self._told: set[str] = set()
        self._patience = Patience()

    def connect(self) -> Link:
        """Map the pool and bind the KV tensors. Tried again by the first step that needs it.

        Raises Unavailable or BackendError, whatever a plugin raised: the objects are not at fault.
        """
        with self._connecting:
            if self._link is None:
                try:
                    self._link = self._opener()
                except (Unavailable, BackendError):
                    raise
                except BaseException as error:
                    pass_interrupt(error)
                    raise Unavailable(f"this worker cannot move bytes: {show(error)}") from error
            return self._link

    # -- the step begins -------------------------------------------------------------------------------------------

    def preempt(self, metadata: MaruConnectorMetadata) -> None:
        """Before this returns, blocks that were taken away are neither read nor written to any more."""
        if not metadata.preempted and not metadata.cancelled_loads:
            return
        if self._settles_later:
            # What the last step has read is told before it is stopped.
            self._learn_outcomes()
        gone = [op for op in self._announced if op.request_id in metadata.preempted]
        self._announced = [op for op in self._announced if op.request_id not in metadata.preempted]
        self._not_stored(gone, PREEMPTED)
        if self._saver is not None:
            self._saver.preempt(metadata.preempted)
        if self._loader is not None:
            # First: somebody may share their blocks in this very step.
            self._loader.drain(metadata.preempted)
            self._loader.cancel(metadata.cancelled_loads)

    def begin(self, metadata: MaruConnectorMetadata, has_hooks: Callable[[], bool]) -> None:
        """A step begins; ``has_hooks`` tells whether a hook will be called before each of its layers."""
        if self._settles_later:
            self._learn_outcomes()
            self._settles_later = False
            self._store_announced()
        elif self._announced:
            self._submit_announced()
        self._weights_epoch = metadata.weights_epoch
        self._announced = [op for op in metadata.stores if op.asynchronous]
        for op in self._announced:
            self._answers.store_queued(op)
        if metadata.undefined:
            self._answers.blocks_failed(metadata.undefined)
        if self._loader is None or not self.waits_by_layer:
            return
        in_use = self._loader.in_use
        in_use.use(metadata.received)
        arriving = in_use.ops()
        needed = self._is_unsettled = bool(arriving)
        self._computing = metadata.computing
        whole = (needed or bool(metadata.received)) and not has_hooks()
        by_layer = self._hooks.trusted and not whole
        self._rhythm.begin(metadata.received, metadata.computing, by_layer=by_layer)
        if self._hooks.begin_step(whole, needed):
            for layer in range(len(self._hooks.index)):
                self._wait_layer(layer)
        else:
            self._read_early = arriving
            if needed and self._may_settle_later:
                self._settles_later = all(op.asynchronous for op in metadata.stores)

    # -- loads -----------------------------------------------------------------------------------------------------

    def load(self, op: LoadOp) -> None:
        """Load, or have loaded; what could not be copied is reported."""
        if self._loader is not None and op.parked:
            self._loader.submit([op])
            return
        good, reason = 0, ""
        try:
            good = self._load(op)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the scheduler must hear that this load failed
            pass_interrupt(error)
            reason = UNAVAILABLE if isinstance(error, Unavailable | BackendError) else ""
            self._log.warning("maru.load_error", request=op.request_id, error=show(error))
        self._load_ended(op, good, reason)

    def fail_load(self, op: LoadOp) -> None:
        """Report a load as failed that :meth:`load` did not take over."""
        self._load_ended(op, 0, UNAVAILABLE)

    def _load_ended(self, op: LoadOp, good: int, reason: str) -> None:
        failed = failed_blocks(op, self._shape, good)
        if failed:
            self._load_failed = True
        self._answers.load_ended(op, good, failed, reason)

    def _load(self, op: LoadOp) -> int:
        start = time.perf_counter()
        problem = problem_of(op, self._shape)
        if problem is not None:
            raise TransferError(problem)
        chunks = chunks_of(op, self._shape)
        good = fetch(self.connect(), op, self._shape)
        took = time.perf_counter() - start
        self._answers.loads_took(chunks * self._shape.nbytes, took)
        if self._log_timing:
            self._log.info("maru.load", request=op.request_id, chunks=chunks, ms=round(took * 1000, 2))
        return good

    def wait_layer(self, name: str) -> None:
        """The forward pass is about to read this layer's KV."""
        if self._loader is None:
            return
        layer = self._hooks.called(name)
        if layer is not None:
            self._wait_layer(layer)

    def _wait_layer(self, layer: int) -> None:
        if self._loader is None or self._loader.in_use.is_empty:
            return
        start = time.monotonic()
        self._loader.wait_layer(layer)
        self._rhythm.waited(time.monotonic() - start)

    def _failed_late(self) -> None:
        self._has_failed_late = True

    # -- stores ----------------------------------------------------------------------------------------------------

    def store(self, metadata: MaruConnectorMetadata) -> None:
        """Store, or have stored, the chunks that this step completed; failures skip, never raise."""
        self.settle()
        if self._settles_later:
            return
        now = [op for op in metadata.stores if not op.asynchronous]
        if not self._store_announced():
            self._answers.unsaved(now)
        elif now:
            self._store(now, metadata.weights_epoch)

    def _store_announced(self) -> bool:
        """Hand over a step's asynchronous stores. False, and they are not: it may have computed on a failed load."""
        failed, self._load_failed = self._load_failed, False
        if self._has_failed_late:
            self._has_failed_late, self._distrusted_steps = False, _STEPS_IN_FLIGHT
        if self._distrusted_steps:
            self._distrusted_steps -= 1
            failed = True
        if failed:
            announced, self._announced = self._announced, []
            self._not_stored(announced, LOAD_FAILED)
        elif self._announced:
            self._submit_announced()
        return not failed

    def settle(self) -> None:
        """The forward pass is queued: find out whether the loads that it may have read have failed.

        Where vLLM's thread would hold up the tokens of the step before, which are there before the loads are, and does
        what it can of the next step meanwhile, that finds out, before it queues anything.
        """
        if self._loader is None or not self.waits_by_layer:
            return
        if self._rhythm.measures:
            self._rhythm.end()
        arriving, self._read_early = self._read_early, []
        if self._hooks.end_step():
            self._log.error(
                "maru.no_layer_hooks",
                requests=[op.request_id for op in arriving],
                effect="what was loaded while this step ran counts as failed; requests wait for all layers from now on",
            )
            self._distrust(arriving)
        if self._is_unsettled and not self._settles_later:
            self._learn_outcomes()

    def _learn_outcomes(self) -> None:
        self._is_unsettled = False
        undefined = self._loader.settle() if self._loader is not None else []
        if undefined:
            self._distrust(undefined)

    def _distrust(self, read: Sequence[LoadOp]) -> None:
        """The step read these before they were there, if they ever will be."""
        self._failed_late()
        for op in read:
            self._answers.blocks_failed(failed_blocks(op, self._shape, 0))

    def _submit_announced(self) -> None:
        announced, self._announced = self._announced, []
        if self._saver is not None:
            self._saver.submit(announced, self._weights_epoch)
            return
        for op in announced:
            kept, reason = self._store([op], self._weights_epoch)
            self._answers.store_ended(op, kept, reason)

    def _not_stored(self, ops: Sequence[StoreOp], reason: str) -> None:
        for op in ops:
            self._answers.dropped(reason, len(op.keys))
            self._answers.store_ended(op, 0, reason)

    def _store(self, ops: Sequence[StoreOp], weights_epoch: int) -> tuple[int, str]:
        start = time.perf_counter()
        items = items_of(ops)
        kept, reason = 0, ERROR
        try:
            if self._patience.allows(start):
                kept, reason = write(self.connect(), items, self._shape, weights_epoch, timeout=self._patience.seconds)
                if reason != UNAVAILABLE:
                    self._patience.answered()
            else:
                reason = UNAVAILABLE
        except Unavailable:
            reason = UNAVAILABLE
            self._patience.failed(start, time.perf_counter())
        except BaseException as error:  # noqa: BLE001 - a store that fails is a store less
            pass_interrupt(error)
            kind = type(error).__name__
            if kind not in self._told:
                self._told.add(kind)
                self._log.warning("maru.store_skipped", error=show(error), kind=kind, told="once per kind")
        self._answers.dropped(reason, len(items) - kept)
        if self._log_timing:
            took = round((time.perf_counter() - start) * 1000, 2)
            self._log.info("maru.store", objects=len(items), kept=kept, ms=took)
        return kept, reason

    # -- the step ends ---------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Before answers are taken: everything that the step has read is known, and what is late is answered."""
        self.settle()
        for thread in (self._loader, self._saver):
            if thread is not None:
                thread.poll()
        if self._loader is not None and self.waits_by_layer:
            self._loader.release(self._computing, self._rhythm.outlook)

    def told(self, received: Collection[str]) -> None:
        """These were reported as received with the end of the step."""
        self._rhythm.told(received, self._computing)

    def close(self) -> None:
        """End the threads, in bounded time, unmap, and end the session."""
        ended = [thread.close() for thread in (self._loader, self._saver) if thread is not None]
        link, self._link = self._link, None
        if link is None:
            return
        if all(ended):
            link.close()
        else:
            # A copy has not returned: what it touches stays mapped and ours until the process ends.
            self._log.error("maru.thread_stuck", effect="session and memory are kept until the process ends")
            link.abandon()
