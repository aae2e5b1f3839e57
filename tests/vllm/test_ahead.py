"""The pool is asked when requests arrive: in one breath, for few at a time, and for nobody who will wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

pytest.importorskip("vllm")

from maru_core.client import Lease
from maru_integrations.vllm.ahead import Ahead
from tests.vllm.fake_store import FakeHandler, FakePending, FakeStore
from tests.vllm.mini_engine import BLOCK, Engine, reference
from tests.vllm.test_connector import prompt, settled, warm

EngineOn = Callable[..., Engine]
#: Seconds until a server has answered: of three in turn, the third would be waited for beyond a step's millisecond.
LATENCY = 0.0004


class Distant:
    """A server at a distance: time passes only while its answers are waited for."""

    def __init__(self) -> None:
        self.now = 0.0

    def handler(self, store: FakeStore) -> FakeHandler:
        return DistantHandler(store, self)


class DistantHandler(FakeHandler):
    def __init__(self, store: FakeStore, server: Distant) -> None:
        super().__init__(store)
        self.server = server

    def submit_acquire(self, keys: Sequence[bytes], **options: Any) -> FakePending:
        return DistantPending(super().submit_acquire(keys, **options), self.server)


class DistantPending(FakePending):
    """Answered LATENCY after it was asked."""

    def __init__(self, pending: FakePending, server: Distant) -> None:
        super().__init__(pending.store, pending.keys)
        self.server, self.ready = server, server.now + LATENCY

    def poll(self, timeout: float = 0.0) -> Lease | None:
        server = self.server
        server.now = max(server.now, min(self.ready, server.now + timeout))
        return super().poll(timeout) if server.now >= self.ready else None


@pytest.mark.parametrize("stored", [False, True], ids=["misses", "hits"])
def test_arrivals_of_one_step_wait_for_their_answers_together(
    engine_on: EngineOn, monkeypatch: pytest.MonkeyPatch, stored: bool
) -> None:
    """None of them loses its place in the step because those before it were waited for."""
    store, server = FakeStore(), Distant()
    prompts = {f"r{seed}": prompt(100, seed) for seed in range(1, 5)}
    if stored:
        warm(engine_on, store, *prompts.values(), budget=512)
    engine = engine_on(store, budget=512, handler=server.handler)
    assert engine.side._scheduler is not None
    monkeypatch.setattr(engine.side._scheduler._matcher, "_clock", lambda: server.now)
    for name, tokens in prompts.items():
        engine.add(name, tokens)
    output = engine.step()
    assert sorted(output.num_scheduled_tokens) == sorted(prompts)
    assert server.now == LATENCY
    engine.run()
    for name, tokens in prompts.items():
        assert engine.answers[name] == reference(tokens, 3)
        assert engine.external[name] == (96 if stored else 0)
    settled(engine, 63)


def test_vllms_own_prefix_is_not_asked_for(engine_on: EngineOn) -> None:
    """Only what lies behind it, so that nothing is leased that nobody will load."""
    store, tokens = FakeStore(), prompt(64)
    warm(engine_on, store, prompt(200))
    engine = engine_on(store)
    engine.add("a", tokens, max_tokens=1)
    engine.run()
    store.lookups = 0
    request = engine.add("b", prompt(200))
    assert store.lookups == 1
    scheduler = engine.side._scheduler
    assert scheduler is not None
    assert scheduler._states[request.request_id].lookup.first_chunk == 2  # type: ignore[union-attr]
    engine.run()
    assert store.lookups == 1
    assert engine.external["b"] == 192 - 64
    settled(engine, 63)


def test_a_prefix_that_vllm_lost_meanwhile_is_asked_for(engine_on: EngineOn) -> None:
    """The question was for what lay behind it."""
    store, tokens = FakeStore(), prompt(200)
    warm(engine_on, store, tokens)
    engine = engine_on(store)
    engine.add("a", prompt(64), max_tokens=1)
    engine.run()
    engine.add("b", tokens)
    assert engine.scheduler.reset_prefix_cache()
    engine.run()
    assert engine.external["b"] == 192
    assert engine.answers["b"] == reference(tokens, 3)
    settled(engine, 63)


def test_who_is_gone_before_its_turn_leaves_nothing(engine_on: EngineOn) -> None:
    store, tokens = FakeStore(), prompt(200)
    warm(engine_on, store, tokens)
    engine = engine_on(store)
    engine.add("b", tokens)
    assert store.lookups == 2
    engine.abort("b")
    engine.step()
    settled(engine, 63)


def test_what_was_asked_long_before_the_turn_is_asked_again(engine_on: EngineOn, monkeypatch: Any) -> None:
    """The first has the engine to itself; meanwhile the second's prompt is stored by another engine."""
    store, tokens = FakeStore(), prompt(200)
    engine = engine_on(store, max_seqs=1)
    scheduler = engine.side._scheduler
    assert scheduler is not None
    now = 0.0
    monkeypatch.setattr(scheduler._promises, "clock", lambda: now)
    engine.add("a", prompt(100, 1), max_tokens=30)
    engine.step()
    engine.add("b", tokens)
    asked = store.lookups
    assert asked == 2
    engine.step()
    now = 1.0
    engine.step()
    assert not scheduler._states["b"].lookup
    warm(engine_on, store, tokens)
    engine.run()
    assert engine.external["b"] == 192
    settled(engine, 63)


def test_nobody_is_asked_for_behind_one_who_was_not(engine_on: EngineOn) -> None:
    """There is room for the first and the third, but the second comes before the third."""
    store = FakeStore()
    engine = engine_on(store, num_blocks=64, extra={"maru_async_load": True})
    for number, blocks in enumerate((40, 30, 10)):
        engine.add(f"r{number}", prompt(blocks * BLOCK, number))
    assert store.lookups == 1
    engine.run(2000)
    settled(engine, 63)


def test_requests_without_a_question_are_not_in_the_line(engine_on: EngineOn) -> None:
    """A prompt shorter than a chunk asks nothing; those behind it do."""
    store = FakeStore()
    engine = engine_on(store)
    engine.add("short", prompt(20))
    engine.add("long", prompt(100))
    assert store.lookups == 1
    engine.run()
    settled(engine, 63)


class Line(RuleBasedStateMachine):
    """Any arrivals, turns and ends."""

    def __init__(self) -> None:
        super().__init__()
        self.ahead = Ahead(8, most=3, seconds=1.0)
        self.now = 0.0
        self.number = 0
        #: Those in the line in order: when they came, and blocks if they were asked for.
        self.model: dict[str, tuple[float, int]] = {}

    @rule(blocks=st.integers(1, 5), wants=st.booleans())
    def arrive(self, blocks: int, wants: bool) -> None:
        asked = wants and self.ahead.may_ask
        if asked:
            assert all(held for _, held in self.model.values()), "asked for behind one who was not"
            assert len(self.model) < 3
            assert self.ahead.blocks < 8
        elif wants:
            held = [held for _, held in self.model.values()]
            assert len(held) >= 3 or not all(held) or sum(held) >= 8
        self.number += 1
        self.ahead.add(str(self.number), blocks if asked else 0, self.now)
        self.model[str(self.number)] = (self.now, blocks if asked else 0)

    @rule(index=st.integers(0, 10))
    def leave(self, index: int) -> None:
        name = str(self.number - index)
        self.ahead.leave(name)
        self.ahead.leave(name)
        self.model.pop(name, None)

    @rule(seconds=st.sampled_from([0.25, 0.5, 1.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        old = [name for name, (since, held) in self.model.items() if held and self.now - since >= 1.0]
        assert self.ahead.take_old(self.now) == old
        for name in old:
            self.model[name] = (self.model[name][0], 0)

    @invariant()
    def counts(self) -> None:
        assert self.ahead.blocks == sum(blocks for _, blocks in self.model.values())


TestLine = Line.TestCase
TestLine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
