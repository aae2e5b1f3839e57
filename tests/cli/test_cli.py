"""The command ``maru``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from maru_core.cli import main
from tests.client.real import Folder
from tests.waiting import NEVER, eventually


def maru(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def serve(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "maru_core.cli", "serve", "--runtime-dir", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def test_status_says_that_no_server_runs_and_where_it_looked(maru_runtime_dir: Path) -> None:
    result = maru("status", "--runtime-dir", str(maru_runtime_dir))
    assert result.exit_code == 1
    assert f"{maru_runtime_dir}/server.sock" in result.output
    assert "maru serve" in result.output
    answer = json.loads(maru("status", "--json", "--runtime-dir", str(maru_runtime_dir)).output)
    assert answer["running"] is False
    assert str(maru_runtime_dir) in answer["url"]


def test_status_looks_where_the_environment_says(maru_runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARU_RUNTIME_DIR", str(maru_runtime_dir))
    assert str(maru_runtime_dir) in maru("status").output


def test_status_does_not_wait_for_an_address_where_nobody_is(maru_runtime_dir: Path) -> None:
    result = maru("status", "--url", f"ipc://{maru_runtime_dir}/x.sock", "--timeout", "0.1")
    assert result.exit_code == 1
    assert "no answer within 0.1 s" in result.output


@pytest.mark.slow
def test_status_shows_what_the_server_holds(folder: Folder) -> None:
    handler = folder.connect()
    handler.store("a", b"x" * 5000)
    handler.retrieve("missing")
    table = maru("status", "--runtime-dir", str(folder.path))
    assert table.exit_code == 0, table.output
    for expected in (
        str(folder.pid()),
        "1 sessions",
        "8.0 KiB",
        "hit rate 0.0% of 1 keys",
        handler.namespace.digest.hex(),
    ):
        assert expected in table.output
    stats = json.loads(maru("status", "--json", "--runtime-dir", str(folder.path)).output)
    assert stats["running"] is True
    assert stats["pools"][0]["used"] == 8192
    assert stats["counters"]["stored"] == 1
    assert stats["sessions"] == 1, "looking is no session"


@pytest.mark.slow
def test_status_of_a_stopped_server_ends_in_time(folder: Folder) -> None:
    folder.connect()
    os.kill(folder.pid(), signal.SIGSTOP)
    result = maru("status", "--runtime-dir", str(folder.path), "--timeout", "0.2")
    assert result.exit_code == 1
    assert "no answer within 0.2 s" in result.output


@pytest.mark.slow
def test_a_second_server_is_told_of_the_first(folder: Folder) -> None:
    folder.connect()
    second = serve(folder.path, "--pool-size", "1M", "--pool-path", str(folder.path))
    assert second.returncode == 3
    assert str(folder.pid()) in second.stderr


@pytest.mark.slow
def test_serve_names_a_wrong_setting(maru_runtime_dir: Path) -> None:
    wrong = serve(maru_runtime_dir, "--pool-size", "lots")
    assert wrong.returncode == 1
    assert "--pool-size is 'lots'; expected" in wrong.stderr
    assert "Traceback" not in wrong.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--granule", "5"), "--granule is '5'; expected"),
        (("--url", "http://x"), "--url is 'http://x'; expected"),
        (("--idle-exit", "-1"), "--idle-exit is '-1'; expected"),
        (("--pool-size", "9" * 30), "--pool-size is '999"),
        (("--namespace-quota", "0.0001"), "--namespace-quota is '0.0001'"),
        (("--url", "tcp://127.0.0.1:5", "--keys", "/" + "k" * 300), "no key file /kkk"),
        (("--granule", "5", "--report-fd", "77"), "--granule"),
        (("--granule", "5", "--report-fd", "-1"), "--granule"),
        (("--granule", "5", "--report-fd", "9" * 30), "--granule"),
        (("--runtime-dir", "/etc/passwd"), "/etc/passwd is not a folder"),
        (("--runtime-dir", "/" + "x" * 300), "File name too long"),
    ],
)
def test_serve_says_what_is_wrong_in_a_line(maru_runtime_dir: Path, arguments: tuple[str, ...], words: str) -> None:
    wrong = serve(maru_runtime_dir, *arguments)
    assert wrong.returncode == 1
    assert words in wrong.stderr
    assert "Traceback" not in wrong.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["server.lock", "server.json", "weights.json", "admin.token", "server.sock"])
def test_serve_names_a_folder_in_the_place_of_a_file(maru_runtime_dir: Path, name: str) -> None:
    (maru_runtime_dir / name).mkdir()
    wrong = serve(maru_runtime_dir, "--pool-size", "1M", "--pool-path", str(maru_runtime_dir))
    assert wrong.returncode == 1
    assert name in wrong.stderr
    assert "Traceback" not in wrong.stderr


@pytest.mark.slow
def test_a_setting_of_the_environment_is_named_as_there(
    maru_runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MARU_CHUNK_SIZE", "5")
    assert "MARU_CHUNK_SIZE is '5' (from the environment)" in serve(maru_runtime_dir).stderr


@pytest.mark.slow
@pytest.mark.parametrize(("command", "ends"), [((), True), (("nohup",), False)])
def test_hanging_up_ends_a_server_cleanly(maru_runtime_dir: Path, command: tuple[str, ...], ends: bool) -> None:
    serving = [sys.executable, "-m", "maru_core.cli", "serve", "--runtime-dir", str(maru_runtime_dir)]
    serving += ["--pool-size", "1M", "--pool-path", str(maru_runtime_dir)]
    # A folder with a lock file's name is no reason not to start.
    (maru_runtime_dir / "sessions").mkdir(mode=0o700)
    (maru_runtime_dir / "sessions" / "0000000000000001.lock").mkdir()
    # These tests may themselves be run so that hanging up is ignored.
    heard = partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)
    process = subprocess.Popen(
        [*command, *serving], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, preexec_fn=heard
    )
    try:
        eventually((maru_runtime_dir / "server.json").exists)
        eventually(lambda: maru("status", "--runtime-dir", str(maru_runtime_dir)).exit_code == 0)
        process.send_signal(signal.SIGHUP)
        if ends:
            assert process.wait(NEVER) == 0
            assert not (maru_runtime_dir / "server.json").exists()
        else:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(1)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_serve_names_an_unknown_backend(maru_runtime_dir: Path) -> None:
    wrong = serve(maru_runtime_dir, "--storage-backend", "paper")
    assert wrong.returncode == 1
    assert "paper" in wrong.stderr
    assert "cpu" in wrong.stderr


@pytest.mark.slow
def test_serve_limits_what_a_namespace_may_take(maru_runtime_dir: Path) -> None:
    wrong = serve(maru_runtime_dir, "--namespace-quota", "some")
    assert wrong.returncode == 1
    assert "--namespace-quota is 'some'" in wrong.stderr


def test_plugins_lists_the_built_ins() -> None:
    result = maru("plugins")
    assert result.exit_code == 0, result.output
    assert "cpu  active" in result.output
    listed = json.loads(maru("plugins", "--json").output)
    assert "cpu" in [plugin["name"] for plugin in listed]


@pytest.mark.slow
def test_what_plugins_tells_beside_its_list_is_not_in_the_list() -> None:
    """Warnings go to stderr: what reads the list as JSON is not disturbed."""
    command = [sys.executable, "-m", "maru_core.cli", "plugins", "--json"]
    run = subprocess.run(command, env=os.environ | {"MARU_PLUGINS": "typo"}, capture_output=True, text=True)
    assert "typo" in run.stderr
    assert "cpu" in [plugin["name"] for plugin in json.loads(run.stdout)]


def test_version_and_help() -> None:
    assert "0." in maru("--version").output
    for command in ("serve", "status", "plugins", "keygen", "admin"):
        assert command in maru("--help").output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "environ", "named"),
    [
        (("--cpu-pool-size", "900T"), {}, "lower --cpu-pool-size"),
        (("--pool-size", "900T"), {}, "lower --pool-size"),
        ((), {"MARU_CPU_POOL_SIZE": "900T"}, "lower MARU_CPU_POOL_SIZE"),
        (("--cpu-pool-size", "1M", "--granule", "1M"), {}, "raise --cpu-pool-size"),
    ],
)
def test_a_size_that_cannot_be_is_called_as_it_was_set(
    maru_runtime_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    environ: dict[str, str],
    named: str,
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    ended = serve(maru_runtime_dir, "--storage-backend", "mixed", "--write-order", "cpu", *options)
    assert ended.returncode == 1
    assert named in ended.stderr
    assert "Traceback" not in ended.stderr
