"""Copies between pages and objects that both lie in host memory, through NumPy views.

NumPy, not torch: torch splits a copy over all threads that it was told to use, and with more of them than cores one
strided copy takes tens of times longer. NumPy copies on the calling thread and lets go of the interpreter lock, so a
few threads of our own share the work whatever the engine set for torch.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from attrs import evolve

from maru_core.contracts import LayeredLoad
from maru_core.errors import TransferError
from maru_core.geometry import ChunkCopy, ObjectLayout, PagedLayout, PlaneStrides
from maru_transfer.layered import Arrival, Arrived, LoadThread, SteppedLoad
from maru_transfer.plan import Piece, plan_pieces
from maru_transfer.tensors import LayerGroup, group_layers, single_layers

Array = np.ndarray[Any, Any]

#: Below this many bytes per transfer a second thread costs more than it brings.
MIN_BYTES_PER_THREAD = 1 << 20

#: Copies are bound by memory bandwidth, which a few cores exhaust.
MAX_THREADS = 4


class HostTransfer:
    """Implements :class:`maru_core.contracts.Transfer` and ``LoadsByLayer`` for KV tensors in host memory."""

    def __init__(
        self, layers: Sequence[torch.Tensor], paged: PagedLayout, stored: ObjectLayout, *, threads: int | None = None
    ) -> None:
        self._paged = paged
        self._stored = stored
        groups = group_layers(layers, paged)
        self._groups = _with_memory(groups)
        self._single = _with_memory(single_layers(groups))
        self._boxes = [_Box(paged, stored, plane) for plane in range(len(paged.planes))]
        self._threads = threads
        self._pool: ThreadPoolExecutor | None = None
        # It copies, too: whichever core its starter was pinned to.
        self._layers = LoadThread(lambda: _roam(process_cores()))

    def load(self, block_ids: Sequence[int], copies: Sequence[ChunkCopy]) -> None:
        """Objects to pages."""
        self._layers.settle()
        pieces = plan_pieces(self._paged, self._stored, block_ids, copies)
        self._run(_load, self._tasks(pieces, copies), self._bytes(pieces))

    def begin_load(self, block_ids: Sequence[int], copies: Sequence[ChunkCopy]) -> LayeredLoad:
        """Objects to pages, one layer after another."""
        pieces = plan_pieces(self._paged, self._stored, block_ids, copies)
        if not self._groups:
            raise TransferError("this transfer is closed")
        load = SteppedLoad(self._paged.num_layers, lambda layer: self._load_layer(layer, pieces, copies))
        self._layers.start(load)
        return load

    def store(self, block_ids: Sequence[int], copies: Sequence[ChunkCopy]) -> None:
        """Pages to objects."""
        self._layers.settle()
        pieces = plan_pieces(self._paged, self._stored, block_ids, copies)
        for number, copy in enumerate(copies):
            if copy.buffer.readonly:
                raise TransferError(f"copy {number} (chunk {copy.chunk}) stores into a read-only buffer")
        self._run(_store, self._tasks(pieces, copies), self._bytes(pieces))

    def close(self) -> None:
        """End the copying threads and let go of the tensors' memory; layered loads are cancelled."""
        self._layers.close()
        if self._pool:
            self._pool.shutdown()
            self._pool = None
        self._groups = self._single = []

    def _load_layer(self, layer: int, pieces: Sequence[Piece], copies: Sequence[ChunkCopy]) -> Arrival:
        parts = [piece for piece in pieces if piece.layer in (None, layer)]
        self._run(_load, self._layer_tasks(layer, parts, copies), self._bytes(parts) // self._stored.num_layers)
        return Arrived()

    def _bytes(self, pieces: Sequence[Piece]) -> int:
        return sum(piece.count for piece in pieces) * self._stored.nbytes // self._stored.chunk_tokens

    def _run(self, move: Callable[[Array, Array], None], work: Iterable[tuple[Array, Array]], nbytes: int) -> None:
        if not self._groups:
            raise TransferError("this transfer is closed")
        tasks = deque(work)
        pool, threads = self._copiers()
        threads = min(threads, nbytes // MIN_BYTES_PER_THREAD, len(tasks))
        if threads < 2:
            _move_all(move, tasks)
            return
        shares = [pool.submit(_move_all, move, tasks) for _ in range(1, threads)]
        try:
            _move_all(move, tasks)
        finally:
            # Also after an error: no thread may touch pages or buffers once this call has returned.
            tasks.clear()
            errors = [share.exception() for share in shares]
        for error in errors:
            if error:
                raise error

    def _copiers(self) -> tuple[ThreadPoolExecutor, int]:
        """The copying threads (none runs before it has work) and how many share a copy, the caller included."""
        if self._pool is None:
            # Not before the first copy: only then has OpenMP placed the threads that show which cores are ours.
            cores = process_cores()
            self._threads = self._threads or min(MAX_THREADS, len(cores))
            # A caller that is pinned to some cores has them: helpers beside it would take turns with it.
            elsewhere = cores - os.sched_getaffinity(0) or cores
            self._pool = ThreadPoolExecutor(
                max(1, self._threads - 1), "maru-copy", initializer=_roam, initargs=(elsewhere,)
            )
        return self._pool, self._threads or 1

    def _tasks(self, pieces: Sequence[Piece], copies: Sequence[ChunkCopy]) -> Iterator[tuple[Array, Array]]:
        """Pairs of (pages, object), views of equal shape and type; together they cover the pieces once."""
        for piece in pieces:
            for box in self._boxes:
                for group, memory in self._groups if piece.layer is None else (self._single[piece.layer],):
                    yield box.pages(memory, group, piece), box.object(copies[piece.copy].buffer, group, piece)

    def _layer_tasks(
        self, layer: int, pieces: Sequence[Piece], copies: Sequence[ChunkCopy]
    ) -> Iterator[tuple[Array, Array]]:
        """The same for one layer, whichever it is in an object."""
        group, memory = self._single[layer]
        group = evolve(group, first=layer % self._stored.num_layers)
        for piece in pieces:
            for box in self._boxes:
                yield box.pages(memory, group, piece), box.object(copies[piece.copy].buffer, group, piece)


class _Box:
    """Makes NumPy views of one plane: layers, tokens, then what is not contiguous on both sides."""

    def __init__(self, paged: PagedLayout, stored: ObjectLayout, plane: int) -> None:
        size = stored.element_size
        strides = paged.planes[plane]
        self._plane: PlaneStrides = strides
        self._size = size
        self._layer_bytes = stored.chunk_tokens * stored.hidden * size
        self._plane_offset = plane * stored.num_layers * self._layer_bytes
        self._token_bytes = stored.hidden * size
        # The widest item that is contiguous on both sides: a whole token, one head of it, or one element.
        if strides.dim != 1:
            item, shape = size, [(paged.num_heads, strides.head, paged.head_size), (paged.head_size, strides.dim, 1)]
        elif strides.head != paged.head_size and paged.num_heads > 1:
            item, shape = paged.head_size * size, [(paged.num_heads, strides.head, paged.head_size)]
        else:
            item, shape = stored.hidden * size, []
        self._dtype = np.dtype(f"u{item}") if item in (1, 2, 4, 8) else np.dtype((np.void, item))
        self._shape = tuple(count for count, _, _ in shape)
        self._device = tuple(device * size for _, device, _ in shape)
        self._host = tuple(host * size for _, _, host in shape)

    def pages(self, memory: Array, group: LayerGroup, piece: Piece) -> Array:
        plane = self._plane
        first = plane.offset + piece.block * plane.block + piece.slot * plane.token
        pages: Array = np.ndarray(
            (group.count, piece.count, *self._shape),
            self._dtype,
            memory.data,
            group.offset + first * self._size,
            (group.stride, plane.token * self._size, *self._device),
        )
        return pages

    def object(self, buffer: memoryview, group: LayerGroup, piece: Piece) -> Array:
        stored: Array = np.ndarray(
            (group.count, piece.count, *self._shape),
            self._dtype,
            buffer,
            self._plane_offset + group.first * self._layer_bytes + piece.token * self._token_bytes,
            (self._layer_bytes, self._token_bytes, *self._host),
        )
        return stored


def process_cores() -> set[int]:
    """Cores that any thread of this process may run on.

    An engine's OpenMP pins each thread to a core of its own, the calling one included, and threads that are started
    from a pinned thread would all share its core.
    """
    cores = os.sched_getaffinity(0)
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it ended since it was listed
            cores |= os.sched_getaffinity(int(thread))
    return cores


def _roam(cores: set[int]) -> None:
    with suppress(OSError):  # the cores were taken from this process; then the thread stays where it was started
        os.sched_setaffinity(0, cores)


def _with_memory(groups: Sequence[LayerGroup]) -> list[tuple[LayerGroup, Array]]:
    return [(group, _bytes_of(group.storage)) for group in groups]


def _bytes_of(storage: torch.UntypedStorage) -> Array:
    memory: Array = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    return memory


def _load(pages: Array, stored: Array) -> None:
    np.copyto(pages, stored)


def _store(pages: Array, stored: Array) -> None:
    np.copyto(stored, pages)


def _move_all(move: Callable[[Array, Array], None], tasks: deque[tuple[Array, Array]]) -> None:
    """Work off tasks together with other threads: whoever has a core to itself takes more of them."""
    while tasks:
        try:
            pages, stored = tasks.popleft()
        except IndexError:  # another thread took the last one
            return
        move(pages, stored)
