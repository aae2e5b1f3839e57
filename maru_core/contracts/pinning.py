"""Host memory that a device's driver knows: who has pools registered, and who asks what is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from attrs import frozen

from maru_core.contracts.storage import Region


@frozen
class MemorySpan:
    """``length`` bytes, ``offset`` bytes behind the address that was asked about. ``pinned``: see PinnedMemory."""

    offset: int
    length: int
    pinned: bool


class PinnedMemory(Protocol):
    """Which host memory is registered with the device's driver, so that its copy engines reach it without help."""

    def spans(self, address: int, length: int) -> Sequence[MemorySpan]:
        """The bytes from ``address`` on, cut so that a span lies within one registration or outside of all.

        Together the spans are the whole stretch, in order. Holds until the transfer's call ends, not for longer: pieces
        are registered, and unregistered between calls, while engines work. A copy that crosses the edge of two spans
        may be refused by the driver. Takes microseconds.
        """


@runtime_checkable
class UsesPinnedMemory(Protocol):
    """A :class:`Transfer` with this method is told once, before its first call, where to ask. For device engines."""

    def use_pinned(self, pinned: PinnedMemory) -> None:
        """Copy directly only where ``pinned`` says so, elsewhere through memory that the engine locked itself."""


class PoolRegistrar(Protocol):
    """Follows the pools that a handler maps, to register them with a device's driver. Thread-safe; never raises."""

    def region_mapped(self, region: Region) -> None:
        """A pool was mapped. Returns at once; other threads populate and register it."""

    def region_unmapping(self, region: Region) -> None:
        """A pool is about to be unmapped. Returns at once.

        Whoever still unregisters it keeps a ``memoryview`` of it, and with that the mapping.
        """

    def stats(self) -> Mapping[str, int | float | str]:
        """Figures for the handler's stats. Must not block."""
