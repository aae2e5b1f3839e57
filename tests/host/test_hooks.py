"""Typed hook calls: what plugins are told, and that none of them can hurt the host or another plugin."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_type_hints

import pytest
from structlog.testing import capture_logs

from maru_core import hookspecs
from maru_core.contracts import BackendProvision, EngineProvision, PoolRequest, ReadExtent, Region
from maru_core.errors import BackendError, PluginError, TransferError
from maru_core.fakes import FakeBackend
from maru_core.hints import HINTS
from maru_core.host import PluginHost
from maru_core.plugin import hookimpl
from tests.waiting import NEVER

EXTENTS = [ReadExtent(0, 4096, 10)]
HOOKS = [name for name in vars(hookspecs) if name.startswith("maru_")]


def make_region() -> Region:
    return FakeBackend().create_pool(PoolRequest(0, 1 << 20, 4096, 0, None, "t")).region


class Recorder:
    """Implements every hint and notes what it was told."""

    def __init__(self, name: str = "rec") -> None:
        self.name = name
        self.calls: list[tuple[Any, ...]] = []

    @hookimpl
    def maru_session_opened(self, name: str, role: str) -> None:
        self.calls.append(("session_opened", name, role))

    @hookimpl
    def maru_region_mapped(self, region: Region) -> None:
        self.calls.append(("region_mapped", region))

    @hookimpl
    def maru_before_read(self, region: Region, extents: Sequence[ReadExtent]) -> None:
        self.calls.append(("before_read", region, extents))

    @hookimpl
    def maru_after_read(self, region: Region, extents: Sequence[ReadExtent]) -> None:
        self.calls.append(("after_read", region, extents))

    @hookimpl
    def maru_region_unmapping(self, region: Region) -> None:
        self.calls.append(("region_unmapping", region))

    @hookimpl
    def maru_hint_stats(self) -> Mapping[str, int]:
        self.calls.append(("hint_stats",))
        return {f"{self.name}.calls": len(self.calls)}


def call_all(host: PluginHost, region: Region) -> dict[str, Any]:
    host.session_opened("engine", "worker")
    host.region_mapped(region)
    host.before_read(region, EXTENTS)
    host.after_read(region, EXTENTS)
    host.region_unmapping(region)
    return host.hint_stats()


def test_every_hint_reaches_every_plugin_with_its_arguments() -> None:
    region, first, second = make_region(), Recorder(), Recorder("two")
    host = PluginHost.with_plugins({"rec": first, "two": second}, strict=True)
    expected = [
        ("session_opened", "engine", "worker"),
        ("region_mapped", region),
        ("before_read", region, EXTENTS),
        ("after_read", region, EXTENTS),
        ("region_unmapping", region),
        ("hint_stats",),
    ]
    stats = call_all(host, region)
    assert first.calls == second.calls == expected
    assert stats == {"rec.calls": 6, "two.calls": 6}


def test_hints_without_plugins_do_nothing() -> None:
    assert call_all(PluginHost.with_plugins({}), make_region()) == {}


def test_an_implementation_may_take_fewer_arguments() -> None:
    seen = []

    class Few:
        @hookimpl
        def maru_before_read(self, extents: Sequence[ReadExtent]) -> None:
            seen.append(extents)

    PluginHost.with_plugins({"few": Few()}, strict=True).before_read(make_region(), EXTENTS)
    assert seen == [EXTENTS]


def raising(hook: str, error: BaseException) -> object:
    """A plugin whose ``hook`` raises, and which notes every other hint."""

    class Bad(Recorder):
        pass

    def fail(self: Recorder) -> None:
        self.calls.append(("raised",))
        raise error

    setattr(Bad, hook, hookimpl(fail))
    return Bad("bad")


class Stop(KeyboardInterrupt):
    """Looks like the user's interrupt and is not."""


@pytest.mark.parametrize("hook", HINTS)
@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(1), Stop("x")], ids=lambda e: type(e).__name__)
def test_a_hint_that_raises_is_told_once_and_given_up_at_the_third_time(hook: str, error: BaseException) -> None:
    bad: Any = raising(hook, error)
    good = Recorder()
    host = PluginHost.with_plugins({"bad": bad, "rec": good})
    region = make_region()
    with capture_logs() as logs:
        call_all(host, region)
        assert [(i.name, i.status) for i in host.report()] == [("bad", "active"), ("rec", "active")]
        call_all(host, region)
        call_all(host, region)
        calls = len(bad.calls)
        assert call_all(host, region)["rec.calls"] == 24
    assert [(log["event"], log["plugin"], log["distribution"]) for log in logs] == [
        ("plugin_hint_failed", "bad", "given"),
        ("plugin_failed", "bad", "given"),
    ]
    assert all(f"{hook} raised {type(error).__name__}" in log["reason"] for log in logs)
    assert len(bad.calls) == calls
    assert bad.calls.count(("raised",)) == 3
    assert len(good.calls) == 24
    assert [(i.name, i.status) for i in host.report()] == [("bad", "failed"), ("rec", "active")]
    health = host.hint_health()
    assert (health["bad"]["failures"], health["rec"]["failures"]) == (3, 0)
    assert hook in str(health["bad"]["off"])
    assert health["rec"]["off"] == ""


@pytest.mark.parametrize("hook", HINTS)
def test_an_interrupt_by_the_user_passes_through_a_hint(hook: str) -> None:
    host = PluginHost.with_plugins({"bad": raising(hook, KeyboardInterrupt())})
    with pytest.raises(KeyboardInterrupt):
        call_all(host, make_region())


def test_strict_makes_a_hint_that_raises_fatal() -> None:
    host = PluginHost.with_plugins({"bad": raising("maru_before_read", ValueError("boom"))}, strict=True)
    with pytest.raises(PluginError, match=r"bad .*maru_before_read raised ValueError: boom"):
        host.before_read(make_region(), EXTENTS)


def test_a_failed_hint_leaves_what_the_plugin_provides() -> None:
    class Both(FakeBackend):
        @hookimpl
        def maru_session_opened(self) -> None:
            raise ValueError

    host = PluginHost.with_plugins({"fake": Both()})
    with capture_logs():
        for _ in range(3):
            host.session_opened("e", "client")
    assert host.report()[0].status == "failed"
    assert host.backend("fake").name == "fake"


@pytest.mark.parametrize(
    "answer", [7, "text", ["rec.x"], {1: 2}, {"other.x": 1}, {"bad.x": b"1"}, {"bad.x": None}], ids=repr
)
def test_figures_of_the_wrong_kind_are_not_merged(answer: object) -> None:
    class Bad:
        @hookimpl
        def maru_hint_stats(self) -> Any:
            return answer

    host = PluginHost.with_plugins({"bad": Bad(), "rec": Recorder()})
    with capture_logs() as logs:
        for count in range(1, 5):
            assert host.hint_stats() == {"rec.calls": count}
    assert [(log["event"], log["plugin"]) for log in logs] == [("plugin_hint_failed", "bad"), ("plugin_failed", "bad")]
    assert host.hint_health()["bad"]["failures"] == 3


def test_hints_that_fail_on_many_threads_are_told_once() -> None:
    barrier = threading.Barrier(4)

    class Bad:
        @hookimpl
        def maru_before_read(self) -> None:
            barrier.wait(NEVER)
            raise ValueError

    host = PluginHost.with_plugins({"bad": Bad()})
    region = make_region()
    with capture_logs() as logs:
        threads = [threading.Thread(target=host.before_read, args=(region, EXTENTS)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(NEVER)
    assert [log["event"] for log in logs].count("plugin_failed") == 1


class FakeEngine:
    name = "fast"

    def is_available(self) -> bool:
        return True

    def import_error(self) -> str | None:
        return None

    def unsupported(self, paged: object, stored: object, device: str) -> str | None:
        return None

    def open(self, layers: object, paged: object, stored: object) -> Any:
        raise TransferError("fake")


def provider(*provisions: BackendProvision | EngineProvision) -> object:
    class Provider:
        @hookimpl
        def maru_storage_backends(self) -> list[BackendProvision]:
            return [p for p in provisions if isinstance(p, BackendProvision)]

        @hookimpl
        def maru_transfer_engines(self) -> list[EngineProvision]:
            return [p for p in provisions if isinstance(p, EngineProvision)]

    return Provider()


def test_a_factory_runs_once_and_only_when_used() -> None:
    made: list[str] = []

    def backend() -> FakeBackend:
        made.append("backend")
        return FakeBackend()

    def engine() -> FakeEngine:
        made.append("engine")
        return FakeEngine()

    plugin = provider(BackendProvision("fake", backend), EngineProvision("fast", engine))
    host = PluginHost.with_plugins({"p": plugin}, strict=True)
    assert host.report()[0].provides == ("backend fake", "engine fast")
    assert made == []
    assert host.backend("fake") is host.backend("fake")
    assert host.engine("fast") is host.engine("fast")
    assert made == ["backend", "engine"]


def test_engines_are_listed_in_the_order_that_auto_tries() -> None:
    plugin = provider(*(EngineProvision(name, FakeEngine, rank) for name, rank in [("c", 1), ("b", 1), ("a", 5)]))
    host = PluginHost.with_plugins({"p": plugin}, built_ins=True, strict=True)
    assert list(host.engines()) == ["layerwise", "kernel", "a", "b", "c", "torch-copy"]


def get_backend(host: PluginHost, name: str) -> object:
    return host.backend(name)


def get_engine(host: PluginHost, name: str) -> object:
    return host.engine(name)


GETTERS = [(get_backend, BackendError, BackendProvision), (get_engine, TransferError, EngineProvision)]


@pytest.mark.parametrize(("get", "error", "kind"), GETTERS)
def test_an_unknown_name_is_an_error_with_the_known_ones(
    get: Callable[[PluginHost, str], object], error: type[Exception], kind: Any
) -> None:
    host = PluginHost.with_plugins({"p": provider(kind("one", list), kind("two", list))}, strict=True)
    with pytest.raises(error, match="'three'; known are one, two"):
        get(host, "three")


@pytest.mark.parametrize(("get", "error", "kind"), GETTERS)
@pytest.mark.parametrize("raised", [OSError("no device"), SystemExit(2), None], ids=repr)
def test_a_factory_that_fails_is_an_error_that_names_the_plugin(
    get: Callable[[PluginHost, str], object], error: type[Exception], kind: Any, raised: BaseException | None
) -> None:
    def factory() -> object:
        if raised:
            raise raised
        return object()

    host = PluginHost.with_plugins({"acme": provider(kind("x", factory))}, strict=True)
    with pytest.raises(error, match=r"x of plugin acme \(given\) failed: .*(no device|SystemExit|lacks)"):
        get(host, "x")


def test_a_missing_backend_says_why_its_plugin_is_not_there() -> None:
    class Wrong:
        @hookimpl
        def maru_storage_backends(self) -> Any:
            return 7

    with capture_logs():
        host = PluginHost.with_plugins({"acme": Wrong()})
    with pytest.raises(BackendError, match=r"plugin acme .* is failed: .* returned 7"):
        host.backend("acme")


def test_hooks_are_typed_and_documented_and_the_host_calls_each() -> None:
    """Every hook: types for all of it, the process, thread and moment in its text, a typed method of the host."""
    assert set(HOOKS) == {*HINTS, "maru_storage_backends", "maru_transfer_engines", "maru_eviction_policies"}
    for name in HOOKS:
        hook = getattr(hookspecs, name)
        hints = get_type_hints(hook)
        assert set(hints) == {*inspect.signature(hook).parameters, "return"}, name
        text = " ".join(inspect.getdoc(hook).split())
        for word in ("Runs ", "thread", "block" if "read" not in name else "microseconds"):
            assert word in text, (name, word)
        if type(None) in getattr(hints["return"], "__args__", ()):
            assert "``None``" in text, name
    for name in HINTS:
        method = inspect.signature(getattr(PluginHost, name.removeprefix("maru_")))
        spec = inspect.signature(getattr(hookspecs, name))
        assert [*method.parameters][1:] == [*spec.parameters], name
