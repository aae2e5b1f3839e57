"""Random lives of two engines on one store: whatever happens, answers are right and nothing is held or poisoned."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.vllm.fake_store import FakeStore
from tests.vllm.lives import check_answers, drop_lost, evict, live, lose, make_texts
from tests.vllm.mini_engine import Engine, check_store
from tests.vllm.test_connector import keys_of, settled

pytestmark = pytest.mark.slow

STEPS = 100
#: Settings that are on or off.
KNOBS = {
    "maru_async_load": True,
    "maru_async_store": True,
    "maru_overlap_load_with_compute": True,
    "maru_load_admission_window": 2,
    "maru_load_or_compute": "auto",
}


class Leaps:
    """A clock that now and then goes on by more than any look-up may take."""

    def __init__(self, rng: random.Random) -> None:
        self._now = 0.0
        self._rng = rng

    def __call__(self) -> float:
        self._now += 0.6 if self._rng.random() < 0.15 else 0.001
        return self._now


def dawdle(rng: random.Random) -> Callable[[], None]:
    """Now and then the memory is slow, and once in a while slower than any load may be."""

    def wait() -> None:
        dice = rng.random()
        if dice < 0.3:
            time.sleep(0.12 if dice < 0.01 else 0.002)

    return wait


def live_in_trouble(
    engine: Engine, rng: random.Random, texts: list[list[int]], prefix: str, steps: int
) -> dict[str, list[int]]:
    """A life in which objects, look-ups and the server come to harm; see :func:`live`."""

    def happen(dice: float) -> None:
        if dice < 0.03:
            lose(engine, rng)
        elif dice < 0.07:
            evict(engine, rng)
        elif dice < 0.09:
            engine.store.fail_loads += 1
        elif dice < 0.11:
            engine.store.up = not engine.store.up
        elif dice < 0.12:
            engine.store.epoch += 1
        elif dice < 0.13:
            engine.scheduler.reset_prefix_cache()
        elif dice < 0.14 and len(engine.scheduler.running) == len(engine.scheduler.requests) and not engine.ahead:
            engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        elif dice < 0.15:
            engine.side.reset_cache()
        elif dice < 0.24:
            engine.store.answer_after = rng.randrange(4)
        elif dice < 0.26:
            engine.store.answer_after = 10**9

    prompts = live(engine, rng, texts, steps, happen, prefix=prefix, hooks=0.7)
    engine.store.up = True
    engine.store.answer_after = 0
    engine.run(3000)
    return prompts


def check_two_lives(
    engine_on: Callable[..., Engine],
    seed: int,
    leaps: int,
    knobs: list[dict[str, Any]],
    threads: bool,
    steps: int,
    ahead: bool = False,
) -> None:
    """One engine after the other on a store, each with its settings."""
    rng = random.Random(seed)
    store = FakeStore(share=random.Random(f"{seed} {leaps} share").choice([None, 2, 5, 8]))
    if threads:
        store.before_read = dawdle(random.Random(f"{seed} read"))
        store.before_write = dawdle(random.Random(f"{seed} write"))
    texts = make_texts(rng)
    for number, extra in enumerate(knobs):
        engine = engine_on(
            store,
            extra={**extra, "maru_lookup_timeout": 0.5, "maru_load_timeout": 0.1 if threads else 0},
            num_blocks=rng.choice([20, 32, 64]),
            budget=rng.choice([16, 40, 64, 200]),
            max_seqs=rng.choice([2, 8]),
            prefix_caching=rng.random() < 0.8,
            threads=threads,
            ahead=ahead,
        )
        scheduler = engine.side._scheduler
        assert scheduler is not None
        scheduler._matcher._clock = scheduler._breaker.clock = Leaps(random.Random(f"{seed} {number} {leaps}"))
        free = engine.free_blocks()
        whole = check_answers(engine, live_in_trouble(engine, rng, texts, "ab"[number], steps))
        if not (extra.get("maru_async_load") or ahead) or extra.get("maru_overlap_load_with_compute"):
            engine.poisoned.clear()  # computed on a load that failed in the same step, and computed again
        settled(engine, free)
        drop_lost(engine)
        check_store(store, whole, partial(keys_of, engine))


@pytest.mark.parametrize(("leaps", "layerwise"), [(0, False), (1, False), (0, True)])
@pytest.mark.parametrize("seed", range(8))
def test_two_engines_on_one_store(engine_on: Callable[..., Engine], seed: int, leaps: int, layerwise: bool) -> None:
    """Any settings, within the steps or beside them."""
    rng = random.Random(f"{seed} {leaps} {layerwise}")
    knobs = [
        {"maru_use_layerwise": layerwise, **{name: value for name, value in KNOBS.items() if rng.random() < 0.6}}
        for _ in range(2)
    ]
    check_two_lives(engine_on, seed, leaps, knobs, bool(seed % 2), STEPS)


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_two_engines_that_plan_ahead(engine_on: Callable[..., Engine], seed: int, threads: bool) -> None:
    """Asynchronous scheduling: every hit is parked, and what a step brings is seen one step later."""
    rng = random.Random(f"ahead {seed}")
    knobs = [{name: value for name, value in KNOBS.items() if rng.random() < 0.6} for _ in range(2)]
    check_two_lives(engine_on, seed, 0, knobs, threads, STEPS, ahead=True)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("on", list(itertools.product([False, True], repeat=len(KNOBS))))
def test_every_combination_of_settings(
    engine_on: Callable[..., Engine], on: tuple[bool, ...], threads: bool, layerwise: bool
) -> None:
    """Each knob alone and with all others, 128 times two lives of 160 steps: 40,960 steps."""
    chosen = {name: value for (name, value), chosen in zip(KNOBS.items(), on, strict=True) if chosen}
    extra = {"maru_use_layerwise": layerwise, **chosen}
    check_two_lives(
        engine_on, sum(bit << place for place, bit in enumerate((*on, threads))), 0, [extra, extra], threads, 160
    )
