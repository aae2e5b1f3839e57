"""Binding to the native CUDA code (``csrc/maru.h``): structures, functions, and why they cannot be used.

The library is optional and opens the driver by itself, so that importing this module, and even loading the library,
needs neither a GPU nor torch.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from attrs import frozen

from maru_core.brake import Brake
from maru_core.errors import TransferError
from maru_core.geometry import ObjectLayout, PagedLayout
from maru_transfer.abi import geometry_of
from maru_transfer.exports import BufferCalls, Exports
from maru_transfer.native_library import load_library

LIBRARY: Final = "libmaru_cuda.so"
#: MARU_CUDA_ABI_VERSION of the header that this module was written for.
ABI_VERSION: Final = 3
REBUILD: Final = "install Maru again where nvcc can be found"

#: enum maru_way.
STAGED, BOUNCED, DIRECT, MAPPED = range(4)
#: enum maru_direction.
LOAD, STORE = range(2)
#: MARU_PLACE_SEGMENTS and MARU_PLACE_BLOCKS: what one launch takes.
MOST_SEGMENTS: Final = 32
MOST_BLOCKS: Final = 576

#: struct maru_segment.
SEGMENT: Final = np.dtype(
    [
        ("host", "u8"),
        ("offset", "u8"),
        ("pitch", "u8"),
        ("row", "u4"),
        ("rows", "u4"),
        ("step", "u4"),
        ("token", "u4"),
        ("tokens", "u4"),
        ("slice", "u4"),
        ("way", "u4"),
        ("layers", "u4"),
    ]
)
Array = np.ndarray[Any, Any]
_TEXT: Final = 512


class _Job(ctypes.Structure):
    """struct maru_job."""

    _fields_ = (
        ("segments", ctypes.c_void_p),
        ("blocks", ctypes.c_void_p),
        ("cuts", ctypes.c_void_p),
        *(
            (name, ctypes.c_uint32)
            for name in (
                "segment_count",
                "block_count",
                "first_place",
                "cut_count",
                "direction",
                "window",
                "burst",
                "grid",
                "one_by_one",
                "fold",
                "scattered",
                "scattered_grid",
            )
        ),
        ("stream", ctypes.c_uint64),
    )


class _Info(ctypes.Structure):
    """struct maru_cuda_info."""

    _fields_ = tuple(
        (name, ctypes.c_int32)
        for name in ("driver_version", "multiprocessors", "architecture", "batches", "maps_host", "reserved")
    )


@frozen
class DeviceInfo:
    """``driver_version`` as the driver counts (12080 is 12.8), ``architecture`` 90 for compute capability 9.0.

    ``batches``: the driver takes copies in batches. ``maps_host``: kernels reach registered memory at its address.
    """

    driver_version: int
    multiprocessors: int
    architecture: int
    batches: bool
    maps_host: bool


@frozen(eq=False)
class Job:
    """What one call moves. ``segments`` of type SEGMENT, ``blocks`` int32, ``cuts`` uint64, as struct maru_job says.

    ``owners``: the copy of each segment, where that is known.
    """

    direction: int
    segments: Array
    blocks: Array
    first_place: int
    cuts: Array
    owners: Array | None = None


@frozen
class Submission:
    """How a job is handed to the device: see struct maru_job."""

    window: int
    burst: int = 1
    grid: int = 0
    one_by_one: bool = False
    fold: int = 0
    scattered: int = 0
    scattered_grid: int = 0


class CudaLibrary:
    """The library, loaded. Thread-safe. Made by :func:`load`.

    In a forked child, which has none of the driver's threads, every call raises TransferError, and those that let go of
    something, which return nothing, do nothing.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        """Raises AttributeError when the library lacks a function."""
        self._owner = os.getpid()
        pointer, number, text = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_char_p
        status, size, count = ctypes.c_int, ctypes.c_size_t, ctypes.c_uint32

        def function(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
            found = getattr(library, name)
            found.argtypes, found.restype = arguments, result

            def guarded(*values: Any) -> Any:
                if os.getpid() == self._owner or result is not None:
                    self.check()
                    return found(*values)
                return None

            return guarded

        self.open = function("maru_cuda_open", status, text, ctypes.c_int, pointer, text, size)
        self.close = function("maru_cuda_close", None, pointer)
        self.query = function("maru_cuda_query", status, pointer, pointer)
        self.host_range = function("maru_cuda_host_range", status, pointer, number, pointer, pointer)
        self.bind = function(
            "maru_cuda_bind", status, pointer, pointer, pointer, number, number, count, pointer, text, size
        )
        self.unbind = function("maru_cuda_unbind", None, pointer)
        self.set_bounce = function("maru_cuda_set_bounce", status, pointer, number)
        self.submit = function("maru_cuda_submit", status, pointer, pointer)
        self.submit_layers = function("maru_cuda_submit_layers", status, pointer, pointer, pointer)
        self.layers_open = function("maru_cuda_layers_open", status, pointer, count, number, pointer, text, size)
        self.layers_close = function("maru_cuda_layers_close", None, pointer)
        self.wait_layer = function("maru_cuda_wait_layer", status, pointer, count, number)
        self.layers_done = function("maru_cuda_layers_done", status, pointer, pointer, pointer)
        self.layers_cancel = function("maru_cuda_layers_cancel", status, pointer)
        self.layers_error = function("maru_cuda_layers_error", status, pointer, text, size)
        self.run = function("maru_cuda_run", status, pointer, pointer, pointer, count, pointer)
        self.wait = function("maru_cuda_wait", status, pointer)
        self.times = function("maru_cuda_times", status, pointer, pointer, pointer)
        self.error = function("maru_cuda_error", text, pointer)
        self.buffers = BufferCalls.of(library)

    def check(self) -> None:
        """Raises TransferError in a forked child."""
        if os.getpid() != self._owner:
            raise TransferError(
                f"process {os.getpid()} was forked from {self._owner}, and what that one has open on a CUDA device is"
                " of no use here; open the engine in the child itself, started by 'spawn'"
            )


def load(path: Path | None = None) -> CudaLibrary | str:
    """The library beside this module, or that at ``path``; or why it cannot be used, with the remedy."""
    return load_library(path or Path(__file__).with_name(LIBRARY), "cuda", ABI_VERSION, CudaLibrary, REBUILD)


class CudaDevice:
    """One device, open. Thread-safe."""

    def __init__(self, library: CudaLibrary, number: int, driver: str | None = None) -> None:
        """``number`` among the devices that this process sees. Raises TransferError with the driver's reason."""
        self._library = library
        self._handle = ctypes.c_void_p()
        text = ctypes.create_string_buffer(_TEXT)
        name = None if driver is None else driver.encode()
        if library.open(name, number, ctypes.byref(self._handle), text, len(text)):
            raise TransferError(text.value.decode(errors="replace") or "no memory for a handle")
        info = _Info()
        library.query(self._handle, ctypes.byref(info))
        self.info = DeviceInfo(
            info.driver_version, info.multiprocessors, info.architecture, bool(info.batches), bool(info.maps_host)
        )

    def check(self) -> None:
        """Raises TransferError in a forked child."""
        self._library.check()

    def export(self, buffers: Sequence[Any]) -> Exports:
        """Where buffers lie, and what keeps their memory. Raises BufferError, TypeError or ValueError."""
        return Exports(self._library.buffers, buffers)

    def host_range(self, address: int) -> tuple[int, int]:
        """First address and bytes of the registered memory around ``address``; (0, 0) when it is not registered."""
        start, size = ctypes.c_uint64(), ctypes.c_uint64()
        self._library.host_range(self._handle, address, ctypes.byref(start), ctypes.byref(size))
        return start.value, size.value

    def bind(
        self,
        paged: PagedLayout,
        stored: ObjectLayout,
        layer_addresses: Sequence[int],
        staging: int,
        slot_bytes: int,
        slots: int,
    ) -> CudaPages:
        """Get ready to move pages; ``staging`` holds the slots and behind them 8 bytes per layer. TransferError."""
        handle = ctypes.c_void_p()
        text = ctypes.create_string_buffer(_TEXT)
        addresses = (ctypes.c_uint64 * len(layer_addresses))(*layer_addresses)
        status = self._library.bind(
            self._handle,
            ctypes.byref(geometry_of(paged, stored)),
            addresses,
            staging,
            slot_bytes,
            slots,
            ctypes.byref(handle),
            text,
            len(text),
        )
        if status:
            reason = text.value.decode(errors="replace") or f"status {status} for {paged}, {stored}"
            raise TransferError(f"the kernels cannot be used on these pages: {reason}")
        return CudaPages(self._library, handle)

    def follow(self, layers: int, stream: int) -> CudaLayers:
        """Follow a load of so many layers, which touches pages after what is on ``stream`` now. TransferError."""
        handle = ctypes.c_void_p()
        text = ctypes.create_string_buffer(_TEXT)
        status = self._library.layers_open(self._handle, layers, stream, ctypes.byref(handle), text, len(text))
        if status:
            raise TransferError(text.value.decode(errors="replace") or f"status {status} for {layers} layers")
        return CudaLayers(self._library, handle)

    def close(self) -> None:
        """Let go of the device; everything that was bound to it is unbound before. Idempotent."""
        handle, self._handle = self._handle, ctypes.c_void_p()
        self._library.close(handle)


def _raw(job: Job, how: Submission, stream: int) -> _Job:
    return _Job(
        job.segments.ctypes.data,
        job.blocks.ctypes.data,
        job.cuts.ctypes.data,
        len(job.segments),
        len(job.blocks),
        job.first_place,
        len(job.cuts),
        job.direction,
        how.window,
        how.burst,
        how.grid,
        how.one_by_one,
        how.fold,
        how.scattered,
        how.scattered_grid,
        stream,
    )


class CudaPages:
    """Pages of one engine rank, bound. Used by one thread at a time."""

    def __init__(self, library: CudaLibrary, handle: ctypes.c_void_p) -> None:
        self._library = library
        self._handle = handle
        self._job: Job | None = None

    def set_bounce(self, address: int) -> None:
        """Locked host memory as large as all slots."""
        self._library.set_bounce(self._handle, address)

    def submit(self, job: Job, how: Submission, stream: int, layers: CudaLayers | None = None) -> None:
        """Start a job; :meth:`wait` must follow, also when this raises TransferError.

        ``layers``: who follows it, in place of the stream.
        """
        self._job = job
        raw = _raw(job, how, stream)
        if layers is None:
            self._check(self._library.submit(self._handle, ctypes.byref(raw)))
        else:
            self._check(self._library.submit_layers(self._handle, ctypes.byref(raw), layers.handle))

    def run(
        self,
        job: Job,
        how: Submission,
        stream: int,
        brake: Brake | None = None,
        least: int = 0,
    ) -> int:
        """Move a job in one call and return how many of its segments were moved, all unless ``brake`` was used.

        ``least``: segments before Pull.YIELD counts. With a brake, pages were written when it returns. TransferError.
        """
        raw, moved = _raw(job, how, stream), ctypes.c_uint32()
        address = None if brake is None else brake.address
        status = self._library.run(self._handle, ctypes.byref(raw), address, least, ctypes.byref(moved))
        self._check(status)
        return moved.value

    def wait(self) -> None:
        """Until the job's host memory may be used again. Raises TransferError."""
        try:
            self._check(self._library.wait(self._handle))
        finally:
            self._job = None

    def times(self) -> tuple[float, float]:
        """Seconds that the last job took this thread: to issue, and asleep."""
        issued, waited = ctypes.c_double(), ctypes.c_double()
        self._library.times(self._handle, ctypes.byref(issued), ctypes.byref(waited))
        return issued.value, waited.value

    def close(self) -> None:
        """Wait for what is under way, then let go. Idempotent."""
        handle, self._handle = self._handle, ctypes.c_void_p()
        self._library.unbind(handle)

    def _check(self, status: int) -> None:
        if status:
            raise TransferError(self._library.error(self._handle).decode(errors="replace"))


class CudaLayers:
    """Events behind the layers of one load. Thread-safe; closed when no other call is under way or will come."""

    def __init__(self, library: CudaLibrary, handle: ctypes.c_void_p) -> None:
        self._library = library
        self.handle = handle

    def wait(self, layer: int, stream: int) -> None:
        """Until the layer is submitted; what comes to ``stream`` waits for its bytes. Raises TransferError."""
        self._check(self._library.wait_layer(self.handle, layer, stream))

    def done(self) -> int:
        """How many layers, from the first, have arrived. Does not block. Raises TransferError."""
        submitted, done = ctypes.c_uint32(), ctypes.c_uint32()
        self._check(self._library.layers_done(self.handle, ctypes.byref(submitted), ctypes.byref(done)))
        return done.value

    def cancel(self) -> None:
        """Submit nothing more."""
        self._library.layers_cancel(self.handle)

    def close(self) -> None:
        """Give the events back. Idempotent."""
        handle, self.handle = self.handle, ctypes.c_void_p()
        self._library.layers_close(handle)

    def _check(self, status: int) -> None:
        if status:
            text = ctypes.create_string_buffer(_TEXT)
            self._library.layers_error(self.handle, text, len(text))
            raise TransferError(text.value.decode(errors="replace") or f"status {status}")
