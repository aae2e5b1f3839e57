"""A pool as a process maps it. What each method must do is in ``maru_core.contracts.Region``."""

from __future__ import annotations

import mmap
import os
import stat

from maru_core.errors import BackendError
from maru_core.pool_format import SUPERBLOCK_SIZE, unpack_superblock
from maru_core.protocol import PoolDescriptor

_SLICE = 1 << 20


class FileRegion:
    """A shared mapping of a whole file."""

    def __init__(self, descriptor: PoolDescriptor, mapping: mmap.mmap) -> None:
        self._descriptor = descriptor
        self._buffer: memoryview | None = memoryview(mapping)

    @property
    def descriptor(self) -> PoolDescriptor:
        """The pool that is mapped."""
        return self._descriptor

    @property
    def buffer(self) -> memoryview:
        """The whole pool, writable; raises BackendError after close."""
        buffer = self._buffer
        if buffer is None:
            raise BackendError(f"the region of {self._descriptor.location} is closed")
        return buffer

    def publish(self, offset: int, length: int) -> None:
        """Nothing: processes of one host see each other's stores to a file that they share."""

    def acquire(self, offset: int, length: int) -> None:
        """Nothing, for the same reason."""

    def populate(self, offset: int, length: int) -> None:
        """Read a byte of each page, so that it is in memory and mapped. Other threads run between slices."""
        buffer = self._buffer
        if buffer is None:
            return
        end = min(offset + length, len(buffer))
        for start in range(max(0, offset), end, _SLICE):
            bytes(buffer[start : min(start + _SLICE, end) : mmap.PAGESIZE])

    def close(self) -> None:
        """Let go. The kernel unmaps the file when nothing shows its memory any more."""
        self._buffer = None


def map_pool(descriptor: PoolDescriptor) -> FileRegion:
    """Map the pool that a server describes; raises BackendError unless it is exactly that one."""
    try:
        fd = os.open(descriptor.location, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise BackendError(f"cannot open pool {descriptor.location}: {error.strerror}; is its server gone?") from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size != descriptor.size:
            # A mapping that is longer than its file would end the process, not raise.
            raise BackendError(
                f"pool {descriptor.location} has {status.st_size} bytes, the server says {descriptor.size}"
            )
        block = unpack_superblock(os.pread(fd, SUPERBLOCK_SIZE, 0))
        found = (block.identity, block.granule, block.entry_count, block.table_offset, block.data_offset)
        d = descriptor
        if found != (d.identity, d.granule, d.entry_count, d.table_offset, d.data_offset) or d.entry_base < 0:
            raise BackendError(f"pool {d.location} is {block}, the server says {d}: it was made anew, connect again")
        return map_open(fd, descriptor)
    finally:
        os.close(fd)


def map_open(fd: int, descriptor: PoolDescriptor) -> FileRegion:
    """Map a file that is open; raises BackendError."""
    try:
        mapping = mmap.mmap(fd, descriptor.size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    except (OSError, ValueError) as error:
        raise BackendError(f"cannot map {descriptor.size} bytes of pool {descriptor.location}: {error}") from error
    return FileRegion(descriptor, mapping)
