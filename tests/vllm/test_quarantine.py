"""Blocks whose load failed, what may be stored around them, and what leaves vLLM's prefix cache with them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from hypothesis import example, given
from hypothesis import strategies as st

from maru_core.namespace import Namespace
from maru_integrations.vllm.loading import Loads
from maru_integrations.vllm.planning import SchedulerSettings
from maru_integrations.vllm.quarantine import BadBlocks, Quarantine
from maru_integrations.vllm.requests import RequestState
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


TABLES = st.lists(st.lists(st.integers(1, 9), max_size=6, unique=True), max_size=5)
BLOCKS = st.sets(st.integers(1, 9), max_size=4)


def quarantine_of(tables: list[list[int]], pool: Pool | None) -> Quarantine:
    states = {f"r{number}": RequestState(request(f"r{number}"), None, table) for number, table in enumerate(tables)}
    return Quarantine(16, states, Loads(), pool)


@given(tables=TABLES, rounds=st.lists(BLOCKS, min_size=1, max_size=3))
@example(tables=[[1, 7, 3], [6, 7]], rounds=[{6}]).via("the first request took 7 from the second one's cache")
def test_whatever_stands_behind_a_bad_block_is_bad_and_out_of_the_cache(
    tables: list[list[int]], rounds: list[set[int]]
) -> None:
    """Whoever has it, and however the bad ones were told of; what stands before is left alone."""
    pool = Pool()
    quarantine = quarantine_of(tables, pool)
    for failed in rounds:
        quarantine.add(failed)
    bad = set(quarantine.bad.written)
    assert set().union(*rounds) <= bad == pool.evicted
    for table in tables:
        first = quarantine.bad.first_in(table)
        assert set(table[first:] if first is not None else ()) == bad & set(table)
    good = set(range(1, 10)) - bad
    assert all(quarantine.bad.first_in(table) is None for table in tables if set(table) <= good)


@given(tables=TABLES, outdated=st.sets(st.integers(0, 4)), tokens=st.lists(st.integers(0, 96), min_size=5, max_size=5))
@example(tables=[[1], [1, 2], [2]], outdated={0}, tokens=[16] * 5).via("the second passes it on")
def test_who_reads_a_block_of_an_outdated_request_is_outdated(
    tables: list[list[int]], outdated: set[int], tokens: list[int]
) -> None:
    """As far as it reads, and whoever reads from it in turn; the request is stored no more, and the flag goes down."""
    quarantine = quarantine_of(tables, None)
    states = list(quarantine.states.values())
    for number in outdated & set(range(len(states))):
        states[number].outdate()
    old = {number for number, state in enumerate(states) if state.outdated}
    quarantine.outdate_sharers(list(zip(states, tokens, strict=False)))
    assert quarantine.has_outdated == any(states[number].blocks for number in old)
    blocks = {block for number in old for block in tables[number]}
    for number, state in enumerate(states):
        if blocks & set(state.blocks[: -(-tokens[number] // 16)]):
            old.add(number)
            blocks |= set(state.blocks)
    assert {number for number, state in enumerate(states) if state.outdated} == old
    assert all(state.tainted for state in states if state.outdated)


@given(tables=TABLES)
def test_a_reset_outdates_whoever_has_blocks_and_empties_the_cache(tables: list[list[int]]) -> None:
    """Who has none may start anew; what outlived the reset leaves the cache again when it goes."""
    pool = Pool()
    quarantine = quarantine_of(tables, pool)
    quarantine.reset()
    assert pool.evicted == set(range(1, pool.num_gpu_blocks))
    assert [state.outdated for state in quarantine.states.values()] == [bool(table) for table in tables]
    assert quarantine.has_outdated == any(tables)
    pool.evicted.clear()
    for state in quarantine.states.values():
        quarantine.blocks_lost(state)
    assert pool.evicted == {block for table in tables for block in table}
