"""Blocks whose load failed, and what may be stored around them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from maru_core.namespace import Namespace
from maru_integrations.vllm.planning import SchedulerSettings
from maru_integrations.vllm.quarantine import BadBlocks
from maru_integrations.vllm.scheduler import MaruScheduler
from tests.vllm.fake_store import FakeHandler, FakeStore
from tests.vllm.steps import Pool, output, request


def test_a_block_is_good_again_when_all_its_slots_were_written() -> None:
    """In one step or in several that follow on each other; a gap does not count."""
    bad = BadBlocks(16)
    bad.add({7, 8})
    assert bad.first_in([5, 7, 8]) == 1
    bad.overwrite([5, 7, 8], 16, 24)
    assert bad.first_in([5, 7, 8]) == 1
    bad.overwrite([5, 7, 8], 25, 48)
    assert bad.first_in([5, 7, 8]) == 1, "slot 24 was never written"
    bad.overwrite([5, 7, 8], 24, 40)
    assert bad.first_in([5, 7, 8]) is None


def test_a_block_that_lacks_its_last_slot_is_bad_for_who_attends_to_that_slot() -> None:
    bad = BadBlocks(16)
    bad.add({7})
    bad.overwrite([7], 0, 15)
    assert bad.first_in([7], 15) is None
    assert bad.first_in([7], 16) == 0
    assert bad.first_in([7]) == 0
    bad.overwrite([7], 15, 16)
    assert bad.first_in([7]) is None


def test_another_request_that_reuses_the_block_makes_it_good() -> None:
    """A freed block may come back at any place of another table."""
    bad = BadBlocks(16)
    bad.add({7})
    bad.overwrite([7, 9], 0, 20)
    assert bad.first_in([7]) is None


@pytest.fixture
def scheduler() -> MaruScheduler:
    settings = SchedulerSettings(
        chunk_tokens=32, block_size=16, loads=True, stores=True, parks=False, lookup_timeout=0.01
    )
    made = MaruScheduler(FakeHandler(FakeStore()), Namespace.of({"test": 1}), settings)  # type: ignore[arg-type]
    made.bind_block_pool(Pool())
    return made


def test_who_attended_to_a_bad_block_stores_nothing(scheduler: MaruScheduler) -> None:
    """Two requests share failed blocks 1-2; one of them runs on while the other has not recomputed them yet."""
    for name in ("a", "b"):
        scheduler.match(request(name), 0)
    failed = SimpleNamespace(kv_connector_worker_meta=None, invalid_block_ids={1, 2})
    scheduler.worker_output(failed)
    stores = scheduler.plan_stores(output(b=([1, 2, 3, 4], 32, 32)))
    assert stores == []
    assert {1, 2, 3, 4} <= scheduler._block_pool.evicted
    stores = scheduler.plan_stores(output(a=([1, 2, 5, 6], 0, 64)))
    assert [(op.request_id, list(op.chunks)) for op in stores] == [("a", [0, 1])]
    # The blocks are good again, but what b computed on them is not.
    assert scheduler.plan_stores(output(b=([1, 2, 3, 4, 8, 9], 64, 32))) == []


def test_recomputing_over_several_steps_is_no_taint(scheduler: MaruScheduler) -> None:
    """Bad blocks that lie ahead of what a request computes are not attended to."""
    scheduler.match(request("a"), 0)
    scheduler.worker_output(SimpleNamespace(kv_connector_worker_meta=None, invalid_block_ids={1, 2, 3, 4}))
    first = scheduler.plan_stores(output(a=([1, 2, 3, 4], 0, 40)))
    second = scheduler.plan_stores(output(a=([1, 2, 3, 4], 40, 24)))
    assert [list(op.chunks) for op in [*first, *second]] == [[0], [1]]
