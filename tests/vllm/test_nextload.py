"""The plan of the next load: whatever happens, what is carried out is its own plan, and every other one lets go."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from attrs import define, evolve, field
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

pytest.importorskip("vllm")

from maru_core.errors import StaleEpoch
from maru_integrations.vllm.moving import Link, Planned
from maru_integrations.vllm.nextload import NextLoad


@define(eq=False)
class Plan:
    """Stands in for a prepared load."""

    what: tuple[Any, ...]
    closed: int = 0

    def close(self) -> None:
        self.closed += 1


@define(eq=False)
class Jobs:
    """Two loads, two transfers, two ways to plan, and a server that may be replaced."""

    epoch: int = 1
    made: list[Plan] = field(factory=list)
    jobs: list[Any] = field(init=False)
    links: list[Link] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.jobs = [self.granted() for _ in range(2)]
        handler: Any = self
        stored: Any = None
        self.links = [Link(handler, object(), stored) for _ in range(2)]  # type: ignore[arg-type]

    def granted(self) -> Any:
        return SimpleNamespace(good=0, op=SimpleNamespace(epoch=self.epoch, request_id="r"))

    def adopt(self, epoch: int, *columns: Any) -> None:
        if epoch != self.epoch:
            raise StaleEpoch("injected: another epoch")

    def _make(self, way: str, link: Link, job: Any) -> Planned[Plan]:
        self.adopt(job.op.epoch)
        plan = Plan((way, link.transfer, job, job.good, job.op.epoch))
        self.made.append(plan)
        located: Any = None
        return Planned(located, plan, 1, "test")

    def whole(self, link: Link, job: Any) -> Planned[Plan]:
        return self._make("whole", link, job)

    def by_layer(self, link: Link, job: Any) -> Planned[Plan]:
        return self._make("by layer", link, job)


EITHER = st.integers(0, 1)


class Life(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world, self.next = Jobs(), NextLoad()
        self.pool = ThreadPoolExecutor(1)

    def teardown(self) -> None:
        self.next.forget()
        self.pool.shutdown()
        assert all(plan.closed for plan in self.world.made)

    def way(self, number: int) -> Any:
        return (self.world.whole, self.world.by_layer)[number]

    @rule(job=EITHER, link=EITHER, way=EITHER)
    def plan(self, job: int, link: int, way: int) -> None:
        self.next.plan(self.world.jobs[job], self.world.links[link], self.way(way), self.pool)

    @rule(job=EITHER, link=EITHER, way=EITHER)
    def take(self, job: int, link: int, way: int) -> None:
        taken = self.world.jobs[job]
        try:
            found = self.next.take(taken, self.world.links[link], self.way(way)).load
        except StaleEpoch:
            assert taken.op.epoch != self.world.epoch
        else:
            name = ("whole", "by layer")[way]
            assert found.what == (name, self.world.links[link].transfer, taken, taken.good, self.world.epoch)
            assert not found.closed
            found.close()
        assert not self.next.is_planned
        assert all(plan.closed for plan in self.world.made)

    @rule(job=st.sampled_from([0, 1, None]))
    def turn(self, job: int | None) -> None:
        """Before a load is worked on, or there is none."""
        planned = self.next.is_planned
        self.next.forget(unless=None if job is None else self.world.jobs[job])
        if job is None or not planned:
            assert not self.next.is_planned

    @rule(job=EITHER)
    def moves_on(self, job: int) -> None:
        self.world.jobs[job].good += 1

    @rule(link=EITHER)
    def transfer_is_replaced(self, link: int) -> None:
        self.world.links[link].transfer = object()  # type: ignore[assignment]

    @rule(job=st.sampled_from([0, 1, None]))
    def server_is_replaced(self, job: int | None) -> None:
        """All but one load were granted by the new one."""
        self.world.epoch += 1
        for number in {0, 1} - {job}:
            self.world.jobs[number] = self.world.granted()

    @invariant()
    def nothing_is_held_beside_the_plan(self) -> None:
        self.pool.submit(int).result()
        held = [plan for plan in self.world.made if not plan.closed]
        assert len(held) <= self.next.is_planned
        assert all(plan.closed <= 1 for plan in self.world.made)


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def test_a_plan_is_made_once_and_used_as_it_is(pool: ThreadPoolExecutor) -> None:
    world, after = Jobs(), NextLoad()
    after.plan(world.jobs[0], world.links[0], world.by_layer, pool)
    after.forget(unless=world.jobs[0])
    taken = after.take(world.jobs[0], world.links[0], world.by_layer)
    assert world.made == [taken.load]
    assert not taken.load.closed


@pytest.mark.parametrize("planned", [*product((0, 1), repeat=3)])
@pytest.mark.parametrize("taken", [*product((0, 1), repeat=3)])
def test_another_plan_than_that_of_the_load_is_let_go_of(
    pool: ThreadPoolExecutor, planned: tuple[int, ...], taken: tuple[int, ...]
) -> None:
    """Whichever load, transfer and way it is for."""
    world, after = Jobs(), NextLoad()
    ways = (world.whole, world.by_layer)
    job, link, way = planned
    after.plan(world.jobs[job], world.links[link], ways[way], pool)
    job, link, way = taken
    found = after.take(world.jobs[job], world.links[link], ways[way]).load
    assert found.what[:3] == (("whole", "by layer")[way], world.links[link].transfer, world.jobs[job])
    assert len(world.made) == 1 + (planned != taken)
    assert [plan for plan in world.made if not plan.closed] == [found]


def test_the_plan_of_a_load_that_moved_on_is_let_go_of(pool: ThreadPoolExecutor) -> None:
    world, after = Jobs(), NextLoad()
    after.plan(world.jobs[0], world.links[0], world.whole, pool)
    world.jobs[0].good = 3
    found = after.take(world.jobs[0], world.links[0], world.whole).load
    assert found.what[3] == 3
    assert [plan for plan in world.made if not plan.closed] == [found]


def test_a_plan_that_cannot_be_closed_keeps_nobody_from_the_next_load(pool: ThreadPoolExecutor) -> None:
    class Stubborn(Plan):
        def close(self) -> None:
            raise RuntimeError("injected")

    world, after = Jobs(), NextLoad()

    def stubborn(link: Link, job: Any) -> Planned[Plan]:
        return evolve(world.whole(link, job), load=Stubborn(()))

    after.plan(world.jobs[0], world.links[0], stubborn, pool)
    assert after.take(world.jobs[1], world.links[0], world.whole).load.what[2] is world.jobs[1]
