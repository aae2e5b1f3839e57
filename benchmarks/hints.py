"""Does each hint of the plugin `dax` help, and does none slow a load down?

Loads are copies out of a pool of the `cpu` backend, announced to the plugin as an engine's are. Each hint is on and off
in turn, many times over; the least disturbed of each counts. Exits with 1 when a hint that is on by default does not
make what it is for at least 3 % faster, when the plugin with its defaults slows a steady load by more than 2 %, or when
a hook on the hot path takes over 0.05 ms (99th percentile). Run: ``python benchmarks/hints.py [--json FILE]``.

Huge pages are measured where there is a tmpfs that takes advice: ``mount -t tmpfs -o huge=advise none DIR``, then
``--huge-path DIR``.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from attrs import evolve

from benchmarks.outcome import Bound, Outcome, main
from maru_backends.cpu import CpuBackend
from maru_core.contracts import PoolRequest, ReadExtent, Region
from maru_core.host import PluginHost
from maru_plugins_dax.plugin import DaxHints
from maru_plugins_dax.switches import Switches

MIB = 1 << 20
POOL = 256 * MIB
OBJECT = 4 * MIB
#: Bytes of one load: all objects, or a few of them.
STEADY = 64 * MIB
OFF = Switches(populate=False, huge_pages=False, numa=False, read_ahead="off")
DEFAULTS = Switches()
HELPS, HARMS, HOOK = 1 / 1.03, 1.02, 0.05
#: Bytes that the core populates between two looks at whether the region is closed, as its client does.
CORE_STEP = 16 * MIB


class Loads:
    """A fresh mapping of a pool, and loads from it."""

    def __init__(self, region: Region, host: PluginHost, target: ctypes.Array[ctypes.c_char]) -> None:
        self.region = region
        self._host = host
        self._target = ctypes.addressof(target)
        anchor = ctypes.c_char.from_buffer(region.buffer)
        self._source = ctypes.addressof(anchor)
        self.hooks: list[float] = []

    def load(self, size: int = POOL - OBJECT) -> float:
        """Milliseconds for ``size`` bytes, hooks included."""
        first = self.region.descriptor.data_offset
        extents = [ReadExtent(0, first + offset, OBJECT) for offset in range(0, size - OBJECT + 1, OBJECT)]
        started = time.perf_counter()
        self._host.before_read(self.region, extents)
        begun = time.perf_counter()
        for extent in extents:
            ctypes.memmove(self._target, self._source + extent.offset, extent.length)
        copied = time.perf_counter()
        self._host.after_read(self.region, extents)
        ended = time.perf_counter()
        self.hooks += [(begun - started) * 1e3, (ended - copied) * 1e3]
        return (ended - started) * 1e3


class Bench:
    """A pool, and mappings of it under different switches."""

    def __init__(self, folder: str) -> None:
        self._backend = CpuBackend()
        pool = self._backend.create_pool(PoolRequest(0, POOL, 64 << 10, 0, folder, "hints"))
        for offset in range(0, POOL - OBJECT, OBJECT):
            start = pool.region.descriptor.data_offset + offset
            if start + OBJECT <= pool.region.descriptor.size:
                pool.region.buffer[start : start + OBJECT] = os.urandom(OBJECT // 1024) * 1024
        self._pool = pool
        self._descriptor = pool.region.descriptor
        self._target = ctypes.create_string_buffer(OBJECT)

    @property
    def path(self) -> str:
        """The pool's file."""
        return self._descriptor.location

    def leave(self) -> None:
        """Unmap the pool here, as a server that ends: only then its pages can leave the memory."""
        self._pool.leave()

    def close(self) -> None:
        """Remove the pool."""
        self._pool.destroy()

    @contextmanager
    def mapped(self, switches: Switches, core_populates: bool = False) -> Iterator[Loads]:
        """A mapping that nobody has touched; ``core_populates``: as with `maru_eager_map`."""
        host = PluginHost.with_plugins({"dax": DaxHints(lambda: switches)} if switches != OFF else {}, strict=True)
        region = self._backend.map_region(self._descriptor)
        host.region_mapped(region)
        thread = threading.Thread(target=_populate, args=(region,))
        if core_populates:
            thread.start()
        try:
            yield Loads(region, host, self._target)
        finally:
            if core_populates:
                thread.join()
            host.region_unmapping(region)
            region.close()


def _populate(region: Region) -> None:
    for offset in range(0, POOL, CORE_STEP):
        region.populate(offset, CORE_STEP)


def compare(rounds: int, ways: dict[str, Callable[[], float]]) -> dict[str, float]:
    """The least disturbed run of each way, taken in turn."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in sorted(ways, reverse=bool(number % 2)):
            times[name].append(ways[name]())
    return {name: min(found) for name, found in times.items()}


def first_load(bench: Bench, switches: Switches, pause: float, core: bool) -> float:
    """The first load of all of a fresh mapping, ``pause`` seconds after it was mapped."""
    with bench.mapped(switches, core) as loads:
        time.sleep(pause)
        return loads.load()


def cold_file(bench: Bench, switches: Switches) -> float:
    """The same from a file on a disk of which nothing is in memory."""
    with open(bench.path, "r+b") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return first_load(bench, switches, 0.0, False)


def steady(bench: Bench, rounds: int, switches: Switches) -> dict[str, float]:
    """Loads of what was loaded before, with the plugin and without, in turn."""
    with bench.mapped(OFF) as without, bench.mapped(switches) as with_hints:
        for loads in (without, with_hints):
            for _ in range(3):
                loads.load()
        time.sleep(0.3)
        return compare(rounds * 20, {"off": lambda: without.load(STEADY), "on": lambda: with_hints.load(STEADY)})


def hook_times(calls: int = 2000, rounds: int = 5) -> list[float]:
    """Milliseconds of each call of the hooks on the hot path, of the round with the least disturbance."""
    with pool_in("/dev/shm") as bench, bench.mapped(evolve(DEFAULTS, read_ahead="all")) as loads:
        best: list[float] = []
        for _ in range(rounds):
            loads.hooks.clear()
            for _ in range(calls):
                loads.load(OBJECT)
            if not best or statistics.quantiles(loads.hooks, n=100)[98] < statistics.quantiles(best, n=100)[98]:
                best = list(loads.hooks)
    return best


def measure(options: argparse.Namespace) -> Outcome:
    """Every hint, on and off."""
    rounds = options.rounds
    table = [["milliseconds", "off", "on", "on/off", "default"]]
    figures: dict[str, Any] = {}
    bounds: list[Bound] = []

    def row(name: str, found: dict[str, float], default: bool | None, limit: float | None) -> None:
        ratio = found["on"] / found["off"]
        shown = "-" if default is None else "on" if default else "off"
        table.append([name, f"{found['off']:.1f}", f"{found['on']:.1f}", f"{ratio:.2f}", shown])
        figures[name] = {**found, "ratio": ratio}
        if limit is not None and default is not False:
            bounds.append(Bound(name, ratio, limit))

    with pool_in(options.path) as bench:
        populate = evolve(OFF, populate=True)
        # What one thread of the plugin needs for the pool, about; the core needs longer.
        pause = 0.02 + POOL / MIB * 0.00015
        found = compare(
            rounds,
            {
                "off": lambda: first_load(bench, OFF, pause, True),
                "on": lambda: first_load(bench, populate, pause, True),
            },
        )
        # The core populates as well, and as fast where nothing disturbs it: so the hint must only not be in its way.
        row("populate: first load, maru_eager_map on", found, DEFAULTS.populate, HARMS)
        found = compare(
            rounds,
            {
                "off": lambda: first_load(bench, OFF, 2 * pause, False),
                "on": lambda: first_load(bench, populate, 2 * pause, False),
            },
        )
        row("populate: first load, maru_eager_map off", found, DEFAULTS.populate, HELPS)
        ahead = evolve(OFF, read_ahead="all")
        found = compare(
            rounds,
            {
                "off": lambda: first_load(bench, OFF, 0.0, False),
                "on": lambda: first_load(bench, ahead, 0.0, False),
            },
        )
        row("read-ahead: first load at once", found, DEFAULTS.read_ahead == "all", HELPS)
        found = compare(
            rounds,
            {
                "off": lambda: first_load(bench, OFF, 0.0, False),
                "on": lambda: first_load(bench, evolve(DEFAULTS, numa=False), 0.0, False),
            },
        )
        row("defaults: first load at once", found, None, HARMS)
        found = steady(bench, rounds, DEFAULTS)
        row("defaults: steady load", found, None, HARMS)
    with pool_in(options.disk_path) as bench:
        bench.leave()
        found = compare(
            max(3, rounds // 3), {"off": lambda: cold_file(bench, OFF), "on": lambda: cold_file(bench, ahead)}
        )
        row("read-ahead: file on a disk, not in memory", found, DEFAULTS.read_ahead != "off", HELPS)
    notes = []
    if options.huge_path:
        with pool_in(options.huge_path) as bench:
            found, note = huge(bench, rounds)
            row("huge pages: first load at once, afterwards", found, DEFAULTS.huge_pages, HELPS)
            notes.append(note)
    hooks = hook_times()
    p99 = statistics.quantiles(hooks, n=100)[98]
    figures["hook_ms"] = {"median": statistics.median(hooks), "p99": p99, "longest": max(hooks)}
    notes += [f"hooks: median {statistics.median(hooks):.4f} ms, 99th percentile {p99:.4f}, longest {max(hooks):.4f}"]
    bounds.append(Bound("hook, 99th percentile, ms", p99, HOOK))
    return Outcome(table, figures, bounds, notes)


def huge(bench: Bench, rounds: int) -> tuple[dict[str, float], str]:
    """First loads before pages were made huge, and after; and what making them costs, which loads meanwhile feel."""
    before = compare(rounds, {"off": lambda: first_load(bench, OFF, 0.0, False)})
    with bench.mapped(OFF) as loads:
        loads.load()
        quiet = statistics.median(loads.load(STEADY) for _ in range(20))
    started = time.perf_counter()
    with bench.mapped(evolve(OFF, huge_pages=True)) as loads:
        during: list[float] = []
        while any(thread.name.startswith("maru-dax") for thread in threading.enumerate()):
            during.append(loads.load(STEADY))
        took = time.perf_counter() - started
    after = compare(rounds, {"on": lambda: first_load(bench, OFF, 0.0, False)})
    note = (
        f"making {POOL // MIB} MiB huge took {took:.2f} s, and a load meanwhile "
        f"{statistics.median(during or [0]):.1f} ms (median) instead of {quiet:.1f}"
    )
    return {**before, **after}, note


@contextmanager
def pool_in(path: str) -> Iterator[Bench]:
    """A pool in a private folder there, removed at the end."""
    with tempfile.TemporaryDirectory(prefix="maru-hints-", dir=path) as folder:
        bench = Bench(folder)
        try:
            yield bench
        finally:
            bench.close()


def add_options(parser: argparse.ArgumentParser) -> None:
    """How long, and where."""
    parser.add_argument("--rounds", type=int, default=25, help="runs of each (default 25)")
    parser.add_argument("--path", default="/dev/shm", help="shared memory (default /dev/shm)")
    parser.add_argument("--disk-path", default="/var/tmp", help="a folder on a disk (default /var/tmp)")
    parser.add_argument("--huge-path", help="a folder on a tmpfs with huge=advise (default: not measured)")


if __name__ == "__main__":
    sys.exit(main(__doc__, measure, add_options))
