"""Orders of eviction that misbehave: what is leased stays, no place is lost, and least recently used takes over."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
from click.testing import CliRunner
from hypothesis import given, settings

from maru_core.cli import main
from maru_core.contracts import NewPolicy, PolicyFactory, PolicyProvision
from maru_core.errors import ConfigError
from maru_core.host import PluginHost
from maru_core.plugin import hookimpl
from maru_core.protocol.messages import Presence
from maru_core.server.distrust import distrusted
from maru_core.server.eviction import least_recently_used
from maru_core.server.service import ServerSettings
from tests.budgets import examples
from tests.server.pure import GRANULE, World
from tests.server.raw import key

METHODS = (
    *("add", "moved_in", "touch", "remove", "pop", "put_back", "park", "unpark", "coldest"),
    *("looked_up", "worth_of", "stored"),
)


def keys(first: int, count: int) -> list[bytes]:
    return [key(number) for number in range(first, first + count)]


class Wrong:
    """A policy that is least recently used until ``spoil`` says otherwise: called with a method and its answer."""

    def __init__(self, policy: Any, spoil: Callable[[str, Any], Any]) -> None:
        for method in METHODS:
            setattr(self, method, self._spoiled(method, getattr(policy, method), spoil))

    @staticmethod
    def _spoiled(method: str, call: Callable[..., Any], spoil: Callable[[str, Any], Any]) -> Callable[..., Any]:
        return lambda *arguments: spoil(method, call(*arguments))


def wrong(spoil: Callable[[str, Any], Any]) -> PolicyFactory:
    def factory(base: int, count: int, clock: Callable[[], float]) -> NewPolicy:
        new = least_recently_used(base, count, clock)
        return lambda: Wrong(new(), spoil)

    return distrusted("acme", factory)


def raises(answer: Any) -> Any:
    raise ValueError("a plugin's fault")


ANSWERS: dict[str, Callable[[Any], Any]] = {
    "raises": raises,
    "none": lambda answer: None,
    "more": lambda answer: [*answer, *range(15)],
    "others": lambda answer: [(entry + 1) % 15 for entry in answer],
    "twice": lambda answer: answer[:1] * len(answer),
    "strange": lambda answer: ["1", 2.0, -1, True, 1 << 40][: len(answer)],
    "empty": lambda answer: [],
    "text": lambda answer: "worth",
    "huge": lambda answer: 1 << 70,
}
WRONG = [
    *((method, "raises") for method in METHODS),
    *(("pop", how) for how in ("none", "more", "others", "twice", "strange", "empty")),
    *((method, how) for method in ("coldest", "worth_of") for how in ("none", "text", "huge")),
]


@pytest.mark.parametrize(("method", "how"), WRONG)
@settings(max_examples=examples(40), deadline=None)
@given(
    after=st.integers(0, 20),
    seed=st.integers(0, 1 << 20),
    counts=st.sampled_from([(9,), (6, 9), (5, 4, 6)]),
    moving=st.booleans(),
)
def test_a_policy_that_goes_wrong_hurts_nobody(method, how, after, seed, counts, moving):
    chance, calls = random.Random(seed), 0

    def spoil(called: str, answer: Any) -> Any:
        nonlocal calls
        calls += called == method
        return ANSWERS[how](answer) if called == method and calls > after else answer

    world = World.of(*counts, policy=wrong(spoil), ahead=0.4, demote=moving, promote=moving)
    sessions = [world.session(b"a"), world.session(b"b")]
    directory = world.directory
    reading: list[tuple[Any, int, dict[int, int]]] = []
    for lease in range(30):
        session, names = chance.choice(sessions), keys(chance.randrange(12), chance.randint(1, 5))
        parents = (key(40),) if chance.random() < 0.5 else ()
        world.store(session, names, chance.choice([GRANULE, GRANULE, 3 * GRANULE]), parents)
        statuses, entries, generations, _ = directory.acquire(session, lease, names[::-1], False)
        held = {e: g for status, e, g in zip(statuses, entries, generations, strict=True) if status == Presence.READY}
        if held:
            reading.append((session, lease, held))
        directory.make_ahead()
        if (move := directory.next_move()) is not None:
            directory.finish_move(move, True)
        if lease % 4 == 0:
            world.check()
        for _, _, pinned in reading:
            assert all(directory.objects.generation[entry] == generation for entry, generation in pinned.items())
        while len(reading) > 2:
            session, ended, pinned = reading.pop(0)
            directory.release(session, ended, len(pinned))
    for session in sessions:
        world.finish(session)
    world.check()
    fresh = world.session(b"c")
    for attempt in range(20):  # so often a policy may say that there is a victim, and give none
        answer = world.store(fresh, keys(100 + 50 * attempt, sum(counts)))
    assert answer == bytes(sum(counts)), "some place cannot be had any more"
    world.check()


@pytest.mark.parametrize("method", METHODS)
def test_after_it_is_dismissed_what_was_used_longest_ago_goes(method):
    calls: list[str] = []

    def spoil(called: str, answer: Any) -> Any:
        calls.append(called)
        return raises(answer) if called == method else answer

    world = World.of(4, policy=wrong(spoil))
    session, directory = world.session(), world.directory
    for name in keys(10, 8):
        world.store(session, [name], parents=(key(10),))
    for name in keys(0, 4):
        world.store(session, [name])
    assert directory.acquire(session, 1, keys(0, 2), True)[0] == bytes([Presence.READY]) * 2
    directory.release(session, 1, 2)
    world.store(session, keys(4, 2))
    assert directory.probe(session, keys(0, 6)) == bytes([1, 1, 0, 0, 1, 1])
    world.check()
    assert calls.count(method) <= 1, "it was asked again"


def test_victims_that_are_decided_about_when_it_is_dismissed_are_victims_again():
    def spoil(called: str, answer: Any) -> Any:
        return raises(answer) if called == "park" else answer

    policy = wrong(spoil)(5, 4, lambda: 1.0)()
    policy.add([5, 6, 7, 8])
    assert policy.pop(3) == [5, 6, 7]
    policy.park(5)
    policy.put_back([6, 7])
    assert sorted(policy.pop(9)) == [5, 6, 7, 8]


def test_it_may_not_give_more_than_it_is_asked_for():
    def greedy(base: int, count: int, clock: Callable[[], float]) -> NewPolicy:
        uses = least_recently_used(base, count, clock)

        def policy() -> Any:
            made = Wrong(order := uses(), lambda method, answer: answer)
            made.pop = lambda count, before=None: order.pop(count + 1)
            return made

        return policy

    world = World.of(6, 9, ahead=0.4, demote=True, policy=distrusted("acme", greedy))
    session = world.session()
    world.store(session, keys(0, 6))
    move = world.directory.next_move()
    assert move is not None
    world.directory.finish_move(move, True)
    assert world.store(session, keys(20, 15)) == bytes(15), "some victim was lost"


def test_a_plugins_policy_is_not_trusted_and_must_know_what_it_is_told(monkeypatch, runtime_dir):
    def old(base: int, count: int, clock: Callable[[], float]) -> NewPolicy:
        new = least_recently_used(base, count, clock)

        def policy() -> Any:
            made = Wrong(new(), lambda method, answer: answer)
            del made.moved_in
            return made

        return policy

    class Plugin:
        @hookimpl
        def maru_eviction_policies(self):
            return [PolicyProvision("acme", least_recently_used), PolicyProvision("old", old)]

    host = PluginHost.with_plugins({"acme": Plugin()}, built_ins=True, strict=True)
    monkeypatch.setattr(PluginHost, "discover", lambda settings: host)
    served: list[ServerSettings] = []
    command = importlib.import_module("maru_core.cli.serve")  # the package has the command under that name
    monkeypatch.setattr(command, "run_server", lambda settings, backends: served.append(settings))
    for name in ("acme", "lru"):
        options = ["--runtime-dir", str(runtime_dir), "--pool-size", "1M", "--eviction-policy", name]
        assert CliRunner().invoke(main, ["serve", *options]).exit_code == 0
    kinds = [type(each.eviction_policy(0, 4, lambda: 0.0)()).__name__ for each in served]
    assert kinds == ["DistrustedPolicy", "LeastRecentlyUsed"]
    with pytest.raises(ConfigError, match="lacks moved_in"):
        host.policy("old")(0, 4, lambda: 0.0)
