"""A pool that is a file or device which every process maps: the client side, shared by several backends."""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import stat
from typing import Final

from maru_backends.origin import UNKNOWN
from maru_core.contracts import PoolRequest
from maru_core.errors import BackendError
from maru_core.pool_format import SUPERBLOCK_SIZE, Superblock, plan_pool, unpack_superblock
from maru_core.protocol import PoolDescriptor

#: madvise(2) since Linux 5.14, not yet named by Python. Enters pages into the page tables, writable.
_MADV_POPULATE_WRITE: Final = 23
#: Bytes per call of madvise, between two looks whether the region was closed.
_POPULATE_SLICE: Final = 64 << 20
_IDENTITY_SIZE: Final = 16


class MappedRegion:
    """A shared mapping of a whole pool; a coherent one, so that ``publish`` and ``acquire`` have nothing to do.

    Thread-safe. Implements :class:`maru_core.contracts.Region`.
    """

    def __init__(self, descriptor: PoolDescriptor, mapping: mmap.mmap, keeps: int | None = None) -> None:
        """``keeps``: a descriptor that is to be open as long as the region, closed by it."""
        self._descriptor = descriptor
        self._keeps = keeps
        self._buffer: memoryview | None = memoryview(mapping)
        self._mapping: mmap.mmap | None = mapping

    @property
    def descriptor(self) -> PoolDescriptor:
        """The pool that is mapped."""
        return self._descriptor

    @property
    def buffer(self) -> memoryview:
        """The whole pool as writable bytes; raises BackendError after :meth:`close`."""
        buffer = self._buffer
        if buffer is None:
            raise BackendError(f"the region of {self._descriptor.location} is closed")
        return buffer

    def publish(self, offset: int, length: int) -> None:
        """Nothing: processes of one host see each other's stores."""

    def acquire(self, offset: int, length: int) -> None:
        """Nothing: there are no stale copies within one host."""

    def populate(self, offset: int, length: int) -> None:
        """Take the page faults now: one costs more than copying the page that it is for."""
        try:
            view = memoryview(self.buffer)  # keeps the memory mapped meanwhile
        except BackendError:
            return
        # Not mmap.madvise(), which holds the interpreter for as long as it takes: threads of one process populate side
        # by side.
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        end = min(offset + length, view.nbytes)
        start = max(0, offset) // mmap.PAGESIZE * mmap.PAGESIZE
        for position in range(start, end, _POPULATE_SLICE):
            if self._buffer is None:
                return
            if madvise(address + position, min(_POPULATE_SLICE, end - position), _MADV_POPULATE_WRITE):
                return  # an older kernel, or memory that cannot be populated: pages are entered as they are used

    def close(self) -> None:
        """Let go of the mapping. The kernel unmaps it when the last ``memoryview`` of it is gone."""
        # mmap.close() would raise BufferError while a view is alive; dropping the last reference does the same later.
        self._buffer = None
        self._mapping = None
        keeps, self._keeps = self._keeps, None
        if keeps is not None:
            os.close(keeps)

    def __del__(self) -> None:
        keeps = getattr(self, "_keeps", None)
        if keeps is not None:
            os.close(keeps)


def new_descriptor(
    request: PoolRequest, backend: str, location: str, size: int, *, flush: bool = False
) -> PoolDescriptor:
    """A pool of ``size`` bytes as ``request`` wants it, with a new identity; raises BackendError if it is too small."""
    entry_count, data_offset = plan_pool(size, request.granule, size_setting=request.size_setting)
    return PoolDescriptor(
        pool=request.pool,
        backend=backend,
        location=location,
        identity=secrets.token_bytes(_IDENTITY_SIZE),
        size=size,
        granule=request.granule,
        entry_base=request.entry_base,
        entry_count=entry_count,
        table_offset=SUPERBLOCK_SIZE,
        data_offset=data_offset,
        flush=flush,
    )


def superblock_of(descriptor: PoolDescriptor, boot: bytes, place: bytes) -> Superblock:
    """What a new pool begins with; ``boot`` and ``place`` as in :mod:`maru_backends.origin`."""
    return Superblock(
        granule=descriptor.granule,
        entry_count=descriptor.entry_count,
        table_offset=descriptor.table_offset,
        data_offset=descriptor.data_offset,
        identity=descriptor.identity,
        boot_id=boot,
        place=place,
    )


def map_file(descriptor: PoolDescriptor, boot: bytes, keeps: int | None = None) -> MappedRegion:
    """Map the existing file that ``descriptor`` names, after checking that it is that pool; raises BackendError.

    ``boot``: id of the running kernel. A file system may show a file of another host, whose stores are seen late or
    never. ``keeps``: a descriptor that the region closes when it is closed.
    """
    location = descriptor.location
    check_geometry(descriptor)
    try:
        fd = os.open(location, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise BackendError(
            f"cannot open pool {location}: {error.strerror}; it belongs to a server that ended, to another user, or on "
            f"another host"
        ) from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise BackendError(f"pool {location} is not a plain file")
        if status.st_size != descriptor.size:
            # A mapping that is longer than the file would end the process with SIGBUS, not with an error.
            raise BackendError(f"pool {location} has {status.st_size} bytes, the server says {descriptor.size}")
        mapping = map_fd(fd, descriptor)
    finally:
        os.close(fd)
    with memoryview(mapping) as view:
        block = unpack_superblock(view[:SUPERBLOCK_SIZE])
    check_block(block, descriptor, location)
    if block.boot_id != boot and UNKNOWN not in (block.boot_id, boot):
        raise BackendError(f"pool {location} is memory of another host, or of this one before it was started anew")
    return MappedRegion(descriptor, mapping, keeps)


def map_fd(fd: int, descriptor: PoolDescriptor) -> mmap.mmap:
    """Map all of an open pool, shared and writable; raises BackendError."""
    try:
        return mmap.mmap(fd, descriptor.size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    except (OSError, ValueError, OverflowError) as error:
        raise BackendError(f"cannot map {descriptor.size} bytes of pool {descriptor.location}: {error}") from error


def check_block(block: Superblock, descriptor: PoolDescriptor, location: str) -> None:
    """Raise BackendError unless ``block``, found at ``location``, is that of the pool in ``descriptor``."""
    if block.identity != descriptor.identity:
        raise BackendError(
            f"pool {location} is {block.identity.hex()}, the server says {descriptor.identity.hex()}: "
            "it was made anew, connect again"
        )
    geometry = (block.granule, block.entry_count, block.table_offset, block.data_offset)
    expected = (descriptor.granule, descriptor.entry_count, descriptor.table_offset, descriptor.data_offset)
    if geometry != expected:
        raise BackendError(f"pool {location} has geometry {geometry}, the server says {expected}")


def check_geometry(descriptor: PoolDescriptor) -> None:
    """Refuse a descriptor whose table or data would lie outside of the pool."""
    if not descriptor.is_possible:
        raise BackendError(f"the server describes a pool that cannot be: {descriptor}")
