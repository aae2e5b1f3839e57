"""How long until a GPU can copy from a pool by itself: registration in pieces against one call, by kind of memory.

For each kind of memory that this host has, a pool is made, mapped and registered with the GPU's driver, while it is new
(the first engine's start) and when its pages were used before (every later start): in one call; in one call after its
pages were populated by one thread, and by several; and as an engine's worker does it, in pieces behind several threads
that populate. For comparison, private anonymous memory in huge pages. Exits with 1 when the worker's way takes over 1.1
times the best single call and 0.05 s, or its first piece over 0.5 s; with 2, saying why, on a host without a GPU. Run:
``python benchmarks/registration.py [--size 8G] [--json FILE]``; as root it mounts a tmpfs with huge pages, and with
``--huge-pages`` it sets pages apart for a hugetlbfs while it runs.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.outcome import Bound, Outcome, main
from maru_backends.cpu import CpuBackend
from maru_core.client.regions import Regions
from maru_core.contracts import Pool, PoolRequest, Region, StorageBackend
from maru_core.protocol import PoolDescriptor
from maru_core.sizes import parse_size
from maru_transfer.cuda_driver import CudaDriver, DriverError, HostMemoryDriver
from maru_transfer.pinning import PinnedPools, address_of

SIZE = "8G"
PIECES = "pieces"
FIRST_PIECE_SECONDS = 0.5
RATIO = 1.1
#: Seconds that a start takes whatever the size: threads, and the driver's first answer.
START_SECONDS = 0.05
HUGE_PAGES = Path("/proc/sys/vm/nr_hugepages")
MADV_HUGEPAGE, MADV_POPULATE_WRITE = 14, 23


class Host:
    """What mapping asks of a plugin host."""

    def __init__(self, backend: StorageBackend) -> None:
        self._backend = backend

    def backend(self, name: str) -> StorageBackend:
        """The one there is."""
        return self._backend

    def region_mapped(self, region: Region) -> None:
        """No hints here."""

    region_unmapping = region_mapped

    def before_read(self, region: Region, extents: object) -> None:
        """No hints here."""

    after_read = before_read


class FakeDriver:
    """For a rehearsal without a GPU: takes as long as a driver might, and locks nothing."""

    def attach(self) -> None:
        """Nothing."""

    def register(self, address: int, length: int) -> None:
        """Wait as if for 2 GB/s."""
        time.sleep(length / 2e9)

    def unregister(self, address: int, length: int) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


@contextmanager
def mounted(kind: str, options: str) -> Iterator[Path]:
    """A file system of this kind; raises OSError with the reason when this host or user cannot mount it."""
    with tempfile.TemporaryDirectory(prefix="maru-registration-") as folder:
        done = subprocess.run(
            ["mount", "-t", kind, "-o", options, "none", folder], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise OSError(f"mount -t {kind} -o {options}: {done.stderr.strip() or 'not permitted'}")
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", folder], check=True)


@contextmanager
def huge_pages(size: int) -> Iterator[None]:
    """Set huge pages apart for ``size`` bytes while within; raises OSError when the host has not that many."""
    before = int(HUGE_PAGES.read_text())
    wanted = before + -(-size // (2 << 20)) + 8
    try:
        HUGE_PAGES.write_text(str(wanted))
        if int(HUGE_PAGES.read_text()) < wanted:
            raise OSError(f"{wanted} huge pages of 2 MiB were asked for, there are {HUGE_PAGES.read_text().strip()}")
        yield
    finally:
        HUGE_PAGES.write_text(str(before))


@contextmanager
def pool_in(folder: Path, size: int) -> Iterator[tuple[CpuBackend, Pool]]:
    """A pool file as the server makes it."""
    backend = CpuBackend()
    fields = {"pool": 0, "size": size, "granule": 2 << 20, "entry_base": 0, "path": str(folder)}
    pool = backend.create_pool(PoolRequest(owner=f"registration-{os.getpid()}", **fields))
    try:
        yield backend, pool
    finally:
        pool.destroy()


def populate(address: int, size: int, threads: int) -> None:
    """Enter all pages into the page tables, by several threads."""
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    step = 64 << 20
    offsets = iter(range(0, size, step))
    failed: list[int] = []

    def work() -> None:
        for offset in offsets:
            if madvise(address + offset, min(step, size - offset), MADV_POPULATE_WRITE):
                failed.append(ctypes.get_errno())

    helpers = [threading.Thread(target=work) for _ in range(threads - 1)]
    for helper in helpers:
        helper.start()
    work()
    for helper in helpers:
        helper.join()
    if failed:
        raise SystemExit(f"madvise(MADV_POPULATE_WRITE): {os.strerror(failed[0])}; Linux 5.14 is needed")


def one_call(driver: HostMemoryDriver, address: int, size: int, threads: int) -> tuple[float, float]:
    """Seconds to register in one call, after ``threads`` (0: none) populated; and to unregister."""
    start = time.perf_counter()
    if threads:
        populate(address, size, threads)
    driver.register(address, size)
    taken = time.perf_counter() - start
    start = time.perf_counter()
    driver.unregister(address, size)
    return taken, time.perf_counter() - start


def in_pieces(
    backend: StorageBackend, descriptor: PoolDescriptor, driver: HostMemoryDriver, piece: int | None, busy: bool
) -> tuple[float, float, float, int]:
    """The worker's way: seconds in all, until the first piece was registered, and to unregister; how many pieces."""
    registrar = PinnedPools(lambda: driver, busy=lambda: busy, piece=piece)
    regions = Regions((descriptor,), Host(backend), b"", registrar)
    start = time.perf_counter()
    regions.map_all()
    while registrar.stats()["state"] == "registering":
        time.sleep(0.002)
    taken = time.perf_counter() - start
    stats = registrar.stats()
    if stats["state"] != "registered":
        raise SystemExit(f"not registered: {stats}")
    start = time.perf_counter()
    regions.close()
    while registrar.stats()["state"] != "no pool":
        time.sleep(0.002)
    return taken, float(stats["first_piece_seconds"]), time.perf_counter() - start, int(stats["pieces"])


@contextmanager
def mapping_of(backend: StorageBackend, descriptor: PoolDescriptor) -> Iterator[tuple[int, int]]:
    """Address and size of a fresh mapping of a pool: none of its pages is in the page tables."""
    region = backend.map_region(descriptor)
    view = memoryview(region.buffer)
    try:
        yield address_of(view), view.nbytes
    finally:
        view.release()
        region.close()


def register(
    backend: StorageBackend,
    descriptor: PoolDescriptor,
    driver: HostMemoryDriver,
    helpers: int | None,
    piece: int | None,
    busy: bool,
) -> tuple[float, float, float, int]:
    """:func:`in_pieces` when ``helpers`` is ``None``, else the same of :func:`one_call` over a fresh mapping."""
    if helpers is None:
        return in_pieces(backend, descriptor, driver, piece, busy)
    with mapping_of(backend, descriptor) as (address, nbytes):
        taken, undo = one_call(driver, address, nbytes, helpers)
    return taken, taken, undo, 1


@contextmanager
def used_pool(folder: Path, size: int, threads: int) -> Iterator[tuple[CpuBackend, Pool]]:
    """A pool whose pages are all zeroed, which the first one who touches a page pays for."""
    with pool_in(folder, size) as (backend, pool):
        with mapping_of(backend, pool.region.descriptor) as (address, nbytes):
            populate(address, nbytes, threads)
        yield backend, pool


def anonymous(driver: HostMemoryDriver, size: int, threads: int) -> tuple[float, float]:
    """:func:`one_call` over private memory in transparent huge pages, which are zeroed before the clock starts."""
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(MADV_HUGEPAGE)
    address = address_of(memoryview(memory))
    populate(address, size, threads)
    return one_call(driver, address, size, 0)


def measure(driver: HostMemoryDriver, options: argparse.Namespace) -> Outcome:
    """All kinds of memory that there are, all ways."""
    size, threads = options.size, options.threads
    table = [["memory", "pool", "way", "s", "GB/s", "first usable, s", "unregister, s", "pieces"]]
    figures: dict[str, dict[str, dict[str, float]]] = {}
    bounds, notes = [], []

    #: Threads that populate before; ``None``: the worker's way.
    ways = {"one call": 0, "populate 1, one call": 1, f"populate {threads}, one call": threads, PIECES: None}

    def row(kind: str, age: str, way: str, seconds: float, first: float, undo: float, count: int) -> None:
        speed = size / seconds / 1e9
        table.append([kind, age, way, f"{seconds:.2f}", f"{speed:.1f}", f"{first:.3f}", f"{undo:.2f}", f"{count}"])
        figures.setdefault(f"{kind}, {age}", {})[way] = {
            "seconds": seconds,
            "gb_per_s": speed,
            "first_usable_seconds": first,
            "unregister_seconds": undo,
            "pieces": count,
        }

    def huge_tmpfs(stack: ExitStack) -> Path:
        return stack.enter_context(mounted("tmpfs", f"huge=always,size={size + (64 << 20)}"))

    def hugetlbfs(stack: ExitStack) -> Path:
        if not options.huge_pages:
            raise OSError("--huge-pages was not given")
        stack.enter_context(huge_pages(size))
        return stack.enter_context(mounted("hugetlbfs", "pagesize=2M"))

    kinds: dict[str, Callable[[ExitStack], Path]] = {
        "/dev/shm": lambda stack: Path("/dev/shm"),
        "tmpfs huge=always": huge_tmpfs,
        "hugetlbfs 2M": hugetlbfs,
    }
    for kind, folder_of in kinds.items():
        with ExitStack() as stack:
            try:
                folder = folder_of(stack)
            except OSError as error:
                notes.append(f"{kind}: not measured: {error}")
                continue
            for age in ("new", "used"):
                shared = stack.enter_context(used_pool(folder, size, threads)) if age == "used" else None
                best: dict[str, float] = {}
                for way, helpers in ways.items():
                    tries = []
                    for _ in range(options.repeats):
                        with nullcontext(shared) if shared else pool_in(folder, size) as (backend, pool):
                            descriptor = pool.region.descriptor
                            tries.append(register(backend, descriptor, driver, helpers, options.piece, options.busy))
                    best[way], first, undo, count = (min(figure) for figure in zip(*tries, strict=True))
                    row(kind, age, way, best[way], first, undo, count)
                ratio = (best.pop(PIECES) - START_SECONDS) / min(best.values())
                bounds.append(Bound(f"{kind}, {age}: pieces, less {START_SECONDS} s, to the best call", ratio, RATIO))
                bounds.append(Bound(f"{kind}, {age}: first piece, seconds", first, FIRST_PIECE_SECONDS))
    taken, undo = anonymous(driver, size, threads)
    row("anonymous, huge pages", "used", "one call", taken, taken, undo, 1)
    if options.fake:
        bounds, notes = [], [*notes, "a rehearsal: the driver was not one, and no figure is judged"]
    return Outcome(table, {"size": size, "kinds": figures}, bounds, notes)


def run(options: argparse.Namespace) -> Outcome:
    """With the GPU's driver, or the one that is asked for."""
    if options.fake:
        return measure(FakeDriver(), options)
    try:
        driver = CudaDriver(0)
    except DriverError as error:
        print(f"no GPU to register memory with: {error}", file=sys.stderr)
        sys.exit(2)
    try:
        driver.attach()
        return measure(driver, options)
    finally:
        driver.close()


def add_options(parser: argparse.ArgumentParser) -> None:
    """Sizes, and what may be changed on the host."""
    threads = max(1, min(8, len(os.sched_getaffinity(0)) // 4))
    parser.add_argument("--size", type=parse_size, default=parse_size(SIZE), help=f"of each pool (default {SIZE})")
    parser.add_argument("--piece", type=parse_size, help="of one registration (default: as the worker chooses)")
    parser.add_argument("--busy", action="store_true", help="pieces as of an engine that works, not of one that starts")
    parser.add_argument("--repeats", type=int, default=2, help="runs of each way, the best of which counts (default 2)")
    parser.add_argument("--threads", type=int, default=threads, help=f"that populate (default {threads})")
    parser.add_argument("--huge-pages", action="store_true", help="set huge pages apart while it runs; needs root")
    parser.add_argument("--fake", action="store_true", help="with a driver that only waits, to try the script")


if __name__ == "__main__":
    sys.exit(main(__doc__, run, add_options))
