"""The connector with its threads inside vLLM's real scheduler: late, failing and interrupted loads and stores."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

pytest.importorskip("vllm")

from maru_core.errors import TransferError
from maru_integrations.vllm.releasing import LoaderSettings
from maru_integrations.vllm.saver import SaverSettings
from maru_integrations.vllm.streams import HostLane
from maru_integrations.vllm.worker import Threads
from tests.vllm.fake_store import FakeStore
from tests.vllm.lives import check_answers, drop_lost, evict, live, lose, make_texts
from tests.vllm.mini_engine import CHUNK, LAYERS, Engine, check_store, reference
from tests.vllm.slow_transfer import BrakedTransfer, Pace, SlowTransfer, sleeping
from tests.vllm.steps import change_settings
from tests.vllm.test_connector import keys_of, prompt, settled, warm
from tests.waiting import NEVER

pytestmark = pytest.mark.slow

EngineOn = Callable[..., Engine]

LOAD = {"maru_async_load": True}
STORE = {"maru_async_store": True}
OVERLAP = {"maru_async_load": True, "maru_overlap_load_with_compute": True}
LAYERWISE = {"maru_use_layerwise": True}

KNOBS = [LOAD, STORE, LOAD | STORE, OVERLAP, OVERLAP | STORE]
KNOBS += [knobs | LAYERWISE for knobs in KNOBS]
NAMES = ["-".join(name.removeprefix("maru_").split("_")[0 if "async" not in name else 1] for name in k) for k in KNOBS]


@contextmanager
def threaded(engine_on: EngineOn, store: FakeStore, knobs: dict[str, Any], pace: Pace, **options: Any) -> Iterator[Any]:
    """An engine with the threads that ``knobs`` ask for; its threads have ended afterwards."""
    early = 1 if "maru_overlap_load_with_compute" in knobs else 0
    spares = options.pop("spares", True)
    loads = LoaderSettings(piece_bytes=4096, release_after=early, spares_decodes=spares, num_layers=LAYERS)
    # Objects have 2 KiB.
    stores = SaverSettings(options.pop("limit", 1 << 30), piece_bytes=8192, part_bytes=4096, drain_seconds=5)
    threads = Threads(
        options.pop("lane", HostLane),
        loads if "maru_async_load" in knobs else None,
        stores if "maru_async_store" in knobs else None,
        options.get("ahead", False),
    )
    load_timeout, transfer = options.pop("load_timeout", 20), options.pop("transfer", SlowTransfer)
    engine = engine_on(
        store,
        extra=knobs,
        threads=threads,
        transfer=lambda caches, paged, stored: transfer(caches, paged, stored, pace),
        **options,
    )
    side = engine.side._scheduler
    change_settings(side, load_timeout=load_timeout)
    try:
        yield engine
    finally:
        pace.pause = lambda: None
        engine.worker.shutdown()
        assert not [thread for thread in threading.enumerate() if thread.name in ("maru-load", "maru-store")]


def finish(engine: Engine, seconds: float = NEVER) -> None:
    """Step until nothing is under way on either side."""
    deadline = time.monotonic() + seconds
    side = engine.side._scheduler
    assert side is not None
    while engine.scheduler.has_unfinished_requests() or engine.held or side._stores.outstanding or len(side._loads):
        output = engine.step()
        if not output.num_scheduled_tokens:
            time.sleep(0.0005)
        assert time.monotonic() < deadline, f"stands still: {engine.scheduler.get_request_counts()} {engine.held}"
    engine.step()


def until(engine: Engine, what: Callable[[], bool], seconds: float = NEVER) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        engine.step()
        time.sleep(0.0005)
        assert time.monotonic() < deadline


@pytest.mark.parametrize("knobs", KNOBS, ids=NAMES)
def test_hits_and_stores_are_the_same_with_threads(engine_on: EngineOn, knobs: dict[str, Any]) -> None:
    """Several requests at once, slow copies: answers, hits and stored bytes are those of an engine without threads."""
    store, pace = FakeStore(), Pace(pause=sleeping(lambda: 0.001))
    prompts = [prompt(150 + 20 * number, number) for number in range(4)]
    warm(engine_on, store, *prompts[:3], extra={key: value for key, value in knobs.items() if key in LAYERWISE})
    before = len(store.objects)
    with threaded(engine_on, store, knobs, pace) as engine:
        free = engine.free_blocks()
        engine.add("first", prompts[3], max_tokens=4)  # from which on layer hooks are known to come
        finish(engine)
        for number, tokens in enumerate(prompts[:3]):
            engine.add(f"r{number}", tokens, max_tokens=4)
        finish(engine)
        for number, tokens in enumerate(prompts[:3]):
            assert engine.answers[f"r{number}"] == reference(tokens, 4)
            assert engine.external[f"r{number}"] == len(tokens) // CHUNK * CHUNK
        settled(engine, free)
        assert check_store(store, prompts, lambda tokens: keys_of(engine, tokens)) == sum(
            len(tokens) // CHUNK for tokens in prompts
        )
    assert len(store.objects) > before
    if "maru_async_load" in knobs:
        early = "maru_overlap_load_with_compute" in knobs
        assert ("layers begin" in pace.calls) is early
        assert ("load begins" in pace.calls) is not early


class Steps:
    """Random waits that are mostly short."""

    def __init__(self, seed: object) -> None:
        self._rng = random.Random(f"{seed}")

    def __call__(self) -> float:
        return self._rng.choice([0, 0, 0, 0.0005, 0.002, 0.01])


ERRORS: list[Callable[[], BaseException]] = [
    lambda: TransferError("injected"),
    lambda: OSError("injected"),
    lambda: ValueError("injected"),
]


def live_in_trouble(
    engine: Engine, pace: Pace, rng: random.Random, texts: list[list[int]], steps: int
) -> dict[str, list[int]]:
    """Preemptions, evictions, damage, failing copies, a server that comes and goes; see :func:`live`."""

    def happen(dice: float) -> None:
        if dice < 0.02:
            lose(engine, rng)
        elif dice < 0.05:
            evict(engine, rng)
        elif dice < 0.09:
            pace.failures.append(rng.choice(ERRORS)())
        elif dice < 0.10:
            engine.store.up = not engine.store.up
        elif dice < 0.11:
            engine.store.epoch += 1
        elif dice < 0.12:
            engine.scheduler.reset_prefix_cache()
        elif dice < 0.13:
            engine.side.reset_cache()
        elif dice < 0.43:
            time.sleep(rng.choice([0, 0.001, 0.004]))

    prompts = live(engine, rng, texts, steps, happen)
    engine.store.up = True
    pace.failures.clear()
    finish(engine)
    return prompts


@pytest.mark.parametrize("knobs", KNOBS, ids=NAMES)
@pytest.mark.parametrize("seed", range(3))
def test_random_lives_with_threads(engine_on: EngineOn, knobs: dict[str, Any], seed: int) -> None:
    """Whatever happens: every answer is right, no assertion of vLLM fires, nothing is left, no wrong byte is stored."""
    rng = random.Random(f"{seed} {knobs}")
    store, pace = FakeStore(), Pace(pause=sleeping(Steps(seed)))
    texts = make_texts(rng)
    options = {
        "transfer": [BrakedTransfer, SlowTransfer][seed % 2],
        "num_blocks": rng.choice([20, 32, 64]),
        "budget": rng.choice([16, 40, 64, 200]),
        "max_seqs": rng.choice([2, 8]),
        "load_timeout": rng.choice([0.004, 20]),
        "limit": rng.choice([4096, 1 << 30]),
        "spares": seed != 1,
    }
    with threaded(engine_on, store, knobs, pace, **options) as engine:
        free = engine.free_blocks()
        whole = check_answers(engine, live_in_trouble(engine, pace, rng, texts, 150))
        assert engine.free_blocks() == free
        assert not engine.held
        assert not store.leases
        assert not engine.side._guard.caught
        assert not engine.worker._guard.caught
        drop_lost(engine)
        check_store(store, whole, partial(keys_of, engine))
