"""The order of eviction against a plain list."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings

from maru_core.server.eviction import LeastRecentlyUsed

STEP = st.tuples(st.sampled_from(["add", "touch", "remove", "pop", "return", "park", "unpark"]), st.integers(0, 9))


@settings(max_examples=300, deadline=None)
@given(st.lists(STEP, min_size=10, max_size=60))
def test_victims_come_coldest_first(steps):
    policy = LeastRecentlyUsed()
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
    policy = LeastRecentlyUsed()
    policy.add([0, 1, 2, 3])
    assert policy.pop(1) == [0]
    policy.touch([1])
    policy.remove([2])
    policy.add([2])
    assert policy.pop(9) == [3, 1, 2]
