"""What a peer can take of the server: connections, sessions, memory and time all have bounds."""

from __future__ import annotations

import os
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
from array import array
from contextlib import contextmanager, suppress

import msgpack
import pytest
import zmq

from maru_core.errors import ProtocolError
from maru_core.protocol import MAX_KEYS, PROTOCOL_VERSION, Code, Op, Presence
from maru_core.server import handlers as handlers_module
from maru_core.server import leases as leases_module
from maru_core.server import namespaces as namespaces_module
from maru_core.server.doors import Footprint
from maru_core.server.handlers import Task
from maru_core.server.listening import PortWatch, SocketWatch
from maru_core.server.loop import ServerLoop
from maru_core.server.sessions import (
    MAX_UNATTACHED,
    UNDO_LIMIT,
    UNDO_PAGES,
    AcquireUndo,
    ReserveUndo,
    SessionRegistry,
)
from maru_core.server.steps import SLICE
from tests.server.pure import World
from tests.server.raw import RawClient, Refused, key, keys, u64
from tests.server.test_edge import answer, make_handlers
from tests.waiting import NEVER, eventually

HELLO = [Op.HELLO, 1, 0, 0, PROTOCOL_VERSION, "client", [1, "h", "n"], b"\x90", 0, []]


@contextmanager
def served(context, url="tcp://127.0.0.1:*", chores=(), **options):
    """A loop in a thread of its own: the loop, its handlers and its address."""
    handlers, _ = make_handlers()
    loop = ServerLoop(context, handlers, chores=chores, **options)
    address = loop.bind(url)
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        yield loop, handlers, address
    finally:
        loop.stop()
        thread.join(NEVER)
        loop.close()
        assert not thread.is_alive()


def greet(address: str) -> socket.socket:
    """A connection as ZeroMQ makes it, by hand."""
    host, port = address.removeprefix("tcp://").split(":")
    plain = socket.create_connection((host, int(port)), 10)
    plain.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\0" + bytes(31))
    got = b""
    while len(got) < 64:
        got += plain.recv(64 - len(got))
    ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    plain.sendall(b"\x04" + bytes([len(ready)]) + ready)
    plain.recv(1000)
    return plain


# -- faults --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_nothing_that_a_sweep_a_chore_or_a_turn_raises_ends_the_loop(context):
    called = []

    def chore() -> None:
        called.append(1)
        raise OSError(24, "Too many open files")

    with served(context, chores=[chore, lambda: called.append(2)]) as (_, handlers, address):
        client = RawClient(context, address, 5)
        client.call(Op.PING)
        handlers.__class__.sweep, sweep = (lambda self: 1 / 0), handlers.__class__.sweep
        try:
            called.clear()
            eventually(lambda: called.count(2) >= 2)
            client.call(Op.PING)
        finally:
            handlers.__class__.sweep = sweep
        handlers.__class__.handle, handle = (lambda *_: 1 / 0), handlers.__class__.handle
        try:
            client.send(Op.PING)
            before = handlers.directory.counters["internal_errors"]
            eventually(lambda: handlers.directory.counters["internal_errors"] > before)
        finally:
            handlers.__class__.handle = handle
        client.call(Op.PING)
        client.close()
    assert handlers.directory.counters["internal_errors"] >= 4


@pytest.mark.slow
def test_a_closed_standard_error_does_not_end_a_server(runtime_dir):
    """`maru serve 2>&1 | head -1`, and then something to log."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.server.fakes", str(runtime_dir)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "MARU_PLUGINS": "none"},
    )
    own = zmq.Context()
    try:
        url = process.stdout.readline().decode().strip()
        process.stderr.close()
        client = RawClient(own, url).hello()
        os.close(client.lock)
        client.lock, client.session = None, 0
        eventually(lambda: client.call(Op.STATS)[0]["counters"]["expired_sessions"] == 1)
        client.call(Op.PING)
        client.close()
    finally:
        own.destroy(0)
        process.kill()
        process.stdout.close()
        process.wait()


# -- messages of several frames ------------------------------------------------------------------------------------


def test_frames_of_one_message_are_dropped_a_turn_at_a_time(context):
    with served(context) as (_, handlers, address):
        good, rude = RawClient(context, address, 20), RawClient(context, address)
        good.call(Op.PING)
        turns = []
        settle = handlers.__class__.settle
        handlers.__class__.settle = lambda self: turns.append(1) or settle(self)
        try:
            for count in (2, 1000, 1001, 1002, 50_000):
                turns.clear()
                rude.socket.send_multipart([b""] * count)
                rude.call(Op.PING)
                good.call(Op.PING)
                assert len(turns) >= count // 1000
        finally:
            handlers.__class__.settle = settle
        assert handlers.directory.counters["bad_requests"] == 5
        good.close()
        rude.close()


@pytest.mark.slow
def test_half_a_message_that_grows_for_ever_is_cut_off(context):
    """ZeroMQ gathers it where nobody sees it: only the memory of the process tells."""
    grown = [0]
    chores = []
    with served(context, chores=chores) as (loop, _, address):
        chores += [Footprint(1000, loop.hang_up, lambda: grown[0]), PortWatch(loop, address)]
        good = RawClient(context, address, 20).hello(proof=False)
        rude = greet(address)
        rude.sendall(b"\x03" + struct.pack(">Q", 1 << 20) + bytes(1 << 20))
        rude.settimeout(10)
        time.sleep(0.7)
        good.call(Op.PING)
        grown[0] = 1001
        with suppress(ConnectionError):
            assert rude.recv(1) == b""
        grown[0] = 600
        rude.close()
        # Who is honest comes back, with the same session.
        eventually(lambda: loop.listens)
        good.socket.setsockopt(zmq.RCVTIMEO, 1000)
        eventually(lambda: revived(good))
        assert good.probe(keys(0, 1)) == b"\0"
        good.close()


@pytest.mark.slow
def test_the_private_socket_is_made_again_after_hanging_up(context, runtime_dir):
    chores = []
    url = f"ipc://{runtime_dir}/server.sock"
    with served(context, url, chores) as (loop, _, address):
        chores.append(SocketWatch(loop, url, address, f"{runtime_dir}/server.sock"))
        client = RawClient(context, address)
        client.call(Op.PING)
        loop.hang_up()
        eventually(lambda: not loop.listens)
        eventually(lambda: revived(client))
        client.close()


def revived(client: RawClient) -> bool:
    client.timeout = 0.5
    try:
        client.call(Op.PING)
    except TimeoutError:
        return False
    return True


def test_memory_that_hanging_up_does_not_free_is_the_servers_own():
    used, calls = [100], []
    watch = Footprint(1000, lambda: calls.append(used[0]), lambda: used[0])
    for amount, expected in ((1100, 0), (1101, 1), (1101, 1), (1601, 1), (1602, 2), (200, 2), (1100, 2), (1603, 3)):
        used[0] = amount
        watch()
        assert len(calls) == expected, amount


def is_closed(connection: socket.socket) -> bool:
    """Whether the other side has ended it; reads whatever there is to read."""
    try:
        while connection.recv(64):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return True


# -- connections and sessions --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_connections_over_the_limit_are_hung_up_on(context):
    with served(context, connections=20) as (_, handlers, address):
        good = RawClient(context, address, 10)
        good.call(Op.PING)
        host, port = address.removeprefix("tcp://").split(":")
        held = [socket.create_connection((host, int(port)), 5) for _ in range(60)]
        eventually(lambda: handlers.directory.counters["connections_refused"] == 41)
        for one in held:
            one.setblocking(False)
        # Before those that are left have been silent for too long.
        eventually(lambda: sum(not is_closed(one) for one in held) == 19)
        good.call(Op.PING)
        for one in held:
            one.close()
        late = RawClient(context, address, 10)
        late.call(Op.PING)
        good.close()
        late.close()


@pytest.mark.slow
def test_a_connection_that_does_not_greet_is_closed(context):
    with served(context) as (_, _, address):
        host, port = address.removeprefix("tcp://").split(":")
        started = time.monotonic()
        with socket.create_connection((host, int(port)), 10) as plain, suppress(ConnectionError):
            while plain.recv(100):
                pass
        assert 1 < time.monotonic() - started < 8


@pytest.mark.slow
def test_a_server_with_few_descriptors_outlives_those_who_want_them_all(runtime_dir, context):
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.server.fakes", str(runtime_dir)],
        stdout=subprocess.PIPE,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300)),
        stderr=subprocess.DEVNULL,
        env={**os.environ, "MARU_PLUGINS": "none"},
    )
    held = []
    try:
        url = process.stdout.readline().decode().strip()
        client = RawClient(context, url)
        client.call(Op.PING)
        for _ in range(400):
            one = socket.socket(socket.AF_UNIX)
            one.setblocking(False)
            held.append(one)
            with suppress(BlockingIOError):
                one.connect(url.removeprefix("ipc://"))
        refused = ""
        for _ in range(200):
            client.epoch = client.session = 0
            try:
                client.hello(attach=False)
            except Refused as error:
                refused = error.text
                break
        assert "sessions are open" in refused
        client.epoch = client.session = 0
        client.call(Op.PING)
        eventually(lambda: client.stats()["counters"]["connections_refused"] > 0)
        assert process.poll() is None
        client.close()
    finally:
        for one in held:
            one.close()
        process.kill()
        process.stdout.close()
        process.wait()


def registry() -> tuple[SessionRegistry, object]:
    world = World.of(8)
    return world.sessions, world.directory.namespaces.open(b"n")


def test_sessions_that_do_not_attach_are_limited():
    sessions, namespace = registry()
    opened = []
    for _ in range(MAX_UNATTACHED):
        sessions.check_room("")
        opened.append(sessions.open(namespace, "r", "n", 0.0))
    with pytest.raises(ProtocolError, match=f"{MAX_UNATTACHED} sessions have not attached yet"):
        sessions.check_room("")
    opened[0].attached = True
    sessions.check_room("")
    sessions.open(namespace, "r", "n", 0.0)
    with pytest.raises(ProtocolError):
        sessions.check_room("")
    sessions.close(opened[1])
    sessions.check_room("")


def test_one_key_has_a_quarter_of_the_sessions():
    sessions, namespace = registry()
    for _ in range(MAX_UNATTACHED // 4):
        sessions.check_room("red")
        sessions.open(namespace, "r", "n", 0.0).owner = "red"
    with pytest.raises(ProtocolError, match="not attached"):
        sessions.check_room("red")
    sessions.check_room("blue")
    sessions.most = 1000
    for session in sessions:
        session.attached = True
    with pytest.raises(ProtocolError, match="250 sessions are open"):
        sessions.check_room("red")
    sessions.check_room("blue")
    sessions.most = 250
    with pytest.raises(ProtocolError, match="sessions are open"):
        sessions.check_room("blue")


def test_hello_over_the_limit_is_refused_with_a_reason(monkeypatch):
    handlers, _ = make_handlers()
    handlers.sessions.most = 3
    assert [answer(handlers, HELLO)[2] for _ in range(3)] == [Code.OK, Code.OK, Code.BAD_REQUEST]
    assert "3 sessions are open" in answer(handlers, HELLO)[3]


# -- time ----------------------------------------------------------------------------------------------------------


def test_a_long_cancel_is_sliced():
    handlers, session = make_handlers()
    ids = u64(*range(1000, 1000 + MAX_KEYS))
    outcome = handlers.handle(msgpack.packb([Op.CANCEL, 9, 7, session, ids]))
    turns = 1
    while isinstance(outcome, Task):
        turns += 1
        outcome = outcome.reply if outcome.advance() else outcome
    assert msgpack.unpackb(outcome) == [9, 7, Code.OK]
    assert turns > MAX_KEYS // SLICE
    assert len(handlers.sessions.get(session).cancelled) == UNDO_LIMIT
    assert answer(handlers, [Op.PROBE, 999 + MAX_KEYS, 7, session, 0, b""])[2] == Code.CANCELLED


# -- memory --------------------------------------------------------------------------------------------------------


def test_leases_of_one_object_over_and_over_are_limited(monkeypatch):
    monkeypatch.setattr(leases_module, "_LEASE_ITEMS", 1000)
    world = World.of(64)
    session = world.session()
    world.store(session, [key(1)])
    taken = []
    for lease in range(1, 400):
        got = world.directory.acquire(session, lease, (key(1),) * 40, False)
        world.directory.settle()
        if set(got[0]) != {Presence.READY}:
            break
        taken.append(lease)
    assert set(got[0]) == {Presence.BUSY}
    assert [len(column) for column in got] == [40] * 4
    assert len(taken) == 1000 // (40 + leases_module.LEASE_COST)
    assert session.lease_items == len(taken) * (40 + leases_module.LEASE_COST)
    for lease in taken[1:]:
        assert world.directory.release(session, lease, 1000) == (True, True)
    assert world.directory.acquire(session, 500, (key(1),), False)[0] == bytes([Presence.READY])
    world.directory.settle()
    world.directory.release(session, 500, 1)
    world.directory.release(session, taken[0], 1000)
    assert session.lease_items == 0
    world.check()


def test_records_of_what_can_be_undone_are_few_and_the_newest():
    session = World.of(8).session()
    for number in range(3000):
        session.remember(number, AcquireUndo(number))
    assert list(session.undo) == list(range(3000 - UNDO_LIMIT, 3000))
    big = array("I", bytes(4 * 30_000))
    for number in range(10):
        session.remember(number, ReserveUndo(big, big))
    assert [number for number, undo in session.undo.items() if isinstance(undo, ReserveUndo)] == [8, 9]
    assert session.undo_pages == 60_000 <= UNDO_PAGES
    assert session.recall(9).entries is big
    assert session.recall(9) is None
    assert session.undo_pages == 30_000
    huge = array("I", bytes(4 * MAX_KEYS))
    session.remember(11, ReserveUndo(huge, huge))
    assert session.recall(11).entries is huge, "the newest can be undone however large it is"


def test_what_is_reserved_can_be_undone_beyond_the_limit():
    session = World.of(8).session()
    session.reserved.update(range(200_000))
    part = array("I", bytes(4 * 50_000))
    for number in range(8):
        session.remember(number, ReserveUndo(part, part))
    assert session.undo_pages == 400_000


def test_bytes_of_requests_in_progress_are_limited(monkeypatch):
    monkeypatch.setattr(handlers_module, "MAX_SESSION_BYTES", 100_000)
    monkeypatch.setattr(handlers_module, "MAX_BYTES", 150_000)
    handlers, first = make_handlers()
    second = answer(handlers, HELLO)[3]
    assert answer(handlers, [Op.ATTACH, 2, 7, second, True, False])[2] == Code.OK

    def begin(session: int, request: int):
        return handlers.handle(msgpack.packb([Op.PROBE, request, 7, session, 0, keys(0, 2000)]))

    one = begin(first, 11)
    assert isinstance(one, Task)
    refused = msgpack.unpackb(begin(first, 12))
    assert refused[2] == Code.BAD_REQUEST
    assert "of this session are in progress" in refused[3]
    two = begin(second, 13)
    assert isinstance(two, Task)
    third = answer(handlers, HELLO)[3]
    assert "requests are in progress" in msgpack.unpackb(begin(third, 14))[3]
    assert answer(handlers, [Op.PROBE, 15, 7, first, 0, keys(0, 64)])[2] == Code.OK
    for task in (one, two):
        while not task.advance():
            pass
        assert msgpack.unpackb(task.reply)[2] == Code.OK
    assert handlers.running_bytes == 0
    assert handlers.sessions.get(first).running_bytes == 0
    assert isinstance(begin(third, 16), Task)


def test_one_key_has_so_many_namespaces(monkeypatch):
    monkeypatch.setattr(namespaces_module, "MAX_OF_KEY", 3)
    world = World.of(8)
    known = world.directory.namespaces
    states = [known.open(bytes([number]), "red") for number in range(3)]
    for state in states:
        state.weights_epoch = 1
    assert known.open(b"\0", "red") is states[0]
    with pytest.raises(ProtocolError, match="3 namespaces of this client's key"):
        known.open(b"new", "red")
    assert known.open(b"other", "blue").opener == "blue"
    assert known.open(b"other", "red"), "what somebody else opened costs nothing"
    assert known.open(b"new", "")
    states[1].weights_epoch = 0
    newer = known.open(b"newer", "red")
    assert newer.opener == "red"
    newer.weights_epoch = 1
    assert states[1] not in list(known)
    with pytest.raises(ProtocolError):
        known.open(b"newest", "red")
