"""A load that fails after its release: its request computes, and with asynchronous scheduling vLLM keeps a token of it.

So it is copied once more, and the step that reads it waits for that. What must hold: a step reads of each layer what
was stored, or the blocks are reported with that step; a load is repeated once, and never one that was not released or
that nobody wants; nothing is written after its answer; what the repetition lacks is not called good.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from structlog.testing import capture_logs

pytest.importorskip("vllm")

from attrs import evolve

from maru_integrations.vllm.metadata import (
    CANCELLED,
    LATE,
    LOAD_FAILED,
    UNAVAILABLE,
    LoadOp,
    LoadResult,
    MaruConnectorMetadata,
)
from maru_integrations.vllm.release import Outlook
from maru_integrations.vllm.releasing import LoaderSettings
from maru_integrations.vllm.streams import HostLane
from maru_integrations.vllm.worker import MaruWorker, Threads
from tests.vllm.fake_store import FakeStore
from tests.vllm.mini_engine import CHUNK, Engine, reference
from tests.vllm.slow_transfer import BrakedTransfer, Pace, Permits, SlowTransfer
from tests.vllm.test_connector import prompt, settled, warm
from tests.vllm.test_loader_saver import World, _With, key
from tests.vllm.test_threads import OVERLAP, finish, threaded, until
from tests.waiting import NEVER, eventually

LAYERS = 4
NAMES = [f"layer.{layer}" for layer in range(LAYERS)]
ALL = 1000


class Scene:
    """A worker on host memory whose loads go by layer as far as they are let, and the steps that vLLM would make."""

    def __init__(self, release_after: int = 1, spares: bool = False) -> None:
        self.world = world = World(LAYERS)
        self.permits = Permits(0)
        world.pace.pause = self.permits
        self.worker = MaruWorker(
            lambda: world.link,
            world.answers,
            world.shape,
            layer_names=NAMES,
            threads=Threads(HostLane, LoaderSettings(release_after=release_after, spares_decodes=spares)),
        )
        assert self.worker._loader is not None
        self.loader = self.worker._loader
        self.loader._settings = self.loader._releases._settings = evolve(self.loader._settings, num_layers=LAYERS)
        self.loader._clock = self.loader._releases._clock = lambda: world.now
        self.worker.waits_by_layer = True
        self.step()  # from here on hooks are known to come

    def use(self, kind: type[SlowTransfer]) -> None:
        """Have bytes moved by such a transfer."""
        world = self.world
        world.link.transfer = kind(world.caches, world.paged, world.stored, world.pace)

    def step(self, hooks: bool = True, **metadata: Any) -> list[bool]:
        """One step; for each layer whether blocks 1 and 2 held what was stored when it was read."""
        message = MaruConnectorMetadata(**metadata)
        self.worker.preempt(message)
        self.worker.begin(message, has_hooks=lambda: hooks)
        seen = []
        for layer, name in enumerate(NAMES):
            if hooks:
                self.worker.wait_layer(name)
            seen.append(all(self.holds(layer, number) for number in (1, 2)))
        for op in message.loads:
            self.worker.load(op)
        self.worker.store(message)
        self.worker.end()
        self.world.take()
        return seen

    def holds(self, layer: int, number: int) -> bool:
        return bool((self.world.caches[layer].view(dtype=self.byte)[:, number] == number).all())

    @property
    def byte(self) -> Any:
        import torch

        return torch.uint8

    def begin(self, at: int, failures: int = 1, **fields: Any) -> LoadOp:
        """A load that fails at a layer, and the others after it."""
        self.world.pace.at = at
        self.world.pace.failures += [OSError("injected") for _ in range(failures)]
        op = self.world.load(1, 1, 2, overlap=True, **fields)
        self.step(loads=[op])
        return op

    def release(self, **fields: Any) -> LoadOp:
        """The same at layer 2, of which one has arrived: it was released, and no step knows of that."""
        op = self.begin(2, **fields)
        self.permits.let(1)
        self.received()
        return op

    def received(self) -> None:
        eventually(lambda: self.world.take() or self.world.received)
        assert self.world.received == ["r1"]
        assert not self.world.heard.loads

    def repeat(self) -> None:
        """It fails, and waits before the first layer of its repetition."""
        self.permits.let(2)
        eventually(lambda: "load begins" in self.calls)
        assert not self.world.heard.loads

    @property
    def calls(self) -> list[str]:
        return self.world.pace.calls

    @property
    def repetitions(self) -> int:
        return self.calls.count("load begins")

    def overwrite(self) -> None:
        """Somebody else has the blocks now."""
        for cache in self.world.caches:
            cache[:, (1, 2)] = 77

    def is_overwritten(self) -> bool:
        return all(bool((cache[:, (1, 2)] == 77).all()) for cache in self.world.caches)

    def hold_plan(self) -> tuple[threading.Event, threading.Event]:
        """Repetitions are planned when the second event is set; the first says that one has come to it."""
        reached, gate = threading.Event(), threading.Event()
        adopt = self.world.handler.adopt

        def held(*arguments: Any) -> Any:
            reached.set()
            assert gate.wait(NEVER)
            return adopt(*arguments)

        self.world.link.handler = _With(self.world.handler, "adopt", held)  # type: ignore[assignment]
        return reached, gate


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.permits.let(ALL)
    made.worker.close()


def let_later(scene: Scene, layers: int = ALL) -> None:
    threading.Timer(0.02, scene.permits.let, (layers,)).start()


@pytest.mark.parametrize("hooks", [True, False])
@pytest.mark.parametrize("moment", ["before the step", "in the step"])
@pytest.mark.parametrize(("release_after", "at"), [(first, at) for first in (1, 2, 3) for at in range(first, LAYERS)])
def test_whichever_layer_fails_after_the_release_the_step_reads_what_was_stored(
    release_after: int, at: int, moment: str, hooks: bool
) -> None:
    """Also where the step replays one graph, and waits for all layers first."""
    scene = Scene(release_after)
    world = scene.world
    with capture_logs() as logs:
        scene.begin(at)
        scene.permits.let(release_after)
        scene.received()
        if moment == "before the step":
            scene.permits.let(ALL)
            world.until(loads=1)
        else:
            let_later(scene)
        store = world.save(7, 5)
        assert scene.step(hooks, received=["r1"], stores=[store]) == [True] * LAYERS
    assert scene.repetitions == 1
    assert world.heard.loads == [LoadResult(1, 2)]
    assert world.received == ["r1"]
    assert not world.failed
    assert world.is_stored(5), "nothing that the step computed is in doubt"
    assert [entry["request"] for entry in logs if entry["event"] == "maru.load_repeated"] == ["r1"]
    scene.worker.close()


@pytest.mark.parametrize(("release_after", "at"), [(first, at) for first in (1, 2, 3) for at in range(first)])
def test_one_that_fails_before_its_release_is_answered_as_failed_and_not_repeated(release_after: int, at: int) -> None:
    """Its request has computed nothing."""
    scene = Scene(release_after)
    scene.begin(at)
    scene.permits.let(ALL)
    scene.world.until(loads=1)
    assert scene.world.heard.loads == [LoadResult(1, 0)]
    assert scene.world.failed == {1, 2}
    assert not scene.repetitions
    scene.worker.close()


@pytest.mark.parametrize("hooks", [True, False])
def test_a_repetition_that_fails_is_the_last_and_its_blocks_are_reported_with_the_step(
    scene: Scene, hooks: bool
) -> None:
    world = scene.world
    scene.begin(2, failures=5)
    scene.permits.let(1)
    scene.received()
    let_later(scene)
    seen = scene.step(hooks, received=["r1"], stores=[world.save(7, 5)])
    assert seen[-1] is False
    assert scene.repetitions == 1
    assert world.heard.loads == [LoadResult(1, 0)]
    assert world.failed == {1, 2}
    assert world.received == ["r1"]
    assert not world.is_stored(5)
    assert [result.reason for result in world.heard.stored] == [LOAD_FAILED]


def test_a_repetition_counts_as_far_as_it_was_proven(scene: Scene) -> None:
    """An object is no longer what was granted."""
    world = scene.world
    scene.release()
    world.store.lost.add(world.store.objects[key(2)].entry)
    let_later(scene)
    scene.step(received=["r1"])
    assert world.heard.loads == [LoadResult(1, 1)]
    assert world.failed == {2}
    assert world.holds(1)


def test_under_a_server_that_was_replaced_nothing_is_repeated(scene: Scene) -> None:
    """What lies in those pages of the pool is somebody else's."""
    world = scene.world
    scene.release()
    world.store.epoch += 1
    let_later(scene)
    scene.step(received=["r1"])
    assert not scene.repetitions
    assert world.heard.loads == [LoadResult(1, 0, UNAVAILABLE)]
    assert world.failed == {1, 2}


@pytest.mark.parametrize("transfer", [SlowTransfer, BrakedTransfer])
@pytest.mark.parametrize("how", [{"cancelled_loads": [1]}, {"preempted": ["r1"]}], ids=["cancelled", "preempted"])
def test_whose_request_goes_during_the_repetition_writes_nothing_after_that(
    scene: Scene, transfer: type[SlowTransfer], how: dict[str, Any]
) -> None:
    scene.use(transfer)
    world = scene.world
    scene.release()
    scene.repeat()
    let_later(scene)
    scene.step(**how)
    assert "load ends" in scene.calls
    scene.overwrite()
    world.until(loads=1)
    braked = transfer is BrakedTransfer
    assert world.heard.loads == [LoadResult(1, 0, CANCELLED) if braked else LoadResult(1, 2)]
    assert world.failed == ({1, 2} if braked and "preempted" in how else set()), "they may be somebody else's"
    scene.permits.let(ALL)
    scene.step(loads=[world.load(2, 3, 4)])
    world.until(loads=2)
    assert scene.is_overwritten()
    assert world.received == ["r1", "r2"]


@pytest.mark.parametrize("how", [{"cancelled_loads": [1]}, {"preempted": ["r1"]}], ids=["cancelled", "preempted"])
def test_whose_request_goes_before_the_repetition_is_answered_at_once_and_never_written_to(
    scene: Scene, how: dict[str, Any]
) -> None:
    world = scene.world
    scene.release()
    reached, gate = scene.hold_plan()
    scene.permits.let(ALL)
    assert reached.wait(NEVER)
    scene.step(**how)
    assert world.heard.loads == [LoadResult(1, 0, CANCELLED)]
    assert world.failed == ({1, 2} if "preempted" in how else set())
    scene.overwrite()
    gate.set()
    scene.step(loads=[world.load(2, 3, 4)])
    world.until(loads=2)
    assert not [call for call in scene.calls[scene.calls.index("layers end") :] if call == "load begins"][1:]
    assert scene.is_overwritten()


@pytest.mark.parametrize("how", [{"cancelled_loads": [1]}, {"preempted": ["r1"]}], ids=["cancelled", "preempted"])
def test_what_was_stopped_on_purpose_is_not_repeated(scene: Scene, how: dict[str, Any]) -> None:
    scene.world.pace.failures.clear()
    scene.release(failures=0)
    let_later(scene)
    with capture_logs() as logs:
        scene.step(**how)
        scene.world.until(loads=1)
    assert "maru.load_repeated" not in [entry["event"] for entry in logs]
    assert scene.world.heard.loads == [LoadResult(1, 0, CANCELLED)]
    assert scene.world.failed == ({1, 2} if "preempted" in how else set())
    assert not scene.repetitions


@pytest.mark.parametrize("transfer", [SlowTransfer, BrakedTransfer])
@pytest.mark.parametrize("moment", ["layers", "between", "repetition"])
def test_a_released_load_has_no_deadline_any_more(scene: Scene, transfer: type[SlowTransfer], moment: str) -> None:
    """Who gave it up late would have a wrong token for it."""
    scene.use(transfer)
    world = scene.world
    scene.release(deadline=5.0)
    reached, gate = scene.hold_plan()
    if moment == "layers":
        gate.set()
    else:
        scene.permits.let(2)
        assert reached.wait(NEVER)
    if moment == "repetition":
        gate.set()
        eventually(lambda: scene.repetitions)
    world.now += 60
    scene.loader.poll()
    world.take()
    assert not world.heard.loads
    gate.set()
    let_later(scene)
    assert scene.step(received=["r1"]) == [True] * LAYERS
    assert world.heard.loads == [LoadResult(1, 2)]
    assert not world.failed


def test_a_repetition_that_does_not_return_is_told_and_others_are_computed(scene: Scene) -> None:
    world = scene.world
    with capture_logs() as logs:
        scene.release(deadline=5.0)
        scene.repeat()
        for _ in range(3):
            world.now += 6
            scene.loader.poll()
        scene.step(loads=[world.load(2, 3, 4, deadline=5.0)])
    assert [entry["request"] for entry in logs if entry["event"] == "maru.load_stuck"] == ["r1"]
    assert world.heard.loads == [LoadResult(2, 0, LATE)]
    let_later(scene)
    assert scene.step(received=["r1"]) == [True] * LAYERS
    assert world.heard.loads[1:] == [LoadResult(1, 2)]


def test_the_load_behind_it_comes_after_the_repetition(scene: Scene) -> None:
    scene.use(BrakedTransfer)
    world = scene.world
    scene.release()
    scene.step(loads=[world.load(2, 3, 4, overlap=True)])
    let_later(scene)
    assert scene.step(received=["r1"]) == [True] * LAYERS
    world.until(loads=2)
    assert world.heard.loads == [LoadResult(1, 2), LoadResult(2, 2)]
    assert scene.calls == ["layers begin", "layers end", "load begins", "load ends", "layers begin", "layers end"]
    assert all(world.holds(number) for number in (1, 2, 3, 4))


def test_a_worker_that_is_closed_during_the_repetition_answers_it_once(scene: Scene) -> None:
    scene.release()
    scene.repeat()
    let_later(scene)
    scene.worker.close()
    scene.world.take()
    assert [result.load_id for result in scene.world.heard.loads] == [1]


@pytest.mark.parametrize("released", [True, False])
def test_of_what_is_held_only_what_was_released_by_a_step_is_repeated(released: bool) -> None:
    scene = Scene(spares=True)
    world = scene.world
    scene.begin(2)
    scene.permits.let(1)
    eventually(lambda: scene.loader._releases._held)
    if released:
        scene.loader.release(0, Outlook)
        scene.received()
    scene.permits.let(ALL)
    world.until(loads=1)
    assert world.heard.loads == [LoadResult(1, 2 if released else 0)]
    assert world.failed == (set() if released else {1, 2})
    assert scene.repetitions == released
    assert world.received == ["r1"]
    scene.worker.close()


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("spares", [False, True])
@pytest.mark.parametrize("moment", ["released", "in the step"])
@pytest.mark.parametrize("transfer", [SlowTransfer, BrakedTransfer])
def test_in_an_engine_no_token_is_wrong(
    engine_on: Callable[..., Engine], ahead: bool, spares: bool, moment: str, transfer: type[SlowTransfer]
) -> None:
    """With asynchronous scheduling, too; and nothing is computed again."""
    store, pace, tokens = FakeStore(), Pace(), prompt(150)
    warm(engine_on, store, tokens)
    with threaded(engine_on, store, OVERLAP, pace, ahead=ahead, spares=spares, transfer=transfer) as engine:
        free = engine.free_blocks()
        engine.add("first", prompt(40, 9), max_tokens=3)  # from here on hooks are known to come
        finish(engine)
        in_use, answers, turns = engine.worker._worker._loader.in_use, engine.worker._answers, iter(range(ALL))

        def pause() -> None:
            if next(turns) == 1:
                eventually(in_use.ops if moment == "in the step" else lambda: answers._released)

        pace.pause, pace.failures = pause, [OSError("injected")]
        engine.add("hit", tokens, max_tokens=5)
        until(engine, lambda: "load ends" in pace.calls)
        finish(engine)
        assert engine.answers["hit"] == reference(tokens, 5)
        assert engine.external["hit"] == len(tokens) // CHUNK * CHUNK
        loads = [call for call in pace.calls if "store" not in call]
        assert loads == ["layers begin", "layers end", "load begins", "load ends"]
        assert not engine.poisoned
        settled(engine, free)
