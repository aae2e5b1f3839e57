"""The reuse policy: nothing is lost, nothing comes twice, and it finds what is used again."""

from __future__ import annotations

import gc
import random
from array import array
from itertools import count

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from maru_core.config import MaruConfig, PluginSettings
from maru_core.contracts import PolicyProvision
from maru_core.errors import ConfigError
from maru_core.host import PluginHost
from maru_core.plugin import hookimpl
from maru_core.pool_format import HEADER_SIZE, KEY_SIZE, NO_KEY
from maru_core.protocol.messages import PoolDescriptor, Presence, ReserveStatus
from maru_core.server.arena import Arena
from maru_core.server.buckets import Bucket
from maru_core.server.directory import Directory
from maru_core.server.eviction import least_recently_used
from maru_core.server.hazard import BINS, Kind
from maru_core.server.reuse import reuse_policy
from maru_core.server.sessions import SessionRegistry
from tests.budgets import examples

BASE, PLACES = 5, 24
ENTRIES = st.lists(st.integers(BASE, BASE + PLACES - 1), unique=True, min_size=1, max_size=6)


class Life(RuleBasedStateMachine):
    """Against two sets: what the policy holds, and what it has parked."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.policy = reuse_policy(BASE, PLACES, lambda: self.now)()
        self.held: set[int] = set()
        self.parked: set[int] = set()
        self.unparked = False
        self.names = count(1)

    @rule(seconds=st.sampled_from([0.0, 0.5, 3.0, 30.0, 4000.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(entries=ENTRIES, found=st.integers(0, 3))
    def store(self, entries: list[int], found: int) -> None:
        fresh = [entry for entry in entries if entry not in self.held | self.parked]
        keys = [next(self.names).to_bytes(KEY_SIZE, "big") for _ in fresh]
        self.policy.looked_up(keys, 0, ())
        if keys:
            self.policy.worth_of(keys, None)
        self.policy.stored(keys, fresh, None)
        self.policy.add(fresh)
        self.policy.looked_up(keys, min(found, len(keys)), fresh[:found])
        self.held.update(fresh)

    @rule(entries=ENTRIES)
    def move_in(self, entries: list[int]) -> None:
        fresh = [entry for entry in entries if entry not in self.held | self.parked]
        self.policy.moved_in(fresh)
        self.policy.add(fresh)
        self.held.update(fresh)

    @rule(entries=ENTRIES)
    def touch(self, entries: list[int]) -> None:
        entries = [entry for entry in entries if entry in self.held | self.parked]
        self.policy.touch(entries)
        self.parked.difference_update(entries)
        self.held.update(entries)

    @rule(entries=ENTRIES)
    def remove(self, entries: list[int]) -> None:
        self.policy.remove(entries)
        self.held.difference_update(entries)
        self.parked.difference_update(entries)

    @rule(wanted=st.integers(1, 9), before=st.sampled_from([None, 10**7, 10**10, 10**13]), fate=st.integers(0, 2))
    def pop(self, wanted: int, before: int | None, fate: int) -> None:
        victims = self.policy.pop(wanted, before)
        assert len(set(victims)) == len(victims) <= wanted
        assert self.held.issuperset(victims)
        if before is None:
            # Behind what was unparked it stops early: what that continues may be parked, and is to come next.
            least = min(wanted, len(self.held))
            assert len(victims) == least or (self.unparked and len(victims) >= min(1, least))
        self.held.difference_update(victims)
        if fate == 1:
            self.policy.put_back(victims)
            self.held.update(victims)
            assert self.policy.pop(len(victims)) == victims
            self.held.difference_update(victims)
        elif fate == 2:
            for victim in victims:
                self.policy.park(victim)
            self.parked.update(victims)

    @rule(entry=st.integers(BASE, BASE + PLACES - 1))
    def unpark(self, entry: int) -> None:
        self.policy.unpark(entry)
        if entry in self.parked:
            self.parked.discard(entry)
            self.held.add(entry)
            self.unparked = True

    @invariant()
    def knows_whether_there_is_a_victim(self) -> None:
        assert (self.policy.coldest() is None) == (not self.held)

    def teardown(self) -> None:
        victims: list[int] = []
        while part := self.policy.pop(7):
            victims += part
        assert sorted(victims) == sorted(self.held)


Life.TestCase.settings = settings(max_examples=examples(100), stateful_step_count=40, deadline=None)
TestLife = Life.TestCase


def replay(policy, requests: list[tuple[float, list[bytes]]], places: int) -> int:
    """Objects that ``requests`` find at their head, in a pool of ``places``."""
    now = 0.0
    descriptor = PoolDescriptor(0, "fake", "", b"", places, 1, 0, places, 0, 0)
    arena = Arena.of(0, descriptor, memoryview(bytearray(places * HEADER_SIZE)), policy, lambda: now)
    directory = Directory([arena], lease_share=1.0)
    numbers = count(1)
    session = SessionRegistry(1, lambda: next(numbers)).open(directory.namespaces.open(b"n"), "client", "", 0.0)
    hits = 0
    for lease, (now, keys) in enumerate(requests, 1):  # noqa: B007 - the clock
        found = directory.acquire(session, lease, keys, True)[0].count(bytes([Presence.READY]))
        hits += found
        if found < len(keys):
            parent = keys[found - 1] if found else NO_KEY
            statuses, entries, generations = directory.reserve(session, keys[found:], (parent,), 1)
            new = statuses.count(ReserveStatus.NEW)
            directory.commit(session, entries[:new], generations[:new])
        directory.release(session, lease, len(keys))
        directory.settle()
        assert arena.used + arena.free.free == places
    return hits


def chain(name: int, length: int) -> list[bytes]:
    return [(name << 32 | at).to_bytes(KEY_SIZE, "little")[::-1] for at in range(1, length + 1)]


def chat(seed: int, pause: float, more: float) -> list[tuple[float, list[bytes]]]:
    """Conversations with a usual ``pause`` that go on with probability ``more``."""
    chance = random.Random(seed)
    requests = []
    for name in range(1, 900):
        time, length = name * 2.0, chance.randrange(4, 24)
        while True:
            requests.append((time, chain(name, length)))
            if chance.random() > more:
                break
            time += chance.lognormvariate(0, 0.4) * pause
            length += chance.randrange(1, 4)
    return sorted(requests)


@pytest.mark.slow
def test_it_serves_more_of_conversations_with_pauses_than_least_recently_used():
    requests = chat(1, 60.0, 0.5)
    assert replay(reuse_policy, requests, 200) > 1.2 * replay(least_recently_used, requests, 200)


@pytest.mark.slow
@pytest.mark.parametrize("places", [100, 300])
@pytest.mark.parametrize(
    "requests",
    [
        pytest.param([(float(name), chain(name, 5)) for name in range(1, 800)], id="scan"),
        pytest.param([(float(at), chain(1 + at % 30, 5)) for at in range(1500)], id="loop"),
        pytest.param(chat(2, 20.0, 0.8), id="short pauses"),
    ],
)
def test_it_is_not_below_least_recently_used(requests, places: int):
    total = sum(len(keys) for _, keys in requests)
    assert replay(reuse_policy, requests, places) >= replay(least_recently_used, requests, places) - 0.002 * total


def test_before_anything_is_known_it_is_least_recently_used():
    worth = Kind(None, 0.0).worth
    assert worth == sorted(worth, reverse=True)


def test_what_comes_back_after_a_pause_is_worth_most_shortly_before():
    kind, now = Kind(None, 0.0), 0.0
    for _ in range(4000):
        now += 1.0
        kind.begin(now, 5)
        kind.end(now - 60.0, now, 5, True)
    kind.refresh(now)
    # About a minute after the use.
    assert 11 <= kind.worth.index(max(kind.worth)) <= 13
    assert len(kind.worth) == BINS + 1


@pytest.mark.slow
def test_stretches_that_are_remembered_are_bounded():
    now = 0.0
    policy = reuse_policy(0, 8, lambda: now)()
    for name in range(1, 20_000):
        now += 0.1
        keys = chain(name, 2)
        policy.looked_up(keys, 0, ())
        policy.stored(keys, array("I"), None)
    learned = policy._stretches
    assert len(learned._stretches) <= 16_385
    assert len(learned._walks) <= 4097


def test_a_plugin_offers_a_policy_and_an_unknown_name_names_the_nearest():
    class Plugin:
        @hookimpl
        def maru_eviction_policies(self):
            return [PolicyProvision("acme", least_recently_used), PolicyProvision("wrong", lambda *_: object)]

    host = PluginHost.with_plugins({"acme": Plugin()}, built_ins=True, strict=True)
    assert set(host.policies()) == {"lru", "reuse", "acme", "wrong"}
    assert MaruConfig().eviction_policy in host.policies()
    assert host.policy("acme")(0, 4, lambda: 0.0)().coldest() is None
    assert type(host.policy("reuse")(0, 4, lambda: 0.0)()).__name__ == "ReusePolicy"
    with pytest.raises(ConfigError, match="the nearest is reuse"):
        host.policy("resue")
    with pytest.raises(ConfigError, match=r"wrong of plugin acme .* lacks"):
        host.policy("wrong")(0, 4, lambda: 0.0)
    with pytest.raises(ConfigError, match="no eviction policy"):
        PluginHost.discover(PluginSettings(allowed=())).policy("acme")


def test_what_an_evicted_object_continues_comes_before_what_is_worth_more():
    now = 0.0
    policy = reuse_policy(0, 40, lambda: now)()
    # A chain whose heads come first, and then others that were used later.
    policy.add([0, 1, 2, 3])
    now = 10.0
    policy.add(list(range(10, 30)))
    assert policy.pop(3) == [0, 1, 2]
    for entry in (0, 1, 2):
        policy.park(entry)
    assert policy.pop(1) == [3]
    for entry in (2, 1, 0):
        policy.unpark(entry)
        assert policy.pop(8) == [entry]
    assert policy.pop(2) == [10, 11]


def test_what_comes_from_another_pool_is_not_what_was_there_before():
    new_policy = reuse_policy(BASE, PLACES, lambda: 1.0)
    policy, other = new_policy(), new_policy()
    other.stored(chain(1, 3), [BASE, BASE + 1, BASE + 2], None)
    policy.moved_in([BASE + 1])
    policy.add([BASE + 1])
    assert policy.pop(2) == [BASE + 1]


def test_namespaces_that_come_and_go_leave_nothing_behind():
    def parts() -> int:
        gc.collect()
        return sum(type(each) in (Bucket, Kind) for each in gc.get_objects())

    new_policy, before = reuse_policy(BASE, PLACES, lambda: 1.0), parts()
    for number in range(5):
        policy = new_policy()
        for kind, first in enumerate((BASE, BASE + 8)):
            entries = [*range(first, first + 1 + 2 * kind)]
            policy.stored(chain(9 * number, len(entries)), entries, None)
            policy.add(entries)
            assert policy.pop(1)
            policy.put_back(policy.pop(1))
            for victim in policy.pop(1):
                policy.park(victim)
            policy.remove(entries)
        del policy
    assert parts() <= before
