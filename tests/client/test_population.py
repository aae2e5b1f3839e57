"""Page faults ahead of time: in order, by several threads, as far as asked."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from maru_core.population import Population
from tests.waiting import NEVER, eventually

STEP = 100


class Slow:
    """A region whose every call of ``populate`` waits for a permit; None: no waiting."""

    def __init__(self, size: int, permits: threading.Semaphore | None = None) -> None:
        self.descriptor: Any = SimpleNamespace(size=size)
        self.asked: list[tuple[int, int]] = []
        self.threads: set[int] = set()
        self._permits = permits

    def populate(self, offset: int, length: int) -> None:
        self.asked.append((offset, length))
        self.threads.add(threading.get_ident())
        if self._permits is not None:
            self._permits.acquire()


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("size", [1, STEP, 10 * STEP + 7])
def test_every_step_is_taken_once(size: int, threads: int) -> None:
    region = Slow(size)
    population = Population(region, step=STEP, threads=threads)  # type: ignore[arg-type]
    assert population.reach(size, timeout=NEVER)
    assert population.reach(10 * size, timeout=0), "the end is the region's"
    assert sorted(region.asked) == [(offset, STEP) for offset in range(0, size, STEP)]


def test_what_is_reached_is_populated_up_to_there() -> None:
    permits = threading.Semaphore(0)
    region = Slow(6 * STEP, permits)
    population = Population(region, step=STEP, threads=1)  # type: ignore[arg-type]
    assert population.reach(0, timeout=0)
    assert not population.reach(1, timeout=0.05)
    permits.release()
    permits.release()
    assert population.reach(STEP, timeout=NEVER)
    assert population.reach(2 * STEP, timeout=NEVER)
    assert not population.reach(2 * STEP + 1, timeout=0.05)
    for _ in range(4):
        permits.release()
    assert population.reach(6 * STEP, timeout=NEVER)


def test_threads_work_side_by_side() -> None:
    permits = threading.Semaphore(0)
    region = Slow(6 * STEP, permits)
    population = Population(region, step=STEP, threads=3)  # type: ignore[arg-type]
    eventually(lambda: len(region.threads) == 3)
    assert len(region.asked) == 3
    assert not population.reach(1, timeout=0)
    for _ in range(6):
        permits.release()
    assert population.reach(6 * STEP, timeout=NEVER)


def test_a_later_step_does_not_stand_for_an_earlier_one() -> None:
    gate = threading.Event()
    region = Slow(3 * STEP)
    region.populate = lambda offset, length: gate.wait(NEVER) if offset == 0 else None  # type: ignore[assignment, method-assign]
    population = Population(region, step=STEP, threads=2)  # type: ignore[arg-type]
    assert not population.reach(1, timeout=0.1)
    gate.set()
    assert population.reach(3 * STEP, timeout=NEVER)


def test_it_ends_early() -> None:
    permits = threading.Semaphore(0)
    region = Slow(100 * STEP, permits)
    population = Population(region, step=STEP, threads=2)  # type: ignore[arg-type]
    waiting: list[bool] = []
    waiter = threading.Thread(target=lambda: waiting.append(population.reach(STEP * 100)))
    waiter.start()
    time.sleep(0.05)
    population.stop()
    waiter.join(NEVER)
    assert waiting == [False]
    for _ in range(100):
        permits.release()
    time.sleep(0.05)
    assert len(region.asked) <= 2
