"""Stores in their order, bounded, each answered once and none while its pages are being read."""

from __future__ import annotations

from collections import Counter

import pytest

pytest.importorskip("vllm")

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from maru_core.brake import Pull
from maru_integrations.vllm.metadata import NO_ROOM, PREEMPTED, QUEUE_FULL, StoreOp
from maru_integrations.vllm.savequeue import Saved, SaveQueue, StoreJob

LIMIT = 10


def op(store_id: int, chunks: int, request: str = "a") -> StoreOp:
    return StoreOp(request, range(chunks), [b""] * chunks, [b""] * chunks, range(chunks), store_id, True)


def test_the_newest_is_dropped_when_too_much_waits_and_a_large_one_is_taken_alone() -> None:
    queue = SaveQueue(LIMIT)
    assert queue.add(op(0, 30), None, 0, (30,), 30) == []
    assert queue.add(op(1, 30), None, 0, (30,), 30) == [], "behind one that has not begun"
    assert queue.add(op(2, 1), None, 0, (1,), 1) == [Saved(op(2, 1), 0, QUEUE_FULL)]
    job = queue.take()
    assert job is not None
    assert queue.begin_copy(job)
    queue.end_copy(job)
    assert queue.moved(job, 30, "") == [Saved(job.op, 30, "")]
    assert queue.add(op(3, 30), None, 0, (30,), 30) == []
    assert queue.add(op(4, 1), None, 0, (1,), 1) == [Saved(op(4, 1), 0, QUEUE_FULL)]


def test_small_ones_wait_up_to_the_limit() -> None:
    queue = SaveQueue(LIMIT)
    for store_id in range(6):
        assert queue.add(op(store_id, 2), None, 0, (2,), 2) == []
    assert queue.waiting_bytes == LIMIT
    assert queue.add(op(6, 1), None, 0, (1,), 1) == [Saved(op(6, 1), 0, QUEUE_FULL)]


class Stores(RuleBasedStateMachine):
    """A saver that does one thing at a time, and vLLM's thread that preempts at every moment."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = SaveQueue(LIMIT)
        self.ops: list[StoreOp] = []
        self.kept: Counter[int] = Counter()
        self.ended: dict[int, Saved] = {}
        self.current: StoreJob | None = None
        self.is_copying = False
        self.lost: set[int] = set()

    def heard(self, ended: list[Saved]) -> None:
        for end in ended:
            assert end.op.store_id not in self.ended, "answered twice"
            assert not (self.is_copying and self.current is not None and self.current.op is end.op)
            assert end.kept == self.kept[end.op.store_id]
            assert bool(end.reason) is (end.kept < len(end.op.keys))
            self.ended[end.op.store_id] = end

    @rule(chunks=st.integers(1, 12), step=st.integers(1, 3), request=st.sampled_from("abc"))
    def add(self, chunks: int, step: int, request: str) -> None:
        store = op(len(self.ops), chunks, request)
        self.ops.append(store)
        cuts = (*range(step, chunks, step), chunks)
        self.heard(self.queue.add(store, None, 0, cuts, chunks))

    @precondition(lambda self: self.current is None)
    @rule()
    def take(self) -> None:
        waiting = [store for store in self.ops if store.store_id not in self.ended]
        self.current = self.queue.take()
        assert (None if self.current is None else self.current.op) is (waiting[0] if waiting else None)

    @precondition(lambda self: self.current is not None and not self.is_copying)
    @rule()
    def begin(self) -> None:
        assert self.current is not None
        self.is_copying = self.queue.begin_copy(self.current)
        assert self.is_copying is (self.current.op.store_id not in self.lost), "no page is read after it was taken away"
        if not self.is_copying:
            self.heard(self.queue.moved(self.current, 0, PREEMPTED))
            self.current = None

    @precondition(lambda self: self.is_copying)
    @rule(reason=st.sampled_from(["", "", "", NO_ROOM]), cut=st.integers(0, 5))
    def end(self, reason: str, cut: int) -> None:
        """A copy that was told to stop may have made some of its copies; what it made is kept unless it is void."""
        job = self.current
        assert job is not None
        self.queue.end_copy(job)
        self.is_copying = False
        kept = len(job.piece)
        if job.op.store_id in self.lost:
            kept = min(cut, kept)
        if job.void:
            kept = 0
        if kept < len(job.piece):
            reason = PREEMPTED
        elif reason:
            kept = 0
        self.kept[job.op.store_id] += kept
        self.heard(self.queue.moved(job, kept, reason))
        self.current = None

    @rule(requests=st.sets(st.sampled_from("abc")), patient=st.booleans())
    def preempt(self, requests: set[str], patient: bool) -> None:
        self.lost |= {store.store_id for store in self.ops if store.request_id in requests}
        self.heard(self.queue.cancel(requests))
        copying = self.queue.copying(requests)
        running = self.current is not None and self.current.op.request_id in requests
        assert copying is (self.is_copying and running)
        if copying and not patient:
            self.queue.void(requests)
            assert self.current is not None
            assert self.current.void

    @invariant()
    def no_more_waits_than_may(self) -> None:
        waiting = [job.nbytes for job in self.queue.jobs[1:]]
        assert len(waiting) < 2 or sum(waiting) <= LIMIT

    @invariant()
    def a_copy_is_told_to_stop_exactly_when_its_blocks_are_lost(self) -> None:
        lost = self.is_copying and self.current is not None and self.current.op.store_id in self.lost
        assert self.queue.pull() is (Pull.STOP if lost else Pull.GO_ON)

    def teardown(self) -> None:
        self.is_copying = False
        self.heard(self.queue.end_all())
        assert set(self.ended) == set(range(len(self.ops)))


TestStores = Stores.TestCase
TestStores.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
