"""The bounds of hints: what hangs, is slow, or fails costs a bounded time, and then nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from maru_core import hints
from maru_core.contracts import PoolRequest, ReadExtent, Region
from maru_core.errors import PluginError
from maru_core.fakes import FakeBackend
from maru_core.hints import HINTS, HOT, Limits
from maru_core.host import PluginHost
from maru_core.plugin import hookimpl
from tests.waiting import NEVER

EXTENTS = [ReadExtent(0, 4096, 10)]
COLD = [hook for hook in HINTS if hook not in HOT]
#: Short waits, and a budget that a busy machine does not exceed by itself.
LIMITS = Limits(budget=0.02, slow=3, hang=0.2, wait=0.2, failures=3)


@pytest.fixture
def region() -> Region:
    return FakeBackend().create_pool(PoolRequest(0, 1 << 20, 4096, 0, None, "t")).region


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """What hanging hints wait for, at the latest until the test ends."""
    event = threading.Event()
    yield event
    event.set()


class Clock:
    """Stands in for the module ``time``: a hint takes as long as it says, however busy the machine is."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(hints, "time", made)
    return made


def plugin(hook: str, act: Callable[[], Any]) -> object:
    """A plugin whose ``hook`` runs ``act``."""

    class Plugin:
        pass

    setattr(Plugin, hook, hookimpl(lambda self: act()))
    return Plugin()


def call(host: PluginHost, hook: str, region: Region) -> None:
    arguments: dict[str, tuple[Any, ...]] = {
        "maru_session_opened": ("e", "client"),
        "maru_region_mapped": (region,),
        "maru_before_read": (region, EXTENTS),
        "maru_after_read": (region, EXTENTS),
        "maru_region_unmapping": (region,),
        "maru_hint_stats": (),
    }
    getattr(host, hook.removeprefix("maru_"))(*arguments[hook])


@pytest.mark.parametrize("hook", COLD)
def test_a_hook_that_hangs_is_left_behind(hook: str, region: Region, release: threading.Event) -> None:
    host = PluginHost.with_plugins({"bad": plugin(hook, lambda: release.wait(60))}, limits=LIMITS)
    started = time.monotonic()
    with capture_logs() as logs:
        for _ in range(3):
            call(host, hook, region)
    assert 0.2 <= time.monotonic() - started < 5
    (log,) = logs
    assert (log["event"], log["plugin"], log["distribution"]) == ("plugin_failed", "bad", "given")
    assert log["reason"].startswith(f"{hook} was left behind after 0.2 s; ")
    assert "MARU_PLUGINS" in log["reason"]
    assert host.hint_health()["bad"]["off"] == log["reason"] == host.report()[0].reason


@pytest.mark.parametrize("hook", HOT)
def test_a_read_that_a_hint_holds_up_is_the_last_one_it_hears_of(hook: str, region: Region, clock: Clock) -> None:
    calls: list[int] = []

    def act() -> None:
        calls.append(1)
        clock.now += 60

    host = PluginHost.with_plugins({"bad": plugin(hook, act)}, limits=LIMITS)
    with capture_logs() as logs:
        for _ in range(3):
            call(host, hook, region)
    assert calls == [1]
    (log,) = logs
    assert log["reason"].startswith(f"{hook} held up the load after 60 s; ")
    health = host.hint_health()["bad"]
    assert (health["calls"], health["longest_ms"]) == (1, 60_000)


@pytest.mark.parametrize("hook", HOT)
def test_while_it_hangs_other_threads_load_without_it(hook: str, region: Region, release: threading.Event) -> None:
    entered = threading.Event()

    def act() -> None:
        entered.set()
        release.wait(60)

    host = PluginHost.with_plugins({"bad": plugin(hook, act)}, limits=LIMITS)
    with capture_logs() as logs:
        thread = threading.Thread(target=call, args=(host, hook, region))
        thread.start()
        assert entered.wait(NEVER)
        time.sleep(0.3)
        started = time.monotonic()
        for _ in range(3):
            call(host, hook, region)
        assert time.monotonic() - started < 5
        assert thread.is_alive()
        release.set()
        thread.join(NEVER)
    assert not thread.is_alive()
    (log,) = logs
    assert "has not come back on another thread" in log["reason"]


@pytest.mark.parametrize("hook", HOT)
def test_one_that_is_slow_again_and_again_is_given_up_with_the_figure(hook: str, region: Region, clock: Clock) -> None:
    calls: list[int] = []

    def act() -> None:
        calls.append(1)
        clock.now += 0.03

    host = PluginHost.with_plugins({"bad": plugin(hook, act)}, limits=LIMITS)
    with capture_logs() as logs:
        for _ in range(9):
            call(host, hook, region)
    assert len(calls) == 3
    (log,) = logs
    assert f"{hook} took more than 20 ms again and again, 3 times in 3 calls, the longest 30.0 ms; " in log["reason"]
    assert host.hint_health()["bad"]["slow"] == 3


@pytest.mark.parametrize(("every", "stays"), [(10, True), (5, True), (4, False), (2, False)])
def test_one_that_is_slow_now_and_then_stays(every: int, stays: bool, region: Region, clock: Clock) -> None:
    """A busy machine: up to one call in five is over the budget."""
    count = 0

    def act() -> None:
        nonlocal count
        count += 1
        clock.now += 0.03 if count % every == 0 else 0.001

    host = PluginHost.with_plugins({"it": plugin("maru_before_read", act)}, limits=LIMITS)
    with capture_logs():
        for _ in range(200):
            host.before_read(region, EXTENTS)
    assert (count == 200) == stays == (host.hint_health()["it"]["off"] == "")


def test_what_ends_one_plugin_leaves_the_others(region: Region, clock: Clock) -> None:
    seen: list[int] = []

    def hang() -> None:
        clock.now += 0.3

    plugins = {
        "first": plugin("maru_before_read", lambda: seen.append(1)),
        "bad": plugin("maru_before_read", hang),
        "last": plugin("maru_before_read", lambda: seen.append(2)),
    }
    host = PluginHost.with_plugins(plugins, limits=LIMITS)
    with capture_logs():
        for _ in range(3):
            host.before_read(region, EXTENTS)
    assert sorted(seen) == [1] * 3 + [2] * 3
    assert [info.status for info in host.report()] == ["active", "failed", "active"]


@pytest.mark.slow
@pytest.mark.parametrize("hook", HINTS)
def test_strict_makes_the_end_of_a_hint_fatal(hook: str, region: Region, release: threading.Event) -> None:
    host = PluginHost.with_plugins(
        {"bad": plugin(hook, lambda: release.wait(0.3))}, strict=True, limits=Limits(hang=0.2, wait=0.2)
    )
    with pytest.raises(PluginError, match=f"bad .*{hook} .*MARU_PLUGINS_STRICT"):
        call(host, hook, region)


def test_hooks_off_the_hot_path_run_beside_their_caller_and_reads_on_it(region: Region) -> None:
    threads: dict[str, str] = {}

    class Plugin:
        @hookimpl
        def maru_region_mapped(self) -> None:
            threads["mapped"] = threading.current_thread().name

        @hookimpl
        def maru_before_read(self) -> None:
            threads["read"] = threading.current_thread().name

    host = PluginHost.with_plugins({"p": Plugin()}, strict=True)
    host.region_mapped(region)
    host.before_read(region, EXTENTS)
    assert threads == {"mapped": "maru-hint-p", "read": threading.current_thread().name}


def test_without_threads_a_hook_still_runs(region: Region, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of the interpreter none can be started, and handlers are closed there."""
    ran: list[str] = []

    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    host = PluginHost.with_plugins({"p": plugin("maru_region_unmapping", lambda: ran.append("here"))}, strict=True)
    host.region_unmapping(region)
    assert ran == ["here"]


def test_hints_are_listed_by_plugin() -> None:
    host = PluginHost.with_plugins({"p": plugin("maru_before_read", lambda: None)}, strict=True)
    assert host.report()[0].hints == ("maru_before_read",)


def test_a_call_costs_the_load_microseconds(region: Region) -> None:
    """The fastest of several rounds, so that only the code counts."""
    host = PluginHost.with_plugins({"p": plugin("maru_before_read", lambda: None)}, strict=True)
    best = min(_seconds(host, region) for _ in range(20))
    assert best / 200 < 50e-6


def _seconds(host: PluginHost, region: Region) -> float:
    started = time.perf_counter()
    for _ in range(200):
        host.before_read(region, EXTENTS)
    return time.perf_counter() - started
