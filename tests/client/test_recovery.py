"""Servers that are killed, stopped, silent or of another version, and what a handler makes of it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from maru_core.client import MaruHandler, StoreResult
from maru_core.config import MaruConfig
from maru_core.errors import ConfigError, MaruError, StaleEpoch, Unavailable, VersionMismatch
from maru_core.fakes import FakeBackend
from maru_core.host import PluginHost
from maru_core.plugin import hookimpl
from maru_core.protocol import PROTOCOL_VERSION, Code, CommitStatus, Op, Presence, ReserveStatus
from tests.client.real import NAMESPACE, Folder
from tests.waiting import NEVER, eventually

pytestmark = pytest.mark.slow

#: Of a call, in seconds.
DEADLINE = 2.0


def used(handler: MaruHandler) -> tuple[int, int, int, int]:
    pool = handler.stats()["pools"][0]
    assert pool["used"] + pool["free"] + pool["reserved"] + pool["quarantined"] == pool["capacity"]
    return pool["used"], pool["reserved"], pool["leased"], pool["quarantined"]


def is_stored(handler: MaruHandler, key: str, data: bytes) -> bool:
    """Whether the server was there; a call that fails does so within its deadline."""
    begin = time.monotonic()
    try:
        assert handler.store(key, data) is StoreResult.STORED
    except Unavailable:
        assert time.monotonic() - begin < 2 * DEADLINE, "a call outlasted its deadline"
        return False
    return True


def test_a_killed_server_is_started_again_and_the_same_handler_works(folder: Folder) -> None:
    handler = folder.connect(request_timeout=DEADLINE)
    assert handler.store("a", b"old") is StoreResult.STORED
    held = handler.retrieve("a")
    assert held is not None
    assert held.verify()
    for round_ in range(2):
        epoch = handler.epoch
        os.kill(folder.pid(), signal.SIGKILL)
        eventually(lambda name=f"b{round_}": is_stored(handler, name, b"new"))
        assert handler.epoch != epoch
        assert len(handler._link.guard._open) == 1, "the lock file of the lost session was let go"
        again = handler.retrieve(f"b{round_}")
        assert again is not None
        assert bytes(again.view) == b"new"
        again.close()
    again = handler.retrieve("a")
    assert again is not None, "what was stored before is there"
    assert bytes(again.view) == b"old"
    assert bytes(held.view) == b"old"
    assert held.verify(), "it was held all the time"
    again.close()
    assert used(handler)[2] > 0
    held.close()
    assert len(folder.pids()) == 1
    eventually(lambda: used(handler)[1:] == (0, 0, 0))


def test_a_server_that_is_stopped_is_told_from_one_that_is_gone(folder: Folder) -> None:
    """Each with its remedy: nobody is to start a second server beside one that is there."""
    folder.connect().close()
    handler = folder.connect(server_url=f"ipc://{folder.path}/server.sock")

    def reason() -> str:
        try:
            handler.probe([bytes(32)])
        except Unavailable as error:
            return str(error)
        return ""

    os.kill(folder.pid(), signal.SIGSTOP)
    eventually(lambda: "listens but does not answer" in reason())
    os.kill(folder.pid(), signal.SIGKILL)
    eventually(lambda: "start one with `maru serve`" in reason())


def test_calls_in_flight_when_the_server_dies_end_early(folder: Folder) -> None:
    folder.connect().close()
    # Without `auto`, nobody starts another server that could answer.
    handler = folder.connect(request_timeout=30, server_url=f"ipc://{folder.path}/server.sock")
    os.kill(folder.pid(), signal.SIGSTOP)
    took: list[float] = []

    def call() -> None:
        start = time.monotonic()
        with pytest.raises(Unavailable):
            handler.probe([bytes(32)])
        took.append(time.monotonic() - start)

    thread = threading.Thread(target=call)
    thread.start()
    time.sleep(0.05)
    os.kill(folder.pid(), signal.SIGKILL)
    thread.join(NEVER)
    assert took[0] < 15


def test_a_stopped_server_loses_nothing_and_doubles_nothing(folder: Folder) -> None:
    handler = folder.connect(request_timeout=0.3)
    keys = [bytes([index]) * 32 for index in range(1, 9)]
    grants = handler.reserve(keys[:4], 100)
    held = handler.reserve(keys[6:], 100)
    for index in grants.new:
        handler.view(grants.epoch, grants.entries[index], 100)[:] = keys[index][:1] * 100
    handler.commit(grants)
    lease = handler.acquire(keys[:2], leading=True)
    server = folder.pid()
    os.kill(server, signal.SIGSTOP)
    try:
        with pytest.raises(Unavailable):
            handler.reserve(keys[4:6], 100)
        start = time.monotonic()
        for call in (
            lambda: handler.reserve(keys[4:6], 100, timeout=30),
            lambda: handler.acquire(keys, leading=True, timeout=30),
        ):
            with pytest.raises(Unavailable):
                call()
        assert time.monotonic() - start < 15, "known to be away: not even one deadline is waited for"
        handler.release(lease)
        time.sleep(1.5)
    finally:
        os.kill(server, signal.SIGCONT)
    eventually(lambda: handler.is_up)
    assert folder.pids() == [server], "a stopped server is not replaced"
    assert handler.epoch == grants.epoch
    # The late reservation was cancelled: a retry gets the pages, once.
    again = handler.reserve(keys[4:6], 100)
    assert again.statuses == bytes([ReserveStatus.NEW] * 2)
    assert handler.commit(again) == bytes([CommitStatus.OK] * 2)
    # What was held before is still held and can still be committed.
    assert handler.commit(held) == bytes([CommitStatus.OK] * 2)
    assert handler.probe(keys) == bytes([Presence.READY] * 8)
    eventually(lambda: used(handler) == (8 * 4096, 0, 0, 0))


def test_a_commit_that_timed_out_is_resolved(folder: Folder) -> None:
    handler = folder.connect(request_timeout=0.3)
    grants = handler.reserve([b"k" * 32], 100)
    server = folder.pid()
    os.kill(server, signal.SIGSTOP)
    try:
        with pytest.raises(Unavailable):
            handler.commit(grants)
    finally:
        os.kill(server, signal.SIGCONT)
    eventually(lambda: handler.is_up)
    eventually(lambda: used(handler)[1] == 0)
    # Either outcome is right as long as it is one of the two and nothing is left in between.
    again = handler.reserve([b"k" * 32], 100)
    assert again.statuses[0] in (ReserveStatus.NEW, ReserveStatus.PRESENT)


def test_threads_recover_from_a_kill_without_mixing_epochs(folder: Folder) -> None:
    handler = folder.connect(request_timeout=0.5)
    stop = threading.Event()
    failures: list[str] = []
    stored = [0] * 3

    def work(number: int) -> None:
        round_ = 0
        while not stop.is_set():
            round_ += 1
            data = bytes([number + 1, round_ % 256]) * 500
            try:
                if handler.store(f"{number}/{round_}", data) is StoreResult.STORED:
                    stored[number] += 1
                with handler.retrieve(f"{number}/{round_}") or closing() as found:
                    if found is not None and bytes(found.view) != data and found.verify():
                        failures.append(f"wrong bytes for {number}/{round_}")
            except Unavailable:
                time.sleep(0.01)
            except BaseException as error:  # noqa: BLE001 - handed to the test's own thread
                failures.append(f"{type(error).__name__}: {error}")
                return

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(2):
        time.sleep(0.3)
        os.kill(folder.pid(), signal.SIGKILL)
        eventually(lambda: not handler.is_up)
        eventually(lambda: handler.is_up)
    before = list(stored)
    time.sleep(0.3)
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures
    assert all(now > then for now, then in zip(stored, before, strict=True))
    eventually(lambda: used(handler)[1:] == (0, 0, 0))


class closing:
    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


def test_another_protocol_version_is_refused_with_both_named(serve: Any, connect: Any) -> None:
    server = serve()

    def old(request: list[Any], reply: list[Any]) -> list[Any]:
        if request[0] != Op.HELLO:
            return reply
        return [request[1], 7, int(Code.VERSION), f"this server speaks protocol 99, the client {request[4]}"]

    server.spoil = old
    start = time.monotonic()
    with pytest.raises(VersionMismatch, match=rf"99.*{PROTOCOL_VERSION}"):
        connect()
    assert time.monotonic() - start < 8, "the server is waited for ten"


def test_a_real_server_refuses_another_version(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.connect()
    monkeypatch.setattr("maru_core.client.session.PROTOCOL_VERSION", 99)
    with pytest.raises(VersionMismatch, match=rf"(?s){PROTOCOL_VERSION}.*99|99.*{PROTOCOL_VERSION}"):
        folder.connect()


def test_an_absent_server_is_found_when_it_comes(serve: Any, connect: Any) -> None:
    start = time.monotonic()
    handler = connect(connect_timeout=0.2)
    assert time.monotonic() - start < 8, "unless told otherwise it is ten"
    assert not handler.is_up
    with pytest.raises(Unavailable, match="maru serve"):
        handler.store("a", b"b")
    serve()
    eventually(lambda: handler.is_up)
    assert handler.store("a", b"b") is StoreResult.STORED


def test_garbage_instead_of_replies_is_an_error_not_a_hang(serve: Any, connect: Any) -> None:
    server = serve()
    handler = connect()
    for junk in ([], [1], ["a", "b", "c"], [1, 2]):
        server.spoil = lambda request, reply, junk=junk: junk if request[0] == Op.PROBE else reply
        with pytest.raises(MaruError, match="a reply"):
            handler.probe([bytes(32)])
    server.spoil = lambda request, reply: reply
    eventually(lambda: handler.is_up)
    assert handler.probe([bytes(32)]) == b"\0"


def test_what_was_reserved_before_a_restart_is_stored_after_it(folder: Folder) -> None:
    handler = folder.connect()
    grants = handler.reserve([b"k" * 32, b"l" * 32], 100)
    given_up = handler.reserve([b"m" * 32], 100)
    late = handler.view(grants.epoch, grants.entries[0], 100)
    os.kill(folder.pid(), signal.SIGKILL)
    handler.abort(given_up)
    eventually(lambda: handler.is_up and handler.epoch != grants.epoch)
    assert used(handler)[1] == 2 * 4096, "the page that was given back while nobody was there is free"
    assert handler.store("x", bytes(100)) is StoreResult.STORED
    late[:] = b"!" * 100
    with handler.retrieve("x") or closing() as found:
        assert found is not None
        assert bytes(found.view) == bytes(100)
    assert handler.commit(grants, [0]) == bytes([CommitStatus.OK])
    handler.abort(grants, [1])
    eventually(lambda: used(handler) == (2 * 4096, 0, 0, 0))
    assert handler.probe([b"k" * 32, b"l" * 32, b"m" * 32]) == bytes([Presence.READY, Presence.ABSENT, Presence.ABSENT])


def test_more_than_one_message_lists_is_resumed(folder: Folder) -> None:
    """More pages than the keys of one request; the next server is told in several parts."""
    handler = folder.connect(pool_size="1200M", eager_map=False, request_timeout=20, lease_share=1)
    keys = [number.to_bytes(32, "big") for number in range(1, 120_001)]
    handler.commit(handler.reserve(keys, 100))
    lease = handler.acquire(keys, leading=True)
    grants = handler.reserve([number.to_bytes(32, "big") for number in range(200_001, 320_001)], 100)
    assert (len(grants.new), lease.leading) == (120_000, 120_000)
    os.kill(folder.pid(), signal.SIGKILL)
    eventually(lambda: handler.is_up and handler.epoch != grants.epoch)
    assert used(handler) == (120_000 * 4096, 120_000 * 4096, 120_000 * 4096, 0)
    assert handler.commit(grants) == bytes(120_000)
    handler.release(lease)
    eventually(lambda: used(handler)[1:] == (0, 0, 0))
    assert handler.stats()["server"]["longest_turn_s"] < 0.05


@pytest.mark.parametrize("leading", [False, True])
def test_a_lease_over_several_messages_is_resumed(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, leading: bool
) -> None:
    monkeypatch.setattr("maru_core.client.keycalls.MAX_KEYS", 2)
    handler = folder.connect()
    keys = [bytes([index]) * 32 for index in range(1, 6)]
    grants = handler.reserve([keys[0], keys[4]], 100)
    handler.commit(grants)
    lease = handler.acquire(keys, leading=leading)
    assert len(lease.ids) == (1 if leading else 2)
    os.kill(folder.pid(), signal.SIGKILL)
    eventually(lambda: handler.is_up and handler.epoch != grants.epoch)
    assert used(handler)[2] == len(lease.ids) * 4096
    handler.release(lease)
    eventually(lambda: used(handler)[2] == 0)


def test_a_session_file_that_was_removed_is_made_anew(folder: Folder) -> None:
    """Cleaners of temporary folders do that. The session goes on, and its end is proven again."""
    code = """
h = connect(server_url=f'ipc://{sys.argv[1]}/server.sock')
g = h.reserve([b'k' * 32], 100)
print('=', flush=True)
while h._link.session.epoch == g.epoch or not h.is_up:
    time.sleep(0.01)
print('=', h.commit(g) == bytes(1), len(h._link.guard._open), flush=True)
h.reserve([b'l' * 32], 100)
print('=', flush=True)
time.sleep(60)
"""
    observer = folder.connect()
    process = folder.run(code, str(folder.path))
    assert process.stdout is not None
    # Its log goes there, too.
    told = (line for line in process.stdout if line.startswith("="))
    assert next(told)
    mine = f"{observer._link.up().id:016x}.lock"
    os.kill(folder.pid(), signal.SIGSTOP)
    for path in (folder.path / "sessions").iterdir():
        if path.name != mine:
            path.unlink()
    os.kill(folder.pid(), signal.SIGKILL)
    assert next(told) == "= True 1\n"
    assert next(told)
    assert len(list((folder.path / "sessions").iterdir())) == 2
    eventually(lambda: observer.is_up)
    time.sleep(1.2)
    assert used(observer)[1] == 4096, "its lock is held all the time"
    process.kill()
    process.wait()
    eventually(lambda: used(observer)[1] == 0)
    assert observer.probe([b"k" * 32]) == bytes([Presence.READY])


def test_calls_find_no_server_when_none_can_be_started_again(folder: Folder) -> None:
    handler = folder.connect()
    assert handler.store("a", b"b") is StoreResult.STORED
    pools = folder.path / "pools"
    server = folder.pid()
    os.kill(server, signal.SIGSTOP)
    shutil.rmtree(pools)
    pools.touch()
    os.kill(server, signal.SIGKILL)
    eventually(lambda: "has ended" in str(handler._link.problem))
    with pytest.raises(Unavailable, match="has ended") as raised:
        handler.exists("a")
    assert "Traceback" not in str(raised.value)
    assert "\n" not in str(raised.value)
    pools.unlink()
    pools.mkdir()
    eventually(lambda: handler.is_up)
    assert not handler.exists("a")


def test_a_folder_of_sessions_that_was_removed_is_made_anew(folder: Folder) -> None:
    folder.connect()
    shutil.rmtree(folder.path / "sessions")
    handler = folder.connect()
    assert handler.store("a", b"b") is StoreResult.STORED
    assert handler._link.up().proof is not None


def test_stale_grants_do_not_reach_a_new_pool(folder: Folder) -> None:
    handler = folder.connect()
    grants = handler.reserve([b"k" * 32], 100)
    late = handler.view(grants.epoch, grants.entries[0], 100)
    # The memory of another boot, as far as the next server can see.
    folder.spoil_pool()
    os.kill(folder.pid(), signal.SIGKILL)
    eventually(lambda: handler.is_up and handler.epoch != grants.epoch)
    assert handler.store("x", bytes(100)) is StoreResult.STORED
    late[:] = b"!" * 100
    with handler.retrieve("x") or closing() as found:
        assert found is not None
        assert bytes(found.view) == bytes(100)
    with pytest.raises(StaleEpoch):
        handler.commit(grants)


def test_a_server_on_tcp_is_used_the_same_way(maru_server: Any) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = maru_server(server_url=f"tcp://127.0.0.1:{port}", pool_size="4M")
    host = PluginHost.with_plugins({}, built_ins=True)
    with MaruHandler.connect(MaruConfig(server_url=server.url), NAMESPACE, host=host) as handler:
        assert handler.store("a", b"over tcp") is StoreResult.STORED
        found = handler.retrieve("a")
        assert found is not None
        assert bytes(found.view) == b"over tcp"
        server.kill()
        eventually(lambda: not handler.is_up)
        with pytest.raises(Unavailable):
            handler.store("b", b"1")


def test_pools_are_populated_and_told_about(serve: Any, backend: FakeBackend, maru_runtime_dir: Path) -> None:
    """Hints learn of sessions and regions; what `eager_map` maps is populated whole, off the link's thread."""
    server = serve()
    told: list[str] = []

    class Hints:
        @hookimpl
        def maru_session_opened(self, name: str, role: str) -> None:
            told.append(f"session {name} {role}")

        @hookimpl
        def maru_region_mapped(self, region: Any) -> None:
            told.append("mapped")
            sizes.append(region.descriptor.size)
            region.populate = lambda offset, length: populated.append((offset, length))

        @hookimpl
        def maru_region_unmapping(self, region: Any) -> None:
            told.append("unmapping")

    sizes: list[int] = []
    populated: list[tuple[int, int]] = []
    host = PluginHost.with_plugins({"fake": backend, "hints": Hints()}, strict=True)
    config = MaruConfig(server_url=server.url)
    with MaruHandler.connect(config, NAMESPACE, host=host, name="n", role="worker") as handler:
        assert told == ["mapped", "session n worker"]
        eventually(lambda: sum(length for _, length in populated) >= sizes[0])
        assert handler.stats()["client"]["url"] == server.url
    assert told[-1] == "unmapping"
    with MaruHandler.connect(config, NAMESPACE, host=host, role="scheduler"):
        assert told[-1] == "session  scheduler", "a scheduler maps nothing"


def test_auto_names_a_server_that_listens_elsewhere(maru_server: Any, maru_runtime_dir: Path) -> None:
    server = maru_server(server_url=f"ipc://{maru_runtime_dir}/other.sock", pool_size="4M")
    host = PluginHost.with_plugins({}, built_ins=True)
    config = MaruConfig(runtime_dir=str(maru_runtime_dir), pool_size="4M", pool_path=str(maru_runtime_dir))
    with pytest.raises(ConfigError, match=r"other\.sock"):
        MaruHandler.connect(config, NAMESPACE, host=host)
    assert server.process.poll() is None
