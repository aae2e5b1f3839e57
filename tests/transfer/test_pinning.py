"""Registration of pools against a driver that refuses what real ones refuse (R105, R106, R107)."""

from __future__ import annotations

import os
import resource
import sys
import threading
import time
from collections.abc import Iterator
from itertools import chain, cycle, repeat
from pathlib import Path
from typing import Any

import pytest
from fake_driver import MIB, FakeDriver, FakeRegion, is_mapped
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from structlog.testing import capture_logs

from maru_core.contracts import MemorySpan
from maru_transfer import memlock, pinning
from maru_transfer.cuda_driver import (
    ALREADY_REGISTERED,
    INVALID_VALUE,
    NO_DRIVER,
    NOT_PERMITTED,
    OUT_OF_MEMORY,
    CudaDriver,
    DriverError,
)
from maru_transfer.held import HeldTransfer
from maru_transfer.memlock import memlock_hint
from maru_transfer.pinned_pieces import BUSY, PIECE, STARTING, Bounds, Pace, cut, piece_end, whole_pages
from maru_transfer.pinning import PinnedPools, address_of
from tests.waiting import NEVER, eventually

PAGE = resource.getpagesize()
SMALL = 4 * MIB


def pieces(address: int, size: int, sizes: Iterator[int]) -> list[tuple[int, int]]:
    """Start and end of each piece."""
    pool = whole_pages(address, size)
    found, end = [], pool[0]
    while end < pool[1]:
        start, end = end, piece_end(pool, end, next(sizes))
        found.append((start, end))
    return found


def pools_of(driver: FakeDriver, piece: int = SMALL) -> PinnedPools:
    return PinnedPools(driver.open, piece=piece, pause=0)


def settled(pools: PinnedPools) -> dict[str, Any]:
    eventually(lambda: pools.stats()["state"] not in ("registering", "closing"))
    return pools.stats()


@pytest.fixture
def region(tmp_path: Path) -> Iterator[FakeRegion]:
    made = FakeRegion(tmp_path / "pool", 10 * MIB)
    yield made
    made.close()


def test_a_pool_is_registered_in_pieces_and_unregistered_as_it_was(region: FakeRegion) -> None:
    driver = FakeDriver()
    pools = pools_of(driver)
    address = address_of(region.buffer)
    with capture_logs() as logs:
        pools.region_mapped(region)
        stats = settled(pools)
    assert stats["state"] == "registered"
    assert stats["registered_bytes"] == 10 * MIB
    assert stats["unregistered_bytes"] == 0
    assert stats["reason"] == ""
    assert stats["pieces"] == len(driver.registered) >= 3
    assert 0 <= stats["first_piece_seconds"] <= stats["seconds"]
    assert pools.covers(address, 10 * MIB)
    assert not pools.covers(address, 10 * MIB + 1)
    assert not pools.covers(address - 1, 2)
    assert [entry["event"] for entry in logs] == ["maru.pool_registered"]
    assert sum(length for _, length in region.populated) >= 10 * MIB
    registered = dict(driver.registered)
    pools.region_unmapping(region)
    region.close()
    eventually(lambda: pools.stats()["state"] == "no pool")
    assert dict(driver.undone) == registered
    assert not pools.covers(address, 1)
    assert not is_mapped(address, PAGE), "the memory goes once it is unregistered"
    pools.close()
    assert driver.closed == 1
    assert driver.faults == []


def test_half_a_terabyte_and_more_is_registered(tmp_path: Path) -> None:
    """R106: no single registration of 2^39 bytes or more, and a copy across an edge is cut there."""
    driver = FakeDriver()
    pools = pools_of(driver, piece=16 << 30)
    region = FakeRegion(tmp_path / "pool", 520 << 30)
    driver.attach()
    with pytest.raises(DriverError):
        driver.register(address_of(region.buffer), 520 << 30)
    driver.calls.clear()
    pools.region_mapped(region)
    assert settled(pools)["registered_bytes"] == 520 << 30
    assert max(driver.registered.values()) <= 16 << 30
    first, second = sorted(driver.registered)[1:3]
    start = address_of(region.buffer)
    assert (first - start) % (16 << 30) == (second - start) % (16 << 30) == 0
    spans = pools.spans(second - 100, 300)
    assert spans == [MemorySpan(0, 100, True), MemorySpan(100, 200, True)]
    pools.region_unmapping(region)
    region.close()
    eventually(lambda: not driver.registered)
    assert driver.faults == []


@pytest.mark.parametrize("code", [OUT_OF_MEMORY, INVALID_VALUE])
def test_what_was_registered_before_a_failure_stays(region: FakeRegion, code: int) -> None:
    driver = FakeDriver({1: DriverError(code, "cuMemHostRegister failed: no more")})
    pools = pools_of(driver)
    with capture_logs() as logs:
        pools.region_mapped(region)
        stats = settled(pools)
    (start,) = driver.registered
    length = driver.registered[start]
    assert stats["state"] == "partly"
    assert stats["registered_bytes"] == length
    assert stats["unregistered_bytes"] == 10 * MIB - length
    assert "no more" in stats["reason"]
    assert len(driver.calls) == 2, "no further piece is tried"
    address = address_of(region.buffer)
    assert pools.spans(address, 10 * MIB) == [MemorySpan(0, length, True), MemorySpan(length, 10 * MIB - length, False)]
    assert [entry["log_level"] for entry in logs] == ["warning"]
    assert "slower" in logs[0]["effect"]
    pools.region_unmapping(region)
    eventually(lambda: pools.stats()["state"] == "no pool")
    assert driver.undone == [(start, length)]
    assert driver.faults == []


def test_a_failure_is_seen_with_its_reason_only(region: FakeRegion, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it takes to put that together."""
    asked, gate = threading.Event(), threading.Event()

    def explain(problem: Exception, size: int) -> str:
        asked.set()
        gate.wait(NEVER)
        return "no more"

    monkeypatch.setattr(pinning, "_explain", explain)
    pools = pools_of(FakeDriver({1: DriverError(OUT_OF_MEMORY, "")}))
    with capture_logs() as logs:
        pools.region_mapped(region)
        assert asked.wait(NEVER)
        assert (pools.stats()["state"], pools.stats()["reason"]) == ("registering", "")
        gate.set()
        assert (settled(pools)["state"], pools.stats()["reason"], len(logs)) == ("partly", "no more", 1)
    pools.close()


def test_when_nothing_of_the_kind_can_be_registered_all_is_given_back(region: FakeRegion) -> None:
    driver = FakeDriver({2: DriverError(NOT_PERMITTED, "not permitted")})
    pools = pools_of(driver)
    pools.region_mapped(region)
    stats = settled(pools)
    assert stats["state"] == "not registered"
    eventually(lambda: len(driver.undone) == 2)
    assert pools.stats()["registered_bytes"] == 0
    assert driver.registered == {}
    pools.region_unmapping(region)
    eventually(lambda: pools.stats()["state"] == "no pool")
    assert driver.faults == []


def test_not_even_then_under_a_copy(region: FakeRegion) -> None:
    gate = threading.Semaphore(1)
    driver = FakeDriver({1: DriverError(NOT_PERMITTED, "not permitted")}, gate)
    pools = pools_of(driver)
    pools.region_mapped(region)
    eventually(lambda: pools.stats()["pieces"] == 1)
    with pools.held():
        gate.release()
        assert settled(pools)["state"] == "not registered"
        time.sleep(0.05)
        assert len(driver.registered) == 1
        assert not pools.covers(address_of(region.buffer), 1)
    eventually(lambda: not driver.registered)
    pools.close()
    assert pools.stats()["state"] == "no pool"
    assert driver.faults == []


def test_a_refused_first_piece_unregisters_nothing(region: FakeRegion) -> None:
    """R105, R107: told once, however often a pool is mapped; the way back does not touch the driver."""
    driver = FakeDriver({number: DriverError(INVALID_VALUE, "invalid argument") for number in range(9)})
    pools = pools_of(driver)
    with capture_logs() as logs:
        for _ in range(3):
            pools.region_mapped(region)
            assert settled(pools)["state"] == "not registered"
            pools.region_unmapping(region)
            eventually(lambda: pools.stats()["state"] == "no pool")
    assert [entry["event"] for entry in logs] == ["maru.pool_not_registered"]
    assert driver.undone == []
    assert driver.faults == []
    assert len(driver.calls) == 3


def test_what_somebody_else_registered_is_left_to_them(region: FakeRegion) -> None:
    address = address_of(region.buffer)
    edges = pieces(address, 10 * MIB, repeat(SMALL))
    driver = FakeDriver()
    other = (edges[1][0] + MIB, PAGE)
    driver.registered[other[0]] = other[1]
    pools = pools_of(driver)
    pools.region_mapped(region)
    stats = settled(pools)
    assert stats["state"] == "partly"
    assert stats["unregistered_bytes"] == edges[1][1] - edges[1][0]
    pools.region_unmapping(region)
    eventually(lambda: pools.stats()["state"] == "no pool")
    assert driver.registered == dict([other])
    assert driver.faults == []


@pytest.mark.parametrize("error", [DriverError(NO_DRIVER, "libcuda.so.1 cannot be used"), ValueError("odd")])
def test_without_a_driver_there_is_a_reason_and_nothing_else(region: FakeRegion, error: Exception) -> None:
    def no_driver() -> FakeDriver:
        raise error

    pools = PinnedPools(no_driver, piece=SMALL)
    with capture_logs() as logs:
        pools.region_mapped(region)
        stats = settled(pools)
    assert stats["state"] == "not registered"
    assert str(error) in stats["reason"]
    assert [entry["log_level"] for entry in logs] == ["warning"]
    assert pools.spans(address_of(region.buffer), 5) == [MemorySpan(0, 5, False)]
    pools.region_unmapping(region)
    assert pools.stats()["state"] == "no pool"
    pools.close()


def test_a_failing_unregistration_does_not_keep_the_rest(region: FakeRegion) -> None:
    driver = FakeDriver()
    pools = pools_of(driver)
    pools.region_mapped(region)
    settled(pools)
    undo, failed = driver.unregister, []

    def refuse_first(address: int, length: int) -> None:
        undo(address, length)
        if not failed:
            failed.append(address)
            raise DriverError(4, "deinitialized")

    driver.unregister = refuse_first  # type: ignore[method-assign]
    pools.close()
    eventually(lambda: driver.closed == 1)
    assert driver.registered == {}
    assert failed


def test_an_engine_uses_what_is_registered_while_the_rest_still_is(region: FakeRegion) -> None:
    gate = threading.Semaphore(0)
    driver = FakeDriver(gate=gate)
    pools = pools_of(driver)
    pools.region_mapped(region)
    address = address_of(region.buffer)
    edges = pieces(address, 10 * MIB, repeat(SMALL))
    assert pools.stats()["state"] == "registering"
    for done, (start, end) in enumerate(edges, 1):
        gate.release()
        eventually(lambda: pools.covers(start, end - start))  # noqa: B023 - called at once
        assert pools.stats()["pieces"] == done
        assert not pools.covers(address, 10 * MIB) or done == len(edges)
    assert settled(pools)["state"] == "registered"
    pools.close()
    assert driver.faults == []


def test_a_piece_is_registered_when_its_pages_are_there(region: FakeRegion) -> None:
    """Page faults under the driver's lock would hold the engine up ten times as long."""
    gate = threading.Event()
    region.populate = lambda offset, length: gate.wait(NEVER)  # type: ignore[assignment, method-assign]
    driver = FakeDriver()
    pools = pools_of(driver)
    pools.region_mapped(region)
    time.sleep(0.2)
    assert driver.calls == []
    gate.set()
    assert settled(pools)["state"] == "registered"
    pools.close()


@pytest.fixture
def large(tmp_path: Path) -> Iterator[FakeRegion]:
    """A pool of which a driver that does nothing makes pieces as large as they may be."""
    made = FakeRegion(tmp_path / "large", 5 << 30)
    yield made
    made.close()


def lengths(driver: FakeDriver) -> list[int]:
    return [length for _, length in driver.calls]


def test_pieces_are_small_from_the_engines_first_step_on(large: FakeRegion) -> None:
    gate, at_work = threading.Semaphore(2), threading.Event()
    driver = FakeDriver(gate=gate)
    pools = PinnedPools(driver.open, busy=at_work.is_set, pause=0)
    pools.region_mapped(large)
    eventually(lambda: len(driver.calls) == 3)
    at_work.set()  # the third is under way
    for _ in range(99):
        gate.release()
    assert settled(pools)["registered_bytes"] == 5 << 30
    first, second, third, *rest = lengths(driver)
    assert (first, second % STARTING.least, third % STARTING.least) == (PIECE, STARTING.least - PIECE, 0)
    assert max(rest) <= BUSY.most
    pools.close()
    assert driver.faults == []


def test_an_engine_that_begins_to_work_while_pages_are_populated_gets_small_pieces(large: FakeRegion) -> None:
    """What was planned as a large piece is not registered as one."""
    gate, at_work = threading.Event(), threading.Event()
    large.populate = lambda offset, length: offset >= PIECE and gate.wait(NEVER)  # type: ignore[assignment, method-assign]
    driver = FakeDriver()
    pools = PinnedPools(driver.open, busy=at_work.is_set, pause=0)
    pools.region_mapped(large)
    eventually(lambda: len(driver.calls) == 1)
    at_work.set()
    gate.set()
    assert settled(pools)["registered_bytes"] == 5 << 30
    assert max(lengths(driver)) <= BUSY.most
    pools.close()


def test_whether_the_engine_works_is_asked_last_thing_before_a_piece(large: FakeRegion) -> None:
    """Pages may have taken long to come."""
    driver = FakeDriver()
    flips = cycle([False, True])
    pools = PinnedPools(driver.open, busy=lambda: next(flips), pause=0)
    large.populate = lambda offset, length: None  # type: ignore[method-assign]
    pools.region_mapped(large)
    assert settled(pools)["registered_bytes"] == 5 << 30
    assert max(lengths(driver)) <= BUSY.most
    pools.close()


def test_without_being_told_an_engine_counts_as_working(large: FakeRegion) -> None:
    driver = FakeDriver()
    pools = PinnedPools(driver.open, pause=0)
    pools.region_mapped(large)
    assert settled(pools)["registered_bytes"] == 5 << 30
    assert max(lengths(driver)) <= BUSY.most
    pools.close()


def test_unmapping_does_not_wait_for_pages(region: FakeRegion) -> None:
    gate = threading.Event()
    region.populate = lambda offset, length: gate.wait(NEVER)  # type: ignore[assignment, method-assign]
    driver = FakeDriver()
    pools = pools_of(driver)
    pools.region_mapped(region)
    pools.region_unmapping(region)
    eventually(lambda: pools.stats()["state"] == "no pool", within=8)
    assert driver.calls == []
    gate.set()
    pools.close()


def test_closing_ends_after_the_piece_that_is_under_way(region: FakeRegion) -> None:
    gate = threading.Semaphore(0)
    driver = FakeDriver(gate=gate)
    pools = pools_of(driver)
    pools.region_mapped(region)
    eventually(lambda: bool(driver.calls))
    threading.Timer(0.1, gate.release).start()
    pools.close()
    eventually(lambda: driver.closed == 1)
    assert len(driver.calls) == 1
    assert driver.registered == {}
    assert driver.faults == []
    pools.region_mapped(region)
    assert len(driver.calls) == 1, "closed is closed"


def test_closing_does_not_wait_for_a_driver_that_hangs(region: FakeRegion) -> None:
    gate = threading.Semaphore(0)
    driver = FakeDriver(gate=gate)
    pools = pools_of(driver)
    pools.region_mapped(region)
    eventually(lambda: bool(driver.calls))
    address = address_of(region.buffer)
    start = time.monotonic()
    pools.region_unmapping(region)
    pools.close()
    assert time.monotonic() - start < 20
    region.close()
    assert is_mapped(address, 10 * MIB), "the driver still works on it"
    gate.release()
    eventually(lambda: driver.closed == 1)
    assert driver.registered == {}
    assert driver.faults == []


def test_nothing_is_unregistered_under_a_copy(region: FakeRegion) -> None:
    driver = FakeDriver()
    pools = pools_of(driver)
    pools.region_mapped(region)
    settled(pools)
    address = address_of(region.buffer)
    with pools.held():
        pools.region_unmapping(region)
        region.close()
        time.sleep(0.05)
        assert len(driver.registered) >= 3
        assert is_mapped(address, 10 * MIB)
        assert not pools.covers(address, 1), "no new copy relies on it"
        with pools.held():
            pass
        time.sleep(0.05)
        assert len(driver.registered) >= 3, "a later holder does not end an earlier one"
    eventually(lambda: pools.stats()["state"] == "no pool")
    assert driver.registered == {}
    assert not is_mapped(address, PAGE)
    assert driver.faults == []


def test_unmapping_does_not_wait_for_a_slow_driver(region: FakeRegion) -> None:
    gate = threading.Event()
    driver = FakeDriver()
    undo = driver.unregister

    def slow(address: int, length: int) -> None:
        gate.wait(NEVER)
        undo(address, length)

    driver.unregister = slow  # type: ignore[method-assign]
    pools = pools_of(driver)
    pools.region_mapped(region)
    settled(pools)
    start = time.monotonic()
    pools.region_unmapping(region)
    region.close()
    assert time.monotonic() - start < 20
    assert driver.registered
    gate.set()
    eventually(lambda: pools.stats()["state"] == "no pool")
    assert driver.faults == []


def test_a_transfer_holds_while_it_copies(region: FakeRegion) -> None:
    driver = FakeDriver()
    pools = pools_of(driver)
    pools.region_mapped(region)
    settled(pools)
    seen = []

    class Copies:
        def load(self, block_ids: Any, copies: Any) -> None:
            pools.region_unmapping(region)
            time.sleep(0.05)
            seen.append(("load", block_ids, copies, len(driver.registered)))

        def store(self, block_ids: Any, copies: Any) -> None:
            seen.append(("store", block_ids, copies))
            raise ValueError("copying failed")

        def close(self) -> None:
            seen.append("closed")

    transfer = HeldTransfer(Copies(), pools)
    transfer.load([1], [])
    eventually(lambda: not driver.registered)
    with pytest.raises(ValueError, match="copying failed"):
        transfer.store([2], [])
    transfer.close()
    assert seen[0][:3] == ("load", [1], [])
    assert seen[0][3] >= 3
    assert seen[1:] == [("store", [2], []), "closed"]
    eventually(lambda: driver.closed == 1)


def test_a_forked_child_unregisters_nothing(region: FakeRegion) -> None:
    driver = FakeDriver()
    pools = pools_of(driver)
    pools.region_mapped(region)
    settled(pools)
    address = address_of(region.buffer)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            pools._lock.acquire()  # as another thread may have had it at the fork
            fine = not pools.covers(address, 1)
            with pools.held():
                fine &= pools.spans(address, 7) == [MemorySpan(0, 7, False)]
            pools.region_unmapping(region)
            pools.region_mapped(region)
            fine &= pools.stats()["state"] == "not registered"
            pools.close()
            fine &= not driver.undone and not driver.closed
            code = 0 if fine else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert pools.covers(address, 10 * MIB)
    pools.close()
    assert driver.faults == []


def test_a_pool_that_cannot_be_looked_at_is_no_error(region: FakeRegion) -> None:
    region.close()
    pools = pools_of(FakeDriver())
    with capture_logs() as logs:
        pools.region_mapped(region)
    assert [entry["event"] for entry in logs] == ["maru.pool_not_registered"]
    assert pools.stats()["state"] == "no pool"


@pytest.mark.slow
def test_a_process_ends_while_pools_are_being_registered(tmp_path: Path) -> None:
    """At exit the thread leaves the driver before it is taken down."""
    import subprocess

    program = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from fake_driver import FakeDriver, FakeRegion, MIB
from maru_transfer.pinning import PinnedPools
class Slow(FakeDriver):
    def register(self, address, length):
        time.sleep(0.05)
        super().register(address, length)
        Path({str(tmp_path / "log")!r}).open("a").write("registered\\n")
driver = Slow()
pools = PinnedPools(driver.open, piece=MIB)
pools.region_mapped(FakeRegion(Path({str(tmp_path / "pool")!r}), 200 * MIB))
while not driver.registered:
    time.sleep(0.002)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert 1 <= (tmp_path / "log").read_text().count("registered") < 20


# -- pure parts ------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    st.integers(0, 5000).map(lambda page: page * PAGE + 7 * (page % 3)),
    st.integers(0, 300 * PAGE),
    st.lists(st.integers(0, 6), min_size=1, max_size=20),
)
def test_pieces_are_the_whole_pages_cut_at_multiples(address: int, size: int, powers: list[int]) -> None:
    """Whatever their sizes are, and where they change."""
    sizes = [PAGE << power for power in powers]
    found = pieces(address, size, chain(sizes, repeat(sizes[-1])))
    covered = [page for start, end in found for page in range(start, end, PAGE)]
    whole = list(range(address // PAGE * PAGE, address + size, PAGE))
    assert covered == [page for page in whole if page >= address and page + PAGE <= address + size]
    for (start, end), nbytes in zip(found, chain(sizes, repeat(sizes[-1])), strict=False):
        assert 0 < end - start <= nbytes
        assert (end - found[0][0]) % nbytes == 0 or end == found[-1][1]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), st.floats(8, 11.5).map(lambda power: 10**power)), min_size=1, max_size=30),
    st.integers(0, 6000).map(lambda pages: pages * PAGE),
)
def test_no_piece_holds_an_engine_up_for_longer_than_it_may(steps: list[tuple[bool, float]], offset: int) -> None:
    """By the speed of the last one, and from the moment on at which the engine works."""
    pace, pool = Pace(), (offset, offset + (1 << 40))
    end, last = offset, None
    for busy, speed in steps:
        bounds = BUSY if busy else STARTING
        asked = pace.size(bounds)
        start, end = end, piece_end(pool, end, asked)
        nbytes = end - start
        assert 0 < nbytes <= asked
        assert asked & (asked - 1) == 0
        assert (end - offset) % asked == 0, "an edge where the next size may go on"
        if last is None:
            assert asked == PIECE
        else:
            assert bounds.least <= asked <= bounds.most
            assert asked == bounds.least or asked / last <= bounds.seconds * 1.001
            assert asked == bounds.most or 2 * asked / last > bounds.seconds * 0.999, "as large as it may be"
        pace.took(nbytes, nbytes / speed)
        last = speed


def test_pieces_are_larger_while_nobody_waits() -> None:
    """GB/s of pools in pages of 4 KiB and in huge ones; a size that was asked for stays."""
    for speed, starting, busy in ((3.9e9, 256, 32), (12e9, 1024, 64), (40e9, 1024, 256)):
        pace = Pace()
        pace.took(PIECE, PIECE / speed)
        assert pace.size(STARTING) == starting * MIB
        assert pace.size(BUSY) == busy * MIB
    fixed = Pace(PAGE)
    for seconds in (0, 9):
        fixed.took(PAGE, seconds)
        assert fixed.size(STARTING) == fixed.size(BUSY) == PAGE
    pace = Pace()
    pace.took(PIECE, 0)
    assert pace.size(Bounds(1, PAGE, 8 * PAGE)) == 8 * PAGE, "a clock that stands still is no error"


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), max_size=12), st.data())
def test_spans_agree_with_looking_at_every_byte(lengths: list[int], data: st.DataObject) -> None:
    starts, ends, position = [], [], 100
    for length in lengths:
        gap = data.draw(st.sampled_from([0, 0, 3]))
        starts.append(position + gap)
        position += gap + length
        ends.append(position)
    address, length = data.draw(st.integers(90, 180)), data.draw(st.integers(1, 90))
    spans = cut(starts, ends, address, length)
    owner = {byte: index for index in range(len(starts)) for byte in range(starts[index], ends[index])}
    expected = [owner.get(byte) for byte in range(address, address + length)]
    at = 0
    for span in spans:
        assert span.offset == at
        assert span.length > 0
        inside = set(expected[at : at + span.length])
        assert len(inside) == 1, "a span lies within one piece or outside of all"
        assert span.pinned == (inside != {None})
        at += span.length
    assert at == length


class Life(RuleBasedStateMachine):
    """Pools are mapped, used, unmapped, in any order and with failures: the driver never sees a wrong call."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.mapped: list[FakeRegion] = []
        self.holds: list[Any] = []

    @initialize(
        errors=st.dictionaries(
            st.integers(0, 12),
            st.sampled_from([OUT_OF_MEMORY, INVALID_VALUE, NOT_PERMITTED, ALREADY_REGISTERED]),
            max_size=4,
        )
    )
    def begin(self, errors: dict[int, int]) -> None:
        import tempfile

        self.folder = tempfile.TemporaryDirectory(prefix="maru-pin-")
        self.driver = FakeDriver({number: DriverError(code, f"code {code}") for number, code in errors.items()})
        self.pools = pools_of(self.driver, piece=MIB)

    @precondition(lambda self: len(self.mapped) < 4)
    @rule(size=st.integers(1, 4 * 256).map(lambda pages: pages * PAGE))
    def map(self, size: int) -> None:
        self.count += 1
        region = FakeRegion(Path(self.folder.name) / str(self.count), size)
        self.mapped.append(region)
        self.pools.region_mapped(region)

    @precondition(lambda self: self.mapped)
    @rule(data=st.data())
    def unmap(self, data: st.DataObject) -> None:
        region = self.mapped.pop(data.draw(st.integers(0, len(self.mapped) - 1)))
        self.pools.region_unmapping(region)
        region.close()

    @precondition(lambda self: len(self.holds) < 3)
    @rule()
    def hold(self) -> None:
        hold = self.pools.held()
        hold.__enter__()
        self.holds.append((hold, set(self.covered())))

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        hold, _ = self.holds.pop(data.draw(st.integers(0, len(self.holds) - 1)))
        hold.__exit__(None, None, None)

    @rule()
    def wait(self) -> None:
        eventually(lambda: "registering" not in str(self.pools.stats()["state"]))

    def covered(self) -> list[int]:
        pages = []
        for region in self.mapped:
            address = address_of(region.buffer)
            for span in self.pools.spans(address, region.buffer.nbytes):
                if span.pinned:
                    pages.extend(range(address + span.offset, address + span.offset + span.length, PAGE))
        return pages

    @invariant()
    def what_is_relied_on_is_registered(self) -> None:
        if not self.count:
            return
        with self.pools.held():  # otherwise it may be given back between the two looks
            relied = set(self.covered()).union(*(pages for _, pages in self.holds))
            registered = set()
            for start, length in list(self.driver.registered.items()):
                registered.update(range(start, start + length, PAGE))
        assert relied <= registered
        assert self.driver.faults == []

    def teardown(self) -> None:
        if not hasattr(self, "pools"):
            return
        for hold, _ in self.holds:
            hold.__exit__(None, None, None)
        self.pools.close()
        eventually(lambda: self.driver.closed == self.driver.opened)
        assert self.driver.registered == {}
        assert self.driver.faults == []
        for region in self.mapped:
            region.close()
        self.folder.cleanup()


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


# -- the limit on locked memory --------------------------------------------------------------------------------------


def test_a_limit_on_locked_memory_is_explained_when_it_is_in_the_way(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, region: FakeRegion
) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tx\nCapEff:\t000001fffeffbfff\n")
    limit = [8 * MIB]
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit[0], limit[0]))
    hint = memlock_hint(9 * MIB, status)
    assert hint is not None
    for word in (str(8 * MIB), str(9 * MIB), "ulimit -l unlimited", "--ulimit memlock=-1", "LimitMEMLOCK=infinity"):
        assert word in hint
    assert memlock_hint(8 * MIB, status) is None
    status.write_text("CapEff:\t000001ffffffffff\n")
    assert memlock_hint(9 * MIB, status) is None, "who has CAP_IPC_LOCK may lock any amount"
    limit[0] = resource.RLIM_INFINITY
    assert memlock_hint(9 * MIB, tmp_path / "absent") is None

    limit[0] = 8 * MIB
    monkeypatch.setattr(memlock, "_may_lock_any", lambda status: False)
    for code, told in ((OUT_OF_MEMORY, True), (ALREADY_REGISTERED, False)):
        pools = pools_of(FakeDriver({0: DriverError(code, "it failed")}))
        pools.region_mapped(region)
        reason = settled(pools)["reason"]
        assert reason.startswith("it failed")
        assert ("RLIMIT_MEMLOCK" in reason) is told
        pools.close()


def test_a_library_that_is_no_driver_is_named() -> None:
    for library in ("libcuda-is-not-here.so.1", "libc.so.6"):
        with pytest.raises(DriverError, match=library) as caught:
            CudaDriver(0, library)
        assert caught.value.code == NO_DRIVER
