"""What the benchmark of a hit's overhead computes, and what it watches, without an engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks.hit_overhead import AT_ONCE, DOCUMENTS, MARU, OWN, SPARED, Found, ideal, judge, judge_spared, used
from benchmarks.online import Answer, Run
from benchmarks.stages import stages, told
from maru_core.brake import Brake
from maru_core.geometry import ChunkCopy


def answer(sent: float, *times: float) -> Answer:
    return Answer(sent, times, tuple(range(len(times))), 16_384)


def test_an_ideal_bus_serves_who_came_first_without_a_gap() -> None:
    # Sent in another order than they are listed; the last one finds the bus free.
    found = ideal([0.010, 0.0, 0.500], load=0.040, step=0.020)
    assert found == pytest.approx([0.080 - 0.010 + 0.020, 0.060, 0.060])


def test_the_bus_is_used_while_a_load_is_on_it_from_the_first_request_on() -> None:
    run = Run([answer(0.5, 1.0), answer(0.2, 0.9)], 1.0, began=100.0)
    assert used(run, [(100.3, 100.4), (100.6, 100.7)]) == pytest.approx(0.2 / 0.5)


def found_of(ttft: float, ideal_ttft: float = 0.06, share: float = 0.9) -> Found:
    clients = (1, 4, DOCUMENTS)
    return Found(
        {number: [ttft] * 8 for number in clients},
        {number: [0.005] * 8 for number in clients},
        {number: [ideal_ttft] * 8 for number in clients},
        {number: [share] for number in clients},
    )


@pytest.mark.parametrize(
    ("maru", "bus", "share", "expected"),
    [
        (0.035, 0.070, 0.9, []),
        (0.045, 0.070, 0.9, ["1 client: added / a hit in vLLM's own cache"]),
        (0.035, 0.080, 0.9, [f"{clients} clients on a bus: TTFT / ideal" for clients in (1, 4, 8)]),
        (0.035, 0.070, 0.7, ["8 clients: share of the bus that is used"]),
    ],
)
def test_every_bound_is_missed_by_what_breaks_it(maru: float, bus: float, share: float, expected: list[str]) -> None:
    outcome = judge({OWN: found_of(0.020), MARU: found_of(maru)}, found_of(bus, share=share))
    assert [bound.name for bound in outcome.bounds if bound.missed] == expected


def test_stages_belong_to_the_request_that_was_sent_as_their_number_says() -> None:
    run = Run([answer(0.2, 0.9), answer(0.1, 0.5)], 1.0, began=10.0)
    watched: dict[str, Any] = {
        "stages": {
            "request-12-a": {"arrived": 10.25, "asked": 10.26, "computed": 10.8},
            "request-11-b": {"arrived": 10.15, "asked": 10.16, "computed": 10.4},
        }
    }
    lines = dict(map(tuple, stages(run, watched)))
    assert list(lines) == ["sent - arrived", "arrived - asked", "asked - computed", "computed - received"]
    assert lines["sent - arrived"] == "50.0 / 50.0"
    assert lines["computed - received"] == "100.0 / 100.0"
    watched |= {
        "asked": {"request-12-a": 2, "request-11-b": 1},
        "steps": [[10.2, 1]] * 4,
        "costs": {"hook": [8, 0.004, 0.001]},
    }
    shown = told(run, watched)
    assert "asked 1.5 times, 4 steps" in shown
    assert shown[-2].split() == ["hook", "2.00", "500.0", "1000.0", "1000.0"]


def test_an_engine_of_several_processes_shows_that_not_everything_is_seen() -> None:
    shown = told(
        Run([answer(0.1, 0.5)], 1.0), {"stages": {}, "asked": {}, "steps": [], "costs": {"hook": [2, 0.1, 0.1]}}
    )
    assert shown[1] == "0 of 1 requests were seen"


class Moves:
    """A transfer that only counts."""

    def __init__(self) -> None:
        self.moved = 0

    def load(self, block_ids: Sequence[int], copies: Sequence[ChunkCopy]) -> None:
        self.moved += len(copies)

    store = load

    def close(self) -> None:
        self.moved = -1


def test_a_bus_moves_what_it_is_given_and_takes_its_time() -> None:
    trace = pytest.importorskip("benchmarks.hit_trace", reason="needs torch")
    inner = Moves()
    bus = trace.Bus(inner, 0.01)
    copies = [ChunkCopy(chunk=index, first=0, last=1, buffer=memoryview(b"")) for index in range(5)]
    began = time.perf_counter()
    load = bus.prepare_load([], copies)
    assert bus.log == []
    assert load.run(Brake(), 1) == 5
    bus.store([], copies[:2])
    assert inner.moved == 7
    (first, loaded), (second, stored) = bus.log
    assert loaded - first >= 0.05
    assert stored - second >= 0.02
    assert time.perf_counter() - began >= 0.07
    bus.close()
    assert inner.moved == -1


def test_what_is_watched_is_put_back() -> None:
    trace = pytest.importorskip("benchmarks.hit_trace", reason="needs torch")

    class Base:
        def one(self) -> int:
            return 1

    class Derived(Base):
        def two(self) -> int:
            return 2

    watch, seen = trace.Watch(), []
    watch.around(Derived, "one", lambda begin, result, *_: seen.append(result))
    watch.around(Derived, "two", lambda begin, result, *_: seen.append(result))
    assert Derived().one() + Derived().two() == 3
    watch.end()
    assert Derived().one() + Derived().two() == 3
    assert seen == [1, 2]
    assert "one" not in vars(Derived)


@pytest.mark.parametrize(
    ("waits", "later", "expected"),
    [
        (0.4, 1.1, []),
        (0.6, 1.1, [f"{clients} clients: steps' waits for loads, {SPARED} / {AT_ONCE}" for clients in (4, DOCUMENTS)]),
        (0.4, 1.3, [f"{clients} clients: TTFT, {SPARED} / {AT_ONCE}" for clients in (1, 4, DOCUMENTS)]),
    ],
)
def test_sparing_decodes_is_judged_by_waits_and_first_tokens(waits: float, later: float, expected: list[str]) -> None:
    found = {AT_ONCE: found_of(0.1), SPARED: found_of(0.1 * later)}
    for one, waited in zip(found.values(), (0.02, 0.02 * waits), strict=True):
        one.gap = {clients: [0.02] for clients in one.ttft}
        one.waited = {clients: [waited] for clients in one.ttft}
    outcome = judge_spared(found)
    assert sorted(bound.name for bound in outcome.bounds if bound.missed) == sorted(expected)
    assert len(outcome.table) == 1 + 2 * 3


class Arriving:
    """A load by layer whose bytes are there at once."""

    def layers_done(self) -> int:
        return 4

    def wait_layer(self, layer: int) -> None:
        assert 0 <= layer < 4

    def finish(self) -> None:
        pass

    def cancel(self) -> None:
        pass


def test_layers_on_a_bus_come_one_after_another() -> None:
    trace = pytest.importorskip("benchmarks.hit_trace", reason="needs torch")
    inner = Moves()
    inner.begin_load = lambda *_: Arriving()  # type: ignore[attr-defined]
    bus = trace.Bus(inner, 0.02, 4)
    began = time.perf_counter()
    load = bus.begin_load([], [None] * 4)
    seen = load.layers_done()
    assert seen <= int((time.perf_counter() - began) / 0.02)
    load.wait_layer(1)
    assert time.perf_counter() - began >= 0.04
    assert load.layers_done() >= 2
    load.finish()
    assert time.perf_counter() - began >= 0.08
    assert load.layers_done() == 4
    assert len(bus.log) == 1
