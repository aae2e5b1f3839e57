"""What may happen between a request's arrival, when the pool is asked, and its turn, when the answer is used."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from attrs import evolve

pytest.importorskip("vllm")

from maru_core.client import Lease
from maru_core.errors import StaleEpoch
from maru_core.protocol import Presence
from maru_integrations.vllm import questions
from tests.vllm import mini_engine
from tests.vllm.fake_store import FakeHandler, FakePending, FakeStore
from tests.vllm.mini_engine import CHUNK, Engine, check_store, reference
from tests.vllm.test_connector import keys_of, prompt, settled, warm

EngineOn = Callable[..., Engine]


class Void:
    """A question to a server that has restarted since."""

    def poll(self, timeout: float = 0.0) -> Any:
        raise StaleEpoch("injected: it restarted")

    def cancel(self) -> None:
        """Nothing is held."""


def busy(engine_on: EngineOn, store: FakeStore, **options: Any) -> Engine:
    """One request has the engine to itself."""
    engine = engine_on(store, max_seqs=1, **options)
    engine.add("first", prompt(100, 9), max_tokens=30)
    engine.step()
    return engine


@pytest.mark.parametrize("extra", [{}, {"maru_async_load": True}], ids=["sync", "parked"])
def test_who_has_computed_nothing_before_a_reset_is_stored(engine_on: EngineOn, extra: dict[str, Any]) -> None:
    """All of its KV comes from the new weights."""
    store, tokens = FakeStore(), prompt(200)
    engine = busy(engine_on, store, extra=extra)
    engine.add("b", tokens)
    assert engine.side.reset_cache()
    engine.run()
    assert engine.answers["b"] == reference(tokens, 3)
    assert all(key in store.objects for key in keys_of(engine, tokens))
    assert not any(key in store.objects for key in keys_of(engine, prompt(100, 9))), "older than the reset"
    settled(engine, 63)


@pytest.mark.parametrize(("length", "own"), [(104, 104), (120, 100), (200, 200)])
def test_a_prefix_that_left_nothing_to_ask_for_may_be_lost(engine_on: EngineOn, length: int, own: int) -> None:
    """vLLM had all whole chunks of the prompt itself when it arrived, and has none of them when its turn comes."""
    store, tokens = FakeStore(), prompt(length)
    warm(engine_on, store, tokens)
    engine = engine_on(store)
    engine.add("a", tokens[:own], max_tokens=1)
    engine.run()
    engine.add("b", tokens)
    assert engine.scheduler.reset_prefix_cache()
    engine.run()
    assert engine.external["b"] == length // CHUNK * CHUNK
    settled(engine, 63)


def test_prompts_that_vllm_holds_itself_do_not_stand_in_line(engine_on: EngineOn) -> None:
    """Nothing is asked for them; those that come behind them are not kept from being asked for."""
    store = FakeStore()
    engine = engine_on(store)
    engine.add("a", prompt(128), max_tokens=1)
    engine.run()
    for length in (112, 120, 128):
        store.lookups = 0
        engine.add(f"again{length}", prompt(length))
        engine.add(f"other{length}", prompt(100, length))
        assert store.lookups == 1
        engine.run()
    settled(engine, 63)


def test_time_in_line_is_not_taken_from_a_long_prompt(engine_on: EngineOn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first slice was answered at once; the others are asked for in its turn, after the time for a look-up."""
    monkeypatch.setattr(questions, "MAX_CHUNKS", 2)
    store, tokens, now = FakeStore(), prompt(300), 0.0
    warm(engine_on, store, tokens)
    engine = busy(engine_on, store, extra={"maru_lookup_timeout": 0.2})
    assert engine.side._scheduler is not None
    ticks = itertools.count()
    # A step's millisecond is over after one slice.
    monkeypatch.setattr(engine.side._scheduler._matcher, "_clock", lambda: now + next(ticks) * 0.0004)
    engine.add("b", tokens)
    while "first" in engine.scheduler.requests:
        engine.step()
    now = 0.5
    store.answer_after = 1  # later than the step waits for
    lookup = engine.side._scheduler._states["b"].lookup
    assert lookup is not None
    lookup.pending._pending.polls = 1  # type: ignore[union-attr]  # that one is there
    for _ in range(100):
        engine.step()
        now += 0.01
        if not engine.scheduler.has_unfinished_requests():
            break
    engine.run()
    assert engine.external["b"] == 288
    settled(engine, 63)


def test_a_server_that_restarted_while_a_request_stood_in_line_is_asked_again(engine_on: EngineOn) -> None:
    """It has kept everything. What was asked before is void."""
    store, tokens = FakeStore(), prompt(200)
    warm(engine_on, store, tokens)
    engine = busy(engine_on, store)
    engine.add("b", tokens)
    assert engine.side._scheduler is not None
    lookup = engine.side._scheduler._states["b"].lookup
    assert lookup is not None
    lookup.pending._pending = Void()  # type: ignore[assignment]
    engine.run()
    assert engine.external["b"] == 192
    settled(engine, 63)


def test_nobody_is_asked_for_behind_a_long_line(engine_on: EngineOn, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the line has stood there."""
    store, now = FakeStore(), 0.0
    engine = busy(engine_on, store)
    scheduler = engine.side._scheduler
    assert scheduler is not None
    monkeypatch.setattr(scheduler._promises, "clock", lambda: now)
    for number in range(20):
        engine.add(f"r{number}", prompt(40, 20 + number), max_tokens=1)
    assert store.lookups == 17
    engine.step()
    now = 2.0
    engine.step()
    engine.add("late", prompt(40, 77), max_tokens=1)
    assert store.lookups == 17
    engine.run(2000)
    settled(engine, 63)


class Sharing(FakeHandler):
    """Answers at once, and leases so many objects at a time at most."""

    most = 6

    def submit_acquire(self, keys: Sequence[bytes], **options: Any) -> FakePending:
        pending = Answered(self.store, super().submit_acquire(keys, **options).keys)
        lease = FakePending.poll(pending)
        assert lease is not None
        if sum(len(taken) for taken in self.store.leases.values()) > self.most:
            self.release(lease)
            lease = evolve(lease, ids=(), statuses=bytes([Presence.BUSY]) * len(lease.keys))
        pending.lease = lease
        return pending


class Answered(FakePending):
    lease: Lease

    def poll(self, timeout: float = 0.0) -> Lease | None:
        return self.lease

    def cancel(self) -> None:
        for lease_id in self.lease.ids:
            self.store.release(lease_id)


def test_what_others_before_it_leased_is_no_miss_when_they_are_done(engine_on: EngineOn) -> None:
    """On arrival the share of the pool that one session may lease was theirs."""
    store = FakeStore()
    prompts = {f"r{number}": prompt(200, number) for number in range(1, 4)}
    warm(engine_on, store, *prompts.values())
    engine = engine_on(store, max_seqs=1, handler=Sharing)
    for name, tokens in prompts.items():
        engine.add(name, tokens)
    engine.run()
    assert engine.external == dict.fromkeys(prompts, 192)
    settled(engine, 63)


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("lost", [False, True], ids=["loaded", "failed"])
def test_who_was_parked_before_a_reset_is_not_stored(engine_on: EngineOn, steps: int, lost: bool) -> None:
    """What was loaded for it, or what it has of vLLM's own, is older, whatever has become of the load by then."""
    store, tokens = FakeStore(), prompt(200)
    warm(engine_on, store, tokens)
    engine = engine_on(store, extra={"maru_async_load": True}, budget=32)
    engine.add("a", tokens[:40], max_tokens=1)
    engine.run()
    if lost:
        store.lost.update(store.by_entry)
    engine.add("b", tokens)
    for _ in range(steps):
        engine.step()
    assert engine.external["b"]
    assert engine.side.reset_cache()
    store.lost.clear()
    engine.run()
    assert engine.answers["b"] == reference(tokens, 3)
    assert not any(key in store.objects for key in keys_of(engine, tokens))
    engine.poisoned.clear()
    settled(engine, 63)


def new_weights(patch: pytest.MonkeyPatch) -> None:
    """The model computes other KV from now on."""
    one, several = mini_engine.kv_of, mini_engine.kv_of_all
    patch.setattr(mini_engine, "kv_of", lambda value: one(value * 3 + 1))
    patch.setattr(mini_engine, "kv_of_all", lambda values: several([value * 3 + 1 for value in values]))


@pytest.mark.parametrize("rival", [False, True], ids=["alone", "with a rival"])
@pytest.mark.parametrize("extra", [{}, {"maru_async_load": True}], ids=["sync", "parked"])
@pytest.mark.parametrize(("before", "after"), [(1, 0), (4, 0), (4, 1), (4, 3), (8, 0), (8, 2), (8, 40)])
def test_what_vllm_keeps_of_the_old_weights_is_never_stored(
    engine_on: EngineOn,
    monkeypatch: pytest.MonkeyPatch,
    before: int,
    after: int,
    extra: dict[str, Any],
    rival: bool,
) -> None:
    """R011: vLLM does not empty its own cache while a request runs, and others find there what that one goes on with.

    ``before`` the reset the request has run so many steps and ``after`` it as many; the rival computes the same prompt
    with the new weights meanwhile.
    """
    store, tokens, gone = FakeStore(), prompt(200), prompt(90, 7)
    engine = engine_on(store, budget=48, extra=extra)
    engine.add("gone", gone, max_tokens=1)
    engine.run()
    engine.add("old", tokens, max_tokens=20)
    for _ in range(before):
        engine.step()
    assert engine.scheduler.reset_prefix_cache(reset_connector=True) is False
    new_weights(monkeypatch)
    if rival:
        engine.add("rival", tokens[:120], max_tokens=1)
    for _ in range(after):
        engine.step()
    engine.add("b", tokens)
    engine.add("c", gone)
    engine.step()
    engine.step()
    engine.add("d", tokens)
    engine.run()
    engine.add("e", tokens)
    engine.run()
    check_store(store, [tokens, gone], lambda text: keys_of(engine, text))
    assert "c" not in engine.poisoned
    other = engine_on(store, extra=extra)
    other.add("e", tokens)
    other.run()
    assert other.answers["e"] == reference(tokens, 3)
    engine.poisoned.clear()
    settled(engine, 63)
