"""Servers on pools of the cxl backend: on files that stand in for devices, and on real ones where there are any."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from maru_core.client import MaruHandler, StoreResult
from maru_core.config import MaruConfig
from maru_core.errors import Unavailable
from maru_core.host import PluginHost
from maru_core.namespace import Namespace
from maru_core.testing import ServerFactory
from maru_core.testing_server import RunningServer
from tests.vm.stamps import difference, size_of, stamped
from tests.waiting import eventually

MIB: Final = 1 << 20
COUNT: Final = 12
#: Variables that name devices that these tests may overwrite.
VARIABLES: Final = ("MARU_TEST_DAX", "MARU_TEST_DAX_2")


@pytest.fixture(params=["file", pytest.param("device", marks=pytest.mark.device)])
def places(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    """Paths of two devices, or of files that stand in for them; the second one is smaller."""
    if request.param == "device":
        named = [os.environ.get(variable) for variable in VARIABLES]
        if not all(named):
            pytest.skip(f"{' and '.join(VARIABLES)} do not name two DAX devices that these tests may overwrite")
        return str(named[0]), str(named[1])
    for name, size in (("first", 96 * MIB), ("second", 48 * MIB)):
        with (tmp_path / name).open("wb") as file:
            file.truncate(size)
        (tmp_path / name).chmod(0o600)
    return str(tmp_path / "first"), str(tmp_path / "second")


class Servers:
    """Starts servers on devices; all have the same settings unless said otherwise."""

    def __init__(self, start: ServerFactory, folder: Path, places: tuple[str, str]) -> None:
        self._start = start
        self.folder = folder
        self.places = places

    def start(
        self, name: str = "runtime", *, path: str | None = None, size: str = "48M", **more: object
    ) -> RunningServer:
        folder = self.folder / name
        folder.mkdir(mode=0o700, exist_ok=True)
        settings = {
            "storage_backend": "cxl",
            "cxl_pool_path": path or self.places[0],
            "pool_size": size,
            "chunk_size": 4096,
            "visibility": "host",
        }
        return self._start(folder, **settings | more)


@pytest.fixture
def servers(maru_server: ServerFactory, maru_runtime_dir: Path, places: tuple[str, str]) -> Servers:
    return Servers(maru_server, maru_runtime_dir, places)


@contextmanager
def handler_of(server: RunningServer) -> Iterator[MaruHandler]:
    config = MaruConfig(server_url=server.url, request_timeout=20.0, connect_timeout=30.0)
    host = PluginHost.with_plugins({}, built_ins=True)
    with MaruHandler.connect(config, Namespace.of({"model": "m"}), host=host) as handler:
        yield handler


def store(handler: MaruHandler, name: str, count: int = COUNT) -> None:
    for number in range(count):
        key = f"{name}-{number}"
        assert handler.store(key, stamped(key, size_of(number))) is StoreResult.STORED, key


def found(handler: MaruHandler, name: str, count: int = COUNT) -> int:
    """How many of a set are there; every one must be byte-exact."""
    there = 0
    for number in range(count):
        key = f"{name}-{number}"
        object_ = handler.retrieve(key)
        if object_ is not None:
            with object_:
                assert difference(object_.view, key, size_of(number)) is None
                assert object_.verify()
            there += 1
    return there


def is_back(handler: MaruHandler) -> bool:
    try:
        handler.exists("anything")
    except Unavailable:
        return False
    return True


def pools_of(handler: MaruHandler) -> list[dict[str, Any]]:
    pools: list[dict[str, Any]] = handler.stats()["pools"]
    return pools


@pytest.mark.slow
def test_a_killed_server_is_followed_by_one_with_the_same_objects(servers: Servers) -> None:
    first = servers.start()
    with handler_of(first) as handler:
        store(handler, "kept")
        first.kill()
        second = servers.start()
        # The handler comes back by itself, and new ones find what it stored.
        eventually(lambda: is_back(handler))
        store(handler, "later")
        assert found(handler, "kept") == COUNT
    with handler_of(second) as handler:
        assert (found(handler, "kept"), found(handler, "later")) == (COUNT, COUNT)
        assert handler.stats()["counters"]["stored"] == COUNT, "counted by the second server only"


@pytest.mark.slow
def test_another_size_is_a_cold_start(servers: Servers) -> None:
    first = servers.start()
    with handler_of(first) as handler:
        store(handler, "lost")
    first.kill()
    with handler_of(servers.start(size="32M")) as handler:
        assert found(handler, "lost") == 0
        store(handler, "new")
        assert found(handler, "new") == COUNT
        (pool,) = pools_of(handler)
        assert 31 * MIB < pool["capacity"] < 32 * MIB


@pytest.mark.slow
def test_a_second_owner_is_refused_with_the_identity_of_the_first(servers: Servers) -> None:
    first = servers.start()
    with handler_of(first) as handler:
        store(handler, "kept")
        with pytest.raises(RuntimeError) as refused:
            servers.start("second")
        assert f"{servers.places[0]} is in use by process {first.pid} on host {socket.gethostname()!r}" in str(
            refused.value
        )
        assert found(handler, "kept") == COUNT
    first.stop()
    with handler_of(servers.start("second")) as handler:
        assert found(handler, "kept") == 0, "who stops gives the device away"


@pytest.mark.slow
def test_what_a_killed_server_left_another_one_gets_only_once_nobody_maps_it(servers: Servers) -> None:
    first = servers.start()
    with handler_of(first) as handler:
        store(handler, "kept")
        reading = handler.retrieve(f"kept-{COUNT - 1}")
        assert reading is not None
        with reading:
            first.kill()
            with pytest.raises(RuntimeError, match="engines still map the pool"):
                servers.start("second")
            name, size = f"kept-{COUNT - 1}", size_of(COUNT - 1)
            assert difference(reading.view, name, size) is None
    with handler_of(servers.start("second")) as handler:
        assert found(handler, "kept") == 0


@pytest.mark.slow
def test_two_devices_are_one_set_of_pools(servers: Servers) -> None:
    path = ",".join(reversed(servers.places))
    server = servers.start(path=path, size="")
    with handler_of(server) as handler:
        smaller, _ = pools_of(handler)
        # More than the first has, which is full before the other is begun.
        sets = smaller["capacity"] // sum(size_of(number) for number in range(COUNT)) + 1
        for number in range(sets):
            store(handler, f"set-{number}")
        pools = pools_of(handler)
        assert ",".join(pool["location"] for pool in pools) == path
        assert all(pool["objects"] > 0 for pool in pools)
        assert sum(pool["objects"] for pool in pools) == sets * COUNT
        server.kill()
        servers.start(path=path, size="")
        eventually(lambda: is_back(handler))
        assert sum(found(handler, f"set-{number}") for number in range(sets)) == sets * COUNT


@pytest.mark.slow
def test_memory_and_a_device_together(servers: Servers) -> None:
    """Objects go into memory first, and to the device when that is full; both are found, also after a crash."""
    settings = {"storage_backend": "mixed", "write_order": "cpu,cxl", "cpu_pool_size": "16M", "demote": False}
    server = servers.start(**settings)
    with handler_of(server) as handler:
        sets = 3
        for number in range(sets):
            store(handler, f"set-{number}")
        pools = pools_of(handler)
        assert [pool["backend"] for pool in pools] == ["cpu", "cxl"]
        assert pools[1]["location"] == servers.places[0]
        assert all(pool["objects"] > 0 for pool in pools)
        server.kill()
        servers.start(**settings)
        eventually(lambda: is_back(handler))
        assert sum(found(handler, f"set-{number}") for number in range(sets)) == sets * COUNT


@pytest.mark.slow
def test_the_doctor_tells_who_has_a_device(servers: Servers) -> None:
    command = [sys.executable, "-m", "maru_core.cli", "doctor", "--json", "--runtime-dir", str(servers.folder)]
    # Without the variables of the tests, which it would warn of.
    own = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    environ = own | {"MARU_STORAGE_BACKEND": "cxl", "MARU_CXL_POOL_PATH": ",".join(servers.places)}

    def lines() -> dict[str, str]:
        told = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
        found = [one for one in json.loads(told.stdout) if one["subject"] in servers.places]
        return {place: " ".join(one["text"] for one in found if one["subject"] == place) for place in servers.places}

    server = servers.start()
    first, second = lines().values()
    assert f"in use by process {server.pid}" in first
    assert "in use" not in second
    if servers.places[0].startswith("/dev/dax"):
        size = Path("/sys/bus/dax/devices", Path(servers.places[0]).name, "size").read_text().strip()
        assert f"({size} bytes), align 2.0 MiB, mode devdax" in first


@pytest.mark.parametrize("places", [pytest.param("device", marks=pytest.mark.device)], indirect=True)
def test_without_a_size_a_pool_is_the_whole_device(servers: Servers, places: tuple[str, str]) -> None:
    device = Path("/sys/bus/dax/devices", Path(places[0]).name)
    with handler_of(servers.start(size="")) as handler:
        (pool,) = pools_of(handler)
        capacity = int((device / "size").read_text())
        assert 0.95 * capacity < pool["capacity"] < capacity
