"""What the benchmark of a hit's overhead watches in vLLM and in the connector."""

from __future__ import annotations

from benchmarks.hit_trace import HOOKS, Watch
from maru_integrations.vllm.answers import Answers
from maru_integrations.vllm.connector import MaruKVConnector


def test_every_name_that_is_watched_exists_and_is_put_back() -> None:
    before = [getattr(MaruKVConnector, name) for name in HOOKS]
    watch = Watch()
    watch.begin()
    assert all(getattr(MaruKVConnector, name) is not one for name, one in zip(HOOKS, before, strict=True))
    Answers().take_finished()
    watch.end()
    assert [getattr(MaruKVConnector, name) for name in HOOKS] == before
