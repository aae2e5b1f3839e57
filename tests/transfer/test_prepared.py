"""Loads and stores that are planned first and can be cut: whole ones, cut ones, failed ones, and none at all."""

from __future__ import annotations

import threading
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from attrs import evolve, frozen
from cases import Case, cases
from fake_device import FakeDriver, aligned, compiler, registered
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paged_forms import FORMS, Size
from test_kernel import TIGHT, WAYS, Registering, opened, request
from test_torch_copy import buffers_for, check_load, check_store, layers_of

from maru_core.brake import Brake, Pull
from maru_core.contracts import PreparesLayeredLoads, PreparesLoads, PreparesStores
from maru_core.errors import TransferError
from maru_core.geometry import ChunkCopy
from maru_transfer.layerwise import LayerwiseTransfer
from maru_transfer.prepared import InParts, Once, prepare, prepare_layers, prepare_store

needs_compiler = pytest.mark.skipif(compiler() is None, reason="needs a C compiler")
SLOW = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
#: Chunks in an order that no address has.
CASE = Case(Size(L=3, NB=12, BS=4, NH=2, HS=4), 8, list(range(12))[::-1], [(n, 8 * n, 8 * n + 8) for n in range(6)])


@pytest.fixture(scope="module")
def driver(tmp_path_factory) -> FakeDriver:
    return FakeDriver.build(tmp_path_factory.mktemp("prepared"))


class Preparing(Registering):
    """Loads and stores in the prepared way."""

    def load(self, block_ids, copies) -> None:
        self._register(copies)
        with closing(prepare(self.transfer, block_ids, copies)) as load:
            assert load.run(Brake(), 1) == len(copies)

    def store(self, block_ids, copies) -> None:
        self._register(copies)
        with closing(prepare_store(self.transfer, block_ids, copies)) as store:
            assert store.run(Brake(), 1) == len(copies)


@needs_compiler
@pytest.mark.parametrize("kind", [None, LayerwiseTransfer])
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("way", WAYS)
@SLOW
@given(case=cases(), seed=st.integers(0, 1000))
def test_what_is_not_cut_writes_what_was_asked_for(driver, way, name, case, kind, seed):
    tuning, pieces = WAYS[way]

    def open_(layers, paged, stored) -> Any:
        driver.hooks.fake_reset(seed)
        more = {} if kind is None else {"kind": kind}
        return Preparing(driver, driver.transfer(layers, paged, stored, tuning, **more), pieces)

    check_load(open_, name, case)
    check_store(open_, name, case)


def opened_for(driver, engine, copies, way, seed):
    """A transfer of the driver's, which knows as much of the copies' memory as ``way`` says."""
    tuning, pieces = WAYS[way]
    driver.hooks.fake_reset(seed)
    transfer = driver.transfer(layers_of(engine), engine.paged, CASE.stored(engine), tuning)
    Registering(driver, transfer, pieces)._register(copies)
    return transfer


def run_yielding(prepared, way, least, count):
    """How many of ``count`` copies are made when somebody else would like a turn from the first moment on."""
    brake = Brake()
    brake.pull = Pull.YIELD
    done = prepared.run(brake, least)
    assert min(least, count) <= done <= count
    if way not in ("one slice", "mapped") and least < count - 2:
        assert done < count, "it goes on and on"
    return done


@needs_compiler
@pytest.mark.parametrize("way", WAYS)
@SLOW
@given(seed=st.integers(0, 1000), least=st.integers(0, 7), name=st.sampled_from(sorted(FORMS)))
def test_a_load_that_yields_has_moved_the_least_and_what_it_says(driver, way, seed, least, name):
    """The fake driver runs as little as it may, and nothing drains it: what is compared was there already."""
    objects = CASE.objects(CASE.engine(name, 3))
    buffers = [memoryview(bytearray(buffer)) for buffer in buffers_for(objects)]
    target = CASE.engine(name, None)
    copies = CASE.copies(buffers)
    transfer = opened_for(driver, target, copies, way, seed)
    with closing(transfer), closing(prepare(transfer, CASE.block_ids, copies)) as load:
        done = run_yielding(load, way, least, len(copies))
        for number, copy in enumerate(copies[:done]):
            seen = target.naive_object(CASE.block_ids, copy.chunk, copy.first, copy.last, 8)
            np.testing.assert_array_equal(seen, objects[number])
        rest = copies[done:]
        if rest:
            transfer.load(CASE.block_ids, rest)
    expected = CASE.engine(name, None)
    CASE.write(expected, objects)
    np.testing.assert_array_equal(target.memory, expected.memory)


@needs_compiler
@pytest.mark.parametrize("way", WAYS)
@SLOW
@given(seed=st.integers(0, 1000), least=st.integers(0, 7), name=st.sampled_from(sorted(FORMS)))
def test_a_store_that_yields_has_moved_the_least_and_what_it_says(driver, way, seed, least, name):
    """Pages change as soon as it has returned: what it says that it moved was in the buffers by then."""
    engine = CASE.engine(name, 3)
    objects = CASE.objects(engine)
    buffers = [memoryview(bytearray(array.nbytes)) for array in objects]
    copies = CASE.copies(buffers)
    transfer = opened_for(driver, engine, copies, way, seed)
    with closing(transfer), closing(prepare_store(transfer, CASE.block_ids, copies)) as store:
        done = run_yielding(store, way, least, len(copies))
        seen = [bytes(buffer) for buffer in buffers]
        engine.memory[...] = 0
    for number in range(done):
        assert seen[number] == objects[number].tobytes()
    assert [bytes(buffer) for buffer in buffers] == seen, "written to after it had returned"


@needs_compiler
def test_a_load_that_is_stopped_before_it_runs_writes_nothing_and_lets_go(driver):
    engine, transfer = opened(driver)
    table, copies = request(engine)
    before = engine.memory.copy()
    brake = Brake()
    brake.pull = Pull.STOP
    load = prepare(transfer, table, copies)
    assert load.run(brake, 3) == 0
    np.testing.assert_array_equal(engine.memory, before)
    load.close()
    load.close()
    for copy in copies:
        copy.buffer.release()  # raises as long as somebody holds it
    transfer.close()


@needs_compiler
@pytest.mark.parametrize("plan", [prepare, prepare_store])
def test_what_is_closed_does_not_run(driver, plan):
    """Whoever owns the memory may have let go of it."""
    engine, transfer = opened(driver)
    table, copies = request(engine)
    before = engine.memory.copy()
    planned, other = plan(transfer, table, copies), plan(transfer, table, copies)
    planned.close()
    with pytest.raises(TransferError, match="prepare it again"):
        planned.run(Brake(), 1)
    transfer.close()
    np.testing.assert_array_equal(engine.memory, before)
    assert {bytes(copy.buffer) for copy in copies} == {b"\xab" * engine.stored(8).nbytes}
    with pytest.raises(TransferError, match="this transfer is closed"):
        other.run(Brake(), 1)
    other.close()


#: So many objects that another thread comes in between.
COUNT = 2000
LONG = evolve(CASE, size=evolve(CASE.size, NB=2 * COUNT), block_ids=list(range(2 * COUNT)))


def long_copies(driver, engine) -> list[ChunkCopy]:
    nbytes = LONG.stored(engine).nbytes
    pool = registered(driver, aligned(COUNT * nbytes))
    return [ChunkCopy(n, 8 * n, 8 * n + 8, pool[n * nbytes : (n + 1) * nbytes]) for n in range(COUNT)]


def check_stopped(driver, engine, plan, copies, clear, moved) -> None:
    """The native code itself looks, not only the call: of what it is stopped at, only what was ``moved`` counts."""
    transfer = driver.transfer(layers_of(engine), engine.paged, LONG.stored(engine), TIGHT)
    brake = Brake()
    stopped = 0
    with closing(transfer), closing(plan(transfer, LONG.block_ids, copies)) as planned:
        assert planned.run(Brake(), 1) == COUNT
        for _ in range(100):  # the other thread may be late
            clear()
            brake.pull = Pull.GO_ON
            timer = threading.Timer(0.003, lambda: setattr(brake, "pull", Pull.STOP))
            timer.start()
            done = planned.run(brake, COUNT)
            timer.join()
            if done < COUNT:
                stopped += 1
                # Whatever of an object was moved last, it counts only when all of it was.
                assert all(map(moved, copies[max(0, done - 2) : done]))
                assert not moved(copies[-1])
            if stopped == 20:
                break
    assert stopped, "it was never stopped while it was under way"


@needs_compiler
def test_a_load_under_way_is_stopped_by_another_thread(driver):
    target = LONG.engine("planes-first NHD", None)

    def moved(copy: ChunkCopy) -> bool:
        seen = target.naive_object(LONG.block_ids, copy.chunk, copy.first, copy.last, 8)
        return set(seen.tobytes()) == {0xAB}

    check_stopped(driver, target, prepare, long_copies(driver, target), lambda: target.memory.fill(0), moved)


@needs_compiler
def test_a_store_under_way_is_stopped_by_another_thread(driver):
    """And leaves behind the object that it is at whatever it will not commit."""
    source = LONG.engine("planes-first NHD", 3)
    copies = long_copies(driver, source)

    def clear() -> None:
        for copy in copies:
            copy.buffer[:] = bytes(copy.buffer.nbytes)

    def moved(copy: ChunkCopy) -> bool:
        whole = source.naive_object(LONG.block_ids, copy.chunk, copy.first, copy.last, 8)
        return bytes(copy.buffer) == whole.tobytes()

    check_stopped(driver, source, prepare_store, copies, clear, moved)


@needs_compiler
def test_a_store_into_what_cannot_be_written_is_refused_when_it_is_prepared(driver):
    engine, transfer = opened(driver)
    table, copies = request(engine)
    with closing(transfer), pytest.raises(TransferError, match="read-only"):
        prepare_store(transfer, table, [evolve(copies[0], buffer=copies[0].buffer.toreadonly())])


@needs_compiler
def test_a_request_without_sense_is_refused_when_it_is_prepared_and_a_failure_when_it_runs(driver):
    engine, transfer = opened(driver)
    table, copies = request(engine)
    with pytest.raises(TransferError):
        prepare(transfer, table[:1], copies)
    for copy in copies:
        Registering(driver, transfer, 1)._register([copy])
    load = prepare(transfer, table, copies)
    driver.hooks.fake_fail(b"cuLaunchKernel", 1)
    with pytest.raises(TransferError, match="as the test wanted"):
        load.run(Brake(), 1)
    driver.hooks.fake_fail(b"", -1)
    load.close()
    transfer.load(table, copies)
    other = prepare(transfer, table, copies)
    transfer.close()
    with pytest.raises(TransferError, match="closed"):
        other.run(Brake(), 1)
    other.close()


@frozen
class Plain:
    """A transfer that cannot prepare; notes how many copies each call had."""

    calls: list[int]

    def load(self, block_ids, copies) -> None:
        self.calls.append(len(copies))

    store = load


@pytest.mark.parametrize(
    ("pull", "least", "done", "calls"),
    [
        (Pull.GO_ON, 4, 10, [4, 4, 2]),
        (Pull.GO_ON, 0, 10, [1] * 10),
        (Pull.YIELD, 4, 4, [4]),
        (Pull.YIELD, 20, 10, [10]),
        (Pull.STOP, 4, 0, []),
    ],
)
@pytest.mark.parametrize("plan", [prepare, prepare_store])
def test_a_transfer_that_cannot_prepare_moves_part_by_part(plan, pull, least, done, calls):
    transfer = Plain([])
    assert not isinstance(transfer, PreparesLoads | PreparesStores)
    planned = plan(transfer, [], [None] * 10)
    assert isinstance(planned, InParts)
    brake = Brake()
    brake.pull = pull
    assert planned.run(brake, least) == done
    assert transfer.calls == calls
    planned.close()


@frozen
class ByLayer:
    """A transfer that loads by layer and cannot prepare; notes what it was told to begin."""

    begun: list[Any]

    def begin_load(self, block_ids, copies) -> str:
        self.begun.append((block_ids, copies))
        return "the load"


def test_a_layered_load_of_a_transfer_that_cannot_prepare_is_planned_when_it_begins():
    transfer = ByLayer([])
    assert not isinstance(transfer, PreparesLayeredLoads)
    load, other = (prepare_layers(transfer, [1], [None]) for _ in range(2))
    assert not transfer.begun
    assert load.begin() == "the load"
    load.close()
    other.close()
    for over in (load, other):
        with pytest.raises(TransferError, match="begun or closed before"):
            over.begin()
    assert transfer.begun == [([1], [None])]


@pytest.mark.parametrize("calls", ["bcc", "cbc", "ccb"])
def test_what_is_planned_is_begun_or_let_go_of_once(calls: str):
    made: list[str] = []
    load = Once(lambda: made.append("b"), lambda: made.append("c"))
    for call in calls:
        try:
            (load.begin if call == "b" else load.close)()
        except TransferError:
            assert calls[0] == "c"
    assert made == [calls[0]]
