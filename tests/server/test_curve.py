"""Servers at tcp addresses: only clients with keys, and each only in the namespaces of its key."""

from __future__ import annotations

import secrets
import socket
import subprocess
import sys
import time

import msgpack
import pytest
import zmq

from maru_core.access import ClientKeys, KeyPair, make_keys
from maru_core.client.channel import Channel
from maru_core.protocol import Code, Op
from maru_core.protocol.codec import encode
from tests.server.keyed import descriptor, free_port, own_address, tenants
from tests.server.raw import RawClient, Refused, key, keys, pack, u64
from tests.waiting import eventually


@pytest.fixture
def keyed(start_server, runtime_dir):
    """A server with keys, at an address that other hosts could reach, and its clients' keys."""
    known = tenants(runtime_dir)
    return start_server("--url", f"tcp://{own_address()}:*", "--keys", str(runtime_dir / "keys")), known


def hello_as(connect, server, own, operator: str | None, **options) -> RawClient:
    return connect(server, own).hello(descriptor(operator), **options)


@pytest.mark.slow
def test_an_address_of_other_hosts_needs_keys(maru_runtime_dir):
    for url in ("tcp://0.0.0.0:5999", f"tcp://{own_address()}:5999", "tcp://[::]:5999"):
        if "127.0.0.1" in url:
            continue
        command = [sys.executable, "-m", "maru_core.cli", "serve", "--runtime-dir", str(maru_runtime_dir), "--url", url]
        run = subprocess.run([*command, "--pool-size", "1M"], capture_output=True, text=True, timeout=30, check=False)
        assert run.returncode == 1
        assert "maru keygen" in run.stderr
        assert "Traceback" not in run.stderr


@pytest.mark.slow
def test_a_client_with_a_known_key_is_served(keyed, connect):
    server, known = keyed
    client = hello_as(connect, server, known["free"], None)
    assert client.store(keys(0, 3)) == bytes(3)
    assert client.acquire(keys(0, 4))[1] == b"\1\1\1\0"
    big = keys(0, 100_000)
    assert client.probe(big)[:4] == b"\1\1\1\0", "a message of megabytes"


@pytest.mark.slow
@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_a_loopback_address_may_have_keys(start_server, connect, runtime_dir, host):
    known = tenants(runtime_dir)
    server = start_server("--url", f"tcp://{host}:*", "--keys", str(runtime_dir / "keys"))
    for own, answered in ((known["free"], True), (None, False)):
        with zmq.Context() as context:
            channel = Channel(context, server.url, own)
            channel.send(encode((int(Op.PING), 1, 0, 0)))
            assert (channel.receive(1, 5.0 if answered else 0.7) is not None) is answered
            channel.close()


@pytest.mark.slow
def test_unknown_keys_no_keys_and_wrong_server_keys_get_no_answer(keyed, connect, tmp_path):
    server, known = keyed
    public, secret = zmq.curve_keypair()
    unknown = ClientKeys(KeyPair(public, secret), known["free"].server, "")
    other_server = ClientKeys(known["free"].own, public, "")
    for wrong in (None, unknown, other_server):
        client = connect(server, wrong, timeout=0.7)
        client.send(Op.PING)
        with pytest.raises(TimeoutError):
            client.receive()
    host, port = server.url.removeprefix("tcp://").rsplit(":", 1)
    with socket.create_connection((host, int(port))) as plain:
        plain.sendall(msgpack.packb([int(Op.PING), 1, 0, 0]) * 100)
    good = hello_as(connect, server, known["free"], None)
    assert good.call(Op.PING) == [], "the server still serves"
    assert good.stats()["counters"]["keys_refused"] == 0, "they were turned away before anybody read what they sent"


@pytest.mark.slow
def test_without_an_authenticator_nobody_is_let_in(context, tmp_path):
    """What protects when the thread that knows the keys is gone."""
    from maru_core.access import KeyRing
    from maru_core.server.loop import ServerLoop
    from tests.server.test_edge import make_handlers

    known = tenants(tmp_path)
    loop = ServerLoop(context, make_handlers()[0], keys=KeyRing.load(tmp_path / "keys"))
    url = loop.bind("tcp://127.0.0.1:*")
    client = RawClient(context, url, 0.7, known["free"])
    client.send(Op.PING)
    assert loop._socket.poll(700) == 0
    client.close()
    loop.close()


@pytest.mark.slow
def test_a_bound_key_reaches_only_its_namespaces(keyed, connect):
    server, known = keyed
    for own, operator in (("red", "red"), ("blue", "blue"), ("blue", "shared"), ("free", "red"), ("free", None)):
        hello_as(connect, server, known[own], operator)
    for own, operator in (("red", "blue"), ("red", None), ("red", ""), ("blue", "red"), ("red", "red ")):
        with pytest.raises(Refused, match=f"client {own} is bound to maru_cache_namespace") as refused:
            hello_as(connect, server, known[own], operator)
        assert refused.value.code == Code.FORBIDDEN
    # A descriptor that another reader could understand in another way is nobody's.
    pair = [["operator", "red"], ["operator", "blue"]]
    for strange in (msgpack.packb(pair), msgpack.packb(pair[::-1]), descriptor("red") + b"\0", b"\x90", b"\xff"):
        with pytest.raises(Refused, match="is bound"):
            connect(server, known["red"]).hello(strange)


@pytest.mark.slow
def test_a_session_belongs_to_the_key_that_opened_it(keyed, connect):
    server, known = keyed
    red = hello_as(connect, server, known["red"], "red")
    red.store(keys(0, 2))
    lease, _, _ = red.acquire(keys(0, 1))
    thief = connect(server, known["blue"])
    thief.epoch, thief.session = red.epoch, red.session
    for op, arguments in (
        (Op.PING, []),
        (Op.STATS, []),
        (Op.PROBE, [0, keys(0, 2)]),
        (Op.ACQUIRE, [0, keys(0, 2), False]),
        (Op.RESERVE, [0, keys(5, 1), b"", 100]),
        (Op.RELEASE, [u64(lease)]),
        (Op.DELETE, [0, keys(0, 2)]),
        (Op.RESET, [0]),
        (Op.CANCEL, [u64(red.request)]),
        (Op.BYE, []),
    ):
        with pytest.raises(Refused) as refused:
            thief.call(op, *arguments)
        assert refused.value.code == Code.NO_SESSION
        unknown = red.session ^ 1
        thief.session = unknown
        with pytest.raises(Refused) as other:
            thief.call(op, *arguments)
        assert refused.value.text.replace(str(red.session), "") == other.value.text.replace(str(unknown), "")
        thief.session = red.session
    assert red.probe(keys(0, 2)) == b"\1\1"
    # Another socket of the same client is the same client.
    again = connect(server, known["red"])
    again.epoch, again.session = red.epoch, red.session
    assert again.call(Op.RELEASE, u64(lease)) == [b"\0"]


@pytest.mark.slow
def test_key_files_that_come_and_go_count_without_a_restart(keyed, connect, runtime_dir):
    server, known = keyed
    folder = runtime_dir / "keys"
    make_keys(folder, ["late"])
    late = ClientKeys.load(folder / "late.key")
    eventually(lambda: served(connect, server, late))
    held = hello_as(connect, server, known["free"], None)
    held.store(keys(0, 1))
    (folder / "free.pub").unlink()
    held.timeout = 0.5

    def shut_out() -> bool:
        try:
            held.call(Op.PING)
        except TimeoutError:
            return True
        return False

    eventually(shut_out)
    assert not served(connect, server, known["free"])
    eventually(lambda: served(connect, server, late))
    (folder / "late.pub").write_text("nonsense")
    eventually(lambda: not served(connect, server, late))


def served(connect, server, own) -> bool:
    client = connect(server, own, timeout=0.7)
    client.send(Op.PING)
    try:
        return client.receive()[2] == Code.OK
    except TimeoutError:
        return False


@pytest.mark.slow
def test_a_session_is_resumed_by_its_own_key_only(start_server, connect, runtime_dir):
    known, host = tenants(runtime_dir), own_address()
    options = ("--url", f"tcp://{host}:{free_port(host)}", "--keys", str(runtime_dir / "keys"))
    server = start_server(*options)
    red = hello_as(connect, server, known["red"], "red")
    _, entries, generations = red.reserve(keys(0, 2))
    server.process.kill()
    server.process.wait()
    server = start_server(*options)
    thief = connect(server, known["free"])
    columns = [red.session, 1, 0, True, pack(entries), pack(generations), b"", b"", b"", b""]
    thief.hello(descriptor("red"), attach=False, resume=columns)
    assert thief.session != red.session
    assert red.resume(server.url, (entries, generations), namespace=descriptor("red"))
    assert red.commit(entries, generations) == bytes(2)


@pytest.mark.slow
def test_many_strangers_do_not_delay_a_client(keyed, connect, context):
    server, known = keyed
    good = hello_as(connect, server, known["free"], None)
    strangers = []
    for _ in range(100):
        public, secret = zmq.curve_keypair()
        strangers.append(connect(server, ClientKeys(KeyPair(public, secret), known["free"].server, "")))
        strangers[-1].send(Op.PING)
    slowest = 0.0
    for _ in range(200):
        started = time.monotonic()
        good.probe(key(1) + secrets.token_bytes(32))
        slowest = max(slowest, time.monotonic() - started)
    assert slowest < 1
