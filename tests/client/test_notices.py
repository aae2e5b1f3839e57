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
from tests.client.conftest import NAMESPACE
from tests.client.fake_server import FakeServer

LOST = "the granule of the server's pools is too large for this engine's objects, and room is lost"


def session(*granules: int) -> Any:
    return SimpleNamespace(server_pid=7, pools=[SimpleNamespace(size=1 << 30, granule=granule) for granule in granules])


def told(notices: PoolNotices, *granules: int) -> list[dict[str, Any]]:
    with capture_logs() as logs:
        notices.tell(session(*granules))
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
