"""The pools of one server epoch as this process sees them: mapping, views, header checks."""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from typing import Protocol

from maru_core.client.columns import check_place
from maru_core.contracts import Region, StorageBackend
from maru_core.errors import BackendError, StaleEpoch
from maru_core.pool_format import DIGEST_SIZE, HEADER_SIZE, HEADER_VIEW_OFFSET, State
from maru_core.protocol.messages import PoolDescriptor

#: state, generation, length, (session, checksum), namespace digest: what proves that an object is still there.
_PROOF = struct.Struct(f"<B3xIQ16x{DIGEST_SIZE}s")


class Backends(Protocol):
    """The part of the plugin host that mapping needs."""

    def backend(self, name: str) -> StorageBackend:
        """The storage backend of this name; raises BackendError with the known names."""

    def region_mapped(self, region: Region) -> None:
        """Tell the device hints."""

    def region_unmapping(self, region: Region) -> None:
        """Tell the device hints."""


class Regions:
    """Pools, mapped when first used or all at once. Thread-safe; after :meth:`close` everything raises StaleEpoch."""

    def __init__(self, pools: Sequence[PoolDescriptor], host: Backends, digest: bytes) -> None:
        self._pools = tuple(pools)
        self._host = host
        self._digest = digest
        self._lock = threading.Lock()
        self._mapped: dict[int, Region] = {}
        self._closed = False

    def map_all(self) -> None:
        """Map every pool; raises BackendError."""
        for pool in self._pools:
            self.of(pool)

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
                self._mapped[pool.pool] = region
            return region

    def view(self, entry: int, length: int) -> memoryview:
        """Writable view of ``length`` bytes from ``entry`` on; raises ProtocolError when that leaves the pool."""
        pool = check_place(entry, length, self._pools)
        region = self.of(pool)
        offset = pool.data_offset + (entry - pool.entry_base) * pool.granule
        try:
            region.acquire(offset, length)
            return region.buffer[offset : offset + length]
        except (ValueError, BackendError):
            if not self._closed:
                raise
            raise _gone() from None

    def publish(self, entries: Sequence[int], lengths: Sequence[int]) -> None:
        """Make the bytes of these objects visible to every reader. Runs of adjacent objects are published at once."""
        start = end = 0
        region: Region | None = None
        pool: PoolDescriptor | None = None
        try:
            for entry, length in zip(entries, lengths, strict=True):
                if pool is None or not pool.entry_base <= entry < pool.entry_base + pool.entry_count:
                    if region is not None:
                        region.publish(start, end - start)
                    pool = check_place(entry, length, self._pools)
                    region = self.of(pool)
                    start = end = pool.data_offset + (entry - pool.entry_base) * pool.granule
                offset = pool.data_offset + (entry - pool.entry_base) * pool.granule
                if offset != -(-end // pool.granule) * pool.granule and region is not None:
                    region.publish(start, end - start)
                    start = offset
                end = offset + length
            if region is not None:
                region.publish(start, end - start)
        except (ValueError, BackendError):
            if not self._closed:
                raise
            raise _gone() from None

    def verify(self, entries: Sequence[int], generations: Sequence[int], lengths: Sequence[int]) -> list[bool]:
        """For each object: READY, of this generation, length and namespace, judged by its header now."""
        verdicts = []
        pool: PoolDescriptor | None = None
        try:
            for entry, generation, length in zip(entries, generations, lengths, strict=True):
                if pool is None or not pool.entry_base <= entry < pool.entry_base + pool.entry_count:
                    pool = check_place(entry, length, self._pools)
                    region = self.of(pool)
                    buffer = region.buffer
                offset = pool.table_offset + (entry - pool.entry_base) * HEADER_SIZE
                region.acquire(offset, HEADER_SIZE)
                proof = _PROOF.unpack_from(buffer, offset + HEADER_VIEW_OFFSET)
                verdicts.append(proof == (State.READY, generation, length, self._digest))
        except (ValueError, BackendError):
            if not self._closed:
                raise
            return [False] * len(entries)
        return verdicts

    def close(self) -> None:
        """Unmap everything; memory that a live memoryview shows stays mapped until that is gone. Idempotent."""
        with self._lock:
            self._closed = True
            regions = list(self._mapped.values())
        for region in regions:
            self._host.region_unmapping(region)
            region.close()


def _gone() -> StaleEpoch:
    return StaleEpoch("the pools were unmapped: the server restarted or the handler was closed; look the keys up again")
