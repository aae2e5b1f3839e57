"""Random lives of two engines on one store: whatever happens, answers are right and nothing is held or poisoned."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.vllm.fake_store import FakeStore
from tests.vllm.mini_engine import Engine, check_store, reference
from tests.vllm.test_connector import keys_of

STEPS = 150


class Leaps:
    """A clock that now and then goes on by more than any look-up may take."""

    def __init__(self, rng: random.Random) -> None:
        self._now = 0.0
        self._rng = rng

    def __call__(self) -> float:
        self._now += 0.6 if self._rng.random() < 0.15 else 0.001
        return self._now


def lose(engine: Engine, rng: random.Random) -> None:
    """Some object's bytes are not what was leased, from now on."""
    entries = sorted(engine.store.by_entry)
    if entries:
        found = engine.store.by_entry[rng.choice(entries)]
        engine.store.lost.add(found.entry)
        found.data[:] = b"\x55" * len(found.data)


def evict(engine: Engine, rng: random.Random) -> None:
    keys = sorted(engine.store.objects)
    if keys:
        engine.store.drop(rng.choice(keys))


def live(engine: Engine, rng: random.Random, texts: list[list[int]], names: list[str]) -> dict[str, list[int]]:
    """STEPS steps in which things happen; returns the prompts of requests that were not aborted."""
    prompts: dict[str, list[int]] = {}
    running: list[str] = []
    for step in range(STEPS):
        if len(running) < 6 and rng.random() < 0.4:
            name = f"{names[0]}{step}"
            tokens = rng.choice(texts)[: rng.randrange(1, 190)] + [rng.randrange(997) for _ in range(rng.randrange(9))]
            prompts[name] = tokens
            running.append(name)
            engine.add(name, tokens, max_tokens=rng.randrange(1, 12))
        dice = rng.random()
        if running and dice < 0.06:
            victim = running.pop(rng.randrange(len(running)))
            prompts.pop(victim)
            if rng.random() < 0.5:
                engine.abort(victim)
            else:
                engine.between = lambda victim=victim: engine.abort(victim)
        elif dice < 0.09:
            lose(engine, rng)
        elif dice < 0.13:
            evict(engine, rng)
        elif dice < 0.15:
            engine.store.fail_loads += 1
        elif dice < 0.17:
            engine.store.up = not engine.store.up
        elif dice < 0.18:
            engine.store.epoch += 1
        elif dice < 0.20:
            engine.scheduler.reset_prefix_cache()
        elif dice < 0.21:
            engine.side.reset_cache()
        elif dice < 0.30:
            engine.store.answer_after = rng.randrange(4)
        engine.step()
        running = [name for name in running if name in engine.scheduler.requests]
    engine.store.up = True
    engine.store.answer_after = 0
    engine.run(3000)
    return prompts


@pytest.mark.parametrize(("leaps", "layerwise"), [(0, False), (1, False), (0, True)])
@pytest.mark.parametrize("seed", range(8))
def test_two_engines_on_one_store(engine_on: Callable[..., Engine], seed: int, leaps: int, layerwise: bool) -> None:
    rng = random.Random(seed)
    store = FakeStore()
    texts = [[rng.randrange(997) for _ in range(200)] for _ in range(3)]
    texts += [texts[0][:100] + texts[1][100:]]
    for number in range(2):
        extra: dict[str, Any] = {"maru_async_load": rng.random() < 0.5, "maru_lookup_timeout": 0.5}
        extra["maru_use_layerwise"] = layerwise
        engine = engine_on(
            store,
            extra=extra,
            num_blocks=rng.choice([20, 32, 64]),
            budget=rng.choice([16, 40, 64, 200]),
            max_seqs=rng.choice([2, 8]),
            prefix_caching=rng.random() < 0.8,
        )
        engine.side._scheduler._matcher._clock = Leaps(random.Random(f"{seed} {number} {leaps}"))
        free = engine.free_blocks()
        prompts = live(engine, rng, texts, ["ab"[number]])
        assert prompts
        for name, tokens in prompts.items():
            answer = engine.answers[name]
            assert answer == reference(tokens, len(answer)), name
            assert answer
        assert engine.free_blocks() == free
        assert not store.leases
        assert not engine.side._guard.caught
        assert not engine.worker._guard.caught
        for key in [key for key, found in store.objects.items() if found.entry in store.lost]:
            store.drop(key)
        whole = [tokens + engine.answers[name] for name, tokens in prompts.items()]
        check_store(store, whole, partial(keys_of, engine))
