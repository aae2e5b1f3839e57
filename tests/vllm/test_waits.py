"""Waits that are looked at once per step: over at the last look before the deadline, and not long before."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maru_integrations.vllm.waits import Wait


def looked_at(timeout: float, steps: list[float]) -> tuple[float, int] | None:
    """When the wait was over, and at which of the looks that ``steps`` lie before; ``None``: not by the last one."""
    wait, now = Wait(timeout, 0.0), 0.0
    for number, step in enumerate(steps):
        now += step
        if wait.is_over(now):
            return now, number
    return None


@pytest.mark.parametrize(
    ("steps", "over"),
    [
        ([0.1] * 9, 0.4),
        ([0.015] * 40, 0.495),
        ([0.001, 0.3, 0.3], 0.301),
        ([0.001, 0.6, 0.6], 0.601),
        ([0.01, 0.24, 0.01, 0.01], 0.26),
    ],
)
def test_it_is_over_at_the_last_look_before_the_deadline(steps: list[float], over: float) -> None:
    """A look after the deadline is left to those only whose first step is longer than all their time."""
    found = looked_at(0.5, steps)
    assert found is not None
    assert found[0] == pytest.approx(over)


def seconds(least: int, most: int) -> st.SearchStrategy[float]:
    """So many 1024ths: sums of those are exact."""
    return st.integers(least, most).map(lambda count: count / 1024)


STEPS = st.lists(seconds(1, 1024), min_size=1, max_size=200)
TIMEOUT = seconds(10, 10240)


@given(STEPS, TIMEOUT)
def test_nobody_waits_past_the_deadline_while_steps_are_no_longer_than_before(
    steps: list[float], timeout: float
) -> None:
    """Steps that only become shorter: the first tells how long they may be."""
    steps.sort(reverse=True)
    found = looked_at(timeout, steps)
    if found is None:
        assert sum(steps) + steps[0] < timeout
    elif found[1]:
        assert found[0] < timeout
    else:
        assert 2 * steps[0] >= timeout


@given(STEPS, TIMEOUT)
def test_nothing_is_given_up_long_before_its_deadline(steps: list[float], timeout: float) -> None:
    """By one step at most, and in no less than half of its time."""
    found = looked_at(timeout, steps)
    if found is not None:
        over, number = found
        assert over >= timeout / 2
        assert over + max(steps[: number + 1]) >= timeout


@given(STEPS, TIMEOUT)
def test_what_is_over_was_looked_for_as_long_as_there_was_time(steps: list[float], timeout: float) -> None:
    """Never past the deadline twice."""
    found = looked_at(timeout, steps)
    last = len(steps) if found is None else found[1]
    assert sum(steps[:last]) < timeout
