"""How much memory a million objects cost the metadata server, and whether STATS takes longer for them.

``python benchmarks/directory_memory.py`` stores a million objects, in chains of 32, in a pool of granules of 4096 bytes
of a ``maru serve`` process, and reads the server's memory from the kernel: its private memory (``RssAnon``: index,
columns, eviction state, everything that the server keeps of the objects) and the pages of the pool that it has mapped
(``RssShmem``: the header table, 128 bytes per granule, which is part of the configured size of the pool and is mapped
whole at start). What counts as growth is everything beyond a server with the smallest pool, so columns that are as long
as the pool are included. It fails (exit 1) when the private memory is over 250 bytes per object, or when STATS takes
more than twice as long for a million objects as for a thousand.

Needs about 150 MB in /dev/shm for a million objects: data that nobody writes takes no memory.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.metadata import GRANULE, ProtocolClient  # noqa: E402
from benchmarks.outcome import Bound, Outcome, main  # noqa: E402
from maru_core.pool_format import HEADER_SIZE, KEY_SIZE, NO_KEY, SUPERBLOCK_SIZE  # noqa: E402
from maru_core.protocol import Op  # noqa: E402
from maru_core.protocol.codec import pack_u32, unpack_u32  # noqa: E402
from maru_core.testing_server import RunningServer  # noqa: E402

CHAIN = 32
PRIVATE_LIMIT = 250.0
STATS_LIMIT = 2.0
FEW = 1024
ROUNDS = 400
#: Granules that stay free, so that no room is made ahead.
SPARE = 1024


def memory_of(pid: int) -> dict[str, int]:
    """Resident bytes of a process: ``private``, and ``pool`` for what it maps of shared memory."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    amounts = {name: int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile", "RssShmem")}
    return {"private": amounts["RssAnon"], "pool": amounts["RssShmem"], "files": amounts["RssFile"]}


class Writer(ProtocolClient):
    """Stores chains of keys that no byte is ever written for."""

    def store_chain(self, column: bytes) -> tuple[float, float]:
        """One RESERVE and one COMMIT; how long each took, in seconds. Raises RuntimeError unless all are stored."""
        count = len(column) // KEY_SIZE
        begin = time.perf_counter()
        statuses, entries, generations = self._call(Op.RESERVE, 0, column, NO_KEY, GRANULE)
        reserved = time.perf_counter()
        handles = pack_u32(unpack_u32(entries, count)), pack_u32(unpack_u32(generations, count))
        (committed,) = self._call(Op.COMMIT, *handles, b"")
        done = time.perf_counter()
        if any(statuses) or any(committed):
            raise RuntimeError("not every object was stored: the measurement is void")
        return reserved - begin, done - reserved

    def stats_time(self) -> float:
        """Time of one STATS in microseconds."""
        begin = time.perf_counter()
        self.stats()
        return (time.perf_counter() - begin) * 1e6


@contextmanager
def serving(granules: int, policy: str | None) -> Iterator[tuple[RunningServer, Writer]]:
    """A server with a pool of ``granules`` that evicts by ``policy`` (``None``: its default), and a session."""
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    size = SUPERBLOCK_SIZE + granules * (GRANULE + HEADER_SIZE) + GRANULE
    try:
        settings: dict[str, int | str] = {"pool_size": max(size, 1 << 20), "chunk_size": GRANULE}
        server = RunningServer.start(folder, settings | ({"eviction_policy": policy} if policy else {}))
        try:
            writer = Writer(server.url)
            yield server, writer
            writer.close()
        finally:
            server.end()
    finally:
        shutil.rmtree(folder)


def measure(options: argparse.Namespace) -> Outcome:
    """A server with hardly any pool, then one that is filled."""
    count = options.objects - options.objects % CHAIN
    keys = random.Random(1)
    with serving(1, options.policy) as (server, _):
        least = memory_of(server.pid)
    with serving(count + SPARE, options.policy) as (server, writer), serving(FEW + SPARE, options.policy) as (_, other):
        empty = memory_of(server.pid)
        for _ in range(0, FEW, CHAIN):
            other.store_chain(keys.randbytes(KEY_SIZE * CHAIN))
        longest = 0.0
        for _ in range(0, count, CHAIN):
            longest = max(longest, *writer.store_chain(keys.randbytes(KEY_SIZE * CHAIN)))
        stats = writer.stats()
        if stats["pools"][0]["objects"] != count:
            raise RuntimeError(f"{stats['pools'][0]['objects']} objects are there: the measurement is void")
        full = memory_of(server.pid)
        # In turn, so that whatever else this machine does weighs on both.
        times = [(other.stats_time(), writer.stats_time()) for _ in range(ROUNDS)]
        stats_few, stats_many = (statistics.median(column) for column in zip(*times, strict=True))

    def per_object(what: str, before: dict[str, int]) -> float:
        return (full[what] - before[what]) / count

    table = [["memory of the server", "private", "mapped pool", "in all"]]
    for name, amount in (("smallest pool", least), ("pool, no object", empty), (f"{count} objects", full)):
        cells = [amount["private"], amount["pool"], amount["private"] + amount["pool"]]
        table.append([name + ", MiB"] + [f"{cell / (1 << 20):.1f}" for cell in cells])
    private, pool = per_object("private", least), per_object("pool", least)
    table.append(["per object, bytes", f"{private:.0f}", f"{pool:.0f}", f"{private + pool:.0f}"])
    figures = {
        "objects": count,
        "least": least,
        "empty": empty,
        "full": full,
        "private_per_object": private,
        "pool_per_object": pool,
        "stats_us": {str(FEW): stats_few, str(count): stats_many},
        "longest_request_ms": longest * 1e3,
    }
    notes = [
        f"mapped pool: the header table, {HEADER_SIZE} bytes per granule of the configured pool size",
        f"STATS: {stats_few:.0f} µs with {FEW} objects, {stats_many:.0f} µs with {count}",
        f"longest RESERVE or COMMIT on the way: {longest * 1e3:.1f} ms",
    ]
    bounds = [
        Bound("private bytes per object", private, PRIVATE_LIMIT),
        Bound(f"STATS with {count} objects / with {FEW}", stats_many / stats_few, STATS_LIMIT),
    ]
    return Outcome(table, figures, bounds, notes)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The number of objects, and what they are evicted by."""
    parser.add_argument("--objects", type=int, default=1_000_000, help="[default: 1000000]")
    parser.add_argument("--policy", metavar="NAME", help="an eviction policy [default: the server's]")


if __name__ == "__main__":
    sys.exit(main(__doc__, measure, add_options))
