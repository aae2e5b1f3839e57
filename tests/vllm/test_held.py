"""A load that may be released and is held because others compute: however it goes on, it is answered and told once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
from attrs import define, field

pytest.importorskip("vllm")

from maru_core.errors import TransferError
from maru_integrations.vllm.loader import Loader
from maru_integrations.vllm.metadata import CANCELLED, LATE, LoadOp, LoadResult
from maru_integrations.vllm.release import Outlook, Recent, Rhythm
from tests.vllm.fake_store import FakeStore
from tests.vllm.mini_engine import CHUNK, LAYERS, Engine, reference
from tests.vllm.slow_transfer import Pace
from tests.vllm.test_connector import prompt, warm
from tests.vllm.test_loader_saver import World
from tests.vllm.test_threads import OVERLAP, finish, threaded, until
from tests.waiting import NEVER, eventually

#: With which a load of these tests is held for as long as anybody computes.
SHORT = Outlook(0.0, 0.0)
LONG = Outlook(1e9, 0.0)


@define
class Holding:
    """A loader whose second layers come when ``gate`` is open, and the load that it holds."""

    world: World
    loader: Loader
    gate: threading.Event = field(factory=threading.Event)

    def __attrs_post_init__(self) -> None:
        self.shut()

    def shut(self) -> None:
        turns = iter(range(1 << 30))
        self.world.pace.pause = lambda: [None, next(turns) % 2 and self.gate.wait(NEVER)][0]

    def hold(self, load_id: int = 1, *numbers: int, **fields: float) -> LoadOp:
        op = self.world.load(load_id, *(numbers or (1, 2)), overlap=True, **fields)
        self.loader.submit([op])
        eventually(lambda: self.loader._releases._held is not None)
        self.world.now += 1
        self.step(SHORT)
        assert not self.world.received, "held"
        return op

    def step(self, outlook: Outlook, computing: int = 1) -> None:
        """What a worker does at the end of one."""
        self.loader.poll()
        self.loader.release(computing, lambda: outlook)
        self.world.take()


class Foreseen(Rhythm):
    """Measures, and says that a load which is released now is read at once."""

    def outlook(self) -> Outlook:
        return SHORT


@pytest.fixture
def holding() -> Iterator[Holding]:
    world = World()
    loader = world.loader(release_after=1, spares_decodes=True)
    made = Holding(world, loader)
    yield made
    made.gate.set()
    assert loader.close(NEVER)


@pytest.mark.parametrize(("computing", "outlook"), [(0, SHORT), (3, LONG), (3, Outlook())])
def test_what_is_due_is_released_when_a_step_ends_and_told_once(
    holding: Holding, computing: int, outlook: Outlook
) -> None:
    world = holding.world
    holding.hold()
    holding.step(outlook, computing)
    assert (world.received, world.heard.loads) == (["r1"], [])
    holding.loader.in_use.use(["r1"])
    holding.gate.set()
    holding.loader.settle()
    holding.step(outlook, computing)
    assert world.heard.loads == [LoadResult(1, 2)]
    assert world.received == ["r1"]
    assert world.holds(1)
    assert world.holds(2)


def test_before_enough_layers_are_there_nothing_is_due(holding: Holding) -> None:
    world = holding.world
    world.pace.pause = lambda: [None, holding.gate.wait(NEVER)][0]
    holding.loader.submit([world.load(1, 1, 2, overlap=True)])
    eventually(lambda: world.pace.calls)
    for _ in range(20):
        holding.step(LONG, 0)
        time.sleep(0.001)
    assert not world.received
    holding.gate.set()
    world.until(loads=1)
    assert world.received == ["r1"]


def test_what_is_held_to_its_end_is_told_with_it(holding: Holding) -> None:
    world = holding.world
    holding.hold()
    holding.gate.set()
    world.until(loads=1, poll=lambda: holding.loader.release(1, lambda: SHORT))
    holding.step(LONG, 0)
    assert (world.received, world.heard.loads) == (["r1"], [LoadResult(1, 2)])


def test_one_that_fails_was_never_released(holding: Holding) -> None:
    world = holding.world
    world.pace.failures.append(OSError("injected"))
    holding.hold()
    holding.gate.set()
    world.until(loads=1)
    assert world.heard.loads == [LoadResult(1, 0)]
    assert (world.received, world.failed, world.late) == (["r1"], {1, 2}, 0)


def test_one_that_does_not_say_how_far_it_is_is_not_released(holding: Holding) -> None:
    world = holding.world
    holding.hold()
    held = holding.loader._releases._held
    assert held is not None

    def fails() -> int:
        raise TransferError("injected")

    held.load.layers_done = fails  # type: ignore[method-assign]
    holding.step(LONG, 0)
    assert not world.received
    holding.gate.set()
    world.until(loads=1)
    assert world.received == ["r1"]


def test_one_that_nobody_waits_for_stops_and_is_not_released_any_more(holding: Holding) -> None:
    world = holding.world
    holding.hold()
    holding.loader.cancel([1])
    holding.step(LONG, 0)
    assert not world.received, "its blocks stay until it was answered"
    holding.gate.set()
    world.until(loads=1)
    assert world.heard.loads == [LoadResult(1, 0, CANCELLED)]
    assert world.received == ["r1"]


def test_one_that_is_cancelled_just_before_it_is_held_stops(holding: Holding) -> None:
    """Between the last look at its layers and what follows."""
    world, loader = holding.world, holding.loader
    op = world.load(1, 1, 2, overlap=True)
    ready = loader._ready

    class Late:
        def __enter__(self) -> None:
            if loader._releases._held is None and world.pace.calls and threading.current_thread().name == "maru-load":
                with ready:
                    loader._queue.cancel([1])
            ready.__enter__()

        def __exit__(self, *error: object) -> None:
            ready.__exit__(*error)  # type: ignore[arg-type]

        def __getattr__(self, name: str) -> object:
            return getattr(ready, name)

    loader._ready = loader._releases._lock = Late()  # type: ignore[assignment]
    loader.submit([op])
    eventually(lambda: any(underway.load._cancelled for underway in loader.in_use._loads.values()))  # type: ignore[attr-defined]
    loader._ready = loader._releases._lock = ready
    holding.step(LONG, 0)
    assert not world.received
    holding.gate.set()
    world.until(loads=1)
    assert world.heard.loads == [LoadResult(1, 0, CANCELLED)]


def test_one_whose_deadline_passes_stops(holding: Holding) -> None:
    world = holding.world
    holding.hold(deadline=10.0)
    world.now += 10.5
    holding.step(LONG, 0)
    assert not world.received, "what failed is not released"
    holding.gate.set()
    world.until(loads=1)
    assert world.heard.loads == [LoadResult(1, 0, LATE)]
    assert world.received == ["r1"]


def test_the_load_behind_it_begins_when_it_ends_and_is_held_for_itself(holding: Holding) -> None:
    world, loader = holding.world, holding.loader
    holding.hold()
    loader.submit([world.load(2, 3, 4, overlap=True)])
    holding.gate.set()
    world.until(loads=1, poll=lambda: loader.release(1, lambda: SHORT))
    world.until(loads=2, poll=lambda: loader.release(1, lambda: SHORT))
    assert loader._releases._held is None
    assert sorted(world.received) == ["r1", "r2"]
    assert world.heard.loads == [LoadResult(1, 2), LoadResult(2, 2)]


def test_what_is_held_ends_with_the_loader(holding: Holding) -> None:
    world = holding.world
    holding.hold()
    closing = threading.Timer(0.05, holding.gate.set)
    closing.start()
    assert holding.loader.close(NEVER)
    closing.join()
    holding.step(LONG, 0)
    assert world.heard.loads == [LoadResult(1, 0, CANCELLED)]
    assert world.received == ["r1"]


@pytest.mark.slow
def test_a_release_and_an_end_at_the_same_moment_are_told_once(holding: Holding) -> None:
    """Many loads whose ends race with releases: each is received once, and answered once."""
    world, loader = holding.world, holding.loader
    pauses = iter(range(1 << 30))
    world.pace.pause = lambda: time.sleep(0.0002 * (next(pauses) % 3))
    count = 120
    for load_id in range(1, count + 1):
        loader.submit([world.load(load_id, 1 + load_id % 7, 11 + load_id % 7, overlap=True)])
        if load_id % 4 == 0:
            world.until(loads=load_id, poll=lambda: loader.release(0, lambda: SHORT))
    assert sorted(world.received) == sorted(f"r{number}" for number in range(1, count + 1))
    assert [result.load_id for result in world.heard.loads] == list(range(1, count + 1))
    assert all(result == LoadResult(result.load_id, 2) for result in world.heard.loads)


def test_without_it_a_load_is_released_at_once_by_its_own_thread() -> None:
    world = World()
    loader = world.loader(release_after=1)
    holding = Holding(world, loader)
    try:
        loader.submit([world.load(1, 1, 2, overlap=True)])
        eventually(lambda: world.take() or world.received)
        assert loader._releases._held is None
        assert not world.heard.loads
    finally:
        holding.gate.set()
        assert loader.close(NEVER)


def test_in_an_engine_a_hit_beside_a_request_that_decodes_is_held_and_one_alone_is_not(
    engine_on: Callable[..., Engine],
) -> None:
    """Steps go on while it is held; ``computing`` tells each of them how many it computes."""
    store, pace, gate = FakeStore(), Pace(), threading.Event()
    hits = [prompt(150, number) for number in range(2)]
    warm(engine_on, store, *hits)
    with threaded(engine_on, store, OVERLAP, pace) as engine:
        worker, answers = engine.worker._worker, engine.worker._answers
        assert worker is not None
        assert worker._loader is not None
        # Loads seem to be so slow that one that stalls is no slower than expected.
        worker._loader._releases._pace = slow = Recent()
        slow.add(1e3)
        released: list[str] = []
        release = answers.load_released
        answers.load_released = lambda op: [released.append(op.request_id), release(op)][1]  # type: ignore[method-assign]
        engine.add("decodes", prompt(40, 9), max_tokens=60)
        until(engine, lambda: engine.answers["decodes"])
        turns = iter(range(1 << 30))
        pace.pause = lambda: [None, next(turns) % LAYERS and gate.wait(NEVER)][0]
        worker._rhythm = Foreseen()
        engine.add("held", hits[0], max_tokens=3)
        until(engine, lambda: worker._loader._releases._held is not None)
        for _ in range(5):
            before = len(engine.answers["decodes"])
            output = engine.step()
            assert output.kv_connector_metadata.computing == len(output.num_scheduled_tokens) == 1
            assert len(engine.answers["decodes"]) == before + 1, "nobody waits"
        assert not released
        assert not engine.answers["held"]
        gate.set()
        finish(engine)
        measured = Rhythm.outlook(worker._rhythm)
        assert measured.lead is not None, "beside the request that decodes"
        assert measured.step
        gate.clear()
        released.clear()  # when its last layer was there
        output = engine.step()
        assert output.kv_connector_metadata.computing == 0
        worker._loader._releases._pace = slow = Recent()
        slow.add(1e3)
        engine.add("alone", hits[1], max_tokens=3)
        until(engine, lambda: released)
        assert released == ["alone"]
        gate.set()
        finish(engine)
        assert engine.answers["decodes"] == reference(prompt(40, 9), 60)
        for number, name in enumerate(("held", "alone")):
            assert engine.answers[name] == reference(hits[number], 3)
            assert engine.external[name] == len(hits[number]) // CHUNK * CHUNK
