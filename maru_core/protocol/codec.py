"""msgpack in and out with limits, and packed columns.

msgpack's C unpacker bounds nesting, and refuses to allocate for a length that the frame cannot hold.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import msgpack

from maru_core.errors import ProtocolError
from maru_core.pool_format import KEY_SIZE
from maru_core.protocol.messages import MAX_ARRAY, MAX_KEYS, MAX_MESSAGE, MAX_TEXT


def encode(message: Sequence[Any]) -> bytes:
    """Pack one message; raises ProtocolError when it would be over MAX_MESSAGE bytes."""
    frame: bytes = msgpack.packb(message, use_bin_type=True)
    if len(frame) > MAX_MESSAGE:
        raise ProtocolError(f"a message of {len(frame)} bytes is over the limit of {MAX_MESSAGE}; send fewer keys")
    return frame


def decode(frame: bytes | memoryview) -> list[Any]:
    """Unpack one message into a list; raises ProtocolError on anything that is not one msgpack array."""
    try:
        message = msgpack.unpackb(
            frame,
            use_list=True,
            strict_map_key=True,
            max_str_len=MAX_TEXT,
            max_array_len=MAX_ARRAY,
            max_map_len=1024,
            max_ext_len=0,
        )
    except Exception as error:  # noqa: BLE001 - msgpack raises ValueError, its own classes and TypeError, by kind of damage
        raise ProtocolError(f"not a Maru message: {type(error).__name__}: {error}") from None
    if type(message) is not list:
        raise ProtocolError(f"a message must be an array, got {type(message).__name__}")
    return message


def split_keys(blob: object) -> tuple[bytes, ...]:
    """The keys of a packed column; raises ProtocolError on another type, a ragged length, or over MAX_KEYS."""
    if type(blob) is not bytes or len(blob) % KEY_SIZE:
        raise ProtocolError(f"keys must be bytes, a multiple of {KEY_SIZE}, got {describe(blob)}")
    count = len(blob) // KEY_SIZE
    if count > MAX_KEYS:
        raise ProtocolError(f"{count} keys in one request, the limit is {MAX_KEYS}; split the batch")
    keys: tuple[bytes, ...] = struct.unpack(f"{KEY_SIZE}s" * count, blob)
    return keys


def pack_u32(values: Iterable[int]) -> bytes:
    """A column of unsigned 32-bit numbers, little-endian."""
    return _little(array("I", values)).tobytes()


def pack_u64(values: Iterable[int]) -> bytes:
    """A column of unsigned 64-bit numbers, little-endian."""
    return _little(array("Q", values)).tobytes()


def unpack_u32(blob: object, count: int | None = None) -> array[int]:
    """Inverse of :func:`pack_u32`; with ``count``, any other length raises ProtocolError."""
    return _unpack("I", 4, blob, count)


def unpack_u64(blob: object, count: int | None = None) -> array[int]:
    """Inverse of :func:`pack_u64`; with ``count``, any other length raises ProtocolError."""
    return _unpack("Q", 8, blob, count)


def column_u8(blob: object, count: int) -> bytes:
    """A column of statuses as it came, checked for type and length."""
    if type(blob) is not bytes or len(blob) != count:
        raise ProtocolError(f"expected {count} statuses, got {describe(blob)}")
    return blob


def describe(value: object) -> str:
    """Short text about a value from outside, for an error; never the value itself when it is long."""
    if isinstance(value, bytes | str | list | dict | tuple):
        return f"{type(value).__name__} of length {len(value)}"
    return f"{type(value).__name__} {value!r}"[:80]


def _unpack(kind: str, width: int, blob: object, count: int | None) -> array[int]:
    if type(blob) is not bytes or len(blob) % width or (count is not None and len(blob) != count * width):
        wanted = f"a multiple of {width}" if count is None else f"{count} x {width}"
        raise ProtocolError(f"expected a column of {wanted} bytes, got {describe(blob)}")
    column = array(kind)
    column.frombytes(blob)
    return _little(column)


def _little(column: array[int]) -> array[int]:
    if sys.byteorder == "big":
        column.byteswap()
    return column
