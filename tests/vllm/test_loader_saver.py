"""The two threads on their own: failures of every kind, deaths, stuck copies, preemption at every stage."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from attrs import evolve
from structlog.testing import capture_logs

pytest.importorskip("vllm")

import torch

from maru_core.brake import Brake, Pull
from maru_core.errors import Unavailable
from maru_core.geometry import ObjectLayout, PagedLayout, PlaneStrides
from maru_integrations.vllm.answers import Answers
from maru_integrations.vllm.copies import ChunkShape
from maru_integrations.vllm.loader import Loader
from maru_integrations.vllm.metadata import (
    CANCELLED,
    ERROR,
    LATE,
    PREEMPTED,
    QUEUE_FULL,
    UNAVAILABLE,
    LoadOp,
    LoadResult,
    MaruConnectorMetadata,
    MaruWorkerMetadata,
    StoreOp,
    StoreResult,
)
from maru_integrations.vllm.moving import Link
from maru_integrations.vllm.releasing import LoaderSettings
from maru_integrations.vllm.saver import Saver, SaverSettings
from maru_integrations.vllm.streams import HostLane
from maru_integrations.vllm.worker import MaruWorker, Patience
from tests.vllm.fake_store import FakeHandler, FakeStore
from tests.vllm.slow_transfer import Pace, SlowTransfer
from tests.waiting import NEVER, eventually

TOKENS, LAYERS, HIDDEN, BLOCKS = 4, 2, 2, 40
PAGED = PagedLayout(
    tuple(PlaneStrides(plane * BLOCKS * TOKENS * HIDDEN, TOKENS * HIDDEN, HIDDEN, HIDDEN, 1) for plane in range(2)),
    LAYERS,
    BLOCKS,
    TOKENS,
    1,
    HIDDEN,
    2,
)
STORED = ObjectLayout(2, LAYERS, TOKENS, HIDDEN, 2)
SHAPE = ChunkShape(TOKENS, TOKENS, STORED.nbytes)


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


class Plain:
    """A transfer that cannot load by layer."""

    def __init__(self, inner: SlowTransfer) -> None:
        self.load, self.store, self.close = inner.load, inner.store, inner.close


class World:
    """A pool with objects 0, 1, … in which every byte is the object's number, and what the threads answer."""

    def __init__(self, layers: int = LAYERS) -> None:
        self.store, self.pace, self.answers = FakeStore(), Pace(), Answers()
        self.handler = FakeHandler(self.store)
        self.paged, self.stored = evolve(PAGED, num_layers=layers), evolve(STORED, num_layers=layers)
        self.shape = evolve(SHAPE, nbytes=self.stored.nbytes)
        self.caches = [torch.zeros((2, BLOCKS, TOKENS, 1, HIDDEN), dtype=torch.int16) for _ in range(layers)]
        self.link = Link(self.handler, self.transfer(), self.stored, self.transfer())  # type: ignore[arg-type]
        self.heard = MaruWorkerMetadata()
        self.sent: list[str] = []
        self.received: list[str] = []
        self.failed: set[int] = set()
        self.late = 0
        #: The time of both threads, in seconds: it passes when a test says so.
        self.now = 1000.0

    def transfer(self) -> SlowTransfer:
        return SlowTransfer(self.caches, self.paged, self.stored, self.pace)

    def loader(self, **settings: Any) -> Loader:
        def late() -> None:
            self.late += 1

        return Loader(
            lambda: self.link,
            self.shape,
            self.answers,
            settings.pop("lane", None) or HostLane(),
            LoaderSettings(num_layers=len(self.caches), **settings),
            late,
            lambda: self.now,
        )

    def saver(self, **settings: Any) -> Saver:
        return Saver(
            lambda: self.link,
            self.shape,
            self.answers,
            HostLane(),
            SaverSettings(1 << 20, **settings),
            lambda: self.now,
        )

    def put(self, number: int) -> None:
        grants = self.handler.reserve([key(number)], self.stored.nbytes, [bytes(32)], weights_epoch=0)
        self.handler.room(grants, 0)[:] = bytes([number]) * self.stored.nbytes
        self.handler.commit(grants, checksums=False)

    def load(self, load_id: int, *numbers: int, **fields: Any) -> LoadOp:
        """Objects ``numbers`` to blocks of the same numbers."""
        for number in numbers:
            if key(number) not in self.store.objects:
                self.put(number)
        found = [self.store.objects[key(number)] for number in numbers]
        return LoadOp(
            load_id=load_id,
            request_id=f"r{load_id}",
            parked=True,
            epoch=self.store.epoch,
            chunk=0,
            first=0,
            last=len(numbers) * TOKENS,
            blocks=numbers,
            entries=[item.entry for item in found],
            generations=[item.generation for item in found],
            lengths=[self.stored.nbytes] * len(found),
            keys=[item.key for item in found],
            **fields,
        )

    def save(self, store_id: int, *numbers: int, request: str = "a") -> StoreOp:
        """Blocks ``numbers``, in which every byte is the number, under the keys of these numbers."""
        for number in numbers:
            for cache in self.caches:
                cache.view(torch.uint8)[:, number] = number
        keys = [key(number) for number in numbers]
        op = StoreOp(request, range(len(keys)), keys, [bytes(32), *keys[:-1]], numbers, store_id, True)
        self.answers.store_queued(op)
        return op

    def take(self) -> None:
        sent, received = self.answers.take_finished()
        self.sent += sent
        self.received += received
        self.failed |= self.answers.take_failed_blocks()
        answer = self.answers.take_metadata()
        if answer is not None:
            self.heard = MaruWorkerMetadata(self.heard.loads + answer.loads, stored=self.heard.stored + answer.stored)

    def until(self, loads: int = 0, stores: int = 0, poll: Callable[[], None] = lambda: None) -> None:
        deadline = time.monotonic() + NEVER
        while len(self.heard.loads) < loads or len(self.heard.stored) < stores:
            poll()
            self.take()
            time.sleep(0.001)
            assert time.monotonic() < deadline, self.heard

    def holds(self, number: int) -> bool:
        return all(bool((cache.view(torch.uint8)[:, number] == number).all()) for cache in self.caches)

    def is_stored(self, number: int) -> bool:
        found = self.store.objects.get(key(number))
        return found is not None and found.ready and bytes(found.data) == bytes([number]) * self.stored.nbytes


@pytest.fixture
def world() -> World:
    return World()


@contextmanager
def closing(world: World, *threads: Any) -> Iterator[None]:
    try:
        yield
    finally:
        world.pace.pause = lambda: None
        for thread in threads:
            assert thread.close(NEVER)


class Odd(BaseException):
    """No Exception."""


@pytest.mark.parametrize("error", [OSError("injected"), ValueError("injected"), Odd("injected"), SystemExit(3)])
@pytest.mark.parametrize("overlap", [False, True])
def test_one_load_that_fails_leaves_the_others_alone(world: World, error: BaseException, overlap: bool) -> None:
    """R030: the third of ten."""
    loader = world.loader(release_after=1)
    with closing(world, loader):
        ops = [world.load(number, number * 2 + 1, number * 2 + 2, overlap=overlap) for number in range(10)]

        class Third(list):  # type: ignore[type-arg]
            calls = 0

            def __bool__(self) -> bool:
                Third.calls += 1
                return Third.calls == 3

            def pop(self, index: int = 0) -> BaseException:  # type: ignore[override]
                return error

        world.pace.failures = Third()
        loader.submit(ops)
        world.until(loads=10)
    results = {result.load_id: result for result in world.heard.loads}
    assert len(results) == 10
    assert results.pop(2) == LoadResult(2, 0)
    assert all(result == LoadResult(result.load_id, 2) for result in results.values())
    assert world.failed == {5, 6}
    assert sorted(world.received) == sorted(op.request_id for op in ops)
    assert all(world.holds(number) for number in range(1, 21) if number not in (5, 6))


@pytest.mark.parametrize("column", ["entries", "generations", "lengths", "keys"])
@pytest.mark.parametrize("change", [lambda column: column[:-1], lambda column: [*column, column[0]]])
def test_short_and_long_columns_load_nothing(world: World, column: str, change: Callable[[Any], Any]) -> None:
    """D5: whoever read on would take one object for its neighbour."""
    loader = world.loader()
    with closing(world, loader):
        op = world.load(1, 1, 2, 3)
        loader.submit([evolve(op, **{column: change(getattr(op, column))})])
        world.until(loads=1)
    assert world.heard.loads == [LoadResult(1, 0)]
    assert world.failed == {1, 2, 3}
    assert not world.pace.calls


@pytest.mark.parametrize("overlap", [False, True])
def test_a_bad_object_fails_its_blocks_and_those_behind(world: World, overlap: bool) -> None:
    loader = world.loader(piece_bytes=STORED.nbytes, release_after=1)
    with closing(world, loader):
        op = world.load(1, 1, 2, 3, 4, overlap=overlap)
        world.store.lost.add(world.store.objects[key(3)].entry)
        loader.submit([op])
        world.until(loads=1)
    assert world.heard.loads == [LoadResult(1, 2)]
    assert world.failed == {3, 4}
    assert world.received == ["r1"]
    assert not world.late


def test_a_server_that_is_gone_is_not_the_objects_fault(world: World) -> None:
    loader = world.loader()
    with closing(world, loader):
        op = world.load(1, 1)
        world.store.epoch += 1
        loader.submit([op])
        world.until(loads=1)
    assert world.heard.loads == [LoadResult(1, 0, UNAVAILABLE)]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_dies_is_noticed_and_replaced(world: World) -> None:
    class Deadly(HostLane):
        dead = True

        @contextmanager
        def entered(self) -> Iterator[None]:
            if self.dead:
                raise SystemExit
            yield

    lane = Deadly()
    loader = world.loader(lane=lane)
    with closing(world, loader):
        loader.submit([world.load(1, 1), world.load(2, 2)])
        world.until(loads=2, poll=loader.poll)
        assert [result.reason for result in world.heard.loads] == [UNAVAILABLE] * 2
        lane.dead = False
        loader.submit([world.load(3, 3)])
        world.until(loads=3)
    assert world.heard.loads[-1] == LoadResult(3, 1)


def test_a_copy_that_does_not_return_is_told_and_keeps_only_its_own_request(world: World) -> None:
    """R026: its blocks may still be written to, so they stay; whoever waits behind it is recomputed in time."""
    gate = threading.Event()
    world.pace.pause = lambda: [None, gate.wait(NEVER)][0]
    loader = world.loader()
    with closing(world, loader), capture_logs() as logs:
        loader.submit([world.load(1, 1, deadline=5.0), world.load(2, 2, deadline=5.0)])
        eventually(lambda: world.pace.calls)
        world.now += 6
        world.until(loads=1, poll=loader.poll)
        assert world.heard.loads == [LoadResult(2, 0, LATE)]
        assert world.failed == {2}
        assert not [entry for entry in logs if entry["event"] == "maru.load_stuck"], "it may be about to return"
        world.now += 3
        loader.poll()
        loader.poll()
        assert loader.close(0.05) is False
        gate.set()
        world.until(loads=2)
        assert world.heard.loads[1].load_id == 1
        assert sorted(world.received) == ["r1", "r2"]
    (stuck,) = [entry for entry in logs if entry["event"] == "maru.load_stuck"]
    assert stuck["key"] == key(1).hex()


def test_a_copy_that_is_seen_late_and_returns_is_not_called_stuck(world: World) -> None:
    """An engine that was busy for longer than the deadline says nothing about the copy."""
    gate = threading.Event()
    world.pace.pause = lambda: [None, gate.wait(NEVER)][0]
    loader = world.loader()
    with closing(world, loader), capture_logs() as logs:
        loader.submit([world.load(1, 1, deadline=5.0)])
        eventually(lambda: world.pace.calls)
        world.now += 60
        loader.poll()
        gate.set()
        world.until(loads=1, poll=loader.poll)
    assert world.heard.loads == [LoadResult(1, 1)]
    assert not [entry for entry in logs if entry["event"] == "maru.load_stuck"]


def test_a_short_load_goes_between_two_pieces_of_a_large_one_that_is_under_way(world: World) -> None:
    """And a large one that nobody waits behind is one call."""
    prepared: list[int] = []

    class Preparing(Plain):
        """Copies at a walk, and looks at its brake between two copies."""

        def prepare_load(self, block_ids: Any, copies: Any) -> Any:
            prepared.append(len(copies))

            def run(brake: Brake, least: int) -> int:
                for done, copy in enumerate(copies):
                    if brake.pull is Pull.STOP or (brake.pull is Pull.YIELD and done >= least):
                        return done
                    if prepared == [8] and done == 1:
                        loader.submit([world.load(2, 20)])
                    self.load(block_ids, [copy])
                return len(copies)

            return SimpleNamespace(run=run, close=lambda: None)

    world.link.transfer = Preparing(world.transfer())  # type: ignore[assignment]
    loader = world.loader(piece_bytes=3 * STORED.nbytes)
    with closing(world, loader):
        loader.submit([world.load(1, *range(1, 9))])
        world.until(loads=2)
        loader.submit([world.load(3, *range(21, 29))])
        world.until(loads=3)
    assert world.heard.loads == [LoadResult(2, 1), LoadResult(1, 8), LoadResult(3, 8)]
    assert prepared == [8, 1, 5, 8]
    assert all(world.holds(number) for number in (*range(1, 9), 20, *range(21, 29)))


class Planning(Plain):
    """Notes in ``events`` what becomes of each load, by its first block; copies wait for ``gate``."""

    def __init__(self, inner: SlowTransfer) -> None:
        super().__init__(inner)
        self.events: list[tuple[str, int]] = []
        self.gate = threading.Event()
        self.refused: set[int] = set()

    def prepare_load(self, block_ids: Any, copies: Any) -> Any:
        first = block_ids[copies[0].chunk]
        self.events.append(("planned", first))
        if first in self.refused:
            raise OSError("injected")

        def run(brake: Brake, least: int) -> int:
            self.events.append(("begins", first))
            assert self.gate.wait(NEVER)
            self.load(block_ids, copies)
            self.events.append(("ends", first))
            return len(copies)

        return SimpleNamespace(run=run, close=lambda: self.events.append(("closed", first)))

    def until(self, *event: Any) -> None:
        deadline = time.monotonic() + NEVER
        while event not in self.events:
            assert time.monotonic() < deadline, self.events
            time.sleep(0.001)

    def of(self, first: int) -> list[str]:
        return [what for what, number in self.events if number == first]


class PlanningLayers(Planning):
    """The same by layer: of a load that was begun ``gate`` holds back the end."""

    def __init__(self, inner: SlowTransfer) -> None:
        super().__init__(inner)
        self._begin = inner.begin_load

    def begin_load(self, block_ids: Any, copies: Any) -> Any:
        raise AssertionError("it can be planned")

    def prepare_layers(self, block_ids: Any, copies: Any) -> Any:
        first = block_ids[copies[0].chunk]
        prepared = self.prepare_load(block_ids, copies)
        usable = [True]

        def begin() -> Any:
            assert usable.pop(), "a load that was begun or closed before"
            self.events.append(("begins", first))
            load = self._begin(block_ids, copies)

            def finish() -> None:
                assert self.gate.wait(NEVER)
                load.finish()
                self.events.append(("ends", first))

            return SimpleNamespace(
                layers_done=load.layers_done, wait_layer=load.wait_layer, cancel=load.cancel, finish=finish
            )

        return SimpleNamespace(begin=begin, close=lambda: [usable.clear(), prepared.close()])


@pytest.fixture(params=[Planning, PlanningLayers])
def planning(request: pytest.FixtureRequest, world: World) -> Planning:
    """The loads of ``world`` are early ones where the transfer loads by layer."""
    world.link.transfer = transfer = request.param(world.transfer())
    if request.param is PlanningLayers:
        make = world.load
        world.load = lambda *what, **fields: make(*what, overlap=True, **fields)  # type: ignore[method-assign]
    return transfer  # type: ignore[no-any-return]


def test_the_next_load_is_planned_while_one_is_copied_and_their_order_stays(world: World, planning: Planning) -> None:
    loader = world.loader(release_after=1)
    with closing(world, loader):
        loader.submit([world.load(number, number) for number in (1, 2, 3)])
        planning.until("planned", 2)
        assert planning.events[:3] == [("planned", 1), ("begins", 1), ("planned", 2)]
        planning.gate.set()
        world.until(loads=3)
    assert world.heard.loads == [LoadResult(number, 1) for number in (1, 2, 3)]
    assert [first for what, first in planning.events if what == "begins"] == [1, 2, 3]
    assert all(planning.of(number) == ["planned", "begins", "ends", "closed"] for number in (1, 2, 3))
    assert all(world.holds(number) for number in (1, 2, 3))


@pytest.mark.parametrize("others", [(), (3,)])
def test_a_load_that_is_cancelled_between_its_plan_and_its_turn_lets_go(
    world: World, planning: Planning, others: tuple[int, ...]
) -> None:
    loader = world.loader(release_after=1)
    with closing(world, loader):
        loader.submit([world.load(number, number) for number in (1, 2, *others)])
        planning.until("planned", 2)
        loader.cancel([2])
        planning.gate.set()
        world.until(loads=2 + len(others))
        planning.until("closed", 2)  # at once, not when the next load comes
    assert world.heard.loads[0] == LoadResult(2, 0, CANCELLED)
    assert world.failed == {2}
    assert planning.of(2) == ["planned", "closed"]
    assert all(planning.of(number)[-3:] == ["begins", "ends", "closed"] for number in (1, *others))


def test_a_load_that_is_late_between_its_plan_and_its_turn_lets_go(world: World, planning: Planning) -> None:
    loader = world.loader(release_after=1)
    with closing(world, loader):
        loader.submit([world.load(1, 1), world.load(2, 2, deadline=5.0), world.load(3, 3)])
        planning.until("planned", 2)
        world.now += 60
        planning.gate.set()
        world.until(loads=3)
    assert world.heard.loads == [LoadResult(1, 1), LoadResult(2, 0, LATE), LoadResult(3, 1)]
    assert planning.of(2) == ["planned", "closed"]
    assert planning.of(3)[-3:] == ["begins", "ends", "closed"]


def test_what_was_planned_under_a_server_that_was_replaced_is_not_copied(world: World, planning: Planning) -> None:
    """It fails as one that is planned in its turn: its objects are not at fault."""
    loader = world.loader(release_after=1)
    with closing(world, loader):
        loader.submit([world.load(1, 1), world.load(2, 2)])
        planning.until("planned", 2)
        world.store.epoch += 1
        planning.gate.set()
        world.until(loads=2)
    assert world.heard.loads[1] == LoadResult(2, 0, UNAVAILABLE)
    assert planning.of(2) == ["planned", "closed"]


def test_what_was_planned_for_a_transfer_that_was_replaced_is_let_go_of(world: World, planning: Planning) -> None:
    loader = world.loader(release_after=1)
    with closing(world, loader):
        loader.submit([world.load(1, 1), world.load(2, 2)])
        planning.until("planned", 2)
        world.link.transfer = other = type(planning)(world.transfer())
        other.gate.set()
        planning.gate.set()
        world.until(loads=2)
    assert world.heard.loads == [LoadResult(1, 1), LoadResult(2, 1)]
    assert planning.of(2) == ["planned", "closed"]
    assert other.of(2) == ["planned", "begins", "ends", "closed"]
    assert world.holds(2)


def test_behind_a_load_that_is_not_sound_the_next_one_is_planned_for_itself(world: World) -> None:
    """What is sound of it is copied plainly, by a plan of its own."""
    world.link.transfer = planning = PlanningLayers(world.transfer())  # type: ignore[assignment]
    planning.gate.set()
    loader = world.loader(release_after=1)
    with closing(world, loader):
        ops = [world.load(1, 1, 2, overlap=True), world.load(2, 3, overlap=True)]
        world.store.lost.add(world.store.objects[key(2)].entry)
        loader.submit(ops)
        world.until(loads=2)
    assert world.heard.loads == [LoadResult(1, 1), LoadResult(2, 1)]
    assert planning.of(1) == ["planned", "begins", "ends", "closed"] * 2
    assert planning.of(3) == ["planned", "begins", "ends", "closed"]
    assert world.holds(1)
    assert world.holds(3)


def test_a_plan_that_fails_ahead_of_its_turn_fails_its_own_load(world: World, planning: Planning) -> None:
    planning.refused.add(2)
    planning.gate.set()
    loader = world.loader(release_after=1)
    with closing(world, loader):
        loader.submit([world.load(number, number) for number in (1, 2, 3)])
        world.until(loads=3)
    assert world.heard.loads == [LoadResult(1, 1), LoadResult(2, 0), LoadResult(3, 1)]
    assert world.failed == {2}
    assert planning.of(3)[-3:] == ["begins", "ends", "closed"]


def test_what_was_planned_ahead_is_let_go_of_at_the_end(world: World, planning: Planning) -> None:
    loader = world.loader(release_after=1)
    loader.submit([world.load(number, number) for number in (1, 2)])
    planning.until("planned", 2)
    timer = threading.Timer(0.05, planning.gate.set)
    timer.start()
    assert loader.close()
    timer.join()
    assert planning.of(2) == ["planned", "closed"]


def test_a_copy_is_told_to_stop_when_its_load_is_cancelled(world: World) -> None:
    begun, told = threading.Event(), threading.Event()

    class Preparing(Plain):
        def prepare_load(self, block_ids: Any, copies: Any) -> Any:
            def run(brake: Brake, least: int) -> int:
                self.load(block_ids, copies[:1])
                begun.set()
                while brake.pull is not Pull.STOP:
                    time.sleep(0.001)
                told.set()
                return 1

            return SimpleNamespace(run=run, close=lambda: None)

    world.link.transfer = Preparing(world.transfer())  # type: ignore[assignment]
    loader = world.loader()
    with closing(world, loader):
        loader.submit([world.load(1, 1, 2, 3)])
        assert begun.wait(NEVER)
        loader.cancel([1])
        world.until(loads=1)
        assert told.is_set()
    assert world.heard.loads == [LoadResult(1, 1, CANCELLED)]
    assert world.failed == {2, 3}


def test_aborted_loads_stop_soon_and_are_answered_once(world: World) -> None:
    gate = threading.Event()
    world.pace.pause = lambda: [None, gate.wait(NEVER)][0]
    loader = world.loader(piece_bytes=STORED.nbytes)
    with closing(world, loader):
        loader.submit([world.load(1, 1, 2, 3), world.load(2, 4)])
        eventually(lambda: world.pace.calls)
        loader.cancel([1, 2])
        world.until(loads=1)
        gate.set()
        world.until(loads=2)
    assert world.heard.loads == [LoadResult(2, 0, CANCELLED), LoadResult(1, 1, CANCELLED)]
    assert world.pace.calls == ["load begins", "load ends"]


def test_an_engine_that_cannot_load_by_layer_is_told_once_and_loads_in_pieces(world: World) -> None:
    world.link.transfer = Plain(world.transfer())  # type: ignore[assignment]
    loader = world.loader(piece_bytes=STORED.nbytes, release_after=1)
    with closing(world, loader), capture_logs() as logs:
        for load_id in (1, 2):
            loader.submit([world.load(load_id, load_id * 2, load_id * 2 + 1, overlap=True)])
            world.until(loads=load_id)
    assert [entry["event"] for entry in logs].count("maru.no_overlap") == 1
    assert world.pace.calls.count("load begins") == 3
    assert world.heard.loads == [LoadResult(1, 2), LoadResult(2, 2)]


def test_a_failure_after_the_release_is_never_silent(world: World) -> None:
    gate, turns = threading.Event(), iter(range(100))
    world.pace.pause = lambda: [None, next(turns) and gate.wait(NEVER)][0]
    loader = world.loader(release_after=1)
    with closing(world, loader):
        op = world.load(1, 1, 2, overlap=True)
        world.pace.failures += [OSError("injected"), OSError("injected again")]
        loader.submit([op])
        eventually(lambda: world.take() or world.received)
        assert not world.heard.loads
        loader.in_use.use(["r1"])
        tell = world.answers.load_ended
        world.answers.load_ended = lambda *a: [time.sleep(0.05), tell(*a)][1]  # type: ignore[method-assign]
        gate.set()
        loader.settle()
        assert world.late == 1, "known before the step stores anything"
        world.take()
    assert world.heard.loads == [LoadResult(1, 0)]
    assert world.failed == {1, 2}
    assert world.received == ["r1"], "reported once"


@pytest.mark.parametrize("error", [OSError("injected"), Odd("injected"), Unavailable("injected")])
def test_one_store_that_fails_leaves_the_others_alone(world: World, error: BaseException) -> None:
    saver = world.saver()
    with closing(world, saver):
        world.pace.failures.append(error)
        saver.submit([world.save(number, number) for number in range(1, 6)], 0)
        world.until(stores=5)
    first, *others = world.heard.stored
    assert first == StoreResult(1, 0, UNAVAILABLE if isinstance(error, Unavailable) else ERROR)
    assert others == [StoreResult(number, 1) for number in range(2, 6)]
    assert [world.is_stored(number) for number in range(1, 6)] == [False, True, True, True, True]
    assert not [found for found in world.store.objects.values() if not found.ready], "what failed holds no pages"


def test_more_than_may_wait_is_dropped_from_the_end(world: World, capsys) -> None:
    gate = threading.Event()
    world.pace.pause = lambda: [None, gate.wait(NEVER)][0]
    saver = Saver(lambda: world.link, SHAPE, world.answers, HostLane(), SaverSettings(3 * STORED.nbytes))
    with closing(world, saver):
        saver.submit([world.save(number, number) for number in range(1, 7)], 0)
        world.until(stores=2)
        gate.set()
        world.until(stores=6)
    dropped, kept = world.heard.stored[:2], world.heard.stored[2:]
    assert dropped == [StoreResult(number, 0, QUEUE_FULL) for number in (5, 6)], "three wait behind the first"
    assert kept == [StoreResult(number, 1) for number in (1, 2, 3, 4)]
    assert capsys.readouterr().out.count("maru.store_dropped") == 1


@pytest.mark.parametrize("stage", ["queued", "reserving", "copying", "copying too long", "committing"])
def test_preemption_at_every_stage(world: World, stage: str) -> None:
    """R081: afterwards the blocks are another request's; under the keys are the true bytes or nothing."""
    gate, reached = threading.Event(), threading.Event()

    def hold(*_: Any) -> None:
        reached.set()
        assert gate.wait(NEVER)

    saver = world.saver(drain_seconds=0.05 if stage == "copying too long" else 10)
    with closing(world, saver):
        ops = [world.save(1, 1, request="other"), world.save(2, 2, request="victim")]
        if stage == "queued":
            world.pace.pause = hold
        else:
            ops = ops[1:]
        if stage.startswith("copying"):
            world.pace.pause = hold
        for name in ("reserve", "commit"):
            if stage == {"reserve": "reserving", "commit": "committing"}[name]:
                call = getattr(world.handler, name)

                def held(*arguments: Any, call: Any = call, **named: Any) -> Any:
                    hold()
                    return call(*arguments, **named)

                object.__setattr__(world.link, "handler", _With(world.handler, name, held))
        saver.submit(ops, 0)
        assert reached.wait(NEVER)
        if stage == "copying":
            threading.Timer(0.05, gate.set).start()
        saver.preempt(["victim"])
        for cache in world.caches:
            cache[:, 2] = 77
        gate.set()
        world.until(stores=len(ops))
    result = next(result for result in world.heard.stored if result.store_id == 2)
    stored = stage in ("copying", "committing")
    assert world.is_stored(2) is stored
    assert result == (StoreResult(2, 1) if stored else StoreResult(2, 0, PREEMPTED))
    assert stored or key(2) not in world.store.objects
    assert world.is_stored(1) is (stage == "queued")


def test_a_step_waits_for_a_late_server_once_and_then_leaves_it_alone() -> None:
    """H14: the decode of others must not wait for stores; the pauses grow, and end with an answer."""
    patience = Patience(seconds=0.5)
    assert patience.allows(0.0)
    patience.failed(0.0, 0.001)
    assert patience.allows(0.002), "a refusal that came at once delays nobody"
    patience.failed(1.0, 1.5)
    assert not patience.allows(2.4)
    assert patience.allows(2.5)
    patience.failed(2.5, 3.0)
    assert not patience.allows(4.9)
    assert patience.allows(5.0)
    patience.answered()
    patience.failed(5.0, 5.5)
    assert patience.allows(6.5)


def test_stores_within_a_step_are_bounded_and_skipped_while_the_server_is_late(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("maru_integrations.vllm.worker.time.perf_counter", lambda: now[0])
    reserve = world.handler.reserve

    def late(*arguments: Any, timeout: float | None = None, **named: Any) -> Any:
        world.handler.timeouts.append(timeout)
        assert timeout is not None
        now[0] += timeout
        raise Unavailable("injected: no answer")

    worker = MaruWorker(lambda: world.link, world.answers, SHAPE)
    object.__setattr__(world.link, "handler", _With(world.handler, "reserve", late))
    for _ in range(5):
        worker.store(MaruConnectorMetadata(stores=[evolve(world.save(0, 1), asynchronous=False)]))
    assert world.handler.timeouts == [0.5]
    object.__setattr__(world.link, "handler", _With(world.handler, "reserve", reserve))
    now[0] += 1.1
    worker.store(MaruConnectorMetadata(stores=[evolve(world.save(0, 1), asynchronous=False)]))
    assert world.is_stored(1)


class _With:
    """A handler with another method."""

    def __init__(self, handler: FakeHandler, name: str, method: Any) -> None:
        self._handler = handler
        setattr(self, name, method)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handler, name)
