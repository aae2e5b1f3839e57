"""Sessions of real processes: their death, their pause, their last words; cancelling; one server per folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from maru_core.protocol import Op, ReserveStatus
from tests.server.fakes import FileBackend
from tests.server.raw import RawClient, Refused, keys, u64
from tests.waiting import NEVER, eventually

HOLDER = """
import os, sys, zmq
from tests.server.raw import RawClient, keys
context = zmq.Context()
client = RawClient(context, sys.argv[1]).hello()
client.store(keys(0, 4))
client.acquire(keys(0, 2))
client.reserve(keys(10, 4))
if sys.argv[2] == "fork":
    child = os.fork()
    if child == 0:
        os.close(client.lock)
        print("child", os.getpid(), flush=True)
        sys.stdin.readline()
        os._exit(0)
print("ready", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def holder():
    """Start a process that stores 4 keys, leases 2 and reserves 4 more."""
    started = []

    def start(server, how: str = "plain") -> subprocess.Popen[bytes]:
        root = str(Path(__file__).parents[2])
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, server.url, how],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=root,
            env={**os.environ, "PYTHONPATH": root},
        )
        started.append(process)
        while b"ready" not in process.stdout.readline():
            pass
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def held(client) -> tuple[int, int]:
    pool = client.stats()["pools"][0]
    return pool["reserved"], pool["leased"]


@pytest.mark.slow
def test_a_killed_client_leaves_its_data_and_nothing_else(start_server, connect, holder):
    server = start_server()
    client = connect(server).hello()
    process = holder(server)
    assert held(client) == (4 * 4096, 2 * 4096)
    process.kill()
    process.wait()
    took = eventually(lambda: client.stats()["sessions"] == 1 and held(client) == (0, 0))
    assert took < 2.5
    assert client.stats()["counters"]["expired_sessions"] == 1
    assert client.probe(keys(0, 4)) == b"\1" * 4
    assert client.reserve(keys(10, 4))[0] == bytes(4)


@pytest.mark.slow
def test_a_stopped_client_keeps_what_it_holds(start_server, connect, holder):
    server = start_server()
    client = connect(server).hello()
    process = holder(server)
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(2)
    pool = client.stats()["pools"][0]
    assert (pool["reserved"], pool["leased"]) == (4 * 4096, 2 * 4096)
    assert client.reserve(keys(10, 4))[0] == bytes([ReserveStatus.BUSY] * 4)
    os.kill(process.pid, signal.SIGCONT)


@pytest.mark.slow
def test_a_forked_child_does_not_keep_a_dead_session_alive(start_server, connect, holder):
    server = start_server()
    client = connect(server).hello()
    process = holder(server, "fork")
    process.kill()
    eventually(lambda: client.stats()["sessions"] == 1)


@pytest.mark.slow
def test_attach_must_be_true(start_server, connect):
    client = connect(start_server()).hello(attach=False)
    with pytest.raises(Refused, match="ATTACH first"):
        client.reserve(keys(0, 1))
    with pytest.raises(Refused, match="not locked"):
        client.call(Op.ATTACH, True, False)
    client.call(Op.ATTACH, False, False)
    assert client.reserve(keys(0, 1))[0] == b"\0"


@pytest.mark.slow
def test_one_of_two_writers_wins(start_server, connect):
    server = start_server()
    clients = [connect(server).hello() for _ in range(2)]
    requests = [client.send(Op.RESERVE, 0, keys(0, 50), b"", 4096) for client in clients]
    statuses = [client.result(request)[0] for client, request in zip(clients, requests, strict=True)]
    for one, other in zip(*statuses, strict=True):
        assert sorted((one, other)) == [ReserveStatus.NEW, ReserveStatus.BUSY]


@pytest.mark.slow
def test_bye_gives_back_what_was_held(start_server, connect):
    server = start_server()
    client, other = connect(server).hello(), connect(server).hello()
    client.store(keys(0, 4))
    client.acquire(keys(0, 4))
    client.reserve(keys(10, 4))
    client.call(Op.BYE)
    with pytest.raises(Refused, match="unknown or closed"):
        client.probe(keys(0, 1))
    pool = other.stats()["pools"][0]
    assert (pool["reserved"], pool["leased"], pool["objects"]) == (0, 0, 4)
    assert not Path(client.lock_path).exists()


@pytest.mark.slow
def test_a_cancelled_reservation_and_lease_are_undone(start_server, connect):
    client = connect(start_server()).hello()
    client.store(keys(50, 2))
    request = client.send(Op.RESERVE, 0, keys(0, 4), b"", 4096)
    client.result(request)
    lookup = client.send(Op.ACQUIRE, 0, keys(50, 2), True)
    client.result(lookup)
    client.call(Op.CANCEL, u64(request, lookup))
    pool = client.stats()["pools"][0]
    assert (pool["reserved"], pool["leased"]) == (0, 0)
    assert client.probe(keys(0, 4)) == bytes(4)


@pytest.mark.slow
def test_a_request_that_was_cancelled_before_it_came_is_not_executed(start_server, connect):
    client = connect(start_server()).hello()
    client.call(Op.CANCEL, u64(1000))
    with pytest.raises(Refused, match="cancelled before"):
        client.result(client.send(Op.RESERVE, 0, keys(0, 4), b"", 4096, request=1000))
    assert client.probe(keys(0, 4)) == bytes(4)


@pytest.mark.slow
def test_a_commit_is_not_undone(start_server, connect):
    client = connect(start_server()).hello()
    request = client.send(Op.RESERVE, 0, keys(0, 4), b"", 4096)
    _, entries, generations = client.result(request)
    commit = client.send(Op.COMMIT, entries, generations, b"")
    client.result(commit)
    client.call(Op.CANCEL, u64(request, commit))
    assert client.probe(keys(0, 4)) == b"\1" * 4


@pytest.mark.slow
@pytest.mark.parametrize("how", ["cancel", "bye"])
def test_a_long_request_that_is_given_up_leaves_nothing(start_server, connect, how):
    server = start_server("--size", str(100_000 * 300), "--granule", "128")
    client, other = connect(server).hello(), connect(server).hello()
    request = client.send(Op.RESERVE, 0, keys(0, 90_000), b"", 100)
    if how == "cancel":
        client.call(Op.CANCEL, u64(request))
        eventually(lambda: other.stats()["counters"]["cancelled"] == 1)
    else:
        client.send(Op.BYE)
        eventually(lambda: other.stats()["sessions"] == 1)
    eventually(lambda: other.stats()["pools"][0]["reserved"] == 0)
    assert other.stats()["counters"]["aborted"] < 90_000, "the rest of the request was executed for nobody"
    assert other.stats()["pools"][0]["free"] == other.stats()["pools"][0]["capacity"]


@pytest.mark.slow
def test_a_reset_during_a_store(start_server, connect):
    server = start_server()
    writer, other, foreign = connect(server).hello(), connect(server).hello(), connect(server).hello(b"\x91\xc0")
    foreign.store(keys(0, 1))
    writer.store(keys(0, 4))
    _, entries, generations = writer.reserve(keys(4, 4))
    assert other.call(Op.RESET, 0) == [1]
    assert other.call(Op.RESET, 0) == [1]
    assert writer.commit(entries, generations) == b"\1" * 4
    assert writer.probe(keys(0, 8)) == bytes(8)
    assert writer.reserve(keys(0, 1))[0] == bytes([ReserveStatus.REFUSED])
    assert connect(server).hello().weights_epoch == 1
    assert foreign.probe(keys(0, 1)) == b"\1"
    pool = writer.stats()["pools"][0]
    assert (pool["reserved"], pool["objects"]) == (0, 1)


@pytest.mark.slow
def test_a_second_server_is_refused(start_server, runtime_dir):
    start_server()
    root = Path(__file__).parents[2]
    again = subprocess.run(
        [sys.executable, "-m", "tests.server.fakes", str(runtime_dir)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        timeout=30,
    )
    assert again.returncode == 3
    assert b"already runs" in again.stderr


@pytest.mark.slow
def test_a_stopped_server_leaves_only_its_lock_and_credential(start_server, connect, runtime_dir):
    server = start_server()
    connect(server).hello()
    server.process.terminate()
    assert server.process.wait(NEVER) == 0
    assert sorted(path.name for path in runtime_dir.iterdir()) == [
        "admin.token",
        "server.lock",
        "server.log",
        "sessions",
    ]
    assert not list((runtime_dir / "sessions").iterdir())


@pytest.mark.slow
def test_a_killed_server_is_replaced(start_server, connect):
    server = start_server()
    old = connect(server).hello()
    server.process.kill()
    server.process.wait()
    again = start_server()
    assert again.url == server.url
    with pytest.raises(Refused, match="restarted"):
        old.probe(keys(0, 1))


@pytest.mark.slow
def test_an_idle_server_ends(start_server, connect):
    server = start_server("--idle-exit", "1")
    client = connect(server).hello()
    time.sleep(1.6)
    assert server.process.poll() is None
    client.call(Op.BYE)
    assert server.process.wait(NEVER) == 0


@pytest.mark.slow
def test_objects_spread_over_two_pools(start_server, connect):
    server = start_server("--size", "70000", "--size", "70000")
    client = connect(server).hello()
    first, second = client.pools
    assert second.entry_base == first.entry_count
    total = first.entry_count + second.entry_count
    assert client.store(keys(0, total)) == bytes(total)
    assert client.store(keys(total, 1)) == b"\0"
    maps = [FileBackend().map_region(pool) for pool in client.pools]
    for region in maps:
        region.close()


@pytest.mark.slow
def test_run_server_needs_no_main_thread(runtime_dir, context):
    """Embedded in a thread it serves until it is idle, and sets no signal handler."""
    from maru_core.contracts import PoolPlan
    from maru_core.server import ServerSettings, run_server

    urls: list[str] = []
    settings = ServerSettings((PoolPlan("file", 1 << 20, str(runtime_dir)),), 4096, None, str(runtime_dir), 0.5)
    arguments = (settings, lambda name: FileBackend())
    thread = threading.Thread(target=run_server, args=arguments, kwargs={"ready": urls.append})
    before = signal.getsignal(signal.SIGTERM)
    thread.start()
    eventually(lambda: urls)
    client = RawClient(context, urls[0]).hello()
    assert client.store(keys(0, 1)) == b"\0"
    client.call(Op.BYE)
    client.close()
    thread.join(NEVER)
    assert not thread.is_alive()
    assert signal.getsignal(signal.SIGTERM) is before
