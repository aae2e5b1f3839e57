"""Where a transfer gets memory from, and which memory of the host is locked. torch is imported when it is asked."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from attrs import frozen

from maru_core.contracts import PinnedMemory

if TYPE_CHECKING:
    from maru_transfer.cuda_library import CudaDevice

#: (first byte, byte behind the last, locked): stretches of host memory that lie within one registration or in none.
Spans = Sequence[tuple[int, int, bool]]


class Memory(Protocol):
    """Where a transfer gets memory and the caller's stream from: torch, so that torch accounts for it."""

    def on_device(self, nbytes: int) -> tuple[Any, int]:
        """Memory of the device that no stream uses any more: its owner, and its address, a multiple of 256.

        May raise RuntimeError.
        """

    def locked(self, nbytes: int) -> tuple[Any, int]:
        """Page-locked memory of the host, likewise."""

    def stream(self) -> int:
        """The calling thread's current stream."""


@frozen
class TorchMemory:
    """Implements :class:`Memory` by torch's allocators."""

    device: Any

    def on_device(self, nbytes: int) -> tuple[Any, int]:
        """See :class:`Memory`; so are the others."""
        torch = importlib.import_module("torch")
        tensor = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        # Torch hands memory out again while what had it still runs on this stream, for which our lanes do not wait.
        torch.cuda.current_stream(self.device).synchronize()
        return tensor, tensor.data_ptr()

    def locked(self, nbytes: int) -> tuple[Any, int]:
        """Accounted for by torch, too."""
        torch = importlib.import_module("torch")
        tensor = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return tensor, tensor.data_ptr()

    def stream(self) -> int:
        """On this device."""
        torch = importlib.import_module("torch")
        return int(torch.cuda.current_stream(self.device).cuda_stream)


def asking(device: CudaDevice) -> Callable[[int, int], Spans]:
    """Asks the driver about each stretch, for one job: what it does not know as a whole is not locked."""
    known = (0, 0)

    def spans(address: int, length: int) -> Spans:
        nonlocal known
        at, end = address, address + length
        if known[0] <= at and end <= known[1]:
            return [(at, end, True)]
        found: list[tuple[int, int, bool]] = []
        while at < end:
            start, size = device.host_range(at)
            # Where a device sees host memory at other addresses, the range that is told is of those.
            if not start <= at < start + size:
                return [(address, end, False)]
            known = (start, start + size)
            found.append((at, min(end, known[1]), True))
            at = known[1]
        return found

    return spans


def told(pinned: PinnedMemory) -> Callable[[int, int], Spans]:
    """What a PinnedMemory says, by address."""

    def spans(address: int, length: int) -> Spans:
        return [(address + s.offset, address + s.offset + s.length, s.pinned) for s in pinned.spans(address, length)]

    return spans
