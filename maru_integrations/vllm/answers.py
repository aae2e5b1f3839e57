"""What a worker has done and not yet told: every load and store it was given is answered once, whoever did it."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from attrs import define, field

from maru_integrations.vllm.metadata import (
    LoadOp,
    LoadResult,
    MaruWorkerMetadata,
    StoreOp,
    StoreResult,
    least,
    total,
)


@define
class _Report:
    """What one step tells. All of one load is in the same report: its answer, its request, its failed blocks."""

    message: MaruWorkerMetadata = field(factory=MaruWorkerMetadata)
    received: set[str] = field(factory=set)
    failed_blocks: set[int] = field(factory=set)

    def joined(self, later: _Report) -> _Report:
        """This one, which nobody has asked for, and the next step's; what was received is told by each step alone."""
        first, second = self.message, later.message
        message = MaruWorkerMetadata(
            first.loads + second.loads,
            least(first.unsaved, second.unsaved),
            first.stored + second.stored,
            first.load_bytes + second.load_bytes,
            first.load_seconds + second.load_seconds,
            total(first.dropped, second.dropped),
        )
        return _Report(message, later.received, self.failed_blocks | later.failed_blocks)


class Answers:
    """Collects answers until vLLM asks for them; each ``take_*`` hands out and forgets. Thread-safe.

    :meth:`take_finished` draws the line under a step: what other threads add after it belongs to the next one, so that
    a request is never reported apart from the blocks that it did not get.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: ``None`` while there is nothing to tell, as in most steps.
        self._next: _Report | None = None
        self._taken: _Report | None = None
        #: Requests that were reported as received while their load goes on.
        self._released: set[int] = set()
        #: Asynchronous stores that may read their blocks, by request.
        self._storing: dict[str, set[int]] = {}
        self._held: set[str] = set()

    def _report(self) -> _Report:
        if self._next is None:
            self._next = _Report()
        return self._next

    # -- told by whoever does the work ---------------------------------------------------------------------------

    def load_released(self, op: LoadOp) -> None:
        """Enough of a parked load is there for its request to go on; its answer comes later."""
        with self._lock:
            if op.load_id not in self._released:
                self._released.add(op.load_id)
                self._report().received.add(op.request_id)

    def load_ended(self, op: LoadOp, good: int, failed_blocks: Sequence[int], reason: str = "") -> None:
        """``good`` objects from the front arrived; ``failed_blocks`` hold undefined KV. See :class:`LoadResult`."""
        with self._lock:
            report = self._report()
            report.message.loads.append(LoadResult(op.load_id, good, reason))
            if op.parked and op.load_id not in self._released:
                report.received.add(op.request_id)
            self._released.discard(op.load_id)
            report.failed_blocks.update(failed_blocks)

    def blocks_failed(self, blocks: Iterable[int]) -> None:
        """These hold undefined KV, or a step may have read them before they were filled; their load was answered."""
        with self._lock:
            self._report().failed_blocks.update(blocks)

    def loads_took(self, nbytes: int, seconds: float) -> None:
        """Loads moved ``nbytes`` in ``seconds`` of work."""
        with self._lock:
            message = self._report().message
            message.load_bytes += nbytes
            message.load_seconds += seconds

    def unsaved(self, ops: Sequence[StoreOp]) -> None:
        """These chunks were to be stored in this step and could be later: plan them again."""
        with self._lock:
            message = self._report().message
            for op in ops:
                message.unsaved = least(message.unsaved, {op.request_id: op.chunks[0]})

    def store_queued(self, op: StoreOp) -> None:
        """An asynchronous store was taken over: its request is not sent before its blocks were read."""
        with self._lock:
            self._storing.setdefault(op.request_id, set()).add(op.store_id)

    def store_read(self, op: StoreOp) -> None:
        """An asynchronous store reads its blocks no more; what became of it is told later."""
        with self._lock:
            self._has_read(op)

    def store_ended(self, op: StoreOp, kept: int, reason: str = "") -> None:
        """An asynchronous store, queued or not, is over; see :class:`StoreResult`.

        It reads its blocks no more, or nothing that it reads from now on will be committed.
        """
        with self._lock:
            self._has_read(op)
            self._report().message.stored.append(StoreResult(op.store_id, kept, reason))

    def _has_read(self, op: StoreOp) -> None:
        stores = self._storing.get(op.request_id)
        if stores is not None:
            stores.discard(op.store_id)
            if not stores:
                del self._storing[op.request_id]

    def dropped(self, reason: str, count: int) -> None:
        """``count`` objects were not stored."""
        if count:
            with self._lock:
                message = self._report().message
                message.dropped = total(message.dropped, {reason: count})

    def hold(self, request_ids: Iterable[str]) -> None:
        """vLLM keeps the blocks of these until they are reported as sent."""
        with self._lock:
            self._held.update(request_ids)

    # -- asked once per step, in this order ----------------------------------------------------------------------

    def take_finished(self) -> tuple[set[str], set[str]]:
        """Held requests whose blocks no store needs, and parked ones whose load has ended, well or not."""
        with self._lock:
            sent = {name for name in self._held if name not in self._storing}
            self._held -= sent
            report, self._next = self._next, None
            if report is None:
                return sent, set()
            # What an earlier step was not asked for is not lost.
            earlier = self._taken
            self._taken = report if earlier is None else earlier.joined(report)
            return sent, report.received

    def take_failed_blocks(self) -> set[int]:
        """Blocks that a load was to fill and did not."""
        with self._lock:
            if self._taken is None:
                return set()
            failed, self._taken.failed_blocks = self._taken.failed_blocks, set()
            return failed

    def take_metadata(self) -> MaruWorkerMetadata | None:
        """Answers for the scheduler side; ``None`` when there are none."""
        with self._lock:
            if self._taken is None:
                return None
            message, self._taken.message = self._taken.message, MaruWorkerMetadata()
            if not self._taken.failed_blocks:
                self._taken = None
            return message if message != MaruWorkerMetadata() else None
