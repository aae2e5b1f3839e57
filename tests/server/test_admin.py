"""Administration: only with the credential, and without delaying anybody."""

from __future__ import annotations

import time

import pytest

from maru_core.namespace import Namespace
from maru_core.protocol import Code, Op
from maru_core.server.admin import MAX_WRONG, PAGE
from maru_core.server.loop import SWEEP_INTERVAL
from tests.server.keyed import descriptor, own_address, tenants
from tests.server.raw import RawClient, Refused, keys, u32, u64
from tests.server.test_edge import answer, make_handlers
from tests.waiting import NEVER, eventually

KEYS = keys(0, 4)


@pytest.fixture
def server(start_server):
    return start_server()


@pytest.fixture
def token(server) -> str:
    return (server.folder / "admin.token").read_text().strip()


@pytest.fixture
def operator(server, connect) -> RawClient:
    """A client without a session."""
    return connect(server)


def digest(facts: dict[str, str]) -> bytes:
    return Namespace.of(facts).digest


RED = digest({"model": "test", "operator": "red"})


@pytest.mark.slow
def test_namespaces_and_sessions_are_listed(server, connect, operator, token):
    red = connect(server).hello(descriptor("red"))
    connect(server).hello(descriptor("blue"), attach=False)
    red.store(KEYS, 5000)
    red.acquire(keys(0, 1))
    red.reserve(keys(9, 1))
    listed, end = operator.admin(token, "namespaces", 0)
    assert end == 0
    first = next(one for one in listed if one["digest"] == RED.hex())
    assert (first["objects"], first["bytes"], first["sessions"], first["weights_epoch"]) == (4, 20000, 1, 0)
    assert first["facts"] == "model=test, operator=red"
    assert operator.admin(token, "sessions", 2**64 - 1) == [[], 0]
    sessions, end = operator.admin(token, "sessions", 0)
    mine = next(one for one in sessions if one["session"] == red.session)
    assert (mine["leased"], mine["reserved"], mine["leases"]) == (8192, 4096, 1)
    assert (mine["attached"], mine["proof"], mine["namespace"]) == (True, True, RED.hex())
    assert [one["attached"] for one in sessions if one is not mine] == [False]


@pytest.mark.slow
def test_long_lists_come_in_pages(server, connect, operator, token):
    client = connect(server)
    for number in range(PAGE + 5):
        client.epoch = client.session = 0
        client.hello(descriptor(f"t{number}"), attach=False)
    for verb, name in (("namespaces", "digest"), ("sessions", "session")):
        first, start = operator.admin(token, verb, 0)
        assert len(first) == PAGE
        rest, end = operator.admin(token, verb, start)
        assert end == 0
        assert len({one[name] for one in first + rest}) == PAGE + 5


@pytest.mark.slow
def test_reset_of_one_and_of_all(server, connect, operator, token):
    red, blue = connect(server).hello(descriptor("red")), connect(server).hello(descriptor("blue"))
    red.store(KEYS)
    blue.store(KEYS)
    _, entries, generations = red.reserve(keys(9, 1))
    assert operator.admin(token, "reset", RED) == [1]
    assert red.commit(entries, generations) == b"\1", "a store in flight does not come back"
    assert red.probe(KEYS) == bytes(4), "an engine of the old weights neither hits"
    assert red.reserve(keys(20, 1))[0] == b"\4", "nor stores"
    assert blue.probe(KEYS) == b"\1" * 4
    red.weights_epoch = 1
    red.store(keys(0, 1))
    assert operator.admin(token, "reset", "all") == [2]
    assert blue.probe(KEYS) == bytes(4)
    pool = red.stats()["pools"][0]
    assert pool["free"] == pool["capacity"]
    with pytest.raises(Refused, match="no namespace has the digest 0000"):
        operator.admin(token, "reset", bytes(16))


@pytest.mark.slow
def test_evict_drops_what_nobody_reads(server, connect, operator, token):
    red, blue = connect(server).hello(descriptor("red")), connect(server).hello(descriptor("blue"))
    red.store(keys(0, 300))
    blue.store(keys(0, 300))
    lease, _, _ = red.acquire(keys(0, 10))
    red.reserve(keys(900, 1))
    assert operator.admin(token, "evict", RED) == [290]
    assert red.probe(keys(0, 11)) == b"\1" * 10 + b"\0"
    assert red.probe(keys(900, 1)) == b"\2"
    assert blue.probe(keys(0, 300)) == b"\1" * 300
    red.call(Op.RELEASE, u64(lease))
    assert operator.admin(token, "evict", RED) == [10]


def test_pages_that_went_to_another_namespace_meanwhile_are_not_evicted():
    """EVICT works on entries that it saw some turns ago."""
    handlers, session = make_handlers()
    kept = handlers.sessions.get(session).namespace
    reply = answer(handlers, [Op.RESERVE, 5, 7, session, 0, KEYS, b"", 100])
    entries = u32(reply[4])
    assert answer(handlers, [Op.COMMIT, 6, 7, session, reply[4], reply[5], b""])[3] == bytes(4)
    handlers.directory.evict(handlers.directory.namespaces.open(descriptor("red")), entries)
    assert answer(handlers, [Op.PROBE, 7, 7, session, 0, KEYS])[3] == b"\1" * 4
    handlers.directory.evict(kept, entries)
    assert answer(handlers, [Op.PROBE, 8, 7, session, 0, KEYS])[3] == bytes(4)


@pytest.mark.slow
def test_a_quota_is_ordered_and_taken_back(server, connect, operator, token):
    red = connect(server).hello(descriptor("red"))
    red.store(keys(0, 20))
    assert operator.admin(token, "quota", RED, 10 * 4096) == [10 * 4096]
    (own,) = red.stats()["namespaces"]
    assert own["quota"] == 10 * 4096
    red.store(keys(20, 4))
    (own,) = red.stats()["namespaces"]
    assert own["used"] <= 10 * 4096
    assert operator.admin(token, "quota", RED, 0) == [0]
    assert red.stats()["namespaces"][0]["quota"] is None
    assert red.store(keys(100, 30)) == bytes(30)


@pytest.mark.slow
def test_stop_answers_and_ends(server, connect, operator, token):
    assert operator.admin(token, "stop") == []
    assert server.process.wait(NEVER) == 0


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["", "0" * 64, "\udcff", "x" * 5000])
def test_without_the_credential_nothing_is_done(server, connect, operator, wrong):
    red = connect(server).hello(descriptor("red"))
    red.store(KEYS)
    wrong = wrong.encode("utf-8", "replace").decode()
    for verb in ("stop", "reset", "nonsense"):
        with pytest.raises(Refused) as refused:
            operator.admin(wrong, verb, b"")
        assert refused.value.code == Code.FORBIDDEN
    assert red.probe(KEYS) == b"\1" * 4
    assert red.stats()["counters"]["admin_refused"] == 3
    assert server.process.poll() is None


@pytest.mark.slow
def test_almost_the_credential_is_wrong(server, operator, token):
    for wrong in (token[:-1], token + "0", token.upper() if token.upper() != token else token[::-1]):
        with pytest.raises(Refused) as refused:
            operator.admin(wrong, "sessions", 0)
        assert refused.value.code == Code.FORBIDDEN


@pytest.mark.slow
def test_guessing_is_slowed_down_and_delays_nobody_else(server, connect, operator, token):
    other = connect(server).hello()
    started, refusals, looked_at, took = time.monotonic(), 0, 0, []
    while time.monotonic() - started < 1.2:
        with pytest.raises(Refused) as refused:
            operator.admin("guess", "stop")
        refusals += 1
        looked_at += "too many" not in refused.value.text
        before = time.monotonic()
        other.call(Op.PING)
        took.append(time.monotonic() - before)
    sweeps = int((time.monotonic() - started) / SWEEP_INTERVAL) + 1
    assert looked_at <= (sweeps + 1) * MAX_WRONG
    assert looked_at < refusals
    assert sorted(took)[len(took) // 2] < 0.1

    def let_in() -> bool:
        try:
            operator.admin(token, "sessions", 0)
        except Refused:
            return False
        return True

    eventually(let_in)


@pytest.mark.slow
def test_one_tenants_guesses_do_not_shut_the_operator_out(start_server, connect, runtime_dir):
    known = tenants(runtime_dir)
    server = start_server("--url", f"tcp://{own_address()}:*", "--keys", str(runtime_dir / "keys"))
    token = (runtime_dir / "admin.token").read_text().strip()
    red, free = connect(server, known["red"]), connect(server, known["free"])
    for _ in range(50):
        with pytest.raises(Refused):
            red.admin("guess", "stop")
    assert free.admin(token, "sessions", 0) == [[], 0]


@pytest.mark.slow
def test_malformed_requests_are_named(server, operator, token):
    for arguments in (
        [],
        [token],
        [token, 5],
        [5, "stop"],
        [token, "sing"],
        [token, "reset"],
        [token, "reset", b"short"],
        [token, "reset", b""],
        [token, "reset", "everything"],
    ):
        with pytest.raises(Refused) as refused:
            operator.call(Op.ADMIN, *arguments)
        assert refused.value.code == Code.BAD_REQUEST
    for arguments in (["evict", b""], ["quota", b"", 5], ["quota", RED, -1], ["sessions", "0"], ["stop", 1]):
        with pytest.raises(Refused) as refused:
            operator.admin(token, *arguments)
        assert refused.value.code == Code.BAD_REQUEST


@pytest.mark.slow
def test_the_credential_lives_as_long_as_its_folder(start_server, connect, runtime_dir):
    server = start_server()
    path = runtime_dir / "admin.token"
    token = path.read_text()
    assert len(token.strip()) == 64
    assert path.stat().st_mode & 0o777 == 0o600
    server.process.terminate()
    server.process.wait(NEVER)
    start_server()
    assert path.read_text() == token
    assert [name.name for name in runtime_dir.glob("admin.token*")] == ["admin.token"]


@pytest.mark.slow
def test_a_credential_that_others_can_read_is_refused(start_server, runtime_dir):
    path = runtime_dir / "admin.token"
    path.write_text("0" * 64)
    path.chmod(0o644)
    with pytest.raises(AssertionError, match="others could read"):
        start_server()
