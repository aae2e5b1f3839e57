"""Several processes: who starts the server, what a fork inherits, how a process ends."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from maru_core.client import MaruHandler, StoreResult, bootstrap
from maru_core.config import MaruConfig
from maru_core.errors import BackendError, ConfigError, MaruError, Unavailable
from maru_core.host import PluginHost
from maru_core.namespace import Namespace
from maru_core.protocol import ReserveStatus
from tests.client.fake_server import FakeServer
from tests.client.real import NAMESPACE, Folder
from tests.waiting import NEVER, eventually

pytestmark = pytest.mark.slow


def test_engines_that_start_together_start_one_server(folder: Folder) -> None:
    code = "h = connect()\nprint(h.epoch, h.stats()['server']['pid'], flush=True)\n"
    processes = [folder.run(code) for _ in range(4)]
    answers = set()
    for process in processes:
        out, err = process.communicate(timeout=30)
        assert process.returncode == 0, err
        answers.add(out.strip().splitlines()[-1])
    assert len(answers) == 1
    assert len(folder.pids()) == 1
    assert "already runs" not in (folder.path / "server.log").read_text(), "only one was ever started"


def test_the_started_server_outlives_its_engine_and_is_detached(folder: Folder) -> None:
    """vLLM ends every descendant of an engine when it stops, so while the engine lives the server is none of them."""
    parents = (
        "import os, re\n"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "h = connect()\n"
        "print(h.store('a', b'1'))\n"
        "pid, seen = h.stats()['server']['pid'], []\n"
        "while pid:\n"
        "    seen.append(pid)\n"
        "    pid = int(re.search(r'PPid:\\s+(\\d+)', open(f'/proc/{pid}/status').read())[1])\n"
        "print(os.getpid() in seen)\n"
    )
    process = folder.run(parents)
    out, err = process.communicate(timeout=30)
    assert "STORED" in out, err
    assert out.strip().endswith("False")
    pid = folder.pid()
    assert os.getsid(pid) != os.getsid(0)
    assert os.sched_getaffinity(pid) == os.sched_getaffinity(0), "an engine's pinning is its own"
    assert Path(f"/proc/{pid}/cwd").resolve() == Path("/")
    handler = folder.connect()
    assert handler.stats()["server"]["pid"] == pid
    found = handler.retrieve("a")
    assert found is not None
    assert bytes(found.view) == b"1"


def test_the_started_server_ends_when_idle(folder: Folder) -> None:
    handler = folder.connect(idle_exit=0.3)
    time.sleep(0.8)
    assert len(folder.pids()) == 1, "a session keeps it"
    handler.close()
    eventually(lambda: not folder.pids())
    assert not (folder.path / "server.sock").exists()


def test_the_pool_size_of_an_engine_that_comes_second_is_its_quota(
    folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    first = folder.connect()
    first.batch_store([f"{number}" for number in range(100)], [b"x"] * 100)
    assert "quota" not in capsys.readouterr().out
    second = folder.connect(Namespace.of({"model": "other", "tokens": 256}), pool_size="1M", idle_exit=20)
    # A whole page of difference at least is told, and this pool is small.
    for start in range(0, 400, 100):
        second.batch_store([f"{number}" for number in range(start, start + 100)], [b"x"] * 100)
    (mine,), (other,) = (handler.server_stats()["namespaces"] for handler in (second, first))
    assert mine["digest"] == second.namespace.digest.hex()
    assert mine["used"] == mine["quota"] == 1 << 20
    assert (other["used"], other["quota"]) == (100 * 4096, None)
    assert second.exists("399")
    assert capsys.readouterr().out.count("quota=1048576") == 1
    assert first.exists("0")


def test_a_pool_size_that_nobody_set_is_no_wish(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    """An engine with the default is not held to it at a larger server; one that says the same as the default is."""
    folder.connect()
    for size, quota in ((None, None), ("1M", 1 << 20)):
        settings = {key: value for key, value in folder.settings().items() if key != "pool_size"}
        if size is not None:
            settings["pool_size"] = size
        config = MaruConfig.from_mapping({f"maru_{key}": value for key, value in settings.items()}, {})
        namespace = Namespace.of({"model": str(size), "tokens": 256})
        with MaruHandler.connect(config, namespace, host=PluginHost.with_plugins({}, built_ins=True)) as handler:
            (mine,) = handler.server_stats()["namespaces"]
            assert mine["quota"] == quota
    assert MaruConfig.from_mapping({"maru_pool_size": "4G"}, {}).quota_wish() == 4 << 30
    assert MaruConfig.from_mapping({"maru_cpu_pool_size": "4G"}, {}).quota_wish() == 4 << 30
    assert MaruConfig().quota_wish() == 0
    assert "larger" in capsys.readouterr().out


def test_another_pool_size_is_told_once(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    folder.connect()
    assert "another size" not in capsys.readouterr().out
    second = folder.connect(pool_size="16M")
    assert capsys.readouterr().out.count("another size") == 1
    assert second.stats()["pools"][0]["capacity"] <= 4 << 20


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_forked_child_cannot_use_the_handler_nor_hurt_it(folder: Folder) -> None:
    handler = folder.connect()
    assert handler.store("a", b"1" * 100) is StoreResult.STORED
    grants = handler.reserve([b"k" * 32], 100)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            verdict = "used"
            try:
                handler.store("b", b"2")
            except Unavailable:
                verdict = "looks like an outage"
            except MaruError as error:
                verdict = "refused" if "fork" in str(error) else str(error)
            os.write(writer, verdict.encode())
            os.close(writer)
            time.sleep(30)
        finally:
            os._exit(0)
    os.close(writer)
    try:
        assert os.read(reader, 100) == b"refused"
        time.sleep(1.2)  # the server looks for dead owners about every half second
        assert handler.commit(grants) == b"\0", "the parent still holds its lock"
        # While the child lives on, the parent's death must still be provable.
        session = handler._link.up()
        assert session.proof is not None
        # Nobody closes it again: the number is soon somebody else's.
        handler._link.guard._open.discard(session.proof)
        os.close(session.proof)
        observer = folder.connect()
        eventually(lambda: observer.stats()["counters"]["expired_sessions"] == 1)
    finally:
        os.close(reader)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_killed_client_frees_what_it_was_writing_and_loses_nothing_stored(folder: Folder) -> None:
    watcher = folder.connect()
    process = folder.run(
        "h = connect()\nh.store('a', b'kept')\n"
        "g = h.reserve([b'k' * 32], 100)\nprint('ready', flush=True)\ntime.sleep(60)\n"
    )
    assert process.stdout is not None
    while "ready" not in process.stdout.readline():
        assert process.poll() is None
    assert watcher.reserve([b"k" * 32], 100).statuses == bytes([ReserveStatus.BUSY])
    process.send_signal(signal.SIGSTOP)
    time.sleep(1.2)
    assert watcher.reserve([b"k" * 32], 100).statuses == bytes([ReserveStatus.BUSY]), "paused is not dead"
    process.kill()
    eventually(lambda: watcher.stats()["pools"][0]["reserved"] == 0)
    found = watcher.retrieve("a")
    assert found is not None
    assert bytes(found.view) == b"kept"
    assert watcher.reserve([b"k" * 32], 100).statuses == bytes([ReserveStatus.NEW])


ENDINGS = {
    "exit": ("", 0),
    "exception": ("raise RuntimeError('as planned')\n", 1),
    "sys.exit": ("sys.exit(5)\n", 5),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(60)\n", -signal.SIGTERM),
    "thread": ("t = threading.Thread(target=lambda: h.submit_acquire([bytes(32)], leading=True)); t.start()\n", 0),
}


@pytest.mark.parametrize(
    ("ending", "server"),
    [(ending, server) for ending in ("exit", "exception", "SIGTERM") for server in ("killed", "stopped")]
    + [("sys.exit", "never there"), ("SIGTERM", "never there"), ("thread", "killed")],
)
def test_a_process_whose_server_is_away_ends_at_once(folder: Folder, ending: str, server: str) -> None:
    code, expected = ENDINGS[ending]
    url = f"ipc://{folder.path}/elsewhere.sock" if server == "never there" else f"ipc://{folder.path}/server.sock"
    patience = 0.2 if server == "never there" else 60
    if server != "never there":
        folder.connect()
    process = folder.run(
        f"h = connect(server_url={url!r}, connect_timeout={patience}, request_timeout=30)\n"
        "print('up', flush=True)\ntime.sleep(0.5)\n"
        "for i in range(100):\n"
        "    try: h.submit_acquire([bytes(32)], leading=True)\n"
        "    except Exception: pass\n"
        "print('ending', flush=True)\n"
        + (code if ending != "thread" else "try:\n    " + code + "except Exception: pass\n")
    )
    assert process.stdout is not None
    while "up" not in process.stdout.readline():
        assert process.poll() is None
    if server != "never there":
        pid = folder.pid()
        for handler in folder._handlers:
            handler.close()
        os.kill(pid, signal.SIGKILL if server == "killed" else signal.SIGSTOP)
    while "ending" not in process.stdout.readline():
        assert process.poll() is None
    start = time.monotonic()
    process.wait(NEVER)
    assert time.monotonic() - start < 15, "not even one request is waited for"
    assert process.returncode == expected


def test_a_handler_that_is_dropped_says_goodbye(fake: FakeServer, connect: Callable[..., MaruHandler]) -> None:
    host = PluginHost.with_plugins({})
    handler = MaruHandler.connect(MaruConfig(server_url=fake.url), NAMESPACE, host=host, role="scheduler")
    assert handler.is_up
    del handler
    eventually(lambda: fake.goodbyes == 1)


@pytest.mark.parametrize("url", ["ipc:///nonexistent/folder/server.sock", "tcp://127.0.0.1:9"])
def test_a_wrong_address_is_named(url: str) -> None:
    host = PluginHost.with_plugins({})
    handler = MaruHandler.connect(MaruConfig(server_url=url, connect_timeout=0.2), NAMESPACE, host=host)
    try:
        with pytest.raises(Unavailable, match=url):
            handler.probe([bytes(32)])
    finally:
        handler.close()


def test_an_address_that_cannot_be_one_is_refused() -> None:
    for url in ("http://127.0.0.1:1", "tcp://10.0.0.1:1", "ipc://relative"):
        with pytest.raises(ConfigError, match="maru_server_url"):
            MaruConfig(server_url=url)


def test_a_runtime_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    host = PluginHost.with_plugins({})
    plain = tmp_path / "file"
    plain.write_text("")
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    for path in (plain, shared, plain / "below", tmp_path / ("long" * 30)):
        with pytest.raises(ConfigError, match=r"runtime|socket path"):
            MaruHandler.connect(MaruConfig(runtime_dir=str(path)), NAMESPACE, host=host)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_runtime_folder_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="maru_runtime_dir"):
        MaruHandler.connect(MaruConfig(runtime_dir=str(tmp_path)), NAMESPACE, host=PluginHost.with_plugins({}))


def test_a_log_that_leads_elsewhere_is_named_and_not_followed(folder: Folder) -> None:
    target = folder.path / "precious"
    target.write_text("mine")
    (folder.path / "server.log").symlink_to(target)
    with pytest.raises(ConfigError, match=r"server\.log: it is a symbolic link; remove it"):
        folder.connect()
    assert target.read_text() == "mine"
    assert folder.pids() == []


def test_a_server_that_cannot_start_says_why(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "START_TIMEOUT", 60.0)
    start = time.monotonic()
    with pytest.raises(BackendError, match="maru_pool_size"):
        folder.connect(pool_size="900T", connect_timeout=60)
    with pytest.raises(BackendError, match="lower maru_cpu_pool_size"):
        folder.connect(cpu_pool_size="900T", connect_timeout=60)
    assert time.monotonic() - start < 50, "it waits for a server that has ended"


def test_closing_while_no_server_answers_is_quick(maru_runtime_dir: Path) -> None:
    url = f"ipc://{maru_runtime_dir}/nobody.sock"
    host = PluginHost.with_plugins({})
    settings = MaruConfig(server_url=url, connect_timeout=0.1, request_timeout=30)
    handler = MaruHandler.connect(settings, NAMESPACE, host=host)
    start = time.monotonic()
    handler.close()
    assert time.monotonic() - start < 15
