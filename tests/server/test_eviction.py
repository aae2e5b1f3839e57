"""The order of eviction against a plain list."""

from __future__ import annotations

import random

import hypothesis.strategies as st
from hypothesis import given, settings

from maru_core.server.eviction import least_recently_used
from maru_core.server.tenants import Tenants
from tests.budgets import examples

STEP = st.tuples(st.sampled_from(["add", "touch", "remove", "pop", "return", "park", "unpark"]), st.integers(0, 9))


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(STEP, min_size=10, max_size=60))
def test_victims_come_coldest_first(steps):
    policy = least_recently_used(0, 10)()
    order: list[int] = []
    parked: list[int] = []
    for what, entry in steps:
        if what == "add" and entry not in order and entry not in parked:
            policy.add([entry])
            order.append(entry)
        elif what == "touch" and (entry in order or entry in parked):
            policy.touch([entry])
            order = [item for item in order if item != entry] + [entry]
            parked = [item for item in parked if item != entry]
        elif what == "remove":
            policy.remove([entry])
            order = [item for item in order if item != entry]
            parked = [item for item in parked if item != entry]
        elif what in ("pop", "return", "park"):
            victims = policy.pop(2)
            assert victims == order[:2]
            if what == "pop":
                del order[:2]
            elif what == "return":
                policy.put_back(victims)
            elif victims:
                policy.park(victims[0])
                policy.put_back(victims[1:])
                parked.append(order.pop(0))
        elif what == "unpark":
            policy.unpark(entry)
            if entry in parked:
                parked.remove(entry)
                order.insert(0, entry)
    assert policy.pop(100) == order


def test_an_object_that_was_used_since_it_was_queued_is_not_cold():
    policy = least_recently_used(0, 10)()
    policy.add([0, 1, 2, 3])
    assert policy.pop(1) == [0]
    policy.touch([1])
    policy.remove([2])
    policy.add([2])
    assert policy.pop(9) == [3, 1, 2]


def contents(policy) -> int:
    """Items that the queue has, stale ones included."""
    return sum(len(segment.objects) - segment.head for segment in [*policy._passed, *policy._ahead])


def test_a_queue_of_objects_that_are_used_again_and_again_stays_short_and_in_order():
    count = 20_000
    policy = least_recently_used(100, count)()
    order: dict[int, None] = {}
    rng = random.Random(7)
    for first in range(100, 100 + count, 50):
        policy.add(range(first, first + 50))
        order.update(dict.fromkeys(range(first, first + 50)))
    for _ in range(3000):
        first = rng.randrange(100, 100 + count - 50)
        used = list(range(first, first + rng.choice([1, 7, 50])))
        policy.touch(used)
        for entry in used:
            del order[entry]
            order[entry] = None
        assert contents(policy) == policy._length <= 1.5 * count + 5 * 1024
    gone = list(order)[::3]
    policy.remove(gone)
    for entry in gone:
        del order[entry]
    assert policy.pop(5000) == list(order)[:5000]
    assert policy.pop(count) == list(order)[5000:]
    assert policy.coldest() is None


def test_closing_gaps_never_takes_long():
    """Every object of many is used again: no call may work on all of them."""
    count = 100_000
    policy = least_recently_used(0, count)()
    touched = 0
    close, longest = policy._close_gaps, 0

    def watch(budget: int) -> None:
        nonlocal longest
        longest = max(longest, budget)
        close(budget)

    policy._close_gaps = watch
    for _ in range(4):
        for first in range(0, count, 64):
            policy.touch(range(first, min(first + 64, count)))
            touched += 64
    assert 0 < longest <= 256
    assert contents(policy) <= 1.5 * count + 5 * 1024
    assert policy.pop(count) == list(range(count))


def test_the_hand_closes_gaps_and_keeps_the_order():
    policy = least_recently_used(10, 8192)()
    for first in range(10, 8202, 4):
        policy.add(range(first, first + 4))
    policy.remove(range(12, 8202, 2))
    for _ in range(100):
        policy._close_gaps(300)
    assert contents(policy) == policy._length <= 4097 + 1024
    assert policy.pop(8192) == [10, *range(11, 8202, 2)]


STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "touch", "remove", "pop", "return", "park", "unpark"]), st.integers(0, 19)),
    min_size=10,
    max_size=60,
)


class Order:
    """What :class:`Tenants` does, with a list of times: the namespace of an object is its number modulo 4."""

    def __init__(self) -> None:
        self.now = 0
        #: Time of use of each object that is held, or parked, in the order of use.
        self.held: dict[int, int] = {}
        self.parked: dict[int, int] = {}
        #: What came back to the cold end, per namespace, the next victim last.
        self.fronts: list[list[int]] = [[], [], [], []]

    def use(self, entry: int) -> None:
        self.drop(entry)
        self.now += 1
        self.held[entry] = self.now

    def drop(self, entry: int) -> None:
        self.held.pop(entry, None)
        self.parked.pop(entry, None)
        if entry in self.fronts[entry % 4]:
            self.fronts[entry % 4].remove(entry)

    def back(self, entry: int, time: int) -> None:
        self.held[entry] = time
        self.fronts[entry % 4].append(entry)

    def next(self) -> int | None:
        heads = []
        for number, front in enumerate(self.fronts):
            mine = [entry for entry in self.held if entry % 4 == number]
            if mine:
                heads.append(front[-1] if front else min(mine, key=self.held.__getitem__))
        return min(heads, key=self.held.__getitem__, default=None)


@settings(max_examples=examples(300), deadline=None)
@given(STEPS)
def test_namespaces_lose_what_was_used_longest_ago_in_any_of_them(steps):
    tenants = Tenants(least_recently_used(0, 20))
    order = Order()

    def pop(count: int) -> tuple[int, dict[int, int]]:
        tenant, victims = tenants.pop(count)
        assert bool(victims) == bool(order.held)
        times = {}
        for victim in victims:
            assert victim % 4 == tenant
            assert victim == order.next()
            times[victim] = order.held[victim]
            order.drop(victim)
        return tenant, times

    for what, entry in steps:
        if what == "add" and entry not in order.held and entry not in order.parked:
            tenants.add(entry % 4, [entry])
            order.use(entry)
        elif what == "touch" and (entry in order.held or entry in order.parked):
            tenants.touch(entry % 4, [entry])
            order.use(entry)
        elif what == "remove":
            tenants.remove(entry % 4, [entry])
            order.drop(entry)
        elif what == "pop":
            pop(3)
        elif what in ("return", "park"):
            tenant, times = pop(3)
            victims = list(times)
            if what == "park" and victims:
                tenants.park(tenant, victims[0])
                order.parked[victims[0]] = times[victims[0]]
                del victims[0]
            tenants.put_back(tenant, victims)
            for victim in reversed(victims):
                order.back(victim, times[victim])
        elif what == "unpark":
            tenants.unpark(entry % 4, entry)
            if entry in order.parked:
                order.back(entry, order.parked.pop(entry))
    while pop(5)[1]:
        pass


def test_the_order_over_many_namespaces_is_exact():
    tenants = Tenants(least_recently_used(0, 6000))
    for entry in range(6000):
        tenants.add(entry % 1500, [entry])
    tenants.touch(3, [3])
    tenants.remove(4, [4])
    expected = [entry for entry in range(6000) if entry not in (3, 4)] + [3]
    got: list[int] = []
    while victims := tenants.pop(64)[1]:
        got += victims
    assert got == expected


def test_a_namespace_that_comes_back_is_asked_again():
    tenants = Tenants(least_recently_used(0, 10))
    tenants.add(0, [0])
    tenants.add(1, [1])
    assert [tenants.pop(1)[1], tenants.pop(1)[1], tenants.pop(1)[1]] == [[0], [1], []]
    tenants.add(1, [1])
    assert tenants.pop(9) == (1, [1])
    tenants.forget(1)
    tenants.add(0, [2])
    tenants.add(0, [3])
    tenants.add(2, [4])
    tenants.touch(0, [2])
    assert [tenants.pop(9), tenants.pop(9), tenants.pop(9)] == [(0, [3]), (2, [4]), (0, [2])]


def test_what_is_leased_in_the_order_of_storing_leaves_nothing_to_skip():
    count = 50_000
    policy = least_recently_used(0, count)()
    for first in range(0, count, 50):
        policy.add(range(first, first + 50))
    for first in range(0, count, 50):
        policy.remove(range(first, first + 50))
    assert contents(policy) == 0
    policy.add([3])
    assert policy.pop(2) == [3]
