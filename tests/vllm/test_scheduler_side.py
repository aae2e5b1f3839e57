"""What the scheduler side makes of a load's answer: who may be promised what again, and what is planned for storing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("vllm")

from attrs import evolve

from maru_core.errors import MaruError
from maru_core.keys import KeyChain
from maru_core.namespace import Namespace
from maru_integrations.vllm.metadata import LATE, LoadOp, LoadResult, MaruWorkerMetadata
from maru_integrations.vllm.planning import SchedulerSettings
from maru_integrations.vllm.scheduler import MaruScheduler
from tests.vllm.fake_store import FakeHandler, FakeStore
from tests.vllm.steps import Pool, later, output, request

CHUNK, BLOCK, CHUNKS = 32, 16, 6
NAMESPACE = Namespace.of({"test": 1})
SETTINGS = SchedulerSettings(
    chunk_tokens=CHUNK, block_size=BLOCK, loads=True, stores=True, parks=True, lookup_timeout=0.5
)


class Table:
    """A request's blocks, as vLLM shows them."""

    def __init__(self, first: int) -> None:
        self.blocks = list(range(first, first + CHUNKS * CHUNK // BLOCK))

    def get_block_ids(self) -> tuple[list[int], ...]:
        return (self.blocks,)


class Side:
    """A scheduler side whose pool has all six chunks of every request's prompt."""

    def __init__(self, **settings: Any) -> None:
        self.store = FakeStore()
        handler = FakeHandler(self.store)
        chain = KeyChain(NAMESPACE.root, CHUNK)
        chain.extend(request("any").all_token_ids, CHUNKS * CHUNK)
        grants = handler.reserve(chain.keys, 8, chain.keys, weights_epoch=0)
        handler.commit(grants, checksums=False)
        self.keys = chain.keys
        self.side = MaruScheduler(handler, NAMESPACE, evolve(SETTINGS, **settings))  # type: ignore[arg-type]

    def load(self, name: Any, local: int = 0, first: int = 1) -> LoadOp:
        """Promise all that is there and let vLLM take it."""
        tokens, parked = self.side.match(name, local)
        assert parked
        self.side.after_alloc(name, Table(first), tokens)
        (op,) = self.side.take_loads()
        return op

    def tell(self, *results: LoadResult, bad: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        """A step's answers."""
        message = MaruWorkerMetadata(list(results))
        self.side.worker_output(SimpleNamespace(kv_connector_worker_meta=message, invalid_block_ids=set(bad)))

    def preempt(self, name: str) -> None:
        """A step in which the request loses its blocks."""
        step = output()
        step.preempted_req_ids = {name}
        self.side.plan_stores(step)


def test_the_object_that_failed_is_not_promised_again_wherever_its_load_began() -> None:
    """The lease begins at the first chunk; vLLM has one itself by the time it takes what was promised."""
    world = Side()
    first, second = request("a"), request("b")
    assert world.side.match(first, 0) == (CHUNKS * CHUNK, True)
    op = world.load(first, local=CHUNK)
    assert list(op.keys) == world.keys[1:]
    world.tell(LoadResult(op.load_id, 2))
    assert world.side.match(second, 0) == (3 * CHUNK, True), "the first three were not found bad"
    world.side.finished(first)
    world.side.finished(second)
    assert not world.store.leases


def test_a_request_whose_load_failed_asks_no_second_time() -> None:
    """Also when the object was not at fault, and the request loses its blocks and starts over."""
    world, late, other = Side(), request("late"), request("other")
    op = world.load(late)
    world.tell(LoadResult(op.load_id, 0, LATE))
    lookups = world.store.lookups
    assert world.side.match(late, 0) == (0, False)
    world.side.after_alloc(late, Table(1), 0)
    world.preempt("late")
    assert world.side.match(late, 0) == (0, False)
    assert world.store.lookups == lookups
    assert world.side.match(other, 0) == (CHUNKS * CHUNK, True)
    world.side.finished(late)
    world.side.finished(other)
    assert not world.store.leases


def test_the_load_of_a_request_that_is_gone_is_stopped_once() -> None:
    """Not one that was answered before, and not that of anybody else."""
    world, gone, stays, done = Side(), request("gone"), request("stays"), request("done")
    first, _, third = (world.load(name, first=number) for number, name in ((1, gone), (20, stays), (40, done)))
    world.tell(LoadResult(third.load_id, CHUNKS))
    world.side.finished(done)
    world.side.finished(gone)
    assert world.side.take_cancelled() == [first.load_id]
    assert world.side.take_cancelled() == []
    assert len(world.store.leases) == 2, "until the worker has answered"


@pytest.mark.parametrize("known", [True, False], ids=["planned before", "planned in this step"])
def test_who_loses_its_blocks_has_the_load_into_those_stopped(known: bool) -> None:
    """A load that was planned since the last step goes to blocks that were given after that, and goes on."""
    world, victim, other = Side(), request("victim"), request("other")
    spared = world.load(other, first=20)
    world.side.plan_stores(output())
    op = world.load(victim)
    if known:
        world.side.plan_stores(output())
    world.preempt("victim")
    assert world.side.take_preempted() == (["victim"] if known else [])
    assert world.side.take_cancelled() == ([op.load_id] if known else [])
    assert world.side._parking.admitted == world.side._parking.loading == (1 if known else 2)
    world.tell(LoadResult(op.load_id, CHUNKS), LoadResult(spared.load_id, CHUNKS))
    assert not world.store.leases


def test_a_load_that_could_not_be_planned_leaves_no_share_behind() -> None:
    """Its request is told of the failure by a worker, like every other one, and keeps its share until it runs."""
    world, name = Side(), request("a")
    tokens, parked = world.side.match(name, 0)
    assert (tokens, parked) == (CHUNKS * CHUNK, True)
    world.side.fail_load(name, Table(1), tokens)
    (op,) = world.side.take_loads()
    assert list(op.blocks) == Table(1).blocks
    assert world.side._parking.admitted == 1
    assert world.side._parking.loading == 0, "its place in the window is somebody else's"
    world.tell(LoadResult(op.load_id, 0))
    assert world.side.match(name, 0) == (0, False)
    world.side.after_alloc(name, Table(1), 0)
    assert world.side._parking.is_empty
    world.side.finished(name)
    assert world.side._parking.is_empty
    assert not world.store.leases


@pytest.mark.parametrize("ends", [True, False], ids=["ended", "preempted"])
def test_what_was_computed_on_a_load_is_known_until_that_load_has_ended(ends: bool) -> None:
    """The request went on early and has its blocks no more: its load fails later, and vLLM's cache must hear of it all.

    With asynchronous scheduling the step after the one in which the load fails is planned before that is known.
    """
    world, name, pool = Side(overlap=True), request("a"), Pool()
    world.side.bind_block_pool(pool)
    op, table = world.load(name), [*Table(1).blocks, 50]
    world.side.after_alloc(name, Table(1), 0)
    world.side.plan_stores(output(a=(table, CHUNKS * CHUNK, 8)))
    if ends:
        world.side.finished(name)
    else:
        world.preempt("a")
    for _ in range(2):
        world.tell()
        world.side.plan_stores(output())
    world.tell(LoadResult(op.load_id, 2), bad=set(table[4:12]))
    assert pool.evicted == set(table[4:])
    assert world.side._loads.is_empty


def chunks_of(ops: list[Any]) -> list[list[int]]:
    return [list(op.chunks) for op in ops]


def test_who_starts_over_stores_what_it_computes_in_each_life() -> None:
    """What came out of the pool, or was stored, in an earlier life may be gone by then."""
    world, name, table = Side(), request("a"), Table(1).blocks
    op = world.load(name)
    world.tell(LoadResult(op.load_id, CHUNKS))
    world.side.after_alloc(name, Table(1), 0)
    assert world.side.plan_stores(output(a=(table, CHUNKS * CHUNK, 8))) == [], "it came out of the pool"
    for _ in range(2):
        world.preempt("a")
        stored = world.side.plan_stores(output(a=(table, 0, CHUNKS * CHUNK)))
        assert chunks_of(stored) == [list(range(CHUNKS))]


def test_who_attended_to_a_bad_block_stores_again_when_it_starts_over() -> None:
    world, name = Side(), request("a")
    world.side.match(name, 0)
    world.tell(bad={1, 2})
    assert world.side.plan_stores(output(a=([1, 2, 3, 4], 32, 32))) == []
    world.preempt("a")
    assert chunks_of(world.side.plan_stores(output(a=([5, 6, 7, 8], 0, 64)))) == [[0, 1]]


def test_a_request_that_reads_what_its_load_left_is_reported_in_the_step_that_does() -> None:
    """vLLM overlooks failed blocks of a request that it has as received and that had no room to run."""
    world = Side()
    op = world.load(request("a"))
    blocks = Table(1).blocks
    world.tell(LoadResult(op.load_id, 2, LATE), bad=set(blocks[4:]))
    # It runs behind what it believes to be loaded.
    world.side.plan_stores(output(a=(blocks, CHUNKS * CHUNK, 8)))
    assert world.side.take_undefined() == [blocks[4]]
    world.side.plan_stores(output(a=(blocks, CHUNKS * CHUNK, 8)))
    assert world.side.take_undefined() == [blocks[4]], "vLLM may have taken back another one that shares the block"
    world.side.plan_stores(output(a=(blocks, 4 * BLOCK, CHUNKS * CHUNK - 4 * BLOCK)))
    assert world.side.take_undefined() == []
    world.tell(bad={blocks[7]})
    world.side.plan_stores(output(a=(blocks, CHUNKS * CHUNK, 8)))
    assert world.side.take_undefined() == [blocks[7]], "each time that it happens"


def test_blocks_that_a_failed_load_has_given_back_are_not_its_requests_any_more() -> None:
    """Another load into some of them fails, and what a third request has computed in others is good."""
    world, third = Side(), request("c")
    op = world.load(request("a"), first=20)
    world.tell(LoadResult(op.load_id, 0, LATE), bad=set(op.blocks))
    assert world.side.match(request("a"), 0) == (0, False)  # and vLLM has no room for it
    assert world.side.match(third, CHUNKS * CHUNK) == (0, False)
    world.side.plan_stores(output(c=([22, 23, 24, 25], 0, 4 * BLOCK)))
    op = world.load(request("b"), first=10)
    world.tell(LoadResult(op.load_id, 5, LATE), bad={20, 21})
    world.side.plan_stores(output(c=([22, 23, 24, 25], 4 * BLOCK - 1, 1)))
    assert world.side.take_undefined() == []


def test_who_could_load_nothing_keeps_its_share_until_it_runs() -> None:
    """vLLM goes on reserving its blocks: whoever got its share would not be let in, and neither would ever run."""
    world = Side(block_budget=16)
    first, second = request("a"), request("b")
    op = world.load(first)
    world.tell(LoadResult(op.load_id, 0, LATE), bad=set(op.blocks))
    assert world.side.match(second, 0) == (None, False)
    assert world.side.match(first, 0) == (0, False)
    world.side.after_alloc(first, Table(1), 0)
    assert world.side.match(second, 0) == (CHUNKS * CHUNK, True)


@pytest.mark.parametrize(
    "part", ["_matcher.new_step", "_promises.drop_old_questions", "_measure_step", "_planner.plan"]
)
def test_a_step_whose_plan_fails_leaves_no_gap_in_a_block_table(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else later blocks would be taken for those that are missing, and stored under the keys of others."""
    world, name = Side(stores_later=True), request("a")
    world.side._requests.of(name)
    world.side.plan_stores(output(a=([11], 0, 16)))
    owner, _, method = part.rpartition(".")
    kind = type(getattr(world.side, owner) if owner else world.side)
    with monkeypatch.context() as patch:
        patch.setattr(kind, method, Mock(side_effect=RuntimeError))
        with pytest.raises(RuntimeError):
            world.side.plan_stores(later(a=([12], 16, 16)))
    blocks = list(range(13, 24))
    (op,) = world.side.plan_stores(later(a=(blocks, 32, 168)))
    assert list(op.chunks) == list(range(CHUNKS))
    assert list(op.blocks) == [11, 12, *blocks[:10]]
    with monkeypatch.context() as patch:
        patch.setattr(kind, method, Mock(side_effect=RuntimeError))
        step = output(b=([1], 0, 1))
        world.side._requests.of(request("b"))
        step.preempted_req_ids = {"a"}
        with pytest.raises(RuntimeError):
            world.side.plan_stores(step)
    assert world.side.take_preempted() == ["a"], "its store would read what is somebody else's"


def test_a_step_whose_plan_fails_leaves_no_store_that_nobody_answers() -> None:
    """The first request's store was planned when the second one's blocks turned out to be too few."""
    world, names = Side(stores_later=True), [request("a"), request("b")]
    names[1].all_token_ids = list(range(300, 500))
    for name in names:
        world.side._requests.of(name)
    with pytest.raises(MaruError, match="request b"):
        world.side.plan_stores(output(a=(Table(1).blocks, 0, 200), b=([20], 0, 200)))
    assert not world.side._stores.outstanding
    assert not world.side.hold("a")


def test_who_resumes_has_the_blocks_of_that_step_alone() -> None:
    """Those that it had before are others' by now."""
    world = Side()
    world.side._requests.of(request("a"))
    world.side.plan_stores(output(a=([11], 0, 16)))
    step = later(a=([21, 22], 0, 32))
    step.scheduled_cached_reqs.resumed_req_ids = {"a"}
    (op,) = world.side.plan_stores(step)
    assert list(op.blocks) == [21, 22]


def test_who_goes_on_after_a_reset_leaves_nothing_in_vllms_cache() -> None:
    """Neither when it ends nor when it loses its blocks, in which case it starts over with the new weights."""
    world, pool = Side(), Pool()
    world.side.bind_block_pool(pool)
    for name, blocks in (("a", [11, 12, 13]), ("b", [21, 22, 23])):
        world.side._requests.of(request(name))
        world.side.plan_stores(output(**{name: (blocks, 0, 40)}))
    assert world.side.reset()
    assert pool.evicted == set(range(1, 100)), "also what others have left there"
    pool.evicted.clear()
    world.side.plan_stores(later(a=([14], 40, 24), b=([24], 40, 24)))
    world.preempt("a")
    assert pool.evicted == {11, 12, 13, 14}
    world.side.finished(request("b"))
    assert pool.evicted == {11, 12, 13, 14, 21, 22, 23, 24}
    assert chunks_of(world.side.plan_stores(output(a=([5, 6], 0, 32)))) == [[0]]


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_token_ids": None},
        {"prompt_token_ids": []},
        {"prompt_embeds": object()},
        {"mm_features": [object()]},
        {"pooling_params": object()},
        {"num_tokens": CHUNK - 1},
        {"num_tokens": 1},
    ],
    ids=["no tokens", "empty", "embeddings", "images", "pooling", "short", "one token"],
)
def test_who_has_no_identity_or_no_whole_chunk_is_not_asked_for(changes: dict[str, Any]) -> None:
    """R024: without token ids every such request would have the same key; never a negative answer."""
    world, odd = Side(parks=False), request("a")
    odd.__dict__.update(changes)
    assert world.side.match(odd, 0) == (0, False)
    world.side.after_alloc(odd, Table(1), 0)
    if "num_tokens" not in changes:
        assert world.side.plan_stores(output(a=(Table(1).blocks, 0, CHUNKS * CHUNK))) == []
    assert world.store.lookups == 0
