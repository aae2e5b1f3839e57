"""A driver that locks nothing, and notices every wrong call; and pools to register with it."""

from __future__ import annotations

import mmap
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from maru_transfer.cuda_driver import ALREADY_REGISTERED, INVALID_VALUE, DriverError

MIB = 1 << 20
#: Drivers since 580 refuse one registration of this many bytes or more (R106).
REFUSED_FROM = 1 << 39


def is_mapped(address: int, length: int) -> bool:
    """Whether every byte is in this process's address space."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, _, end = line.partition(" ")[0].partition("-")
        if int(start, 16) <= address < int(end, 16):
            if address + length <= int(end, 16):
                return True
            length -= int(end, 16) - address
            address = int(end, 16)
    return False


class FakeDriver:
    """Refuses what real drivers refuse. ``errors``: by number of the call of ``register``, what that one raises.

    ``gate``: a semaphore that each call of ``register`` takes before it is answered.
    """

    def __init__(self, errors: dict[int, Exception] | None = None, gate: threading.Semaphore | None = None) -> None:
        self.registered: dict[int, int] = {}
        self.calls: list[tuple[int, int]] = []
        self.undone: list[tuple[int, int]] = []
        self.faults: list[str] = []
        self.opened = 0
        self.closed = 0
        self._errors = errors or {}
        self._gate = gate
        self._local = threading.local()

    def open(self) -> FakeDriver:
        self.opened += 1
        return self

    def attach(self) -> None:
        self._local.attached = True

    def register(self, address: int, length: int) -> None:
        self._check("register", address, length)
        number = len(self.calls)
        self.calls.append((address, length))
        if self._gate is not None:
            self._gate.acquire()
        if number in self._errors:
            raise self._errors[number]
        if length >= REFUSED_FROM:
            raise DriverError(INVALID_VALUE, "invalid argument")
        if any(start < address + length and address < start + size for start, size in self.registered.items()):
            raise DriverError(ALREADY_REGISTERED, "already registered")
        self.registered[address] = length

    def unregister(self, address: int, length: int) -> None:
        self._check("unregister", address, length)
        if self.registered.pop(address, None) != length:
            self.faults.append(f"unregister of {address:#x}, {length}, which is not registered")
        self.undone.append((address, length))

    def close(self) -> None:
        self.closed += 1
        if self.registered:
            self.faults.append("closed with memory that is registered")

    def _check(self, call: str, address: int, length: int) -> None:
        if not getattr(self._local, "attached", False):
            self.faults.append(f"{call} on a thread without the device")
        if self.closed:
            self.faults.append(f"{call} after close")
        if address % mmap.PAGESIZE or length % mmap.PAGESIZE or length <= 0:
            self.faults.append(f"{call} of {address:#x}, {length}: not whole pages")
        if not is_mapped(address, length):
            self.faults.append(f"{call} of {address:#x}, {length}: not mapped")


class FakeRegion:
    """A mapped file of ``size`` bytes, sparse. Unmapped when closed and nothing shows it."""

    def __init__(self, path: Path, size: int) -> None:
        with path.open("wb+") as file:
            file.truncate(size)
            mapping = mmap.mmap(file.fileno(), size)
        self._buffer: memoryview | None = memoryview(mapping)
        self.populated: list[tuple[int, int]] = []
        self.descriptor: Any = SimpleNamespace(location=str(path), size=size)

    @property
    def buffer(self) -> memoryview:
        assert self._buffer is not None
        return self._buffer

    def populate(self, offset: int, length: int) -> None:
        self.populated.append((offset, length))

    def publish(self, offset: int, length: int) -> None:
        """Not used."""

    acquire = publish

    def close(self) -> None:
        self._buffer = None
