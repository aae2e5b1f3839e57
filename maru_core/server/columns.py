"""Columns of first entries that lie in even steps, as those of neighbouring objects of one size do."""

from __future__ import annotations

from array import array
from collections.abc import Sequence


def even_steps(entries: Sequence[int]) -> slice | None:
    """The slice that names ``entries`` in this order, ``None`` when there is none; they differ if there is one."""
    count = len(entries)
    if not count:
        return None
    first, last = entries[0], entries[-1]
    step = entries[1] - first if count > 1 else 1
    if step <= 0 or last - first != step * (count - 1):
        return None
    if type(entries) is array:
        even = entries == array("I", range(first, last + 1, step))
    else:
        even = entries == list(range(first, last + 1, step))
    return slice(first, last + 1, step) if even else None
