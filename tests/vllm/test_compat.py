"""What compat says of the installed vLLM is what that vLLM does."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("vllm")

from maru_integrations.vllm import compat
from tests.vllm.fake_store import FakeStore
from tests.vllm.mini_engine import Engine
from tests.vllm.test_connector import prompt

EngineOn = Callable[..., Engine]


def test_whom_a_step_names_as_preempted(engine_on: EngineOn) -> None:
    """By a reset between two steps."""
    engine = engine_on(FakeStore())
    request = engine.add("a", prompt(20), max_tokens=3)
    engine.step()
    assert compat.times_preempted(request) == 0
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert compat.times_preempted(request) == 1
    assert ("a" in compat.preempted(engine.step())) is compat.names_all_preempted()


def test_who_is_asked_for_figures(engine_on: EngineOn) -> None:
    """In a step in which no worker has any."""
    engine = engine_on(FakeStore())
    asked = []
    engine.side.get_kv_connector_stats = lambda: asked.append("a")  # type: ignore[method-assign]
    engine.add("a", prompt(20), max_tokens=1)
    engine.step()
    assert bool(asked) is compat.asks_scheduler_for_stats()
