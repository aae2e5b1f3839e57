"""Objects of a load are looked at in parts, by as many threads as there are processors to spare."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm")

from maru_integrations.vllm import checking
from maru_integrations.vllm.checking import Checking, threads


@pytest.fixture(params=[1, 2, 4])
def workers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(checking, "threads", lambda: request.param)
    count: int = request.param
    return count


@pytest.fixture
def pool(workers: int) -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(workers) as made:
        yield made


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=30)
@given(st.lists(st.booleans(), max_size=70))
def test_the_answer_is_of_each_object_in_their_order(pool: ThreadPoolExecutor, sound: list[bool]) -> None:
    looked: list[int] = []

    def check(indices: Sequence[int]) -> list[bool]:
        looked.extend(indices)
        return [sound[index] for index in indices]

    found = Checking.begin(pool, check, len(sound))
    assert found.result() == sound
    assert found.done()
    assert sorted(looked) == list(range(len(sound)))


def test_as_many_threads_look_at_once(pool: ThreadPoolExecutor, workers: int) -> None:
    together = threading.Barrier(workers)

    def check(indices: Sequence[int]) -> list[bool]:
        if indices[0] == 0 or workers > 1:
            together.wait(10)
        return [True] * len(indices)

    assert Checking.begin(pool, check, 16 * workers).result() == [True] * 16 * workers


def test_it_is_not_done_while_one_part_is_not(pool: ThreadPoolExecutor) -> None:
    go_on = threading.Event()

    def check(indices: Sequence[int]) -> list[bool]:
        if indices[-1] == 63:
            assert go_on.wait(10)
        return [True] * len(indices)

    found = Checking.begin(pool, check, 64)
    assert not found.done()
    go_on.set()
    assert found.result() == [True] * 64
    assert found.done()


def test_what_a_part_raises_is_raised(pool: ThreadPoolExecutor) -> None:
    def check(indices: Sequence[int]) -> list[bool]:
        if 40 in indices:
            raise OSError("no")
        return [True] * len(indices)

    with pytest.raises(OSError, match="no"):
        Checking.begin(pool, check, 64).result()


@pytest.mark.parametrize(("processors", "wanted"), [(1, 1), (2, 1), (7, 1), (8, 2), (16, 4), (128, 4)])
def test_a_quarter_of_the_processors_are_taken(monkeypatch: pytest.MonkeyPatch, processors: int, wanted: int) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(processors)))
    assert threads() == wanted
