"""Figures for vLLM's log and Prometheus."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector, MultiKVConnectorStats
from vllm.v1.metrics.stats import SchedulerStats

import maru_integrations.vllm
from maru_integrations.vllm.connector import MaruKVConnector
from maru_integrations.vllm.stats import COUNTERS, GAUGES, MaruPromMetrics, MaruStats, Report


def some() -> MaruStats:
    stats = MaruStats()
    stats.count("lookups", 3)
    stats.count("dropped", 2, "no_room")
    stats.data["gauges"]["parked"] = 4
    return stats


def test_counters_add_up_and_gauges_are_the_newest() -> None:
    other = MaruStats({"counters": {"lookups": 1, "loads": 1}, "gauges": {"parked": 1}})
    both = some().aggregate(other)
    assert both.reduce() == {"lookups": 4, "dropped.no_room": 2, "loads": 1, "parked": 1}
    assert not both.is_empty()
    both.reset()
    assert both.is_empty()


def test_they_cross_processes() -> None:
    """vLLM sends ``data`` by msgpack and builds the object again in the front end."""
    data = msgspec.msgpack.decode(msgspec.msgpack.encode(some().data))
    again = MaruKVConnector.build_kv_connector_stats(data)
    assert again is not None
    assert again.reduce() == some().reduce()
    assert MaruKVConnector.build_kv_connector_stats().is_empty()  # type: ignore[union-attr]


def test_they_cross_processes_as_one_of_several_connectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """MultiConnector finds the class by its name alone; what it does not find ends the engine."""
    monkeypatch.delitem(KVConnectorFactory._registry, "MaruKVConnector", raising=False)
    maru_integrations.vllm.MaruKVConnector  # noqa: B018 - as vLLM asks for it, by module path
    sent = SchedulerStats(kv_connector_stats=sent_by_several(MultiKVConnectorStats({"MaruKVConnector": some()})))
    data = msgspec.msgpack.decode(msgspec.msgpack.encode(sent))["kv_connector_stats"]
    again = MultiConnector.build_kv_connector_stats(data)
    assert again is not None
    assert again.reduce() == {"MaruKVConnector": some().reduce()}


def sent_by_several(stats: KVConnectorStats) -> dict[str, Any]:
    """As vLLM's scheduler does; some versions send what ``data`` holds as it is."""
    return stats.to_dict() if hasattr(stats, "to_dict") else stats.data


def test_prometheus_shows_what_is_known() -> None:
    metrics = MaruPromMetrics(
        SimpleNamespace(kv_transfer_config=None),
        {Counter: Counter, Gauge: Gauge, Histogram: Histogram},
        ["model_name", "engine"],
        {0: ["m", "0"]},
    )
    try:
        metrics.observe({**some().data, "unknown": 1})
        metrics.observe({"counters": {"lookups": 1, "news": 1}, "gauges": {"news": 1}})
        metrics.observe({"counters": {"lookups": -1}})  # R032: it would end vLLM's front end
        labels = {"model_name": "m", "engine": "0"}
        assert REGISTRY.get_sample_value("vllm:maru_lookups_total", {**labels, "reason": ""}) == 4
        assert REGISTRY.get_sample_value("vllm:maru_dropped_total", {**labels, "reason": "no_room"}) == 2
        assert REGISTRY.get_sample_value("vllm:maru_parked", labels) == 4
    finally:
        for metric in [*metrics._counters.values(), *metrics._gauges.values()]:
            REGISTRY.unregister(metric)
    assert not COUNTERS.keys() & GAUGES.keys()


def test_the_page_has_every_figure() -> None:
    page = (Path(__file__).parents[2] / "docs/waiting.md").read_text()
    missing = [name for name in [*COUNTERS, *GAUGES] if f"`{name}" not in page]
    assert not missing


@given(st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=5, max_size=5), st.integers(0, 2)), max_size=8))
def test_what_is_told_adds_up_and_nothing_is_told_twice(rounds: list[tuple[list[int], int]]) -> None:
    """Gauges: each when it has changed, all at first. Counters: all that was counted, once."""
    counted = MaruStats()
    report, gauges, total = Report(counted), {}, 0
    for values, amount in rounds:
        if amount:
            counted.count("loads", amount)
        now = dict(zip(GAUGES, values, strict=True))
        told = report.take(tuple(values))
        changed = {name: value for name, value in now.items() if gauges.get(name) != value}
        assert (told is None) == (not changed and not amount)
        assert report.take(tuple(values)) is None
        if told is not None:
            assert told.data["gauges"] == changed
            total += told.data["counters"].get("loads", 0)
        gauges = now
    assert total == sum(amount for _, amount in rounds)
