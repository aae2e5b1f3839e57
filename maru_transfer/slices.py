"""Cuts a transfer into slices for the native executor: which rows of which tokens go together, and how they travel.

Pure arithmetic on NumPy arrays, no torch: a request of thousands of blocks is planned in a fraction of a millisecond,
because whole chunks are all cut alike and the table of blocks is used as it is. What is wrong with a request is found
here and told by :func:`maru_transfer.plan.plan_pieces`, in the same words for every engine.
"""

from __future__ import annotations

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
        table = _table(block_ids)
        if table is None or not self._is_sound(table, copies):
            plan_pieces(self.paged, self.stored, block_ids, copies)
            raise TransferError("this request is refused, though no reason was found; please report it")
        wanted = [number for number, copy in enumerate(copies) if copy.first < copy.last]
        size = self.paged.block_size
        low = min((copies[number].first // size for number in wanted), default=0)
        high = max(((copies[number].last - 1) // size + 1 for number in wanted), default=0)
        ways, cuts = self._ways(table, [copies[number] for number in wanted], [addresses[n] for n in wanted], spans)
        groups: list[tuple[_Pattern, int, list[int]]] = []
        for number, way in zip(wanted, ways, strict=True):
            pattern = self._pattern(copies[number])
            if not groups or groups[-1][0] is not pattern or groups[-1][1] != way:
                groups.append((pattern, way, []))
            groups[-1][2].append(number)
        parts = []
        slices = 0
        for pattern, way, numbers in groups:
            starts = np.array([copies[number].chunk * self.stored.chunk_tokens for number in numbers], np.uint64)
            part = pattern.repeat(np.array([addresses[number] for number in numbers], np.uint64), starts, way)
            part["slice"] += slices
            slices = int(part["slice"][-1]) + 1
            parts.append(part)
        return Job(
            direction,
            np.concatenate(parts) if parts else np.empty(0, SEGMENT),
            np.ascontiguousarray(table[low:high], np.int32),
            low,
            np.array(sorted(cuts), np.uint64),
        )

    @property
    def _token_bytes(self) -> int:
        return self.stored.hidden * self.stored.element_size

    def _is_sound(self, table: Array, copies: Sequence[ChunkCopy]) -> bool:
        """What plan_pieces checks, for all blocks at once; layouts were compared when the transfer was opened."""
        size, chunk_tokens, nbytes = self.paged.block_size, self.stored.chunk_tokens, self.stored.nbytes
        used = np.zeros(len(table), bool)
        for copy in copies:
            low = copy.chunk * chunk_tokens
            if not 0 <= low <= copy.first <= copy.last <= low + chunk_tokens:
                return False
            try:
                if copy.buffer.nbytes != nbytes or not copy.buffer.c_contiguous:
                    return False
            except ValueError:  # it was released
                return False
            if copy.first < copy.last:
                end = (copy.last - 1) // size + 1
                if end > len(table):
                    return False
                used[copy.first // size : end] = True
        ids = table[used]
        if not len(ids):
            return True
        return bool(ids.min() >= 0 and ids.max() < self.paged.num_blocks and len(np.unique(ids)) == len(ids))

    def _ways(
        self, table: Array, copies: Sequence[ChunkCopy], addresses: Sequence[int], spans: Callable[[int, int], Spans]
    ) -> tuple[list[int], set[int]]:
        """How each copy travels, and where registrations meet within one."""
        ways: list[int] = []
        cuts: set[int] = set()
        tokens = sum(copy.last - copy.first for copy in copies)
        rows = self.stored.num_planes * self.stored.num_layers
        small = tokens * self._token_bytes * rows <= self.limits.mapped
        runs = self._runs(table)
        for copy, address in zip(copies, addresses, strict=True):
            found = spans(address, self.stored.nbytes)
            if not all(locked for _, _, locked in found):
                ways.append(BOUNCED)
                continue
            if small and address % ALIGNMENT == 0:
                ways.append(MAPPED)
                continue
            if len(found) > 1:
                cuts.update(first for first, _, _ in found[1:])
            direct = runs is not None and (
                (copy.last - copy.first) * self._token_bytes >= self.limits.direct * self._count(runs, copy)
            )
            ways.append(DIRECT if direct else STAGED)
        return ways, cuts

    def _runs(self, table: Array) -> Array | None:
        """How many runs of gapless tokens begin at or before each place of the table; ``None``: tokens have gaps."""
        paged = self.paged
        if not all(is_plain(paged, plane) for plane in paged.planes):
            return None
        begins = np.ones(len(table), np.int64)
        if all(plane.block == paged.block_size * paged.hidden for plane in paged.planes):
            begins[1:] = np.diff(table) != 1
        counts: Array = np.cumsum(begins)
        return counts

    def _count(self, runs: Array, copy: ChunkCopy) -> int:
        first, last = copy.first // self.paged.block_size, (copy.last - 1) // self.paged.block_size
        return int(runs[last] - runs[first]) + 1

    def _pattern(self, copy: ChunkCopy) -> _Pattern:
        """How a copy is cut; the same for all that begin alike, so there are few of them."""
        start = copy.chunk * self.stored.chunk_tokens
        key = copy.first - start, copy.last - copy.first, copy.first % self.paged.block_size
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
            height = min(rows, self.limits.slot // (count * token))
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


def _table(block_ids: Sequence[int]) -> Array | None:
    try:
        table = np.asarray(block_ids, np.int64)
    except (OverflowError, ValueError, TypeError):
        return None
    return table if table.ndim == 1 else None
