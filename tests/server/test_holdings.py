"""What a session holds against plain sets and counters, and that no part of it grows large."""

from __future__ import annotations

from array import array
from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from maru_core.server import holdings
from maru_core.server.holdings import EntryCounts, EntrySet
from tests.budgets import examples
from tests.server.pure import World
from tests.server.raw import key

BATCH = st.lists(st.integers(0, 30), max_size=6)


@pytest.fixture(autouse=True, scope="module")
def small_parts():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(holdings, "_PART", 5)
        yield


def longest(held: EntrySet | EntryCounts) -> int:
    return max(map(len, held._parts))


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["add", "remove", "first", "take over"]), BATCH), max_size=30))
def test_a_set_of_entries_is_a_set(steps):
    held, plain = EntrySet(), set()
    for what, batch in steps:
        fresh = set(batch) - plain
        if what == "add":
            held.update(fresh)
            plain |= fresh
        elif what == "remove":
            held.difference_update(batch)
            plain -= set(batch)
        elif what == "first":
            some = held.first(3)
            assert len(set(some)) == len(some) == min(3, len(plain))
            assert set(some) <= plain
        else:
            other = EntrySet()
            other.update(fresh)
            held.take_over(other)
            plain |= fresh
        assert sorted(held) == sorted(plain)
        assert (len(held), bool(held)) == (len(plain), bool(plain))
        assert held.issuperset(batch) == plain.issuperset(batch)
        assert held.intersection(batch) == plain.intersection(batch)
        assert [entry in held for entry in range(31)] == [entry in plain for entry in range(31)]
        assert longest(held) < 5 + 6


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["hold", "hold", "let go", "pop"]), BATCH), max_size=30), st.randoms())
def test_counts_of_entries_are_a_counter(steps, rng):
    held, plain = EntryCounts(), Counter()
    for what, batch in steps:
        if what == "hold":
            assert list(held.hold(array("I", batch))) == [entry for entry in dict.fromkeys(batch) if entry not in plain]
            plain.update(batch)
        elif what == "let go":
            part = rng.sample([*plain.elements()], min(len(batch), plain.total()))
            before = set(plain)
            plain -= Counter(part)
            assert sorted(held.let_go(part)) == sorted(before - set(plain))
        else:
            popped = held.pop(3)
            assert len(set(popped)) == len(popped) == min(3, len(plain))
            assert all(plain.pop(entry) for entry in popped)
        assert sorted(held) == sorted(plain)
        assert (len(held), bool(held)) == (len(plain), bool(plain))
        assert [entry in held for entry in range(31)] == [entry in plain for entry in range(31)]
        assert longest(held) < 5 + 6


def test_a_session_that_holds_much_has_many_parts():
    world = World.of(400)
    session = world.session()
    for first in range(0, 400, 20):
        names = [key(number) for number in range(first, first + 20)]
        assert not any(world.directory.reserve(session, names, (), 100)[0])
    world.check()
    assert longest(session.reserved) < 5 + 20
    entries = sorted(session.reserved)
    assert not any(world.directory.commit(session, entries, [1] * 400))
    world.check()
    for first in range(0, 400, 20):
        names = [key(number) for number in range(first, first + 20)]
        assert world.directory.acquire(session, first, names, True)[0] == b"\1" * 20
        world.directory.acquire(session, 1000, names[:7], True)
    world.check()
    assert longest(session.held) < 5 + 20
    assert len(session.held) == 400
    for first in range(0, 400, 20):
        world.directory.release(session, first, 13)
    world.check()
    world.finish(session)
    world.check()
    assert world.directory.arenas[0].leased == 0
