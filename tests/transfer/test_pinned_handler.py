"""A handler whose pools are registered: over restarts of the server, and at its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_driver import FakeDriver, is_mapped

from maru_core.client import MaruHandler
from maru_core.config import MaruConfig
from maru_core.errors import MaruError
from maru_core.namespace import Namespace
from maru_transfer.cuda_driver import INVALID_VALUE, DriverError
from maru_transfer.pinning import PinnedPools
from tests.waiting import eventually

pytestmark = pytest.mark.slow

MIB = 1 << 20
NAMESPACE = Namespace.of({"test": "pinned"})


def connected(url: str, pools: PinnedPools | None, **settings: Any) -> MaruHandler:
    return MaruHandler.connect(MaruConfig(server_url=url, **settings), NAMESPACE, role="worker", registrar=pools)


def stored(handler: MaruHandler, key: str) -> bool:
    try:
        return handler.store(key, b"x" * 1000).name == "STORED"
    except MaruError:
        return False


def test_pools_are_registered_anew_when_they_are_mapped_anew(maru_server: Any, maru_runtime_dir: Path) -> None:
    server = maru_server(pool_size="8M")
    driver = FakeDriver()
    pools = PinnedPools(driver.open, piece=MIB)
    with connected(server.url, pools) as handler:
        eventually(lambda: pools.stats()["state"] == "registered")
        registration = handler.stats()["client"]["registration"]
        assert registration["registered_bytes"] == 8 * MIB
        assert registration["unregistered_bytes"] == 0
        assert stored(handler, "a")
        before = dict(driver.registered)
        server.end()
        maru_server(maru_runtime_dir, pool_size="6M")
        eventually(lambda: stored(handler, "b"))
        eventually(lambda: pools.stats()["registered_bytes"] == 6 * MIB)
        eventually(lambda: dict(driver.undone) == before)
    eventually(lambda: not driver.registered)
    pools.close()
    assert driver.closed == 1
    assert driver.faults == []


def test_a_handler_does_not_mind_a_driver_that_refuses(maru_server: Any) -> None:
    server = maru_server(pool_size="8M")
    driver = FakeDriver({0: DriverError(INVALID_VALUE, "invalid argument")})
    pools = PinnedPools(driver.open)
    with connected(server.url, pools) as handler:
        eventually(lambda: pools.stats()["state"] == "not registered")
        registration = handler.stats()["client"]["registration"]
        assert registration["unregistered_bytes"] == 8 * MIB
        assert registration["reason"] == "invalid argument"
        assert stored(handler, "a")
        assert handler.exists("a")
    assert driver.undone == []


def test_what_a_view_still_shows_stays_mapped_and_is_no_longer_registered(maru_server: Any) -> None:
    server = maru_server(pool_size="8M")
    driver = FakeDriver()
    pools = PinnedPools(driver.open, piece=MIB)
    handler = connected(server.url, pools)
    eventually(lambda: pools.stats()["registered_bytes"] == 8 * MIB)
    assert stored(handler, "a")
    shown = handler.retrieve("a")
    assert shown is not None
    start = min(driver.registered)
    handler.close()
    eventually(lambda: not driver.registered)
    assert bytes(shown.view) == b"x" * 1000
    assert is_mapped(start, MIB)
    assert driver.faults == []
    pools.close()


def test_without_a_registrar_stats_say_nothing_of_it(maru_server: Any) -> None:
    server = maru_server(pool_size="8M")
    with connected(server.url, None) as handler:
        assert "registration" not in handler.stats()["client"]


@pytest.mark.parametrize("eager", [True, False])
def test_pools_are_registered_when_they_are_mapped(maru_server: Any, eager: bool) -> None:
    server = maru_server(pool_size="8M")
    pools = PinnedPools(FakeDriver().open, piece=MIB)
    with connected(server.url, pools, eager_map=eager) as handler:
        if not eager:
            assert pools.stats()["state"] == "no pool"
            assert stored(handler, "a")
        eventually(lambda: pools.stats()["registered_bytes"] == 8 * MIB)
    pools.close()
