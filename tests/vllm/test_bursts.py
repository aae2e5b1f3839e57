"""Bursts of hits that together are larger than what an engine may lease: all are loaded, in vLLM's own scheduler."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from maru_core.client import MaruHandler
from maru_core.keys import KeyChain
from maru_core.namespace import Namespace
from maru_integrations.vllm.metadata import LoadOp, LoadResult, MaruWorkerMetadata
from maru_integrations.vllm.planning import SchedulerSettings
from maru_integrations.vllm.scheduler import MaruScheduler
from tests.client.real import Folder
from tests.vllm.fake_store import FakeHandler, FakeStore
from tests.vllm.mini_engine import BLOCK, CHUNK, Engine, reference
from tests.vllm.slow_transfer import Pace, SlowTransfer
from tests.vllm.steps import output, request
from tests.vllm.test_connector import prompt, settled, warm
from tests.vllm.test_real_life import nothing_held
from tests.waiting import NEVER, eventually

EngineOn = Callable[..., Engine]

PARKED = {"maru_async_load": True}
OVERLAP = PARKED | {"maru_overlap_load_with_compute": True}
PROMPTS = {f"r{number}": prompt(200, number) for number in range(1, 9)}
#: Chunks of each.
CHUNKS = 6
HIT = 192


@pytest.fixture
def burst(engine_on: EngineOn) -> Callable[..., Engine]:
    """``burst(share, **options)``: an engine that eight requests came to, of which it may lease ``share`` chunks."""

    def make(share: int, **options: Any) -> Engine:
        store = FakeStore()
        extra = options.get("extra", {})
        warm(engine_on, store, *PROMPTS.values())
        store.share = share
        engine = engine_on(store, num_blocks=256, **{**options, "extra": {"maru_lookup_timeout": 30.0, **extra}})
        for name, tokens in PROMPTS.items():
            engine.add(name, tokens)
        return engine

    return make


def answered(engine: Engine) -> None:
    for name, tokens in PROMPTS.items():
        assert engine.answers[name] == reference(tokens, 3)
    settled(engine, 255)


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "planned ahead"])
@pytest.mark.parametrize("share", [CHUNKS, 2 * CHUNKS + 1, 6 * CHUNKS], ids=["one", "two and a part", "six"])
@pytest.mark.parametrize(
    "extra",
    [{}, PARKED, OVERLAP, PARKED | {"maru_load_admission_window": 1}],
    ids=["in the step", "beside", "overlap", "window"],
)
def test_all_are_loaded(burst: Callable[..., Engine], extra: dict[str, Any], share: int, ahead: bool) -> None:
    engine = burst(share, extra=extra, ahead=ahead, budget=200)
    engine.run(2000)
    assert engine.external == dict.fromkeys(PROMPTS, HIT)
    answered(engine)


def test_all_are_loaded_by_threads_that_take_their_time(burst: Callable[..., Engine]) -> None:
    """Each load takes longer than a look-up may."""
    pace = Pace(pause=lambda: threading.Event().wait(0.02) and None)
    engine = burst(
        2 * CHUNKS,
        extra=PARKED | {"maru_lookup_timeout": 0.1},
        threads=True,
        transfer=lambda *what: SlowTransfer(*what, pace),
    )
    engine.run()
    assert engine.external == dict.fromkeys(PROMPTS, HIT)
    answered(engine)


class Blocks:
    """A request's blocks, as vLLM shows them."""

    def get_block_ids(self) -> tuple[list[int], ...]:
        return (list(range(1, 30)),)


class Side:
    """A scheduler side that may lease twelve chunks, and requests of as many as are given, all of which are stored."""

    def __init__(self, chunks: dict[str, int], **settings: Any) -> None:
        namespace, self.store, self.requests = Namespace.of({"test": 1}), FakeStore(share=12), {}
        handler = FakeHandler(self.store)
        made = SchedulerSettings(
            chunk_tokens=CHUNK, block_size=BLOCK, loads=True, stores=True, parks=True, lookup_timeout=0.5, **settings
        )
        self.now = 0.0
        self.side = MaruScheduler(handler, namespace, made, lambda: self.now)  # type: ignore[arg-type]
        for name, count in chunks.items():
            tokens = prompt(count * CHUNK + 1, ord(name))
            keys = KeyChain(namespace.root, CHUNK)
            keys.extend(tokens, count * CHUNK)
            handler.commit(handler.reserve(keys.keys, 8, keys.keys, weights_epoch=0), checksums=False)
            self.requests[name] = request(name)
            vars(self.requests[name]).update(
                all_token_ids=tokens, prompt_token_ids=tokens, num_tokens=len(tokens), num_prompt_tokens=len(tokens)
            )

    def match(self, name: str) -> tuple[int | None, bool]:
        return self.side.match(self.requests[name], 0)

    def load(self, name: str, chunks: int) -> LoadOp:
        assert self.match(name) == (chunks * CHUNK, True)
        self.side.after_alloc(self.requests[name], Blocks(), chunks * CHUNK)
        (op,) = self.side.take_loads()
        return op

    def step(self, *ended: LoadOp) -> None:
        self.now += 0.01
        self.side.plan_stores(output())
        message = MaruWorkerMetadata([LoadResult(op.load_id, len(op.keys)) for op in ended])
        self.side.worker_output(SimpleNamespace(kv_connector_worker_meta=message, invalid_block_ids=set()))

    @property
    def line(self) -> list[str]:
        return list(self.side._line.places)


def test_what_is_computed_sooner_is_not_waited_for() -> None:
    """By the speeds that were measured, with the loads that are ahead."""
    world = Side({"a": 8, "b": 8}, token_bytes=1)
    first = world.load("a", 8)
    assert world.match("b") == (None, False)
    assert world.line == ["b"]
    world.step()
    worth = world.side._worth
    assert worth is not None
    worth.link.measure(10000, 1.0)
    worth.prefill.measure(1000, 1.0)
    assert world.match("b") == (None, False)
    worth.link.rate = 1000.0
    asked = world.store.lookups
    assert world.match("b") == (0, False), "alone it would take as long, but there is one ahead"
    assert not world.line
    world.step(first)
    assert world.match("b") == (0, False)
    assert world.store.lookups <= asked + 1
    assert world.side._stats.data["counters"]["loads_skipped.long_queue"] == 1


def test_the_end_of_a_load_is_news() -> None:
    """However rarely those who wait ask by then."""
    world = Side({"a": 4, "b": 4, "c": 8}, load_timeout=10.0)
    first = world.load("a", 4)
    world.load("c", 8)
    for _ in range(120):
        assert world.match("b") == (None, False)
        world.step()
    asked = world.store.lookups
    assert world.match("b") == (None, False)
    assert world.store.lookups == asked
    world.step(first)
    world.load("b", 4)


def test_what_another_was_promised_and_has_no_blocks_for_yet_is_waited_for() -> None:
    world = Side({"a": 8, "b": 8})
    assert world.match("a") == (8 * CHUNK, True)
    assert world.match("b") == (None, False)
    world.step(world.load("a", 8))
    world.load("b", 8)


def test_who_waits_keeps_nobody_from_the_loads_that_it_waits_for() -> None:
    """A reset made its hit void when it was to be loaded next; who comes after it in that leases the rest."""
    world = Side({"a": 4, "b": 6, "c": 8}, window=1)
    first = world.load("a", 4)
    assert world.match("b") == (None, False)
    world.side._promises.reset()
    assert world.match("c") == (None, False)
    assert world.match("b") == (None, False)
    assert world.line == ["b"]
    world.step(first)
    assert world.match("b") == (None, False)
    second = world.load("c", 8)
    world.step(second)
    world.load("b", 6)


@pytest.mark.parametrize("when", [1, 2, 3, 5])
def test_who_is_gone_is_not_waited_for(burst: Callable[..., Engine], when: int) -> None:
    engine = burst(CHUNKS, extra=PARKED)
    for _ in range(when):
        engine.step()
    for name in ("r2", "r3", "r5"):
        engine.abort(name)
    engine.run(2000)
    for name in set(PROMPTS) - {"r2", "r3", "r5"}:
        assert engine.external[name] == HIT
    settled(engine, 255)


def test_after_a_reset_nobody_waits_for_what_is_no_longer_there(burst: Callable[..., Engine]) -> None:
    engine = burst(CHUNKS, extra=PARKED)
    engine.step()
    assert engine.side.reset_cache()
    engine.run(2000)
    assert engine.external["r8"] == 0
    answered(engine)


def test_the_figures_tell_of_those_who_wait(burst: Callable[..., Engine]) -> None:
    engine = burst(CHUNKS, extra=PARKED)
    side = engine.side._scheduler
    assert side is not None
    told, take = [], side.take_stats
    side.take_stats = lambda: told.append(take())  # type: ignore[method-assign]
    engine.step()
    assert told[0] is not None
    assert told[0].data["gauges"]["waiting"] == 7
    engine.run(2000)
    assert sum(report.data["counters"].get("lookups_busy", 0) for report in told if report) == 7
    assert told[-1] is None or not told[-1].data["gauges"].get("waiting")


@pytest.fixture
def folder(maru_runtime_dir: Path) -> Iterator[Folder]:
    made = Folder(maru_runtime_dir)
    yield made
    made.end()


@pytest.mark.slow
@pytest.mark.parametrize("trouble", ["none", "killed", "stopped"])
@pytest.mark.parametrize("extra", [{}, PARKED, OVERLAP], ids=["in the step", "beside", "overlap"])
def test_all_are_loaded_from_a_real_server(
    folder: Folder, engine_on: EngineOn, extra: dict[str, Any], trouble: str
) -> None:
    """Its pool has room for all eight, and three may be leased. Without it they are computed, in bounded time."""
    more: dict[str, Any] = {"pool_size": "1M", "lease_share": 0.1, "request_timeout": 0.5}
    watcher = folder.connect(**more)

    def engine() -> Engine:
        def connect(_store: FakeStore) -> MaruHandler:
            return folder.connect(**more)

        return engine_on(FakeStore(), handler=connect, extra=extra, num_blocks=256, budget=400, threads=bool(extra))

    first = engine()
    for name, tokens in PROMPTS.items():
        first.add(name, tokens, max_tokens=1)
        first.run()
    first.side.shutdown()
    first.worker.shutdown()
    eventually(lambda: nothing_held(watcher))
    second = engine()
    for name, tokens in PROMPTS.items():
        second.add(name, tokens)
    side = second.side._scheduler
    assert side is not None
    counts: list[str] = []
    side._matcher._count = counts.append
    second.step()
    if trouble == "killed":
        os.kill(folder.pid(), signal.SIGKILL)
    timer = None
    if trouble == "stopped":
        pid = folder.pid()
        os.kill(pid, signal.SIGSTOP)
        timer = threading.Timer(2.0, os.kill, (pid, signal.SIGCONT))
        timer.start()
    second.run()
    if timer is not None:
        timer.join(NEVER)
    if trouble == "none":
        assert second.external == dict.fromkeys(PROMPTS, HIT)
        assert "lookups_busy" in counts
    for name, tokens in PROMPTS.items():
        assert second.answers[name] == reference(tokens, 3)
    eventually(lambda: nothing_held(watcher))
    assert not side._line.places
