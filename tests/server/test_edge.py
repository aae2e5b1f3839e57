"""Whatever arrives, others keep being served."""

from __future__ import annotations

import errno
import os
import random
import socket
import time

import hypothesis.strategies as st
import msgpack
import pytest
import zmq
from hypothesis import given, settings
from structlog.testing import capture_logs

from maru_core.protocol import MAX_KEYS, MAX_MESSAGE, PROTOCOL_VERSION, Code, Op
from maru_core.server.handlers import Handlers, Task
from maru_core.server.sessions import SessionRegistry
from tests.budgets import examples
from tests.server.pure import World
from tests.server.raw import RawClient, Refused, keys, pack, u64

TOKEN = "token"


class AlwaysHeld:
    """Locks of clients that never die."""

    def create(self, session: int) -> str:
        return "/nowhere"

    def held(self, session: int) -> bool:
        return True

    def ensure(self, session: int) -> str:
        return "/nowhere"

    def record(self, session: int, record: object) -> None:
        return

    def remove(self, session: int) -> None:
        return


class Unsaved:
    """Weights epochs that nobody keeps."""

    def save(self, epochs: object) -> None:
        return


def make_handlers() -> tuple[Handlers, int]:
    """Handlers over plain memory and an attached session."""
    world = World.of(64)
    numbers = iter(range(5, 1 << 30))
    handlers = Handlers(
        world.directory, SessionRegistry(1, lambda: next(numbers)), AlwaysHeld(), Unsaved(), 7, 1, lambda: 0.0
    )
    handlers.administration.token = TOKEN
    hello = [Op.HELLO, 1, 0, 0, PROTOCOL_VERSION, "client", [1, "h", "n"], b"\x90", 0, []]
    session = answer(handlers, hello)[3]
    assert answer(handlers, [Op.ATTACH, 2, 7, session, True, False])[2] == Code.OK
    return handlers, session


def answer(handlers: Handlers, message: object) -> list | None:
    """Run one message to its end."""
    outcome = handlers.handle(message if isinstance(message, bytes) else msgpack.packb(message))
    while isinstance(outcome, Task):
        outcome = outcome.reply if outcome.advance() else outcome
    return None if outcome is None else msgpack.unpackb(outcome)


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=70)
    | st.sampled_from([bytes(32), bytes(64), b"", bytes(8), bytes(4), 1, 7, 5]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=examples(400), deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_answered_or_dropped(frame):
    handlers, _ = make_handlers()
    answer(handlers, frame)
    assert handlers.directory.counters["internal_errors"] == 0
    assert answer(handlers, [Op.PING, 3, 7, 0]) == [3, 7, Code.OK]


@pytest.mark.slow
@settings(max_examples=examples(300), deadline=None)
@given(st.integers(0, 16) | ANYTHING, st.booleans(), st.lists(ANYTHING, max_size=6))
def test_arguments_of_any_type_are_refused_cleanly(op, well_addressed, arguments):
    handlers, session = make_handlers()
    reply = answer(handlers, [op, 9, 7, session if well_addressed else 0, *arguments])
    assert reply is not None
    assert reply[0] == 9
    assert handlers.directory.counters["internal_errors"] == 0, reply
    assert answer(handlers, [Op.PING, 3, 7, 0]) == [3, 7, Code.OK]


WELL_FORMED = {
    Op.HELLO: [PROTOCOL_VERSION, "client", [1, "h", "n"], b"\x90", 0, []],
    Op.ATTACH: [True, False],
    Op.RESERVE: [0, keys(0, 2), keys(9, 2), 100],
    Op.COMMIT: [pack([0]), pack([1]), u64(3)],
    Op.ABORT: [pack([0]), pack([1])],
    Op.PROBE: [0, keys(0, 2)],
    Op.ACQUIRE: [0, keys(0, 2), False],
    Op.RELEASE: [u64(1)],
    Op.DELETE: [0, keys(0, 2)],
    Op.RESET: [0],
    Op.CANCEL: [u64(77)],
    Op.STATS: [],
    Op.PING: [],
    Op.BYE: [],
    Op.ADMIN: [TOKEN, "sessions", 0],
    Op.REPORT: [pack([0]), pack([1])],
}


@pytest.mark.parametrize("op", Op)
def test_each_argument_is_checked(op):
    """One argument at a time of a well-formed request is replaced."""
    for at in range(len(WELL_FORMED[op])):
        for wrong in (None, True, -1, 2**64 - 1, 1.5, "text", b"\0" * 31, [], [[]], {}, b"\0" * (32 * MAX_KEYS + 32)):
            handlers, session = make_handlers()
            arguments = list(WELL_FORMED[op])
            if type(arguments[at]) is type(wrong):
                continue
            arguments[at] = wrong
            reply = answer(handlers, [op, 9, 7, session, *arguments])
            expected = Code.VERSION if (op, at) == (Op.HELLO, 0) else Code.BAD_REQUEST
            if not ((op, at) == (Op.RESERVE, 3) and type(wrong) is int and wrong >= 0):
                assert reply[2] == expected, (at, wrong, reply)
            assert handlers.directory.counters["internal_errors"] == 0
    handlers, session = make_handlers()
    assert answer(handlers, [op, 9, 7, session, *WELL_FORMED[op]])[2] == Code.OK
    handlers, session = make_handlers()
    assert answer(handlers, [op, 9, 7, session, *WELL_FORMED[op], 1])[2] == Code.BAD_REQUEST


def test_an_exception_inside_is_an_answer(monkeypatch):
    handlers, session = make_handlers()
    monkeypatch.setattr(handlers.directory, "probe", lambda *_: 1 / 0)
    reply = answer(handlers, [Op.PROBE, 4, 7, session, 0, keys(0, 1)])
    assert reply[2] == Code.INTERNAL
    assert "ZeroDivisionError" in reply[3]
    assert answer(handlers, [Op.PING, 3, 7, 0])[2] == Code.OK


def test_another_epoch_is_not_executed():
    handlers, session = make_handlers()
    reply = answer(handlers, [Op.RESERVE, 4, 8, session, 0, keys(0, 1), b"", 10])
    assert reply[1:3] == [7, Code.STALE_EPOCH]
    assert handlers.directory.arenas[0].reserved == 0


def test_long_requests_are_answered_key_by_key_and_only_under_the_current_weights_epoch():
    handlers, session = make_handlers()

    def ask(op, *arguments):
        reply = answer(handlers, [op, 11, 7, session, *arguments])
        assert reply[:3] == [11, 7, Code.OK], reply
        return reply[3:]

    stored = [0, 255, 256, 257, 511, 512, 513, 1299]  # at the ends of slices and in the middle
    statuses, entries, generations = ask(Op.RESERVE, 0, b"".join(keys(at, 1) for at in stored), b"", 1)
    assert statuses == bytes(len(stored))
    ask(Op.COMMIT, entries, generations, b"")
    expected, packed = bytes(at in stored for at in range(1300)), keys(0, 1300)
    for op in (Op.PROBE, Op.DELETE):
        assert ask(op, 1, packed) == [bytes(1300)], "of another weights epoch"
    assert ask(Op.PROBE, 0, packed) == [expected]
    assert ask(Op.DELETE, 0, packed) == [expected]
    assert ask(Op.PROBE, 0, packed) == [bytes(1300)]


def test_another_version_is_refused_with_both_named():
    handlers, _ = make_handlers()
    reply = answer(handlers, [Op.HELLO, 4, 0, 0, PROTOCOL_VERSION + 1, "future", "stuff"])
    assert reply[2] == Code.VERSION
    assert str(PROTOCOL_VERSION) in reply[3]
    assert str(PROTOCOL_VERSION + 1) in reply[3]


@pytest.mark.slow
def test_garbage_on_the_socket_stops_nobody(start_server, connect, context):
    server = start_server("--url", "tcp://127.0.0.1:*")
    good = connect(server).hello()
    host, port = server.url.removeprefix("tcp://").split(":")

    def alive() -> None:
        good.call(Op.PING)

    nested = b"\x91" * 10_000 + b"\x01"
    frames = [
        b"",
        b"\x00",
        b"\xc1",
        b"GET / HTTP/1.1\r\n\r\n",
        msgpack.packb(None),
        msgpack.packb(5),
        msgpack.packb({"op": 1}),
        nested,
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        msgpack.packb([99, 1, good.epoch, good.session]),
        msgpack.packb([6, 1, good.epoch, good.session, 0, keys(0, 5)])[:-7],
        msgpack.packb([6, 1, good.epoch, good.session, 0, "\udcff".encode("utf8", "surrogatepass")]),
        random.Random(2).randbytes(MAX_MESSAGE - 100),
    ]
    for frame in frames:
        rude = RawClient(context, server.url)
        rude.socket.send(frame)
        alive()
        rude.close()
    for parts in ([b"", b""], [b"a"] * 7, [msgpack.packb([13, 1, 0, 0]), b"more"]):
        rude = RawClient(context, server.url)
        rude.socket.send_multipart(parts)
        alive()
        rude.close()
    for raw in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\xff" * 100, b"\xff\0\0\0\0\0\0\0\x01\x7f", os.urandom(1000)):
        with socket.create_connection((host, int(port))) as plain:
            plain.sendall(raw)
            alive()
        alive()
    with socket.create_connection((host, int(port))) as plain:
        try:
            for _ in range(64):
                plain.sendall(b"\x07" * (1 << 20))
        except OSError:
            pass  # refused on the way: fine
        alive()
    rude = RawClient(context, server.url)
    rude.socket.send(bytes(64 << 20))
    alive()
    rude.close()
    assert good.stats()["counters"]["internal_errors"] == 0
    assert server.process.poll() is None


@pytest.mark.slow
def test_limits_are_named(start_server, connect):
    client = connect(start_server()).hello()
    with pytest.raises(Refused, match=str(MAX_KEYS)):
        client.call(Op.PROBE, 0, bytes(32 * (MAX_KEYS + 1)))
    assert client.probe(b"") == b""
    assert client.reserve(b"") == (b"", [], [])
    assert client.acquire(b"")[:2] == (0, b"")


@pytest.mark.slow
def test_a_peer_that_does_not_read_is_not_waited_for(start_server, connect):
    server = start_server()
    good, deaf = connect(server).hello(), connect(server)
    deaf.hello()
    deaf.socket.setsockopt(zmq.SNDTIMEO, 200)
    sent = 0
    try:
        while sent < 3000:
            deaf.send(Op.PROBE, 0, keys(0, 1000))
            sent += 1
    except zmq.Again:
        pass
    assert sent > 100
    started = time.monotonic()
    good.call(Op.PING)
    assert time.monotonic() - started < 2


def test_a_full_disk_is_told_in_one_line_and_no_credential_in_any():
    handlers, _ = make_handlers()
    full = OSError(errno.ENOSPC, "No space left on device")

    def create(session: int) -> str:
        raise full

    handlers.proofs.create = create
    hello = [Op.HELLO, 5, 0, 0, PROTOCOL_VERSION, "client", [1, "h", "n"], b"\x90", 0, []]
    with capture_logs() as lines:
        assert answer(handlers, hello)[2:] == [Code.INTERNAL, f"OSError: {full}"]
    assert [(line["reason"], line.get("exc_info")) for line in lines] == [(str(full), None)]
    assert len(handlers.sessions) == 1
    assert TOKEN not in repr(handlers.administration)
