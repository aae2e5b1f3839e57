"""A transfer that is late on purpose, moves bytes one layer after the other, and fails when it is told to.

An implementation of its own, token by token: what the connector hands it is judged by what a reader of the pages finds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from attrs import define, field

from maru_core.brake import Brake, Pull
from maru_core.errors import TransferError
from maru_core.geometry import ChunkCopy, ObjectLayout, PagedLayout
from maru_integrations.vllm.streams import HostLane
from tests.waiting import NEVER


@define(eq=False)
class Pace:
    """How the transfers of one engine behave; shared, so that a test can turn the knobs while they work.

    ``pause``: called before each layer of each copy, to sleep or to wait. ``failures``: errors that the next calls
    raise after half of the work, loads by layer at layer ``at`` (``None``: the last), when the slots of that and all
    later layers hold garbage. ``whole``: other loads fail, too. ``layered``: those by layer do. ``calls``: what was
    begun and what ended, in order.
    """

    pause: Callable[[], None] = lambda: None
    failures: list[BaseException] = field(factory=list)
    at: int | None = None
    whole: bool = True
    layered: bool = True
    calls: list[str] = field(factory=list)


class QueueingLane(HostLane):
    """As a device's lane, where what was ordered behind a copy may run although that failed."""

    queues = True


@define(eq=False)
class SlowTransfer:
    """Pages are ``[2, blocks, block_size, heads, head_size]`` tensors, one for each layer."""

    caches: Sequence[torch.Tensor]
    paged: PagedLayout
    stored: ObjectLayout
    pace: Pace
    closed: bool = False
    _busy: threading.Lock = field(factory=threading.Lock)

    def load(self, block_ids: Sequence[int], copies: Sequence[ChunkCopy]) -> None:
        self._all("load", block_ids, copies, store=False)

    def store(self, block_ids: Sequence[int], copies: Sequence[ChunkCopy]) -> None:
        self._all("store", block_ids, copies, store=True)

    def begin_load(self, block_ids: Sequence[int], copies: Sequence[ChunkCopy]) -> SlowLoad:
        assert not self.closed
        return SlowLoad(self, list(block_ids), list(copies), self._failure() if self.pace.layered else None)

    def close(self) -> None:
        assert not self._busy.locked(), "closed while it copies"
        self.closed = True

    def _all(self, what: str, block_ids: Sequence[int], copies: Sequence[ChunkCopy], *, store: bool) -> None:
        with self.working(what) as failure:
            for layer in range(len(self.caches)):
                self.pace.pause()
                if failure is not None and layer == len(self.caches) // 2:
                    raise failure
                self.move(block_ids, copies, layer, store=store)

    @contextmanager
    def working(self, what: str) -> Iterator[BaseException | None]:
        """Wraps a call; yields what it shall raise."""
        assert not self.closed
        assert self._busy.acquire(blocking=False), "a transfer is used by one thread at a time"
        self.pace.calls.append(f"{what} begins")
        try:
            yield self._failure() if self.pace.whole or what == "store" else None
        finally:
            self._busy.release()
            self.pace.calls.append(f"{what} ends")

    def _failure(self) -> BaseException | None:
        return self.pace.failures.pop(0) if self.pace.failures else None

    def spoil(self, block_ids: Sequence[int], copies: Sequence[ChunkCopy], layers: range) -> None:
        """Garbage in what these copies were to write of these layers."""
        size = self.paged.block_size
        for copy in copies:
            for layer in layers:
                for token in range(copy.first, copy.last):
                    self.caches[layer][:, block_ids[token // size], token % size] = -1

    def move(self, block_ids: Sequence[int], copies: Sequence[ChunkCopy], layer: int, *, store: bool) -> None:
        """One layer of every copy."""
        size, layout = self.paged.block_size, self.stored
        shape = (layout.num_planes, layout.num_layers, layout.chunk_tokens, layout.hidden)
        for copy in copies:
            if copy.layer not in (None, layer):
                continue
            whole = torch.frombuffer(copy.buffer, dtype=torch.int16).view(shape)
            stored = whole[:, 0 if copy.layer is not None else layer]
            for token in range(copy.first, copy.last):
                slot = self.caches[layer][:, block_ids[token // size], token % size]
                row = stored[:, token - copy.chunk * layout.chunk_tokens]
                if store:
                    row.copy_(slot.reshape(2, -1))
                else:
                    slot.copy_(row.view_as(slot))


class BrakedTransfer(SlowTransfer):
    """Implements PreparesLoads and PreparesStores, too: looks at the brake before every layer of every copy.

    And PreparesLayeredLoads.
    """

    def prepare_load(self, block_ids: Sequence[int], copies: Sequence[ChunkCopy]) -> BrakedCopies:
        return BrakedCopies(self, list(block_ids), list(copies), store=False)

    def prepare_store(self, block_ids: Sequence[int], copies: Sequence[ChunkCopy]) -> BrakedCopies:
        return BrakedCopies(self, list(block_ids), list(copies), store=True)

    def prepare_layers(self, block_ids: Sequence[int], copies: Sequence[ChunkCopy]) -> PlannedLayers:
        return PlannedLayers(self, list(block_ids), list(copies))


@define(eq=False)
class PlannedLayers:
    """Implements PreparedLayeredLoad; what is done twice, or after its end, is noticed."""

    transfer: SlowTransfer
    blocks: list[int]
    copies: list[ChunkCopy]
    over: bool = False

    def begin(self) -> SlowLoad:
        assert not self.over, "begun or closed before"
        self.over = True
        return self.transfer.begin_load(self.blocks, self.copies)

    def close(self) -> None:
        self.over = True


@define(eq=False)
class BrakedCopies:
    """Implements PreparedCopies: one copy after the other, once."""

    transfer: BrakedTransfer
    blocks: list[int]
    copies: list[ChunkCopy]
    store: bool = field(kw_only=True)
    closed: bool = False

    def run(self, brake: Brake, least: int) -> int:
        assert not self.closed
        with self.transfer.working("store" if self.store else "load") as failure:
            for done, copy in enumerate(self.copies):
                for layer in range(len(self.transfer.caches)):
                    pull = brake.pull
                    if pull is Pull.STOP or (pull is Pull.YIELD and done >= least):
                        return done
                    self.transfer.pace.pause()
                    if failure is not None and done == len(self.copies) // 2:
                        raise failure
                    self.transfer.move(self.blocks, [copy], layer, store=self.store)
        return len(self.copies)

    def close(self) -> None:
        self.closed = True


class SlowLoad:
    """Implements maru_core.contracts.LayeredLoad with a thread of its own."""

    def __init__(
        self, transfer: SlowTransfer, blocks: list[int], copies: list[ChunkCopy], failure: BaseException | None
    ) -> None:
        self._transfer = transfer
        self._blocks = blocks
        self._copies = copies
        self._failure = failure
        self._done = 0
        self._error: str | None = None
        self._cancelled = False
        self._turn = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="slow-load", daemon=True)
        self._thread.start()

    def layers_done(self) -> int:
        with self._turn:
            self._raise()
            return self._done

    def wait_layer(self, layer: int) -> None:
        with self._turn:
            while self._done <= layer:
                self._raise()
                self._turn.wait()

    def finish(self) -> None:
        self._thread.join()
        with self._turn:
            if self._done < len(self._transfer.caches):
                self._raise()

    def cancel(self) -> None:
        self._cancelled = True

    def _raise(self) -> None:
        if self._error is not None:
            raise TransferError(self._error)

    def _run(self) -> None:
        transfer = self._transfer
        with transfer._busy:
            transfer.pace.calls.append("layers begin")
            layers = len(transfer.caches)
            last = layers - 1 if transfer.pace.at is None else transfer.pace.at
            for layer in range(layers):
                transfer.pace.pause()
                failed = self._failure is not None and layer == last
                if failed:
                    transfer.spoil(self._blocks, self._copies, range(layer, layers))
                if self._cancelled or failed:
                    with self._turn:
                        self._error = str(self._failure) if failed else "cancelled"
                        self._turn.notify_all()
                    break
                transfer.move(self._blocks, self._copies, layer, store=False)
                with self._turn:
                    self._done = layer + 1
                    self._turn.notify_all()
            transfer.pace.calls.append("layers end")


class Permits:
    """A pause that lets so many layers pass, and the others when it is told to. ``begun``: those that came to it."""

    def __init__(self, layers: int) -> None:
        self.begun = 0
        self._permits = threading.Semaphore(layers)

    def __call__(self) -> None:
        self.begun += 1
        assert self._permits.acquire(timeout=NEVER)

    def let(self, layers: int) -> None:
        """So many more."""
        self._permits.release(layers)


def sleeping(seconds: Callable[[], float]) -> Callable[[], None]:
    """A pause that sleeps for what ``seconds`` says."""
    return lambda: time.sleep(seconds())
