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
    """Contiguous buffers of a request: none of them, nor what they are views of, can be let go of before release()."""

    def __init__(self, calls: BufferCalls, buffers: Sequence[Any]) -> None:
        """Raises what a buffer raises: ValueError or BufferError of one that is released or not contiguous."""
        self._release = calls.release
        self._held = 0
        self._views = np.zeros(len(buffers), VIEW)
        # In CPython an object's id is its address.
        objects = np.fromiter(map(id, buffers), np.uintp, len(buffers))
        self._held = calls.take(objects.ctypes.data, len(buffers), self._views.ctypes.data)

    @property
    def addresses(self) -> Array:
        """Of the first byte of each, int64."""
        return self._views["address"].astype(np.int64)

    @property
    def readonly(self) -> Array:
        """Of each, whether it cannot be written."""
        flags: Array = self._views["readonly"] != 0
        return flags

    def release(self) -> None:
        """Idempotent."""
        held, self._held = self._held, 0
        if held:
            self._release(self._views.ctypes.data, held)

    def __del__(self) -> None:
        self.release()
