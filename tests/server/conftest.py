"""Real servers in processes of their own, in private folders with short paths."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from attrs import define

from maru_core.access import ClientKeys
from tests.server.raw import RawClient
from tests.waiting import NEVER


@define
class Server:
    """A running server process."""

    process: subprocess.Popen[bytes]
    folder: Path
    url: str


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    """A private folder whose socket path is short enough for a Unix socket."""
    folder = Path(tempfile.mkdtemp(prefix="maru-t-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def start_server(runtime_dir: Path) -> Iterator[Callable[..., Server]]:
    """Start servers that end with the test."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str) -> Server:
        log = (runtime_dir / "server.log").open("ab")
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.server.fakes", str(runtime_dir), *arguments],
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "MARU_PLUGINS": "none"},
        )
        log.close()
        started.append(process)
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], NEVER)[0], "the server did not come up"
        url = process.stdout.readline().decode().strip()
        if not url:
            raise AssertionError((runtime_dir / "server.log").read_text())
        return Server(process, runtime_dir, url)

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    """A ZeroMQ context whose sockets are closed with the test."""
    own = zmq.Context()
    yield own
    own.destroy(0)


@pytest.fixture
def connect(context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[Callable[..., RawClient]]:
    """Raw clients without a session."""
    clients: list[RawClient] = []

    def new(server: Server, keys: ClientKeys | None = None, timeout: float = 10.0) -> RawClient:
        clients.append(RawClient(context, server.url, timeout, keys))
        return clients[-1]

    yield new
    for client in clients:
        client.close()
