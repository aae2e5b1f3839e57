"""The part of CUDA's driver that page-locks memory, called without any binding.

The driver's own interface, not the runtime's: an error of a call is that call's result and nothing else, where the
runtime also keeps it for whoever asks next, which would be the engine's next kernel.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Protocol

LIBRARY: Final = "libcuda.so.1"

INVALID_VALUE: Final = 1
OUT_OF_MEMORY: Final = 2
DEINITIALIZED: Final = 4
OPERATING_SYSTEM: Final = 304
ALREADY_REGISTERED: Final = 712
NOT_PERMITTED: Final = 800
NOT_SUPPORTED: Final = 801
#: Not of the driver: there is none, or it lacks what is needed.
NO_DRIVER: Final = -1

#: For every context of the process, and mapped into the device's address space for kernels that read it.
_PORTABLE_AND_MAPPED: Final = 1 | 2
_CAPTURE_RELAXED: Final = 2


class DriverError(Exception):
    """A call of the driver failed; ``code`` is its result, the text names call and reason."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class HostMemoryDriver(Protocol):
    """Page-locks memory for one device. Any thread may call once it called :meth:`attach`; all raise DriverError."""

    def attach(self) -> None:
        """Let the calling thread use the device."""

    def register(self, address: int, length: int) -> None:
        """Lock these bytes and let the device reach them by itself; all of them or none."""

    def unregister(self, address: int, length: int) -> None:
        """Undo :meth:`register` of the same bytes. No copy may be under way in them."""

    def close(self) -> None:
        """Let go of the device. Idempotent."""


def driver_version(library: str = LIBRARY) -> tuple[int, int]:
    """CUDA version of the driver (13000: 13.0) and number of devices that this process sees; raises DriverError.

    Makes no context, hence takes no memory of a device.
    """
    try:
        cuda = ctypes.CDLL(library)
        functions = cuda.cuInit, cuda.cuDriverGetVersion, cuda.cuDeviceGetCount
    except (OSError, AttributeError) as error:
        raise DriverError(NO_DRIVER, f"{library} cannot be used: {error}") from error
    version, count = ctypes.c_int(), ctypes.c_int()
    calls = (("cuInit", 0), ("cuDriverGetVersion", ctypes.byref(version)), ("cuDeviceGetCount", ctypes.byref(count)))
    for function, (name, argument) in zip(functions, calls, strict=True):
        result = function(argument)
        if result:
            raise DriverError(result, f"{name} failed ({result})")
    return version.value, count.value


class CudaDriver:
    """One CUDA device through its primary context, the one that torch uses. Implements :class:`HostMemoryDriver`."""

    def __init__(self, device: int, library: str = LIBRARY) -> None:
        """``device``: its number among those that this process sees. Raises DriverError."""
        try:
            self._library = ctypes.CDLL(library)
            self._init, self._device_get, self._retain, self._release, self._set_current = (
                self._function(name, *arguments)
                for name, arguments in (
                    ("cuInit", (ctypes.c_uint,)),
                    ("cuDeviceGet", (ctypes.POINTER(ctypes.c_int), ctypes.c_int)),
                    ("cuDevicePrimaryCtxRetain", (ctypes.POINTER(ctypes.c_void_p), ctypes.c_int)),
                    ("cuDevicePrimaryCtxRelease_v2", (ctypes.c_int,)),
                    ("cuCtxSetCurrent", (ctypes.c_void_p,)),
                )
            )
            self._capture_mode = self._function("cuThreadExchangeStreamCaptureMode", ctypes.POINTER(ctypes.c_int))
            self._register = self._function("cuMemHostRegister_v2", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
            self._unregister = self._function("cuMemHostUnregister", ctypes.c_void_p)
            self._name = self._function("cuGetErrorName", ctypes.c_int, ctypes.POINTER(ctypes.c_char_p))
            self._text = self._function("cuGetErrorString", ctypes.c_int, ctypes.POINTER(ctypes.c_char_p))
        except (OSError, AttributeError) as error:
            raise DriverError(
                NO_DRIVER,
                f"{library} cannot be used: {error}; it comes with NVIDIA's driver (in a container: --gpus all)",
            ) from error
        self._context = ctypes.c_void_p()
        self._device = ctypes.c_int()
        self._check("cuInit", self._init(0))
        self._check("cuDeviceGet", self._device_get(ctypes.byref(self._device), device))
        self._check("cuDevicePrimaryCtxRetain", self._retain(ctypes.byref(self._context), self._device.value))
        self._open = True

    def attach(self) -> None:
        """Make the device's primary context current on this thread."""
        self._check("cuCtxSetCurrent", self._set_current(self._context))

    def register(self, address: int, length: int) -> None:
        """``cuMemHostRegister``."""
        with self._beside_captures():
            result = self._register(address, length, _PORTABLE_AND_MAPPED)
        self._check(f"cuMemHostRegister of {length} bytes", result)

    def unregister(self, address: int, length: int) -> None:
        """``cuMemHostUnregister``."""
        with self._beside_captures():
            result = self._unregister(address)
        self._check(f"cuMemHostUnregister of {length} bytes", result)

    def close(self) -> None:
        """Release the primary context, which lives on as long as torch uses it."""
        if self._open:
            self._open = False
            self._release(self._device.value)

    @contextmanager
    def _beside_captures(self) -> Iterator[None]:
        """An engine captures CUDA graphs while its pools are registered.

        A thread in the driver's usual mode is refused these calls then, and spoils the capture, which ends the engine.
        """
        mode = ctypes.c_int(_CAPTURE_RELAXED)
        self._check("cuThreadExchangeStreamCaptureMode", self._capture_mode(ctypes.byref(mode)))
        try:
            yield
        finally:
            self._capture_mode(ctypes.byref(mode))

    def _function(self, name: str, *arguments: type[object]) -> Callable[..., int]:
        function = getattr(self._library, name)
        function.argtypes = arguments
        function.restype = ctypes.c_int
        return function  # type: ignore[no-any-return]

    def _check(self, call: str, result: int) -> None:
        if result == 0:
            return
        words = []
        for ask in (self._name, self._text):
            answer = ctypes.c_char_p()
            words.append(answer.value.decode() if ask(result, ctypes.byref(answer)) == 0 and answer.value else "")
        raise DriverError(result, f"{call} failed: {words[0] or 'error'} ({result}) {words[1]}".rstrip())
