"""Settings of loads and stores on a real vLLM engine: the same answers, hits and figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import end, result_of, spawn
from tests.engine.test_tiny_engine import scenario

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

LOAD, OVERLAP = "maru_async_load", "maru_overlap_load_with_compute"


@pytest.mark.parametrize(
    ("settings", "idle"),
    [
        ({LOAD: True}, set()),
    ],
    ids=["load"],
)
def test_every_knob_starts_and_serves(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, settings: dict[str, Any], idle: set[str]
) -> None:
    runtime = tmp_path_factory.mktemp("run")
    process = spawn(
        *("-m", "tests.engine.tiny", str(tiny_model), str(runtime), "{}", json.dumps(settings)),
        *("full_prompts", "figures", "preemption"),
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
    )
    try:
        output, _ = process.communicate(timeout=500)
    finally:
        end(process)
    results = result_of(output)
    assert results["caught"] == {}
    for length, found in scenario(results, "full_prompts").items():
        assert found["warm"] == found["cold"], length
        assert found["cached"] == int(length) - 32
    found = scenario(results, "figures")
    assert found["warm"] == found["cold"]
    assert (found["stored"], found["hits"]) == (4, 256)
    assert found["metrics"]["lookups"] >= 2
    assert found["metrics"]["loads"] >= 1
    assert found["metrics"]["stores"] >= 1
    assert found["metrics"]["parked"] == found["metrics"]["storing"] == found["metrics"]["server_away"] == 0
    assert (found["leased"], found["free"]) == (0, 39)
    found = scenario(results, "preemption")
    assert all(found["same"])
    assert (found["leased"], found["free"]) == (0, 39)
    lines = [line for line in output.splitlines() if "maru.setting_without_effect" in line]
    assert {
        name for name in (OVERLAP, "maru_overlap_release_after_layers") if any(name in line for line in lines)
    } == idle
