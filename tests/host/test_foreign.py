"""Backends that raise or answer anything: one error that names backend and method, and a server that goes on."""

from __future__ import annotations

from typing import Any

import pytest

from maru_core.contracts import PoolPlan, PoolRequest, PoolWish
from maru_core.errors import BackendError
from maru_core.fakes import FakeBackend
from maru_core.foreign import adopt_pool, create_pool, map_region, plan_pools, show

PLAN = PoolPlan("fake", 1 << 20, None)
REQUEST = PoolRequest(0, 1 << 20, 4096, 0, None, "t")
DESCRIPTOR = FakeBackend().create_pool(REQUEST).region.descriptor

CALLS = {
    "plan_pools": lambda backends: plan_pools(backends, PoolWish("fake", 1 << 20, None)),
    "create_pool": lambda backends: create_pool(backends, PLAN, REQUEST),
    "adopt_pool": lambda backends: adopt_pool(backends, PLAN, REQUEST),
    "map_region": lambda backends: map_region(backends, DESCRIPTOR),
}


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class Interrupted(KeyboardInterrupt):
    """A plugin's own, not the user's."""


def backend(method: str, act: Any) -> Any:
    found = FakeBackend()
    setattr(found, method, act)
    return lambda name: found


@pytest.mark.parametrize(
    "error",
    [OSError(5, "x"), SystemExit(7), StopIteration(), Unspeakable(), Interrupted()],
    ids=lambda e: type(e).__name__,
)
@pytest.mark.parametrize("method", CALLS)
def test_what_is_raised_names_backend_and_method(method: str, error: BaseException) -> None:
    def act(*arguments: Any) -> Any:
        raise error

    with pytest.raises(BackendError, match=f"{method} of backend fake failed: {type(error).__name__}"):
        CALLS[method](backend(method, act))


@pytest.mark.parametrize(
    "answer",
    [7, "text", [7], [PoolPlan("fake", 0, None)], object()],
    ids=["number", "text", "list", "empty plan", "object"],
)
@pytest.mark.parametrize("method", CALLS)
def test_what_is_answered_wrongly_names_backend_and_method(method: str, answer: Any) -> None:
    with pytest.raises(BackendError, match=f"{method} of backend fake failed, its answer is of no use"):
        CALLS[method](backend(method, lambda *arguments: answer))


def test_a_real_interrupt_and_the_backends_own_errors_pass() -> None:
    def interrupt(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    def refuse(*arguments: Any) -> Any:
        raise BackendError("no device")

    for method, call in CALLS.items():
        with pytest.raises(KeyboardInterrupt):
            call(backend(method, interrupt))
        with pytest.raises(BackendError, match="no device"):
            call(backend(method, refuse))


def test_what_is_right_passes() -> None:
    found = FakeBackend()
    assert plan_pools(lambda name: found, PoolWish("fake", 1 << 20, None)) == (PLAN,)
    pool = create_pool(lambda name: found, PLAN, REQUEST)
    assert map_region(lambda name: found, pool.region.descriptor).descriptor == pool.region.descriptor
    assert adopt_pool(lambda name: found, PLAN, REQUEST) is not None
    pool.destroy()
    assert adopt_pool(lambda name: found, PLAN, REQUEST) is None


def test_an_error_without_a_text_can_be_shown() -> None:
    assert show(Unspeakable()) == "Unspeakable (its text cannot be had)"
