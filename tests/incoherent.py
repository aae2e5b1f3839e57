"""Memory of several hosts that are not coherent with each other, without such hosts: a model at its most unhelpful.

The memory is a file that all map. A *host* is a cache of its own over it: what is written stays there until it is
published (or :meth:`Host.evict` writes it back at a moment that nobody chose), and what was read once is read again and
again, however often others have changed the memory. ``acquire`` does what the instructions do: it writes dirty lines
back, and then drops all.

The server is a process, and so a host of its own: ``python -m tests.incoherent FOLDER``.
"""

from __future__ import annotations

import mmap
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import structlog

from maru_core.contracts import BackendProvision, PoolPlan, PoolRequest, PoolWish, StorageBackend, one_pool
from maru_core.errors import BackendError
from maru_core.plugin import hookimpl
from maru_core.pool_format import SUPERBLOCK_SIZE, Superblock, pack_superblock, plan_pool, unpack_superblock
from maru_core.protocol.messages import PoolDescriptor
from maru_core.server import ServerSettings, run_server

NAME = "incoherent"
LINE = 64
#: What a cache shows of lines that it has never fetched: of another age.
STALE = 0xEE


class Host:
    """The cache of one host over one pool. ``told`` is given each barrier: name, pool, offset, length."""

    def __init__(self, descriptor: PoolDescriptor, told: Callable[[str, int, int, int], None]) -> None:
        self.descriptor = descriptor
        self._told = told
        with open(descriptor.location, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), descriptor.size)
        self._cache = bytearray([STALE]) * descriptor.size
        #: The cache as it was when each line was last fetched or written back.
        self._clean = bytearray(self._cache)
        self._closed = False

    @property
    def buffer(self) -> memoryview:
        if self._closed:
            raise BackendError("closed")
        return memoryview(self._cache)

    def memory(self, offset: int, length: int) -> bytes:
        """What is in the memory, whatever caches say."""
        return self._memory[offset : offset + length]

    def publish(self, offset: int, length: int) -> None:
        self._told("publish", self.descriptor.pool, offset, length)
        self._write_back(offset, length)

    def acquire(self, offset: int, length: int) -> None:
        self._told("acquire", self.descriptor.pool, offset, length)
        self._write_back(offset, length)
        for at in _lines(offset, length):
            self._cache[at : at + LINE] = self._clean[at : at + LINE] = self._memory[at : at + LINE]

    def evict(self) -> None:
        """Write every dirty line back, as a cache does when it needs room."""
        self._write_back(0, self.descriptor.size)

    def populate(self, offset: int, length: int) -> None:
        pass

    def close(self) -> None:
        """As unmapping does: the lines stay in the cache."""
        self._closed = True

    def _write_back(self, offset: int, length: int) -> None:
        if self._cache[offset : offset + length] == self._clean[offset : offset + length] and not offset % LINE:
            return
        for at in _lines(offset, length):
            line = self._cache[at : at + LINE]
            if line != self._clean[at : at + LINE]:
                self._memory[at : at + LINE] = self._clean[at : at + LINE] = bytes(line)


def _lines(offset: int, length: int) -> Iterator[int]:
    return iter(range(offset // LINE * LINE, offset + length, LINE))


class Pool:
    """A pool in the server, whose host is the server's."""

    def __init__(self, region: Host) -> None:
        self.region = region

    def leave(self) -> None:
        self.region.close()

    def destroy(self) -> None:
        self.region.close()
        Path(self.region.descriptor.location).unlink(missing_ok=True)


class IncoherentBackend:
    """Maps every pool into a cache of its own: one object per host. ``hosts`` by pool; ``trace``: barriers, by pool.

    Also a plugin: ``PluginHost.with_plugins({"incoherent": IncoherentBackend()})``.
    """

    name = NAME

    def __init__(self) -> None:
        self.hosts: dict[int, Host] = {}
        self.trace: list[tuple[str, int, int, int]] = []

    @hookimpl
    def maru_storage_backends(self) -> list[BackendProvision]:
        return [BackendProvision(NAME, lambda: self)]

    def evict(self) -> None:
        """Every dirty line of this host goes to memory now."""
        for host in self.hosts.values():
            host.evict()

    def plan_pools(self, wish: PoolWish, backends: Callable[[str], StorageBackend]) -> Sequence[PoolPlan]:
        return one_pool(wish)

    def create_pool(self, request: PoolRequest) -> Pool:
        count, data_offset = plan_pool(request.size, request.granule)
        path = Path(str(request.path)) / f"incoherent-{request.pool}"
        path.write_bytes(b"\xbb" * request.size)  # a device holds whatever was there before
        identity = secrets.token_bytes(16)
        region = Host(self._describe(request, path, identity, count, data_offset), self._note)
        block = pack_superblock(
            Superblock(request.granule, count, SUPERBLOCK_SIZE, data_offset, identity, boot_id=bytes(16))
        )
        region.buffer[: len(block)] = block
        return Pool(region)

    def adopt_pool(self, request: PoolRequest) -> Pool | None:
        path = Path(str(request.path)) / f"incoherent-{request.pool}"
        if not path.exists():
            return None
        block = unpack_superblock(path.read_bytes()[:SUPERBLOCK_SIZE])
        descriptor = self._describe(request, path, block.identity, block.entry_count, block.data_offset)
        return Pool(Host(descriptor, self._note))

    def map_region(self, descriptor: PoolDescriptor) -> Host:
        assert descriptor.flush
        host = Host(descriptor, self._note)
        host.acquire(0, SUPERBLOCK_SIZE)
        if unpack_superblock(host.buffer[:SUPERBLOCK_SIZE]).identity != descriptor.identity:
            raise BackendError("the server did not publish its superblock")
        self.hosts[descriptor.pool] = host
        return host

    def _note(self, what: str, pool: int, offset: int, length: int) -> None:
        self.trace.append((what, pool, offset, length))

    def _describe(
        self, request: PoolRequest, path: Path, identity: bytes, count: int, data_offset: int
    ) -> PoolDescriptor:
        return PoolDescriptor(
            pool=request.pool,
            backend=NAME,
            location=str(path),
            identity=identity,
            size=request.size,
            granule=request.granule,
            entry_base=request.entry_base,
            entry_count=count,
            table_offset=SUPERBLOCK_SIZE,
            data_offset=data_offset,
            flush=request.shared_by_hosts,
        )


def main() -> int:
    """Serve two pools in FOLDER until a signal; prints the address when ready."""
    folder = sys.argv[1]
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    settings = ServerSettings(
        pools=tuple(PoolPlan(NAME, 1 << 20, folder) for _ in range(2)),
        granule=4096,
        runtime_dir=folder,
        shared_by_hosts=True,
        lease_share=1.0,
        demote=False,  # objects stay where a test has put them
    )
    backend = IncoherentBackend()
    run_server(settings, lambda name: backend, ready=lambda url: print(url, flush=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
