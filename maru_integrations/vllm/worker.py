"""Worker side of the connector: map the pool, move bytes, answer for every load."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from attrs import define

from maru_core import logs
from maru_core.client import Grants, MaruHandler
from maru_core.contracts import Transfer
from maru_core.errors import TransferError
from maru_core.geometry import ChunkCopy, ObjectLayout
from maru_core.protocol import CommitStatus
from maru_integrations.vllm.answers import Answers
from maru_integrations.vllm.metadata import LoadOp, MaruConnectorMetadata, StoreOp


@define
class Link:
    """What a worker needs to move bytes: its session, and its paged memory bound to a transfer engine."""

    handler: MaruHandler
    transfer: Transfer
    stored: ObjectLayout


class MaruWorker:
    """One per rank, on the worker's main thread.

    Invariants: every load of a step is answered once, as good only when its bytes were proven after the copy to be
    those that were granted; a step in which a load failed stores nothing.
    """

    def __init__(
        self,
        opener: Callable[[], Link],
        answers: Answers,
        *,
        block_size: int,
        chunk_tokens: int,
        objects_per_chunk: int = 1,
        log_timing: bool,
    ) -> None:
        self._opener = opener
        self._answers = answers
        self._block = block_size
        self._chunk = chunk_tokens
        self._objects = objects_per_chunk
        self._log_timing = log_timing
        self._log = logs.get_logger(__name__)
        self._link: Link | None = None
        self._load_failed = False
        self._told: set[str] = set()

    def connect(self) -> None:
        """Map the pool and bind the KV tensors; raises MaruError. Tried again by the first step that needs it."""
        if self._link is None:
            self._link = self._opener()

    # -- loads ---------------------------------------------------------------------------------------------------

    def load(self, loads: Sequence[LoadOp]) -> None:
        """Copy every object into its blocks; what could not be copied is reported, never raised."""
        for op in loads:
            good = 0
            try:
                good = self._load(op)
            except Exception as error:  # noqa: BLE001 - whatever it is, the scheduler must hear that this load failed
                self._log.warning("maru.load_error", request=op.request_id, error=str(error))
            self._answer(op, good)

    def _load(self, op: LoadOp) -> int:
        start = time.perf_counter()
        wanted = self._objects_of(op)
        if any(len(column) != wanted for column in (op.entries, op.generations, op.lengths, op.keys)):
            raise TransferError(f"request {op.request_id}: {len(op.entries)} objects, {wanted} are needed")
        self.connect()
        assert self._link is not None
        located = self._link.handler.adopt(op.epoch, op.entries, op.generations, op.lengths, op.keys)
        base = op.chunk * self._chunk
        copies = []
        for index in range(wanted):
            chunk, layer = self._place(index)
            first, last = max(op.first - base, chunk * self._chunk), min(op.last - base, (chunk + 1) * self._chunk)
            copies.append(ChunkCopy(chunk, first, last, located.view(index), layer))
        with located.reading():
            self._link.transfer.load(op.blocks, copies)
        good = next((index for index, fine in enumerate(located.check()) if not fine), wanted)
        if self._log_timing:
            self._log.info("maru.load", request=op.request_id, objects=wanted, ms=_since(start))
        return good

    def _answer(self, op: LoadOp, good: int) -> None:
        failed: Sequence[int] = ()
        if good < self._objects_of(op):
            self._load_failed = True
            base = op.chunk * self._chunk
            first_bad = max(op.first, base + self._place(good)[0] * self._chunk)
            failed = op.blocks[(first_bad - base) // self._block : -(-(op.last - base) // self._block)]
        self._answers.load_ended(op, good, failed)

    def _objects_of(self, op: LoadOp) -> int:
        """How many objects hold what a load asks for."""
        return (-(-op.last // self._chunk) - op.chunk) * self._objects

    def _place(self, index: int) -> tuple[int, int | None]:
        """The chunk that an object belongs to, counted from the first one, and the layer that it holds."""
        chunk, layer = divmod(index, self._objects)
        return chunk, layer if self._objects > 1 else None

    # -- stores --------------------------------------------------------------------------------------------------

    def store(self, metadata: MaruConnectorMetadata) -> None:
        """Copy the chunks that this step completed into the pool; failures skip, never raise."""
        failed, self._load_failed = self._load_failed, False
        if not metadata.stores:
            return
        if failed:
            self._answers.unsaved(metadata.stores)
            return
        try:
            self._store(metadata.stores, metadata.weights_epoch)
        except Exception as error:  # noqa: BLE001 - a store that fails is a store less
            kind = type(error).__name__
            if kind not in self._told:
                self._told.add(kind)
                self._log.warning("maru.store_skipped", error=str(error), kind=kind, told="once per kind")

    def _store(self, ops: Sequence[StoreOp], weights_epoch: int) -> None:
        start = time.perf_counter()
        self.connect()
        assert self._link is not None
        handler, stored = self._link.handler, self._link.stored
        if not handler.is_up:
            return
        keys = [key for op in ops for key in op.keys]
        parents = [parent for op in ops for parent in op.parents]
        per_chunk = self._chunk // self._block
        sources = [
            op.blocks[index * per_chunk : (index + 1) * per_chunk] for op in ops for index in range(len(op.chunks))
        ]
        grants = handler.reserve(keys, stored.nbytes, parents, weights_epoch=weights_epoch)
        new = grants.new
        if not new:
            return
        try:
            self._copy_out(handler, grants, new, sources)
            statuses = handler.commit(grants, new, checksums=True)
        except BaseException:
            handler.abort(grants, new)
            raise
        if self._log_timing:
            kept = sum(status == CommitStatus.OK for status in statuses)
            self._log.info("maru.store", objects=len(keys), new=len(new), committed=kept, ms=_since(start))

    def _copy_out(
        self, handler: MaruHandler, grants: Grants, new: Sequence[int], sources: Sequence[Sequence[int]]
    ) -> None:
        assert self._link is not None
        # Chunks with something to copy, in a row of their own.
        rows: dict[int, int] = {}
        copies = []
        for index in new:
            chunk, layer = self._place(index)
            row = rows.setdefault(chunk, len(rows))
            first, last = row * self._chunk, (row + 1) * self._chunk
            copies.append(ChunkCopy(row, first, last, handler.room(grants, index), layer))
        blocks = [block for chunk in rows for block in sources[chunk]]
        self._link.transfer.store(blocks, copies)

    def close(self) -> None:
        """Unmap and end the session."""
        if self._link is not None:
            self._link.transfer.close()
            self._link.handler.close()
            self._link = None


def _since(start: float) -> float:
    return round((time.perf_counter() - start) * 1000, 2)
