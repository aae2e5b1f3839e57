"""A transfer engine, a device or memory that hangs inside a call: nobody else waits, and nothing wrong is kept."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

pytest.importorskip("vllm")

from maru_core.client import MaruHandler
from maru_core.config import MaruConfig
from maru_core.namespace import Namespace
from maru_core.protocol import Presence
from maru_integrations.vllm.metadata import CANCELLED, LATE, UNAVAILABLE, LoadResult, StoreResult
from maru_integrations.vllm.releasing import LoaderSettings
from maru_integrations.vllm.saver import Saver, SaverSettings
from maru_integrations.vllm.streams import HostLane
from maru_integrations.vllm.worker import MaruWorker, Threads
from tests.vllm.fake_store import FakeStore
from tests.vllm.lives import check_answers, evict, live, make_texts
from tests.vllm.mini_engine import Engine, check_store, reference
from tests.vllm.slow_transfer import BrakedTransfer, Pace, Permits, SlowTransfer, sleeping
from tests.vllm.test_connector import keys_of, prompt, settled, warm
from tests.vllm.test_loader_saver import LAYERS, PAGED, SHAPE, STORED, World, _With, closing, key
from tests.waiting import NEVER, eventually

EngineOn = Callable[..., Engine]

#: Nothing that is stored here is this byte.
OVERWRITTEN = 250


@pytest.fixture
def world() -> World:
    return World()


class Hang:
    """Calls of it do not return until it is let go."""

    def __init__(self) -> None:
        self.on = True
        self.reached = threading.Event()
        self._open = threading.Event()

    def __call__(self, *_: Any) -> None:
        if self.on:
            self.reached.set()
            assert self._open.wait(NEVER)

    def let_go(self) -> None:
        self.on = False
        self._open.set()


@pytest.fixture
def hang() -> Iterator[Hang]:
    made = Hang()
    yield made
    made.let_go()


def pass_time(world: World, seconds: float, *threads: Any) -> None:
    world.now += seconds
    for thread in threads:
        thread.poll()


def overwrite(world: World, *numbers: int) -> None:
    """What another request computes in blocks that are its own now."""
    for cache in world.caches:
        cache.view(torch.uint8)[:, list(numbers)] = OVERWRITTEN


def hang_in(world: World, hang: Hang, stage: str) -> None:
    """Every call of that stage of a store hangs, before it does anything."""
    if stage in ("reserve", "commit"):
        call = getattr(world.handler, stage)

        def held(*arguments: Any, **named: Any) -> Any:
            hang()
            return call(*arguments, **named)

        world.link.handler = _With(world.handler, stage, held)  # type: ignore[assignment]
    elif stage == "plan":

        class Planning(BrakedTransfer):
            def prepare_store(self, block_ids: Any, copies: Any) -> Any:
                hang()
                return super().prepare_store(block_ids, copies)

        world.link.storing = Planning(world.caches, PAGED, STORED, world.pace)
    else:
        world.pace.pause = hang


@pytest.mark.parametrize("stage", ["reserve", "plan", "copy", "commit"])
def test_a_store_that_hangs_gives_its_blocks_back_and_keeps_only_itself(world: World, hang: Hang, stage: str) -> None:
    """From the commit on the bytes are those of the blocks when these were its own; before, nothing is committed."""
    hang_in(world, hang, stage)
    saver = world.saver(piece_bytes=2 * STORED.nbytes, drain_seconds=30.0)
    with closing(world, saver), capture_logs() as logs:
        world.answers.hold(["a", "b"])
        saver.submit([world.save(1, 1, 2, 3), world.save(2, 4, request="b")], 0)
        assert hang.reached.wait(NEVER)
        for seconds in (29.0, 2.0, 15.0):  # then it is told to stop, and has thirty to do so
            pass_time(world, seconds, saver)
            world.take()
            assert not world.heard.stored
            assert not world.sent
        pass_time(world, 16.0, saver)
        world.take()
        assert sorted(world.sent) == ["a", "b"]
        assert world.heard.stored == [StoreResult(1, 0, LATE), StoreResult(2, 0, LATE)]
        overwrite(world, 1, 2, 3, 4)

        start = time.monotonic()
        saver.submit([world.save(3, 5, request="c")], 0)
        saver.preempt(["a", "b", "c"])
        assert time.monotonic() - start < 20, "nobody waits for it"
        pass_time(world, 100.0, saver)
        world.take()
        assert world.heard.stored[2:] == [StoreResult(3, 0, LATE)]

        hang.let_go()
        eventually(lambda: [entry for entry in logs if entry["event"] == "maru.store_returned"])
        committed = [number for number in range(1, 6) if world.is_stored(number)]
        assert committed == ([1, 2] if stage == "commit" else [])
        assert len(world.store.objects) == len(committed), "the room of the others is given back"
        saver.submit([world.save(4, 6, 7, request="d")], 0)
        world.until(stores=4, poll=saver.poll)
        assert world.heard.stored[3:] == [StoreResult(4, 2)]
        assert world.is_stored(6)
        assert sorted(world.sent) == ["a", "b"], "each is reported once"
    (stuck,) = [entry for entry in logs if entry["event"] == "maru.store_stuck"]
    assert stuck["engine"] == type(world.link.storing).__name__
    assert stuck["stores_dropped"] == 2
    assert stuck["seconds"] >= 30
    assert [entry["event"] for entry in logs] == ["maru.store_stuck", "maru.store_returned"]


def test_a_store_that_is_late_and_stops_keeps_what_it_has(world: World) -> None:
    """It is slow, not stuck: nothing is said, the rest is not stored, and the next one goes on."""
    world.pace.pause = permits = Permits(3 * LAYERS - 1)
    world.link.storing = BrakedTransfer(world.caches, PAGED, STORED, world.pace)
    saver = world.saver(drain_seconds=NEVER)
    with closing(world, saver), capture_logs() as logs:
        saver.submit([world.save(1, *range(1, 31)), world.save(2, 31)], 0)
        eventually(lambda: permits.begun == 3 * LAYERS)
        pass_time(world, 31.0, saver)
        permits.let(32 * LAYERS)
        world.until(stores=2, poll=saver.poll)
    assert world.heard.stored == [StoreResult(1, 3, LATE), StoreResult(2, 1)]
    assert [world.is_stored(number) for number in range(1, 32)] == [n <= 3 or n == 31 for n in range(1, 32)]
    assert not logs


def test_without_a_limit_blocks_are_kept_for_as_long_as_it_takes(world: World, hang: Hang) -> None:
    world.pace.pause = hang
    saver = world.saver(timeout=0.0)
    with closing(world, saver):
        saver.submit([world.save(1, 1)], 0)
        assert hang.reached.wait(NEVER)
        for _ in range(3):
            pass_time(world, 1e6, saver)
        world.take()
        assert not world.heard.stored
        hang.let_go()
        world.until(stores=1)
    assert world.is_stored(1)


@pytest.mark.parametrize("answered", [True, False])
def test_an_engine_ends_in_bounded_time_whatever_hangs(world: World, hang: Hang, answered: bool) -> None:
    """What the call touches stays mapped and reserved; when it returns after all, it ends without a word."""
    worker = MaruWorker(
        lambda: world.link, world.answers, SHAPE, threads=Threads(HostLane, stores=SaverSettings(1 << 20))
    )
    worker._saver = saver = world.saver()
    worker.connect()
    world.pace.pause = hang
    saver.submit([world.save(1, 1), world.save(2, 2)], 0)
    assert hang.reached.wait(NEVER)
    if answered:
        for _ in range(2):
            pass_time(world, 40.0, saver)
    start = time.monotonic()
    worker.close()
    assert time.monotonic() - start < 30
    assert not world.link.stores.closed  # type: ignore[attr-defined]
    assert world.handler.closed
    thread = saver._helper._thread
    assert thread is not None
    with capture_logs() as logs:
        hang.let_go()
        thread.join(NEVER)
    assert not thread.is_alive()
    assert [entry["event"] for entry in logs] == (["maru.store_returned"] if answered else [])
    world.take()
    assert sorted(result.store_id for result in world.heard.stored) == [1, 2]
    assert not any(found.ready for found in world.store.objects.values()) or not answered


@pytest.mark.parametrize("stage", ["plan", "copy"])
def test_a_load_that_hangs_keeps_only_blocks_that_it_may_write_to(world: World, hang: Hang, stage: str) -> None:
    """While it does, every other load fails at once, not after its own deadline."""
    if stage == "copy":
        world.pace.pause = hang
    else:

        class Planning(BrakedTransfer):
            def prepare_load(self, block_ids: Any, copies: Any) -> Any:
                hang()
                return super().prepare_load(block_ids, copies)

        world.link.transfer = Planning(world.caches, PAGED, STORED, world.pace)
    loader = world.loader()
    with closing(world, loader), capture_logs() as logs:
        loader.submit([world.load(1, 1, 2, deadline=10.0)])
        assert hang.reached.wait(NEVER)
        pass_time(world, 11.0, loader)
        loader.submit([world.load(2, 3, deadline=10.0)])
        pass_time(world, 1.9, loader)
        world.take()
        first = [] if stage == "copy" else [LoadResult(1, 0, LATE)]
        assert world.heard.loads == first, "it may be about to return"
        pass_time(world, 0.2, loader)
        loader.submit([world.load(3, 4, deadline=10.0)])
        world.take()
        assert world.heard.loads == [*first, LoadResult(2, 0, LATE), LoadResult(3, 0, LATE)]
        assert world.failed == ({3, 4} if stage == "copy" else {1, 2, 3, 4})
        pass_time(world, 100.0, loader)
        hang.let_go()
        world.until(loads=3)
        deadline = time.monotonic() + NEVER
        count = 3
        while LoadResult(count, 1) not in world.heard.loads:  # it is noticed with the next step
            assert time.monotonic() < deadline
            count += 1
            loader.poll()
            loader.submit([world.load(count, 5, deadline=10.0)])
            world.until(loads=count)
    assert sorted({result.load_id for result in world.heard.loads}) == list(range(1, count + 1))
    assert len(world.heard.loads) == count, "each once"
    assert world.holds(5)
    assert [entry["event"] for entry in logs].count("maru.load_stuck") == 1


def test_a_released_load_that_does_not_stop_is_told_of_while_its_blocks_are_waited_for(
    world: World, hang: Hang
) -> None:
    """R026: its request is gone, and the step that gives the blocks away can only wait."""
    first = iter([True])
    world.pace.pause = lambda: None if next(first, False) else hang()
    loader = world.loader(release_after=1)
    with closing(world, loader), capture_logs() as logs:
        loader.submit([world.load(1, 1, overlap=True)])
        eventually(lambda: world.take() or world.received == ["r1"])
        assert hang.reached.wait(NEVER)
        waiting = threading.Thread(target=loader.cancel, args=([1],))
        waiting.start()

        def told() -> bool:
            world.now += 0.5
            return "maru.load_stuck" in [entry["event"] for entry in logs]

        eventually(told)
        assert waiting.is_alive()
        hang.let_go()
        waiting.join(NEVER)
        assert not waiting.is_alive()
        world.take()
    assert world.heard.loads == [LoadResult(1, 0, CANCELLED)]


class Clock:
    """That of the threads: it goes on with the steps of an engine that waits for something that hangs."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def steps_until(engine: Engine, what: Callable[[], bool], clock: Clock | None = None) -> None:
    """With a ``clock``, each step takes a second."""
    deadline = time.monotonic() + NEVER
    while not what():
        engine.step()
        if clock is not None:
            clock.now += 1.0
        assert time.monotonic() < deadline, engine.scheduler.get_request_counts()


def engine_that_hangs(engine_on: EngineOn, store: FakeStore, hang: Hang, **options: Any) -> tuple[Engine, Clock]:
    """Its copies hang while ``hang`` is on."""
    pace, clock = Pace(pause=hang), Clock()
    engine = engine_on(
        store,
        extra={"maru_async_load": True, "maru_async_store": True},
        threads=Threads(HostLane, LoaderSettings(), SaverSettings(1 << 30)),
        transfer=lambda caches, paged, stored: SlowTransfer(caches, paged, stored, pace),
        budget=256,
        **options,
    )
    worker: Any = engine.worker._worker
    worker._loader._clock = worker._saver._clock = clock
    return engine, clock


@pytest.mark.parametrize("ahead", [False, True])
def test_an_engine_whose_stores_hang_goes_on_serving(engine_on: EngineOn, hang: Hang, ahead: bool) -> None:
    """R028: each prompt takes most of the blocks, so nobody is served before those of the one before are free."""
    store = FakeStore()
    engine, clock = engine_that_hangs(engine_on, store, hang, num_blocks=16, ahead=ahead)
    prompts = [prompt(150, number) for number in range(4)]
    for number, tokens in enumerate(prompts):
        engine.add(f"r{number}", tokens)
        steps_until(engine, lambda number=number: len(engine.answers[f"r{number}"]) == 3, clock)  # type: ignore[misc]
        assert hang.on
    steps_until(engine, lambda: not engine.scheduler.requests, clock)
    engine.run()
    assert engine.free_blocks() == 15
    assert not any(found.ready for found in store.objects.values())
    hang.let_go()
    saver = engine.worker._worker._saver  # type: ignore[union-attr]
    steps_until(engine, lambda: saver._queue.stuck is None)
    assert not store.objects
    engine.scheduler.reset_prefix_cache()
    engine.add("after", prompts[0])
    engine.run()
    for number, tokens in enumerate(prompts):
        assert engine.answers[f"r{number}"] == reference(tokens, 3)
    assert check_store(store, prompts, lambda tokens: keys_of(engine, tokens)) == 4
    settled(engine, 15)


@pytest.mark.parametrize("aborted", [False, True])
def test_blocks_that_a_hung_load_may_write_to_are_nobody_elses(engine_on: EngineOn, hang: Hang, aborted: bool) -> None:
    """Past its deadline, aborted or not: what it writes in the end is in no request's way."""
    store, tokens = FakeStore(), prompt(100)
    warm(engine_on, store, tokens, prompt(150, 2))
    engine, clock = engine_that_hangs(engine_on, store, hang, num_blocks=32)
    engine.add("hit", tokens)
    steps_until(engine, hang.reached.is_set)
    others = {f"r{number}": prompt(150, number) for number in (2, 3, 4)}
    for name, text in others.items():
        engine.add(name, text)
    steps_until(engine, lambda: all(len(engine.answers[name]) == 3 for name in others), clock)
    if aborted:
        engine.abort("hit")
    end = clock.now + 60
    steps_until(engine, lambda: clock.now > end, clock)
    assert engine.free_blocks() == 31 - 6, "the six that are loaded"
    assert not engine.answers["hit"]
    engine.scheduler.reset_prefix_cache()
    engine.add("new", prompt(350, 9))
    steps_until(engine, lambda: len(engine.answers["new"]) == 3, clock)
    assert hang.on
    hang.let_go()
    engine.run()
    if not aborted:
        assert engine.answers["hit"] == reference(tokens, 3)
    for name, text in {**others, "new": prompt(350, 9)}.items():
        assert engine.answers[name] == reference(text, 3)
    settled(engine, 31)


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_lives_in_which_copies_hang(
    engine_on: EngineOn, monkeypatch: pytest.MonkeyPatch, seed: int, layerwise: bool, ahead: bool
) -> None:
    """For a few steps at a time, at any layer of any copy, while blocks are short: right answers, and right bytes."""
    monkeypatch.setattr("maru_integrations.vllm.stuck._GRACE", 0.01)
    rng, moods, store = random.Random(seed), random.Random(f"{seed} {layerwise}"), FakeStore()
    pace = Pace(pause=sleeping(lambda: moods.choice([0.05, 0.15]) if moods.random() < 0.15 else 0))
    texts = make_texts(rng)
    with capture_logs() as logs:
        for _ in range(2):
            engine = engine_on(
                store,
                extra={
                    "maru_async_load": True,
                    "maru_async_store": True,
                    "maru_use_layerwise": layerwise,
                    "maru_load_timeout": 0.1,
                },
                threads=Threads(HostLane, LoaderSettings(), SaverSettings(1 << 30, timeout=0.01, drain_seconds=0.01)),
                transfer=lambda caches, paged, stored: SlowTransfer(caches, paged, stored, pace),
                num_blocks=24,
                budget=64,
                max_seqs=4,
                ahead=ahead,
            )
            free = engine.free_blocks()
            # Now and then everything that is stored goes, so that there is something to store.
            prompts = live(
                engine, rng, texts, 150, lambda dice, engine=engine: evict(engine, rng) if dice < 0.5 else None
            )
            engine.run(3000)
            saver = engine.worker._worker._saver
            steps_until(engine, lambda saver=saver: saver._queue.stuck is None)
            whole = check_answers(engine, prompts)
            settled(engine, free)
            assert all(found.ready for found in store.objects.values()), "nothing stays reserved"
            check_store(store, whole, partial(keys_of, engine))
    told = Counter(entry["event"] for entry in logs)
    assert told["maru.store_stuck"]
    assert told["maru.store_stuck"] == told["maru.store_returned"]


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["reserve", "commit"])
def test_a_server_that_hangs_is_waited_for_no_longer_than_one_request_may_take(
    world: World, maru_server: Callable[..., Any], stage: str
) -> None:
    """Its deadline is the handler's. Nothing stays reserved, and stores go on when it answers again."""
    server = maru_server(pool_size="1M")
    handler = MaruHandler.connect(
        MaruConfig(server_url=server.url, request_timeout=0.5), Namespace.of({"model": "hanging"})
    )
    world.link.handler = handler
    stopped = threading.Event()

    def stop() -> None:
        if not stopped.is_set():
            os.kill(server.pid, signal.SIGSTOP)
            stopped.set()

    if stage == "reserve":
        stop()
    else:
        world.pace.pause = stop
    saver = Saver(lambda: world.link, SHAPE, world.answers, HostLane(), SaverSettings(1 << 20))
    with handler, closing(world, saver):
        start = time.monotonic()
        saver.submit([world.save(1, 1)], 0)
        world.until(stores=1, poll=saver.poll)
        assert time.monotonic() - start < 20
        assert world.heard.stored == [StoreResult(1, 0, UNAVAILABLE)]
        os.kill(server.pid, signal.SIGCONT)
        deadline = time.monotonic() + NEVER
        number = 1
        while world.heard.stored[-1] != StoreResult(number, 1):
            assert time.monotonic() < deadline, world.heard.stored
            number += 1
            saver.submit([world.save(number, number)], 0)
            world.until(stores=number, poll=saver.poll)
        # A commit that was on its way counts: the bytes are true.
        first = Presence.ABSENT if stage == "reserve" else Presence.READY
        assert handler.probe([key(1), key(number)]) == bytes([first, Presence.READY])
        while any(pool["reserved"] for pool in handler.stats()["pools"]):
            assert time.monotonic() < deadline
            time.sleep(0.05)
