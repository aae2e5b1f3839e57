"""How a pool is cut into pieces that are registered one by one, and what of a stretch lies in which of them. Pure."""

from __future__ import annotations

import itertools
import resource
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Final

from maru_core.contracts import MemorySpan

#: Bytes of the first registration, and what further ones may have; their edges are multiples of their size in the
#: address space, hence of any huge page of 2 MiB.
PIECE: Final = 64 << 20
LEAST: Final = 32 << 20
MOST: Final = 256 << 20
#: How long, in seconds, one registration may hold up what the engine asks of the driver meanwhile; pieces are made
#: smaller or larger until it is half to twice of this.
PIECE_SECONDS: Final = 0.004


class Pace:
    """How large pieces are: of ``fixed`` bytes, or so large that registering one takes about PIECE_SECONDS."""

    def __init__(self, fixed: int | None = None) -> None:
        self.piece = fixed or PIECE
        self._fixed = fixed is not None

    def took(self, seconds: float) -> None:
        """The last piece took so long."""
        if self._fixed:
            return
        if seconds < PIECE_SECONDS / 2:
            self.piece = min(MOST, self.piece * 2)
        elif seconds > PIECE_SECONDS * 2:
            self.piece = max(LEAST, self.piece // 2)


def pieces(address: int, size: int, pace: Pace) -> Iterator[tuple[int, int]]:
    """Start and end of each piece: whole pages of the stretch, cut at multiples of what ``pace`` says by then."""
    page = page_size()
    start, last = -(-address // page) * page, (address + size) // page * page
    while start < last:
        end = min(last, start // pace.piece * pace.piece + pace.piece)
        yield start, end
        start = end


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
