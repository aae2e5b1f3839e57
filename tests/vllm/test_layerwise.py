"""Layerwise objects in the connector: a chunk is there when all of its layers are, and bytes go by true layer."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("vllm")

from tests.vllm.fake_store import FakeStore
from tests.vllm.mini_engine import BLOCK, CHUNK, LAYERS, Engine, check_store, reference
from tests.vllm.test_connector import LAYERWISE, PARKED, keys_of, prompt, settled, warm

EngineOn = Callable[..., Engine]
BOTH_WAYS = pytest.mark.parametrize("extra", [LAYERWISE, LAYERWISE | PARKED], ids=["sync", "parked"])


@BOTH_WAYS
@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("chunk", [0, 2, 3])
def test_a_chunk_without_one_of_its_layers_is_a_miss_and_gets_that_layer_back(
    engine_on: EngineOn, extra: dict[str, bool], chunk: int, layer: int
) -> None:
    """What is stored then is the one layer alone, at the first place of the copies whichever layer it is."""
    store, tokens = FakeStore(), prompt(4 * CHUNK + 1)
    warm(engine_on, store, tokens, extra=extra)
    engine = engine_on(store, extra=extra)
    free = engine.free_blocks()
    keys = keys_of(engine, tokens)
    assert len(store.objects) == len(keys) == 4 * LAYERS
    before = {key: found.entry for key, found in store.objects.items()}
    gone = keys[chunk * LAYERS + layer]
    store.drop(gone)
    engine.add("b", tokens)
    engine.run()
    assert engine.external.get("b", 0) == chunk * CHUNK
    assert engine.answers["b"] == reference(tokens, 3)
    assert {key for key, found in store.objects.items() if found.entry != before[key]} == {gone}
    assert check_store(store, [tokens], lambda t: keys_of(engine, t)) == 4
    settled(engine, free)


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("chunk", [0, 1, 3])
def test_a_bad_layer_fails_its_whole_chunk_and_what_is_behind(engine_on: EngineOn, chunk: int, layer: int) -> None:
    """Failed blocks are those from the chunk of the first bad object on, neither more nor fewer."""
    extra = LAYERWISE | PARKED
    store, tokens = FakeStore(), prompt(4 * CHUNK + 1)
    warm(engine_on, store, tokens, extra=extra)
    engine = engine_on(store, extra=extra)
    victim = store.objects[keys_of(engine, tokens)[chunk * LAYERS + layer]]
    store.lost.add(victim.entry)
    victim.data[:] = b"\x55" * len(victim.data)
    reported: list[set[int]] = []
    errors = engine.worker.get_block_ids_with_load_errors

    def watched() -> set[int]:
        reported.append(errors())
        return reported[-1]

    engine.worker.get_block_ids_with_load_errors = watched  # type: ignore[method-assign]
    planned: list[list[int]] = []
    side = engine.side._scheduler
    assert side is not None
    take = side.take_loads

    def taken() -> list[object]:
        loads = take()
        planned.extend(list(load.blocks) for load in loads)
        return loads  # type: ignore[return-value]

    side.take_loads = taken  # type: ignore[method-assign, assignment]
    engine.add("b", tokens)
    engine.run()
    assert engine.answers["b"] == reference(tokens, 3)
    (blocks,) = planned
    assert set().union(*reported) == set(blocks[chunk * CHUNK // BLOCK :])


@BOTH_WAYS
@pytest.mark.parametrize("layer", range(LAYERS))
def test_once_its_bad_layer_was_replaced_a_chunk_is_a_hit_again(
    engine_on: EngineOn, extra: dict[str, bool], layer: int
) -> None:
    """What is not promised again is the one object that failed, not its neighbours, which were good all along."""
    store, tokens = FakeStore(), prompt(4 * CHUNK + 1)
    warm(engine_on, store, tokens, extra=extra)
    engine = engine_on(store, extra=extra)
    victim = store.objects[keys_of(engine, tokens)[LAYERS + layer]]
    store.lost.add(victim.entry)
    engine.add("b", tokens)
    engine.between = lambda: store.drop(victim.key)
    engine.run()
    assert store.objects[victim.key].entry != victim.entry
    engine.scheduler.reset_prefix_cache()
    engine.add("c", tokens)
    engine.run()
    assert engine.external["c"] == 4 * CHUNK
    assert engine.answers["c"] == reference(tokens, 3)


def test_objects_are_stored_as_one_chain_from_layer_to_layer_and_chunk_to_chunk(engine_on: EngineOn) -> None:
    """So the directory evicts the last layer of the last chunk first."""
    store, tokens = FakeStore(), prompt(3 * CHUNK)
    engine = engine_on(store, extra=LAYERWISE, budget=40)
    side = engine.side._scheduler
    assert side is not None
    plan, links = side.plan_stores, []

    def planned(output: object) -> list[object]:
        ops = plan(output)
        for op in ops:
            assert len(op.keys) == len(op.parents) == LAYERS * len(op.chunks)
            assert len(op.blocks) == CHUNK // BLOCK * len(op.chunks)
            links.extend(zip(op.parents, op.keys, strict=True))
        return ops  # type: ignore[return-value]

    side.plan_stores = planned  # type: ignore[method-assign, assignment]
    engine.add("a", tokens, max_tokens=1)
    engine.run()
    keys = keys_of(engine, tokens)
    assert [key for _, key in links] == keys
    assert [parent for parent, _ in links[1:]] == keys[:-1]
    assert links[0][0] not in keys


def test_engines_of_unlike_formats_share_nothing(engine_on: EngineOn) -> None:
    store, tokens = FakeStore(), prompt(4 * CHUNK + 1)
    warm(engine_on, store, tokens, extra={})
    before = set(store.objects)
    engine = engine_on(store, extra=LAYERWISE)
    engine.add("b", tokens)
    engine.run()
    assert engine.external.get("b", 0) == 0
    assert len(set(store.objects) - before) == 4 * LAYERS
    assert engine.answers["b"] == reference(tokens, 3)
