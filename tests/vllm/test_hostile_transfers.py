"""Transfer engines that misbehave, and a process that gets no more threads: loads and stores are lost, no more."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from attrs import evolve
from structlog.testing import capture_logs

pytest.importorskip("vllm")

from maru_core.errors import TransferError, Unavailable
from maru_integrations.vllm.answers import Answers
from maru_integrations.vllm.guard import Guard
from maru_integrations.vllm.metadata import (
    CANCELLED,
    ERROR,
    UNAVAILABLE,
    LoadResult,
    MaruConnectorMetadata,
    StoreResult,
)
from maru_integrations.vllm.moving import Link
from maru_integrations.vllm.overlap import LoadsInUse
from maru_integrations.vllm.releasing import LoaderSettings
from maru_integrations.vllm.streams import HostLane
from maru_integrations.vllm.worker import MaruWorker, Threads
from maru_transfer.prepared import InParts
from tests.threads import no_more_threads
from tests.vllm.fake_store import FakeStore
from tests.vllm.lives import check_answers, live, make_texts
from tests.vllm.mini_engine import Engine, check_store
from tests.vllm.slow_transfer import Pace, SlowLoad, SlowTransfer
from tests.vllm.test_connector import keys_of, settled
from tests.vllm.test_loader_saver import LAYERS, PAGED, SHAPE, STORED, World, closing
from tests.waiting import NEVER


@pytest.fixture
def world() -> World:
    return World()


class Odd(BaseException):
    """No Exception, as SystemExit is none."""


ERRORS = [TransferError("injected"), RuntimeError("injected"), Odd("injected")]


class NoFence(HostLane):
    """A device that gives no event."""

    def fence(self) -> Any:
        raise RuntimeError("injected")


def test_loads_without_a_thread_fail_and_the_next_one_tries_again(world: World) -> None:
    loader = world.loader()
    with closing(world, loader):
        with no_more_threads():
            loader.submit([world.load(1, 1), world.load(2, 2)])
            world.take()
            assert world.heard.loads == [LoadResult(1, 0, UNAVAILABLE), LoadResult(2, 0, UNAVAILABLE)]
            assert world.failed == {1, 2}
            assert loader.close() is True, "nothing to join"
        loader = world.loader()
        loader.submit([world.load(3, 3)])
        world.until(loads=3)
        assert loader.close() is True
    assert world.heard.loads[-1] == LoadResult(3, 1)


def test_stores_without_a_thread_are_skipped_and_the_next_one_tries_again(world: World) -> None:
    saver = world.saver()
    with closing(world, saver):
        with no_more_threads():
            saver.submit([world.save(1, 1)], 0)
            world.take()
            assert world.heard.stored == [StoreResult(1, 0, ERROR)]
        saver.submit([world.save(2, 2)], 0)
        world.until(stores=2)
    assert world.is_stored(2)


def test_what_cannot_be_ordered_after_the_step_is_not_copied(world: World) -> None:
    loader, saver = world.loader(lane=NoFence()), world.saver()
    saver._lane = NoFence()
    with closing(world, loader, saver):
        loader.submit([world.load(1, 1)])
        saver.submit([world.save(1, 2)], 0)
        world.take()
    assert world.heard.loads == [LoadResult(1, 0, UNAVAILABLE)]
    assert world.heard.stored == [StoreResult(1, 0, ERROR)]
    assert not world.pace.calls


def test_what_comes_after_the_end_of_the_thread_is_answered(world: World) -> None:
    loader = world.loader()
    assert loader.close() is True
    loader.submit([world.load(1, 1)])
    world.take()
    assert world.heard.loads == [LoadResult(1, 0, UNAVAILABLE)]
    assert world.failed == {1}


class Unspeakable(RuntimeError):
    """An error whose text cannot be had."""

    def __str__(self) -> str:
        raise RuntimeError("injected")


def test_an_error_without_a_text_fails_its_own_load_only(world: World) -> None:
    loader = world.loader()
    with closing(world, loader):
        world.pace.failures.append(Unspeakable())
        loader.submit([world.load(1, 1), world.load(2, 2)])
        world.until(loads=2, poll=loader.poll)
    assert world.heard.loads == [LoadResult(1, 0), LoadResult(2, 1)]
    assert Guard("worker").run("hook", lambda: "fine", Mock(side_effect=Unspeakable())) == "fine"


@pytest.mark.parametrize("error", [*ERRORS, SystemExit("injected"), Unavailable("injected")], ids=repr)
def test_a_worker_that_cannot_connect_blames_no_object(world: World, error: BaseException) -> None:
    """Whatever a plugin raises while it is opened: it is tried again, and the objects stay good for a promise."""
    link = Mock(side_effect=[error, error, world.link])
    worker = MaruWorker(link, world.answers, SHAPE, threads=Threads(HostLane, loads=LoaderSettings()))
    with pytest.raises(Unavailable, match="injected"):
        worker.connect()
    worker.load(world.load(1, 1))
    world.until(loads=1)
    worker.load(evolve(world.load(2, 2), parked=False))
    world.take()
    assert world.heard.loads == [LoadResult(1, 0, UNAVAILABLE), LoadResult(2, 1)]
    worker.close()


def test_a_load_that_fails_late_while_another_such_failure_is_counted_down_counts(world: World) -> None:
    """The loader's thread tells of it at any moment; steps that may have read it store nothing."""
    worker = MaruWorker(lambda: world.link, world.answers, SHAPE)

    class Counted(int):
        def __sub__(self, other: int) -> int:
            worker._failed_late()
            return int(self) - other

    worker._distrusted_steps = Counted(1)
    step = MaruConnectorMetadata(stores=[evolve(world.save(0, 1), asynchronous=False)])
    for _ in range(2):
        worker.store(step)
        assert not world.store.objects
    worker.close()


class Layers:
    """A load by layer that says it is fine, and raises when it is waited for or stopped."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.waited: list[int] = []
        self.cancelled = False

    def layers_done(self) -> int:
        return 1

    def wait_layer(self, layer: int) -> None:
        self.waited.append(layer)
        if self.error is not None:
            raise self.error

    def finish(self) -> None:
        """All is there."""

    def cancel(self) -> None:
        self.cancelled = True
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_whatever_one_load_raises_the_others_are_waited_for_and_stopped(world: World, error: BaseException) -> None:
    in_use, bad, good = LoadsInUse(), Layers(error), Layers()
    op = world.load(1, 1)
    in_use.begin(op, bad)
    in_use.begin(world.load(2, 2), good)
    in_use.use(["r1", "r2"])
    assert not in_use.wait_layer(0, 0.01), "it has not ended"
    assert good.waited == [0]
    in_use.end(1)
    assert in_use.wait_layer(1, 0.01)
    assert good.waited == [0, 1]
    in_use.begin(op, bad)
    in_use.stop()
    assert good.cancelled


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_load_whose_layers_cannot_be_waited_for_is_waited_for_as_a_whole(world: World, error: BaseException) -> None:
    """Whatever it raises, it may end well: what the step reads then is there."""
    worker = MaruWorker(
        lambda: world.link,
        world.answers,
        SHAPE,
        layer_names=[str(layer) for layer in range(LAYERS)],
        threads=Threads(HostLane, LoaderSettings(release_after=1, num_layers=LAYERS)),
    )
    assert worker._loader is not None
    in_use, ended = worker._loader.in_use, threading.Event()
    in_use.begin(world.load(1, 1, 2, overlap=True), Layers(error))
    threading.Timer(0.05, lambda: [ended.set(), in_use.end(1)]).start()
    worker.begin(MaruConnectorMetadata(received=["r1"]), has_hooks=lambda: False)
    assert ended.is_set()
    worker.store(MaruConnectorMetadata(stores=[evolve(world.save(0, 5), asynchronous=False)]))
    world.take()
    assert not world.failed
    assert world.is_stored(5)
    worker.close()


class Lying(SlowTransfer):
    """Moves nothing and says that it moved ``answer`` objects."""

    answer: Any

    def prepare_load(self, block_ids: Sequence[int], copies: Sequence[Any]) -> Lying:
        return self

    def run(self, brake: Any, least: int) -> Any:
        return self.answer

    def prepare_store(self, block_ids: Sequence[int], copies: Sequence[Any]) -> Lying:
        return self

    def close(self) -> None:
        """Called for what it prepared, too."""


#: What cannot be the number of two copies; some of it can be compared with one.
NO_NUMBERS = [2.0, 1.5, float("nan"), None, "all", [2], np.array([2]), (2,)]


@pytest.mark.parametrize("answer", [0, -1, 3, 10**9, *NO_NUMBERS], ids=repr)
def test_a_load_that_is_not_done_and_was_not_asked_to_stop_has_failed(world: World, answer: Any) -> None:
    """Without a deadline it would be asked for the rest for ever."""
    transfer = Lying(world.caches, PAGED, STORED, world.pace)
    transfer.answer = answer
    world.link.transfer = transfer
    loader = world.loader()
    with closing(world, loader):
        loader.submit([world.load(1, 1, 2)])
        world.until(loads=1)
    assert world.heard.loads == [LoadResult(1, 0)]
    assert world.failed == {1, 2}


@pytest.mark.parametrize("answer", [0, -1, 3, *NO_NUMBERS], ids=repr)
def test_a_store_whose_answer_is_not_understood_keeps_nothing(world: World, answer: Any) -> None:
    transfer = Lying(world.caches, PAGED, STORED, world.pace)
    transfer.answer = answer
    world.link.storing = transfer
    saver = world.saver()
    with closing(world, saver), capture_logs() as logs:
        saver.submit([world.save(1, 1, 2)], 0)
        world.until(stores=1)
    assert world.heard.stored == [StoreResult(1, 0, ERROR)]
    assert not world.store.objects
    assert "Lying" in logs[0]["error"], "who answered"


def test_what_is_told_of_a_load_is_a_plain_number(world: World) -> None:
    """Other kinds of integers count, too, but what vLLM sends to another process must be something that it can send."""
    transfer = Lying(world.caches, PAGED, STORED, world.pace)
    transfer.answer = np.uint8(2)
    world.link.transfer = transfer
    loader = world.loader()
    with closing(world, loader):
        loader.submit([world.load(1, 1, 2)])
        world.until(loads=1)
    assert world.heard.loads == [LoadResult(1, 2)]
    assert type(world.heard.loads[0].good) is int


class Consuming(SlowTransfer):
    """Takes what it is given to pieces, as far as it can, once it has copied."""

    def load(self, block_ids: Any, copies: Any) -> None:
        super().load(block_ids, copies)
        self._consume(block_ids, copies)

    def store(self, block_ids: Any, copies: Any) -> None:
        super().store(block_ids, copies)
        self._consume(block_ids, copies)

    def _consume(self, block_ids: Any, copies: Any) -> None:
        if isinstance(block_ids, list):
            block_ids.reverse()
        if isinstance(copies, list):
            copies.clear()


def test_an_engine_may_do_what_it_likes_with_its_arguments(world: World) -> None:
    """It moves every part once, and blocks that failed are those that failed."""
    transfer = Consuming(world.caches, PAGED, STORED, world.pace)
    world.link.transfer = world.link.storing = transfer
    loader, saver = world.loader(piece_bytes=STORED.nbytes), world.saver(part_bytes=STORED.nbytes)
    worker = MaruWorker(lambda: world.link, world.answers, SHAPE)
    ops = [evolve(op, blocks=list(op.blocks)) for op in (world.load(1, 1, 2, 3, 4), world.load(2, 5, 6))]
    for op in ops:
        world.store.lost.add(op.entries[-1])
    with closing(world, loader, saver):
        loader.submit(ops[:1])
        world.until(loads=1, poll=loader.poll)
        worker.load(evolve(ops[1], parked=False))
        world.until(loads=2)
        saver.submit([evolve(world.save(3, 11, 12, 13), blocks=[11, 12, 13])], 0)
        world.until(stores=1, poll=saver.poll)
    assert {(result.load_id, result.good) for result in world.heard.loads} == {(1, 3), (2, 1)}
    assert world.failed == {4, 6}
    assert all(world.holds(number) for number in (1, 2, 3, 5))
    assert world.heard.stored == [StoreResult(3, 3)]
    assert all(world.is_stored(number) for number in (11, 12, 13))
    assert world.pace.calls.count("load begins") == 5
    assert world.pace.calls.count("store begins") == 3


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_plan_that_cannot_be_closed_fails_nobody_elses_load(world: World, error: BaseException) -> None:
    """That of a load that was cancelled while the one before it was copied."""

    class Unwanted:
        run = Mock()
        close = Mock(side_effect=error)

    class Planning(SlowTransfer):
        """Plans only the second load, which begins with block 2."""

        def prepare_load(self, block_ids: Sequence[int], copies: Sequence[Any]) -> Any:
            if block_ids[0] == 2:
                planned.set()
                return Unwanted()
            return InParts(self.load, block_ids, copies)

    planned, go_on = threading.Event(), threading.Event()
    world.pace.pause = lambda: [None, go_on.wait(NEVER)][0]
    world.link.transfer = Planning(world.caches, PAGED, STORED, world.pace)
    loader = world.loader()
    with closing(world, loader), capture_logs() as logs:
        loader.submit([world.load(number, number) for number in (1, 2, 3)])
        assert planned.wait(NEVER)
        loader.cancel([2])
        go_on.set()
        world.until(loads=3, poll=loader.poll)
    assert {result.load_id: (result.good, result.reason) for result in world.heard.loads} == {
        1: (1, ""),
        2: (0, CANCELLED),
        3: (1, ""),
    }
    assert world.holds(3)
    assert not Unwanted.run.called
    assert [(entry["event"], entry["request"]) for entry in logs] == [("maru.load_not_closed", "r2")]


def test_objects_are_checked_without_a_thread_for_it_when_there_is_none(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def only_ours(thread: threading.Thread) -> None:
        if not thread.name.startswith("maru-load"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", only_ours)
    loader = world.loader()
    with closing(world, loader):
        bad = world.load(2, 3, 4)
        world.store.lost.add(bad.entries[1])
        loader.submit([world.load(1, 1, 2), bad])
        world.until(loads=2)
    assert world.heard.loads == [LoadResult(1, 2), LoadResult(2, 1)]
    assert world.holds(2)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("what", ["load", "store"])
def test_within_a_step_nothing_that_a_transfer_raises_reaches_vllm(
    world: World, error: BaseException, what: str
) -> None:
    worker = MaruWorker(lambda: world.link, Answers(), SHAPE)
    world.pace.failures.append(error)
    if what == "load":
        worker.load(world.load(1, 1))
        worker._answers.take_finished()
        assert worker._answers.take_failed_blocks() == {1}
    else:
        worker.store(MaruConnectorMetadata(stores=[evolve(world.save(0, 1), asynchronous=False)]))
        assert not world.store.objects, "the reservation is given back"
    worker.close()


@pytest.mark.parametrize("what", ["load", "store"])
def test_a_signal_that_ends_the_worker_is_not_taken_for_a_failed_copy(world: World, what: str) -> None:
    """vLLM raises SystemExit once, in whatever runs when SIGTERM comes: a step that went on would never end."""

    def end(number: int, frame: Any) -> None:
        raise SystemExit

    worker = MaruWorker(lambda: world.link, Answers(), SHAPE)
    load, store = evolve(world.load(1, 1), parked=False), evolve(world.save(0, 2), asynchronous=False)
    step = (
        partial(worker.load, load) if what == "load" else partial(worker.store, MaruConnectorMetadata(stores=[store]))
    )
    world.pace.pause = lambda: signal.raise_signal(signal.SIGTERM)
    before = signal.signal(signal.SIGTERM, end)
    try:
        with pytest.raises(SystemExit):
            step()
    finally:
        signal.signal(signal.SIGTERM, before)
    worker.close()


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_transfer_that_cannot_be_closed_keeps_nobody_else_open(world: World, error: BaseException) -> None:
    class Stubborn:
        def close(self) -> None:
            raise error

    other = world.transfer()
    with capture_logs() as logs:
        Link(world.handler, other, STORED, Stubborn()).close()  # type: ignore[arg-type]
    assert other.closed
    assert world.handler.closed
    assert [entry["transfer"] for entry in logs] == ["Stubborn"]


class Moody(SlowTransfer):
    """Every method raises now and then, before or after it has done its work."""

    rng: random.Random
    share: float

    def maybe(self) -> None:
        if self.rng.random() < self.share:
            raise self.rng.choice([TransferError, RuntimeError, SystemExit, MemoryError, KeyError, Odd])("injected")

    def load(self, block_ids: Sequence[int], copies: Sequence[Any]) -> None:
        self.maybe()
        super().load(block_ids, copies)
        self.maybe()

    def store(self, block_ids: Sequence[int], copies: Sequence[Any]) -> None:
        self.maybe()
        super().store(block_ids, copies)
        self.maybe()

    def begin_load(self, block_ids: Sequence[int], copies: Sequence[Any]) -> Any:
        self.maybe()
        return MoodyLoad(self, super().begin_load(block_ids, copies))

    def close(self) -> None:
        super().close()
        self.maybe()


class MoodyPlanning(Moody):
    """And loads by layer are planned."""

    def prepare_layers(self, block_ids: Sequence[int], copies: Sequence[Any]) -> MoodyLayers:
        self.maybe()
        return MoodyLayers(self, block_ids, copies)


class MoodyLayers:
    """The same for the plan of one."""

    def __init__(self, transfer: Moody, block_ids: Sequence[int], copies: Sequence[Any]) -> None:
        self._transfer = transfer
        self._what: tuple[Any, ...] | None = (block_ids, copies)

    def begin(self) -> Any:
        what, self._what = self._what, None
        assert what is not None, "begun or closed before"
        return self._transfer.begin_load(*what)

    def close(self) -> None:
        self._what = None
        self._transfer.maybe()


class MoodyLoad:
    """The same for a load by layer; :meth:`finish` always ends it."""

    def __init__(self, transfer: Moody, load: SlowLoad) -> None:
        self._transfer = transfer
        self._load = load

    def layers_done(self) -> int:
        self._transfer.maybe()
        return self._load.layers_done()

    def wait_layer(self, layer: int) -> None:
        self._transfer.maybe()
        self._load.wait_layer(layer)
        self._transfer.maybe()

    def finish(self) -> None:
        self._load.finish()
        self._transfer.maybe()

    def cancel(self) -> None:
        self._load.cancel()
        self._transfer.maybe()


BESIDE = {"maru_async_load": True, "maru_async_store": True}
OVERLAP = {**BESIDE, "maru_overlap_load_with_compute": True}


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.05, 0.4])
@pytest.mark.parametrize(
    "extra",
    [{}, BESIDE, OVERLAP, {**OVERLAP, "maru_use_layerwise": True}],
    ids=["step", "beside", "overlap", "layerwise"],
)
def test_lives_with_an_engine_that_raises_everywhere(
    engine_on: Callable[..., Engine], extra: dict[str, Any], share: float
) -> None:
    """Answers are right, what is stored is right, nothing is held, and nothing reaches a hook of vLLM."""
    rng, moods, store = random.Random(str(share)), random.Random(share), FakeStore()
    pace = Pace(lambda: time.sleep(0.001 if moods.random() < 0.5 else 0))
    texts = make_texts(rng)

    def moody(*what: Any) -> Moody:
        made = rng.choice([Moody, MoodyPlanning])(*what, pace)
        made.rng, made.share = moods, share
        return made

    for _ in range(2):
        engine = engine_on(store, extra=extra, threads=bool(extra), transfer=moody, max_seqs=4)
        free = engine.free_blocks()
        prompts = live(engine, rng, texts, 80, lambda _: None, hooks=0.9)
        engine.run(3000)
        whole = check_answers(engine, prompts)
        engine.poisoned.clear()  # computed on a load that failed in the same step, and computed again
        settled(engine, free)
        check_store(store, whole, partial(keys_of, engine))
        worker = engine.worker
        engine.worker.shutdown()
        assert not worker._guard.caught
