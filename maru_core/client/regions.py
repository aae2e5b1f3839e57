"""The pools of one server epoch as this process sees them: mapping, views, header checks, barriers.

Barriers (docs/visibility.md): ``publish`` lies between the last byte that is written and COMMIT, ``acquire`` between
the reply to ACQUIRE and the first byte that is read, ``settle`` between the last byte of what is given up and ABORT.
What they do is up to the region. Only ``publish`` is called where all who map the pools are coherent.
"""

from __future__ import annotations

import struct
import threading
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol

from maru_core.batches import Rooms
from maru_core.client.columns import check_place
from maru_core.contracts import PoolRegistrar, ReadExtent, Region, StorageBackend
from maru_core.errors import BackendError, MaruError, StaleEpoch
from maru_core.foreign import map_region
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
from maru_core.protocol.messages import NO_ENTRY, PoolDescriptor

#: state, generation, length, (session, checksum), namespace digest: what proves that an object is still there.
_PROOF = struct.Struct(f"<B3xIQ16x{DIGEST_SIZE}s")
#: The same and, behind weights epoch and parent, the key.
_PROOF_OF_KEY = struct.Struct(f"{_PROOF.format}12x{KEY_SIZE}x{KEY_SIZE}s")

#: Headers up to this many entries apart are acquired at once: a line more costs less than a call.
_HEADER_GAP = 8
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

    @property
    def hears_reads(self) -> bool:
        """Whether any device hint wants to be told of reads."""

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
        self._shared_by_hosts = any(pool.flush for pool in pools)
        self._let_go = False

    @property
    def was_let_go(self) -> bool:
        """Whether :meth:`let_go` unmapped something that was not mapped again since."""
        return self._let_go

    def let_go(self) -> None:
        """Unmap pools whose memory is in the way of the next server's; each is mapped again when it is used."""
        with self._lock:
            regions = [region for region in self._mapped.values() if getattr(region, "in_place", False)]
            self._let_go = self._let_go or bool(regions)
            for region in regions:
                del self._mapped[region.descriptor.pool]
        self._unmap(regions)

    def map_all(self) -> None:
        """Map every pool; raises BackendError."""
        for pool in self._pools:
            self.of(pool)

    def populate(self) -> None:
        """Take the page faults of every mapped pool now, which takes seconds for a large one; ends early on close."""
        for region in list(self._mapped.values()):
            try:
                population = Population(region)
            except RuntimeError:  # this process gets no more threads: whoever uses a page first populates it
                return
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
                region = map_region(self._host.backend, pool)
                self._host.region_mapped(region)
                if self._registrar is not None:
                    self._registrar.region_mapped(region)
                self._mapped[pool.pool] = region
                self._let_go = False
            return region

    def view(self, entry: int, length: int) -> memoryview:
        """Writable view of ``length`` bytes from ``entry`` on, fit to be read: :meth:`acquire` and :meth:`room`."""
        if self._shared_by_hosts:
            self.acquire((entry,), (length,))
        return self.room(entry, length)

    def room(self, entry: int, length: int) -> memoryview:
        """Writable view without a barrier: to be written, or of what was acquired before.

        Raises ProtocolError when it would leave the pool, StaleEpoch.
        """
        pool = check_place(entry, length, self._pools)
        region = self.of(pool)
        offset = _offset(pool, entry)
        try:
            return region.buffer[offset : offset + length]
        except (ValueError, BackendError):
            if not (self._closed or self._let_go):
                raise
            raise _gone() from None

    def rooms(self, entries: Sequence[int], lengths: Sequence[int]) -> Sequence[memoryview]:
        """:meth:`room` for each of many objects; in a fraction of the time where pool and length are the same."""
        if entries and lengths.count(lengths[0]) == len(entries) == len(lengths):
            with suppress(ValueError, BackendError):  # room says what is wrong
                pool = check_place(max(entries), lengths[0], self._pools)
                if min(entries) >= pool.entry_base:  # what is before the last one in its pool has room there, too
                    buffer = self.of(pool).buffer[:]
                    return Rooms(buffer, entries, _offset(pool, 0), pool.granule, lengths[0])
        return [self.room(entry, length) for entry, length in zip(entries, lengths, strict=True)]

    def acquire(self, entries: Sequence[int], lengths: Sequence[int]) -> None:
        """Forget stale copies of the bytes of these objects, in full; runs of adjacent ones at once.

        Once after they were leased: nobody writes them before the lease ends. Entries that are NO_ENTRY are left out.
        """
        if not self._shared_by_hosts:
            return
        if NO_ENTRY in entries:
            there = [index for index, entry in enumerate(entries) if entry != NO_ENTRY]
            entries, lengths = array("I", [entries[i] for i in there]), [lengths[i] for i in there]
        try:
            for region, offset, length in self._runs(entries, lengths):
                region.acquire(offset, length)
        except (ValueError, BackendError):
            if not (self._closed or self._let_go):
                raise
            raise _gone() from None

    @contextmanager
    def reading(self, entries: Sequence[int], lengths: Sequence[int]) -> Iterator[None]:
        """Announce a read of these objects to the device hints, and its end."""
        if not self._host.hears_reads:
            yield
            return
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
            if not (self._closed or self._let_go):
                raise
            raise _gone() from None

    def settle(self, entries: Sequence[int], lengths: Sequence[int]) -> None:
        """Write back what may have been written of objects that are given up. Never raises.

        Else a cache would do so later, over what another host has written to the same pages by then.
        """
        if not self._shared_by_hosts or not self._mapped:  # what was never mapped was not written
            return
        # Unmapped, now or while it is done: then nobody here can do more. Or these are no entries at all.
        with suppress(MaruError, ValueError, TypeError, OverflowError):
            self.publish(array("I", entries), lengths)

    def settle_reserved(self, entries: Sequence[int]) -> None:
        """:meth:`settle` for reservations whose lengths only their headers tell."""
        if not self._shared_by_hosts or not self._mapped:
            return
        for entry in entries:
            with suppress(MaruError):
                header = self.header(entry, 0)
                if header is not None:
                    self.settle((entry,), (header.length,))

    def _runs(self, entries: Sequence[int], lengths: Sequence[int]) -> Iterator[tuple[Region, int, int]]:
        """Region, offset and length of each run of objects that lie behind one another."""
        if not entries:
            return
        first, size, count = entries[0], lengths[0], len(entries)
        pool = check_place(first, size, self._pools)
        pages = -(-size // pool.granule)
        even = lengths.count(size) == count and entries == array("I", range(first, first + count * pages, pages))
        # Neighbours by number, the last of one pool and the first of the next, are no neighbours in memory.
        if even and check_place(entries[-1], size, self._pools) is pool:
            # The usual case, a whole reservation from free space that is not fragmented.
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
            if self._shared_by_hosts:
                for region, start, size in self._header_runs(entries, lengths):
                    region.acquire(start, size)
            for entry, generation, length in zip(entries, generations, lengths, strict=True):
                if not low <= entry < high:
                    pool = check_place(entry, length, self._pools)
                    low, high = pool.entry_base, pool.entry_base + pool.entry_count
                    buffer, table = self.of(pool).buffer, pool.table_offset - low * HEADER_SIZE
                offset = table + entry * HEADER_SIZE
                verdicts.append(unpack(buffer, offset + HEADER_VIEW_OFFSET) == (ready, generation, length, digest))
        except (ValueError, BackendError, StaleEpoch):
            if not (self._closed or self._let_go):
                raise
            return [False] * len(entries)
        return verdicts

    def _header_runs(self, entries: Sequence[int], lengths: Sequence[int]) -> Iterator[tuple[Region, int, int]]:
        """Region, offset and length of runs of headers that lie close behind one another."""
        if not entries:
            return
        first, last, count = entries[0], entries[-1], len(entries)
        step = entries[1] - first if count > 1 else 1
        pool = check_place(first, lengths[0], self._pools)
        inside = last < pool.entry_base + pool.entry_count
        if inside and 0 < step <= _HEADER_GAP and entries == array("I", range(first, first + count * step, step)):
            # The usual case: a batch that was stored at once.
            check_place(last, lengths[-1], (pool,))
            yield self.of(pool), pool.header_at(first), (last - first + 1) * HEADER_SIZE
            return
        start = after = first
        end = pool.entry_base + pool.entry_count
        for entry, length in zip(entries, lengths, strict=True):
            if not after <= entry < min(after + _HEADER_GAP, end):
                if after > start:
                    yield self.of(pool), pool.header_at(start), (after - start) * HEADER_SIZE
                pool = check_place(entry, length, self._pools)
                end = pool.entry_base + pool.entry_count
                start = entry
            after = entry + 1
        yield self.of(pool), pool.header_at(start), (after - start) * HEADER_SIZE

    def is_granted(self, entry: int, generation: int, length: int, key: bytes) -> bool:
        """:meth:`verify` for one object, whose header must also name ``key``."""
        try:
            pool = check_place(entry, length, self._pools)
            region = self.of(pool)
            offset = pool.header_at(entry)
            if pool.flush:
                region.acquire(offset, HEADER_SIZE)
            found = _PROOF_OF_KEY.unpack_from(region.buffer, offset + HEADER_VIEW_OFFSET)
        except (ValueError, BackendError, StaleEpoch):
            if not (self._closed or self._let_go):
                raise
            return False
        return found == (State.READY, generation, length, self._digest, key)

    def header(self, entry: int, length: int) -> Header | None:
        """The whole header of an object, ``None`` when its CRC does not hold; raises StaleEpoch."""
        pool = check_place(entry, length, self._pools)
        region = self.of(pool)
        offset = pool.header_at(entry)
        try:
            if pool.flush:
                region.acquire(offset, HEADER_SIZE)
            return unpack_header(region.buffer[offset : offset + HEADER_SIZE])
        except (ValueError, BackendError):
            if not (self._closed or self._let_go):
                raise
            raise _gone() from None

    def close(self) -> None:
        """Unmap everything; memory that a live memoryview shows stays mapped until that is gone. Idempotent."""
        with self._lock:
            self._closed = True
            regions = list(self._mapped.values())
            self._mapped.clear()
        self._unmap(regions)

    def _unmap(self, regions: Sequence[Region]) -> None:
        """Of regions that nobody finds here any more."""
        for region in regions:
            if self._registrar is not None:
                self._registrar.region_unmapping(region)
            self._host.region_unmapping(region)
            region.close()


def _offset(pool: PoolDescriptor, entry: int) -> int:
    return pool.data_offset + (entry - pool.entry_base) * pool.granule


def _gone() -> StaleEpoch:
    return StaleEpoch(
        "the pools were unmapped: the server restarted or is away, or the handler was closed; look the keys up again"
    )
