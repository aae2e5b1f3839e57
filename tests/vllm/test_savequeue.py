"""Stores in their order, bounded, each answered once and none while its pages are being read."""

from __future__ import annotations

from collections import Counter

import pytest

pytest.importorskip("vllm")

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from maru_core.brake import Pull
from maru_integrations.vllm.metadata import LATE, NO_ROOM, PREEMPTED, QUEUE_FULL, StoreOp
from maru_integrations.vllm.savequeue import Saved, SaveQueue, StoreJob

LIMIT = 10
TIMEOUT, GRACE = 30.0, 1.0


def op(store_id: int, chunks: int, request: str = "a") -> StoreOp:
    return StoreOp(request, range(chunks), [b""] * chunks, [b""] * chunks, range(chunks), store_id, True)


def test_the_newest_is_dropped_when_too_much_waits_and_a_large_one_is_taken_alone() -> None:
    queue = SaveQueue(LIMIT)
    assert queue.add(op(0, 30), None, 0, (30,), 30) == []
    assert queue.add(op(1, 30), None, 0, (30,), 30) == [], "behind one that has not begun"
    assert queue.add(op(2, 1), None, 0, (1,), 1) == [Saved(op(2, 1), 0, QUEUE_FULL)]
    job = queue.take(0.0)
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


@pytest.mark.parametrize("copying", [True, False])
def test_work_that_goes_on_although_it_was_told_to_stop_ends_everything_once(copying: bool) -> None:
    queue = SaveQueue(LIMIT, TIMEOUT, GRACE)
    queue.add(op(0, 2), None, 0, (1, 2), 2)
    queue.add(op(1, 1, "b"), None, 0, (1,), 1)
    job = queue.take(100.0)
    assert job is not None
    if copying:
        assert queue.begin_copy(job)
    assert queue.look(129.9) == []
    assert not job.cancelled
    assert queue.look(500.0) == [], "the first look may come late, so it only tells"
    assert queue.pull() is (Pull.STOP if copying else Pull.GO_ON)
    assert queue.look(500.9) == []
    assert queue.stuck is None
    assert queue.look(501.0) == [Saved(op(0, 2), 0, LATE), Saved(op(1, 1, "b"), 0, LATE)]
    assert queue.stuck is job
    assert job.void
    assert queue.look(600.0) == []
    assert queue.add(op(2, 1), None, 0, (1,), 1) == [Saved(op(2, 1), 0, LATE)]
    assert queue.pull() is Pull.STOP, "whenever it looks"
    assert not queue.begin_copy(job)
    queue.end_copy(job)
    assert queue.moved(job, 0, PREEMPTED) == []
    assert queue.stuck is None
    assert queue.pull() is Pull.GO_ON
    assert queue.add(op(3, 1), None, 0, (1,), 1) == []
    assert queue.take(700.0) is not None
    assert queue.look(700.5) == [], "its own time"


def test_a_late_store_that_stops_keeps_what_it_has_and_the_next_one_goes_on() -> None:
    queue = SaveQueue(LIMIT, TIMEOUT, GRACE)
    for number in range(2):
        queue.add(op(number, 2), None, 0, (2,), 2)
    job = queue.take(0.0)
    assert job is not None
    assert queue.begin_copy(job)
    assert queue.look(30.0) == []
    queue.end_copy(job)
    assert queue.moved(job, 1, PREEMPTED) == [Saved(op(0, 2), 1, LATE)]
    following = queue.take(30.5)
    assert following is not None
    assert queue.look(40.0) == []
    assert queue.begin_copy(following)
    assert queue.pull() is Pull.GO_ON


class Stores(RuleBasedStateMachine):
    """A saver that does one thing at a time, and vLLM's thread that preempts and looks at the time at every moment."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = SaveQueue(LIMIT, TIMEOUT, GRACE)
        self.ops: list[StoreOp] = []
        self.now = 0.0
        self.began = 0.0
        #: When the work under way was told to stop because it is late.
        self.told: float | None = None
        self.stuck = False
        self.kept: Counter[int] = Counter()
        self.ended: dict[int, Saved] = {}
        self.current: StoreJob | None = None
        self.is_copying = False
        self.lost: set[int] = set()

    def heard(self, ended: list[Saved]) -> None:
        for end in ended:
            assert end.op.store_id not in self.ended, "answered twice"
            if self.current is not None and self.current.op is end.op and self.is_copying:
                assert self.current.void, "answered while it is read from, and may be committed"
                assert end.reason == LATE
            assert end.kept == self.kept[end.op.store_id]
            assert bool(end.reason) is (end.kept < len(end.op.keys))
            self.ended[end.op.store_id] = end

    @rule(chunks=st.integers(1, 12), step=st.integers(1, 3), request=st.sampled_from("abc"))
    def add(self, chunks: int, step: int, request: str) -> None:
        store = op(len(self.ops), chunks, request)
        self.ops.append(store)
        cuts = (*range(step, chunks, step), chunks)
        ended = self.queue.add(store, None, 0, cuts, chunks)
        assert not self.stuck or ended == [Saved(store, 0, LATE)]
        self.heard(ended)

    @precondition(lambda self: self.current is None)
    @rule()
    def take(self) -> None:
        waiting = [store for store in self.ops if store.store_id not in self.ended]
        self.current = self.queue.take(self.now)
        self.began = self.now
        assert (None if self.current is None else self.current.op) is (waiting[0] if waiting else None)

    @precondition(lambda self: self.current is not None and not self.is_copying)
    @rule()
    def begin(self) -> None:
        assert self.current is not None
        self.is_copying = self.queue.begin_copy(self.current)
        stopped = self.current.op.store_id in self.lost or self.told is not None
        assert self.is_copying is not stopped, "no page is read after it was taken away"
        if not self.is_copying:
            self.returned(0, PREEMPTED)

    def returned(self, kept: int, reason: str) -> None:
        """The work under way is over, however late."""
        job = self.current
        assert job is not None
        stuck, late, self.stuck, self.told = self.stuck, self.told is not None, False, None
        ended = self.queue.moved(job, kept, reason)
        assert not stuck or not ended, "it was answered long ago"
        if ended and reason == PREEMPTED:
            assert ended[0].reason == (LATE if late else PREEMPTED)
        self.heard(ended)
        self.current = None

    @rule(seconds=st.sampled_from([0.4, 1.0, 29.0, 31.0]))
    def look(self, seconds: float) -> None:
        """vLLM's thread looks once per step, and steps may take long."""
        self.now += seconds
        waiting = [store.store_id for store in self.ops if store.store_id not in self.ended]
        ended = self.queue.look(self.now)
        if self.current is not None and not self.stuck:
            if self.told is None:
                self.told = self.now if self.now - self.began >= TIMEOUT else None
            elif self.now - self.told >= GRACE:
                self.stuck = True
                assert [end.op.store_id for end in ended] == waiting, "nothing waits behind it"
        assert bool(ended) <= self.stuck
        assert (self.queue.stuck is not None) is self.stuck
        self.heard(ended)

    @precondition(lambda self: self.is_copying)
    @rule(reason=st.sampled_from(["", "", "", NO_ROOM]), cut=st.integers(0, 5))
    def end(self, reason: str, cut: int) -> None:
        """A copy that was told to stop may have made some of its copies; what it made is kept unless it is void."""
        job = self.current
        assert job is not None
        self.queue.end_copy(job)
        self.is_copying = False
        kept = len(job.piece)
        if job.op.store_id in self.lost or self.told is not None:
            kept = min(cut, kept)
        if job.void:
            kept = 0
        if kept < len(job.piece):
            reason = PREEMPTED
        elif reason:
            kept = 0
        assert not (self.stuck and kept), "what a stuck copy read is committed"
        self.kept[job.op.store_id] += kept
        self.returned(kept, reason)

    @precondition(lambda self: self.is_copying and not self.stuck)
    @rule(cut=st.integers(0, 1))
    def stop_in_time(self, cut: int) -> None:
        """A late copy that ends when it is told to."""
        if self.told is None:
            self.look(31.0)
        self.end("", cut)

    @rule(requests=st.sets(st.sampled_from("abc")), patient=st.booleans())
    def preempt(self, requests: set[str], patient: bool) -> None:
        self.lost |= {store.store_id for store in self.ops if store.request_id in requests}
        self.heard(self.queue.cancel(requests))
        copying = self.queue.copying(requests)
        running = self.current is not None and self.current.op.request_id in requests and not self.stuck
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
        lost = self.current is not None and self.current.op.store_id in self.lost
        stopped = self.stuck or (self.is_copying and (lost or self.told is not None))
        assert self.queue.pull() is (Pull.STOP if stopped else Pull.GO_ON)

    @invariant()
    def a_stuck_store_keeps_nothing(self) -> None:
        assert not (self.stuck and self.queue.jobs)

    def teardown(self) -> None:
        self.is_copying = False
        self.heard(self.queue.end_all())
        assert set(self.ended) == set(range(len(self.ops)))


TestStores = Stores.TestCase
TestStores.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
