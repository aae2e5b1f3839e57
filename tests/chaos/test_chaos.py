"""The short form of ``benchmarks/chaos.py``, and that its checks see what they are for."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from attrs import evolve

from tests.chaos.controller import Chaos, Scale, operations
from tests.chaos.stamps import CHAIN, KEYS, LONGEST, difference, size_of, stamped
from tests.chaos.tally import FATAL

pytestmark = pytest.mark.slow

#: Everything is shorter, and a stop is still beyond every timer.
SHORT = Scale(
    clients=5,
    request_timeout=0.3,
    patience=1.0,
    stop=1.6,
    calm=0.8,
    kills_per_round=2,
    stops_per_round=1,
    stop_chance=0.001,
    fork_chance=0.002,
    reset_chance=1.0,
    inspect_chance=1.0,
    again_chance=0.25,
)


def test_nothing_is_wrong_or_left_over_after_kills_and_stops(maru_runtime_dir: Path) -> None:
    with Chaos(maru_runtime_dir, SHORT, seed=3, warm=True) as chaos:
        for operation in islice(operations(SHORT), 4):
            chaos.round(operation)
        counts = chaos.finish()
    assert chaos.problems == []
    assert chaos.kills_inside == dict.fromkeys(chaos.kills_inside, 1)
    assert chaos.events["warm starts"] == 4
    assert chaos.events["found again"] > 50
    assert chaos.events["client kills"] >= 8
    assert chaos.events["client stops"] >= 4
    assert counts["hits"] > 500
    assert counts["stored"] > 100
    assert not any(counts[name] for name in FATAL)


def test_nothing_is_wrong_or_left_over_where_objects_move_between_pools(maru_runtime_dir: Path) -> None:
    scale = evolve(SHORT, upper=2 << 20, pool_size=4 << 20)
    with Chaos(maru_runtime_dir, scale, seed=5, warm=True) as chaos:
        for operation in islice(operations(scale), 5):
            chaos.round(operation)
        counts = chaos.finish()
    assert chaos.problems == []
    assert chaos.kills_inside == dict.fromkeys(chaos.kills_inside, 1)
    assert chaos.events["warm starts"] == 5
    assert counts["hits"] > 500
    assert not any(counts[name] for name in FATAL)


@pytest.mark.parametrize("at", [0, 7, 8, 5001])
def test_a_single_wrong_byte_shows(at: int) -> None:
    data = stamped("red", 44, 1).copy()
    assert difference(data, "red", 44, 1) is None
    data[at % len(data)] ^= 1
    assert "1 of" in str(difference(data, "red", 44, 1))


def test_the_owner_of_wrong_bytes_is_named() -> None:
    data = stamped("red", 44, 1).copy()
    data[4096:5096] = stamped("blue", 17, 2)[:1000]
    assert "object 17 of blue, weights 2, offset 0" in str(difference(data, "red", 44, 1))
    data[4096:5096] = 0
    assert "zeros" in str(difference(data, "red", 44, 1))
    assert "instead of" in str(difference(data[:-1], "red", 44, 1))


def test_stamps_differ_in_every_word() -> None:
    """Same place, other object, namespace or weights: no eight bytes are alike."""
    one, *others = (
        stamped(space, number, weights)
        for space, number, weights in [("red", 1, 0), ("blue", 1, 0), ("red", 2, 0), ("red", 1, 1)]
    )
    for other in others:
        words = min(len(one), len(other)) // 8 * 8
        assert not np.any(one[:words].view(np.uint64) == other[:words].view(np.uint64))
    assert len(np.unique(one[: len(one) // 8 * 8].view(np.uint64))) == len(one) // 8


def test_sizes_differ_and_fit() -> None:
    sizes = [size_of(number) for number in range(KEYS)]
    assert max(sizes) <= LONGEST
    assert len({-(-size // 4096) for size in sizes}) > 4
    assert len({size_of(number) for number in range(CHAIN)}) == CHAIN
