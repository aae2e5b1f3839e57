"""Random lives of an engine: requests that come, end and are aborted at any moment, while other things happen to it."""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.vllm.mini_engine import Engine, reference


def make_texts(rng: random.Random) -> list[list[int]]:
    """What requests begin with: three texts, and one that shares its beginning with another."""
    texts = [[rng.randrange(997) for _ in range(200)] for _ in range(3)]
    return [*texts, texts[0][:100] + texts[1][100:]]


def live(
    engine: Engine,
    rng: random.Random,
    texts: list[list[int]],
    steps: int,
    happen: Callable[[float], None],
    *,
    prefix: str = "r",
    hooks: float = 1.0,
) -> dict[str, list[int]]:
    """So many steps; returns the prompts of requests that were not aborted, by name.

    ``happen`` is called before each step without an abort, with a random number in [0, 1) to choose by. ``hooks``: in
    what share of the steps vLLM calls a hook for each layer.
    """
    prompts: dict[str, list[int]] = {}
    running: list[str] = []
    for step in range(steps):
        if len(running) < 6 and rng.random() < 0.4:
            name = f"{prefix}{step}"
            tokens = rng.choice(texts)[: rng.randrange(1, 190)] + [rng.randrange(997) for _ in range(rng.randrange(9))]
            prompts[name] = tokens
            running.append(name)
            engine.add(name, tokens, max_tokens=rng.randrange(1, 12))
        if running and rng.random() < 0.06:
            victim = running.pop(rng.randrange(len(running)))
            prompts.pop(victim)
            if rng.random() < 0.5:
                engine.abort(victim)
            else:
                engine.between = lambda victim=victim: engine.abort(victim)
        else:
            happen(rng.random())
        engine.hooks = rng.random() < hooks
        engine.step()
        running = [name for name in running if name in engine.scheduler.requests]
    return prompts


def check_answers(engine: Engine, prompts: dict[str, list[int]]) -> list[list[int]]:
    """Every request was answered as a correct engine answers; returns prompts with their answers."""
    assert prompts
    for name, tokens in prompts.items():
        answer = engine.answers[name]
        assert answer == reference(tokens, len(answer)), name
        assert answer, name
    return [tokens + engine.answers[name] for name, tokens in prompts.items()]


def computes_on_loads(engine: Engine) -> bool:
    """Whether a load that fails after its release costs a wrong token: vLLM cannot take back what it has planned ahead.

    Such an engine repeats a copy that fails. What cannot be repeated is not done to it: what it has leased stays what
    it is, under one server, and a copy that is repeated does not fail again.
    """
    worker = engine.worker._worker
    return engine.ahead and worker is not None and worker.waits_by_layer


def lose(engine: Engine, rng: random.Random) -> None:
    """Some object's bytes are not what was leased, from now on."""
    keeps = computes_on_loads(engine)
    entries = sorted(entry for entry, found in engine.store.by_entry.items() if not (keeps and found.leases))
    if entries:
        found = engine.store.by_entry[rng.choice(entries)]
        engine.store.lost.add(found.entry)
        found.data[:] = b"\x55" * len(found.data)


def evict(engine: Engine, rng: random.Random) -> None:
    """Some object is there no more."""
    keys = sorted(engine.store.objects)
    if keys:
        engine.store.drop(rng.choice(keys))


def drop_lost(engine: Engine) -> None:
    """What :func:`lose` damaged is there no more: whoever looks at what is stored finds sound objects only."""
    store = engine.store
    for key in [key for key, found in store.objects.items() if found.entry in store.lost]:
        store.drop(key)
