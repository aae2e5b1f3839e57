"""Real servers whose pools are where those of the next server will be, and clients that must not be in the way."""

from __future__ import annotations

import gc
import os
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from maru_backends.cxl import CxlBackend
from maru_backends.ownership import read_record
from maru_core.client import MaruHandler, StoreResult
from maru_core.client.peek import Peek
from maru_core.config import MaruConfig
from maru_core.contracts import PoolWish
from maru_core.errors import MaruError
from maru_core.host import PluginHost
from maru_core.pool_format import SUPERBLOCK_SIZE
from maru_core.protocol import AdminVerb, Op
from maru_core.runtime_dir import RuntimeDir
from maru_core.server import ServerSettings, run_server
from maru_core.testing import ServerFactory
from maru_core.testing_server import RunningServer
from tests.client.real import NAMESPACE
from tests.server.raw import RawClient
from tests.waiting import NEVER, eventually

Connect = Callable[[RunningServer], MaruHandler]


@pytest.fixture
def connect() -> Iterator[Connect]:
    opened: list[MaruHandler] = []

    def start(server: RunningServer) -> MaruHandler:
        host = PluginHost.with_plugins({}, built_ins=True)
        opened.append(MaruHandler.connect(MaruConfig(server_url=server.url), NAMESPACE, host=host))
        return opened[-1]

    yield start
    for handler in opened:
        handler.close()


@pytest.fixture
def device(tmp_path: Path) -> Path:
    """A file that stands in for a device."""
    path = tmp_path / "device"
    path.touch(0o600)
    os.truncate(path, 64 << 20)
    return path


def settings(device: Path, **changes: object) -> dict[str, object]:
    return {"storage_backend": "cxl", "cxl_pool_path": device, "cxl_pool_size": "32M", **changes}


def maps(device: Path) -> bool:
    return str(device) in Path("/proc/self/maps").read_text()


def stored(handler: MaruHandler, key: str, data: bytes) -> bool:
    try:
        return handler.store(key, data) is StoreResult.STORED
    except MaruError:
        return False


@pytest.mark.slow
def test_a_killed_server_is_taken_over_warm_by_the_next_one(
    maru_server: ServerFactory, connect: Connect, device: Path
) -> None:
    server = maru_server(**settings(device))
    handler = connect(server)
    assert handler.store("a", b"kept") is StoreResult.STORED
    server.kill()
    maru_server(**settings(device))
    eventually(lambda: handler.retrieve("a") is not None if _is_up(handler) else False)
    again = handler.retrieve("a")
    assert again is not None
    assert bytes(again.view) == b"kept"


def _is_up(handler: MaruHandler) -> bool:
    try:
        handler.exists("a")
    except MaruError:
        return False
    return True


@pytest.mark.slow
def test_a_client_that_uses_nothing_lets_go_for_a_server_with_other_pools_and_works_on(
    maru_server: ServerFactory, connect: Connect, device: Path
) -> None:
    server = maru_server(**settings(device))
    handler = connect(server)
    assert handler.store("a", b"old") is StoreResult.STORED
    server.kill()
    assert maps(device)
    maru_server(**settings(device, cxl_pool_size="48M", chunk_size="128K"))
    eventually(lambda: stored(handler, "b", b"new"))
    found = handler.retrieve("b")
    assert found is not None
    assert bytes(found.view) == b"new"
    assert handler.retrieve("a") is None


@pytest.mark.slow
def test_a_client_that_reads_keeps_the_memory_until_it_is_done(
    maru_server: ServerFactory, connect: Connect, device: Path
) -> None:
    server = maru_server(**settings(device))
    handler = connect(server)
    assert handler.store("a", b"read") is StoreResult.STORED
    held = handler.retrieve("a")
    assert held is not None
    server.kill()
    with pytest.raises(RuntimeError, match="engines still map the pool"):
        maru_server(**settings(device, chunk_size="128K"))
    assert bytes(held.view) == b"read"
    session = handler._link.session
    assert session is not None
    assert not session.regions.was_let_go
    assert maps(device)
    del held
    gc.collect()
    eventually(lambda: not maps(device))
    maru_server(**settings(device, chunk_size="128K"))
    eventually(lambda: stored(handler, "b", b"new"))


@pytest.mark.slow
def test_a_second_server_is_refused_with_the_name_of_the_first(
    maru_server: ServerFactory, device: Path, tmp_path: Path
) -> None:
    first = maru_server(**settings(device))
    other = tmp_path / "other"
    other.mkdir(0o700)
    with pytest.raises(RuntimeError, match=rf"in use by process {first.pid} on host"):
        maru_server(other, **settings(device))


@pytest.mark.slow
def test_pools_on_several_devices_are_used_together(maru_server: ServerFactory, connect: Connect, device: Path) -> None:
    second = device.with_name("second")
    second.touch(0o600)
    os.truncate(second, 8 << 20)
    server = maru_server(**settings(device, cxl_pool_path=f"{second},{device}", cxl_pool_size="16M", lease_share=1))
    handler = connect(server)
    assert [(pool["backend"], pool["location"]) for pool in handler.stats()["pools"]] == [
        ("cxl", str(second)),
        ("cxl", str(device)),
    ]
    data = {f"k{number}": os.urandom(1 << 20) for number in range(12)}
    for key, value in data.items():
        assert handler.store(key, value) is StoreResult.STORED
    for key, value in data.items():
        found = handler.retrieve(key)
        assert found is not None
        assert bytes(found.view) == value
        del found
    assert all(pool["used"] for pool in handler.stats()["pools"])


@pytest.mark.slow
def test_as_many_pools_as_clients_can_be_told_of(maru_server: ServerFactory, connect: Connect, device: Path) -> None:
    paths = [device.with_name(f"device-{number}") for number in range(65)]
    for path in paths:
        path.touch(0o600)
        os.truncate(path, 2 << 20)
    with pytest.raises(RuntimeError, match="65 pools are more than the 64"):
        maru_server(**settings(device, cxl_pool_path=",".join(map(str, paths)), cxl_pool_size="130M"))
    handler = connect(maru_server(**settings(device, cxl_pool_path=",".join(map(str, paths)), cxl_pool_size="128M")))
    assert handler.store("a", b"a" * 5000) is StoreResult.STORED
    assert len(handler.server_stats()["pools"]) == 64


class Flushes:
    """A helper for hosts that are not coherent, which this one is."""

    def writeback(self, address: int, length: int) -> None:
        """Nothing."""

    def invalidate(self, address: int, length: int) -> None:
        """Nothing."""


@pytest.mark.slow
@pytest.mark.parametrize("goodbye", [True, False])
def test_hosts_that_have_all_said_goodbye_are_in_nobodys_way(device: Path, tmp_path: Path, goodbye: bool) -> None:
    backend = CxlBackend(flusher=Flushes, settle=0.0, patience=0.1)
    plans = backend.plan_pools(PoolWish("cxl", None, str(device)), lambda name: backend)
    runtime = RuntimeDir.open(tmp_path / "run")
    serving = ServerSettings(tuple(plans), runtime_dir=str(runtime.path), shared_by_hosts=True)

    serving_at: queue.Queue[str] = queue.Queue()
    thread = threading.Thread(target=run_server, args=(serving, lambda name: backend), kwargs={"ready": serving_at.put})
    thread.start()
    try:
        url = serving_at.get(timeout=20)
        with zmq.Context() as context:
            client = RawClient(context, url).hello(proof=False)
            assert client.pools[0].flush
            if goodbye:
                client.call(Op.BYE)
            client.close()
    finally:
        Peek(runtime.url, 5.0).administer(runtime.read_credential(), AdminVerb.STOP)
        thread.join(NEVER)
    record = read_record(device.read_bytes()[:SUPERBLOCK_SIZE])[0]
    assert record is not None
    assert (record.state, record.abroad) == ("released", not goodbye)
