"""A pytest plugin for tests of Maru and of its plugins: ``pytest -p maru_core.testing``.

Hermetic by default, whatever the caller's shell exports and whatever is installed on the host: no installed plugin is
discovered, every ``MARU_*`` variable is taken away (but for ``MARU_TEST_*``, which are no settings), and
``MARU_PLUGINS=none`` is exported for the tests and for each process that they start. A test that needs the installed
plugins says so with ``@pytest.mark.installed_plugins``. A test that leaves the environment changed fails.
"""

from __future__ import annotations

import fnmatch
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import pytest
import structlog

from maru_core import discovery
from maru_core.config import ENVIRON_PREFIX
from maru_core.fakes import FakeBackend
from maru_core.host import PluginHost
from maru_core.setting_sources import TEST_PREFIX
from maru_core.testing_server import RunningServer

#: Variables that test runners and the standard library set themselves.
_FOREIGN: Final = ("PYTEST_*", "COV_*", "COVERAGE_*")

_isolation = pytest.StashKey[pytest.MonkeyPatch]()

HostFactory = Callable[..., PluginHost]
ServerFactory = Callable[..., RunningServer]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the ini option."""
    parser.addini(
        "maru_environment_ignore",
        "patterns of variables that a test may leave changed, because a library sets them at import",
        type="args",
        default=[],
    )


def pytest_configure(config: pytest.Config) -> None:
    """Take the caller's settings and installed plugins away, before anything is collected."""
    config.addinivalue_line("markers", "installed_plugins: may discover the plugins that are installed on this host")
    pytest.register_assert_rewrite("maru_core.testing_backend")
    patch = pytest.MonkeyPatch()
    for name in list(os.environ):
        if name.startswith(ENVIRON_PREFIX) and not name.startswith(TEST_PREFIX):
            patch.delenv(name)
    patch.setenv("MARU_PLUGINS", "none")
    patch.setattr(discovery, "search_path", lambda: ())
    config.stash[_isolation] = patch


def pytest_unconfigure(config: pytest.Config) -> None:
    """Give the process back as it was."""
    config.stash[_isolation].undo()


@pytest.fixture(autouse=True)
def maru_isolation(request: pytest.FixtureRequest) -> Iterator[None]:
    """Open what the test's marker opens, and fail the test when it leaves the environment changed.

    A logging set-up that the test made (by running a program's ``main``) is undone.
    """
    with pytest.MonkeyPatch.context() as patch:
        if request.node.get_closest_marker("installed_plugins"):
            patch.delenv("MARU_PLUGINS", raising=False)
            patch.setattr(discovery, "search_path", discovery.system_path)
        before = dict(os.environ)
        configured, logging = structlog.is_configured(), structlog.get_config()
        yield
        if structlog.get_config() != logging:
            structlog.reset_defaults()
            if configured:
                structlog.configure(**logging)
        changed = _changes(before, os.environ, (*_FOREIGN, *request.config.getini("maru_environment_ignore")))
        if changed:
            for name in changed:
                if name in before:
                    os.environ[name] = before[name]
                else:
                    os.environ.pop(name, None)
            pytest.fail(f"the test left these variables changed: {', '.join(changed)}; use monkeypatch", pytrace=False)


@pytest.fixture
def maru_host() -> HostFactory:
    """``maru_host(plugins={}, *, strict=True)``: a host of the built-ins and of these plugin objects, by name.

    Strict, so that a plugin with a mistake fails its test; ``strict=False`` shows what users would see.
    """

    def make(plugins: Mapping[str, object] | None = None, *, strict: bool = True) -> PluginHost:
        return PluginHost.with_plugins(plugins or {}, built_ins=True, strict=strict)

    return make


@pytest.fixture
def maru_fake_backend() -> FakeBackend:
    """A storage backend (and plugin) of this process's memory, see :class:`maru_core.fakes.FakeBackend`."""
    return FakeBackend()


@pytest.fixture
def maru_runtime_dir() -> Iterator[Path]:
    """A private folder, mode 0700, with a path short enough for the sockets in it; removed after the test."""
    folder = Path(tempfile.mkdtemp(prefix="maru-", dir="/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def maru_server(request: pytest.FixtureRequest) -> Iterator[ServerFactory]:
    """``maru_server(runtime_dir=None, **settings)``: starts a server process and waits until it serves.

    ``settings`` are those of :class:`maru_core.config.MaruConfig`, such as ``pool_size="64M"``. Every server ends
    with the test, also when the test fails.
    """
    started: list[RunningServer] = []

    def start(runtime_dir: Path | None = None, **settings: object) -> RunningServer:
        folder = runtime_dir or request.getfixturevalue("maru_runtime_dir")
        server = RunningServer.start(folder, settings)
        started.append(server)
        return server

    try:
        yield start
    finally:
        for server in started:
            server.end()


def _changes(before: Mapping[str, str], after: Mapping[str, str], ignored: tuple[str, ...]) -> list[str]:
    names = {name for name in {*before, *after} if before.get(name) != after.get(name)}
    return sorted(name for name in names if not any(fnmatch.fnmatchcase(name, pattern) for pattern in ignored))
