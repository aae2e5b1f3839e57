"""Backends that raise or answer anything: one error that names backend and method, and a server that goes on."""

from __future__ import annotations

import signal
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from attrs import evolve

from maru_core.contracts import PoolPlan, PoolRequest, PoolWish
from maru_core.errors import BackendError
from maru_core.fakes import FakeBackend
from maru_core.foreign import adopt_pool, create_pool, end_pool, map_region, plan_pools, show

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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_a_signal_handler_raises_passes_and_a_plugins_exit_does_not(number: int) -> None:
    """vLLM's workers end by a SystemExit of their handler, which is raised once, in whatever runs just then."""

    def end(number: int, frame: Any) -> None:
        raise SystemExit

    before = signal.signal(number, end)
    try:
        for method, call in CALLS.items():
            with pytest.raises(SystemExit):
                call(backend(method, lambda *arguments: signal.raise_signal(number)))
            with pytest.raises(BackendError, match="SystemExit"):
                call(backend(method, lambda *arguments: sys.exit(3)))
    finally:
        signal.signal(number, before)


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


def another(pool: Any, /, buffer: Any = None, **changes: Any) -> Any:
    """The same pool, described otherwise."""
    region = pool.region
    descriptor = evolve(region.descriptor, **changes)
    methods = {name: getattr(region, name) for name in ("publish", "acquire", "populate", "close")}
    shown = SimpleNamespace(descriptor=descriptor, buffer=region.buffer if buffer is None else buffer, **methods)
    return SimpleNamespace(region=shown, destroy=pool.destroy, leave=pool.leave)


WRONG: list[dict[str, Any]] = [
    {"pool": 1},
    {"backend": "cpu"},
    {"backend": 7},
    {"location": None},
    {"identity": "text"},
    {"size": 1 << 40},
    {"size": -1},
    {"granule": 8192},
    {"entry_base": 5},
    {"entry_count": 1 << 40},
    {"entry_count": 0},
    {"table_offset": -4096},
    {"data_offset": 0},
    {"flush": "no"},
    {"buffer": memoryview(bytes(1 << 20))},
    {"buffer": memoryview(bytearray(4096))},
    {"buffer": memoryview(bytearray(1 << 20)).cast("I")},
    {"buffer": memoryview(bytearray(1 << 21))[::2]},
]


@pytest.mark.parametrize("changes", WRONG, ids=lambda changes: next(iter(changes)))
@pytest.mark.parametrize("method", ["create_pool", "adopt_pool"])
def test_a_pool_that_is_not_what_was_asked_for_is_refused_and_let_go(method: str, changes: dict[str, Any]) -> None:
    found = FakeBackend()
    if method == "adopt_pool":
        found.create_pool(REQUEST)
    act = getattr(found, method)
    setattr(found, method, lambda request: another(act(request), **changes))
    with pytest.raises(BackendError, match=f"{method} of backend fake failed, its answer is of no use"):
        CALLS[method](lambda name: found)
    delattr(found, method)
    assert (found.adopt_pool(REQUEST) is not None) is (method == "adopt_pool"), "a new one goes, an older one stays"


def test_a_pool_that_hosts_share_must_say_so() -> None:
    found, shared = FakeBackend(), evolve(REQUEST, shared_by_hosts=True)
    create_pool(lambda name: found, PLAN, shared).destroy()
    make = found.create_pool
    found.create_pool = lambda request: another(make(request), flush=False)
    with pytest.raises(BackendError, match="does not say flush, although hosts share it"):
        create_pool(lambda name: found, PLAN, shared)


def test_a_region_of_another_pool_is_refused() -> None:
    found = FakeBackend()
    pool = found.create_pool(REQUEST)
    found.map_region = lambda descriptor: another(pool, identity=bytes(16)).region
    with pytest.raises(BackendError, match=r"map_region of backend fake failed.*its region is of"):
        map_region(lambda name: found, pool.region.descriptor)


@pytest.mark.parametrize("error", [OSError(5, "x"), SystemExit(7), Unspeakable()], ids=lambda e: type(e).__name__)
def test_a_pool_that_cannot_be_let_go_is_told_and_nothing_else(error: BaseException) -> None:
    def fail() -> None:
        raise error

    pool = SimpleNamespace(destroy=fail, leave=fail, nobody_left=fail)
    for options in ({"keep": True}, {"keep": False}, {"keep": False, "alone": True}):
        with structlog.testing.capture_logs() as logs:
            end_pool(pool, **options)
        assert [entry["event"] for entry in logs] == ["a pool could not be let go"]


@pytest.mark.parametrize(
    "change", [{"size": 1 << 63}, {"size": True}, {"path": 7}, {"path": "a\0"}, {"size_setting": None}], ids=str
)
def test_a_plan_that_no_server_can_follow_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(BackendError, match="plan_pools of backend fake failed, its answer is of no use"):
        CALLS["plan_pools"](backend("plan_pools", lambda *arguments: [evolve(PLAN, **change)]))
