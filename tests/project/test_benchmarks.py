"""What the benchmarks share, and the short form of one that is no test of its own."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks import throughput
from benchmarks.outcome import Bound, Least, Outcome, report


@pytest.mark.parametrize(
    ("bound", "status"),
    [
        (Bound("time", 2.0, 2.0), 0),
        (Bound("time", 2.1, 2.0), 1),
        (Least("hits", 5, 5), 0),
        (Least("hits", 4, 5), 1),
        (Bound("time", float("nan"), 2.0), 1),
        (Least("hits", float("nan"), 2.0), 1),
    ],
)
def test_a_missed_bound_is_said_written_and_returned(
    bound: Bound, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out.json"
    assert report(Outcome([["what", "figure"], ["a", "1"]], {"a": 1}, [bound]), target) == status
    written = json.loads(target.read_text())
    assert written["missed"] == [bound.name] * status
    assert written["figures"] == {"a": 1}
    said = capsys.readouterr().out
    assert ("MISSED" in said) == bool(status)
    assert ("at least" in said) == isinstance(bound, Least)


@pytest.mark.slow
def test_throughput_counts_every_client_and_call() -> None:
    outcome = throughput.measure(argparse.Namespace(clients=[2], seconds=0.2, rounds=1))
    (figures,) = outcome.figures.values()
    assert set(figures) == set(throughput.STEPS)
    assert all(found["calls_per_s"] > 0 for found in figures.values())
    assert figures["probe"]["keys_per_s"] == throughput.BATCH * figures["probe"]["calls_per_s"]
    assert len(outcome.bounds) == len(figures) - 1


class _Moves:
    """Stands for endless moves: says whether they run."""

    on = False

    @contextmanager
    def running(self) -> Iterator[None]:
        self.on = True
        yield
        self.on = False


def test_products_are_compared_pair_by_pair_without_the_first() -> None:
    interference = pytest.importorskip("benchmarks.gpu_interference", reason="needs torch")
    moves, asked = _Moves(), []

    class Products:
        def seconds(self, count: int) -> float:
            asked.append(moves.on)
            pair = (len(asked) - 1) // 2
            return count * (10.0 if pair == 0 else 1.0 + pair * 0.01 * moves.on)

    found = interference.slowdown(moves, Products(), pairs=3, count=4)
    assert asked == [False, True] * 4
    assert found["slowdown"] == pytest.approx(0.02)
    assert found["alone"] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(("share", "value"), [(0.5, 2.0), (0.51, 3.0), (0.99, 4.0), (1.0, 4.0), (0.0, 1.0)])
def test_a_quantile_is_one_of_the_values(share: float, value: float) -> None:
    interference = pytest.importorskip("benchmarks.gpu_interference", reason="needs torch")
    assert interference.quantile([3.0, 1.0, 4.0, 2.0], share) == value
