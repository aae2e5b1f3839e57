"""Shares of the block budget and places among the loads in flight: never too many, first come first served."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from maru_integrations.vllm.parking import Parking

BLOCK = 16


def asked(parking: Parking, names: str, blocks: dict[str, int]) -> str:
    """Who of ``names``, asked in that order, is admitted."""
    return "".join(name for name in names if parking.admit(name, blocks[name] * BLOCK))


def test_sixty_four_blocks_and_prompts_of_fifty_twenty_five_and_fifteen() -> None:
    """Parked in turn they would leave one free block and stand still for ever; 50 and 15 would fit, 25 was first."""
    parking, blocks = Parking(BLOCK, budget=63), {"a": 50, "b": 25, "c": 15}
    assert asked(parking, "abc", blocks) == "a"
    assert asked(parking, "cab", blocks) == "a", "the smaller one does not overtake"
    parking.leave("a")
    assert asked(parking, "cb", blocks) == "b", "asked first, but it came later"
    assert asked(parking, "c", blocks) == "c"
    assert parking.blocks == 40


def test_two_hundred_seventy_blocks_and_a_shared_prefix() -> None:
    """Four requests of 100 blocks and a newcomer of 100: two at a time, in order."""
    parking, blocks = Parking(BLOCK, budget=269), dict.fromkeys("abcdn", 100)
    assert asked(parking, "abcdn", blocks) == "ab"
    parking.leave("b")
    assert asked(parking, "ndca", blocks) == "ca"
    parking.leave("a")
    parking.leave("c")
    assert asked(parking, "dn", blocks) == "dn"


def test_a_share_is_whole_blocks_and_the_first_always_fits() -> None:
    """``ceil(num_tokens / block_size)``; what is larger than everything there is has to be tried, too."""
    parking = Parking(BLOCK, budget=2)
    assert parking.admit("a", 17)
    assert parking.blocks == 2
    assert not parking.admit("b", 1)
    parking.leave("a")
    assert parking.admit("b", 1)
    assert parking.admit("c", 16)
    parking.leave("b")
    parking.leave("c")
    assert parking.admit("huge", 10_000)
    assert not parking.admit("tiny", 1)


def test_without_a_budget_everybody_is_admitted() -> None:
    """Neither configuration knows the number of blocks."""
    parking = Parking(BLOCK)
    assert all(parking.admit(str(number), 10_000) for number in range(50))


class ParkingMachine(RuleBasedStateMachine):
    """Any order of questions, ends and departures."""

    @initialize(budget=st.none() | st.integers(1, 40), window=st.integers(0, 3))
    def start(self, budget: int | None, window: int) -> None:
        self.parking = Parking(BLOCK, budget, window)
        self.tokens: dict[str, int] = {}
        self.came: list[str] = []
        self.admitted: list[str] = []
        self.turns: list[str] = []
        self.loading: list[str] = []
        self.number = 0

    @rule(tokens=st.integers(1, 60 * BLOCK))
    def arrive(self, tokens: int) -> None:
        self.number += 1
        name = str(self.number)
        self.tokens[name] = tokens
        self.came.append(name)
        self.ask(name)

    @precondition(lambda self: self.came)
    @rule(data=st.data())
    def ask_again(self, data: st.DataObject) -> None:
        self.ask(data.draw(st.sampled_from(self.came)))

    def ask(self, name: str) -> None:
        fresh = name not in self.admitted
        before = [other for other in self.came[: self.came.index(name)] if other not in self.admitted]
        if self.parking.admit(name, self.tokens[name]) and fresh:
            assert not before, "somebody who came earlier still waits"
            self.admitted.append(name)
        elif fresh and not before:
            assert self.admitted, "the first in line with nobody parked is always admitted"
            assert self.parking.budget is not None
            assert sum(self.share(other) for other in [*self.admitted, name]) > self.parking.budget
        else:
            assert (name in self.admitted) == (not fresh)

    def share(self, name: str) -> int:
        return -(-self.tokens[name] // BLOCK)

    @precondition(lambda self: self.admitted)
    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.admitted))
        if name in self.loading:
            assert self.parking.begin_load(name)
            return
        before = [other for other in self.turns if other != name]
        before = before[: self.turns.index(name)] if name in self.turns else before
        room = not self.parking.window or len(self.loading) < self.parking.window
        assert self.parking.begin_load(name) == (room and not before)
        if room and not before:
            self.loading.append(name)
            if name in self.turns:
                self.turns.remove(name)
        elif name not in self.turns:
            self.turns.append(name)

    @precondition(lambda self: self.loading or self.turns)
    @rule(data=st.data())
    def end_load(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.loading + self.turns))
        self.parking.end_load(name)
        (self.loading if name in self.loading else self.turns).remove(name)

    @precondition(lambda self: self.came)
    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.came))
        self.parking.leave(name)
        self.parking.end_load(name)
        for names in (self.came, self.admitted, self.turns, self.loading):
            if name in names:
                names.remove(name)

    @invariant()
    def never_too_many(self) -> None:
        if not hasattr(self, "parking"):
            return
        total = sum(self.share(name) for name in self.admitted)
        assert self.parking.blocks == total
        if self.parking.budget is not None and len(self.admitted) > 1:
            assert total <= self.parking.budget
        assert self.parking.admitted == len(self.admitted)
        assert self.parking.loading == len(self.loading)
        assert not self.parking.window or len(self.loading) <= self.parking.window

    def teardown(self) -> None:
        if not hasattr(self, "parking"):
            return
        for name in list(self.came):
            self.parking.leave(name)
            self.parking.end_load(name)
        assert self.parking.is_empty


TestParking = ParkingMachine.TestCase
TestParking.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
