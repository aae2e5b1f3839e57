"""The thread that stores: how many calls a store takes, how it is cut, and that nothing wrong is ever committed."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from functools import wraps
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch

from maru_core.brake import Brake, Pull
from maru_integrations.vllm.metadata import ERROR, PREEMPTED, StoreResult
from maru_integrations.vllm.saver import Saver, SaverSettings
from maru_integrations.vllm.streams import HostLane
from tests.vllm.fake_store import FakeHandler
from tests.vllm.slow_transfer import BrakedTransfer, Permits, SlowTransfer
from tests.vllm.test_loader_saver import BLOCKS, LAYERS, PAGED, SHAPE, STORED, World, _With, closing, key
from tests.waiting import NEVER, eventually

#: Nothing of what a preempted request lost is this byte.
OVERWRITTEN = 250


@pytest.fixture
def world() -> World:
    world = World()
    world.link.storing = BrakedTransfer(world.caches, PAGED, STORED, world.pace)
    return world


def overwrite(world: World, *numbers: int) -> None:
    """What another request computes in blocks that are its own now."""
    for cache in world.caches:
        for number in numbers:
            cache.view(torch.uint8)[:, number] = OVERWRITTEN


def is_sound(world: World) -> bool:
    """Everything that can be found holds what was stored under its key, and nothing is reserved."""
    objects = world.store.objects.values()
    return all(found.ready and bytes(found.data) == found.key[:1] * STORED.nbytes for found in objects)


class Counting(FakeHandler):
    """Notes what is asked of the server, and how many objects that was about."""

    def __init__(self, world: World) -> None:
        super().__init__(world.store)
        self.asked: list[tuple[str, int]] = []

    def reserve(self, keys: Any, *rest: Any, **named: Any) -> Any:
        self.asked.append(("reserve", len(keys)))
        return super().reserve(keys, *rest, **named)

    def commit(self, grants: Any, indices: Any = None, **named: Any) -> Any:
        self.asked.append(("commit", len(indices)))
        return super().commit(grants, indices, **named)


def test_a_store_is_one_reservation_one_copy_and_one_commit(world: World) -> None:
    handler = Counting(world)
    world.link.handler = handler  # type: ignore[assignment]
    saver = world.saver()
    with closing(world, saver):
        saver.submit([world.save(1, *range(1, 31))], 0)
        world.until(stores=1)
    assert world.heard.stored == [StoreResult(1, 30)]
    assert handler.asked == [("reserve", 30), ("commit", 30)]
    assert world.pace.calls == ["store begins", "store ends"]
    assert all(world.is_stored(number) for number in range(1, 31))


def test_of_a_large_store_the_beginning_is_found_while_the_rest_is_copied(world: World) -> None:
    gate = threading.Event()
    world.pace.pause = lambda: [None, len(world.pace.calls) < 3 or gate.wait(NEVER)][0]
    saver = world.saver(piece_bytes=10 * STORED.nbytes)
    with closing(world, saver):
        saver.submit([world.save(1, *range(1, 31))], 0)
        eventually(lambda: len(world.pace.calls) == 3)
        assert [world.is_stored(number) for number in (1, 10, 11)] == [True, True, False]
        gate.set()
        world.until(stores=1)
    assert world.heard.stored == [StoreResult(1, 30)]
    assert world.pace.calls == ["store begins", "store ends"] * 3


@pytest.mark.parametrize("pieces", [1, 3])
def test_blocks_are_free_when_they_were_read_not_when_all_is_committed(world: World, pieces: int) -> None:
    gate, commits = threading.Event(), []
    commit = world.handler.commit

    def late(*args: Any, **named: Any) -> Any:
        commits.append(1)
        assert len(commits) < pieces or gate.wait(NEVER)
        return commit(*args, **named)

    world.link.handler = _With(world.handler, "commit", late)  # type: ignore[assignment]
    world.pace.pause = lambda: time.sleep(0.005)
    saver = world.saver(piece_bytes=6 * STORED.nbytes // pieces)
    with closing(world, saver):
        world.answers.hold(["a"])
        saver.submit([world.save(1, *range(1, 7))], 0)
        eventually(lambda: world.answers.take_finished()[0])
        assert len(world.pace.calls) == 2 * pieces, "after the last piece was read"
        overwrite(world, *range(1, 7))
        assert not world.is_stored(6)
        gate.set()
        world.until(stores=1)
    assert world.heard.stored == [StoreResult(1, 6)]
    assert all(world.is_stored(number) for number in range(1, 7))


def test_only_what_nobody_has_is_copied(world: World) -> None:
    for number in (2, 3, 5):
        world.put(number)
    saver = world.saver()
    with closing(world, saver):
        saver.submit([world.save(1, *range(1, 7))], 0)
        world.until(stores=1)
    assert world.heard.stored == [StoreResult(1, 6)]
    assert all(world.is_stored(number) for number in range(1, 7))


def test_a_preempted_store_stops_within_a_slice_and_keeps_what_it_has(world: World) -> None:
    """It is at the last layer of the third object; nothing is read of the blocks after preempt has returned."""
    world.pace.pause = permits = Permits(3 * LAYERS - 1)
    saver = world.saver(drain_seconds=NEVER)
    with closing(world, saver):
        saver.submit([world.save(1, *range(1, 21))], 0)
        eventually(lambda: permits.begun == 3 * LAYERS)
        preempting = threading.Thread(target=lambda: [saver.preempt(["a"]), overwrite(world, *range(1, 21))])
        preempting.start()
        eventually(lambda: saver._brake.pull is Pull.STOP)
        assert preempting.is_alive(), "it is read"
        permits.let(20 * LAYERS)
        preempting.join(NEVER)
        world.until(stores=1)
    assert permits.begun == 3 * LAYERS
    assert world.heard.stored == [StoreResult(1, 3, PREEMPTED)]
    assert [world.is_stored(number) for number in range(1, 21)] == [number <= 3 for number in range(1, 21)]
    assert len(world.store.objects) == 3, "what was not copied is not reserved"


def test_an_engine_that_cannot_be_told_to_stop_is_called_part_by_part(world: World) -> None:
    world.link.storing = world.transfer()
    begun = threading.Event()
    world.pace.pause = lambda: [begun.set(), time.sleep(0.02)][0]
    saver = world.saver(part_bytes=3 * STORED.nbytes)
    with closing(world, saver):
        saver.submit([world.save(1, *range(1, 31))], 0)
        assert begun.wait(NEVER)
        saver.preempt(["a"])
        overwrite(world, *range(1, 31))
        world.until(stores=1)
        kept = world.heard.stored[0].kept
        assert kept in (3, 6), "whole parts"
        saver.submit([world.save(2, *range(31, 38), request="b")], 0)
        world.until(stores=2)
    assert world.heard.stored == [StoreResult(1, kept, PREEMPTED), StoreResult(2, 7)]
    assert world.pace.calls.count("store begins") == kept // 3 + 3
    assert is_sound(world)


def test_a_copy_that_goes_on_although_it_was_told_to_stop_is_thrown_away(world: World) -> None:
    """Also what it says that it had copied before: nobody knows when it did."""
    gate, begun = threading.Event(), threading.Event()
    whole = world.link.storing

    class Deaf(SlowTransfer):
        def prepare_store(self, block_ids: Any, copies: Any) -> Any:
            def run(brake: Brake, least: int) -> int:
                begun.set()
                assert gate.wait(NEVER)
                self.store(block_ids, copies)
                return len(copies)

            return SimpleNamespace(run=run, close=lambda: None)

    world.link.storing = Deaf(world.caches, PAGED, STORED, world.pace)
    saver = world.saver(drain_seconds=0.05)
    with closing(world, saver):
        saver.submit([world.save(1, 1, 2)], 0)
        assert begun.wait(NEVER)
        saver.preempt(["a"])
        overwrite(world, 1, 2)
        gate.set()
        world.until(stores=1)
        world.link.storing = whole
    assert world.heard.stored == [StoreResult(1, 0, PREEMPTED)]
    assert not world.store.objects


@pytest.mark.parametrize("answer", [0, 1, -1, 3, 10**9, None, "all"])
def test_a_store_that_is_not_done_and_was_not_told_to_stop_has_failed(world: World, answer: Any) -> None:
    closed: list[bool] = []

    class Lying(SlowTransfer):
        def prepare_store(self, block_ids: Any, copies: Any) -> Any:
            return SimpleNamespace(run=lambda brake, least: answer, close=lambda: closed.append(True))

    world.link.storing = Lying(world.caches, PAGED, STORED, world.pace)
    saver = world.saver()
    with closing(world, saver):
        saver.submit([world.save(1, 1, 2)], 0)
        world.until(stores=1)
    assert world.heard.stored == [StoreResult(1, 0, ERROR)]
    assert not world.store.objects, "nothing stays reserved"
    assert closed == [True]


def test_a_store_that_cannot_be_planned_fails_alone(world: World) -> None:
    class Refusing(BrakedTransfer):
        def prepare_store(self, block_ids: Any, copies: Any) -> Any:
            if len(copies) == 2:
                raise OSError("injected")
            return super().prepare_store(block_ids, copies)

    world.link.storing = Refusing(world.caches, PAGED, STORED, world.pace)
    saver = world.saver()
    with closing(world, saver):
        saver.submit([world.save(1, 1, 2), world.save(2, 3)], 0)
        world.until(stores=2)
    assert world.heard.stored == [StoreResult(1, 0, ERROR), StoreResult(2, 1)]
    assert is_sound(world)


def test_closing_stops_what_is_copied(world: World) -> None:
    world.pace.pause = lambda: time.sleep(0.05)
    saver = world.saver()
    saver.submit([world.save(1, *range(1, 31)), world.save(2, 31)], 0)
    eventually(lambda: world.pace.calls)
    assert saver.close(NEVER)
    world.until(stores=2)
    assert {result.store_id: result.reason for result in world.heard.stored} == {1: PREEMPTED, 2: PREEMPTED}
    assert len(world.store.objects) < 30, "the rest is not waited for"
    assert is_sound(world)


def dawdling(rng: random.Random) -> Callable[[], None]:
    return lambda: time.sleep(rng.choice([0, 0, 0, 0, 0.0002, 0.001]))


def held_up(method: Any, wait: Callable[[], None]) -> Any:
    """A method of the handler that takes a while, before and after."""

    @wraps(method)
    def slow(*args: Any, **named: Any) -> Any:
        wait()
        answer = method(*args, **named)
        wait()
        return answer

    return slow


@pytest.mark.slow
@pytest.mark.parametrize("braked", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_stores_and_preemptions_at_random(world: World, seed: int, braked: bool) -> None:
    """Blocks are overwritten as soon as their request was preempted; every store is answered once, every byte true."""
    rng, moods = random.Random(f"{seed} {braked}"), random.Random(seed)
    if not braked:
        world.link.storing = world.transfer()
    handler = world.handler
    slow = SimpleNamespace(**{name: getattr(handler, name) for name in ("rooms", "abort", "is_up")})
    slow.reserve, slow.commit = (held_up(call, dawdling(moods)) for call in (handler.reserve, handler.commit))
    world.link.handler = slow  # type: ignore[assignment]
    world.pace.pause = dawdling(moods)
    settings = SaverSettings(
        rng.choice([20, 1000]) * STORED.nbytes,
        piece_bytes=rng.choice([3, 1000]) * STORED.nbytes,
        part_bytes=2 * STORED.nbytes,
    )
    saver = Saver(lambda: world.link, SHAPE, world.answers, HostLane(), settings)
    free = list(range(1, BLOCKS))
    own: dict[str, list[int]] = {}
    count = 0
    with closing(world, saver):
        for step in range(120):
            rng.shuffle(free)
            if len(free) > 10:
                name = f"r{step}"
                many = rng.randrange(1, 10)
                own[name], free = sorted(free[:many]), free[many:]
                for number in own[name]:
                    world.store.objects.pop(key(number), None)  # evicted, so that it is stored again
                count += 1
                saver.submit([world.save(count, *own[name], request=name)], 0)
            if rng.random() < 0.1:
                world.pace.failures.append(OSError("injected"))
            time.sleep(rng.choice([0, 0.0005, 0.002]))
            if own and rng.random() < 0.6:
                lost = {rng.choice(list(own)) for _ in range(rng.randrange(1, 3))}
                saver.preempt(lost)
                for name in lost:
                    overwrite(world, *own[name])
                    free += own.pop(name)
            world.take()
        world.until(stores=count)
    assert sorted(result.store_id for result in world.heard.stored) == list(range(1, count + 1))
    assert is_sound(world)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert "maru-store" not in {thread.name for thread in threading.enumerate()}
