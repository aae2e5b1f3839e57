"""A storage backend of plain process memory, for tests of what uses backends. Not shared between processes."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Final

from maru_core.contracts import BackendProvision, PoolPlan, PoolRequest, PoolWish, StorageBackend, one_pool
from maru_core.errors import BackendError
from maru_core.plugin import hookimpl
from maru_core.pool_format import SUPERBLOCK_SIZE, Superblock, pack_superblock, plan_pool
from maru_core.protocol import PoolDescriptor


class FakeRegion:
    """All of a fake pool; notes the ranges that were published and acquired. See contracts.Region."""

    def __init__(self, descriptor: PoolDescriptor, memory: bytearray) -> None:
        self.descriptor: Final = descriptor
        self.published: Final[list[tuple[int, int]]] = []
        self.acquired: Final[list[tuple[int, int]]] = []
        self._buffer: memoryview | None = memoryview(memory)

    @property
    def buffer(self) -> memoryview:
        """The whole pool, writable; raises BackendError after close."""
        if self._buffer is None:
            raise BackendError(f"the region of {self.descriptor.location} is closed")
        return self._buffer

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._buffer is None

    def publish(self, offset: int, length: int) -> None:
        """Note the range."""
        self.published.append((offset, length))

    def acquire(self, offset: int, length: int) -> None:
        """Note the range."""
        self.acquired.append((offset, length))

    def populate(self, offset: int, length: int) -> None:
        """Nothing: it is all there."""

    def close(self) -> None:
        """Let go of the memory."""
        self._buffer = None


class FakePool:
    """A fake pool as its owner holds it. See contracts.Pool."""

    def __init__(self, backend: FakeBackend, region: FakeRegion) -> None:
        self.region: Final = region
        self._backend: Final = backend

    def leave(self) -> None:
        """Nothing: it is there for :meth:`FakeBackend.adopt_pool`."""
        self.region.close()

    def destroy(self) -> None:
        """Forget the memory."""
        self.region.close()
        self._backend.forget(self.region.descriptor.location)


class FakeBackend:
    """Pools in this process's memory. Also a plugin: ``PluginHost.with_plugins({"fake": FakeBackend()})``."""

    name: Final = "fake"

    def __init__(self, capacity: int = 1 << 28) -> None:
        """``capacity``: the largest pool in bytes; beyond it ``create_pool`` raises."""
        self._capacity: Final = capacity
        self._lock: Final = threading.Lock()
        self._pools: Final[dict[str, tuple[PoolDescriptor, bytearray]]] = {}

    def plan_pools(self, wish: PoolWish, backends: Callable[[str], StorageBackend]) -> Sequence[PoolPlan]:
        """One pool."""
        return one_pool(wish)

    def create_pool(self, request: PoolRequest) -> FakePool:
        """Make a pool; raises BackendError when it is larger than the capacity or its owner has it already."""
        if request.size > self._capacity:
            raise BackendError(f"a pool of {request.size} bytes was asked for, {self._capacity} bytes are there (fake)")
        entry_count, data_offset = plan_pool(request.size, request.granule)
        location = f"fake:{request.owner}/{request.pool}"
        descriptor = PoolDescriptor(
            pool=request.pool,
            backend=self.name,
            location=location,
            identity=secrets.token_bytes(16),
            size=request.size,
            granule=request.granule,
            entry_base=request.entry_base,
            entry_count=entry_count,
            table_offset=SUPERBLOCK_SIZE,
            data_offset=data_offset,
            flush=request.shared_by_hosts,
        )
        memory = bytearray(request.size)
        block = Superblock(
            request.granule, entry_count, SUPERBLOCK_SIZE, data_offset, descriptor.identity, boot_id=bytes(16)
        )
        packed = pack_superblock(block)
        memory[: len(packed)] = packed
        with self._lock:
            if location in self._pools:
                raise BackendError(f"pool {location} is in use; destroy it first")
            self._pools[location] = (descriptor, memory)
        return FakePool(self, FakeRegion(descriptor, memory))

    def adopt_pool(self, request: PoolRequest) -> FakePool | None:
        """The pool of this owner, if it is there and as large."""
        with self._lock:
            descriptor, memory = self._pools.get(f"fake:{request.owner}/{request.pool}", (None, bytearray()))
        if descriptor is None or (descriptor.size, descriptor.granule) != (request.size, request.granule):
            return None
        return FakePool(self, FakeRegion(descriptor, memory))

    def map_region(self, descriptor: PoolDescriptor) -> FakeRegion:
        """Map a pool of this object; raises BackendError when it is gone or was made anew."""
        with self._lock:
            known, memory = self._pools.get(descriptor.location, (None, bytearray()))
        if known is None:
            raise BackendError(f"cannot open pool {descriptor.location}: it is gone")
        if known != descriptor:
            raise BackendError(f"pool {descriptor.location} is {known}, the server says {descriptor}")
        return FakeRegion(descriptor, memory)

    def forget(self, location: str) -> None:
        """Drop a pool by location."""
        with self._lock:
            self._pools.pop(location, None)

    @hookimpl
    def maru_storage_backends(self) -> list[BackendProvision]:
        """This very object."""
        return [BackendProvision(self.name, lambda: self, summary="memory of one process, for tests")]
