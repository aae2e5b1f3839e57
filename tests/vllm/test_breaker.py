"""A server that is late is left alone, but for one probe a second."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from maru_integrations.vllm.breaker import Breaker


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_one_failure_opens_and_one_answer_closes() -> None:
    """Nobody waits in between; the probe is due an interval after the failure, then one each interval."""
    clock = Clock()
    breaker = Breaker(clock, interval=1.0)
    assert not breaker.is_open
    assert not breaker.take_probe()
    breaker.failed()
    assert breaker.is_open
    assert not breaker.take_probe()
    clock.now += 1.0
    assert breaker.take_probe()
    assert not breaker.take_probe()
    breaker.failed()
    clock.now += 0.9
    assert not breaker.take_probe()
    clock.now += 0.2
    assert breaker.take_probe()
    breaker.answered()
    assert not breaker.is_open
    assert breaker.opened == 1


#: In 1024ths, of which sums are exact.
SECONDS = st.integers(0, 716).map(lambda count: count / 1024)


@given(st.lists(st.tuples(SECONDS, st.booleans()), max_size=60))
@settings(max_examples=100, deadline=None)
def test_never_two_probes_within_a_second(events: list[tuple[float, bool]]) -> None:
    """However failures and questions come."""
    clock = Clock()
    breaker = Breaker(clock)
    breaker.failed()
    probes: list[float] = []
    for wait, fails in events:
        clock.now += wait
        if fails:
            breaker.failed()
        if breaker.take_probe():
            probes.append(clock.now)
    assert all(later - earlier >= 1.0 for earlier, later in itertools.pairwise(probes))
    assert breaker.is_open
    clock.now += 1.0
    assert breaker.take_probe(), "there is always another one"
