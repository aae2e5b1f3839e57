"""A pool on a device as its owner holds it, and as every process maps it."""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from typing import Final

from attrs import evolve

from maru_backends.locks import lock_alone
from maru_backends.mapped import MappedRegion
from maru_backends.ownership import OwnerRecord, ended, left, pack_record
from maru_backends.places import Flusher, Place, address_of
from maru_core.errors import BackendError
from maru_core.pool_format import SUPERBLOCK_SIZE
from maru_core.protocol import PoolDescriptor

#: What is written over a superblock that is to be none any more.
_NO_BLOCK: Final = bytes(256)


class CxlRegion(MappedRegion):
    """All of a pool on a device. Where hosts are not coherent, ``publish`` and ``acquire`` flush. Thread-safe."""

    #: The next server's pool is in the same memory: it cannot be made before this is unmapped.
    in_place: Final = True

    def __init__(self, descriptor: PoolDescriptor, mapping: mmap.mmap, flusher: Flusher | None) -> None:
        """``flusher`` may be ``None`` unless the descriptor says ``flush``."""
        super().__init__(descriptor, mapping)
        assert flusher is not None or not descriptor.flush
        self._flusher = flusher
        self._address = address_of(mapping)

    def publish(self, offset: int, length: int) -> None:
        """Write these bytes back where other hosts read them; raises BackendError outside the pool and when closed."""
        if self._descriptor.flush:
            self.write_back(offset, length)

    def acquire(self, offset: int, length: int) -> None:
        """Forget cached copies of these bytes where other hosts write them; errors as of :meth:`publish`."""
        if self._descriptor.flush and self._flusher is not None and length > 0:
            # The reference keeps it mapped meanwhile: a flush of memory that is not would end the process.
            mapping = self._checked(offset, length)
            self._flusher.invalidate(self._address + offset, length)
            del mapping

    def write_back(self, offset: int, length: int) -> None:
        """Write these bytes back whoever reads the pool, where that can be done at all."""
        if self._flusher is not None and length > 0:
            mapping = self._checked(offset, length)
            self._flusher.writeback(self._address + offset, length)
            del mapping

    def _checked(self, offset: int, length: int) -> mmap.mmap:
        mapping = self._mapping
        if mapping is None:
            raise BackendError(f"the region of {self._descriptor.location} is closed")
        if offset < 0 or offset + length > len(mapping):
            raise BackendError(f"{length} bytes at {offset} are outside of a pool of {len(mapping)} bytes")
        return mapping


class CxlPool:
    """A device as its owner holds it: locked by the descriptor that it is mapped with. See contracts.Pool."""

    def __init__(self, region: CxlRegion, fd: int, place: Place, record: OwnerRecord, sequence: int) -> None:
        """``fd`` holds the owner's lock. ``sequence``: of the record that is there."""
        self._region = region
        self._fd: int | None = fd
        self._place = place
        self._record = record
        self._sequence = sequence

    @property
    def region(self) -> CxlRegion:
        """The pool mapped in this process."""
        return self._region

    def note(self, record: OwnerRecord) -> None:
        """Write down whose it is now."""
        offset, packed = pack_record(record, self._sequence + 1)
        self._region.buffer[offset : offset + len(packed)] = packed
        self._region.write_back(offset, len(packed))
        self._record, self._sequence = record, self._sequence + 1

    def invalidate(self) -> None:
        """From here on there is no pool to map or to take over."""
        self._region.buffer[: len(_NO_BLOCK)] = _NO_BLOCK
        self._region.write_back(0, SUPERBLOCK_SIZE)

    def leave(self) -> None:
        """Unmap the pool and give up the lock; what is in it stays for the next server of this owner."""
        fd, self._fd = self._fd, None
        if fd is not None:
            self.note(left(self._record))
            self._region.close()
            os.close(fd)

    def nobody_left(self) -> None:
        """No client of other hosts has it mapped any more; those of this host have locks."""
        self._record = evolve(self._record, abroad=False)

    def destroy(self) -> None:
        """Unmap the pool, which nobody can map or take over any more; the device stays and says that it is released."""
        fd, self._fd = self._fd, None
        if fd is None:
            return
        self.invalidate()
        # The lock goes with the descriptor, and nobody can map the pool meanwhile.
        self.note(ended(self._record, mapped=not lock_alone(fd)))
        self._region.close()
        if self._place.made and self._place.still_names(fd):
            with suppress(FileNotFoundError):
                os.unlink(self._place.path)
        os.close(fd)
