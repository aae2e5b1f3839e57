"""Which installed plugins are loaded, and what becomes of broken ones. Each test has distributions of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from maru_core import discovery
from maru_core.config import PluginSettings
from maru_core.errors import PluginError
from maru_core.host import PluginHost, PluginInfo
from tests.host.vendor import BACKEND, install

BUILT_INS = tuple(discovery.BUILT_INS)
BACKENDS = ["cpu", "cxl", "mixed"]
Installer = Callable[..., str]


@pytest.fixture
def sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on ``sys.path`` whose modules are forgotten after the test."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def discover(folder: Path, allowed: tuple[str, ...] | None = None, strict: bool = False) -> PluginHost:
    return PluginHost.discover(PluginSettings(allowed, strict), path=[str(folder)])


def info(host: PluginHost, name: str) -> PluginInfo:
    (found,) = [i for i in host.report() if i.name == name]
    return found


def test_built_ins_come_without_an_installation_whatever_the_list_says(tmp_path: Path) -> None:
    for allowed in (None, (), ("none-such",)):
        with capture_logs():
            host = discover(tmp_path, allowed)
        assert [i.name for i in host.report()] == list(BUILT_INS)
        assert all(i.built_in and i.status == "active" for i in host.report())
        assert list(host.backends()) == BACKENDS
        assert list(host.engines()) == ["layerwise", "kernel", "torch-copy"]


def test_built_ins_that_are_installed_show_their_distribution_and_appear_once(tmp_path: Path) -> None:
    path = install(tmp_path, "Maru_KV", discovery.BUILT_INS, {}, version="7.1")
    host = discover(tmp_path, ())
    assert [i.name for i in host.report()] == list(BUILT_INS)
    assert info(host, "cpu") == PluginInfo(
        "cpu", "maru-kv", "7.1", path, "active", provides=("backend cpu",), built_in=True
    )


def test_other_entries_of_our_distribution_are_governed_by_the_list(sandbox: Path) -> None:
    entries = {**discovery.BUILT_INS, "dax": "vendor_dax"}
    install(sandbox, "maru-kv", entries, {"vendor_dax": BACKEND.format(name="dax")})
    assert info(discover(sandbox, ()), "dax").status == "not selected"
    assert info(discover(sandbox, ("dax",)), "dax").status == "active"


@pytest.mark.parametrize(
    ("allowed", "active"),
    [(None, {"alpha", "beta"}), ((), set()), (("alpha",), {"alpha"}), (("beta", "alpha"), {"alpha", "beta"})],
)
def test_the_list_selects(sandbox: Path, allowed: tuple[str, ...] | None, active: set[str]) -> None:
    for name in ("alpha", "beta"):
        install(sandbox, f"dist-{name}", {name: f"vendor_{name}"}, {f"vendor_{name}": BACKEND.format(name=name)})
    host = discover(sandbox, allowed)
    assert {i.name for i in host.report() if i.status == "active"} == {*BUILT_INS, *active}
    assert set(host.backends()) == {*BACKENDS, *active}
    for name in {"alpha", "beta"} - active:
        assert info(host, name).status == "not selected"
        assert f"vendor_{name}" not in sys.modules


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variable", "imported"),
    [(None, ["vendor_a", "vendor_b"]), ("", ["vendor_a", "vendor_b"]), ("none", []), ("b", ["vendor_b"]), ("zz", [])],
)
def test_a_plugin_outside_the_list_is_never_imported(tmp_path: Path, variable: str | None, imported: list[str]) -> None:
    """In a process of its own, as a user has it: environment in, ``sys.modules`` out."""
    for name in ("a", "b"):
        install(tmp_path, f"dist-{name}", {name: f"vendor_{name}"}, {f"vendor_{name}": BACKEND.format(name=name)})
    code = """
import json, os, sys
from maru_core.config import PluginSettings
from maru_core.host import PluginHost
host = PluginHost.discover(PluginSettings.from_environ(os.environ))
loaded = sorted(name for name in sys.modules if name.startswith("vendor_"))
print(json.dumps([loaded, sorted(host.backends()), "torch" in sys.modules]))
"""
    environ = {k: v for k, v in os.environ.items() if k != "MARU_PLUGINS"}
    environ["PYTHONPATH"] = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    if variable is not None:
        environ["MARU_PLUGINS"] = variable
    run = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    loaded, backends, torch = json.loads(run.stdout.splitlines()[-1])
    assert loaded == imported
    assert backends == sorted([*BACKENDS, *(name.removeprefix("vendor_") for name in imported)])
    assert not torch


def test_names_that_match_nothing_are_one_warning_that_lists_what_was_found(sandbox: Path) -> None:
    install(sandbox, "dist-good", {"good": "vendor_good"}, {"vendor_good": BACKEND.format(name="good")}, "2.5")
    with capture_logs() as logs:
        host = discover(sandbox, ("good", "typo", "cpu", "tpyo"))
    assert info(host, "good").status == "active"
    (warning,) = logs
    assert warning["event"] == "plugins_not_found"
    assert warning["missing"] == ["typo", "tpyo"]
    assert f"good (dist-good 2.5, {sandbox})" in warning["found"]
    with pytest.raises(PluginError, match=r"'typo'.*good \(dist-good 2\.5"):
        discover(sandbox, ("good", "typo"), strict=True)


BROKEN = {
    "import": "import no_such_module",
    "syntax": "def (",
    "exit": "raise SystemExit(3)",
    "interrupt-like": "class Mine(KeyboardInterrupt): pass\nraise Mine('stop')",
    "base": "class Mine(BaseException): pass\nraise Mine('stop')",
    "no hooks": "x = 1",
    "unknown hook": """
        from maru_core.plugin import hookimpl
        @hookimpl
        def maru_no_such_hook(): pass
        @hookimpl
        def maru_hint_stats(): raise AssertionError("called after it was refused")
    """,
    "unknown argument": """
        from maru_core.plugin import hookimpl
        @hookimpl
        def maru_before_read(region, colour): raise AssertionError("called after it was refused")
    """,
    "wrapper": """
        from maru_core.plugin import hookimpl
        @hookimpl(wrapper=True)
        def maru_hint_stats(): return (yield)
    """,
    "coroutine": """
        from maru_core.plugin import hookimpl
        @hookimpl
        async def maru_hint_stats(): pass
    """,
    "provide raises": """
        from maru_core.plugin import hookimpl
        @hookimpl
        def maru_storage_backends(): raise OSError("no device")
    """,
    "provide exits": """
        from maru_core.plugin import hookimpl
        @hookimpl
        def maru_transfer_engines(): raise SystemExit(1)
    """,
    "provides text": """
        from maru_core.plugin import hookimpl
        @hookimpl
        def maru_storage_backends(): return "acme"
    """,
    "provides empty text": """
        from maru_core.plugin import hookimpl
        @hookimpl
        def maru_transfer_engines(): return ""
    """,
    "provides one": """
        from maru_core.contracts import BackendProvision
        from maru_core.plugin import hookimpl
        @hookimpl
        def maru_storage_backends(): return BackendProvision("acme", lambda: None)
    """,
    "provides engines as backends": """
        from maru_core.contracts import BackendProvision, EngineProvision
        from maru_core.plugin import hookimpl
        @hookimpl
        def maru_storage_backends(): return [BackendProvision("half", list), EngineProvision("acme", list)]
    """,
    "nameless": """
        from maru_core.contracts import BackendProvision
        from maru_core.plugin import hookimpl
        @hookimpl
        def maru_storage_backends(): return [BackendProvision("", list)]
    """,
    "no factory": """
        from maru_core.contracts import EngineProvision
        from maru_core.plugin import hookimpl
        @hookimpl
        def maru_transfer_engines(): return [EngineProvision("acme", "acme.Engine")]
    """,
    "second provide is wrong": """
        from maru_core.contracts import BackendProvision
        from maru_core.plugin import hookimpl
        @hookimpl
        def maru_storage_backends(): return [BackendProvision("half", list)]
        @hookimpl
        def maru_transfer_engines(): return 7
        @hookimpl
        def maru_hint_stats(): raise AssertionError("called after it was refused")
    """,
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_plugin_is_logged_once_and_dropped_as_a_whole(sandbox: Path, kind: str) -> None:
    install(sandbox, "dist-bad", {"bad": "vendor_bad"}, {"vendor_bad": BROKEN[kind]}, "0.3")
    install(sandbox, "dist-good", {"good": "vendor_good"}, {"vendor_good": BACKEND.format(name="good")})
    with capture_logs() as logs:
        host = discover(sandbox)
        assert host.hint_stats() == {}
        host.session_opened("e", "client")
    (warning,) = logs
    assert (warning["event"], warning["log_level"]) == ("plugin_failed", "warning")
    assert (warning["plugin"], warning["distribution"], warning["version"]) == ("bad", "dist-bad", "0.3")
    assert info(host, "bad").status == "failed"
    assert info(host, "bad").reason == warning["reason"] != ""
    assert info(host, "bad").provides == ()
    assert set(host.backends()) == {*BACKENDS, "good"}
    assert set(host.engines()) == {"kernel", "layerwise", "torch-copy"}


@pytest.mark.parametrize("kind", BROKEN)
def test_strict_makes_a_broken_plugin_fatal(sandbox: Path, kind: str) -> None:
    install(sandbox, "dist-bad", {"bad": "vendor_bad"}, {"vendor_bad": BROKEN[kind]}, "0.3")
    with pytest.raises(PluginError, match=r"bad \(dist-bad 0\.3, "):
        discover(sandbox, strict=True)


@pytest.mark.parametrize("strict", [False, True])
def test_a_real_interrupt_passes(sandbox: Path, strict: bool) -> None:
    install(sandbox, "dist-bad", {"bad": "vendor_bad"}, {"vendor_bad": "raise KeyboardInterrupt"})
    with pytest.raises(KeyboardInterrupt):
        discover(sandbox, strict=strict)


def test_of_two_plugins_with_one_name_the_first_in_a_fixed_order_is_used(tmp_path: Path, sandbox: Path) -> None:
    for name in ("zeta", "beta"):  # installed in the other order than they are used
        folder = tmp_path / name
        install(folder, f"dist-{name}", {"twin": f"vendor_{name}"}, {})
        (tmp_path / f"vendor_{name}.py").write_text(
            "from maru_core.contracts import BackendProvision\nfrom maru_core.plugin import hookimpl\n"
            f"@hookimpl\ndef maru_storage_backends(): return [BackendProvision('{name}', list)]\n"
        )
    for order in (["zeta", "beta"], ["beta", "zeta"]):
        path = [str(tmp_path / name) for name in order]
        with capture_logs() as logs:
            host = PluginHost.discover(PluginSettings(), path=path)
        assert set(host.backends()) == {*BACKENDS, "beta"}
        assert [(i.distribution, i.status) for i in host.report() if i.name == "twin"] == [
            ("dist-beta", "active"),
            ("dist-zeta", "duplicate"),
        ]
        (warning,) = logs
        assert (warning["event"], warning["distribution"]) == ("plugin_skipped", "dist-zeta")
        assert "dist-beta" in warning["reason"]
        assert "vendor_zeta" not in sys.modules
        with pytest.raises(PluginError, match="taken by dist-beta"):
            PluginHost.discover(PluginSettings(strict=True), path=path)


def test_a_vendor_cannot_take_the_name_of_a_built_in(sandbox: Path) -> None:
    install(sandbox, "aaa", {"cpu": "vendor_cpu"}, {"vendor_cpu": "raise AssertionError('imported')"})
    with capture_logs() as logs:
        host = discover(sandbox)
    assert [(i.distribution, i.status) for i in host.report() if i.name == "cpu"] == [
        ("maru-kv", "active"),
        ("aaa", "duplicate"),
    ]
    assert len(logs) == 1
    assert "vendor_cpu" not in sys.modules


def test_only_our_own_distribution_may_vouch_for_a_built_in(tmp_path: Path) -> None:
    install(tmp_path, "aaa", discovery.BUILT_INS, {})
    with capture_logs():
        host = discover(tmp_path)
    assert [(i.name, i.distribution, i.status) for i in host.report()] == [
        *((name, "maru-kv", "active") for name in BUILT_INS),
        *((name, "aaa", "duplicate") for name in sorted(BUILT_INS)),
    ]


def test_a_second_provider_of_a_backend_is_told_and_the_first_stays(sandbox: Path) -> None:
    install(sandbox, "dist-thief", {"thief": "vendor_thief"}, {"vendor_thief": BACKEND.format(name="cpu")})
    with capture_logs() as logs:
        host = discover(sandbox)
    assert "maru_pool_path" in host.backends()["cpu"].summary
    assert [log["event"] for log in logs] == ["provision_skipped"]
    assert "already provided by cpu (maru-kv)" in logs[0]["reason"]
    assert info(host, "thief").provides == ()
    with pytest.raises(PluginError, match="already provided"):
        discover(sandbox, strict=True)


def test_an_entry_may_name_an_object(sandbox: Path) -> None:
    source = """
        from maru_core.contracts import BackendProvision
        from maru_core.plugin import hookimpl
        class Plugin:
            @hookimpl
            def maru_storage_backends(self): return [BackendProvision("acme", list)]
        class Holder:
            plugin = Plugin()
    """
    install(sandbox, "dist-acme", {"acme": "vendor_acme:Holder.plugin"}, {"vendor_acme": source})
    assert "acme" in discover(sandbox).backends()


def test_two_names_for_one_object_are_one_plugin(sandbox: Path) -> None:
    install(sandbox, "dist-acme", {"a": "vendor_acme", "b": "vendor_acme"}, {"vendor_acme": BACKEND.format(name="x")})
    with capture_logs() as logs:
        host = discover(sandbox)
    assert (info(host, "a").status, info(host, "b").status) == ("active", "failed")
    assert len(logs) == 1


def test_of_two_copies_of_one_distribution_the_first_on_the_path_counts(tmp_path: Path, sandbox: Path) -> None:
    install(tmp_path / "new", "acme", {"acme": "vendor_acme"}, {}, "2")
    install(tmp_path / "old", "acme", {"acme": "vendor_gone", "extra": "vendor_gone"}, {}, "1")
    (tmp_path / "vendor_acme.py").write_text(
        "from maru_core.plugin import hookimpl\n@hookimpl\ndef maru_hint_stats(): pass\n"
    )
    host = PluginHost.discover(PluginSettings(strict=True), path=[str(tmp_path / "new"), str(tmp_path / "old")])
    assert info(host, "acme").version == "2"
    assert len(host.report()) == len(BUILT_INS) + 1


def test_building_twice_in_one_process_is_harmless(sandbox: Path) -> None:
    source = """
        from maru_core.plugin import hookimpl
        calls = []
        @hookimpl
        def maru_session_opened(name, role): calls.append(name)
    """
    install(sandbox, "acme", {"acme": "vendor_acme"}, {"vendor_acme": source})
    first, second = discover(sandbox, strict=True), discover(sandbox, strict=True)
    assert first.report() == second.report()
    first.session_opened("first", "client")
    second.session_opened("second", "client")
    assert sys.modules["vendor_acme"].calls == ["first", "second"]


def test_metadata_without_a_name_is_passed_over(sandbox: Path) -> None:
    (sandbox / "odd-1.dist-info").mkdir()
    (sandbox / "odd-1.dist-info" / "entry_points.txt").write_text("[maru.plugins]\nodd = vendor_odd\n")
    assert [i.name for i in discover(sandbox).report()] == list(BUILT_INS)


def test_unreadable_metadata_costs_its_own_distribution_only(sandbox: Path) -> None:
    install(sandbox, "acme", {}, {})
    (sandbox / "acme-1.0.dist-info" / "entry_points.txt").write_text("[maru.plugins]\nno equals sign\n")
    install(sandbox, "dist-good", {"good": "vendor_good"}, {"vendor_good": BACKEND.format(name="good")})
    with capture_logs() as logs:
        host = discover(sandbox)
    assert "good" in host.backends()
    assert [(log["event"], log["plugin"]) for log in logs] == [("plugin_failed", "acme")]
    assert "entry_points.txt cannot be read" in logs[0]["reason"]
