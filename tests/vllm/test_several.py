"""Other connectors beside Maru's, and Maru's twice: vLLM's MultiConnector loads from one of them and stores to all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA

from tests.vllm.fake_store import FakeStore
from tests.vllm.mini_engine import CHUNK, Engine, check_store, ours_of, reference
from tests.vllm.test_connector import keys_of, prompt, warm

EngineOn = Callable[..., Engine]
BESIDE = {"maru_async_load": True, "maru_async_store": True}
OVERLAP = BESIDE | {"maru_overlap_load_with_compute": True}
KNOBS = pytest.mark.parametrize("extra", [{}, BESIDE, OVERLAP], ids=["within", "beside", "overlap"])


class Other(KVConnectorBase_V1, SupportsHMA):
    """Has nothing, and returns parameters for each request, as one that hands requests over does."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        assert num_external_tokens == 0

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return False, {"other": request.request_id}

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...


OTHER = {"kv_connector": "Other", "kv_connector_module_path": __name__, "kv_connector_extra_config": {}}
CASES = pytest.mark.parametrize("beside", [[{}], [OTHER]], ids=["twice", "another"])


def settled(engine: Engine, free: int) -> None:
    """Nothing is held any more by any of Maru's."""
    assert engine.free_blocks() == free
    assert not engine.store.leases
    assert not engine.poisoned
    for side in ours_of(engine.scheduler.connector):
        scheduler = side._scheduler
        assert scheduler is not None
        assert not scheduler._states
        assert scheduler._loads.is_empty
        assert scheduler._parking.is_empty
        assert not scheduler._stores.outstanding
        assert not side._guard.caught
    for worker in ours_of(engine.worker):
        assert not worker._guard.caught


@KNOBS
@CASES
def test_fifty_requests_with_preemptions(engine_on: EngineOn, extra: dict[str, Any], beside: list[Any]) -> None:
    """R034, R035: who does not load reports nothing, blocks go when all have stored, parameters do not clash."""
    store = FakeStore()
    prompts = [prompt(60 + number * 7 % 90, number % 7) for number in range(50)]
    warm(engine_on, store, *prompts[:4])
    engine = engine_on(store, num_blocks=24, budget=64, extra=extra, beside=beside, threads=True)
    free = engine.free_blocks()
    for number, tokens in enumerate(prompts):
        engine.add(f"r{number}", tokens, max_tokens=20)
        engine.step()
    engine.run(6000)
    assert engine.preemptions
    assert sum(engine.external.values())
    for number, tokens in enumerate(prompts):
        assert engine.answers[f"r{number}"] == reference(tokens, 20)
    whole = [tokens + engine.answers[f"r{number}"] for number, tokens in enumerate(prompts)]
    check_store(store, whole, lambda tokens: keys_of(engine, tokens))
    settled(engine, free)


@KNOBS
def test_what_is_computed_on_anothers_failed_load_is_not_stored(engine_on: EngineOn, extra: dict[str, Any]) -> None:
    """Failed blocks are told to all, after a step in which each of them stores."""
    store, tokens = FakeStore(), prompt(200)
    warm(engine_on, store, tokens[:100])
    engine = engine_on(store, budget=256, extra=extra, beside=[{}], threads=True)
    free = engine.free_blocks()
    store.lost.add(store.objects[keys_of(engine, tokens)[2]].entry)
    engine.add("a", tokens)
    engine.run()
    assert engine.external["a"] == 3 * CHUNK
    assert engine.answers["a"] == reference(tokens, 3)
    assert check_store(store, [tokens], lambda text: keys_of(engine, text)) == 6
    engine.poisoned.clear()  # a step that waits for its load computes on what that left, and is made again
    settled(engine, free)


def test_who_is_not_chosen_to_load_receives_nothing(engine_on: EngineOn) -> None:
    """R034: with no external tokens a request never counts as received, in whatever step."""
    store, tokens = FakeStore(), prompt(3 * CHUNK + 10)
    warm(engine_on, store, tokens)
    engine = engine_on(store, extra=BESIDE, beside=[{}])
    first, second = ours_of(engine.worker)
    told: list[tuple[int, set[str]]] = []
    for number, worker in enumerate((first, second)):
        take = worker._answers.take_finished

        def taken(number: int = number, take: Any = take) -> Any:
            sent, received = take()
            told.append((number, received))
            return sent, received

        worker._answers.take_finished = taken  # type: ignore[method-assign]
    engine.add("a", tokens)
    for _ in range(5):
        engine.step()
    engine.run()
    assert engine.external["a"] == 3 * CHUNK
    assert [number for number, received in told if received] == [0]
