"""How a pool is cut into pieces that are registered one by one, and what of a stretch lies in which of them. Pure."""

from __future__ import annotations

import itertools
import resource
from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

from attrs import frozen

from maru_core.contracts import MemorySpan

#: Bytes of the first registration, of which nobody knows how long it will take.
PIECE: Final = 64 << 20


@frozen
class Bounds:
    """How large pieces may be while an engine is in a certain state.

    ``seconds``: how long one may hold up what the engine asks of the driver meanwhile. ``least`` and ``most``: bytes of
    a piece, powers of two, whatever the driver's speed; edges are multiples of them, hence of any huge page of 2 MiB.
    """

    seconds: float
    least: int
    most: int


#: Somebody's answer is held up.
BUSY: Final = Bounds(0.008, 32 << 20, 256 << 20)
#: The engine starts: it tries out and captures for seconds to minutes, and is held up for as long as the whole pool
#: takes, in few pieces or in many. A request that comes before the end is held up by one. In return copies of two
#: dimensions, which may not cross an edge, reach over many objects for the rest of the process's life.
STARTING: Final = Bounds(0.1, 256 << 20, 1 << 30)


class Pace:
    """How large pieces are: of ``fixed`` bytes, or by how fast the last one was, and whether somebody waits."""

    def __init__(self, fixed: int | None = None) -> None:
        self._fixed = fixed
        self._speed: float | None = None

    def took(self, nbytes: int, seconds: float) -> None:
        """The last piece, of ``nbytes``, took so long."""
        self._speed = nbytes / max(seconds, 1e-9)

    def size(self, bounds: Bounds) -> int:
        """Bytes of the next piece: the largest power of two that the last one's speed allows within ``bounds``."""
        if self._fixed is not None:
            return self._fixed
        if self._speed is None:
            return PIECE
        allowed = int(self._speed * bounds.seconds)
        return min(bounds.most, max(bounds.least, 1 << max(0, allowed.bit_length() - 1)))


def whole_pages(address: int, size: int) -> tuple[int, int]:
    """First and last address of the whole pages within a stretch; equal, or the wrong way round, when there is none."""
    page = page_size()
    return -(-address // page) * page, (address + size) // page * page


def piece_end(pool: tuple[int, int], start: int, nbytes: int) -> int:
    """Where the piece of ``pool`` that begins at ``start`` ends: at the next multiple of ``nbytes``, or with the pool.

    Counted from the pool's beginning, as its objects are: those of a power of two bytes then have their rows on one
    side of an edge. Where there are huge pages a pool begins with one, so that none of them is cut.
    """
    first, last = pool
    return min(last, first + ((start - first) // nbytes + 1) * nbytes)


def cut(starts: Sequence[int], ends: Sequence[int], address: int, length: int) -> list[MemorySpan]:
    """``[address, address + length)`` as spans, each within one registered piece or outside of all."""
    spans: list[MemorySpan] = []
    position, last = address, address + length
    index = max(0, bisect_right(starts, address) - 1)
    for start, end in itertools.islice(zip(starts, ends, strict=True), index, None):
        if start >= last:
            break
        if end <= position:
            continue
        if start > position:
            spans.append(MemorySpan(position - address, start - position, False))
            position = start
        upto = min(end, last)
        spans.append(MemorySpan(position - address, upto - position, True))
        position = upto
    if position < last:
        spans.append(MemorySpan(position - address, last - position, False))
    return spans


def page_size() -> int:
    """Bytes of an ordinary page of this host."""
    return resource.getpagesize()
