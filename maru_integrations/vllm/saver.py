"""The thread that stores complete prompts beside the steps that go on."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from functools import partial

from attrs import frozen

from maru_core import logs
from maru_core.brake import Brake
from maru_core.contracts import Transfer
from maru_core.errors import TransferError, Unavailable
from maru_core.foreign import show
from maru_core.geometry import ChunkCopy
from maru_integrations.vllm.answers import Answers
from maru_integrations.vllm.copies import ChunkShape, part_of
from maru_integrations.vllm.helper import Helper
from maru_integrations.vllm.loadqueue import cut
from maru_integrations.vllm.metadata import ERROR, QUEUE_FULL, UNAVAILABLE, StoreOp
from maru_integrations.vllm.moving import Link, said_to_move, write
from maru_integrations.vllm.savequeue import Saved, SaveQueue, StoreJob
from maru_integrations.vllm.streams import Lane, on_lane
from maru_transfer.prepared import prepare_store


@frozen
class SaverSettings:
    """Sizes in bytes. ``limit_bytes`` may wait behind the first store, which holds blocks."""

    limit_bytes: int
    #: A larger store is made in pieces: each has one call to reserve, one to copy and one to commit, after which others
    #: find it. Few returns to Python matter more than an early beginning: a GPU's bus takes 40 ms for so much.
    piece_bytes: int = 2 << 30
    #: Of one call of a transfer that cannot be told to stop.
    part_bytes: int = 256 << 20
    #: Longest wait for a copy that was told to stop, in seconds; then what it read is thrown away.
    drain_seconds: float = 1.0
    #: After which a piece is told to stop, in seconds; 0: never.
    timeout: float = 30.0
    log_timing: bool = False


class Saver:
    """Owns the link's storing transfer. All methods are for vLLM's thread; none but ``preempt`` and ``close`` blocks.

    Invariants: every store that was submitted is answered once; its blocks are said to be read, or it is answered, only
    when nothing that is read from them later will be committed; nothing is committed that was read from blocks after
    their request had lost them. A call that does not return has the thread and its transfer to itself until it does:
    meanwhile nothing is stored.
    """

    def __init__(
        self,
        link: Callable[[], Link],
        shape: ChunkShape,
        answers: Answers,
        lane: Lane,
        settings: SaverSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``link`` connects if need be and raises MaruError."""
        self._link = link
        self._shape = shape
        self._answers = answers
        self._lane = lane
        self._settings = settings
        self._clock = clock
        #: Objects that a transfer that cannot be told to stop copies in one call.
        self._part = max(1, settings.part_bytes // max(1, shape.nbytes)) * shape.objects
        self._log = logs.get_logger(__name__)
        self._ready = threading.Condition()
        self._queue = SaveQueue(settings.limit_bytes, settings.timeout or math.inf, settings.drain_seconds)
        #: Of the copy that is under way; set from what the queue says whenever that may have changed.
        self._brake = Brake()
        self._closing = False
        self._helper = Helper("maru-store", self._run)
        self._told: set[str] = set()
        #: What the thread moves bytes with, for people.
        self._engine = ""

    # -- on vLLM's thread ------------------------------------------------------------------------------------------

    def submit(self, ops: Sequence[StoreOp], weights_epoch: int) -> None:
        """Store these when their turn comes, after what the calling thread's stream was told so far."""
        if not ops:
            return
        try:
            fence = self._lane.fence()
        except Exception as error:  # noqa: BLE001 - the device's; whatever it is, these stores failed
            self._tell_once(error)
            self._deliver([Saved(op, 0, ERROR) for op in ops])
            return
        for op in ops:
            nbytes = -(-len(op.keys) * self._shape.nbytes // self._shape.objects)
            cuts = cut(len(op.keys) // self._shape.objects, self._shape, self._settings.piece_bytes)
            if not cuts or cuts[-1] != len(op.keys) or len(op.parents) != len(op.keys):
                self._deliver([Saved(op, 0, ERROR)])
                continue
            with self._ready:
                ended = [] if not self._closing else [Saved(op, 0, ERROR)]
                ended = ended or self._queue.add(op, fence, weights_epoch, cuts, nbytes)
                waiting = self._queue.waiting_bytes
                self._ready.notify_all()
            if ended and ended[0].reason == QUEUE_FULL:
                self._tell_of_pressure(op, nbytes, waiting)
            self._deliver(ended)
        self._revive()

    def preempt(self, request_ids: Collection[str]) -> None:
        """Blocks of these requests are somebody else's when this returns: what waits is dropped, copies are stopped.

        What was copied by then is stored. A copy that goes on for too long is not: what it reads is not committed.
        """
        if not request_ids:
            return
        deadline = time.monotonic() + self._settings.drain_seconds
        with self._ready:
            ended = self._queue.cancel(request_ids)
            self._brake.pull = self._queue.pull()
            while self._queue.copying(request_ids):
                left = deadline - time.monotonic()
                if left <= 0:
                    self._queue.void(request_ids)
                    break
                self._ready.wait(left)
        self._deliver(ended)

    def poll(self) -> None:
        """Answer for what is stuck, and for what has nobody left to work on it."""
        if self._queue.is_empty:
            return  # only this thread adds stores, so there are none
        now = self._clock()
        with self._ready:
            stuck = None
            if self._helper.has_died:
                ended = self._queue.end_all(ERROR)
            else:
                ended = self._queue.look(now)
                stuck = self._queue.stuck if ended else None
            self._brake.pull = self._queue.pull()
        if stuck is not None:
            self._tell_stuck(stuck, now, len(ended))
        self._deliver(ended)

    def close(self, timeout: float = 2.0) -> bool:
        """End the thread; whether it ended in time. What waits, and what is left of a copy, is not stored."""
        with self._ready:
            self._closing = True
            ended = self._queue.cancel({job.op.request_id for job in self._queue.jobs})
            self._brake.pull = self._queue.pull()
            self._ready.notify_all()
        self._deliver(ended)
        return self._helper.join(timeout)

    def _revive(self) -> None:
        ended: list[Saved] = []
        with self._ready:
            if self._closing or not self._queue.jobs:
                return
            try:
                self._helper.start()
            except RuntimeError as error:  # the next store tries again
                self._tell_once(error)
                ended = self._queue.end_all(ERROR)
        self._deliver(ended)

    # -- on the saver's thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        with self._lane.entered():
            while True:
                with self._ready:
                    while not self._queue.jobs and not self._closing:
                        self._ready.wait()
                    if self._closing:
                        return
                    job = self._queue.take(self._clock())
                if job is not None:
                    self._work(job)

    def _work(self, job: StoreJob) -> None:
        start = time.perf_counter()
        piece = job.piece
        kept = 0
        try:
            link = self._link()
            self._engine = link.name
            kept, reason = write(
                link,
                part_of(job.op, self._shape, piece),
                self._shape,
                job.weights_epoch,
                partial(self._copy, job),
            )
        except Unavailable:
            reason = UNAVAILABLE
        except BaseException as error:  # noqa: BLE001 - whatever it is, this store failed and the next ones go on
            reason = ERROR
            self._tell_once(error)
        with self._ready:
            was_stuck = self._queue.stuck is job
            ended = self._queue.moved(job, kept, reason)
            self._brake.pull = self._queue.pull()
        if was_stuck:
            seconds = round(self._clock() - job.began, 2)
            self._log.info("maru.store_returned", engine=self._engine, seconds=seconds, effect="stores go on")
        if self._settings.log_timing:
            took = round((time.perf_counter() - start) * 1000, 2)
            self._log.info("maru.store", request=job.op.request_id, objects=len(piece), kept=kept, ms=took)
        self._deliver(ended)

    def _copy(self, job: StoreJob, transfer: Transfer, blocks: Sequence[int], copies: Sequence[ChunkCopy]) -> int:
        """See :data:`maru_integrations.vllm.moving.Copier`."""
        with closing(prepare_store(transfer, blocks, copies)) as store:
            begin, end = partial(self._begin_copy, job), partial(self._end_copy, job)
            with on_lane(self._lane, job.fence, begin, end) as allowed:
                if not allowed:
                    return 0
                moved = said_to_move(self._engine, store.run(self._brake, self._part), len(copies))
        if moved < len(copies) and not job.cancelled:
            made = f"{moved} of {len(copies)} copies"
            raise TransferError(f"{self._engine} says that it moved {made}, and was not told to stop")
        if job.is_last_piece:
            self._answers.store_read(job.op)
        return 0 if job.void else moved

    def _begin_copy(self, job: StoreJob) -> bool:
        with self._ready:
            allowed = self._queue.begin_copy(job)
            self._brake.pull = self._queue.pull()
            return allowed

    def _end_copy(self, job: StoreJob) -> None:
        with self._ready:
            self._queue.end_copy(job)
            self._ready.notify_all()

    # -- on either ---------------------------------------------------------------------------------------------------

    def _tell_once(self, error: BaseException) -> None:
        kind = type(error).__name__
        if kind not in self._told:
            self._told.add(kind)
            self._log.warning("maru.store_skipped", error=show(error), kind=kind, told="once per kind")

    def _tell_stuck(self, job: StoreJob, now: float, dropped: int) -> None:
        self._log.error(
            "maru.store_stuck",
            engine=self._engine,
            request=job.op.request_id,
            seconds=round(now - job.began, 2),
            maru_store_timeout=self._settings.timeout,
            stores_dropped=dropped,
            effect="a call was told to stop and has not returned: its blocks are given back, what it copies is thrown "
            "away, its room in the pool stays reserved, and nothing is stored until it returns",
            remedy="look at the device and at the memory of the pool; if it does not return, restart this engine, with "
            "another maru_transfer_engine or, where it is slow and not stuck, a longer maru_store_timeout",
        )

    def _tell_of_pressure(self, op: StoreOp, nbytes: int, waiting: int) -> None:
        if QUEUE_FULL not in self._told:
            self._told.add(QUEUE_FULL)
            self._log.warning(
                "maru.store_dropped",
                request=op.request_id,
                bytes=nbytes,
                waiting_bytes=waiting,
                limit_bytes=self._settings.limit_bytes,
                reason="stores are slower than prefill, or the KV cache is small for its prompts",
                told="once; each is counted",
            )

    def _deliver(self, ended: Sequence[Saved]) -> None:
        for end in ended:
            self._answers.dropped(end.reason, len(end.op.keys) - end.kept)
            self._answers.store_ended(end.op, end.kept, end.reason)
