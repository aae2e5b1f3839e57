"""What callers pass in, checked before anything is sent: the error names the argument. Pure."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

#: Lengths travel as 64 bits.
_MOST = 1 << 64


def sequence_of(values: Iterable[T], name: str) -> Sequence[T]:
    """``values`` with a length; raises TypeError for a single text or bytes, which are not meant, and non-iterables."""
    if type(values) is tuple or type(values) is list:
        return values
    if isinstance(values, str | bytes | bytearray | memoryview):
        raise TypeError(f"{name} must be a list, got one {type(values).__name__}")
    try:
        return tuple(values)
    except TypeError:
        raise TypeError(f"{name} must be a list, got {type(values).__name__}") from None


def length_of(value: Any, name: str) -> int:
    """A number of bytes; raises TypeError for what is no whole number, ValueError for one that cannot be."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number of bytes, got {type(value).__name__}") from None
    if not 0 <= number < _MOST:
        raise ValueError(f"{name} must be 0 to {_MOST - 1} bytes, got {number}")
    return number


def lengths_of(values: Iterable[int], name: str) -> tuple[int, ...]:
    """Numbers of bytes, all of them as :func:`length_of` has it."""
    lengths = tuple(sequence_of(values, name))
    try:
        array("Q", lengths)
    except (TypeError, OverflowError):
        return tuple([length_of(value, f"{name}[{index}]") for index, value in enumerate(lengths)])
    return lengths


def is_length(value: object) -> bool:
    """Whether ``value`` is one length rather than several."""
    return hasattr(value, "__index__")


def bytes_of(value: Any, name: str) -> memoryview:
    """The bytes of a buffer; raises TypeError for anything else, and for a buffer with gaps."""
    try:
        return memoryview(value).cast("B")
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be bytes or a contiguous buffer, got {type(value).__name__}: {error}") from None


def check_timeout(timeout: object) -> None:
    """Raise TypeError unless ``timeout`` is seconds or ``None``."""
    if timeout is not None and not isinstance(timeout, int | float):
        raise TypeError(f"timeout must be seconds or None, got {type(timeout).__name__}")
