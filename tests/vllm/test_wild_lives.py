"""Random lives at their worst: any settings, crowds that share prefixes, and harm where it hurts most.

What the other random lives leave to chance is aimed at here: who is aborted has just been released, or shares a failed
load, or waits with all of its blocks and no room to run.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from attrs import define, field

pytest.importorskip("vllm")

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from maru_integrations.vllm import compat
from maru_integrations.vllm.releasing import LoaderSettings
from maru_integrations.vllm.saver import SaverSettings
from maru_integrations.vllm.streams import HostLane
from maru_integrations.vllm.worker import Threads
from tests.vllm.fake_store import FakeStore
from tests.vllm.lives import check_answers, computes_on_loads, drop_lost, evict, lose, make_texts
from tests.vllm.mini_engine import LAYERS, Engine, check_store
from tests.vllm.slow_transfer import BrakedTransfer, Pace, QueueingLane, SlowTransfer, sleeping
from tests.vllm.steps import change_settings
from tests.vllm.test_connector import keys_of, settled, warm
from tests.vllm.test_threads import ERRORS, Steps, finish

pytestmark = pytest.mark.slow

EngineOn = Callable[..., Engine]
STEPS = 150


def choose_knobs(rng: random.Random) -> dict[str, Any]:
    """Settings of one engine."""
    knobs: dict[str, Any] = {"maru_lookup_timeout": rng.choice([0.02, 0.5])}
    if rng.random() < 0.8:
        knobs["maru_async_load"] = True
        if rng.random() < 0.6:
            knobs["maru_overlap_load_with_compute"] = True
            knobs["maru_overlap_release_after_layers"] = rng.choice([1, 1, 1, LAYERS])
        if rng.random() < 0.3:
            knobs["maru_load_admission_window"] = rng.choice([1, 2])
    for name, value, share in (
        ("maru_async_store", True, 0.6),
        ("maru_use_layerwise", True, 0.4),
        ("maru_load_or_compute", "auto", 0.2),
    ):
        if rng.random() < share:
            knobs[name] = value
    return knobs


@contextmanager
def wild_engine(
    engine_on: EngineOn, store: FakeStore, knobs: dict[str, Any], pace: Pace, rng: random.Random
) -> Iterator[Engine]:
    """An engine of random size whose copies are late and fail as ``pace`` says."""
    loads = LoaderSettings(
        piece_bytes=rng.choice([4096, 1 << 20]),
        release_after=knobs.get("maru_overlap_release_after_layers", 0),
        spares_decodes=random.Random(str(knobs)).random() < 0.7,
        num_layers=LAYERS,
    )
    stores = SaverSettings(
        rng.choice([4096, 1 << 30]), piece_bytes=8192, part_bytes=4096, drain_seconds=rng.choice([0.01, 5])
    )
    later, beside = knobs.get("maru_async_load"), knobs.get("maru_async_store")
    transfer = rng.choice([SlowTransfer, BrakedTransfer])
    queues = random.Random(f"lane {knobs}").random() < 0.4
    ahead = rng.random() < 0.4
    threads = Threads(QueueingLane if queues else HostLane, loads if later else None, stores if beside else None, ahead)
    engine = engine_on(
        store,
        extra=knobs,
        threads=threads,
        transfer=lambda caches, paged, stored: transfer(caches, paged, stored, pace),
        num_blocks=rng.choice([16, 20, 32, 64]),
        budget=rng.choice([16, 40, 64, 200]),
        share=rng.choice([0, 0, 16, 24]),
        max_seqs=rng.choice([1, 2, 4, 8]),
        # Not by priority: vLLM may take blocks from a request that it has scheduled in the same step, and leaves those
        # in its prefix cache that the step was to fill.
        prefix_caching=rng.random() < 0.85,
        ahead=ahead,
    )
    pace.whole = not computes_on_loads(engine)
    # What was queued behind a copy that failed costs a token where steps run ahead.
    pace.layered = not (queues and ahead)
    side = engine.side._scheduler
    assert side is not None
    change_settings(side, load_timeout=rng.choice([0.004, 0.05, 20]))
    try:
        yield engine
    finally:
        pace.pause = lambda: None
        engine.worker.shutdown()


@define(eq=False)
class WildLife:
    """One engine's requests, and what happens to them."""

    engine: Engine
    pace: Pace
    rng: random.Random
    texts: list[list[int]]
    most: int = field(init=False)
    prompts: dict[str, list[int]] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self.most = self.rng.choice([3, 6, 10])

    def run(self, steps: int) -> dict[str, list[int]]:
        """So many steps, and then until all is over; the prompts of requests that were not aborted."""
        engine, rng = self.engine, self.rng
        for step in range(steps):
            if len(engine.scheduler.requests) < self.most and rng.random() < 0.35:
                self._arrive(step)
            victim = self._victim()
            if victim is not None:
                self._abort(victim)
            self._happen(rng.random())
            engine.hooks = rng.random() < 0.8
            engine.step()
        engine.store.up, engine.store.answer_after = True, 0
        self.pace.failures.clear()
        engine.scheduler.set_pause_state(PauseState.UNPAUSED)
        finish(engine, 60)
        return self.prompts

    @property
    def side(self) -> Any:
        """Of the scheduler."""
        return self.engine.side._scheduler

    def _arrive(self, step: int) -> None:
        """One request, or several that begin alike."""
        rng = self.rng
        text = rng.choice(self.texts)
        room = self.engine.caches[0].shape[1] * 16 - 40
        length = min(rng.randrange(1, 190), room)
        for number in range(rng.choice([1, 1, 2, 3])):
            tokens = text[: max(1, length - rng.choice([0, 0, 16, 40]))]
            tokens = [*tokens, *(rng.randrange(997) for _ in range(rng.randrange(9)))]
            name = f"r{step}-{number}"
            self.prompts[name] = tokens
            self.engine.add(name, tokens, max_tokens=rng.randrange(1, 20))

    def _victim(self) -> str | None:
        """Whom to abort in this step: seldom anybody, and more often somebody in an uncommon state."""
        requests = {
            name: request for name, request in self.engine.scheduler.requests.items() if not request.is_finished()
        }
        if not requests or self.rng.random() > 0.3:
            return None
        side = self.side
        chosen = [
            name
            for name, request in requests.items()
            if name in self.engine.scheduler.finished_recving_kv_req_ids
            or (request.status != RequestStatus.RUNNING and request.num_computed_tokens)
            or (name in side._states and (side._states[name].failed or side._states[name].tainted))
        ]
        if chosen and self.rng.random() < 0.3:
            return self.rng.choice(chosen)
        return self.rng.choice(list(requests)) if self.rng.random() < 0.1 else None

    def _abort(self, name: str) -> None:
        self.prompts.pop(name, None)
        if self.rng.random() < 0.5:
            self.engine.abort(name)
        else:
            self.engine.between = lambda: self.engine.abort(name)

    def _happen(self, dice: float) -> None:
        engine, store, rng = self.engine, self.engine.store, self.rng
        scheduler = engine.scheduler
        if dice < 0.01:
            lose(engine, rng)
        elif dice < 0.02:
            evict(engine, rng)
        elif dice < 0.06:
            self.pace.failures += [rng.choice(ERRORS)() for _ in range(rng.choice([1, 1, 3]))]
        elif dice < 0.065:
            store.up = False
        elif dice < 0.12:
            store.up = True
        elif dice < 0.125:
            if not (computes_on_loads(engine) and self.side._loads):
                store.epoch += 1
        elif dice < 0.128:
            engine.side.reset_cache()
        elif dice < 0.13:
            empty(store)
        elif dice < 0.15:
            store.answer_after = rng.choice([1, 3, 10**9])
        elif dice < 0.2:
            store.answer_after = 0
        elif dice < 0.21:
            scheduler.set_pause_state(rng.choice([PauseState.PAUSED_NEW, PauseState.PAUSED_ALL]))
        elif dice < 0.28:
            scheduler.set_pause_state(PauseState.UNPAUSED)
        elif dice < 0.29:
            scheduler.reset_prefix_cache()
        elif dice < 0.31 and len(scheduler.running) == len(scheduler.requests) and not engine.ahead:
            scheduler.reset_prefix_cache(reset_running_requests=True)
        elif dice < 0.46:
            # As others that need the room would do, for whom these lives are too short.
            compat.evict_blocks(scheduler.kv_cache_manager.block_pool, range(1, 1000))
        elif dice < 0.6:
            time.sleep(rng.choice([0, 0.001, 0.004]))


def empty(store: FakeStore) -> None:
    """Somebody else empties the pool."""
    with store.lock:
        for key in list(store.objects):
            store.drop(key)


def check_wild_life(engine_on: EngineOn, seed: object, steps: int = STEPS) -> int:
    """One life; how many steps it had at least."""
    rng = random.Random(f"wild {seed}")
    store, pace = FakeStore(capacity=rng.choice([None, None, None, 20])), Pace(pause=sleeping(Steps(seed)))
    pace.at = random.Random(f"at {seed}").choice([0, 1, 1, 1])
    texts = make_texts(rng)
    knobs = choose_knobs(rng)
    warm(engine_on, store, *texts, extra={"maru_use_layerwise": "maru_use_layerwise" in knobs})
    store.share = random.Random(f"share {seed}").choice([None, 2, 5, 8])
    with wild_engine(engine_on, store, knobs, pace, rng) as engine:
        free = engine.free_blocks()
        life = WildLife(engine, pace, rng, texts)
        whole = check_answers(engine, life.run(steps))
        engine.poisoned.clear()  # computed on a load that failed in the same step, and computed again
        settled(engine, free)
        drop_lost(engine)
        check_store(store, whole, partial(keys_of, engine))
    return steps


@pytest.mark.parametrize("seed", range(12))
def test_wild_lives(engine_on: EngineOn, seed: int) -> None:
    """Whatever happens: every answer is right, no assertion of vLLM fires, nothing is left, no wrong byte is stored."""
    check_wild_life(engine_on, seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 240))
def test_many_wild_lives(engine_on: EngineOn, seed: int) -> None:
    """140 times 150 steps: 21,000."""
    check_wild_life(engine_on, seed)
