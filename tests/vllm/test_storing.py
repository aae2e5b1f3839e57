"""One store per key, and a request keeps its blocks exactly while a store may read them."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from maru_integrations.vllm.metadata import LOAD_FAILED, NO_ROOM, PREEMPTED, StoreOp, StoreResult
from maru_integrations.vllm.storing import PATIENCE, Stores
from tests.vllm.test_breaker import Clock

NAMES = st.sampled_from(["a", "b", "c"])
KEYS = [bytes([number]) for number in range(6)]


class StoresMachine(RuleBasedStateMachine):
    """Requests that finish the same chunks, lose their blocks, and stores that end in any way and order."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.stores = Stores(self.clock)
        self.ops: dict[int, StoreOp] = {}
        self.attached: set[int] = set()
        self.forgotten: set[int] = set()
        self.waiting: dict[int, list[tuple[str, int]]] = {}

    @rule(name=NAMES, chunks=st.sets(st.integers(0, 5), min_size=1))
    def complete(self, name: str, chunks: set[int]) -> None:
        mine = []
        for chunk in sorted(chunks):
            owner = [
                number for number, op in self.ops.items() if KEYS[chunk] in op.keys and number not in self.forgotten
            ]
            assert self.stores.is_pending(KEYS[chunk]) == bool(owner)
            if owner:
                self.stores.join(KEYS[chunk], name, chunk)
                self.waiting[owner[0]].append((name, chunk))
            else:
                mine.append(chunk)
        if mine:
            number = self.stores.number()
            keys = [KEYS[chunk] for chunk in mine]
            op = StoreOp(name, mine, keys, keys, mine, number, True)
            self.stores.begin(op, keys)
            self.ops[number] = op
            self.attached.add(number)
            self.waiting[number] = []

    @precondition(lambda self: self.ops)
    @rule(data=st.data(), reason=st.sampled_from(["", NO_ROOM, PREEMPTED, LOAD_FAILED]))
    def end(self, data: st.DataObject, reason: str) -> None:
        number = data.draw(st.sampled_from(sorted(self.ops)))
        op = self.ops.pop(number)
        again = self.stores.ended(StoreResult(number, 0, reason))
        expected = self.waiting.pop(number)
        if number in self.attached:
            expected = [(op.request_id, op.chunks[0]), *expected]
        assert again == (expected if reason in (PREEMPTED, LOAD_FAILED) else [])
        self.attached.discard(number)
        assert self.stores.ended(StoreResult(number, 0)) == [], "answered twice"

    @rule(names=st.sets(NAMES))
    def preempt(self, names: set[str]) -> None:
        lose = {op.request_id for number, op in self.ops.items() if number in self.attached} & names
        assert set(self.stores.detach(names)) == lose
        self.attached -= {number for number, op in self.ops.items() if op.request_id in names}

    @rule()
    def wait_for_long(self) -> None:
        self.clock.now += PATIENCE
        self.forgotten = set(self.ops)

    @rule()
    def reset(self) -> None:
        self.stores.forget_keys()
        self.waiting = {number: [] for number in self.ops}
        self.forgotten = set(self.ops)

    @invariant()
    def blocks_are_kept_while_they_are_read(self) -> None:
        reading = {self.ops[number].request_id for number in self.attached}
        assert {name for name in "abc" if self.stores.is_outstanding(name)} == reading
        assert self.stores.outstanding == len(self.ops)

    def teardown(self) -> None:
        for number in list(self.ops):
            self.stores.ended(StoreResult(number, 0))
        assert not self.stores.outstanding
        assert not any(self.stores.is_pending(key) for key in KEYS)
        assert not any(self.stores.is_outstanding(name) for name in "abc")


TestStores = StoresMachine.TestCase
TestStores.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
