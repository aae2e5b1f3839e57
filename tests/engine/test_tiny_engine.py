"""A real vLLM engine on a tiny random model; the scenarios run once, each test judges one of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import IN_PROCESS, end, result_of, spawn

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def results(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    runtime = tmp_path_factory.mktemp("run")
    process = spawn("-m", "tests.engine.tiny", str(tiny_model), str(runtime), **IN_PROCESS)
    try:
        output, _ = process.communicate(timeout=500)
    finally:
        end(process)
    found: dict[str, Any] = result_of(output)
    return found


def scenario(results: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = results[name]
    assert "error" not in found, found["error"]
    return found


def test_every_step_size_stores_the_same_chunks(results: dict[str, Any]) -> None:
    found = scenario(results, "step_sizes")
    assert len(found) == 5
    for size, run in found.items():
        assert run["present"] == 330 // 64, size
        assert run["answer"] == found["512"]["answer"], size
        assert run["warm"] == {"answers": [run["answer"]], "cached": [320], "skipped": 0}, size


@pytest.mark.parametrize("length", [64, 128, 512])
def test_a_prompt_of_whole_chunks_leaves_one_block_to_compute(results: dict[str, Any], length: int) -> None:
    found = scenario(results, "full_prompts")[str(length)]
    assert found["warm"] == {"answers": [found["cold"]], "cached": [length - 32], "skipped": 0}


def test_preempted_requests_resume_with_hits(results: dict[str, Any]) -> None:
    found = scenario(results, "preemption")
    assert found["preemptions"] > 0
    assert found["resumed_with"]
    assert all(found["same"])
    assert found["leased"] == 0
    assert found["free"] == 39


def test_a_failed_load_is_recomputed_and_nothing_of_it_is_stored(results: dict[str, Any]) -> None:
    found = scenario(results, "failed_load")
    assert found["tried"] == 4
    assert found["answer"] == found["expected"]
    assert found["objects"] == 6
    assert all(found["prefix_same"])
    assert all(found["close"])
    assert found["leased"] == 0


def test_an_abort_during_a_failing_load_leaves_no_bad_blocks(results: dict[str, Any]) -> None:
    found = scenario(results, "aborted_load")
    assert len(found["aborted"]) == 1
    assert found["answer"] == found["cold"]
    assert found["free"][0] == found["free"][1]
    assert found["leased"] == 0
    assert found["states"] == 0


def test_parked_hits_are_loaded_between_steps(results: dict[str, Any]) -> None:
    found = scenario(results, "parked")
    assert found["warm"] == {"answers": found["cold"], "cached": [256] * 3, "skipped": 0}
    assert found["failed"]["answers"] == found["cold"]
    assert found["leased"] == 0
    assert found["parked"] == 0


def test_reset_with_the_connector_flag_empties_the_namespace(results: dict[str, Any]) -> None:
    found = scenario(results, "reset")
    assert found["before"] == 4
    assert found["done"] is True
    assert found["present"] == 0
    assert found["warm"]["cached"] == [0]


@pytest.mark.parametrize("demote", [True, False])
def test_several_pools_of_several_media_serve_one_prefix(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, demote: bool
) -> None:
    runtime = tmp_path_factory.mktemp("run")
    settings = {
        "maru_storage_backend": "mixed",
        "maru_cpu_pool_size": "2M",
        "maru_cxl_pool_size": "16M",
        "maru_cxl_pool_path": str(runtime / "device"),
        "maru_demote": demote,
    }
    (runtime / "device").mkdir()
    process = spawn(
        *("-m", "tests.engine.tiny", str(tiny_model), str(runtime), "{}", json.dumps(settings), "tiers"),
        **IN_PROCESS,
    )
    try:
        output, _ = process.communicate(timeout=500)
    finally:
        end(process)
    results = result_of(output)
    found = scenario(results, "tiers")
    assert found["warm"] == found["cold"]
    assert found["found"] == [300 // 64] * 10
    assert found["hits"] == 10 * 256
    assert found["same"]
    assert found["leased"] == 0
    cpu, cxl = found["pools"]
    assert (cpu["backend"], cxl["backend"]) == ("cpu", "cxl")
    assert cpu["objects"] + cxl["objects"] == 40
    assert cpu["objects"] > 0
    assert bool(cpu["demoted_out"]) is demote
    assert results["caught"] == {}


def test_engines_share_layerwise_objects_with_their_like_and_with_no_others(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Two layerwise engines, then a chunkwise one, on one server: answers, hits, and bytes layer by layer."""
    runtime = tmp_path_factory.mktemp("run")
    found = []
    for layerwise in (True, True, False):
        settings = json.dumps({"maru_use_layerwise": layerwise, "maru_idle_exit": 60})
        process = spawn(
            *("-m", "tests.engine.tiny", str(tiny_model), str(runtime), "{}", settings, "one_prompt"),
            **IN_PROCESS,
        )
        try:
            output, _ = process.communicate(timeout=300)
        finally:
            end(process)
        results = result_of(output)
        assert results["caught"] == {}
        found.append(scenario(results, "one_prompt"))
    first, second, other = found
    chunks, layers = 300 // 64, 3
    assert [run["hits"] for run in found] == [0, chunks * 64, 0]
    assert [run["objects"] for run in found] == [chunks * layers, chunks * layers, chunks]
    assert first["answer"] == second["answer"] == other["answer"]
    assert first["layers"] == second["layers"] == other["layers"]
    assert len({digest for chunk in first["layers"] for digest in chunk}) == chunks * layers
    assert [run["leased"] for run in found] == [0, 0, 0]


def test_nothing_was_caught_inside_the_connector(results: dict[str, Any]) -> None:
    assert results["caught"] == {}
