"""Fixtures: a fake server, a handler connected to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from maru_core.client import MaruHandler
from maru_core.config import MaruConfig
from maru_core.fakes import FakeBackend
from maru_core.host import PluginHost
from maru_core.namespace import Namespace
from tests.client.fake_server import FakeServer
from tests.client.real import Folder

NAMESPACE = Namespace.of({"model": "test", "tokens": 256})


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
def serve(maru_runtime_dir: Path, backend: FakeBackend) -> Iterator[Callable[..., FakeServer]]:
    """Start a fake server in the test's folder; all of them end with the test."""
    started: list[FakeServer] = []

    def start(**options: int) -> FakeServer:
        server = FakeServer(maru_runtime_dir, backend, **options)
        started.append(server)
        return server

    yield start
    for server in started:
        if server._thread.is_alive():
            server.stop()


@pytest.fixture
def fake(serve: Callable[..., FakeServer]) -> FakeServer:
    return serve()


@pytest.fixture
def connect(maru_runtime_dir: Path, backend: FakeBackend) -> Iterator[Callable[..., MaruHandler]]:
    """Connect a handler to the test's folder; all of them are closed with the test."""
    opened: list[MaruHandler] = []

    def start(**settings: object) -> MaruHandler:
        options = {"server_url": f"ipc://{maru_runtime_dir / 'server.sock'}", "request_timeout": 0.3, **settings}
        host = PluginHost.with_plugins({"fake": backend})
        handler = MaruHandler.connect(MaruConfig(**options), NAMESPACE, host=host)
        opened.append(handler)
        return handler

    yield start
    for handler in opened:
        handler.close()


@pytest.fixture
def handler(fake: FakeServer, connect: Callable[..., MaruHandler]) -> MaruHandler:
    return connect()


@pytest.fixture
def folder(maru_runtime_dir: Path) -> Iterator[Folder]:
    """A runtime folder in which ``auto`` starts a real server."""
    made = Folder(maru_runtime_dir)
    yield made
    made.end()
