"""Who finds its prompt in the pool while its engine leases all that it may: it waits, in order, and is loaded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from attrs import define, evolve, field
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from maru_core.client import Lease
from maru_core.keys import KeyChain
from maru_integrations.vllm.matching import Matcher
from maru_integrations.vllm.requests import RequestState
from maru_integrations.vllm.shareline import LATER, SETTLES, SOON, ShareLine
from tests.vllm.fake_store import FakeHandler, FakeStore

CHUNK, BLOCK, MOST = 16, 8, 4
LOOKUP, LOAD = 0.5, 10.0
STEP = 0.01


@define
class World:
    """A matcher, requests of up to four chunks that differ from the first token on, and loads of what they hit.

    Steps are as vLLM's: each request that has no answer yet is looked up for once, in the order of arrival.
    """

    share: int = 2 * MOST
    store: FakeStore = field(factory=FakeStore)
    now: float = 0.0
    states: dict[str, RequestState] = field(factory=dict)
    #: Leases of loads under way, by request.
    loads: dict[str, Lease] = field(factory=dict)
    #: What vLLM was told in the end, in tokens.
    told: dict[str, int] = field(factory=dict)
    #: Requests whose hits vLLM has no blocks for.
    blocked: set[str] = field(factory=set)
    counts: list[str] = field(factory=list)
    line: ShareLine = field(factory=ShareLine)
    handler: FakeHandler = field(init=False)
    matcher: Matcher = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.handler = FakeHandler(self.store)
        self.store.share = self.share
        self.matcher = Matcher(
            self.handler,  # type: ignore[arg-type]
            chunk_tokens=CHUNK,
            block_size=BLOCK,
            lookup_timeout=LOOKUP,
            clock=lambda: self.now,
            count=self.counts.append,
            line=self.line,
            loads=self.loads,
            load_timeout=LOAD,
            states=self.states,
        )

    def come(self, name: str, chunks: int = MOST, *, stored: bool = True) -> RequestState:
        tokens = [sum(name.encode()) * 1000 + position for position in range(chunks * CHUNK + 1)]
        if stored:
            chain = KeyChain(bytes(32), CHUNK)
            chain.extend(tokens, chunks * CHUNK)
            new = [key for key in chain.keys if key not in self.store.objects]
            self.handler.commit(self.handler.reserve(new, 8, [bytes(32)] * len(new), weights_epoch=0), checksums=False)
        request: Any = SimpleNamespace(request_id=name, all_token_ids=tokens)
        self.states[name] = RequestState(request, KeyChain(bytes(32), CHUNK))
        return self.states[name]

    def ask_on_arrival(self, name: str, monkeypatch: pytest.MonkeyPatch) -> Lease:
        """The server leases when it is asked, and is heard when it is the request's turn."""
        state = self.states[name]
        assert self.matcher.ask(state, len(state.request.all_token_ids), 0)
        assert state.lookup is not None
        lease = state.lookup.pending.poll()
        assert lease is not None
        monkeypatch.setattr(state.lookup.pending, "poll", lambda timeout: lease)
        return lease

    def match(self, name: str, local: int = 0) -> int | None:
        state = self.states[name]
        found = self.matcher.match(state, len(state.request.all_token_ids), local)
        if found is not None and (not found or name not in self.blocked):
            self.told[name] = found
            if state.hit is not None:
                self.loads[name], state.hit = state.hit.lease, None
        return found

    def step(self, seconds: float = STEP) -> None:
        self.now += seconds
        self.matcher.new_step(idle=False)
        for name in list(self.states):
            if name not in self.told:
                self.match(name)

    def steps(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.step()

    def load_ends(self, name: str) -> None:
        self.matcher.give_back(self.loads.pop(name))

    def go(self, name: str) -> None:
        self.matcher.drop(self.states.pop(name))

    @property
    def held(self) -> int:
        return sum(len(objects) for objects in self.store.leases.values())


@pytest.fixture
def world() -> World:
    """Two requests are being loaded, which is all that may be leased, and a third is answered BUSY."""
    world = World()
    for name in "abc":
        world.come(name)
    world.step()
    assert world.told == {"a": MOST * CHUNK, "b": MOST * CHUNK}
    return world


def test_it_is_loaded_in_the_step_after_a_load_that_gives_enough_back(world: World) -> None:
    world.steps(3.0)
    assert "c" not in world.told
    world.load_ends("a")
    world.step()
    assert world.told["c"] == MOST * CHUNK
    assert not world.line.places
    assert world.counts.count("lookups_busy") == 1


def test_it_waits_for_loads_as_long_as_a_load_may_take_and_no_longer(world: World) -> None:
    world.steps(LOAD - 3 * STEP)
    assert "c" not in world.told
    world.steps(4 * STEP)
    assert world.told.pop("c") == 0
    assert not world.line.places
    asked = world.store.lookups
    world.load_ends("a")
    world.step()
    assert world.told["c"] == 0, "it has waited once"
    assert world.store.lookups == asked


def test_it_waits_for_what_was_only_promised_as_long_as_for_an_answer() -> None:
    """Whoever was promised that waits for blocks, which may take until others have finished."""
    world = World(share=MOST, blocked={"a"})
    world.come("a")
    world.come("c")
    world.step()
    world.steps(LOOKUP - 3 * STEP)
    assert "c" not in world.told
    world.steps(4 * STEP)
    assert world.told == {"c": 0}


def test_nobody_waits_when_nothing_will_be_given_back() -> None:
    """Its prompt alone is larger than the share: it takes the beginning at once."""
    world = World(share=3)
    world.come("a")
    world.step()
    assert world.told == {"a": 3 * CHUNK}
    assert "lookups_busy" not in world.counts


def test_what_is_larger_than_the_share_waits_until_it_can_have_most() -> None:
    """Everything was given back then, so that is all that it will get."""
    world = World(share=3)
    world.come("a", 2)
    world.step()
    world.come("c")
    world.steps(1.0)
    assert "c" not in world.told
    world.load_ends("a")
    world.step(0.0)
    assert "c" not in world.told, "the server may not have heard of it"
    world.steps(SETTLES)
    assert world.told["c"] == 3 * CHUNK


@pytest.mark.parametrize("others", [0, 1])
def test_the_last_load_is_waited_for_until_the_server_has_heard_of_its_end(others: int) -> None:
    """Then nothing is leased any more that could be given back."""
    world = World(share=MOST)
    world.come("a")
    world.step()
    for number in range(1 + others):
        world.come("c" + "x" * number)
    world.step()
    lease = world.loads["a"]
    world.loads["a"] = evolve(lease, ids=())
    world.load_ends("a")
    world.step(0.001)
    world.step(0.001)
    assert "c" not in world.told
    world.handler.release(lease)
    world.step(2 * SOON)
    assert world.told["c"] == MOST * CHUNK


def test_a_part_is_held_by_nobody_who_waits() -> None:
    """Two that need more than half of the share each would wait for each other with what the other needs."""
    world = World(share=5)
    for name, chunks in (("a", 3), ("c", 4), ("d", 4)):
        world.come(name, chunks)
    world.step()
    for _ in range(20):
        world.step()
        assert world.held == 3, "that of the load"
    world.load_ends("a")
    world.step()
    assert world.told["c"] == 4 * CHUNK
    assert "d" not in world.told
    world.load_ends("c")
    world.step()
    assert world.told["d"] == 4 * CHUNK


def test_at_its_end_it_takes_the_part_that_there_is() -> None:
    world = World(share=5)
    for name, chunks in (("a", 3), ("c", 4)):
        world.come(name, chunks)
    world.steps(2 * LOAD)
    assert world.told["c"] == 2 * CHUNK


def test_who_comes_later_does_not_overtake_however_little_it_needs(world: World) -> None:
    """There is never room for what the first needs if those who need less are always served before."""
    world.load_ends("a")
    world.step()
    world.come("d", MOST)
    world.step()
    world.load_ends("b")
    world.load_ends("c")
    world.come("small", 1)
    world.store.share = MOST
    world.step()
    assert "d" in world.told
    assert "small" not in world.told
    world.load_ends("d")
    world.step()
    assert world.told["small"] == CHUNK


def test_small_ones_that_keep_coming_do_not_starve_a_large_one() -> None:
    world = World(share=MOST)
    world.come("first", 1)
    world.step()
    world.come("large", MOST)
    for number in range(50):
        world.come(f"small{number}" + "x" * number, 1)
        world.step()
        if "first" in world.loads and number > 2:
            world.load_ends("first")
    assert world.told["large"] == MOST * CHUNK


def test_who_came_second_and_is_first_when_it_is_answered_need_not_wait(world: World) -> None:
    world.store.answer_after = 1
    world.load_ends("a")
    world.come("d")
    world.step()
    assert world.states["d"].lookup is not None
    world.go("c")
    world.step()
    assert world.told["d"] == MOST * CHUNK
    assert world.counts.count("lookups_busy") == 1, "the other one"


def test_who_misses_does_not_wait_behind_those_who_hit(world: World) -> None:
    world.come("miss", stored=False)
    world.step()
    assert world.told["miss"] == 0
    assert "c" not in world.told


def test_nobody_is_asked_for_on_arrival_while_others_wait(world: World) -> None:
    """What it would be leased is theirs."""
    state = world.come("d")
    asked = world.store.lookups
    assert world.matcher.ask(state, len(state.request.all_token_ids), 0) is False
    assert world.store.lookups == asked


def test_what_was_leased_on_arrival_before_anybody_waited_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(share=MOST + 1)
    for name, chunks in (("a", MOST), ("c", MOST), ("s", 1)):
        world.come(name, chunks)
    for name in "asc":
        world.ask_on_arrival(name, monkeypatch)
    world.step()
    assert world.told == {"a": MOST * CHUNK, "s": CHUNK}
    assert list(world.line.places) == ["c"]


def test_what_was_answered_on_arrival_need_not_be_so_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """So it is no reason to take what there was."""
    world = World(share=MOST)
    for name in "ac":
        world.come(name)
    lease = world.ask_on_arrival("a", monkeypatch)
    world.ask_on_arrival("c", monkeypatch)
    world.handler.release(lease)
    world.go("a")
    world.step(2 * SETTLES)
    assert world.told == {"c": MOST * CHUNK}


def test_of_a_burst_only_the_first_that_is_over_the_share_asks_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    for name in "abcdef":
        world.come(name)
        world.ask_on_arrival(name, monkeypatch)
    world.step()
    assert list(world.line.places) == ["c", "d", "e", "f"]
    assert world.store.lookups == 6 + 1


def test_what_others_asked_for_on_arrival_is_waited_for_as_long_as_for_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is leased for them, though nobody has looked yet."""
    world = World(share=MOST)
    for name in "ac":
        world.come(name)
    world.ask_on_arrival("a", monkeypatch)
    while world.match("c") is None:
        world.now += STEP
        world.matcher.new_step(idle=False)
    assert LOOKUP - 3 * STEP < world.now < LOOKUP + STEP


def test_one_question_a_step_and_few_while_nothing_is_given_back(world: World) -> None:
    for name in "defg":
        world.come(name)
    world.step()
    world.step()
    before = world.store.lookups
    for _ in range(1000):
        asked = world.store.lookups
        world.step(0.001)
        assert world.store.lookups <= asked + 1
    assert world.store.lookups - before <= 1 / LATER + 8
    world.load_ends("a")
    asked = world.store.lookups
    world.step(SOON / 10)
    # The first has its lease, and the next one is answered BUSY.
    assert world.store.lookups == asked + 2
    assert world.told["c"] == MOST * CHUNK
    assert list(world.line.places) == ["d", "e", "f", "g"]


def test_a_server_that_hears_late_of_what_was_given_back_is_asked_again_soon(world: World) -> None:
    """Leases are given back by another thread, on a connection of its own."""
    lease = world.loads["a"]
    world.loads["a"] = evolve(lease, ids=())
    world.load_ends("a")
    world.step(0.001)
    assert "c" not in world.told
    world.handler.release(lease)
    world.step(SOON)
    assert world.told["c"] == MOST * CHUNK


def test_however_long_it_has_waited_it_asks_now_and_then(world: World) -> None:
    """Nobody here need be told of what ends a lease."""
    world.steps(LOAD / 2)
    world.handler.release(world.loads["a"])
    world.steps(LATER + 2 * STEP)
    assert world.told["c"] == MOST * CHUNK


@pytest.mark.parametrize("how", ["aborted", "own prefix", "failed load", "reset"])
def test_who_does_not_wait_any_more_lets_the_next_one_ask(world: World, how: str) -> None:
    world.come("d")
    world.step()
    first = world.states["c"]
    if how == "aborted":
        world.go("c")
    elif how == "own prefix":
        assert world.match("c", local=MOST * CHUNK) == 0
    elif how == "failed load":
        first.failed = True
        assert world.match("c") == 0
    else:
        world.matcher.drop(first)
        first.asked = True
    assert list(world.line.places) == ["d"]
    world.load_ends("a")
    world.step()
    assert world.told["d"] == MOST * CHUNK


@pytest.mark.parametrize("shrinks", [False, True])
def test_vllms_own_prefix_may_change_while_it_waits(world: World, shrinks: bool) -> None:
    """Its place and its time stay."""
    world.store.answer_after = 2
    for step in range(200):
        world.now += 0.1
        world.matcher.new_step(idle=False)
        if world.match("c", local=CHUNK * (step % 2 if shrinks else 1)) is not None:
            break
    assert world.now <= LOAD + 1.0
    assert not world.line.places


def test_a_server_that_dies_meanwhile_is_waited_for_no_longer_than_by_others(world: World) -> None:
    world.come("d")
    world.step()
    world.store.answer_after = 10**9
    start = world.now
    world.load_ends("a")
    while "d" not in world.told or "c" not in world.told:
        world.step()
    assert world.now - start <= LOOKUP + 2 * STEP
    assert world.told["c"] == world.told["d"] == 0
    assert not world.line.places
    assert world.matcher._breaker.is_open


def test_an_answer_that_never_comes_is_not_waited_for(world: World) -> None:
    world.store.answer_after = 1
    world.load_ends("a")
    world.step()
    assert world.states["c"].lookup is not None
    world.store.up = False
    world.step()
    assert world.told["c"] == 0
    assert not world.line.places


def test_who_is_not_first_does_not_ask_when_vllm_considers_it_first(world: World) -> None:
    """As it does with a request that is more important."""
    world.come("d")
    world.step()
    world.load_ends("a")
    world.now += STEP
    world.matcher.new_step(idle=False)
    asked = world.store.lookups
    assert world.match("d") is None
    assert world.store.lookups == asked
    assert world.match("c") == MOST * CHUNK


def test_it_is_the_first_who_finds_that_nothing_is_leased_any_more(world: World) -> None:
    world.come("d")
    world.step()
    world.load_ends("a")
    world.load_ends("b")
    world.store.share = MOST - 1
    world.now += SETTLES + STEP
    world.matcher.new_step(idle=False)
    assert world.match("d") is None
    assert world.match("c") == (MOST - 1) * CHUNK
    assert world.match("d") is None


def test_when_the_first_leaves_the_next_one_asks_at_once() -> None:
    """It may need less."""
    world = World(share=2 * MOST + 1)
    for name, chunks in (("a", MOST), ("b", MOST), ("c", MOST), ("d", 1), ("e", 1)):
        world.come(name, chunks)
    world.steps(1.0)
    asked = world.store.lookups
    world.go("e")
    world.step(0.0)
    assert world.store.lookups == asked, "not for anybody else who leaves"
    world.go("c")
    world.step(0.0)
    assert world.told["d"] == CHUNK


def test_an_unanswered_question_of_who_goes_is_news_for_those_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    for name in "abc":
        world.come(name)
    lease = world.ask_on_arrival("a", monkeypatch)
    assert world.match("b") == MOST * CHUNK
    for _ in range(25):
        assert world.match("c") is None
        world.now += STEP
    asked = world.store.lookups
    assert world.match("c") is None
    assert world.store.lookups == asked
    world.handler.release(lease)
    world.go("a")
    assert world.match("c") == MOST * CHUNK


def test_what_a_newcomer_gives_up_for_the_first_is_asked_for_soon() -> None:
    world = World(share=MOST + 1)
    for name in "ac":
        world.come(name)
    world.steps(1.0)
    asked = world.store.lookups
    world.step(0.0)
    assert world.store.lookups == asked, "nothing was given back for long"
    world.come("small", 1)
    world.step(0.0)
    asked = world.store.lookups
    world.step(0.0)
    assert world.store.lookups == asked + 1
    assert list(world.line.places) == ["c", "small"]


def test_those_who_keep_coming_do_not_keep_the_first_from_what_there_is() -> None:
    """Each gives up at once what it was leased, which does not count as something that the first still waits for."""
    world = World(share=3)
    world.come("a", 1)
    world.come("c")
    world.step()
    world.load_ends("a")
    end = world.now + 2 * SETTLES
    while world.now < end:
        world.come("small" + "x" * len(world.states), 1)
        world.step()
    assert world.told["c"] == 3 * CHUNK


def test_a_server_that_is_known_to_be_gone_is_not_waited_for(world: World) -> None:
    world.store.up = False
    world.load_ends("a")
    world.step()
    assert world.told["c"] == 0
    assert not world.line.places


def test_a_server_that_restarts_meanwhile_gives_what_it_has_kept(world: World) -> None:
    world.store.epoch += 1
    for lease_id in list(world.store.leases):
        world.store.release(lease_id)
    world.load_ends("a")
    world.step()
    assert world.told["c"] == MOST * CHUNK


def test_what_was_evicted_while_it_waited_is_a_miss(world: World) -> None:
    assert world.states["c"].chain is not None
    for key in world.states["c"].chain.keys:
        world.store.drop(key)
    world.load_ends("a")
    world.step()
    assert world.told["c"] == 0


def test_waiting_takes_no_time_of_a_step(world: World) -> None:
    """What is not asked is not polled for."""
    world.store.patience.clear()
    for _ in range(20):
        world.now += SOON / 100
        world.matcher.new_step(idle=False)
        world.match("c")
    assert len(world.store.patience) <= 1


@settings(max_examples=100, stateful_step_count=50, deadline=None)
class Lives(RuleBasedStateMachine):
    """Requests of any size that come, are asked for on arrival or not, load, go, and find servers that are late."""

    @initialize(share=st.integers(1, 3 * MOST))
    def begin(self, share: int) -> None:
        self.world = World(share=share)
        self.number = 0
        #: Since when each waits.
        self.since: dict[str, float] = {}

    @rule(chunks=st.integers(1, MOST), stored=st.booleans(), ahead=st.booleans())
    def come(self, chunks: int, stored: bool, ahead: bool) -> None:
        self.number += 1
        name = "x" * self.number
        state = self.world.come(name, chunks, stored=stored)
        if ahead:
            self.world.matcher.ask(state, len(state.request.all_token_ids), 0)

    @precondition(lambda self: self.world.loads)
    @rule(data=st.data())
    def load_ends(self, data: st.DataObject) -> None:
        self.world.load_ends(data.draw(st.sampled_from(sorted(self.world.loads))))

    @precondition(lambda self: set(self.world.states) - set(self.world.told))
    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        left = sorted(set(self.world.states) - set(self.world.told))
        self.world.go(data.draw(st.sampled_from(left)))

    @rule(late=st.sampled_from([0, 0, 0, 1, 2]))
    def server(self, late: int) -> None:
        self.world.store.answer_after = late

    @precondition(lambda self: set(self.world.states) - set(self.world.told))
    @rule(data=st.data())
    def blocks(self, data: st.DataObject) -> None:
        left = sorted(set(self.world.states) - set(self.world.told))
        self.world.blocked ^= {data.draw(st.sampled_from(left))}

    @rule(seconds=st.sampled_from([0.0001, SOON, STEP, 0.05]))
    def step(self, seconds: float) -> None:
        world = self.world
        line, before, asked = list(world.line.places), dict(world.told), world.store.lookups
        fresh = set(world.states) - set(world.told) - set(line)
        world.step(seconds)
        hits = {name for name, state in world.states.items() if state.hit is not None}
        served = [name for name in line if name in hits or (world.told.get(name) and name not in before)]
        assert served == line[: len(served)], "overtaken by one who came later"
        newly = [name for name in line if name not in world.line.places]
        # Who was answered, one in vain, and those who do not wait yet: twice if they were asked for on arrival.
        assert world.store.lookups - asked <= len(newly) + 1 + 2 * len(fresh)

    @invariant()
    def who_waits_holds_nothing_and_is_there(self) -> None:
        world = getattr(self, "world", None)
        if world is None:
            return
        using = sum(lease.leading for lease in world.loads.values())
        using += sum(state.hit.lease.leading for state in world.states.values() if state.hit)
        assert world.held == using
        waiting = set(world.states) - set(world.told)
        assert set(world.line.places) <= waiting
        for place in world.line.places.values():
            assert world.now - place.since <= LOAD + LOOKUP

    def teardown(self) -> None:
        world = getattr(self, "world", None)
        if world is None:
            return
        world.blocked.clear()
        world.store.answer_after = 0
        for _ in range(3 * self.number + 100):
            for name in list(world.loads):
                world.load_ends(name)
            world.step(0.05)
        assert set(world.states) == set(world.states) & set(world.told), "nobody waits for ever"
        for name in list(world.loads):
            world.load_ends(name)
        assert not world.store.leases
        assert not world.line.places


TestLives = Lives.TestCase
