"""Cuts a transfer into slices for the native executor: what is moved of which object, and how it travels.

Pure arithmetic on NumPy arrays, no torch: a request of thousands of blocks is planned in a fraction of a millisecond,
because nothing is done block by block. :mod:`maru_transfer.flow` decides which rows go together. What is wrong with a
request is found here and told by :func:`maru_transfer.plan.plan_pieces`, in the same words for every engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from attrs import field, frozen

from maru_core.batches import ChunkCopies, Rooms
from maru_core.errors import TransferError
from maru_core.geometry import ChunkCopy, ObjectLayout, PagedLayout, PlaneStrides
from maru_transfer.cuda_library import (
    BOUNCED,
    DIRECT,
    MAPPED,
    SEGMENT,
    STAGED,
    STORE,
    Array,
    Job,
)
from maru_transfer.even import Templates, blocks_of
from maru_transfer.flow import ALIGNMENT, Cutter, Shares
from maru_transfer.memory import Spans
from maru_transfer.plan import plan_pieces, refuse_read_only


@frozen
class Limits:
    """What a slice may hold, and from where on another way is faster. All in bytes.

    ``slot``: of a slice, hence of one place in staging memory. ``direct``: runs at least as long, on the average of a
    chunk, are copied straight to or from pages. ``mapped``: requests at most as large are moved by kernels that reach
    host memory themselves, if they can.
    """

    slot: int
    direct: int
    mapped: int


@frozen
class Slicer:
    """Cuts the requests of one transfer."""

    paged: PagedLayout
    stored: ObjectLayout
    limits: Limits
    _templates: Templates = field(init=False, eq=False, repr=False)

    @_templates.default
    def _make_templates(self) -> Templates:
        return Templates(self._whole, self._objects)

    def __attrs_post_init__(self) -> None:
        if self.limits.slot < self._token_bytes:
            raise TransferError(
                f"a slice of {self.limits.slot} bytes holds no token of {self._token_bytes} bytes per layer"
            )

    def job(
        self,
        direction: int,
        block_ids: Sequence[int],
        copies: Sequence[ChunkCopy],
        addresses: Sequence[int] | Array,
        spans: Callable[[int, int], Spans],
        *,
        by_layer: bool = False,
    ) -> Job:
        """Everything that the copies ask for, as segments. ``addresses``: where the objects lie, one per copy.

        ``by_layer``: one layer of all copies after another, and every slice tells how many are complete behind it.
        Raises TransferError as plan_pieces does.
        """
        even = self._even(direction, block_ids, copies, addresses, spans, by_layer=by_layer)
        if even is not None:
            return even
        try:
            table = np.array(block_ids, np.int64).reshape(-1)
            ranges, layers = _columns(copies)
            places = self._places(ranges)
            sound = self._is_sound(direction, table, copies, ranges, layers, places)
        except (OverflowError, TypeError, ValueError):  # no numbers, or such as nobody can mean
            sound = False
        if not sound:
            plan_pieces(self.paged, self.stored, block_ids, copies, reads_pages=direction == STORE)
            raise TransferError("this request is refused, though no reason was found; please report it")
        wanted = ranges[:, 1] < ranges[:, 2]
        ranges, places, layers = ranges[wanted], places[wanted], layers[wanted]
        where = np.array(addresses, np.int64)[wanted]
        if not len(ranges):
            return Job(direction, np.empty(0, SEGMENT), np.empty(0, np.int32), 0, np.empty(0, np.uint64))
        ways, cuts = self._ways(table, ranges, places, where, spans)
        low, high = int(places[:, 0].min()), int(places[:, 1].max())
        segments = self._cut(ranges, layers, where, ways, by_layer=by_layer)
        return Job(direction, segments, table[low:high].astype(np.int32), low, _ascending(cuts))

    def _even(
        self,
        direction: int,
        block_ids: Sequence[int],
        copies: Sequence[ChunkCopy],
        addresses: Sequence[int] | Array,
        spans: Callable[[int, int], Spans],
        *,
        by_layer: bool,
    ) -> Job | None:
        """The job, if this is a sound request of whole chunks that all cross the bus from or to locked memory."""
        chunks = copies.whole_chunks() if isinstance(copies, ChunkCopies) else None
        if chunks is None or not isinstance(copies, ChunkCopies) or not self._fits(copies, chunks):
            return None
        where = np.asarray(addresses, np.int64)
        low, high = int(where.min()), int(where.max()) + self.stored.nbytes
        found = spans(low, high - low)
        try:
            blocks = blocks_of(self.paged, self.stored, block_ids, chunks)
        except (OverflowError, TypeError, ValueError):  # no numbers, or such as nobody can mean
            return None
        template = self._templates.get(len(chunks), by_layer=by_layer)
        if blocks is None or template is None or not all(locked for _, _, locked in found):
            return None
        segments = template.at(where, chunks.start * self.stored.chunk_tokens)
        cuts = np.array([first for first, _, _ in found[1:]], np.uint64)
        return Job(direction, segments, blocks[1], blocks[0], cuts, template.owners)

    def _fits(self, copies: ChunkCopies, chunks: range) -> bool:
        """Whether whole chunks are this transfer's, and neither so long nor so few that they travel in another way."""
        stored, rooms = self.stored, copies.buffers
        return (
            isinstance(rooms, Rooms)
            and (len(rooms), rooms.nbytes) == (len(copies), stored.nbytes)
            and copies.chunk_tokens == stored.chunk_tokens
            and copies.objects == self._objects
            and stored.chunk_tokens * self._token_bytes < self.limits.direct
            and len(copies) * stored.nbytes > self.limits.mapped
        )

    def _whole(self, count: int, by_layer: bool, where: Array) -> Array:
        """Segments of the first ``count`` chunks of a request, whose objects lie there."""
        chunks, layers = np.divmod(np.arange(count * self._objects), self._objects)
        size = self.stored.chunk_tokens
        ranges = np.stack([chunks, chunks * size, chunks * size + size], 1)
        ways = np.full(len(ranges), STAGED, np.int64)
        return self._cut(ranges, layers, where, ways, by_layer=by_layer)

    def _cut(self, ranges: Array, layers: Array, where: Array, ways: Array, *, by_layer: bool) -> Array:
        shares = self._shares(ranges, layers, where, ways, by_layer=by_layer)
        followed = self.paged.num_layers if by_layer else 0
        return Cutter(self.limits.slot, self._token_bytes, self.paged.block_size, followed).cut(shares)

    def _shares(self, ranges: Array, layers: Array, where: Array, ways: Array, *, by_layer: bool) -> Shares:
        """What is moved of each object, in order of copies or of layers."""
        count, planes = self.paged.num_layers, self.stored.num_planes
        row_bytes = self.stored.chunk_tokens * self._token_bytes
        first, tokens = ranges[:, 1], ranges[:, 2] - ranges[:, 1]
        host = where + (first - ranges[:, 0] * self.stored.chunk_tokens) * self._token_bytes
        if self._layerwise:
            shares = Shares(host, first, tokens, layers, ways, layers, planes, count, row_bytes)
            return shares.take(np.argsort(layers, kind="stable")) if by_layer else shares
        none = np.zeros(len(ranges), np.int64)
        if not by_layer:
            return Shares(host, first, tokens, none, ways, none, planes * count, 1, row_bytes)
        layer = np.arange(count).repeat(len(ranges))
        host, first, tokens, ways = np.tile(np.stack([host, first, tokens, ways]), count)
        return Shares(host + layer * row_bytes, first, tokens, layer, ways, layer, planes, count, count * row_bytes)

    @property
    def _objects(self) -> int:
        """Of each chunk."""
        return self.paged.num_layers // self.stored.num_layers

    @property
    def _layerwise(self) -> bool:
        return self.stored.num_layers != self.paged.num_layers

    @property
    def _token_bytes(self) -> int:
        return self.stored.hidden * self.stored.element_size

    def _places(self, ranges: Array) -> Array:
        """The places of the block table that each copy needs: the first, and the one behind the last."""
        size = self.paged.block_size
        return np.stack([ranges[:, 1] // size, -(-ranges[:, 2] // size)], 1)

    def _is_sound(
        self,
        direction: int,
        table: Array,
        copies: Sequence[ChunkCopy],
        ranges: Array,
        layers: Array,
        places: Array,
    ) -> bool:
        """What plan_pieces checks, for all blocks at once; layouts were compared when the transfer was opened."""
        nbytes = self.stored.nbytes
        if isinstance(copies, ChunkCopies) and isinstance(copies.buffers, Rooms):
            if copies.buffers.nbytes != nbytes:
                return False
        elif not all(copy.buffer.nbytes == nbytes and copy.buffer.c_contiguous for copy in copies):
            return False
        # With one layer both formats are the same, and it may be named or not.
        least = 0 if self._layerwise else -1
        most = self.paged.num_layers if self._layerwise or self.paged.num_layers == 1 else 0
        if ((layers < least) | (layers >= most)).any():
            return False
        chunks, firsts, lasts = ranges.T
        low = chunks * self.stored.chunk_tokens
        if ((chunks < 0) | (firsts < low) | (lasts < firsts) | (lasts > low + self.stored.chunk_tokens)).any():
            return False
        places = places[firsts < lasts]
        if not len(places):
            return True
        if places[:, 1].max() > len(table):
            return False
        # Up at the first place of a copy, down behind its last: above zero is used.
        steps = np.zeros(len(table) + 1, np.int64)
        np.add.at(steps, places[:, 0], 1)
        np.add.at(steps, places[:, 1], -1)
        ids = table[np.cumsum(steps[:-1]) > 0]
        if ids.min() < 0 or ids.max() >= self.paged.num_blocks:
            return False
        if direction == STORE:
            return True
        seen = np.zeros(self.paged.num_blocks, bool)
        seen[ids] = True
        return int(np.count_nonzero(seen)) == len(ids)

    def _ways(
        self, table: Array, ranges: Array, places: Array, addresses: Array, spans: Callable[[int, int], Spans]
    ) -> tuple[Array, Array]:
        """How each copy travels, and which addresses no copy of the bus may cross."""
        tokens = ranges[:, 2] - ranges[:, 1]
        rows = self.stored.num_planes * self.stored.num_layers
        ways = np.full(len(ranges), STAGED, np.int64)
        runs = self._runs(table)
        if runs is not None:
            counts = runs[places[:, 1] - 1] - runs[places[:, 0]] + 1
            # A quotient, not a product, which a limit without end would overflow.
            ways[tokens * self._token_bytes // counts >= self.limits.direct] = DIRECT
        if int(tokens.sum()) * self._token_bytes * rows <= self.limits.mapped:
            ways[addresses % ALIGNMENT == 0] = MAPPED
        low, high = int(addresses.min()), int(addresses.max()) + self.stored.nbytes
        found = spans(low, high - low)
        if all(locked for _, _, locked in found):
            return ways, np.array([first for first, _, _ in found[1:]], np.uint64)
        # Elsewhere it is not known whether neighbours are of one registration.
        cuts = addresses.tolist()
        for number, address in enumerate(addresses.tolist()):
            found = spans(address, self.stored.nbytes)
            cuts.extend(first for first, _, _ in found[1:])
            if not all(locked for _, _, locked in found):
                ways[number] = BOUNCED
        return ways, np.array(cuts, np.uint64)

    def _runs(self, table: Array) -> Array | None:
        """How many runs of gapless tokens begin at or before each place of the table; ``None``: tokens have gaps."""
        paged = self.paged
        if not all(is_plain(paged, plane) for plane in paged.planes):
            return None
        begins = np.ones(len(table), np.int64)
        if all(plane.block == paged.block_size * paged.hidden for plane in paged.planes):
            begins[1:] = np.diff(table) != 1
        return np.cumsum(begins)


def _columns(copies: Sequence[ChunkCopy]) -> tuple[Array, Array]:
    """Chunk, first and last token of each copy, and its layer or -1. int64.

    No object is made per copy, which would wake the garbage collector.
    """
    count = len(copies)
    ranges = np.empty((count, 3), np.int64)
    if isinstance(copies, ChunkCopies):
        numbers, size = np.fromiter(copies.numbers, np.int64, count), copies.chunk_tokens
        ranges[:, 0] = chunks = numbers // copies.objects
        np.maximum(chunks * size, copies.first, out=ranges[:, 1])
        np.minimum(chunks * size + size, copies.last, out=ranges[:, 2])
        return ranges, numbers - chunks * copies.objects if copies.objects > 1 else np.full(count, -1)
    ranges[:, 0] = np.fromiter([copy.chunk for copy in copies], np.int64, count)
    ranges[:, 1] = np.fromiter([copy.first for copy in copies], np.int64, count)
    ranges[:, 2] = np.fromiter([copy.last for copy in copies], np.int64, count)
    return ranges, np.fromiter([-1 if copy.layer is None else copy.layer for copy in copies], np.int64, count)


def _ascending(values: Array) -> Array:
    """Sorted, each once; np.unique would import numpy.ma in the midst of the first request."""
    values = np.sort(values)
    fresh = np.ones(len(values), bool)
    fresh[1:] = values[1:] != values[:-1]
    once: Array = values[fresh]
    return once


def is_plain(paged: PagedLayout, plane: PlaneStrides) -> bool:
    """Whether the tokens of a block follow each other without a gap in a plane, each element by element."""
    return (
        (paged.head_size == 1 or plane.dim == 1)
        and (paged.num_heads == 1 or plane.head == paged.head_size)
        and (paged.block_size == 1 or plane.token == paged.hidden)
    )


def writable(direction: int, copies: Sequence[ChunkCopy], *, readonly: bool) -> None:
    """Raises TransferError when a store has a buffer that cannot be written. ``readonly``: whether there is one."""
    if direction == STORE and readonly:
        refuse_read_only(copies)
