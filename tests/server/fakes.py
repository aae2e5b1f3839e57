"""A storage backend on a plain file, and a server process that uses it: ``python -m tests.server.fakes``."""

from __future__ import annotations

import argparse
import mmap
import os
import secrets
import sys
from pathlib import Path

import structlog

from maru_core.contracts import PoolPlan, PoolRequest
from maru_core.pool_format import SUPERBLOCK_SIZE, Superblock, pack_superblock, plan_pool, unpack_superblock
from maru_core.protocol.messages import PoolDescriptor
from maru_core.runtime_dir import AlreadyRunning
from maru_core.server import ServerSettings, run_server


class FileRegion:
    """A mapped file."""

    def __init__(self, descriptor: PoolDescriptor) -> None:
        self.descriptor = descriptor
        with open(descriptor.location, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), descriptor.size)
        self.buffer = memoryview(self._map)

    def publish(self, offset: int, length: int) -> None:
        return

    def acquire(self, offset: int, length: int) -> None:
        return

    def populate(self, offset: int, length: int) -> None:
        return

    def close(self) -> None:
        self.buffer.release()
        self._map.close()


class FilePool:
    """A pool whose file goes with it."""

    def __init__(self, region: FileRegion) -> None:
        self.region = region

    def leave(self) -> None:
        self.region.close()

    def destroy(self) -> None:
        self.region.close()
        os.unlink(self.region.descriptor.location)


class FileBackend:
    """Sparse files in the request's path. Checks nothing: tests only."""

    name = "file"
    one_host = True

    def create_pool(self, request: PoolRequest) -> FilePool:
        count, data_offset = plan_pool(request.size, request.granule)
        path = Path(str(request.path)) / f"pool-{request.pool}"
        path.unlink(missing_ok=True)
        identity = secrets.token_bytes(16)
        with path.open("xb") as file:
            file.truncate(request.size)
            file.write(
                pack_superblock(Superblock(request.granule, count, SUPERBLOCK_SIZE, data_offset, identity, bytes(16)))
            )
        return FilePool(
            FileRegion(
                PoolDescriptor(
                    request.pool,
                    self.name,
                    str(path),
                    identity,
                    request.size,
                    request.granule,
                    request.entry_base,
                    count,
                    SUPERBLOCK_SIZE,
                    data_offset,
                )
            )
        )

    def adopt_pool(self, request: PoolRequest) -> FilePool | None:
        path = Path(str(request.path)) / f"pool-{request.pool}"
        if not path.exists() or path.stat().st_size != request.size:
            return None
        block = unpack_superblock(path.read_bytes()[:SUPERBLOCK_SIZE])
        if block.granule != request.granule:
            return None
        descriptor = PoolDescriptor(
            request.pool,
            self.name,
            str(path),
            block.identity,
            request.size,
            request.granule,
            request.entry_base,
            block.entry_count,
            block.table_offset,
            block.data_offset,
        )
        return FilePool(FileRegion(descriptor))

    def map_region(self, descriptor: PoolDescriptor) -> FileRegion:
        return FileRegion(descriptor)


def main() -> int:
    """Serve until a signal; prints the address when ready."""
    parser = argparse.ArgumentParser()
    parser.add_argument("runtime_dir")
    parser.add_argument("--size", type=int, action="append")
    parser.add_argument("--granule", type=int, default=4096)
    parser.add_argument("--url")
    parser.add_argument("--idle-exit", type=float)
    parser.add_argument("--keep-pools", action="store_true")
    parser.add_argument("--dma-grace", type=float, default=1.0)
    parser.add_argument("--lease-share", type=float, default=0.5)
    parser.add_argument("--namespace-quota", type=int)
    parser.add_argument("--keys")
    parser.add_argument("--metrics")
    parser.add_argument("--no-demote", action="store_true")
    parser.add_argument("--promote", action="store_true")
    options = parser.parse_args()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    settings = ServerSettings(
        tuple(PoolPlan("file", size, options.runtime_dir) for size in options.size or [4 << 20]),
        options.granule,
        options.url,
        options.runtime_dir,
        options.idle_exit,
        options.lease_share,
        options.keep_pools,
        options.dma_grace,
        options.namespace_quota,
        options.keys,
        options.metrics,
        demote=not options.no_demote,
        promote=options.promote,
    )
    try:
        run_server(settings, lambda name: FileBackend(), ready=lambda address: print(address, flush=True))
    except AlreadyRunning as error:
        print(error, file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
