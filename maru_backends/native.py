"""Binding to the native helpers of the host (``csrc/maru.h``): cache-line write-back and invalidation.

The library is optional. An install without a compiler has none, nor has a checkout in which nothing was built; then
:func:`load` returns ``None`` and :func:`why_not` says why and what to do. Nothing is opened before that.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from attrs import frozen

from maru_core.errors import BackendError

LIBRARY: Final = "libmaru_host.so"
BUILD_INFO: Final = "_build_info.json"
#: MARU_ABI_VERSION of the header that this module was written for.
ABI_VERSION: Final = 1
#: enum maru_instruction.
INSTRUCTIONS: Final = ("none", "clflush", "clflushopt", "clwb", "dc cvac", "dc civac")
_LARGEST: Final = (1 << 64) - 1


class _Host(ctypes.Structure):
    """struct maru_host."""

    _fields_ = (
        ("writeback", ctypes.c_uint32),
        ("invalidate", ctypes.c_uint32),
        ("line_bytes", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    )


@frozen
class HostFeatures:
    """What the library uses on this processor: names of instructions, and bytes per cache line."""

    writeback: str
    invalidate: str
    line_bytes: int


class NativeHost:
    """The library, open. Thread-safe; every call lets go of the interpreter lock.

    An address is a number, of memory that is mapped for the whole call: that is not checked, and a wrong one ends the
    process. A cache line that is covered in part is covered as a whole. Made by :func:`load`.
    """

    def __init__(self, library: ctypes.CDLL, path: Path) -> None:
        """Use :func:`load`; raises AttributeError when the library lacks a function."""
        self.path = path
        self._writeback = _function(library, "maru_writeback", ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)
        self._invalidate = _function(library, "maru_invalidate", ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)
        self._flush_with = _function(
            library, "maru_flush_with", ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t
        )
        self._fence = _function(library, "maru_fence", None)
        self._text = _function(library, "maru_status_text", ctypes.c_char_p, ctypes.c_int)
        features = _function(library, "maru_host_features", ctypes.c_int, ctypes.POINTER(_Host))
        found = _Host()
        features(ctypes.byref(found))
        self.features = HostFeatures(_instruction(found.writeback), _instruction(found.invalidate), found.line_bytes)

    def writeback(self, address: int, length: int) -> None:
        """Write the lines of ``length`` bytes back to memory and wait for it: stores before are visible to other hosts.

        Raises BackendError for address 0 and for a range that no address space has.
        """
        self._check(self._writeback(_address(address), _length(length)), address, length)

    def invalidate(self, address: int, length: int) -> None:
        """Forget the lines of ``length`` bytes: loads after this come from memory. Errors as of :meth:`writeback`.

        Dirty lines are written back first, over what another host has written since: there may be none.
        """
        self._check(self._invalidate(_address(address), _length(length)), address, length)

    def fence(self) -> None:
        """Everything before is complete before anything behind. ``writeback`` and ``invalidate`` have fences of their
        own; this orders other stores and loads."""
        self._fence()

    def flush_with(self, instruction: str, address: int, length: int) -> None:
        """One chosen instruction of INSTRUCTIONS on a range, for tests and measurements; BackendError if not there."""
        status = self._flush_with(INSTRUCTIONS.index(instruction), _address(address), _length(length))
        self._check(status, address, length)

    def _check(self, status: int, address: int, length: int) -> None:
        if status:
            text = self._text(status).decode()
            raise BackendError(f"cannot flush {length} bytes at {address:#x}: {text}")


def load(path: Path | None = None) -> NativeHost | None:
    """The library beside this module, or that at ``path``; ``None`` when it cannot be used (:func:`why_not`).

    Opening it again is cheap: the system keeps one copy.
    """
    found = _open(path)
    return found if isinstance(found, NativeHost) else None


def why_not(path: Path | None = None) -> str | None:
    """Why :func:`load` returns ``None``, with the remedy; ``None`` when it does not."""
    found = _open(path)
    return found if isinstance(found, str) else None


def build_info() -> dict[str, Any]:
    """What the build wrote about itself: per part (``host``) whether it is ``built``, else ``reason`` and ``remedy``.

    Empty when nothing was ever built here, or when what it wrote cannot be read.
    """
    try:
        found = json.loads(Path(__file__).with_name(BUILD_INFO).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _open(path: Path | None) -> NativeHost | str:
    place = path or Path(__file__).with_name(LIBRARY)
    if not place.exists():
        return _absent(place)
    try:
        library = ctypes.CDLL(str(place))
        found = int(_function(library, "maru_abi_version", ctypes.c_uint32)())
        if found != ABI_VERSION:
            return (
                f"{place} has version {found} of the interface, this Maru needs {ABI_VERSION}: it is left over from "
                f"another one; {_REBUILD}"
            )
        host = NativeHost(library, place)
    except (OSError, AttributeError) as error:  # for another processor or C library, or something else
        return f"{place} cannot be used: {error}; {_REBUILD}"
    if "none" in (host.features.writeback, host.features.invalidate):
        return "this processor has no instruction that flushes cache lines; it can only share memory within one host"
    return host


def _absent(place: Path) -> str:
    part = build_info().get("host")
    if isinstance(part, dict) and part.get("reason"):
        why = "; ".join(str(part[key]) for key in ("reason", "remedy") if part.get(key))
        return f"the native helpers were not built: {why}"
    return f"there is no {place}: nothing was built in this checkout; {_REBUILD}"


def _function(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    function = getattr(library, name)
    function.restype, function.argtypes = result, arguments
    return function  # type: ignore[no-any-return]


def _instruction(number: int) -> str:
    return INSTRUCTIONS[number] if number < len(INSTRUCTIONS) else f"instruction {number}"


def _address(value: int) -> int:
    # ctypes would cut a longer number down, to an address that somebody else has.
    if not 0 <= value <= _LARGEST:
        raise BackendError(f"{value:#x} is no address")
    return value


def _length(value: int) -> int:
    if not 0 <= value <= _LARGEST:
        raise BackendError(f"{value} is no length in bytes")
    return value


_REBUILD: Final = "install Maru again with a C compiler there (pip install . or pip install --editable .)"
