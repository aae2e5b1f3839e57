"""Loads in their order, in pieces, each answered once and none while its pages may be written to."""

from __future__ import annotations

import math
from typing import Any

import pytest

pytest.importorskip("vllm")

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from maru_core.brake import Pull
from maru_integrations.vllm.copies import ChunkShape
from maru_integrations.vllm.loadqueue import Ended, LoadJob, LoadQueue, Phase, cut
from maru_integrations.vllm.metadata import CANCELLED, LATE, LoadOp

SHAPE = ChunkShape(block_size=16, chunk_tokens=16, nbytes=100, objects=1)


def op(load_id: int, chunks: int, deadline: float = 0.0, **fields: Any) -> LoadOp:
    columns: dict[str, Any] = dict.fromkeys(("entries", "generations", "lengths", "keys"), range(chunks))
    return LoadOp(
        load_id=load_id,
        request_id=f"r{load_id}",
        parked=True,
        epoch=1,
        chunk=0,
        first=0,
        last=chunks * 16,
        blocks=range(chunks),
        deadline=deadline,
        **{**columns, **fields},
    )


def queued(queue: LoadQueue, load_id: int, chunks: int, *, piece: int = 100, **fields: Any) -> LoadJob:
    return queue.add(op(load_id, chunks, **fields), None, cut(chunks, SHAPE, piece), 0.0)


def done(queue: LoadQueue, job: LoadJob, now: float = 0.0) -> list[Ended]:
    allowed, ended = queue.begin_copy(job, now)
    assert allowed
    assert not ended
    queue.end_copy(job)
    return queue.moved(job, len(job.piece), now)


@pytest.mark.parametrize(
    ("chunks", "piece", "objects", "cuts"),
    [
        (0, 100, 1, ()),
        (1, 1, 1, (1,)),
        (3, 1, 1, (1, 2, 3)),
        (5, 250, 1, (2, 4, 5)),
        (4, 200, 1, (2, 4)),
        (3, 1000, 4, (12,)),
        (3, 200, 4, (8, 12)),
    ],
)
def test_pieces_are_whole_chunks(chunks: int, piece: int, objects: int, cuts: tuple[int, ...]) -> None:
    assert cut(chunks, ChunkShape(16, 16, 100, objects), piece) == cuts


def test_large_loads_of_equal_size_go_one_after_the_other() -> None:
    """First come, first served at link speed: nobody waits for a load that came later."""
    queue = LoadQueue()
    for load_id in range(3):
        queued(queue, load_id, 4)
    order = []
    while (job := queue.take()) is not None:
        order.append(job.op.load_id)
        done(queue, job)
    assert order == [0] * 4 + [1] * 4 + [2] * 4


def test_after_each_piece_of_a_large_load_one_short_one_may_go_first() -> None:
    queue = LoadQueue()
    queued(queue, 0, 4)
    for load_id in (1, 2, 3, 4, 5):
        queued(queue, load_id, 1)
    order = []
    while (job := queue.take()) is not None:
        order.append(job.op.load_id)
        done(queue, job)
    assert order == [0, 1, 0, 2, 0, 3, 0, 4, 5]


def test_a_load_that_is_being_copied_outlives_its_deadline_and_ends_with_its_piece() -> None:
    queue = LoadQueue()
    job = queued(queue, 0, 3, deadline=1.0)
    assert queue.take() is job
    assert queue.begin_copy(job, 0.5) == (True, [])
    assert queue.expire(2.0) == []
    assert queue.overdue(2.0) is job
    assert queue.cancel([0]) == []
    queue.end_copy(job)
    (end,) = queue.moved(job, 1, 2.0)
    assert (end.good, end.reason) == (1, CANCELLED)
    assert queue.overdue(3.0) is None
    assert queue.take() is None


def test_a_large_load_is_asked_to_yield_only_to_a_short_one_and_goes_on_where_it_was() -> None:
    queue = LoadQueue()
    large = queued(queue, 0, 6, piece=200)
    assert queue.pull(0.0) is Pull.GO_ON
    assert queue.take() is large
    assert queue.begin_copy(large, 0.0) == (True, [])
    queued(queue, 1, 6, piece=200)
    assert queue.pull(0.0) is Pull.GO_ON, "first come, first served"
    short = queued(queue, 2, 1)
    assert queue.pull(0.0) is Pull.YIELD
    queue.end_copy(large)
    assert queue.moved(large, 3, 0.0, tried=3) == []
    assert large.rest == range(3, 6)
    assert large.piece == range(3, 4)
    assert queue.take() is short
    assert queue.begin_copy(short, 0.0) == (True, [])
    assert queue.pull(0.0) is Pull.GO_ON
    queue.end_copy(short)
    assert [end.job for end in queue.moved(short, 1, 0.0)] == [short]
    assert queue.take() is large
    assert queue.begin_copy(large, 0.0) == (True, [])
    assert queue.pull(0.0) is Pull.GO_ON
    queue.cancel([0])
    assert queue.pull(0.0) is Pull.STOP


def test_what_is_late_is_told_to_stop() -> None:
    queue = LoadQueue()
    job = queued(queue, 0, 3, deadline=1.0)
    assert queue.take() is job
    assert queue.begin_copy(job, 0.0) == (True, [])
    assert queue.pull(0.9) is Pull.GO_ON
    assert queue.pull(1.0) is Pull.STOP
    queue.end_copy(job)
    (end,) = queue.moved(job, 0, 1.0, tried=0)
    assert (end.good, end.reason) == (0, LATE)


def test_what_vllm_could_hear_of_only_after_its_deadline_is_late_at_the_look_before() -> None:
    """Its thread looks once per step: a copy is stopped, a load that waits ends, and both in time."""
    queue = LoadQueue()
    copied, waiting, patient = (queued(queue, load_id, 3, deadline=limit) for load_id, limit in enumerate((1, 1, 1.5)))
    assert queue.take() is copied
    assert queue.begin_copy(copied, 0.0) == (True, [])
    assert queue.look(0.4) == []
    assert queue.pull(0.4) is Pull.GO_ON
    (end,) = queue.look(0.7)
    assert (end.job, end.reason) == (waiting, LATE)
    assert queue.pull(0.7) is Pull.STOP
    assert patient in queue.jobs
    queue.end_copy(copied)
    (end,) = queue.moved(copied, 1, 0.7, tried=1)
    assert (end.good, end.reason) == (1, LATE)
    assert [end.job for end in queue.look(1.1)] == [patient]


def test_a_load_that_ended_meanwhile_writes_to_no_page() -> None:
    """Its blocks are somebody else's as soon as it was answered."""
    queue = LoadQueue()
    job = queued(queue, 0, 3, deadline=1.0)
    assert queue.take() is job
    (end,) = queue.expire(1.0)
    assert (end.good, end.reason) == (0, LATE)
    assert queue.begin_copy(job, 1.1) == (False, [])
    assert queue.moved(job, 0, 1.2, why="late") == []


def test_what_was_cancelled_is_never_released() -> None:
    """Blocks of a request that went on are freed with it, those of a parked one not before its load was answered."""
    queue = LoadQueue()
    job = queued(queue, 0, 3)
    assert queue.take() is job
    assert queue.begin_copy(job, 0.0) == (True, [])
    queue.cancel([0])
    assert not queue.release(job)
    other = queued(queue, 1, 3)
    assert queue.release(other)
    assert not queue.release(other), "a request is reported once"


def test_what_was_released_goes_in_one_turn_however_late_and_whoever_waits() -> None:
    """A step waits for it."""
    queue = LoadQueue()
    job = queued(queue, 0, 3, deadline=1.0)
    queued(queue, 1, 1)
    assert queue.take() is job
    assert queue.begin_copy(job, 0.0) == (True, [])
    assert queue.pull(0.0) is Pull.YIELD
    assert queue.release(job)
    assert queue.pull(2.0) is Pull.GO_ON
    queue.end_copy(job)
    assert [end.job.op.load_id for end in queue.look(2.0)] == []
    assert queue.begin_copy(job, 2.0) == (True, []), "once more"
    queue.end_copy(job)
    (end,) = queue.moved(job, 1, 2.0, tried=1)
    assert (end.job, end.good, end.reason) == (job, 1, "")


class Loads(RuleBasedStateMachine):
    """A loader that does one thing at a time, and vLLM's thread that interferes at every moment."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = LoadQueue()
        self.now = 0.0
        self.added: dict[int, LoadJob] = {}
        self.proven: dict[int, int] = {}
        self.ended: dict[int, Ended] = {}
        self.current: LoadJob | None = None
        self.taken: list[int] = []
        self.released: set[int] = set()

    def heard(self, ended: list[Ended]) -> None:
        for end in ended:
            load_id = end.job.op.load_id
            assert load_id not in self.ended, "answered twice"
            assert self.copying is not end.job, "answered while its pages may be written to"
            total = len(end.job.op.entries)
            assert end.good == self.proven[load_id], "what is called good was proven, and nothing that was is left out"
            assert end.good < total or not end.reason
            assert end.reason != LATE or load_id not in self.released, "its request computes, however late it is"
            self.ended[load_id] = end

    @property
    def copying(self) -> LoadJob | None:
        return self.current if self.current is not None and self.is_copying else None

    is_copying = False
    expected: LoadJob | None = None

    @rule(chunks=st.integers(1, 6), piece=st.sampled_from([100, 200, 1000]), deadline=st.sampled_from([0.0, 2.0, 5.0]))
    def add(self, chunks: int, piece: int, deadline: float) -> None:
        load_id = len(self.added)
        job = self.queue.add(op(load_id, chunks, deadline), None, cut(chunks, SHAPE, piece), self.now)
        self.added[load_id] = job
        self.proven[load_id] = 0

    @precondition(lambda self: self.current is None)
    @rule()
    def take(self) -> None:
        waiting = [load_id for load_id in self.added if load_id not in self.ended]
        self.current = self.queue.take()
        assert (self.current is None) == (not waiting)
        if self.expected is not None and self.expected.op.load_id in waiting:
            assert self.current is self.expected, "what was planned ahead of its turn"
        self.expected = None
        if self.current is None:
            return
        load_id = self.current.op.load_id
        if load_id != waiting[0]:
            assert self.current.pieces_left == 1, "only what is short overtakes"
            assert self.taken[-1:] == [waiting[0]], "and only one after each piece of the first"
        self.taken.append(load_id)

    @precondition(lambda self: self.current is not None and not self.is_copying)
    @rule()
    def begin(self) -> None:
        assert self.current is not None
        gone = self.current.op.load_id in self.ended
        allowed, ended = self.queue.begin_copy(self.current, self.now)
        self.heard(ended)
        assert not (allowed and gone)
        assert allowed or gone or self.current.cancelled or self.current.op.load_id not in self.released
        if allowed:
            self.is_copying = True
        else:
            self.heard(self.queue.moved(self.current, 0, self.now))
            self.current = None

    @precondition(lambda self: self.is_copying)
    @rule()
    def release(self) -> None:
        """Once in the life of a load, however many pieces it has."""
        assert self.current is not None
        load_id = self.current.op.load_id
        expected = load_id not in self.released and not self.current.cancelled
        assert self.queue.release(self.current) is expected
        self.released |= {load_id} if expected else set()

    @precondition(lambda self: self.is_copying and self.current.op.load_id in self.released)
    @rule()
    def fail(self) -> None:
        """After its release: nothing is under way, and it will be copied again."""
        assert self.current is not None
        self.queue.end_copy(self.current)
        self.is_copying = False

    @precondition(lambda self: self.is_copying)
    @rule(share=st.floats(0, 1), fails=st.booleans())
    def end(self, share: float, fails: bool) -> None:
        """It was moved as far as it was asked to, or a part of that is not proven."""
        job = self.current
        assert job is not None
        pull = self.queue.pull(self.now)
        waiting = [other for load_id, other in self.added.items() if load_id not in self.ended and other is not job]
        released = job.op.load_id in self.released
        if job.cancelled or (job.expires <= self.now and not released):
            assert pull is Pull.STOP
        else:
            short = any(other.pieces_left == 1 for other in waiting) and not released
            assert (pull is Pull.YIELD) == (short and job.pieces_left > 1)
        least = {Pull.GO_ON: len(job.rest), Pull.YIELD: len(job.piece), Pull.STOP: 0}[pull]
        tried = least + round((len(job.rest) - least) * share)
        good = tried // 2 if fails else tried
        self.queue.end_copy(job)
        self.is_copying = False
        self.proven[job.op.load_id] += good
        why = "injected" if good < tried else ""
        following = self.queue.following(job)
        self.heard(self.queue.moved(job, good, self.now, why=why, tried=tried))
        assert job.op.load_id in self.ended or not released, "nobody can wait for another turn"
        if job.op.load_id in self.ended and pull is Pull.GO_ON:
            self.expected = following
        self.current = None

    @rule(seconds=st.sampled_from([0.5, 3.0]), looks=st.booleans())
    def pass_time(self, seconds: float, looks: bool) -> None:
        self.now += seconds
        before = set(self.ended)
        self.heard(self.queue.look(self.now) if looks else self.queue.expire(self.now))
        for load_id in set(self.ended) - before:
            job = self.added[load_id]
            assert self.now - job.arrived >= job.op.deadline / 2, "given up long before its deadline"

    @precondition(lambda self: self.added)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.heard(self.queue.cancel(data.draw(st.sets(st.sampled_from(sorted(self.added))))))

    @invariant()
    def nothing_is_late_but_what_is_being_copied_or_was_released(self) -> None:
        for load_id, job in self.added.items():
            if load_id not in self.ended and not math.isinf(job.expires) and job.expires <= self.now:
                assert job.phase is Phase.COPYING or load_id in self.released

    def teardown(self) -> None:
        if self.is_copying:
            assert self.current is not None
            self.queue.end_copy(self.current)
            self.is_copying = False
        self.heard(self.queue.end_all("unavailable", "over"))
        assert set(self.ended) == set(self.added)


TestLoads = Loads.TestCase
TestLoads.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
