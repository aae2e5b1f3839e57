"""The plugin at work: on a real pool, through a host, and with a kernel that the test controls."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from structlog.testing import capture_logs

from maru_backends.cpu import CpuBackend
from maru_core.contracts import Pool, PoolRequest, ReadExtent, Region
from maru_core.fakes import FakeBackend
from maru_core.host import PluginHost
from maru_plugins_dax import memory
from maru_plugins_dax.ahead import DEPTH, ReadAhead
from maru_plugins_dax.coverage import BLOCK
from maru_plugins_dax.figures import Figures
from maru_plugins_dax.medium import Medium
from maru_plugins_dax.memory import MADV_COLLAPSE, MADV_HUGEPAGE, MADV_POPULATE_READ, MADV_WILLNEED, PAGE, Kernel
from maru_plugins_dax.placement import Topology
from maru_plugins_dax.plugin import DaxHints, dax
from maru_plugins_dax.switches import Switches
from maru_plugins_dax.watch import Surroundings
from tests.waiting import NEVER, eventually

MIB = 1 << 20
SIZE = 32 * MIB
#: Calls that populate that much.
SLICES = 4
EXTENTS = [ReadExtent(0, 4 * MIB, 3 * MIB), ReadExtent(0, 20 * MIB, MIB)]
OFF = Switches(populate=False, huge_pages=False, numa=False, read_ahead="off")
TWO_NODES = Topology({0: frozenset({0}), 1: frozenset({1})}, {0: {0: 10, 1: 21}, 1: {0: 21, 1: 10}})


class FakeKernel(Kernel):
    """Notes advice instead of giving it; ``answer`` decides what comes of it."""

    def __init__(self, answer: Callable[[int, int], int] = lambda advice, start: 0, node: int = 0) -> None:
        super().__init__(None)
        object.__setattr__(self, "calls", [])
        object.__setattr__(self, "answer", answer)
        object.__setattr__(self, "node", node)

    def advise(self, view: memoryview, start: int, length: int, advice: int) -> int:
        self.calls.append((advice, start, length))
        return self.answer(advice, start)

    def nodes(self, view: memoryview, offsets: Any) -> list[int]:
        return [self.node] * len(offsets)

    def of(self, advice: int) -> list[int]:
        return [start for found, start, _ in self.calls if found == advice]


def around(kernel: Kernel, medium: Medium = Medium("memory"), **changes: Any) -> Surroundings:  # noqa: B008 - frozen
    made = Surroundings(
        kernel, topology=lambda: TWO_NODES, medium=lambda location: medium, node_of_device=lambda d: 1, cpus=lambda: {0}
    )
    return evolve(made, **changes)


@pytest.fixture
def pool() -> Iterator[Pool]:
    folder = Path(f"/dev/shm/maru-test-dax-{os.getpid()}-{threading.get_ident()}")
    folder.mkdir()
    made = CpuBackend().create_pool(PoolRequest(0, SIZE, 4096, 0, str(folder), "owner"))
    yield made
    made.destroy()
    folder.rmdir()


@pytest.fixture
def region() -> Region:
    return FakeBackend().create_pool(PoolRequest(0, SIZE, 4096, 0, None, "t")).region


def host_of(switches: Switches, surroundings: Surroundings | None = None) -> PluginHost:
    plugin = DaxHints(lambda: switches, (lambda: surroundings) if surroundings else Surroundings)
    return PluginHost.with_plugins({"dax": plugin}, strict=True)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("maru-dax")]


def present(region: Region) -> int:
    """Pages of the region that are in this process's page table."""
    offsets = range(0, region.descriptor.size, PAGE)
    return sum(node >= 0 for node in Kernel.load().nodes(region.buffer, offsets))


@pytest.mark.parametrize("threads_wanted", [1, 3])
def test_a_pool_is_populated_in_the_background(pool: Pool, threads_wanted: int) -> None:
    region = CpuBackend().map_region(pool.region.descriptor)
    assert present(region) < 64
    host = host_of(Switches(populate=True, threads=threads_wanted))
    host.region_mapped(region)
    eventually(lambda: not threads())
    assert present(region) == -(-region.descriptor.size // PAGE)
    stats = host.hint_stats()
    assert stats["dax.populate_bytes"] == region.descriptor.size
    assert stats["dax.pool_0_nodes"] == "0:64"
    assert stats["dax.pool_0_far"] == 0
    host.region_unmapping(region)
    region.close()


def test_nothing_happens_when_all_is_off(pool: Pool) -> None:
    region = CpuBackend().map_region(pool.region.descriptor)
    before = present(region)
    host = host_of(OFF)
    host.region_mapped(region)
    assert threads() == []
    host.before_read(region, EXTENTS)
    host.after_read(region, EXTENTS)
    assert present(region) == before
    assert host.hint_stats()["dax.read_bytes"] == 4 * MIB
    host.region_unmapping(region)
    region.close()


def test_reading_ahead_enters_what_is_read_and_only_that(pool: Pool) -> None:
    region = CpuBackend().map_region(pool.region.descriptor)
    before = present(region)
    host = host_of(evolve(OFF, read_ahead="all"))
    host.region_mapped(region)
    host.before_read(region, EXTENTS)
    eventually(lambda: host.hint_stats()["dax.ahead_bytes"] == 3 * BLOCK)
    host.after_read(region, EXTENTS)
    assert present(region) - before == 3 * BLOCK // PAGE, "4 to 8 MiB, and 20 to 22"
    host.before_read(region, EXTENTS)
    host.region_unmapping(region)
    eventually(lambda: not threads())
    assert host.hint_stats()["dax.ahead_bytes"] == 3 * BLOCK, "nothing twice"
    region.close()


def test_what_is_populated_is_not_read_ahead(region: Region) -> None:
    kernel = FakeKernel()
    host = host_of(Switches(populate=True, numa=False, read_ahead="all"), around(kernel))
    host.region_mapped(region)
    eventually(lambda: host.hint_stats()["dax.populate_bytes"] == SIZE)
    calls = len(kernel.calls)
    host.before_read(region, EXTENTS)
    host.after_read(region, EXTENTS)
    host.region_unmapping(region)
    eventually(lambda: not threads())
    assert len(kernel.calls) == calls


def test_a_file_on_a_disk_is_read_ahead_each_time_and_never_populated(region: Region) -> None:
    kernel = FakeKernel()
    host = host_of(Switches(populate=True, numa=False, read_ahead="disk"), around(kernel, Medium("disk")))
    host.region_mapped(region)
    for _ in range(2):
        host.before_read(region, EXTENTS)
        host.after_read(region, EXTENTS)
    eventually(lambda: len(kernel.calls) == 4)
    assert kernel.of(MADV_WILLNEED) == [4 * MIB, 20 * MIB] * 2
    assert kernel.of(MADV_POPULATE_READ) == []
    host.region_unmapping(region)


def test_threads_end_at_unmap_and_let_go_of_the_memory(region: Region) -> None:
    entered, release = threading.Event(), threading.Event()

    def answer(advice: int, start: int) -> int:
        entered.set()
        release.wait(NEVER)
        return 0

    kernel = FakeKernel(answer)
    host = host_of(Switches(populate=True), around(kernel))
    host.region_mapped(region)
    assert entered.wait(NEVER)
    started = time.monotonic()
    host.region_unmapping(region)
    assert time.monotonic() - started < 10, "it waits for a moment, not for the slice"
    assert threads() != []
    release.set()
    eventually(lambda: not threads())
    assert len(kernel.of(MADV_POPULATE_READ)) == 1, "nothing after the slice that it was at"


def test_populating_gives_way_to_reads(region: Region) -> None:
    """A read that lasts leaves it a slice now and then, and no more."""
    kernel = FakeKernel()
    host = host_of(Switches(populate=True, numa=False), around(kernel))
    host.before_read(region, EXTENTS)
    began = time.monotonic()
    host.region_mapped(region)
    time.sleep(0.1)
    calls = len(kernel.calls)
    # On a busy machine it was longer.
    assert calls <= 2 * (time.monotonic() - began) / 0.1
    host.after_read(region, EXTENTS)
    eventually(lambda: len(kernel.calls) == SLICES)
    host.region_unmapping(region)


def test_a_kernel_that_cannot_is_asked_once(region: Region) -> None:
    kernel = FakeKernel(lambda advice, start: errno.EINVAL)
    host = host_of(Switches(populate=True, numa=False, read_ahead="all"), around(kernel))
    host.region_mapped(region)
    eventually(lambda: "dax.populate_error" in host.hint_stats())
    for _ in range(3):
        host.before_read(region, EXTENTS)
        host.after_read(region, EXTENTS)
    stats = host.hint_stats()
    assert (stats["dax.populate_error"], stats["dax.populate_bytes"]) == ("Invalid argument", 0)
    assert len(kernel.calls) == 1
    host.region_unmapping(region)


@pytest.mark.parametrize(("medium", "node"), [(Medium("memory"), 1), (Medium("device", device=(251, 0)), 0)])
def test_a_pool_that_is_far_is_one_line_with_the_remedy(region: Region, medium: Medium, node: int) -> None:
    """A device by its sysfs entry, other memory by a sample of its pages."""
    before = os.sched_getaffinity(0)
    host = host_of(Switches(populate=True), around(FakeKernel(node=node), medium))
    with capture_logs() as logs:
        host.region_mapped(region)
        eventually(lambda: not threads())
    assert [log["event"] for log in logs] == ["pool_is_far"]
    assert (logs[0]["share"], logs[0]["pool"]) == (1.0, region.descriptor.location)
    assert "numactl --cpunodebind=1" in logs[0]["remedy"]
    assert host.hint_stats()["dax.pool_0_far"] == 1.0
    assert os.sched_getaffinity(0) == before, "it says so and changes nothing"
    host.region_unmapping(region)


def test_placement_alone_does_not_populate(region: Region) -> None:
    kernel = FakeKernel()
    host = host_of(evolve(OFF, numa=True), around(kernel))
    host.region_mapped(region)
    eventually(lambda: "dax.pool_0_nodes" in host.hint_stats())
    assert {length for _, _, length in kernel.calls} == {1}
    assert len(kernel.calls) == 64
    host.region_unmapping(region)


def test_huge_pages_only_where_advice_matters(region: Region, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("maru_plugins_dax.watch.huge_aligned", lambda view: True)
    for huge in (False, True):
        kernel = FakeKernel(lambda advice, start: errno.EAGAIN if (advice, start) == (MADV_COLLAPSE, 4 * MIB) else 0)
        host = host_of(evolve(OFF, huge_pages=True), around(kernel, Medium("memory", huge=huge)))
        host.region_mapped(region)
        eventually(lambda: not threads())
        assert kernel.of(MADV_HUGEPAGE) == [0] * huge
        assert kernel.of(MADV_COLLAPSE) == [*range(0, SIZE, memory.HUGE_PAGE)] * huge
        if huge:
            stats = host.hint_stats()
            assert (stats["dax.huge_pages"], stats["dax.huge_refused"]) == (15, 1)
        host.region_unmapping(region)


class _Busy:
    """A watch whose reads ahead last until they are released."""

    def __init__(self) -> None:
        self.entered, self.release = threading.Semaphore(0), threading.Event()
        self.seen = 0

    def read_ahead(self, extents: object) -> None:
        self.seen += 1
        self.entered.release()
        self.release.wait(NEVER)


def test_a_full_queue_drops_and_never_waits() -> None:
    figures, watch = Figures(), _Busy()
    ahead = ReadAhead(figures)
    ahead.put(watch, EXTENTS)  # type: ignore[arg-type]
    assert figures.all()["dax.ahead_dropped"] == 1, "no thread yet"
    ahead.start()
    ahead.put(watch, EXTENTS)  # type: ignore[arg-type]
    assert watch.entered.acquire(timeout=NEVER)
    started = time.monotonic()
    for _ in range(DEPTH + 3):
        ahead.put(watch, EXTENTS)  # type: ignore[arg-type]
    assert time.monotonic() - started < 10, "a read ahead lasts until it is released"
    assert figures.all()["dax.ahead_dropped"] == 4
    watch.release.set()
    ahead.stop()
    ahead.stop()
    eventually(lambda: not threads())
    assert watch.seen == DEPTH + 1


def test_it_reads_its_variables_when_the_first_pool_is_mapped(region: Region, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARU_DAX_POPULATE", "0")
    monkeypatch.setenv("MARU_DAX_NUMA", "0")
    plugin = DaxHints()
    host = PluginHost.with_plugins({"dax": plugin}, strict=True)
    host.region_mapped(region)
    assert threads() == []
    host.region_unmapping(region)


def test_a_forked_process_starts_anew(region: Region) -> None:
    plugin = DaxHints(lambda: OFF)
    host = PluginHost.with_plugins({"dax": plugin}, strict=True)
    host.region_mapped(region)
    host.before_read(region, EXTENTS)
    host.after_read(region, EXTENTS)
    plugin._process = -1  # as in a child
    host.region_mapped(region)
    assert host.hint_stats()["dax.reads"] == 0
    host.region_unmapping(region)


def test_figures_are_named_after_the_plugin(region: Region) -> None:
    host = host_of(Switches(populate=True), around(FakeKernel()))
    host.region_mapped(region)
    eventually(lambda: not threads())
    host.region_unmapping(region)
    assert host.hint_stats()
    assert all(name.startswith("dax.") for name in host.hint_stats())


def test_the_entry_point_is_a_plugin_that_has_done_nothing_yet() -> None:
    host = PluginHost.with_plugins({"dax": dax}, built_ins=True, strict=True)
    (info,) = [info for info in host.report() if info.name == "dax"]
    assert info.status == "active"
    assert len(info.hints) == 5
    assert threads() == []
