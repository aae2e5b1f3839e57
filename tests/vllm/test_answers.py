"""What a worker reports: once each, never a part of a load without the rest of it."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from maru_integrations.vllm.answers import Answers
from maru_integrations.vllm.metadata import LoadOp, LoadResult, MaruWorkerMetadata, StoreOp, StoreResult


def load_op(load_id: int, *, parked: bool = True) -> LoadOp:
    return LoadOp(load_id, f"r{load_id}", parked, 1, 0, 0, 32, [1, 2], [1], [1], [1], [b"k"])


def store_op(store_id: int, request_id: str) -> StoreOp:
    return StoreOp(request_id, [0], [b"k"], [b"p"], [1, 2], store_id, True)


class AnswersMachine(RuleBasedStateMachine):
    """Loads and stores that begin and end at any time, between and inside the step's questions."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = Answers()
        self.number = 0
        self.loads: dict[int, LoadOp] = {}
        self.stores: dict[int, StoreOp] = {}
        #: Stores that have an answer to come, but read no more.
        self.read: set[int] = set()
        self.finished: set[str] = set()
        self.asked = 0
        self.received: list[str] = []
        self.sent: list[str] = []
        self.seen_loads: list[LoadResult] = []
        self.seen_stores: list[StoreResult] = []
        self.seen_failed: set[int] = set()
        self.moved = 0
        self.total_moved = 0

    @rule()
    def begin_load(self) -> None:
        self.number += 1
        self.loads[self.number] = load_op(self.number)

    @precondition(lambda self: self.loads)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.answers.load_released(self.loads[data.draw(st.sampled_from(sorted(self.loads)))])

    @precondition(lambda self: self.loads)
    @rule(data=st.data(), failed=st.booleans())
    def end_load(self, data: st.DataObject, failed: bool) -> None:
        load_id = data.draw(st.sampled_from(sorted(self.loads)))
        self.answers.load_ended(self.loads.pop(load_id), int(not failed), [load_id] if failed else [])
        self.answers.loads_took(7, 0.5)
        self.total_moved += 7

    @rule(request=st.integers(0, 3))
    def begin_store(self, request: int) -> None:
        if f"s{request}" not in self.finished:
            self.number += 1
            self.stores[self.number] = store_op(self.number, f"s{request}")
            self.answers.store_queued(self.stores[self.number])

    @precondition(lambda self: self.stores)
    @rule(data=st.data())
    def end_reading(self, data: st.DataObject) -> None:
        store_id = data.draw(st.sampled_from(sorted(self.stores)))
        self.answers.store_read(self.stores[store_id])
        self.read.add(store_id)

    @precondition(lambda self: self.stores)
    @rule(data=st.data())
    def end_store(self, data: st.DataObject) -> None:
        store_id = data.draw(st.sampled_from(sorted(self.stores)))
        self.answers.store_ended(self.stores.pop(store_id), 1)

    @rule(request=st.integers(0, 3))
    def finish(self, request: int) -> None:
        if f"s{request}" not in self.finished:
            self.finished.add(f"s{request}")
            self.answers.hold([f"s{request}"])

    @rule()
    def ask_finished(self) -> None:
        sent, received = self.answers.take_finished()
        reading = {op.request_id for op in self.stores.values() if op.store_id not in self.read}
        assert not sent & reading
        assert self.finished - set(self.sent) - sent <= reading, "nothing is held for longer"
        self.sent += sent
        self.received += received

    @rule()
    def ask_failed(self) -> None:
        self.seen_failed |= self.answers.take_failed_blocks()

    @rule()
    def ask_metadata(self) -> None:
        message = self.answers.take_metadata()
        if message is not None:
            self.seen_loads += message.loads
            self.seen_stores += message.stored
            self.moved += message.load_bytes

    @invariant()
    def once(self) -> None:
        assert len(self.received) == len(set(self.received))
        assert len(self.sent) == len(set(self.sent))
        assert set(self.sent) <= self.finished

    def teardown(self) -> None:
        for op in self.loads.values():
            self.answers.load_ended(op, 1, [])
        for store in self.stores.values():
            self.answers.store_ended(store, 1)
        self.loads, self.stores = {}, {}
        self.ask_finished()
        self.ask_failed()
        self.ask_metadata()
        self.once()
        assert set(self.sent) == self.finished
        ids = [result.load_id for result in self.seen_loads]
        assert len(ids) == len(set(ids))
        assert {f"r{load_id}" for load_id in ids} == set(self.received)
        assert self.seen_failed == {result.load_id for result in self.seen_loads if not result.good}
        assert len({result.store_id for result in self.seen_stores}) == len(self.seen_stores)
        assert len(ids) + len(self.seen_stores) == self.number
        assert self.moved == self.total_moved


TestAnswers = AnswersMachine.TestCase
TestAnswers.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_load_that_ends_between_two_questions_is_told_whole_in_the_next_step() -> None:
    """vLLM asks for requests first and for failed blocks later: another thread may end a load in between."""
    answers = Answers()
    assert answers.take_finished() == (set(), set())
    answers.load_ended(load_op(1), 0, [5])
    assert answers.take_failed_blocks() == set()
    assert answers.take_metadata() is None
    assert answers.take_finished() == (set(), {"r1"})
    assert answers.take_failed_blocks() == {5}
    assert answers.take_metadata() == MaruWorkerMetadata([LoadResult(1, 0)])


def test_a_synchronous_load_is_answered_and_not_received() -> None:
    """vLLM knows no such parked request."""
    answers = Answers()
    answers.load_ended(load_op(1, parked=False), 1, [])
    assert answers.take_finished() == (set(), set())
    assert answers.take_metadata() == MaruWorkerMetadata([LoadResult(1, 1)])


def test_ranks_are_as_good_as_the_worst() -> None:
    """What one rank could not do has not been done."""
    first = MaruWorkerMetadata([LoadResult(1, 3)], {"a": 4}, [StoreResult(1, 2)], 10, 1.0, {"no_room": 1})
    second = MaruWorkerMetadata([LoadResult(1, 2)], {"a": 2}, [StoreResult(1, 0, "error")], 20, 0.5, {"no_room": 2})
    expected = MaruWorkerMetadata([LoadResult(1, 2)], {"a": 2}, [StoreResult(1, 0, "error")], 30, 1.0, {"no_room": 3})
    assert first.aggregate(second) == expected
    assert second.aggregate(first) == expected
