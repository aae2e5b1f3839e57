"""The ``maru_server`` fixture: a real server, private, and gone when the test is over, however it ended."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from maru_core.client import MaruHandler
from maru_core.config import MaruConfig
from maru_core.namespace import Namespace
from maru_core.testing import ServerFactory
from tests.project.test_testing_plugin import Runner, runner

pytestmark = pytest.mark.slow

__all__ = ["runner"]


def connect(url: str) -> MaruHandler:
    return MaruHandler.connect(MaruConfig(server_url=url), Namespace.of({"test": "server fixture"}))


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_it_serves_with_the_settings_given(maru_server: ServerFactory, maru_runtime_dir: Path) -> None:
    server = maru_server(pool_size="8M")
    assert server.runtime_dir == maru_runtime_dir
    assert str(maru_runtime_dir) in server.url
    with connect(server.url) as handler:
        (pool,) = handler.stats()["pools"]
        assert 7 << 20 <= pool["capacity"] <= 8 << 20
        assert pool["location"].startswith(str(maru_runtime_dir))
        handler.store(b"key", b"value")
        found = handler.retrieve(b"key")
        assert found is not None
        assert bytes(found.view) == b"value"
        found.close()
    assert server.stop() == 0


def test_two_servers_have_folders_of_their_own(
    maru_server: ServerFactory, maru_runtime_dir: Path, tmp_path: Path
) -> None:
    other = maru_runtime_dir / "other"
    other.mkdir(mode=0o700)
    first, second = maru_server(), maru_server(other)
    assert first.url != second.url
    assert first.pid != second.pid


def test_a_server_is_started_again_after_a_crash(maru_server: ServerFactory) -> None:
    first = maru_server()
    first.kill()
    assert not alive(first.pid)
    second = maru_server()
    assert second.url == first.url
    with connect(second.url) as handler:
        assert handler.ping() >= 0


def test_a_server_that_does_not_start_says_why(maru_server: ServerFactory) -> None:
    with pytest.raises(RuntimeError, match=r"ended with [1-9](.|\n)*maru_storage_backend|no-such"):
        maru_server(storage_backend="no-such")


@pytest.mark.parametrize(
    "ending", ["pass", "raise ValueError", "import os, signal; os.kill(server.pid, signal.SIGSTOP)"]
)
def test_it_ends_with_the_test(runner: Runner, ending: str) -> None:
    test = f"""
        def test_it(maru_server):
            server = maru_server()
            with open("pid", "w") as file:
                print(server.pid, server.runtime_dir, file=file)
            {ending}
    """
    run = runner.run(test)
    assert (run.returncode == 0) is (ending != "raise ValueError"), run.stdout + run.stderr
    pid, folder = (runner.folder / "pid").read_text().split()
    assert not alive(int(pid))
    assert not Path(folder).exists()


def test_its_process_is_told_that_no_plugin_is_wanted(maru_server: ServerFactory) -> None:
    variables = Path(f"/proc/{maru_server().pid}/environ").read_bytes().split(b"\0")
    assert b"MARU_PLUGINS=none" in variables


def test_a_stopped_server_is_ended_within_seconds(maru_server: ServerFactory) -> None:
    server = maru_server()
    os.kill(server.pid, signal.SIGSTOP)
    start = time.monotonic()
    server.end()
    assert time.monotonic() - start < 10
    assert not alive(server.pid)
