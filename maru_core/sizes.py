"""Sizes as people write them. All units are powers of 1024."""

from __future__ import annotations

import re
from typing import Final

_PATTERN: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(?:i?B)?|B)?\s*", re.IGNORECASE)
_SHIFT: Final = {"K": 10, "M": 20, "G": 30, "T": 40}


def parse_size(value: object) -> int:
    """Bytes from ``4G``, ``500M``, ``4GiB``, ``0.5T``, ``4096`` or an int; raises ValueError on anything else.

    ``GB`` is read as ``GiB``: memory comes in powers of 1024, and one name for two sizes is how pools end up smaller
    than what was asked for. Less than a byte, but not 0, is refused: 0 often means something else.
    """
    if type(value) is int:
        size = value
    elif isinstance(value, str) and (match := _PATTERN.fullmatch(value)):
        number, unit = match.groups()
        scale = 1 << _SHIFT[unit.upper()] if unit else 1
        # Exact however long the number is: a float would round it, or be too small for it.
        whole, _, fraction = number.partition(".")
        size = (int(whole + fraction) * scale) // 10 ** len(fraction)
        if not size and (whole + fraction).strip("0"):
            raise ValueError(f"a size of less than a byte: {value!r}")
    else:
        raise ValueError(f"not a size: {value!r}")
    if size < 0:
        raise ValueError(f"a size cannot be negative: {value!r}")
    return size


def format_size(size: int) -> str:
    """``size`` bytes for people: ``4.0 GiB``; exact below 1 KiB."""
    for unit in ("T", "G", "M", "K"):
        if size >= 1 << _SHIFT[unit]:
            return f"{size / (1 << _SHIFT[unit]):.1f} {unit}iB"
    return f"{size} B"
