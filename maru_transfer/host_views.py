"""Copies between pages and objects that both lie in host memory, through NumPy views.

NumPy, not torch: torch splits a copy over all threads that it was told to use, and with more of them than cores one
strided copy takes tens of times longer. NumPy copies on the calling thread and lets go of the interpreter lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from attrs import evolve

from maru_core.geometry import ChunkCopy, ObjectLayout, PagedLayout, PlaneStrides
from maru_transfer.plan import Piece
from maru_transfer.tensors import LayerGroup, single_layers

Array = np.ndarray[Any, Any]


class NumpyPages:
    """Pages of one engine rank in host memory. Thread-safe."""

    def __init__(self, groups: Sequence[LayerGroup], paged: PagedLayout, stored: ObjectLayout) -> None:
        """``groups``: of :func:`maru_transfer.tensors.group_layers`, for the same layout."""
        self._stored = stored
        self._groups = _with_memory(groups)
        self._single = _with_memory(single_layers(groups))
        self._boxes = [_Box(paged, stored, plane) for plane in range(len(paged.planes))]

    def work(
        self, store: bool, pieces: Sequence[Piece], copies: Sequence[ChunkCopy], layer: int | None = None
    ) -> NumpyWork:
        """The pieces that :func:`maru_transfer.plan.plan_pieces` made of ``copies``; with ``layer`` only that one."""
        views = self._tasks(pieces, copies) if layer is None else self._layer_tasks(layer, pieces, copies)
        tasks = deque((stored, pages) if store else (pages, stored) for pages, stored in views)
        return NumpyWork(tasks)

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


class NumpyWork:
    """What threads copy together, each by one call of :meth:`run`. Implements :class:`maru_transfer.host_copy.Work`."""

    def __init__(self, tasks: deque[tuple[Array, Array]]) -> None:
        """``tasks``: (target, source), views of equal shape and type."""
        self._tasks = tasks
        self.nbytes = sum(target.nbytes for target, _ in tasks)
        self.parts = len(tasks)

    def run(self) -> None:
        """Copy what no other thread has taken: whoever has a core to itself takes more."""
        while self._tasks:
            try:
                target, source = self._tasks.popleft()
            except IndexError:  # another thread took the last one
                return
            _move(target, source)

    def stop(self) -> None:
        """Leave what nobody has begun."""
        self._tasks.clear()


def _move(target: Array, source: Array) -> None:
    np.copyto(target, source)


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


def _with_memory(groups: Sequence[LayerGroup]) -> list[tuple[LayerGroup, Array]]:
    return [(group, _bytes_of(group.storage)) for group in groups]


def _bytes_of(storage: torch.UntypedStorage) -> Array:
    memory: Array = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    return memory
