"""When a load that is under way is released: a decision, and what is measured for it, on a clock that is not real."""

from __future__ import annotations

import math

import pytest
from attrs import define, evolve, field, frozen
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm")

from maru_integrations.vllm.release import Outlook, Progress, Recent, Rhythm, is_due

SECONDS = st.floats(1e-4, 10.0)
KNOWN = st.none() | st.floats(0.0, 10.0)
OUTLOOKS = st.builds(Outlook, KNOWN, KNOWN, st.floats(0.0, 1.0))


@st.composite
def progresses(draw: st.DrawFn) -> Progress:
    layers = draw(st.integers(1, 80))
    return Progress(draw(st.integers(0, layers)), layers, draw(st.floats(0.0, 100.0)), draw(st.none() | SECONDS))


@given(progresses(), st.integers(1, 80), st.integers(0, 9), OUTLOOKS)
def test_whatever_is_measured_the_minimum_holds_and_nothing_is_held_for_nothing(
    progress: Progress, minimum: int, computing: int, outlook: Outlook
) -> None:
    minimum = min(minimum, progress.layers)
    due = is_due(progress, minimum, computing, outlook)
    if progress.done < minimum:
        assert not due
    elif not computing or progress.done == progress.layers or outlook.lead is None or outlook.step is None:
        assert due
    elif due:
        assert progress.remaining <= outlook.lead + outlook.step + outlook.patience
        assert is_due(progress, minimum, 0, outlook)


@pytest.mark.parametrize(
    ("done", "computing", "outlook", "due"),
    [
        (1, 0, Outlook(0.0, 0.0), True),
        (1, 1, Outlook(0.0, 0.0), False),
        (1, 1, Outlook(None, 0.0), True),
        (1, 1, Outlook(0.0, None), True),
        (0, 0, Outlook(), False),
        (1, 1, Outlook(0.02, 0.0188), True),
        (1, 1, Outlook(0.02, 0.0187), False),
        (1, 1, Outlook(0.02, 0.0150, 0.00375), True),
        (1, 1, Outlook(0.02, 0.0150, 0.0037), False),
        (32, 1, Outlook(0.0, 0.0), True),
    ],
)
def test_a_load_of_which_38_75_ms_are_left(done: int, computing: int, outlook: Outlook, due: bool) -> None:
    assert is_due(Progress(done, 32, 0.00125, 0.00125), 1, computing, outlook) is due


@given(st.integers(1, 80), SECONDS, st.floats(0, 1, exclude_max=True), SECONDS)
def test_what_is_left_of_a_load_of_constant_speed(layers: int, layer: float, share: float, unlike: float) -> None:
    """Known exactly from loads before; without them, or when those were unlike, not less than what this one shows."""
    elapsed = share * layers * layer
    done = int(share * layers)
    left = layers * layer - elapsed
    assert Progress(done, layers, elapsed, layer).remaining == pytest.approx(left, rel=1e-6, abs=1e-9)
    alone = Progress(done, layers, elapsed).remaining
    assert alone >= left * (1 - 1e-6) - 1e-9
    other = Progress(done, layers, elapsed, unlike).remaining
    slowest = elapsed / done * layers - elapsed if done else math.inf
    assert elapsed / (done + 1) * layers - elapsed - 1e-9 <= other <= slowest + 1e-9


@define
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@frozen
class Machine:
    """An engine of constant steps that decodes, and a bus of constant speed. Seconds.

    A step runs for ``step``, and one that reads a hit for ``hit`` if it need not wait; the next one begins ``between``
    later. With ``ahead`` vLLM hears of the end of a step when the next one was planned.
    """

    layers: int
    layer: float
    step: float
    hit: float
    between: float
    ahead: bool

    def reads(self, begin: float, arrives: float) -> tuple[float, float]:
        """A step reads a load whose last layer comes at ``arrives``: when it ends, and how long it waited."""
        now, waited = begin, 0.0
        for layer in range(self.layers):
            wait = max(0.0, arrives - (self.layers - 1 - layer) * self.layer - now)
            now += wait + self.hit / self.layers
            waited += wait
        wait = max(0.0, arrives - now)
        return now + wait, waited + wait


MACHINES = st.builds(
    Machine,
    layers=st.integers(2, 80),
    layer=st.floats(0.0002, 0.01),
    step=st.floats(0.001, 0.05),
    hit=st.floats(0.001, 0.1),
    between=st.floats(0.0001, 0.01),
    ahead=st.booleans(),
)


@define
class Life:
    """Loads on such a machine, one after the other, each beside requests that decode."""

    machine: Machine
    minimum: int
    #: Whether loads are released as soon as they may.
    at_once: bool = False
    clock: Clock = field(factory=Clock)
    pace: Recent = field(factory=Recent)
    rhythm: Rhythm = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.rhythm = Rhythm(self.clock)

    def load(self, phase: float) -> tuple[float, float, int]:
        """One that begins when so much of a step has run.

        From its beginning: when its first token is there; how long that step waited, and layers when it was released.
        """
        machine, clock, rhythm = self.machine, self.clock, self.rhythm
        began = clock.now + phase * machine.step
        arrives = began + machine.layers * machine.layer
        known: list[tuple[str, ...]] = [(), ()] if machine.ahead else [()]
        released = -1
        while True:
            received = known.pop(0)
            rhythm.begin(received, 1, by_layer=True)
            if received:
                clock.now, waited = machine.reads(clock.now, arrives)
                rhythm.waited(waited)
            else:
                clock.now += machine.step
            rhythm.end()
            told: tuple[str, ...] = ()
            if released < 0:
                elapsed = clock.now - began
                done = min(machine.layers, max(0, int(elapsed / machine.layer * (1 + 1e-9))))
                progress = Progress(done, machine.layers, max(0.0, elapsed), self.pace.median)
                if is_due(progress, self.minimum, 0 if self.at_once else 1, rhythm.outlook()):
                    released, told = done, ("r",)
                    rhythm.told(told, 1)
            known.append(told)
            if received:
                self.pace.add(machine.layer)
                first = clock.now - began
                clock.now += machine.between
                return first, waited, released
            clock.now += machine.between


@given(MACHINES, st.integers(1, 4), st.lists(st.floats(0, 1), min_size=3, max_size=6))
def test_with_constant_steps_and_a_constant_bus_a_step_hardly_waits_and_no_token_is_later_than_a_step(
    machine: Machine, minimum: int, phases: list[float]
) -> None:
    minimum = min(minimum, machine.layers)
    life, eager = Life(machine, minimum), Life(machine, minimum, at_once=True)
    # As without it: nothing is known yet.
    assert life.load(phases[0]) == eager.load(phases[0])
    for phase in phases[1:]:
        first, waited, released = life.load(phase)
        soonest, _, soon = eager.load(phase)
        assert released >= soon >= minimum
        layer = max(machine.layer, machine.hit / machine.layers)
        assert waited <= layer * (1 + 1e-6)
        assert first <= soonest + machine.step + machine.between + layer * (1 + 1e-6)


def test_beside_decoding_requests_a_hit_waits_for_the_bus_until_its_step_would_not() -> None:
    """A hit of 40 ms beside steps of 7 ms, and its own of 15: released with a third to go, in place of all."""
    machine = Machine(32, 0.00125, 0.006, 0.015, 0.001, ahead=True)
    life, eager = Life(machine, 1), Life(machine, 1, at_once=True)
    life.load(0.0)
    first, waited, released = life.load(0.0)
    soonest, late, soon = eager.load(0.0)
    assert late > 0.01
    assert waited <= 0.00125
    assert soon < 6
    assert 10 <= released < 32
    assert first - soonest <= 0.007


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("phase", [0.0, 0.2, 0.4, 0.6, 0.8])
def test_on_a_device_that_queues_a_step_ends_when_its_load_does(ahead: int, phase: float) -> None:
    """As an H200's steps were traced: 7 ms each, submitted within 2 ms, one with a hit within 10, a load of 43 ms.

    vLLM submits a step when the one ``ahead`` of the one before it has ended.
    """
    clock = Clock()
    it = Rhythm(clock, queues=True)
    usual, copy, ends = 0.007, 0.043, [clock.now]
    found = []
    for number in range(4):
        began = ends[-1] + phase * usual + (0.0 if number else 0.1)
        knows: list[bool] = [False] * (ahead + 1)
        released = False
        while True:
            # A step is planned and submitted when the results of those before are known, but for those ahead.
            clock.now = max(clock.now, ends[-1 - ahead] if len(ends) > ahead else ends[-1])
            reads = knows.pop(0)
            it.begin(["r"] if reads else [], 1, by_layer=True)
            submitted = clock.now + (0.010 if reads else 0.002)
            end = max(submitted, max(ends[-1], clock.now) + usual)
            if reads:
                end = max(end, began + copy)
            clock.now = submitted
            it.end()
            ends.append(end)
            knows.append(False)
            elapsed = max(0.0, clock.now - began)
            progress = Progress(int(elapsed / copy * 32), 32, elapsed, copy / 32)
            if not released and clock.now > began and is_due(progress, 1, 1, it.outlook()):
                released, knows[-1] = True, True
                it.told(["r"], 1)
            if reads:
                clock.now = max(clock.now, began + copy)
                found.append(end - (began + copy) if number else 0.0)
                stalled = began + copy - max(submitted, ends[-2] + usual)
                assert number == 0 or stalled <= usual / 2 + 0.001
                break
    assert max(found) <= usual / 2 + 0.0035


@given(MACHINES, st.lists(st.floats(0.05, 20.0), min_size=2, max_size=5))
def test_when_the_bus_changes_its_speed_a_load_is_held_to_its_end_at_most(
    machine: Machine, factors: list[float]
) -> None:
    life = Life(machine, 1)
    life.load(0.0)
    for factor in factors:
        life.machine = evolve(machine, layer=machine.layer * factor)
        first, _, released = life.load(0.5)
        assert released <= machine.layers
        copied = life.machine.layers * life.machine.layer
        noticed = (machine.step + machine.between) * (3 if machine.ahead else 2)
        assert first <= copied + noticed + machine.hit + 1e-6


def rhythm() -> tuple[Rhythm, Clock]:
    clock = Clock()
    return Rhythm(clock), clock


def step(
    rhythm: Rhythm, clock: Clock, *received: str, computing: int = 1, took: float = 1.0, waited: float = 0.0
) -> None:
    rhythm.begin(received, computing, by_layer=True)
    clock.now += took
    rhythm.waited(waited)
    rhythm.end()
    rhythm.end()  # asked twice in a step


def known(interval: float = 2.0) -> tuple[Rhythm, Clock]:
    """One of which all is known: steps of a second every ``interval``, two of them until one knows of a report."""
    it, clock = rhythm()
    for received in ((), ("a",), ()):
        step(it, clock, *received)
        clock.now += interval - 1
        if not received:
            it.told(["a"], 1)
    return it, clock


def test_lead_goes_from_now_until_the_step_that_knows_of_a_report() -> None:
    it, clock = rhythm()
    step(it, clock)
    it.told(["a"], 1)
    clock.now += 2
    step(it, clock, took=3)
    assert it.outlook() == Outlook()
    step(it, clock, "a", took=4)
    # Two steps, one every three seconds, of which four seconds of the first have passed.
    assert it.outlook() == Outlook(2.0, 4.0)
    clock.now += 1
    assert it.outlook().lead == 1.0
    clock.now += 9
    assert it.outlook().lead == 0.0


def test_intervals_are_of_steps_that_compute() -> None:
    it, clock = known()
    step(it, clock)
    usual = it.outlook()
    for _ in range(20):
        step(it, clock, computing=0, took=9)
    step(it, clock)
    assert it.outlook() == usual


@pytest.mark.parametrize(("took", "needs"), [(1.0, 2.0), (3.0, 3.0)])
def test_where_work_is_queued_a_step_runs_behind_those_before(took: float, needs: float) -> None:
    clock = Clock()
    it = Rhythm(clock, queues=True)
    for received in ((), ("a",), ()):
        it.begin(received, 1, by_layer=True)
        clock.now += took if received else 1
        it.end()
        it.told(["a"], 1)
        clock.now += 1 - (took - 1 if received else 0)
    outlook = it.outlook()
    assert (outlook.step, outlook.patience) == (needs, 1.0)


def test_what_is_reported_while_nobody_computes_says_nothing_about_steps_that_do() -> None:
    it, clock = rhythm()
    step(it, clock, computing=0)
    it.told(["a"], 0)
    step(it, clock, "a")
    step(it, clock, "b")
    assert it.outlook() == Outlook()
    it, clock = known()
    step(it, clock, "b", computing=0, took=9)
    assert it.outlook().step == 1.0


def test_a_step_counts_without_what_it_waited_and_only_when_it_reads_a_load() -> None:
    it, clock = known()
    step(it, clock, took=9)
    assert it.outlook().step == 1.0
    for _ in range(3):
        step(it, clock, "a", took=5, waited=2)
    assert it.outlook().step == 3.0
    step(it, clock, took=9)
    assert it.outlook().step == 3.0


def test_a_step_that_needs_all_layers_before_it_begins_leaves_no_time() -> None:
    it, clock = known()
    for _ in range(3):
        it.begin(["a"], 1, by_layer=False)
        clock.now += 5
        it.waited(3)
        it.end()
    assert it.outlook().step == 0.0


def test_one_measurement_that_is_far_off_changes_nothing_and_a_new_pace_shows() -> None:
    recent = Recent()
    assert recent.median is None
    for value in (1.0, 1.0, 1.0, 50.0, 1.0):
        median = recent.add(value)
    assert median == recent.median == 1.0
    for value in (2.0,) * 4:
        recent.add(value)
    assert recent.median == 2.0


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.integers(0, 2)), max_size=40))
def test_what_was_reported_is_forgotten_with_the_step_that_knows(steps: list[tuple[int, bool, int]]) -> None:
    """However requests come: nothing is kept for longer, and no figure is below zero."""
    it, clock = rhythm()
    names: list[str] = []
    for number, (count, by_layer, computing) in enumerate(steps):
        it.begin(names, computing, by_layer=by_layer)
        clock.now += 0.5
        it.waited(0.25 * count)
        it.end()
        names = [f"{number}-{other}" for other in range(count)]
        it.told(names, computing)
    it.begin(names, 1, by_layer=True)
    assert not it._told
    outlook = it.outlook()
    for figure in (outlook.lead, outlook.step, outlook.patience):
        assert figure is None or figure >= 0


def test_a_request_that_is_aborted_before_its_step_is_not_remembered_for_ever() -> None:
    it, clock = rhythm()
    for number in range(100):
        it.told([f"aborted {number}"], 1)
        clock.now += 1.0
    assert len(it._told) <= 10
