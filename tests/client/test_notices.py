"""A user is told, once, what the server's pools do not do as their settings say."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from maru_core.client import MaruHandler
from maru_core.client.notices import PoolNotices
from maru_core.config import MaruConfig
from maru_core.fakes import FakeBackend
from maru_core.host import PluginHost
from maru_core.testing import ServerFactory
from tests.client.conftest import NAMESPACE
from tests.client.fake_server import FakeServer
from tests.client.real import Folder
from tests.waiting import eventually

GONE = "another server has taken the place of the one before, and what that had stored is gone"
REPLACED = "a server that was killed is replaced by one with other pools: what it had stored is gone"
LOST = "the granule of the server's pools is too large for this engine's objects, and room is lost"


def session(*granules: int) -> Any:
    return SimpleNamespace(server_pid=7, pools=[SimpleNamespace(size=1 << 30, granule=granule) for granule in granules])


def told(notices: PoolNotices, *granules: int) -> list[dict[str, Any]]:
    with capture_logs() as logs:
        notices.tell(session(*granules), None, "ipc:///x")
    assert all(log["log_level"] == "warning" for log in logs)
    return [dict(log) for log in logs if log["event"] == LOST]


@pytest.mark.parametrize(
    ("object_bytes", "granule", "lost", "fitting"),
    [
        (98_304, 65_536, 25, 32_768),
        (65_536, 2 << 20, 97, 65_536),
        (65_537, 65_536, 50, 4_096),
        (100, 4_096, 98, None),
        (98_304, 32_768, None, None),
        (59 * 65_536, 65_536, None, None),
        (9 * 65_536 + 1, 65_536, None, None),
        (None, 2 << 20, None, None),
    ],
)
@pytest.mark.parametrize("layerwise", [False, True])
def test_room_that_is_lost_is_told_with_its_numbers_and_a_remedy(
    object_bytes: int | None, granule: int, lost: int | None, fitting: int | None, layerwise: bool
) -> None:
    found = told(PoolNotices(MaruConfig(use_layerwise=layerwise), object_bytes), granule)
    if lost is None:
        assert not found
        return
    (log,) = found
    assert (log["object_bytes"], log["granule"], log["lost_percent"]) == (object_bytes, granule, lost)
    assert (f"--granule {fitting}" in log["remedy"]) is (fitting is not None)
    assert ("maru_use_layerwise" in log["remedy"]) is layerwise
    assert log["remedy"]


def test_each_granule_is_told_once() -> None:
    """A server that comes back with the same pools is nothing new; one with others is."""
    notices = PoolNotices(MaruConfig(), 5_000)
    assert [log["granule"] for log in told(notices, 65_536, 4_096, 65_536)] == [4_096, 65_536]
    assert not told(notices, 65_536)
    assert [log["granule"] for log in told(notices, 65_536, 131_072)] == [131_072]


def test_a_handler_tells_at_its_start(maru_runtime_dir: Path, backend: FakeBackend, serve: Any) -> None:
    server: FakeServer = serve(granule=65_536)
    host = PluginHost.with_plugins({"fake": backend})
    with capture_logs() as logs:
        config = MaruConfig(server_url=server.url, use_layerwise=True)
        MaruHandler.connect(config, NAMESPACE, host=host, object_bytes=40_000).close()
        MaruHandler.connect(config, NAMESPACE, host=host).close()
    assert [log["object_bytes"] for log in logs if log["event"] == LOST] == [40_000]


@pytest.mark.parametrize(
    ("server_url", "size", "remedy"),
    [
        ("auto", 1 << 30, "maru_server_url=ipc:///x"),
        ("ipc:///x", 1 << 30, "sizes of before"),
        ("auto", 4 << 30, "--keep-pools"),
    ],
)
def test_what_is_gone_is_told_with_both_sizes(server_url: str, size: int, remedy: str) -> None:
    def pools(identity: bytes, size: int) -> Any:
        found = SimpleNamespace(backend="cpu", size=size, granule=4096, identity=identity)
        return SimpleNamespace(server_pid=7, pools=[found])

    notices = PoolNotices(MaruConfig(server_url=server_url), None)
    before = pools(b"a", 4 << 30)
    with capture_logs() as logs:
        notices.tell(before, None, "ipc:///x")
        notices.tell(pools(b"a", 4 << 30), before, "ipc:///x")
    assert not logs, "the first session, and one on the same memory"
    with capture_logs() as logs:
        notices.tell(pools(b"b", size), before, "ipc:///x")
    (log,) = logs
    assert (log["event"], log["log_level"], log["server_pid"]) == (GONE, "warning", 7)
    assert log["pools_before"] == "cpu of 4.0 GiB in granules of 4096"
    assert log["pools"] == f"cpu of {size >> 30}.0 GiB in granules of 4096"
    assert remedy in log["remedy"]


@pytest.mark.slow
@pytest.mark.parametrize("same", [True, False])
def test_an_engine_that_replaces_a_killed_server_says_what_is_gone(
    folder: Folder, maru_server: ServerFactory, same: bool
) -> None:
    """With the sizes of the server that an operator had started it serves what that had; with others it cannot."""
    settings = {"pool_size": "4M", "pool_path": folder.settings()["pool_path"], "chunk_size": 4096}
    server = maru_server(folder.path, **(settings if same else {**settings, "pool_size": "8M"}))
    handler = folder.connect()
    handler.store("a", b"some bytes")
    epoch = handler.epoch
    with capture_logs() as logs:
        server.kill()
        eventually(lambda: handler.is_up and handler.epoch != epoch)
    assert handler.exists("a") is same
    told = {log["event"]: log for log in logs if log["log_level"] == "warning"}
    assert (GONE in told, REPLACED in told) == (not same, not same)
    cold = "cold start: what the server before had stored is gone" in (log := (folder.path / "server.log").read_text())
    assert cold is not same
    if not same:
        assert told[REPLACED]["killed_pid"] == server.pid
        assert told[GONE]["server_pid"] == folder.pid() != server.pid
        assert f"maru_server_url={handler._link.url}" in told[GONE]["remedy"]
        assert "size 8388608, not 4194304" in log


@pytest.mark.slow
def test_an_engine_that_starts_where_a_server_was_killed_says_what_is_gone(
    folder: Folder, maru_server: ServerFactory
) -> None:
    """It has no session of before: what the folder tells is all that there is."""
    maru_server(folder.path, pool_path=folder.settings()["pool_path"], pool_size="8M").kill()
    with capture_logs() as logs:
        folder.connect()
    assert [log["event"] for log in logs].count(REPLACED) == 1


@pytest.mark.slow
def test_a_server_that_ended_in_order_left_nothing_to_tell_of(folder: Folder, maru_server: ServerFactory) -> None:
    maru_server(folder.path, pool_path=folder.settings()["pool_path"], pool_size="8M").stop()
    with capture_logs() as logs:
        folder.connect()
    assert not [log for log in logs if log["log_level"] == "warning"]
