"""Where thousands of Python buffers lie, asked in one native call, and what keeps their memory meanwhile.

NumPy tells the address of one buffer in a microsecond, which for the objects of one layerwise request makes
milliseconds. The native code calls the interpreter's own functions, whose addresses it is given.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from attrs import frozen

from maru_core.batches import Rooms

#: struct maru_buffer.
VIEW: Final = np.dtype(
    [
        ("address", "u8"),
        ("owner", "u8"),
        ("bytes", "i8"),
        ("item_bytes", "i8"),
        ("readonly", "i4"),
        ("dimensions", "i4"),
        ("rest", "u8", 5),
    ]
)
Array = np.ndarray[Any, Any]


@frozen
class BufferCalls:
    """The native functions with the interpreter's bound: each takes the rest of what the header says."""

    take: Callable[[int, int, int], int]
    release: Callable[[int, int], None]

    @classmethod
    def of(cls, library: ctypes.CDLL) -> BufferCalls:
        """Of a library that is loaded. Raises AttributeError when it has no such functions."""
        # Only PyDLL holds the interpreter's lock, and raises what a call leaves behind.
        native = ctypes.PyDLL(library._name, handle=library._handle)
        get, let_go = (
            ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value
            for name in ("PyObject_GetBuffer", "PyBuffer_Release")
        )
        pointer, count = ctypes.c_void_p, ctypes.c_uint32
        take, release = native.maru_buffers_take, native.maru_buffers_release
        take.argtypes, take.restype = (pointer, pointer, pointer, count, pointer), count
        release.argtypes, release.restype = (pointer, pointer, count), None
        return cls(
            lambda objects, many, views: int(take(get, let_go, objects, many, views)),
            lambda views, many: release(let_go, views, many),
        )


class Exports:
    """Contiguous buffers of a request: none of them, nor what they are views of, can be let go of before release().

    ``addresses``: of the first byte of each, int64. ``readonly``: whether one of them cannot be written.
    """

    def __init__(self, calls: BufferCalls, buffers: Sequence[Any]) -> None:
        """Raises what a buffer raises: ValueError or BufferError of one that is released or not contiguous."""
        self._release = calls.release
        self._held = 0
        self._whole: Any = None
        if isinstance(buffers, Rooms) and len(buffers) and not buffers.buffer.readonly:
            # They stay when the one stays that they lie in, and nothing native is needed to ask it.
            places = _places(buffers)
            self._whole = ctypes.c_char.from_buffer(buffers.buffer)
            self.addresses: Array = places + ctypes.addressof(self._whole)
            self.readonly = False
            return
        self._views = np.zeros(len(buffers), VIEW)
        # In CPython an object's id is its address, and an object that is made for this must stay for so long.
        buffers = list(buffers)
        objects = np.fromiter(map(id, buffers), np.uintp, len(buffers))
        self._held = calls.take(objects.ctypes.data, len(buffers), self._views.ctypes.data)
        self.addresses = self._views["address"].astype(np.int64)
        self.readonly = bool(self._views["readonly"].any())

    def release(self) -> None:
        """Idempotent."""
        self._whole = None
        held, self._held = self._held, 0
        if held:
            self._release(self._views.ctypes.data, held)

    def __del__(self) -> None:
        self.release()


def _places(rooms: Rooms) -> Array:
    """Where rooms, at least one, begin in their buffer, int64. Raises ValueError when one of them leaves it."""
    places = np.fromiter(rooms.entries, np.int64, len(rooms)) * rooms.granule + rooms.origin
    if places.min() < 0 or places.max() > rooms.buffer.nbytes - rooms.nbytes or rooms.nbytes < 0:
        raise ValueError(f"objects of {rooms.nbytes} bytes leave their buffer of {rooms.buffer.nbytes}")
    return places
