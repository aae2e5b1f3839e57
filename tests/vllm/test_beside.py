"""Loads and stores beside the steps, inside vLLM's real scheduler: order, budget, protection, and a slow server."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm")

from maru_integrations.vllm.matching import POLL
from maru_integrations.vllm.metadata import LOAD_FAILED, PREEMPTED, QUEUE_FULL, StoreOp
from maru_integrations.vllm.saver import SaverSettings
from maru_integrations.vllm.streams import HostLane
from maru_integrations.vllm.worker import Threads
from tests.vllm.fake_store import FakeHandler, FakeStore
from tests.vllm.mini_engine import BLOCK, CHUNK, GARBAGE, Engine, check_store, reference
from tests.vllm.test_connector import PARKED, keys_of, prompt, settled, warm
from tests.waiting import NEVER

EngineOn = Callable[..., Engine]
LATER = {"maru_async_store": True}


class Gate:
    """Holds whoever reads or writes objects until it is opened."""

    def __init__(self, store: FakeStore, *, loads: bool = False, stores: bool = False) -> None:
        self._open = threading.Event()
        if loads:
            store.before_read = self._wait
        if stores:
            store.before_write = self._wait

    def _wait(self) -> None:
        assert self._open.wait(NEVER)

    def open(self) -> None:
        self._open.set()


def without_gate(engine: Engine) -> None:
    """As vLLM 0.22.1 is: nothing is kept back for requests that are parked already."""
    engine.scheduler._inflight_prefill_reserved_blocks = lambda: 0  # type: ignore[method-assign]
    engine.scheduler.scheduler_reserve_full_isl = False


@pytest.mark.slow
@pytest.mark.parametrize("gate", ["ours", "both"])
def test_sixty_four_blocks_never_stand_still(engine_on: EngineOn, gate: str) -> None:
    """Prompts of 50, 25 and 15 blocks that all hit: the first alone, the others when it has its blocks, in order."""
    store = FakeStore()
    prompts = [prompt(50 * BLOCK, 1), prompt(25 * BLOCK, 2), prompt(15 * BLOCK, 3)]
    warm(engine_on, store, *prompts)
    engine = engine_on(store, num_blocks=64, budget=128, extra=PARKED, threads=True)
    if gate == "ours":
        without_gate(engine)
    doors = Gate(store, loads=True)
    store.lookups = 0
    for index, tokens in enumerate(prompts):
        engine.add(f"r{index}", tokens, max_tokens=20)
    for _ in range(30):
        engine.step()
    scheduler = engine.side._scheduler
    assert scheduler is not None
    assert store.lookups == 1, "who waits for blocks asks nothing"
    assert scheduler._parking.blocks == 50
    assert scheduler._parking.waiting == 2
    assert engine.external == {"r0": 49 * BLOCK}
    doors.open()
    engine.run(2000)
    assert list(engine.external) == ["r0", "r1", "r2"]
    assert all(engine.external.values())
    for index, tokens in enumerate(prompts):
        assert engine.answers[f"r{index}"] == reference(tokens, 20)
    settled(engine, 63)


@pytest.mark.parametrize("gate", ["ours", "both"])
def test_who_keeps_blocks_after_a_failed_load_keeps_its_share(engine_on: EngineOn, gate: str) -> None:
    """Thirty of fifty blocks are held by a request whose load failed in the middle, and it can run with all fifty only.

    vLLM asks a more important one of forty blocks first, before who failed can go on: were the share gone, that one
    would be parked on thirty-two, and neither would ever get the rest.
    """
    store = FakeStore()
    first, second = prompt(50 * BLOCK, 1), prompt(40 * BLOCK, 2)
    warm(engine_on, store, first[: 30 * BLOCK], second[: 32 * BLOCK])
    engine = engine_on(store, num_blocks=64, budget=1024, extra=PARKED, threads=True, policy="priority")
    if gate == "ours":
        without_gate(engine)
        # Nor does it ask requests that have blocks before those that have none.
        engine.scheduler.kv_holding_waiting = engine.scheduler.waiting
    doors = Gate(store, loads=True)
    store.lost.add(store.objects[keys_of(engine, first)[5]].entry)
    engine.add("first", first, priority=1)
    engine.step()
    engine.add("second", second, priority=0)
    for _ in range(3):
        engine.step()
    assert engine.external == {"first": 30 * BLOCK}
    doors.open()
    engine.run(2000)
    assert list(engine.external) == ["first", "second"]
    assert engine.external["second"] == 32 * BLOCK
    for name, tokens in (("first", first), ("second", second)):
        assert engine.answers[name] == reference(tokens, 3)
    settled(engine, 63)


def test_who_loses_its_blocks_with_a_failed_load_keeps_its_share_until_it_runs(engine_on: EngineOn) -> None:
    """vLLM keeps them reserved for it, too."""
    store, tokens = FakeStore(), prompt(100)
    warm(engine_on, store, tokens)
    engine = engine_on(store, extra=PARKED)
    store.lost.add(store.objects[keys_of(engine, tokens)[0]].entry)
    engine.add("a", tokens)
    engine.step()
    assert engine.external == {"a": 96}
    assert engine.side._scheduler._parking.blocks == 7
    engine.run()
    assert engine.side._scheduler._parking.is_empty
    assert engine.answers["a"] == reference(tokens, 3)
    settled(engine, 63)


@pytest.mark.slow
@pytest.mark.parametrize("gate", ["ours", "both"])
def test_a_shared_prefix_and_a_newcomer(engine_on: EngineOn, gate: str) -> None:
    """R022: 270 blocks, four requests that share 100 stored blocks, and one of 100 blocks that hits nothing."""
    store, shared = FakeStore(), prompt(100 * BLOCK, 1)
    warm(engine_on, store, shared, num_blocks=270, budget=512)
    engine = engine_on(store, num_blocks=270, budget=256, extra=PARKED, threads=True)
    if gate == "ours":
        without_gate(engine)
    doors = Gate(store, loads=True)
    prompts = {f"r{index}": [*shared, *prompt(20, index + 2)] for index in range(4)}
    prompts["new"] = prompt(100 * BLOCK, 9)
    store.lookups = 0
    for name, tokens in prompts.items():
        engine.add(name, tokens, max_tokens=5)
    for _ in range(30):
        engine.step()
    assert store.lookups == 2
    assert set(engine.external) == {"r0", "r1"}
    doors.open()
    engine.run(2000)
    assert list(engine.external) == list(prompts), "in the order in which they came"
    for name, tokens in prompts.items():
        assert engine.answers[name] == reference(tokens, 5)
    settled(engine, 269)


def test_loads_in_flight_are_limited(engine_on: EngineOn) -> None:
    """``maru_load_admission_window``: in order, and a request that hits nothing does not wait for loads."""
    store = FakeStore()
    prompts = [prompt(80, seed) for seed in range(1, 6)]
    warm(engine_on, store, *prompts)
    engine = engine_on(store, extra={**PARKED, "maru_load_admission_window": 2}, threads=True)
    doors = Gate(store, loads=True)
    for index, tokens in enumerate(prompts):
        engine.add(f"r{index}", tokens)
    cold = prompt(40, 8)
    engine.add("cold", cold)
    for _ in range(20):
        engine.step()
    assert [name for name, count in engine.external.items() if count] == ["r0", "r1"]
    assert engine.answers["cold"] == reference(cold, 3)
    doors.open()
    engine.run(2000)
    assert [name for name, count in engine.external.items() if count] == [f"r{index}" for index in range(5)]
    settled(engine, 63)


def test_the_prompt_is_stored_when_it_is_complete(engine_on: EngineOn) -> None:
    """Chunked prefill hands nothing over before its last step; generated chunks follow as they fill."""
    store, tokens = FakeStore(), prompt(150)
    engine = engine_on(store, budget=40, extra=LATER)
    handed: list[tuple[str, list[int]]] = []
    plan = engine.side._scheduler.plan_stores

    def watched(output: Any) -> list[StoreOp]:
        ops = plan(output)
        handed.extend((op.request_id, list(op.chunks)) for op in ops)
        return ops

    engine.side._scheduler.plan_stores = watched
    engine.add("a", tokens, max_tokens=50)
    engine.run()
    assert handed == [("a", [0, 1, 2, 3]), ("a", [4]), ("a", [5])]
    assert check_store(store, [tokens + engine.answers["a"]], lambda t: keys_of(engine, t)) == 6
    settled(engine, 63)


def test_blocks_are_kept_until_the_store_has_read_them(engine_on: EngineOn) -> None:
    """A finished request's blocks are not free while its store is held up, and are reported once, afterwards."""
    store, tokens = FakeStore(), prompt(150)
    engine = engine_on(store, extra=LATER, threads=True)
    doors = Gate(store, stores=True)
    engine.add("a", tokens, max_tokens=2)
    while engine.scheduler.has_unfinished_requests():
        engine.step()
    for _ in range(5):
        engine.step()
    assert engine.held == {"a"}
    assert engine.free_blocks() < 63
    doors.open()
    engine.settle()
    assert check_store(store, [tokens], lambda t: keys_of(engine, t)) == 4
    settled(engine, 63)


def test_one_store_per_chunk_however_many_requests_finish_it(engine_on: EngineOn) -> None:
    """Five requests with one prompt and no prefix cache of vLLM's: four chunks are stored once."""
    store, tokens = FakeStore(), prompt(150)
    engine = engine_on(store, extra=LATER, threads=True, budget=1024, prefix_caching=False)
    doors = Gate(store, stores=True)
    for index in range(5):
        engine.add(f"r{index}", tokens, max_tokens=2)
    for _ in range(4):
        engine.step()
    assert engine.side._scheduler._stores.outstanding == 1
    doors.open()
    engine.run()
    assert check_store(store, [tokens], lambda t: keys_of(engine, t)) == 4
    settled(engine, 63)


@pytest.mark.parametrize("reason", [PREEMPTED, LOAD_FAILED, QUEUE_FULL])
def test_a_store_that_came_to_nothing_is_planned_again_by_whoever_has_the_chunk(
    engine_on: EngineOn, reason: str
) -> None:
    """The owner of a pending key is gone: the other request stores it. Dropped because copies are too slow: nobody."""
    store, tokens = FakeStore(), prompt(100)
    engine = engine_on(store, extra=LATER, budget=1024, prefix_caching=False)
    worker, answers = engine.worker._worker, engine.worker._answers
    first: list[StoreOp] = []

    class LostOnce:
        def submit(self, ops: list[StoreOp], epoch: int) -> None:
            first.extend(ops)
            worker._saver = None

        def preempt(self, names: Any) -> None:
            pass

    worker._saver = LostOnce()
    for index in range(2):
        engine.add(f"r{index}", tokens, max_tokens=20)
    engine.step()
    assert [op.request_id for op in first] == ["r0"]
    engine.abort("r0")
    answers.store_ended(first[0], 0, reason)
    engine.run()
    assert check_store(store, [tokens], lambda t: keys_of(engine, t)) == (0 if reason == QUEUE_FULL else 3)
    settled(engine, 63)


@pytest.fixture
def reserving(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """No store gets room before this is set."""
    reserve, allowed = FakeHandler.reserve, threading.Event()

    def held_up(*args: Any, **kwargs: Any) -> Any:
        assert allowed.wait(NEVER)
        return reserve(*args, **kwargs)

    monkeypatch.setattr(FakeHandler, "reserve", held_up)
    return allowed


def test_preemption_stops_stores_before_blocks_are_given_away(engine_on: EngineOn, reserving: threading.Event) -> None:
    """R081: the saver is held up, others overwrite the blocks: the pool gets true bytes or nothing."""
    store = FakeStore()
    prompts = [prompt(90, seed) for seed in range(4)]
    threads = Threads(HostLane, stores=SaverSettings(limit_bytes=1 << 30))
    engine = engine_on(store, num_blocks=24, budget=96, extra={**LATER, **PARKED}, threads=threads)
    for seed, tokens in enumerate(prompts):
        engine.add(f"r{seed}", tokens, max_tokens=60)
    while not engine.preemptions:
        engine.step()
    for _ in range(20):
        engine.step()
    reserving.set()
    engine.run(5000)
    for seed, tokens in enumerate(prompts):
        assert engine.answers[f"r{seed}"] == reference(tokens, 60)
    settled(engine, 23)
    check_store(store, [p + engine.answers[f"r{i}"] for i, p in enumerate(prompts)], lambda t: keys_of(engine, t))


@pytest.mark.parametrize("aborted", [False, True])
def test_a_reset_of_running_requests_stops_their_stores(
    engine_on: EngineOn, reserving: threading.Event, aborted: bool
) -> None:
    """As a preemption does: it takes their blocks away between two steps, which older versions name in no step."""
    store = FakeStore()
    prompts = [prompt(90, 1), prompt(260, 2)]
    threads = Threads(HostLane, stores=SaverSettings(limit_bytes=1 << 30))
    engine = engine_on(store, num_blocks=24, budget=512, extra=LATER, threads=threads)
    engine.add("r0", prompts[0], max_tokens=40)
    while not engine.answers["r0"]:
        engine.step()
    assert engine.side._scheduler._stores.outstanding
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    if aborted:
        engine.abort("r0")
    count = 80 if aborted else 40
    engine.add("r1", prompts[1], max_tokens=count)
    for _ in range(count - 20):  # blocks that the store would read are written to, and nobody has ended
        engine.step()
    reserving.set()
    engine.run(5000)
    assert engine.answers["r1"] == reference(prompts[1], count)
    whole = [tokens + engine.answers[f"r{number}"] for number, tokens in enumerate(prompts)]
    settled(engine, 23)
    stored = check_store(store, whole, lambda tokens: keys_of(engine, tokens))
    assert stored == sum(len(tokens) // CHUNK for tokens in whole[aborted:]), "an aborted request's is left out"


@pytest.mark.parametrize("at_once", [8, 24, 40, 200])
@pytest.mark.parametrize("count", [2, 3])
def test_who_shares_blocks_that_vllm_overlooked_is_taken_back_too(
    engine_on: EngineOn, at_once: int, count: int
) -> None:
    """vLLM takes back the first of them alone and lets the others go on, however many steps that one needs."""
    engine = engine_on(FakeStore(), budget=200)
    engine.scheduler.scheduler_config.long_prefill_token_threshold = at_once
    tokens = prompt(100)
    engine.add("r0", tokens, max_tokens=40)
    while not engine.answers["r0"]:
        engine.step()
    for number in range(1, count):
        engine.add(f"r{number}", tokens + prompt(5, number), max_tokens=40)
    while not all(engine.answers.values()):
        engine.step()
    shared = set(engine.tables["r0"][1:6])
    assert all(shared <= set(table) for table in engine.tables.values())
    # As when a load fails whose requests were released early and have no room to run.
    for cache in engine.caches:
        cache[:, list(shared)] = GARBAGE
    engine.side._scheduler._quarantine.add(shared)
    engine.run()
    assert engine.poisoned
    engine.poisoned.clear()
    for number in range(count):
        assert engine.answers[f"r{number}"] == reference(tokens + (prompt(5, number) if number else []), 40)
    settled(engine, 63)


class Clock:
    """Time goes on when it is told to."""

    now = 50.0

    def __call__(self) -> float:
        return self.now


def stopped(engine: Engine) -> Clock:
    """The scheduler side's clock stands still."""
    clock = Clock()
    scheduler = engine.side._scheduler
    scheduler._matcher._clock = scheduler._breaker.clock = clock
    return clock


@pytest.mark.parametrize("extra", [{}, PARKED], ids=["sync", "parked"])
def test_a_server_that_stopped_answering_delays_one_request_once(engine_on: EngineOn, extra: dict[str, Any]) -> None:
    """H 14: after the first late answer all compute at once, one probe a second, and hits resume by themselves."""
    store, tokens = FakeStore(), prompt(100)
    warm(engine_on, store, tokens)
    engine = engine_on(store, extra=extra)
    clock = stopped(engine)
    store.answer_after = 10**9
    engine.add("first", tokens)
    engine.add("second", prompt(100, 2))
    for _ in range(5):
        engine.step()
    assert not engine.answers["first"]
    clock.now += 0.6
    engine.step()
    assert engine.scheduler.running, "both compute: one was late, the other is not asked about any more"
    for _ in range(6):
        engine.step()
    assert engine.answers["first"]
    assert engine.answers["second"]
    store.lookups = 0
    store.patience.clear()
    for index in range(30):
        clock.now += 0.1
        engine.add(f"r{index}", prompt(40, index + 3), max_tokens=1)
        engine.step()
        assert engine.answers[f"r{index}"], "computed at once"
    assert store.lookups == 3, "one probe a second"
    assert sum(store.patience) <= 3 * POLL, "which is waited for once"
    engine.run()
    stored = len(store.objects)
    store.answer_after = 0
    clock.now += 1.0
    engine.scheduler.reset_prefix_cache()
    engine.add("again", tokens)
    engine.run()
    assert engine.external["again"] == 96, "the first request after the server is back hits"
    assert engine.answers["again"] == reference(tokens, 3)
    engine.add("new", prompt(100, 99))
    engine.run()
    assert len(store.objects) > stored, "stores resume, too"
    settled(engine, 63)


def test_who_decodes_finds_out_that_the_server_is_back(engine_on: EngineOn) -> None:
    """Nobody has to be looked up for: what is computed is stored again a second after the server is quick."""
    store = FakeStore(answer_after=10**9)
    engine = engine_on(store, num_blocks=128, max_seqs=2)
    clock = stopped(engine)
    engine.add("late", prompt(40))
    engine.step()
    clock.now += 0.6
    engine.add("decoding", prompt(20, 3), max_tokens=400)
    engine.step()
    store.lookups = 0
    for _ in range(30):
        clock.now += 0.1
        engine.step()
    assert store.lookups == 3
    assert not store.objects
    store.answer_after = 0
    clock.now += 1.0
    engine.step()
    assert not engine.side._scheduler._breaker.is_open
    assert not store.leases
    for _ in range(CHUNK):
        engine.step()
    assert store.objects
    engine.abort("decoding")
    engine.run()
    settled(engine, 127)


def test_a_probe_that_was_answered_while_nobody_looked_says_nothing(engine_on: EngineOn) -> None:
    """Its answer may have taken as long as ever: the next request does not wait for such a server."""
    store = FakeStore(answer_after=10**9)
    engine = engine_on(store)
    clock = stopped(engine)
    engine.add("late", prompt(40))
    engine.step()
    clock.now += 0.6
    engine.step()
    engine.run()
    clock.now += 1.0
    engine.add("probes", prompt(40, 1), max_tokens=1)
    engine.step()
    engine.run()
    store.answer_after = 2  # the probe that is on its way would be answered now, one that is sent later is not
    clock.now += 30.0
    engine.add("next", prompt(40, 2), max_tokens=1)
    engine.step()
    assert engine.answers["next"]
    assert engine.side._scheduler._breaker.is_open
    engine.run()
    settled(engine, 63)


@pytest.mark.parametrize(("step", "computed_by"), [(0.015, 0.5), (0.07, 0.5), (0.2, 0.5), (0.3, 0.5), (0.6, 0.6)])
def test_a_late_look_up_delays_its_request_by_its_deadline_and_not_by_a_step_more(
    engine_on: EngineOn, step: float, computed_by: float
) -> None:
    """A request whose deadline would pass within the step is computed in it. Only steps that take longer than the
    deadline itself are waited for, once."""
    store = FakeStore(answer_after=10**9)
    engine = engine_on(store)
    clock = stopped(engine)
    engine.add("decoding", prompt(20, 3), max_tokens=60)
    clock.now += 1.0
    engine.add("late", prompt(40))
    came = clock.now
    while not engine.answers["late"]:
        engine.step()
        began = clock.now
        clock.now += step
    assert began - came <= computed_by + 1e-9
    assert began - came >= min(0.25, computed_by - step) - 1e-9
    engine.run()
    settled(engine, 63)


def test_look_ups_of_many_requests_wait_a_millisecond_together(engine_on: EngineOn) -> None:
    """Sixteen requests with a slow server: a step waits for all of them as long as for one."""
    store = FakeStore(answer_after=10**9)
    engine = engine_on(store, max_seqs=32, num_blocks=512)
    engine.add("decoding", prompt(20, 3), max_tokens=60)
    engine.step()
    engine.step()
    scheduler = engine.side._scheduler
    clock = stopped(engine)
    poll = scheduler._matcher._poll

    def slow(lookup: Any) -> Any:
        before = len(store.patience)
        answer = poll(lookup)
        clock.now += sum(store.patience[before:])
        scheduler._matcher._patience -= sum(store.patience[before:])
        return answer

    scheduler._matcher._poll = slow
    for index in range(16):
        engine.add(f"r{index}", prompt(40, index + 4), max_tokens=1)
    for _ in range(4):
        store.patience.clear()
        engine.step()
        assert sum(store.patience) <= 0.001
    store.answer_after = 0
    engine.run()


def test_a_hit_that_is_slower_than_computing_is_skipped_once_and_for_all(engine_on: EngineOn) -> None:
    """``maru_load_or_compute``: decided before the first promise, counted with its reason, never taken back."""
    store, tokens = FakeStore(), prompt(100)
    warm(engine_on, store, tokens)
    engine = engine_on(store, extra={**PARKED, "maru_load_or_compute": "auto"})
    worth = engine.side._scheduler._worth
    worth.link.measure(1000, 1.0)
    worth.prefill.measure(1000, 1.0)
    request = engine.add("slow", tokens)
    engine.side._scheduler.take_stats()
    assert engine.side.get_num_new_matched_tokens(request, 0) == (0, False)
    worth.link.measure(1e12, 1e-3)
    assert engine.side.get_num_new_matched_tokens(request, 0) == (0, False)
    stats = engine.side.get_kv_connector_stats()
    assert stats is not None
    assert stats.data["counters"]["loads_skipped.slow_link"] == 1
    assert not store.leases
    engine.run()
    worth.link.rate = 1e9
    engine.scheduler.reset_prefix_cache()
    request = engine.add("fast", tokens)
    assert engine.side.get_num_new_matched_tokens(request, 0) == (96, True)
    worth.link.rate = 1.0
    assert engine.side.get_num_new_matched_tokens(request, 0) == (96, True), "promised is promised"
    engine.run()
    assert engine.answers["fast"] == reference(tokens, 3)
    settled(engine, 63)


def test_a_reset_does_not_wait_for_stores_of_what_it_emptied(engine_on: EngineOn) -> None:
    """A store from before the reset comes to nothing; the same chunk, computed afterwards, is stored all the same."""
    store, tokens = FakeStore(), prompt(100)
    engine = engine_on(store, extra=LATER, threads=True, budget=1024)
    doors = Gate(store, stores=True)
    engine.add("old", tokens, max_tokens=1)
    while engine.scheduler.has_unfinished_requests():
        engine.step()
    assert engine.side.reset_cache() is True
    engine.scheduler.reset_prefix_cache()
    engine.add("new", [*tokens, 5], max_tokens=1)
    while engine.scheduler.has_unfinished_requests():
        engine.step()
    doors.open()
    engine.settle()
    assert check_store(store, [tokens], lambda t: keys_of(engine, t)) == 3
    settled(engine, 63)


def test_a_cancelled_load_says_nothing_against_the_object(engine_on: EngineOn) -> None:
    """Aborted while it loads: stopped, blocks back, and the next request hits."""
    store, tokens = FakeStore(), prompt(100)
    warm(engine_on, store, tokens)
    engine = engine_on(store, extra=PARKED, threads=True)
    doors = Gate(store, loads=True)
    engine.add("a", tokens)
    engine.step()
    engine.abort("a")
    engine.step()
    doors.open()
    engine.settle()
    settled(engine, 63)
    engine.add("b", tokens)
    engine.run()
    assert engine.external["b"] == 96
    assert CHUNK * 3 == 96
    settled(engine, 63)
