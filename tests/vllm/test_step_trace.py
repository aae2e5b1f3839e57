"""What serve_gpu's trace of steps watches in vLLM and in the connector, and how it is shown."""

from __future__ import annotations

from typing import Any

from benchmarks.step_trace import Steps, timeline
from maru_integrations.vllm.answers import Answers
from maru_integrations.vllm.connector import MaruKVConnector
from maru_integrations.vllm.releasing import Releases
from maru_integrations.vllm.worker import MaruWorker

WATCHED = [
    (MaruKVConnector, "start_load_kv"),
    (MaruKVConnector, "wait_for_layer_load"),
    (MaruKVConnector, "wait_for_save"),
    (MaruWorker, "begin"),
    (Releases, "follow"),
    (Releases, "arrived"),
    (Answers, "load_released"),
    (Answers, "load_ended"),
]


def test_every_name_that_is_watched_exists_and_is_put_back() -> None:
    before = [getattr(owner, name) for owner, name in WATCHED]
    steps = Steps()
    steps.begin()
    now = [getattr(owner, name) for owner, name in WATCHED]
    assert all(one is not other for one, other in zip(now, before, strict=True))
    assert steps.end() == {"steps": [], "loads": []}
    assert [getattr(owner, name) for owner, name in WATCHED] == before


def test_steps_and_loads_are_shown_in_the_order_of_time() -> None:
    def step(at: float, device: dict[str, float], **more: float) -> dict[str, Any]:
        cpu = {"entered": at, "bound": at + 0.001, "submitted": at + 0.004, "settled": at + 0.009}
        counts = {"requests": 3, "tokens": 7, "received": 1, "reads": 1, "waited": 0.002}
        return counts | more | {"cpu": cpu, "device": device}

    late = step(10.03, {"entered": 10.04, "bound": 10.041, "submitted": 10.05}, requests=8)
    idle = step(10.01, {}) | {"cpu": {"entered": 10.01}}
    lines = timeline({"steps": [idle, late], "loads": [(10.02, "begun", "a"), (10.0, "ended", "b")]}, 10.0)
    assert [line.split() for line in lines[1:]] == [
        ["0.0", "load", "ended:", "b"],
        ["10.0", "3", "7", "1", "1", "-", "-", "2.0", "-", "-", "-", "-"],
        ["20.0", "load", "begun:", "a"],
        ["30.0", "8", "7", "1", "1", "1.0", "3.0", "2.0", "5.0", "40.0", "1.0", "9.0"],
    ]
