"""Cuts a transfer into slices for the native executor: which rows of which tokens go together, and how they travel.

Pure arithmetic on NumPy arrays, no torch: a request of thousands of blocks is planned in a fraction of a millisecond,
because whole chunks are all cut alike and the table of blocks is used as it is. What is wrong with a request is found
here and told by :func:`maru_transfer.plan.plan_pieces`, in the same words for every engine.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
from attrs import field, frozen

from maru_core.errors import TransferError
from maru_core.geometry import ChunkCopy, ObjectLayout, PagedLayout, PlaneStrides
from maru_transfer.cuda_library import (
    BOUNCED,
    DIRECT,
    MAPPED,
    MOST_BLOCKS,
    MOST_SEGMENTS,
    SEGMENT,
    STAGED,
    STORE,
    Array,
    Job,
)
from maru_transfer.plan import plan_pieces

#: Where segments of one slice begin within a slot.
ALIGNMENT = 256

#: (first byte, byte behind the last, locked): stretches of host memory that lie within one registration or in none.
Spans = Sequence[tuple[int, int, bool]]


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
    _patterns: dict[tuple[int, int, int], _Pattern] = field(factory=dict, init=False, eq=False, repr=False)

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
        addresses: Sequence[int],
        spans: Callable[[int, int], Spans],
    ) -> Job:
        """Everything that the copies ask for, as segments. ``addresses``: where the objects lie, one per copy.

        Raises TransferError as plan_pieces does.
        """
        try:
            table = np.array(block_ids, np.int64).reshape(-1)
            ranges = np.array([(copy.chunk, copy.first, copy.last) for copy in copies], np.int64).reshape(-1, 3)
            places = self._places(ranges)
            sound = self._is_sound(table, copies, ranges, places)
        except (OverflowError, TypeError, ValueError):  # no numbers, or such as nobody can mean
            sound = False
        if not sound:
            plan_pieces(self.paged, self.stored, block_ids, copies)
            raise TransferError("this request is refused, though no reason was found; please report it")
        wanted = ranges[:, 1] < ranges[:, 2]
        ranges, places = ranges[wanted], places[wanted]
        where = np.array(addresses, np.uint64)[wanted]
        if not len(ranges):
            return Job(direction, np.empty(0, SEGMENT), np.empty(0, np.int32), 0, np.empty(0, np.uint64))
        ways, cuts = self._ways(table, ranges, places, where, spans)
        low, high = int(places[:, 0].min()), int(places[:, 1].max())
        starts = ranges[:, 0] * self.stored.chunk_tokens
        # How a copy is cut depends on this only, and copies of a kind mostly follow each other.
        kinds = np.stack([ranges[:, 1] - starts, ranges[:, 2] - starts, ranges[:, 1] % self.paged.block_size, ways], 1)
        edges = [0, *(np.flatnonzero((kinds[1:] != kinds[:-1]).any(1)) + 1).tolist(), len(kinds)]
        parts = []
        slices = 0
        for first, last in itertools.pairwise(edges):
            skipped, end, slot, way = kinds[first].tolist()
            pattern = self._pattern(skipped, end - skipped, slot)
            part = pattern.repeat(where[first:last], starts[first:last], way)
            part["slice"] += slices
            slices = int(part["slice"][-1]) + 1
            parts.append(part)
        return Job(
            direction,
            np.concatenate(parts) if len(parts) > 1 else parts[0],
            table[low:high].astype(np.int32),
            low,
            np.array(sorted(cuts), np.uint64),
        )

    @property
    def _token_bytes(self) -> int:
        return self.stored.hidden * self.stored.element_size

    def _places(self, ranges: Array) -> Array:
        """The places of the block table that each copy needs: the first, and the one behind the last."""
        size = self.paged.block_size
        return np.stack([ranges[:, 1] // size, -(-ranges[:, 2] // size)], 1)

    def _is_sound(self, table: Array, copies: Sequence[ChunkCopy], ranges: Array, places: Array) -> bool:
        """What plan_pieces checks, for all blocks at once; layouts were compared when the transfer was opened."""
        nbytes = self.stored.nbytes
        if not all(copy.buffer.nbytes == nbytes and copy.buffer.c_contiguous for copy in copies):
            return False
        if any(copy.layer is not None and (copy.layer or self.paged.num_layers > 1) for copy in copies):
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
        seen = np.zeros(self.paged.num_blocks, bool)
        seen[ids] = True
        return int(np.count_nonzero(seen)) == len(ids)

    def _ways(
        self, table: Array, ranges: Array, places: Array, addresses: Array, spans: Callable[[int, int], Spans]
    ) -> tuple[Array, set[int]]:
        """How each copy travels, and where registrations meet within one."""
        cuts: set[int] = set()
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
        for number, address in enumerate(addresses.tolist()):
            found = spans(address, self.stored.nbytes)
            if len(found) > 1:
                cuts.update(first for first, _, _ in found[1:])
            for _, _, locked in found:
                if not locked:
                    ways[number] = BOUNCED
        return ways, cuts

    def _runs(self, table: Array) -> Array | None:
        """How many runs of gapless tokens begin at or before each place of the table; ``None``: tokens have gaps."""
        paged = self.paged
        if not all(is_plain(paged, plane) for plane in paged.planes):
            return None
        begins = np.ones(len(table), np.int64)
        if all(plane.block == paged.block_size * paged.hidden for plane in paged.planes):
            begins[1:] = np.diff(table) != 1
        return np.cumsum(begins)

    def _pattern(self, skipped: int, tokens: int, slot: int) -> _Pattern:
        """How a copy is cut; the same for all that begin alike, so there are few of them."""
        key = skipped, tokens, slot
        found = self._patterns.get(key)
        if found is None:
            if len(self._patterns) >= _MOST_PATTERNS:
                self._patterns.clear()
            found = self._patterns[key] = self._cut(*key)
        return found

    def _cut(self, skipped: int, tokens: int, slot: int) -> _Pattern:
        """``skipped`` tokens of the chunk, then ``tokens`` of which the first is ``slot`` of its block."""
        token, size = self._token_bytes, self.paged.block_size
        rows = self.stored.num_planes * self.stored.num_layers
        pitch = self.stored.chunk_tokens * token
        # Whatever slot they begin at, so many tokens lie in no more blocks than a launch takes.
        most = min(tokens, self.limits.slot // token, (MOST_BLOCKS - 1) * size)
        cut = []
        for first in range(0, tokens, most):
            count = min(most, tokens - first)
            height = -(-rows // -(-rows * count * token // self.limits.slot))
            height = min(height, self.limits.slot // (count * token))
            for row in range(0, rows, height):
                at = row * pitch + (skipped + first) * token
                cut.append((at, 0, row, min(height, rows - row), skipped + first, count, 0, 0))
        segments = np.array(cut, SEGMENT)
        places = (slot + tokens - 1) // size + 1
        whole = -(-int(segments["rows"][0]) * int(segments["tokens"][0]) * token // ALIGNMENT) * ALIGNMENT
        share = 1
        if len(segments) == 1:
            share = max(1, min(self.limits.slot // whole, MOST_SEGMENTS, MOST_BLOCKS // places))
        return _Pattern(segments, share, whole)


_MOST_PATTERNS = 256


@frozen(eq=False)
class _Pattern:
    """Segments of one copy, addresses and tokens counted from the beginning of its chunk.

    ``share`` copies go into one slice, ``step`` bytes apart in its slot; a copy of several segments shares none.
    """

    segments: Array
    share: int
    step: int

    def repeat(self, addresses: Array, starts: Array, way: int) -> Array:
        """The segments of copies at ``addresses`` whose chunks begin at tokens ``starts``; slices count from 0."""
        count = len(self.segments)
        made = np.tile(self.segments, len(addresses))
        made["host"] += np.repeat(addresses, count)
        made["token"] += np.repeat(starts, count).astype(np.uint32)
        order = np.arange(len(made))
        made["slice"] = order // self.share
        made["offset"] = order % self.share * self.step
        made["way"] = way
        return made


def is_plain(paged: PagedLayout, plane: PlaneStrides) -> bool:
    """Whether the tokens of a block follow each other without a gap in a plane, each element by element."""
    return (
        (paged.head_size == 1 or plane.dim == 1)
        and (paged.num_heads == 1 or plane.head == paged.head_size)
        and (paged.block_size == 1 or plane.token == paged.hidden)
    )


def writable(direction: int, copies: Sequence[ChunkCopy]) -> None:
    """Raises TransferError when a store has a buffer that cannot be written."""
    if direction != STORE:
        return
    for number, copy in enumerate(copies):
        if copy.buffer.readonly:
            raise TransferError(f"copy {number} (chunk {copy.chunk}) stores into a read-only buffer")
