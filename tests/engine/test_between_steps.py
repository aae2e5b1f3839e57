"""A real vLLM engine whose loads and stores run between steps, in both storage formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import IN_PROCESS, end, result_of, spawn
from tests.engine.test_tiny_engine import scenario

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

ALL = {
    "maru_async_load": True,
    "maru_async_store": True,
    "maru_overlap_load_with_compute": True,
    "maru_overlap_spare_decodes": False,  # how many are released early is asked for
}


@pytest.fixture(scope="module", params=[ALL, {**ALL, "maru_use_layerwise": True}], ids=["chunkwise", "layerwise"])
def results(request: Any, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    runtime = tmp_path_factory.mktemp("run")
    process = spawn(
        *("-m", "tests.engine.tiny", str(tiny_model), str(runtime), "{}", json.dumps(request.param)),
        *("threads", "failures", "torn_block", "stalled_store", "preemption", "killed"),
        **IN_PROCESS,
    )
    try:
        output, _ = process.communicate(timeout=500)
    finally:
        end(process)
    found: dict[str, Any] = result_of(output)
    return found


def test_answers_hits_and_bytes_are_those_of_an_engine_that_waits(results: dict[str, Any]) -> None:
    found = scenario(results, "threads")
    assert found["stored"] == [4] * 4
    for way in ("parked", "overlapped"):
        assert found[way]["answers"] == found["cold"], way
        assert found[way]["hits"] == 4 * 256, way
        assert found[way]["differing"] == [], way
    assert found["parked"]["early"] == 0
    assert found["overlapped"]["early"] == 4
    assert found["again"] == found["cold"]
    assert found["same_bytes"], "asynchronous and synchronous stores write the same objects"
    assert found["leased"] == 0
    assert found["free"] == 39


def test_failed_loads_are_recomputed_before_and_after_a_release(results: dict[str, Any]) -> None:
    found = scenario(results, "failures")
    assert found["stored"] == found["stored_again"] == [4] * 2
    assert found["failed"] == [2, 2]
    assert found["before"] == found["cold"]
    assert found["after"] == found["expected"]
    assert all(found["behind"]), "what is stored behind a failed load was computed again"
    assert found["leased"] == 0
    assert found["free"] == 39


def test_a_single_block_that_was_not_filled_is_recomputed(results: dict[str, Any]) -> None:
    """What is left out of the report of a load that failed would be read."""
    found = scenario(results, "torn_block")
    assert (found["failed"], found["tokens"]) == (1, 32)
    assert found["answer"] == found["cold"]
    assert found["leased"] == 0
    assert found["free"] == 39


def test_blocks_of_a_finished_request_stay_what_they_are_until_its_store_is_out(results: dict[str, Any]) -> None:
    """Others that come meanwhile write to all blocks that there are but these."""
    found = scenario(results, "stalled_store")
    assert found["stored"] == 4
    assert found["same_bytes"]
    assert found["held"] == 10
    assert found["leased"] == 0
    assert found["free"] == 39


def test_preempted_requests_resume_while_stores_run(results: dict[str, Any]) -> None:
    found = scenario(results, "preemption")
    assert found["preemptions"] > 0
    assert all(found["same"])
    assert found["leased"] == 0
    assert found["free"] == 39


def test_a_server_that_is_killed_while_requests_are_parked_costs_time_only(results: dict[str, Any]) -> None:
    found = scenario(results, "killed")
    assert found["stored"] == [4] * 3
    assert found["answers"] == found["cold"]
    assert found["hits_again"] > 0
    assert found["leased"] == 0
    assert found["free"] == 39


def test_nothing_was_caught_inside_the_connector(results: dict[str, Any]) -> None:
    assert results["caught"] == {}
