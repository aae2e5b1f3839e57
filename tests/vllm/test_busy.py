"""What this engine's own loads keep others from leasing is waited for, in line and for a bounded time."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from attrs import define, field
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

pytest.importorskip("vllm")

from maru_core.client import Lease
from maru_core.keys import KeyChain
from maru_integrations.vllm.matching import AGAIN, Matcher
from maru_integrations.vllm.requests import RequestState
from tests.vllm.fake_store import FakeHandler, FakeStore
from tests.vllm.mini_engine import Engine, reference
from tests.vllm.test_connector import prompt, settled, warm

EngineOn = Callable[..., Engine]
CHUNK, BLOCK, CHUNKS = 16, 8, 4
TIMEOUT = 0.5
LENGTH = CHUNK * CHUNKS + 1


@define
class World:
    """Prompts of four chunks, all stored, and a matcher of an engine that loads."""

    store: FakeStore = field(factory=FakeStore)
    now: float = 0.0
    #: Leases that loads hold, by request.
    loads: dict[str, Lease] = field(factory=dict)
    counts: dict[str, int] = field(factory=dict)
    states: dict[str, RequestState] = field(factory=dict)
    matcher: Matcher = field(init=False)
    handler: FakeHandler = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.handler = FakeHandler(self.store)
        self.matcher = Matcher(
            self.handler,  # type: ignore[arg-type]
            chunk_tokens=CHUNK,
            block_size=BLOCK,
            lookup_timeout=TIMEOUT,
            clock=lambda: self.now,
            count=lambda name: self.counts.update({name: self.counts.get(name, 0) + 1}),
            loading=lambda: bool(self.loads),
        )

    def request(self, number: int) -> str:
        """Its prompt is stored."""
        name, tokens = f"r{number}", [number * 1000 + index for index in range(LENGTH)]
        chain = KeyChain(bytes(32), CHUNK)
        chain.extend(tokens, CHUNK * CHUNKS)
        new = [key for key in chain.keys if key not in self.store.objects]
        if new:
            grants = self.handler.reserve(new, 8, [bytes(32)] * len(new), weights_epoch=0)
            self.handler.commit(grants, checksums=False)
        request = SimpleNamespace(request_id=name, all_token_ids=tokens)
        self.states[name] = RequestState(request, KeyChain(bytes(32), CHUNK))
        return name

    def match(self, name: str) -> int | None:
        return self.matcher.match(self.states[name], LENGTH, 0)

    def load(self, name: str) -> None:
        """vLLM takes what was promised."""
        hit = self.states[name].hit
        assert hit is not None
        self.loads[name], self.states[name].hit = hit.lease, None

    def ended(self, name: str) -> Lease:
        """Its lease, which the server hears of when it is released."""
        self.matcher.given_back()
        return self.loads.pop(name)

    def end(self, name: str) -> None:
        self.handler.release(self.ended(name))

    def step(self, seconds: float = 2 * AGAIN) -> None:
        self.now += seconds
        self.matcher.new_step(idle=False)


@pytest.fixture
def world() -> World:
    """Of three requests two may be leased, and the first is loaded."""
    made = World()
    made.store.share = 2 * CHUNKS
    for number in range(3):
        made.request(number)
    assert made.match("r0") == CHUNK * CHUNKS
    made.load("r0")
    assert made.match("r1") == CHUNK * CHUNKS
    return made


def test_it_hits_when_a_load_has_given_back_what_it_held(world: World) -> None:
    assert world.match("r2") is None
    for _ in range(3):
        world.step()
        assert world.match("r2") is None
    world.end("r0")
    world.load("r1")
    world.step()
    assert world.match("r2") == CHUNK * CHUNKS
    assert world.counts["lookups_busy"] == 1


def test_what_the_last_load_gave_back_may_reach_the_server_a_moment_later(world: World) -> None:
    world.match("r2")
    lease = world.ended("r0")
    assert not world.loads
    for _ in range(4):
        world.step()
        assert world.match("r2") is None
    world.handler.release(lease)
    world.step()
    assert world.match("r2") == CHUNK * CHUNKS


def test_its_deadline_is_that_of_its_first_question(world: World) -> None:
    began = world.now
    while world.match("r2") is None:
        world.step(0.02)
    assert TIMEOUT / 2 < world.now - began <= TIMEOUT
    assert world.match("r2") == 0
    assert not world.matcher._line


def test_it_is_not_waited_for_when_nothing_is_loaded(world: World) -> None:
    """What is only promised goes to a request that waits for blocks, which may take any time."""
    world.end("r0")
    world.step(0.1)
    world.store.share = CHUNKS
    assert world.match("r2") == 0


def test_a_part_is_taken_at_the_end_and_not_held_until_then(world: World) -> None:
    world.store.share = 2 * CHUNKS + 1
    while True:
        found = world.match("r2")
        held = sum(len(taken) for taken in world.store.leases.values())
        if found is not None:
            break
        assert held == 2 * CHUNKS
        world.step(0.02)
    assert found == CHUNK
    assert held == 2 * CHUNKS + 1


def test_it_is_asked_for_once_in_a_while_and_by_the_first_only(world: World) -> None:
    world.request(3)
    assert world.match("r2") is world.match("r3") is None
    before = world.store.lookups
    for _ in range(10):
        world.step(AGAIN / 4)
        assert world.match("r2") is world.match("r3") is None
    assert world.store.lookups - before <= 3
    world.end("r0")
    world.load("r1")
    world.step()
    # As many as may be leased, in their order.
    assert world.match("r3") is None
    assert world.match("r2") == CHUNK * CHUNKS
    world.end("r1")
    world.load("r2")
    assert world.match("r3") == CHUNK * CHUNKS


@pytest.mark.parametrize("how", ["aborted", "longer prefix", "failed", "server away"])
def test_who_is_gone_leaves_the_line(world: World, how: str) -> None:
    world.request(3)
    assert world.match("r2") is world.match("r3") is None
    first = world.states["r2"]
    world.step()
    if how == "aborted":
        world.matcher.drop(first)
    elif how == "longer prefix":
        assert world.matcher.match(first, LENGTH, CHUNK * CHUNKS) == 0
    elif how == "failed":
        first.failed = True
        assert world.match("r2") == 0
    else:
        world.store.up = False
        assert world.match("r2") == 0
        world.store.up = True
    assert list(world.matcher._line) == ["r3"]
    world.end("r0")
    world.load("r1")
    world.step()
    assert world.match("r3") == CHUNK * CHUNKS


@settings(max_examples=60, stateful_step_count=40, deadline=None)
class Lives(RuleBasedStateMachine):
    """Requests that come, hit, are loaded and go, in a pool of which few may be leased."""

    @initialize(share=st.integers(1, 3 * CHUNKS), late=st.integers(0, 2))
    def begin(self, share: int, late: int) -> None:
        self.world = World()
        self.world.store.share = share
        self.world.store.answer_after = late
        self.waiting: dict[str, float] = {}
        self.number = 0

    @rule(repeats=st.booleans())
    def come(self, repeats: bool) -> None:
        self.number += 1
        self.waiting[self.world.request(self.number)] = self.world.now

    @precondition(lambda self: self.world.loads)
    @rule(data=st.data())
    def load_ends(self, data: st.DataObject) -> None:
        self.world.end(data.draw(st.sampled_from(sorted(self.world.loads))))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.waiting)))
        del self.waiting[name]
        self.world.matcher.drop(self.world.states.pop(name))

    @rule(seconds=st.floats(0.0005, 0.05), takes=st.booleans())
    def step(self, seconds: float, takes: bool) -> None:
        world = self.world
        world.step(seconds)
        asked = world.store.lookups
        in_line = [name for name in world.matcher._line if name in self.waiting]
        fresh = [name for name in self.waiting if name not in in_line]
        for name in list(self.waiting):
            found = world.match(name)
            state = world.states[name]
            if found is None:
                assert state.hit is None
                assert state.lookup is not None or name in world.matcher._line
            elif found == 0 or takes:
                del self.waiting[name]
                if found:
                    world.load(name)
                else:
                    world.matcher.drop(state)
        assert world.store.lookups - asked <= 2 * len(fresh) + len(in_line)

    @invariant()
    def who_waits_holds_nothing_but_what_is_asked_and_nobody_waits_for_ever(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        held = sum(len(taken) for taken in world.store.leases.values())
        used = [state.hit.lease for state in world.states.values() if state.hit is not None]
        assert held == sum(lease.leading for lease in (*used, *world.loads.values()))
        assert set(world.matcher._line) <= set(self.waiting)
        for name in world.matcher._line:
            busy = world.states[name].busy
            assert busy is not None
            assert world.now < busy.deadline + 0.06

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        for _ in range(80):
            for name in list(self.world.loads):
                self.world.end(name)
            self.step(0.05, True)
        assert not self.waiting
        for name in list(self.world.loads):
            self.world.end(name)
        assert not self.world.store.leases
        assert not self.world.matcher._line


TestLives = Lives.TestCase


@pytest.mark.parametrize("window", [0, 1])
@pytest.mark.parametrize("share", [1, 3])
def test_of_a_burst_larger_than_the_share_everybody_is_loaded(engine_on: EngineOn, share: int, window: int) -> None:
    """Eight requests of six chunks, of which one or three may be leased at a time: none of them is computed."""
    store = FakeStore()
    prompts = {f"r{number}": prompt(200, number) for number in range(1, 9)}
    warm(engine_on, store, *prompts.values())
    store.share = 6 * share
    extra: dict[str, Any] = {"maru_async_load": True, "maru_load_admission_window": window, "maru_lookup_timeout": 30.0}
    engine = engine_on(store, extra=extra, num_blocks=256)
    for name, tokens in prompts.items():
        engine.add(name, tokens)
    engine.run(4000)
    assert engine.external == dict.fromkeys(prompts, 192)
    for name, tokens in prompts.items():
        assert engine.answers[name] == reference(tokens, 3)
    settled(engine, 255)
