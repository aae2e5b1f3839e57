"""The pools of one server epoch as this process sees them: mapping, views, header checks."""

from __future__ import annotations

import struct
import threading
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from maru_core.client.columns import check_place
from maru_core.contracts import PoolRegistrar, ReadExtent, Region, StorageBackend
from maru_core.errors import BackendError, StaleEpoch
from maru_core.pool_format import (
    DIGEST_SIZE,
    HEADER_SIZE,
    HEADER_VIEW_OFFSET,
    KEY_SIZE,
    Header,
    State,
    unpack_header,
)
from maru_core.population import Population
from maru_core.protocol.messages import PoolDescriptor

#: state, generation, length, (session, checksum), namespace digest: what proves that an object is still there.
_PROOF = struct.Struct(f"<B3xIQ16x{DIGEST_SIZE}s")
#: The same and, behind weights epoch and parent, the key.
_PROOF_OF_KEY = struct.Struct(f"{_PROOF.format}12x{KEY_SIZE}x{KEY_SIZE}s")

#: Seconds between two looks whether the regions were closed while they are populated.
_LOOK = 0.1


class Backends(Protocol):
    """The part of the plugin host that mapping needs."""

    def backend(self, name: str) -> StorageBackend:
        """The storage backend of this name; raises BackendError with the known names."""

    def region_mapped(self, region: Region) -> None:
        """Tell the device hints."""

    def region_unmapping(self, region: Region) -> None:
        """Tell the device hints."""

    def before_read(self, region: Region, extents: Sequence[ReadExtent]) -> None:
        """Tell the device hints."""

    def after_read(self, region: Region, extents: Sequence[ReadExtent]) -> None:
        """Tell the device hints."""


class Regions:
    """Pools, mapped when first used or all at once. Thread-safe; after :meth:`close` everything raises StaleEpoch."""

    def __init__(
        self,
        pools: Sequence[PoolDescriptor],
        host: Backends,
        digest: bytes,
        registrar: PoolRegistrar | None = None,
    ) -> None:
        """``registrar``: follows what is mapped and unmapped here."""
        self._pools = tuple(pools)
        self._registrar = registrar
        self._host = host
        self._digest = digest
        self._lock = threading.Lock()
        self._mapped: dict[int, Region] = {}
        self._closed = False

    def map_all(self) -> None:
        """Map every pool; raises BackendError."""
        for pool in self._pools:
            self.of(pool)

    def populate(self) -> None:
        """Take the page faults of every mapped pool now, which takes seconds for a large one; ends early on close."""
        for region in list(self._mapped.values()):
            population = Population(region)
            while not population.reach(region.descriptor.size, timeout=_LOOK):
                if self._closed:
                    population.stop()
                    return

    def of(self, pool: PoolDescriptor) -> Region:
        """The region of a pool, mapped on first use; raises BackendError, StaleEpoch."""
        region = self._mapped.get(pool.pool)
        if region is not None:
            return region
        with self._lock:
            if self._closed:
                raise _gone()
            region = self._mapped.get(pool.pool)
            if region is None:
                region = self._host.backend(pool.backend).map_region(pool)
                self._host.region_mapped(region)
                if self._registrar is not None:
                    self._registrar.region_mapped(region)
                self._mapped[pool.pool] = region
            return region

    def view(self, entry: int, length: int) -> memoryview:
        """Writable view of ``length`` bytes from ``entry`` on; raises ProtocolError when that leaves the pool."""
        pool = check_place(entry, length, self._pools)
        region = self.of(pool)
        offset = _offset(pool, entry)
        try:
            region.acquire(offset, length)
            return region.buffer[offset : offset + length]
        except (ValueError, BackendError):
            if not self._closed:
                raise
            raise _gone() from None

    @contextmanager
    def reading(self, entries: Sequence[int], lengths: Sequence[int]) -> Iterator[None]:
        """Announce a read of these objects to the device hints, and its end."""
        extents: dict[int, list[ReadExtent]] = {}
        regions: dict[int, Region] = {}
        for entry, length in sorted(zip(entries, lengths, strict=True)):
            pool = check_place(entry, length, self._pools)
            regions[pool.pool] = self.of(pool)
            extents.setdefault(pool.pool, []).append(ReadExtent(pool.pool, _offset(pool, entry), length))
        for number, region in regions.items():
            self._host.before_read(region, extents[number])
        try:
            yield
        finally:
            for number, region in regions.items():
                self._host.after_read(region, extents[number])

    def publish(self, entries: Sequence[int], lengths: Sequence[int]) -> None:
        """Make the bytes of these objects visible to every reader. Runs of adjacent objects are published at once."""
        try:
            for region, offset, length in self._runs(entries, lengths):
                region.publish(offset, length)
        except (ValueError, BackendError):
            if not self._closed:
                raise
            raise _gone() from None

    def _runs(self, entries: Sequence[int], lengths: Sequence[int]) -> Iterator[tuple[Region, int, int]]:
        """Region, offset and length of each run of objects that lie behind one another."""
        if not entries:
            return
        first, size, count = entries[0], lengths[0], len(entries)
        pool = check_place(first, size, self._pools)
        pages = -(-size // pool.granule)
        if lengths.count(size) == count and entries == array("I", range(first, first + count * pages, pages)):
            # The usual case, a whole reservation from free space that is not fragmented.
            check_place(entries[-1], size, self._pools)
            yield self.of(pool), _offset(pool, first), (count - 1) * pages * pool.granule + size
            return
        low, high = pool.entry_base, pool.entry_base + pool.entry_count
        start, after, end = first, first, 0
        for entry, length in zip(entries, lengths, strict=True):
            if entry != after or not low <= entry < high:
                if end:
                    yield self.of(pool), _offset(pool, start), end
                pool = check_place(entry, length, self._pools)
                low, high = pool.entry_base, pool.entry_base + pool.entry_count
                start = entry
            end = (entry - start) * pool.granule + length
            after = entry - (-length // pool.granule)
        yield self.of(pool), _offset(pool, start), end

    def verify(self, entries: Sequence[int], generations: Sequence[int], lengths: Sequence[int]) -> list[bool]:
        """For each object: READY, of this generation, length and namespace, judged by its header now."""
        verdicts: list[bool] = []
        low = high = 0
        unpack, ready, digest = _PROOF.unpack_from, State.READY, self._digest
        try:
            for entry, generation, length in zip(entries, generations, lengths, strict=True):
                if not low <= entry < high:
                    pool = check_place(entry, length, self._pools)
                    low, high = pool.entry_base, pool.entry_base + pool.entry_count
                    region = self.of(pool)
                    buffer, table = region.buffer, pool.table_offset - low * HEADER_SIZE
                offset = table + entry * HEADER_SIZE
                region.acquire(offset, HEADER_SIZE)
                verdicts.append(unpack(buffer, offset + HEADER_VIEW_OFFSET) == (ready, generation, length, digest))
        except (ValueError, BackendError, StaleEpoch):
            if not self._closed:
                raise
            return [False] * len(entries)
        return verdicts

    def is_granted(self, entry: int, generation: int, length: int, key: bytes) -> bool:
        """:meth:`verify` for one object, whose header must also name ``key``."""
        try:
            pool = check_place(entry, length, self._pools)
            region = self.of(pool)
            offset = pool.header_at(entry)
            region.acquire(offset, HEADER_SIZE)
            found = _PROOF_OF_KEY.unpack_from(region.buffer, offset + HEADER_VIEW_OFFSET)
        except (ValueError, BackendError, StaleEpoch):
            if not self._closed:
                raise
            return False
        return found == (State.READY, generation, length, self._digest, key)

    def header(self, entry: int, length: int) -> Header | None:
        """The whole header of an object, ``None`` when its CRC does not hold; raises StaleEpoch."""
        pool = check_place(entry, length, self._pools)
        region = self.of(pool)
        offset = pool.header_at(entry)
        try:
            region.acquire(offset, HEADER_SIZE)
            return unpack_header(region.buffer[offset : offset + HEADER_SIZE])
        except (ValueError, BackendError):
            if not self._closed:
                raise
            raise _gone() from None

    def close(self) -> None:
        """Unmap everything; memory that a live memoryview shows stays mapped until that is gone. Idempotent."""
        with self._lock:
            self._closed = True
            regions = list(self._mapped.values())
            self._mapped.clear()
        for region in regions:
            if self._registrar is not None:
                self._registrar.region_unmapping(region)
            self._host.region_unmapping(region)
            region.close()


def _offset(pool: PoolDescriptor, entry: int) -> int:
    return pool.data_offset + (entry - pool.entry_base) * pool.granule


def _gone() -> StaleEpoch:
    return StaleEpoch("the pools were unmapped: the server restarted or the handler was closed; look the keys up again")
