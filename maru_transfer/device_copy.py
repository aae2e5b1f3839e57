"""Copies between pages on a device and objects in host memory, by torch, through a staging object on the device.

A staging object has the stored layout, so placement is strided copies within the device and what crosses to the host
is contiguous: one copy for a whole chunk, one per plane and layer for a part of it. :mod:`maru_transfer.crossing` makes
these copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby

import torch
from attrs import evolve, frozen

from maru_core.contracts import LayeredLoad, PinnedMemory
from maru_core.errors import TransferError
from maru_core.geometry import ChunkCopy, ObjectLayout, PagedLayout
from maru_transfer.crossing import Crossing
from maru_transfer.layered import Arrival, Arrived, LoadThread, SteppedLoad
from maru_transfer.plan import Piece, plan_pieces, refuse_read_only
from maru_transfer.tensors import LayerGroup, group_layers, single_layers

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class DeviceTransfer:
    """Implements :class:`maru_core.contracts.Transfer` and ``LoadsByLayer`` for KV tensors on one device.

    Loads and stores run on the calling thread's current stream, which orders them after what was queued there and
    before what comes; both calls wait for the stream before they return. Layered loads run on a stream of their own,
    with an event behind each layer.
    """

    def __init__(self, layers: Sequence[torch.Tensor], paged: PagedLayout, stored: ObjectLayout) -> None:
        self._paged = paged
        self._stored = stored
        self._device = layers[0].device
        self._dtype = _INTEGERS[paged.element_size]
        self._asynchronous = self._device.type == "cuda"
        self._crossing = Crossing(self._device)
        groups = group_layers(layers, paged)
        for group in groups:
            if group.offset % paged.element_size or group.stride % paged.element_size:
                raise TransferError(
                    f"layer {group.first} starts at byte {group.offset}, not a multiple of {paged.element_size}"
                )
        self._groups = [(group, self._flat(group)) for group in groups]
        self._single = [(group, self._flat(group)) for group in single_layers(groups)]
        self._staging: torch.Tensor | None = None
        self._layers = LoadThread()
        self._stream = torch.cuda.Stream(self._device) if self._asynchronous else None  # type: ignore[no-untyped-call]

    def use_pinned(self, pinned: PinnedMemory) -> None:
        """Copy without a detour only where ``pinned`` says so. See :class:`maru_core.contracts.UsesPinnedMemory`."""
        self._crossing.pinned = pinned

    def load(self, block_ids: Sequence[int], copies: Sequence[ChunkCopy]) -> None:
        """Objects to pages."""
        self._layers.settle()
        pieces = plan_pieces(self._paged, self._stored, block_ids, copies)
        staging = self._stage()
        flat = staging.view(-1).view(torch.uint8)
        with self._ordered(f"loading {len(copies)} chunks to"):
            for copy, parts in _by_copy(pieces, copies):
                self._crossing.to_device(copy.buffer, flat, self._stretches(copy))
                for piece in parts:
                    for pages, staged in self._pairs(staging, piece):
                        pages.copy_(staged)

    def begin_load(self, block_ids: Sequence[int], copies: Sequence[ChunkCopy]) -> LayeredLoad:
        """Objects to pages, one layer after another."""
        pieces = plan_pieces(self._paged, self._stored, block_ids, copies)
        staging = self._stage()
        stream = self._stream
        began = None if stream is None else torch.cuda.current_stream(self._device).record_event()

        def move(layer: int) -> Arrival:
            if stream is None or began is None:
                self._load_layer(layer, pieces, copies, staging)
                return Arrived()
            with torch.cuda.stream(stream):
                if not layer:
                    stream.wait_event(began)
                self._load_layer(layer, pieces, copies, staging)
                return _OnStream(stream.record_event(), self._device)

        load = SteppedLoad(self._paged.num_layers, move, self._settle)
        self._layers.start(load)
        return load

    def store(self, block_ids: Sequence[int], copies: Sequence[ChunkCopy]) -> None:
        """Pages to objects."""
        self._layers.settle()
        pieces = plan_pieces(self._paged, self._stored, block_ids, copies, reads_pages=True)
        refuse_read_only(copies)
        staging = self._stage()
        flat = staging.view(-1).view(torch.uint8)
        with self._ordered(f"storing {len(copies)} chunks from"):
            for copy, parts in _by_copy(pieces, copies):
                for piece in parts:
                    for pages, staged in self._pairs(staging, piece):
                        staged.copy_(pages)
                self._crossing.to_host(flat, copy.buffer, self._stretches(copy))
            self._crossing.finish()

    def close(self) -> None:
        """Give the staging object back and let go of the tensors; layered loads are cancelled."""
        self._layers.close()
        self._staging = None
        self._groups = self._single = []
        self._crossing.close()

    def _flat(self, group: LayerGroup) -> torch.Tensor:
        """A group's whole storage, element by element."""
        count = group.storage.nbytes() // self._paged.element_size
        return torch.empty(0, dtype=self._dtype, device=self._device).set_(group.storage, 0, (count,), (1,))

    def _stage(self) -> torch.Tensor:
        if not self._groups:
            raise TransferError("this transfer is closed")
        if self._staging is None:
            self._staging = torch.empty(self._shape(), dtype=self._dtype, device=self._device)
        return self._staging

    def _shape(self) -> tuple[int, ...]:
        stored, paged = self._stored, self._paged
        return (stored.num_planes, stored.num_layers, stored.chunk_tokens, paged.num_heads, paged.head_size)

    def _load_layer(
        self, layer: int, pieces: Sequence[Piece], copies: Sequence[ChunkCopy], staging: torch.Tensor
    ) -> None:
        """One layer, on the current stream."""
        group, memory = self._single[layer]
        # Which one it is in an object.
        here = evolve(group, first=layer % self._stored.num_layers), memory
        flat = staging.view(-1).view(torch.uint8)
        parts = [piece for piece in pieces if piece.layer in (None, layer)]
        for copy, shares in _by_copy(parts, copies):
            self._crossing.to_device(copy.buffer, flat, self._stretches(copy, here[0].first))
            for piece in shares:
                for pages, staged in self._pairs(staging, piece, [here]):
                    pages.copy_(staged)

    def _settle(self) -> None:
        """Nothing of layered loads is on the device any more."""
        try:
            if self._stream is not None:
                self._stream.synchronize()
        finally:
            self._crossing.forget()

    def _pairs(
        self, staging: torch.Tensor, piece: Piece, groups: Sequence[tuple[LayerGroup, torch.Tensor]] = ()
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Views of (pages, staged object), ``[layers, tokens, heads, head_size]``, that together cover the piece.

        ``groups``: of these layers only.
        """
        groups = groups or (self._groups if piece.layer is None else [self._single[piece.layer]])
        for number, plane in enumerate(self._paged.planes):
            for group, flat in groups:
                first = plane.offset + piece.block * plane.block + piece.slot * plane.token
                pages = flat.as_strided(
                    (group.count, piece.count, self._paged.num_heads, self._paged.head_size),
                    (group.stride // self._paged.element_size, plane.token, plane.head, plane.dim),
                    group.offset // self._paged.element_size + first,
                )
                layers = slice(group.first, group.first + group.count)
                yield pages, staging[number, layers, piece.token : piece.token + piece.count]

    def _stretches(self, copy: ChunkCopy, layer: int | None = None) -> list[tuple[int, int]]:
        """The copy's tokens in an object: offset and length in bytes of each contiguous stretch.

        ``layer``: only those of one layer of the object.
        """
        stored = self._stored
        start = copy.chunk * stored.chunk_tokens
        first, last = copy.first - start, copy.last - start
        if last - first == stored.chunk_tokens and (layer is None or stored.num_layers == 1):
            return [(0, stored.nbytes)]
        token = stored.hidden * stored.element_size
        rows = range(stored.num_planes * stored.num_layers)
        if layer is not None:
            rows = rows[layer :: stored.num_layers]
        return [((row * stored.chunk_tokens + first) * token, (last - first) * token) for row in rows]

    @contextmanager
    def _ordered(self, doing: str) -> Iterator[None]:
        try:
            try:
                yield
            finally:
                # Also after an error: no copy may still touch pages or buffers once the call has returned.
                try:
                    if self._asynchronous:
                        torch.cuda.current_stream(self._device).synchronize()
                finally:
                    self._crossing.forget()
        except RuntimeError as error:
            raise TransferError(f"{doing} {self._device} failed: {error}") from error


@frozen
class _OnStream:
    """Implements :class:`maru_transfer.layered.Arrival` by an event."""

    event: torch.cuda.Event
    device: torch.device

    def query(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def order(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.event)


def _by_copy(pieces: Sequence[Piece], copies: Sequence[ChunkCopy]) -> Iterator[tuple[ChunkCopy, Iterator[Piece]]]:
    for number, parts in groupby(pieces, key=lambda piece: piece.copy):
        yield copies[number], parts
