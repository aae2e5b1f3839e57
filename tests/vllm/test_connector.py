"""The connector inside vLLM's real scheduler: what is reused, what is stored, and what must never spread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
from structlog.testing import capture_logs

pytest.importorskip("vllm")

from maru_core.keys import KeyChain
from maru_integrations.vllm import compat
from maru_integrations.vllm.metadata import MaruConnectorMetadata
from maru_integrations.vllm.promises import Promises
from maru_integrations.vllm.scheduler import MaruScheduler
from tests.vllm.fake_store import FakeStore
from tests.vllm.mini_engine import BLOCK, CHUNK, HEADS, SIZE, Engine, chain, check_store, reference

EngineOn = Callable[..., Engine]
PARKED = {"maru_async_load": True}
LAYERWISE = {"maru_use_layerwise": True}
#: Both storage formats, both ways to load.
FORMATS = pytest.mark.parametrize(
    "extra", [{}, PARKED, LAYERWISE, PARKED | LAYERWISE], ids=["sync", "parked", "layerwise", "layerwise-parked"]
)


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(seed * 131 + index * 7 + index // 13) % 997 for index in range(length)]


def keys_of(engine: Engine, tokens: list[int]) -> list[bytes]:
    assert engine.side._plan is not None
    plan = engine.side._plan
    keys = KeyChain(plan.namespace.root, CHUNK, objects_per_chunk=plan.objects_per_chunk)
    chunks = len(tokens) // CHUNK
    keys.extend(tokens, chunks * CHUNK)
    return keys.object_keys(0, chunks)


def warm(engine_on: EngineOn, store: FakeStore, *prompts: list[int], **options: Any) -> None:
    """Fill the store from an engine that then goes away."""
    engine = engine_on(store, **options)
    for index, tokens in enumerate(prompts):
        engine.add(f"warm{index}", tokens, max_tokens=1)
        engine.run()


def settled(engine: Engine, free: int) -> None:
    """Nothing is held any more, on either side, and nothing was answered wrong."""
    assert not engine.store.leases, "leases outlive their requests"
    assert engine.free_blocks() == free, "blocks outlive their requests"
    assert not engine.poisoned
    scheduler = engine.side._scheduler
    assert scheduler is not None
    assert not scheduler._states
    assert scheduler._loads.is_empty
    assert scheduler._parking.is_empty
    assert not scheduler._line.places
    assert not scheduler._stores.outstanding
    assert not engine.held
    assert not engine.side._guard.caught
    assert not engine.worker._guard.caught


@pytest.mark.slow
@FORMATS
@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 95, 96, 97, 127, 128, 129, 256])
def test_a_second_engine_answers_the_same_from_the_pool(
    engine_on: EngineOn, length: int, extra: dict[str, Any]
) -> None:
    """Every prompt length around block and chunk borders: same answer, the longest usable prefix comes from Maru."""
    store, tokens = FakeStore(), prompt(length)
    warm(engine_on, store, tokens, extra=extra)
    engine = engine_on(store, extra=extra)
    free = engine.free_blocks()
    engine.add("b", tokens, max_tokens=5)
    engine.run()
    assert engine.answers["b"] == reference(tokens, 5)
    usable = min(length // CHUNK * CHUNK, (length - 1) // BLOCK * BLOCK)
    assert engine.external["b"] == usable
    settled(engine, free)
    assert check_store(store, [tokens + engine.answers["b"]], lambda t: keys_of(engine, t)) >= length // CHUNK


@pytest.mark.parametrize("extra", [{}, LAYERWISE], ids=["chunkwise", "layerwise"])
@pytest.mark.parametrize("budget", [16, 24, 40, 64, 200])
def test_chunked_prefill_stores_every_complete_chunk(engine_on: EngineOn, budget: int, extra: dict[str, Any]) -> None:
    """However the prompt is split into steps, the same objects are there afterwards (R033: also without new blocks)."""
    store, tokens = FakeStore(), prompt(150)
    engine = engine_on(store, budget=budget, extra=extra)
    engine.add("a", tokens, max_tokens=2)
    engine.run()
    assert engine.answers["a"] == reference(tokens, 2)
    assert check_store(store, [tokens], lambda t: keys_of(engine, t)) == 150 // CHUNK


def test_generated_tokens_fill_chunks_too(engine_on: EngineOn) -> None:
    """A chunk that fills during decoding is stored, with the keys of prompt + answer."""
    store, tokens = FakeStore(), prompt(40)
    engine = engine_on(store)
    engine.add("a", tokens, max_tokens=30)
    engine.run()
    answer = engine.answers["a"]
    assert answer == reference(tokens, 30)
    # The last sampled token has no KV: 69 of 70 tokens are computed, which is two whole chunks.
    assert check_store(store, [tokens + answer], lambda t: keys_of(engine, t)) == 2


def test_prompts_share_their_common_prefix(engine_on: EngineOn) -> None:
    """Partial prefixes are reused between different prompts, whole chunks only."""
    store = FakeStore()
    first = prompt(100)
    second = first[:70] + prompt(60, seed=5)
    warm(engine_on, store, first)
    engine = engine_on(store)
    engine.add("b", second)
    engine.run()
    assert engine.answers["b"] == reference(second, 3)
    assert engine.external["b"] == 64


@pytest.mark.parametrize("extra", [{}, LAYERWISE], ids=["chunkwise", "layerwise"])
def test_prompts_that_part_within_a_chunk_are_stored_in_one_step(engine_on: EngineOn, extra: dict[str, Any]) -> None:
    """vLLM lets requests of one step share blocks, so two chunks of one store begin with the same block."""
    store, first = FakeStore(), prompt(64)
    second = first[:48] + prompt(16, seed=5)
    engine = engine_on(store, extra=extra)
    engine.add("a", first, max_tokens=1)
    engine.add("b", second, max_tokens=1)
    engine.run()
    assert engine.answers["b"] == reference(second, 1)
    for tokens in (first, second):
        assert check_store(store, [tokens], lambda t: keys_of(engine, t)) == 2


@pytest.mark.parametrize("local_blocks", [0, 1, 2, 3, 5])
def test_a_load_never_touches_local_blocks(engine_on: EngineOn, local_blocks: int) -> None:
    """R007: with a local hit that ends inside a stored chunk only the slots behind it are written."""
    store, tokens = FakeStore(), prompt(160)
    warm(engine_on, store, tokens)
    engine = engine_on(store)
    if local_blocks:
        engine.store.up = False  # computed here, so that it is local
        engine.add("local", tokens[: local_blocks * BLOCK + 1], max_tokens=1)
        engine.run()
        engine.store.up = True
    # What the pool holds for the local blocks' tokens is changed, so that a load that touches them shows.
    for index, key in enumerate(keys_of(engine, tokens)):
        planes = memoryview(store.objects[key].data).cast("B", (4, CHUNK, HEADS * SIZE * 2))
        for slot in range(max(0, min(CHUNK, local_blocks * BLOCK - index * CHUNK))):
            for plane in range(4):
                for byte in range(HEADS * SIZE * 2):
                    planes[plane, slot, byte] = 0x77
    before = [cache.clone() for cache in engine.caches]
    engine.add("b", tokens, max_tokens=1)
    engine.step()
    table = engine.tables["b"]
    for block in table[:local_blocks]:
        for old, new in zip(before, engine.caches, strict=True):
            assert bool((old[:, block] == new[:, block]).all())
    engine.run()
    assert engine.answers["b"] == reference(tokens, 1)
    assert engine.external["b"] == 144 - local_blocks * BLOCK
    assert not engine.poisoned


@FORMATS
@pytest.mark.parametrize("bad_chunk", [0, 1, 3])
def test_a_failed_load_is_recomputed_and_does_not_spread(
    engine_on: EngineOn, extra: dict[str, Any], bad_chunk: int
) -> None:
    """R004: an object that turns out to be another's after the copy costs time, no token, and is not promised again."""
    store, tokens = FakeStore(), prompt(150)
    warm(engine_on, store, tokens, extra=extra)
    engine = engine_on(store, extra=extra)
    free = engine.free_blocks()
    keys = keys_of(engine, tokens)
    victim = store.objects[keys[(bad_chunk + 1) * len(keys) // 4 - 1]]
    store.lost.add(victim.entry)
    victim.data[:] = b"\x55" * len(victim.data)
    engine.add("b", tokens)
    engine.run()
    assert engine.answers["b"] == reference(tokens, 3)
    lookups = store.lookups
    follow = tokens[:140] + prompt(30, seed=9)
    engine.scheduler.reset_prefix_cache()
    engine.add("c", follow)
    engine.run()
    assert engine.answers["c"] == reference(follow, 3)
    assert engine.external["c"] == bad_chunk * CHUNK
    assert store.lookups == lookups + 1
    assert not engine.store.leases
    assert engine.free_blocks() == free
    store.drop(victim.key)
    assert check_store(store, [tokens, follow], lambda t: keys_of(engine, t))


@FORMATS
def test_what_was_recomputed_after_a_failed_load_is_stored_again(engine_on: EngineOn, extra: dict[str, Any]) -> None:
    """The object was lost, so the recomputed chunk takes its place; chunks before it are not copied again."""
    store, tokens = FakeStore(), prompt(150)
    warm(engine_on, store, tokens, extra=extra)
    engine = engine_on(store, extra=extra)
    victim = store.objects[keys_of(engine, tokens)[1]]
    store.lost.add(victim.entry)
    engine.add("b", tokens)
    engine.between = lambda: store.drop(victim.key)
    engine.run()
    assert engine.answers["b"] == reference(tokens, 3)
    assert store.objects[victim.key].entry != victim.entry
    assert check_store(store, [tokens], lambda t: keys_of(engine, t)) == 4


@pytest.mark.parametrize("extra", [{}, PARKED], ids=["sync", "parked"])
def test_a_load_that_raises_is_recomputed(engine_on: EngineOn, extra: dict[str, Any]) -> None:
    """An I/O error in the middle of a load is a miss."""
    store, tokens = FakeStore(), prompt(150)
    warm(engine_on, store, tokens)
    engine = engine_on(store, extra=extra)
    free = engine.free_blocks()
    store.fail_loads = 1
    engine.add("b", tokens)
    engine.run()
    assert engine.answers["b"] == reference(tokens, 3)
    assert not store.leases
    assert engine.free_blocks() == free


def test_an_aborted_failed_load_leaves_nothing_in_vllms_cache(engine_on: EngineOn) -> None:
    """The abort arrives between dispatch and result: vLLM would keep the bad blocks in its prefix cache."""
    store, tokens = FakeStore(), prompt(150)
    warm(engine_on, store, tokens)
    engine = engine_on(store)
    free = engine.free_blocks()
    for found in store.objects.values():
        store.lost.add(found.entry)
        found.data[:] = b"\x55" * len(found.data)
    engine.add("b", tokens)
    engine.between = lambda: engine.abort("b")
    engine.step()
    assert not store.leases
    store.up = False
    engine.add("c", tokens)
    engine.run()
    assert engine.answers["c"] == reference(tokens, 3)
    assert "c" not in engine.poisoned
    assert engine.free_blocks() == free


def test_blocks_computed_on_an_aborted_failed_load_are_gone_too(engine_on: EngineOn) -> None:
    """Two requests of one step share the failed prefix and both are aborted: what they computed behind it is bad KV."""
    store, tokens = FakeStore(), prompt(200)
    warm(engine_on, store, tokens[:129])
    engine = engine_on(store, budget=512)
    other = tokens[:130] + prompt(60, seed=3)
    for found in store.objects.values():
        store.lost.add(found.entry)
        found.data[:] = b"\x55" * len(found.data)
    engine.add("b", tokens)
    engine.add("c", other)

    def abort_both() -> None:
        engine.abort("b")
        engine.abort("c")

    engine.between = abort_both
    engine.step()
    engine.poisoned.clear()
    store.up = False
    # The prefix is computed again; only then are the blocks behind it reachable in vLLM's prefix cache.
    engine.add("prefix", tokens[:129])
    engine.run()
    for name, text in (("d", tokens), ("e", other)):
        engine.add(name, text)
        engine.run()
        assert engine.answers[name] == reference(text, 3)
    assert not engine.poisoned


def test_a_request_that_shares_failed_blocks_is_not_served_from_them(engine_on: EngineOn) -> None:
    """Two requests of one step share a prefix whose load fails: both answers are right, nothing bad is stored."""
    store, tokens = FakeStore(), prompt(150)
    warm(engine_on, store, tokens)
    engine = engine_on(store, budget=512)
    other = tokens[:130] + prompt(40, seed=3)
    for found in store.objects.values():
        store.lost.add(found.entry)
        found.data[:] = b"\x55" * len(found.data)
    engine.add("b", tokens)
    engine.add("c", other)
    engine.run()
    assert engine.answers["b"] == reference(tokens, 3)
    assert engine.answers["c"] == reference(other, 3)
    assert not store.leases
    bad = [key for key, found in store.objects.items() if found.entry in store.lost]
    for key in bad:
        store.drop(key)
    check_store(store, [tokens, other], lambda t: keys_of(engine, t))


@pytest.mark.parametrize("steps", range(7))
def test_who_shares_what_was_computed_on_a_failed_load_outlives_who_computed_it(
    engine_on: EngineOn, steps: int
) -> None:
    """Two requests of one step share a prefix: 16 blocks whose load fails, and 2 that the first computes on them.

    vLLM takes the first one back and trusts it to write all 18 again; it is aborted before, in whatever step.
    """
    store, tokens = FakeStore(), prompt(300)
    warm(engine_on, store, tokens[:257])
    engine = engine_on(store, budget=64)
    free = engine.free_blocks()
    lost = [store.objects[key].entry for key in keys_of(engine, tokens[:256])]
    store.lost.update(lost)
    other = tokens[:290] + prompt(20, seed=3)
    engine.add("first", tokens[:290], max_tokens=10)
    engine.add("second", other, max_tokens=40)
    output = engine.step()
    assert output.num_scheduled_tokens == {"first": 34, "second": 22}
    for _ in range(steps):
        engine.step()
    engine.abort("first")
    engine.run()
    assert engine.answers["second"] == reference(other, 40)
    for key in [key for key, found in store.objects.items() if found.entry in lost]:
        store.drop(key)
    check_store(store, [tokens, other], lambda text: keys_of(engine, text))
    engine.add("third", tokens, max_tokens=2)
    engine.run()
    assert engine.answers["third"] == reference(tokens, 2)
    engine.poisoned.clear()
    settled(engine, free)


@pytest.mark.parametrize("extra", [{}, PARKED], ids=["sync", "parked"])
@pytest.mark.parametrize("stage", range(6))
def test_abort_at_every_stage_leaks_nothing(engine_on: EngineOn, extra: dict[str, Any], stage: int) -> None:
    """R021, R083, R084: queued, looking up, loading, just loaded, running; completions in, after or never."""
    store, tokens = FakeStore(answer_after=1), prompt(150)
    warm(engine_on, store, tokens)
    engine = engine_on(store, extra=extra)
    free = engine.free_blocks()
    engine.add("b", tokens)
    if stage == 5:
        engine.step()
        engine.between = lambda: engine.abort("b")
        engine.step()
    else:
        for _ in range(stage):
            engine.step()
        engine.abort("b")
    for _ in range(4):
        engine.step()
    settled(engine, free)
    engine.add("c", tokens)
    engine.run()
    assert engine.answers["c"] == reference(tokens, 3)
    settled(engine, free)


@pytest.mark.parametrize("extra", [{}, PARKED], ids=["sync", "parked"])
def test_preempted_requests_come_back_with_hits(engine_on: EngineOn, extra: dict[str, Any]) -> None:
    """R085, R086: block tables are replaced on resume, nothing stale is stored, the resumed request hits."""
    store = FakeStore()
    prompts = [prompt(90, seed) for seed in range(4)]
    engine = engine_on(store, num_blocks=24, budget=96, extra=extra)
    free = engine.free_blocks()
    requests = [engine.add(f"r{seed}", tokens, max_tokens=60) for seed, tokens in enumerate(prompts)]
    engine.run(3000)
    assert engine.preemptions > 0
    for seed, tokens in enumerate(prompts):
        assert engine.answers[f"r{seed}"] == reference(tokens, 60)
    assert any(request.num_preemptions for request in requests)
    settled(engine, free)
    check_store(store, [p + engine.answers[f"r{i}"] for i, p in enumerate(prompts)], lambda t: keys_of(engine, t))


@pytest.mark.slow
@pytest.mark.parametrize("extra", [{}, PARKED], ids=["sync", "parked"])
def test_what_the_engine_has_itself_stays_leased_by_nobody(engine_on: EngineOn, extra: dict[str, Any]) -> None:
    """R037: the same prompt again and again, of which the pool has no more than vLLM's own cache."""
    store, tokens = FakeStore(), prompt(200)
    engine = engine_on(store, extra=extra)
    free = engine.free_blocks()
    for index in range(50):
        engine.add(f"again{index}", tokens, max_tokens=2)
        engine.run()
        assert engine.answers[f"again{index}"] == reference(tokens, 2)
        settled(engine, free)
    assert store.lookups == 1, "leased for nothing: the pool was asked for what vLLM has itself"


def test_asking_again_costs_no_lookups(engine_on: EngineOn) -> None:
    """R091: vLLM asks on every step while allocation fails; the pool is asked once and one lease is held."""
    store, tokens = FakeStore(), prompt(200)
    warm(engine_on, store, tokens)
    engine = engine_on(store, num_blocks=32, budget=64)
    filler = prompt(300, seed=4)
    engine.add("filler", filler, max_tokens=40)
    for _ in range(6):
        engine.step()
    store.lookups = 0
    engine.add("b", tokens)
    for _ in range(20):
        engine.step()
    assert store.lookups == 1
    assert len(store.leases) == 1
    engine.run()
    assert engine.answers["b"] == reference(tokens, 3)
    settled(engine, 31)


@pytest.mark.slow
@pytest.mark.parametrize("extra", [{}, PARKED], ids=["sync", "parked"])
def test_many_parked_requests_never_stall(engine_on: EngineOn, extra: dict[str, Any]) -> None:
    """The known trap: 64 blocks, prompts of 50, 25 and 15 blocks that all hit."""
    store = FakeStore()
    prompts = [prompt(50 * BLOCK, 1), prompt(25 * BLOCK, 2), prompt(15 * BLOCK, 3)]
    warm(engine_on, store, *prompts)
    engine = engine_on(store, num_blocks=64, budget=128, extra=extra)
    for index, tokens in enumerate(prompts):
        engine.add(f"r{index}", tokens, max_tokens=20)
    engine.run(300)
    for index, tokens in enumerate(prompts):
        assert engine.answers[f"r{index}"] == reference(tokens, 20)
    settled(engine, 63)


def test_the_next_hit_is_parked_as_soon_as_the_first_runs(engine_on: EngineOn) -> None:
    """One at a time is for loading: a long answer of the first does not keep the second waiting.

    They share 32 of their 33 blocks, so both can run, although their shares together are more than the 63 there are.
    """
    store = FakeStore()
    first, second = prompt(33 * BLOCK, 1), [*prompt(32 * BLOCK, 1), *prompt(BLOCK, 2)]
    warm(engine_on, store, first, second)
    engine = engine_on(store, extra=PARKED)
    engine.add("long", first, max_tokens=100)
    engine.add("short", second, max_tokens=2)
    for _ in range(12):
        engine.step()
    assert engine.answers["short"] == reference(second, 2)
    assert len(engine.answers["long"]) < 100
    engine.run()
    settled(engine, 63)


class Table:
    """What ``update_state_after_alloc`` gets."""

    def __init__(self, count: int) -> None:
        self.ids = list(range(1, count + 1))

    def get_block_ids(self) -> tuple[list[int], ...]:
        return (self.ids,)


@pytest.mark.parametrize("extra", [{}, LAYERWISE], ids=["chunkwise", "layerwise"])
def test_vllm_decides_how_much_of_a_promise_it_takes(engine_on: EngineOn, extra: dict[str, Any]) -> None:
    """``num_external_tokens`` counts, not our answer: 0 ends the lease, after a grown local hit the rest is loaded."""
    store, tokens = FakeStore(), prompt(150)
    warm(engine_on, store, tokens, extra=extra)
    engine = engine_on(store, extra=extra)
    request = engine.add("b", tokens)
    assert engine.side.get_num_new_matched_tokens(request, 0) == (128, False)
    assert engine.side.get_num_new_matched_tokens(request, 80) == (48, False)
    assert len(store.leases) == 1
    engine.side._scheduler.after_alloc(request, Table(10), 48)
    (op,) = engine.side._scheduler.take_loads()
    keys = keys_of(engine, tokens)
    assert (op.chunk, op.first, op.last) == (2, 80, 128)
    assert list(op.entries) == [store.objects[key].entry for key in keys[len(keys) // 2 :]]
    assert list(op.blocks) == [5, 6, 7, 8]
    other = engine.add("c", tokens)
    assert engine.side.get_num_new_matched_tokens(other, 0) == (128, False)
    assert len(store.leases) == 2
    engine.side.update_state_after_alloc(other, Table(10), 0)
    assert len(store.leases) == 1
    assert not engine.side._guard.caught


def test_a_slow_lookup_is_asked_again_then_a_miss(engine_on: EngineOn) -> None:
    """An answer that comes late is waited for in small pieces; one that never comes is a miss by the deadline."""
    store, tokens = FakeStore(answer_after=3), prompt(100)
    warm(engine_on, store, tokens)
    engine = engine_on(store)
    engine.add("b", tokens)
    engine.run()
    assert engine.external["b"] == 96
    store.answer_after = 10**9
    engine = engine_on(store, extra={"maru_lookup_timeout": 0.001})
    engine.add("c", tokens)
    engine.run()
    assert engine.external["c"] == 0
    assert engine.answers["c"] == reference(tokens, 3)
    assert not store.leases


def test_only_an_idle_engine_waits_for_a_lookup(engine_on: EngineOn) -> None:
    """R055: while others decode a lookup may take a millisecond of a step; alone in the engine it may wait."""
    store, tokens = FakeStore(answer_after=4), prompt(100)
    warm(engine_on, store, tokens)
    engine = engine_on(store)
    engine.add("decoding", prompt(20, 3), max_tokens=30)
    engine.step()
    store.patience.clear()
    engine.add("b", tokens)
    engine.run()
    assert max(store.patience) == 0.001
    assert store.patience.count(0.0) == len(store.patience) - 1, "a look-up waits once, then its answer is looked for"
    store.patience.clear()
    engine.scheduler.reset_prefix_cache()
    engine.add("c", tokens)
    engine.run()
    assert max(store.patience[1:]) == 0.01


def test_without_a_server_everything_is_computed(engine_on: EngineOn) -> None:
    """Server loss is only a slow-down, and caching comes back without an engine restart."""
    store, tokens = FakeStore(), prompt(100)
    engine = engine_on(store)
    store.up = False
    engine.add("a", tokens)
    engine.run()
    assert engine.answers["a"] == reference(tokens, 3)
    assert not store.objects
    store.up = True
    engine.add("b", prompt(100, 2))
    engine.run()
    assert len(store.objects) == 3


def test_the_server_restarts_between_promise_and_load(engine_on: EngineOn) -> None:
    """Leases of an old epoch are void: the load fails and is recomputed."""
    store, tokens = FakeStore(), prompt(100)
    warm(engine_on, store, tokens)
    engine = engine_on(store)
    schedule = engine.scheduler.schedule

    def restart_after() -> Any:
        output = schedule()
        store.epoch += 1
        return output

    engine.scheduler.schedule = restart_after  # type: ignore[method-assign]
    engine.add("b", tokens)
    engine.step()
    engine.scheduler.schedule = schedule  # type: ignore[method-assign]
    engine.run()
    assert engine.answers["b"] == reference(tokens, 3)
    assert not engine.poisoned - {"b"}


def test_reset_empties_and_old_kv_does_not_come_back(engine_on: EngineOn) -> None:
    """R011: after a reset nothing is hit, and requests that still run on old KV store nothing."""
    store, tokens = FakeStore(), prompt(150)
    engine = engine_on(store, budget=48)
    engine.add("a", tokens)
    engine.step()
    engine.step()
    assert store.objects
    assert engine.side.reset_cache() is True
    assert not store.objects
    engine.run()
    assert not store.objects
    engine.scheduler.reset_prefix_cache()
    engine.add("b", tokens)
    engine.run()
    assert engine.external["b"] == 0
    assert len(store.objects) == 4
    store.up = False
    assert engine.side.reset_cache() is False


@pytest.mark.parametrize("extra", [{}, {"maru_async_load": True}], ids=["sync", "parked"])
def test_a_reset_that_the_server_missed_is_made_up_for_before_anything_is_hit(
    engine_on: EngineOn, extra: dict[str, Any]
) -> None:
    """New weights while the server is away: it comes back with KV of the old ones, which nobody may be given."""
    store, tokens = FakeStore(), prompt(150)
    warm(engine_on, store, tokens)
    old = dict(store.objects)
    engine = engine_on(store, extra=extra)
    free = engine.free_blocks()
    now = [0.0]
    assert engine.side._scheduler is not None
    engine.side._scheduler._resets.clock = lambda: now[0]
    store.up = False
    with capture_logs() as logs:
        assert engine.side.reset_cache() is False
    assert [entry["event"] for entry in logs if entry["log_level"] == "error"] == ["maru.reset_failed"]
    store.up = True
    engine.add("early", tokens)
    engine.add("other", prompt(150, seed=1))
    engine.run()
    assert engine.external["early"] == 0
    assert store.objects == old, "computed with new weights, and the server does not know of them"
    now[0] = 1.5
    engine.scheduler.reset_prefix_cache()
    engine.add("first", tokens)
    engine.run()
    assert engine.external["first"] == 0
    assert len(store.objects) == 4
    assert not set(map(id, old.values())) & set(map(id, store.objects.values()))
    engine.scheduler.reset_prefix_cache()
    engine.add("second", tokens)
    engine.run()
    assert engine.external["second"] == 128
    settled(engine, free)


def test_an_engine_behind_a_reset_neither_hits_nor_stores(engine_on: EngineOn) -> None:
    """Weights epoch: an engine that has not been reset too sees nothing of the new one and adds nothing to it."""
    store, tokens = FakeStore(), prompt(150)
    one, two = engine_on(store), engine_on(store)
    one.add("a", tokens)
    one.run()
    assert one.side.reset_cache() is True
    with capture_logs() as logs:
        two.add("b", tokens)
        two.run()
    assert not store.objects
    told = [entry for entry in logs if entry["event"] == "maru.store_refused"]
    assert len(told) == 1, "once, however many stores are refused"
    assert "reset_external=true" in told[0]["remedy"]
    one.scheduler.reset_prefix_cache()
    one.add("c", tokens)
    one.run()
    assert len(store.objects) == 4
    two.add("d", [*prompt(149), 5])
    two.scheduler.reset_prefix_cache()
    two.run()
    assert two.external["d"] == 0


@pytest.mark.parametrize(
    ("role", "hits", "stored"), [("kv_producer", 0, 3), ("kv_consumer", 96, 3), ("kv_both", 96, 6)]
)
def test_roles(engine_on: EngineOn, role: str, hits: int, stored: int) -> None:
    """A producer only stores, a consumer only loads."""
    store, tokens = FakeStore(), prompt(100)
    if role != "kv_producer":
        warm(engine_on, store, tokens)
    engine = engine_on(store, kv_role=role)
    engine.add("b", tokens)
    engine.run()
    assert engine.external["b"] == hits
    engine.add("c", prompt(100, 8) if role != "kv_producer" else tokens)
    engine.run()
    assert len(store.objects) == stored


def test_cache_salt_separates_and_repeats(engine_on: EngineOn) -> None:
    """R137: no hit across salts, a hit under the same one."""
    store, tokens = FakeStore(), prompt(100)
    for salt, expected in (("x", 0), ("y", 0), (None, 0), ("x", 96), (None, 96)):
        engine = engine_on(store)
        engine.add("r", tokens, cache_salt=salt)
        engine.run()
        assert engine.external["r"] == expected, salt


@pytest.mark.parametrize("extra", [{}, {"maru_async_load": True, "maru_async_store": True}], ids=["within", "beside"])
@pytest.mark.parametrize("chunks", [2, 4, 6])
def test_a_pool_smaller_than_a_prompt_is_used_as_far_as_it_goes(
    engine_on: EngineOn, chunks: int, extra: dict[str, Any]
) -> None:
    """R029: half a prompt's chunks fit, all, or one and a half; ten prompts at once."""
    store = FakeStore(capacity=chunks)
    engine = engine_on(store, num_blocks=128, budget=256, extra=extra, threads=True)
    free, prompts = engine.free_blocks(), [prompt(130, seed) for seed in range(10)]
    for number, tokens in enumerate(prompts):
        engine.add(f"r{number}", tokens)
    take, dropped = engine.side.get_kv_connector_stats, 0.0

    def taken() -> Any:
        nonlocal dropped
        stats = take()
        for name, amount in (stats.data["counters"] if stats is not None else {}).items():
            assert amount > 0, "R032: what Prometheus counts never goes back"
            dropped += amount if name == "dropped.no_room" else 0
        return stats

    engine.side.get_kv_connector_stats = taken  # type: ignore[method-assign]
    while engine.scheduler.has_unfinished_requests():
        engine.step()
        assert len(store.objects) <= chunks
    engine.run()
    taken()  # up to 0.23 vLLM asks only when a worker has something to tell, and here none has
    for number, tokens in enumerate(prompts):
        assert engine.answers[f"r{number}"] == reference(tokens, 3)
    assert dropped or chunks > 2
    check_store(store, prompts, lambda tokens: keys_of(engine, tokens))
    settled(engine, free)


def test_unidentifiable_requests_are_neither_hit_nor_stored(engine_on: EngineOn) -> None:
    """LoRA and others cannot be told apart by tokens: zero hits, nothing stored, one warning."""
    from vllm.lora.request import LoRARequest

    store, tokens = FakeStore(), prompt(100)
    engine = engine_on(store)
    request = engine.add("r", tokens, lora_request=LoRARequest("adapter", 1, "nowhere"))
    assert engine.side.get_num_new_matched_tokens(request, 0) == (0, False)
    engine.abort("r")
    assert not store.objects
    assert store.lookups == 0


def test_prompt_logprobs_need_every_position(engine_on: EngineOn) -> None:
    """A request that must not read the prefix cache gets no external hit either (0.22.1 does not check that)."""
    store, tokens = FakeStore(), prompt(100)
    warm(engine_on, store, tokens)
    engine = engine_on(store)
    request = engine.add("r", tokens)
    request.skip_reading_prefix_cache = True
    assert engine.side.get_num_new_matched_tokens(request, 0) == (0, False)


@pytest.mark.parametrize("extra", [{}, PARKED], ids=["sync", "parked"])
def test_internal_faults_are_misses(
    engine_on: EngineOn, monkeypatch: pytest.MonkeyPatch, extra: dict[str, Any]
) -> None:
    """Whatever raises inside any hook, the engine answers right and stays alive."""
    store, tokens = FakeStore(), prompt(100)
    warm(engine_on, store, tokens)

    def boom(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("injected")

    owners = dict.fromkeys(("match", "after_alloc", "plan_stores", "worker_output", "finished"), MaruScheduler)
    for name, owner in {**owners, "_plan_load": Promises}.items():
        engine = engine_on(store, extra=extra)
        free = engine.free_blocks()
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, boom)
            engine.add("r", tokens)
            engine.run()
        assert engine.answers["r"] == reference(tokens, 3), name
        assert engine.free_blocks() == free
    for name in ("load", "_load", "_store", "told"):
        engine = engine_on(store, extra=extra)
        monkeypatch.setattr(engine.worker._worker, name, boom)
        engine.add("r", tokens)
        engine.run()
        assert engine.answers["r"] == reference(tokens, 3), name
    engine = engine_on(store, extra=extra)
    engine.worker._worker = None
    engine.add("r", tokens)
    engine.run()
    assert engine.answers["r"] == reference(tokens, 3)


def test_where_nobody_knows_of_layer_hooks_none_are_counted_on(
    engine_on: EngineOn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then a step waits for all layers before it begins, whatever comes later."""
    worker, asked = engine_on(FakeStore()).worker, []

    class Begun:
        def begin(self, metadata: Any, has_hooks: Callable[[], bool]) -> None:
            asked.append(has_hooks())

        def close(self) -> None:
            pass

    monkeypatch.setattr(compat, "runs_layer_hooks", Mock(side_effect=AttributeError("injected")))
    worker._worker = Begun()  # type: ignore[assignment]
    worker.bind_connector_metadata(MaruConnectorMetadata())
    worker.clear_connector_metadata()
    assert asked == [False]


def test_the_chain_of_the_model_depends_on_all_tokens() -> None:
    """The check itself: another first token gives other KV everywhere."""
    assert chain([1, 2, 3])[2] != chain([4, 2, 3])[2]
