"""The eighth of the faults in :mod:`tests.faults.test_existing_maru_faults`, its second half: needs vLLM."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.vllm.fake_store import FakeStore
from tests.vllm.mini_engine import reference


def test_8_a_failed_load_is_reported_and_recomputed(engine_on: Any) -> None:
    """A failed synchronous load was not reported, and garbage KV was used."""
    tokens = [index * 7 % 997 for index in range(100)]
    store = FakeStore()
    writer = engine_on(store)
    writer.add("writer", tokens, max_tokens=1)
    writer.run()
    for fault in ("raises", "proves nothing"):
        engine = engine_on(store)
        if fault == "raises":
            store.fail_loads = 1
        else:
            store.lost.update(found.entry for found in store.objects.values())
        engine.add("a", tokens, max_tokens=4)
        reported: set[int] = set()
        take = engine.worker.get_block_ids_with_load_errors
        engine.worker.get_block_ids_with_load_errors = lambda take=take, all_=reported: [
            found := take(),
            all_.update(found),
        ][0]
        engine.run()
        assert engine.external["a"] == 96
        assert reported, "vLLM was told which blocks hold nothing"
        assert engine.answers["a"] == reference(tokens, 4)
