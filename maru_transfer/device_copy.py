"""Copies between pages on a device and objects in host memory, by torch, through a staging object on the device.

A staging object has the stored layout, so placement is strided copies within the device and what crosses to the host
is contiguous: one copy for a whole chunk, one per plane and layer for a part of it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby

import numpy as np
import torch

from maru_core.errors import TransferError
from maru_core.geometry import ChunkCopy, ObjectLayout, PagedLayout
from maru_transfer.plan import Piece, plan_pieces
from maru_transfer.tensors import group_layers

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class DeviceTransfer:
    """Implements :class:`maru_core.contracts.Transfer` for KV tensors on one device.

    Everything runs on the calling thread's current stream, which orders it after what was queued there and before
    what comes; both calls wait for the stream before they return.
    """

    def __init__(self, layers: Sequence[torch.Tensor], paged: PagedLayout, stored: ObjectLayout) -> None:
        self._paged = paged
        self._stored = stored
        self._device = layers[0].device
        self._dtype = _INTEGERS[paged.element_size]
        self._asynchronous = self._device.type == "cuda"
        self._groups = []
        for group in group_layers(layers, paged):
            if group.offset % paged.element_size or group.stride % paged.element_size:
                raise TransferError(
                    f"layer {group.first} starts at byte {group.offset}, not a multiple of {paged.element_size}"
                )
            count = group.storage.nbytes() // paged.element_size
            flat = torch.empty(0, dtype=self._dtype, device=self._device).set_(group.storage, 0, (count,), (1,))
            self._groups.append((group, flat))
        self._staging: torch.Tensor | None = None

    def load(self, block_ids: Sequence[int], copies: Sequence[ChunkCopy]) -> None:
        """Objects to pages."""
        pieces = plan_pieces(self._paged, self._stored, block_ids, copies)
        staging = self._stage()
        with self._ordered(f"loading {len(copies)} chunks to"):
            for copy, parts in _by_copy(pieces, copies):
                self._cross(staging, copy, to_device=True)
                for piece in parts:
                    for pages, staged in self._pairs(staging, piece):
                        pages.copy_(staged)

    def store(self, block_ids: Sequence[int], copies: Sequence[ChunkCopy]) -> None:
        """Pages to objects."""
        pieces = plan_pieces(self._paged, self._stored, block_ids, copies)
        for number, copy in enumerate(copies):
            if copy.buffer.readonly:
                raise TransferError(f"copy {number} (chunk {copy.chunk}) stores into a read-only buffer")
        staging = self._stage()
        with self._ordered(f"storing {len(copies)} chunks from"):
            for copy, parts in _by_copy(pieces, copies):
                for piece in parts:
                    for pages, staged in self._pairs(staging, piece):
                        staged.copy_(pages)
                self._cross(staging, copy, to_device=False)

    def close(self) -> None:
        """Give the staging object back and let go of the tensors."""
        self._staging = None
        self._groups = []

    def _stage(self) -> torch.Tensor:
        if not self._groups:
            raise TransferError("this transfer is closed")
        if self._staging is None:
            self._staging = torch.empty(self._shape(), dtype=self._dtype, device=self._device)
        return self._staging

    def _shape(self) -> tuple[int, ...]:
        stored, paged = self._stored, self._paged
        return (stored.num_planes, stored.num_layers, stored.chunk_tokens, paged.num_heads, paged.head_size)

    def _pairs(self, staging: torch.Tensor, piece: Piece) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Views of (pages, staged object), ``[layers, tokens, heads, head_size]``, that together cover the piece."""
        for number, plane in enumerate(self._paged.planes):
            for group, flat in self._groups:
                first = plane.offset + piece.block * plane.block + piece.slot * plane.token
                pages = flat.as_strided(
                    (group.count, piece.count, self._paged.num_heads, self._paged.head_size),
                    (group.stride // self._paged.element_size, plane.token, plane.head, plane.dim),
                    group.offset // self._paged.element_size + first,
                )
                layers = slice(group.first, group.first + group.count)
                yield pages, staging[number, layers, piece.token : piece.token + piece.count]

    def _cross(self, staging: torch.Tensor, copy: ChunkCopy, *, to_device: bool) -> None:
        """Move the copy's tokens between its buffer and the staging object, in contiguous stretches."""
        host = _tensor_over(copy.buffer, self._dtype).view(self._shape())
        start = copy.chunk * self._stored.chunk_tokens
        first, last = copy.first - start, copy.last - start
        if last - first == self._stored.chunk_tokens:
            stretches = [(host, staging)]
        else:
            stretches = [
                (host[plane, layer, first:last], staging[plane, layer, first:last])
                for plane in range(self._stored.num_planes)
                for layer in range(self._stored.num_layers)
            ]
        for there, here in stretches:
            source, target = (there, here) if to_device else (here, there)
            target.copy_(source, non_blocking=self._asynchronous)

    @contextmanager
    def _ordered(self, doing: str) -> Iterator[None]:
        try:
            try:
                yield
            finally:
                # Also after an error: no copy may still touch pages or buffers once the call has returned.
                if self._asynchronous:
                    torch.cuda.current_stream(self._device).synchronize()
        except RuntimeError as error:
            raise TransferError(f"{doing} {self._device} failed: {error}") from error


def _by_copy(pieces: Sequence[Piece], copies: Sequence[ChunkCopy]) -> Iterator[tuple[ChunkCopy, Iterator[Piece]]]:
    for number, parts in groupby(pieces, key=lambda piece: piece.copy):
        yield copies[number], parts


def _tensor_over(buffer: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """A tensor over a buffer that may be read-only, for which torch has no type; only loads read such a one."""
    if not buffer.readonly:
        return torch.frombuffer(buffer, dtype=dtype)
    address = np.frombuffer(buffer, np.uint8).ctypes.data
    return torch.frombuffer((ctypes.c_uint8 * buffer.nbytes).from_address(address), dtype=dtype)
