"""Load or compute: only on measurements, with the queue ahead, never on old ones."""

from __future__ import annotations

import pytest

from maru_integrations.vllm.worth import STALE, Worth
from tests.vllm.test_breaker import Clock


def measured(link: float, prefill: float) -> tuple[Worth, Clock]:
    """Speeds in bytes and tokens per second; a token has 100 bytes."""
    clock = Clock()
    worth = Worth(clock, 100)
    worth.link.measure(link, 1.0)
    worth.step_began(int(prefill), 0)
    clock.now += 1.0
    worth.step_ended()
    return worth, clock


def test_nothing_is_decided_before_both_speeds_were_measured() -> None:
    worth = Worth(Clock(), 100)
    assert worth.reason_to_compute(1000, 0) is None
    worth.link.measure(1.0, 1.0)
    assert worth.reason_to_compute(1000, 0) is None


@pytest.mark.parametrize(
    ("link", "ahead", "reason"),
    [(100_000, 0, None), (100_000, 200, None), (100_000, 300, "long_queue"), (79_000, 0, "slow_link")],
)
def test_the_slower_way_is_not_taken(link: float, ahead: int, reason: str | None) -> None:
    """1,000 tokens at 1,000 tokens a second, with a margin of a quarter in favour of loading."""
    worth, _ = measured(link, 1000)
    assert worth.reason_to_compute(1000, ahead) == reason


def test_an_old_measurement_is_tried_again() -> None:
    """Skipped hits measure nothing: without this one slow moment would switch loads off for ever."""
    worth, clock = measured(1000, 1000)
    assert worth.reason_to_compute(1000, 0) == "slow_link"
    clock.now += STALE + 1
    assert worth.reason_to_compute(1000, 0) is None


def test_steps_that_are_mostly_decoding_measure_no_prefill() -> None:
    clock = Clock()
    worth = Worth(clock, 100)
    for prompts, others in ((10, 0), (100, 200), (0, 64)):
        worth.step_began(prompts, others)
        clock.now += 1.0
        worth.step_ended()
    assert worth.prefill.rate == 0


def test_steps_that_overlap_are_measured_together() -> None:
    """With asynchronous scheduling the next step is handed out before the one before has ended."""
    clock = Clock()
    worth = Worth(clock, 100)
    worth.step_began(500, 0)
    clock.now += 1.0
    worth.step_began(500, 0)
    clock.now += 1.0
    worth.step_ended()
    assert worth.prefill.rate == 500
