"""``maru doctor``."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from maru_backends.checkup import check_cpu, check_cxl
from maru_backends.cxl import CxlBackend
from maru_core.cli import main
from maru_core.config import MaruConfig
from maru_core.contracts import BackendProvision, EngineProvision, Finding, PoolRequest
from maru_core.fakes import FakeBackend
from maru_core.host import PluginHost
from maru_core.plugin import hookimpl
from maru_core.testing import ServerFactory
from tests.backends.fake_sysfs import FakeSysfs

MIB = 1 << 20
#: The package has a command of this name.
module = importlib.import_module("maru_core.cli.doctor")


def maru(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["doctor", *arguments])


def findings(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    result = maru("--json", "--runtime-dir", str(folder), *arguments)
    found = json.loads(result.output)
    broken = any(finding["level"] == "error" for finding in found)
    assert result.exit_code == (1 if broken else 0)
    return found


def about(found: list[dict[str, Any]], subject: str) -> dict[str, Any]:
    (one,) = [finding for finding in found if finding["subject"] == subject]
    return one


def text_of(found: Sequence[Finding], level: str) -> str:
    return "\n".join(f"{one.subject}: {one.text} -> {one.remedy}" for one in found if one.level == level)


def test_a_host_without_a_server_or_device_is_well(maru_runtime_dir: Path) -> None:
    found = findings(maru_runtime_dir)
    assert about(found, "cpu") == {
        "area": "plugins",
        "level": "ok",
        "subject": "cpu",
        "text": "backend cpu (built in)",
        "remedy": "",
    }
    assert about(found, "/dev/shm")["level"] == "ok"
    assert about(found, "RLIMIT_MEMLOCK")["area"] == "limits"
    assert about(found, f"ipc://{maru_runtime_dir}/server.sock")["text"] == "no server runs"
    shown = maru("--runtime-dir", str(maru_runtime_dir))
    assert shown.exit_code == 0
    for expected in ("\nbackends\n", "  ok      cpu: backend cpu", "  note    ipc://", "          -> `maru serve`"):
        assert expected in shown.output


@pytest.mark.slow
def test_a_running_server_and_its_pools_are_listed(maru_server: ServerFactory, maru_runtime_dir: Path) -> None:
    server = maru_server(maru_runtime_dir)
    found = findings(maru_runtime_dir)
    assert f"pid {server.pid}" in about(found, server.url)["text"]
    (pool,) = [finding for finding in found if finding["text"].startswith("pool 0 of cpu")]
    assert pool["subject"].startswith(str(maru_runtime_dir))


@pytest.mark.slow
def test_a_server_that_does_not_answer_is_told_from_one_that_is_not_there(
    maru_server: ServerFactory, maru_runtime_dir: Path
) -> None:
    server = maru_server(maru_runtime_dir)
    server.process.send_signal(signal.SIGSTOP)
    found = about(findings(maru_runtime_dir), server.url)
    assert found["level"] == "error"
    assert f"pid {server.pid}, does not answer" in found["text"]
    assert f"kill -CONT {server.pid}" in found["remedy"]
    status = ["status", "--runtime-dir", str(maru_runtime_dir), "--timeout", "0.2"]
    shown = CliRunner().invoke(main, status)
    assert shown.exit_code == 1
    assert f"(pid {server.pid}) does not answer" in shown.output
    assert "maru serve" not in shown.output
    assert json.loads(CliRunner().invoke(main, [*status, "--json"]).output)["silent_pid"] == server.pid
    server.kill()
    assert about(findings(maru_runtime_dir), server.url)["remedy"].startswith("`maru serve`")
    assert "No Maru server runs" in CliRunner().invoke(main, status).output


def test_what_is_broken_makes_the_exit_code(maru_runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARU_POOL_PATH", "/nowhere")
    assert about(findings(maru_runtime_dir), "/nowhere")["level"] == "error"
    monkeypatch.delenv("MARU_POOL_PATH")
    maru_runtime_dir.chmod(0o755)
    found = about(findings(maru_runtime_dir), str(maru_runtime_dir))
    assert "chmod 700" in found["text"]


def test_a_device_that_is_set_and_is_not_there_is_broken(
    maru_runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MARU_STORAGE_BACKEND", "mixed")
    monkeypatch.setenv("MARU_CXL_POOL_PATH", "/dev/dax97.3")
    assert about(findings(maru_runtime_dir), "/dev/dax97.3")["level"] == "error"


def test_settings_that_cannot_be_read_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARU_POOL_SIZE", "much")
    result = maru()
    assert result.exit_code == 1
    assert "MARU_POOL_SIZE is 'much'" in result.output


class Vendor(FakeBackend):
    """A backend whose checks are whatever the test wants."""

    def __init__(self, answer: object) -> None:
        super().__init__()
        self._answer = answer

    @hookimpl
    def maru_storage_backends(self) -> list[BackendProvision]:
        return [BackendProvision(self.name, lambda: self, diagnose=self._diagnose)]

    def _diagnose(self, config: MaruConfig) -> Any:
        if isinstance(self._answer, BaseException):
            raise self._answer
        return self._answer


class Evil(str):
    """A text with methods of its own."""

    def split(self, *arguments: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    isprintable = encode = __str__ = __repr__ = __hash__ = split  # type: ignore[assignment]


class Unshowable:
    def __repr__(self) -> str:
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("answer", "level", "expected"),
    [
        ([Finding("warning", "acme0", "is warm", "open a window")], "warning", "is warm"),
        (ValueError("lost"), "error", "its checks, of plugin acme (given ), failed: ValueError: lost"),
        (["text"], "error", "'text' is no Finding"),
        (None, "error", "failed: TypeError"),
        (SystemExit(0), "error", "failed: SystemExit: 0"),
        (KeyboardInterrupt(), "error", "failed: KeyboardInterrupt"),
        ((Finding("ok", f"acme{n}", "is there") for n in range(1)), "ok", "is there"),
        ([Finding(Evil("ok"), Evil("acme0"), Evil("is there"))], "ok", "is there"),  # type: ignore[arg-type]
        ([Unshowable()], "error", "failed: KeyboardInterrupt"),
        ([Finding(7, None, 3, None)], "error", "is no Finding of texts"),  # type: ignore[arg-type]
        ([Finding("fatal", "acme0", "is hot")], "error", "has no such level"),  # type: ignore[arg-type]
    ],
)
def test_vendors_add_findings_and_their_faults_are_findings(answer: object, level: str, expected: str) -> None:
    patient = module.Patient(MaruConfig(), PluginHost.with_plugins({"acme": Vendor(answer)}))
    (found,) = module.backends(patient)
    assert (found.level, type(found.level)) == (level, str)
    assert expected in found.text
    assert found.remedy or level == "ok"


HANGING = """
import os, sys, threading, time
from maru_core.cli import main
from maru_core.contracts import BackendProvision, EngineProvision, Finding
from maru_core.host import PluginHost
from maru_core.plugin import hookimpl

CHECKS = sys.argv[1].split(",")

def hang(config):
    time.sleep(1000)

def endless(config):
    while True:
        time.sleep(0.01)
        yield from ()

def leaves_a_thread(config):
    threading.Thread(target=time.sleep, args=(1000,)).start()
    return [Finding("ok", "acme0", "is there")]

class Vendor:
    @hookimpl
    def maru_transfer_engines(self):
        return [EngineProvision(name, lambda: time.sleep(1000)) for name in CHECKS if name == "stuck"]

    @hookimpl
    def maru_storage_backends(self):
        checks = {"hangs": hang, "endless": endless, "threads": leaves_a_thread}
        return [BackendProvision(name, object, diagnose=checks[name]) for name in CHECKS if name in checks]

doctor = sys.modules["maru_core.cli.doctor"]
doctor._START = 3.0
PluginHost.discover = lambda settings: PluginHost.with_plugins({"acme": Vendor()})
main(["doctor", "--json", "--runtime-dir", sys.argv[2]])
"""


@pytest.mark.slow
@pytest.mark.parametrize(("checks", "code"), [("hangs,endless", 1), ("threads", 0), ("stuck", 1)])
def test_checks_that_do_not_end_are_left_behind_and_hold_nothing_up(
    maru_runtime_dir: Path, checks: str, code: int
) -> None:
    started = time.monotonic()
    command = [sys.executable, "-c", HANGING, checks, str(maru_runtime_dir)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    took = time.monotonic() - started
    found = [one for one in json.loads(run.stdout) if one["area"] in ("backends", "engines")]
    assert run.returncode == code, run.stderr
    assert took < 20
    for one in found if code else ():
        assert one["level"] == "error"
        assert "of plugin acme (given ), did not end within 3 s" in one["text"]
        assert "MARU_PLUGINS" in one["remedy"]
    assert len(found) == len(checks.split(","))


def test_what_a_vendor_says_cannot_obey_a_terminal(maru_runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHECKS", (("x", lambda patient: [Finding("ok", "a\x1b[2J", "b\x07\nc", "d\r")]),))
    shown = maru("--runtime-dir", str(maru_runtime_dir)).output
    assert shown == "x\n  ok      a\\x1b[2J: b\\x07\n          c\n          -> d\\r\n"


def test_a_plugin_whose_checks_cannot_be_called_is_refused() -> None:
    plugin = FakeBackend()

    class Wrong:
        @hookimpl
        def maru_storage_backends(self) -> list[BackendProvision]:
            return [BackendProvision("wrong", lambda: plugin, diagnose="later")]  # type: ignore[arg-type]

    (info,) = PluginHost.with_plugins({"wrong": Wrong()}).report()
    assert info.status == "failed"
    assert "'later' as its diagnose" in info.reason


def test_devices_are_listed_with_what_is_wrong_and_the_command_that_mends_it(tmp_path: Path) -> None:
    sysfs = FakeSysfs(tmp_path / "sys")
    sysfs.add("dax0.0", {"size": str(1 << 30), "align": "2097152"}, driver="kmem")
    sysfs.add("dax1.0", {"size": str(250 * MIB), "align": "4096"})
    dev = tmp_path / "dev"
    found = check_cxl(MaruConfig(), sysfs.root, dev)
    problems = text_of(found, "warning")
    for part in (
        f"{dev}/dax0.0: 1.0 GiB (1073741824 bytes), align 2.0 MiB, mode system-ram",
        "daxctl reconfigure-device --mode=devdax --force dax0.0",
        f"{dev}/dax1.0: 250.0 MiB (262144000 bytes), align 4.0 KiB, mode devdax",
        "--align=2M",
        "--size=",
    ):
        assert part in problems
    assert text_of(found, "error") == ""
    config = MaruConfig(storage_backend="cxl", cxl_pool_path=f"{dev}/dax0.0")
    assert "daxctl reconfigure-device" in text_of(check_cxl(config, sysfs.root, dev), "error")
    unset = MaruConfig(storage_backend="cxl")
    sysfs.add("dax2.0", {"size": str(1 << 30), "align": "2097152"})
    assert "2 devices could be used and none is named" in text_of(check_cxl(unset, sysfs.root, dev), "error")


def test_a_stand_in_says_so_and_whose_it_is(tmp_path: Path) -> None:
    path = tmp_path / "device"
    path.touch(0o600)
    os.truncate(path, 8 * MIB)
    config = MaruConfig(storage_backend="cxl", pool_path=str(path))

    def said() -> str:
        return text_of(check_cxl(config, tmp_path, tmp_path), "warning")

    assert "a file stands in for a device, for development only: never used by Maru" in said()
    backend = CxlBackend(settle=0.0)
    request = PoolRequest(0, 8 * MIB, 8192, 0, str(path), "owner")
    pool = backend.create_pool(request)
    assert f"in use by process {os.getpid()}" in said()
    assert backend.adopt_pool(request) is None, "to look takes nothing from its owner"
    pool.leave()
    assert "left for the next server by" in said()
    again = backend.adopt_pool(request)
    assert again is not None
    again.destroy()
    assert "free, last used by" in said()
    missing = MaruConfig(storage_backend="cxl", pool_path=str(tmp_path / "none" / "x"))
    assert "No such file" in text_of(check_cxl(missing, tmp_path, tmp_path), "error")


def test_devices_that_the_size_leaves_unused_are_told(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "ab"]
    for path in paths:
        path.touch(0o600)
        os.truncate(path, 8 * MIB)
    extra = {"maru_storage_backend": "cxl", "maru_cxl_pool_path": ",".join(map(str, paths))}

    def said(size: str) -> str:
        config = MaruConfig.from_mapping({**extra, "maru_cxl_pool_size": size}, {})
        return text_of(check_cxl(config, tmp_path, tmp_path), "warning")

    assert f"{paths[1]}: stays unused: maru_cxl_pool_size is 8.0 MiB" in said("8M")
    assert "unused" not in said("16M")
    assert "unused" not in text_of(check_cxl(MaruConfig.from_mapping(extra, {}), tmp_path, tmp_path), "warning")
    os.link(paths[0], tmp_path / "again")
    twice = MaruConfig(storage_backend="cxl", cxl_pool_path=f"{paths[0]},{tmp_path / 'again'}")
    assert text_of(check_cxl(twice, tmp_path, tmp_path), "error").count("is named twice") == 2
    other = MaruConfig.from_mapping({**extra, "maru_pool_size": "8M", "maru_storage_backend": "cpu"}, {})
    assert "unused" not in text_of(check_cxl(other, tmp_path, tmp_path), "warning")


def test_huge_pages_that_are_off_for_the_process_are_an_error_before_sigbus_is(tmp_path: Path) -> None:
    sysfs = FakeSysfs(tmp_path / "sys")
    sysfs.add("dax0.0", {"size": str(1 << 30), "align": "2097152"})
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/status").write_text("Name:\tx\nTHP_enabled:\t0\nx\n")
    config = MaruConfig(storage_backend="cxl", pool_path=str(tmp_path / "dev/dax0.0"))
    assert "SIGBUS" in text_of(check_cxl(config, sysfs.root, tmp_path / "dev", tmp_path), "error")


def test_memory_for_cpu_pools(tmp_path: Path) -> None:
    pages = tmp_path / "sys/kernel/mm"
    (pages / "transparent_hugepage").mkdir(parents=True)
    (pages / "transparent_hugepage/shmem_enabled").write_text("always within_size advise [never] deny force\n")
    (pages / "hugepages/hugepages-2048kB").mkdir(parents=True)
    (pages / "hugepages/hugepages-2048kB/nr_hugepages").write_text("8\n")
    (pages / "hugepages/hugepages-2048kB/free_hugepages").write_text("3\n")
    found = check_cpu(MaruConfig(pool_path=str(tmp_path), pool_size=1 << 60), tmp_path)
    assert "mount a tmpfs with huge=always" in text_of(found, "note")
    assert "3 of 8 pages of 2048kB" in text_of(found, "ok")
    assert "does not fit into what is free now" in text_of(found, "warning")


@pytest.mark.slow
@pytest.mark.parametrize("command", [["doctor", "--json"], ["status", "--json"], ["plugins", "--json"]])
def test_json_is_alone_on_stdout_whatever_there_is_to_warn_of(command: list[str], maru_runtime_dir: Path) -> None:
    environ = {**os.environ, "MARU_RUNTIME_DIR": str(maru_runtime_dir), "MARU_NO_SUCH_SETTING": "1"}
    run = subprocess.run(
        [sys.executable, "-m", "maru_core.cli", *command], env=environ, capture_output=True, text=True, timeout=60
    )
    json.loads(run.stdout)
    if command[0] != "plugins":  # it reads no settings
        assert "MARU_NO_SUCH_SETTING" in run.stderr


class Engine:
    """A transfer engine that lacks something, or fails at being asked."""

    name = "acme"

    def __init__(self, missing: str | BaseException | None) -> None:
        self._missing = missing

    def is_available(self) -> bool:
        if isinstance(self._missing, BaseException):
            raise self._missing
        return self._missing is None

    def import_error(self) -> str | None:
        assert not isinstance(self._missing, BaseException)
        return self._missing

    def unsupported(self, paged: Any, stored: Any, device: str) -> str | None:
        return None

    def open(self, layers: Any, paged: Any, stored: Any) -> Any:
        raise AssertionError("the doctor opens nothing")

    @hookimpl
    def maru_transfer_engines(self) -> list[EngineProvision]:
        return [EngineProvision(self.name, lambda: self)]


@pytest.mark.parametrize(
    ("settings", "missing", "level", "expected"),
    [
        ({}, None, "ok", "can be used here"),
        ({}, "no driver; install one", "note", "cannot be used here: no driver; install one"),
        ({"transfer_engine": "acme"}, "no driver; install one", "error", "no driver; install one"),
        ({"transfer_exclude": "acme"}, "no driver; install one", "note", "excluded by maru_transfer_exclude"),
        ({}, SystemExit(3), "note", "cannot be used here: SystemExit: 3"),
    ],
)
def test_every_engine_is_shown_with_what_it_lacks(
    settings: dict[str, Any], missing: Any, level: str, expected: str
) -> None:
    host = PluginHost.with_plugins({"acme": Engine(missing)})
    (found,) = module.engines(module.Patient(MaruConfig(**settings), host))
    assert (found.level, found.subject) == (level, "engine acme")
    assert expected in found.text


def test_names_of_engines_that_nobody_offers() -> None:
    host = PluginHost.with_plugins({"acme": Engine(None)})
    config = MaruConfig(transfer_engine="acne", transfer_exclude="kernels")
    wrong = list(module.engines(module.Patient(config, host)))[1:]
    assert [(finding.level, finding.subject) for finding in wrong] == [
        ("error", "maru_transfer_engine=acne"),
        ("warning", "maru_transfer_exclude=kernels"),
    ]
    assert all("there are: acme" in finding.text for finding in wrong)
