"""Servers that are killed and started again on the same folder, and clients that live on, stop or die meanwhile."""

from __future__ import annotations

import json
import os
import signal
import time
import zlib
from pathlib import Path

import pytest

from maru_core.pool_format import HEADER_SIZE, State
from maru_core.protocol import PROTOCOL_VERSION, Code, Op, ReserveStatus
from maru_core.protocol.messages import MAX_RESUME
from maru_core.server.liveness import SessionRecord
from tests.server.raw import RawClient, Refused, keys, pack, u64
from tests.server.test_sessions import holder
from tests.waiting import eventually, quickest

pytestmark = pytest.mark.slow

__all__ = ["holder"]

#: Sixteen pages: 64 KiB of data, headers and superblock.
SIXTEEN = ("--size", str(16 * (4096 + 128) + 2 * 4096))


def kill(server) -> None:
    server.process.kill()
    server.process.wait()


def capacity(client: RawClient) -> dict[str, int]:
    pool = client.stats()["pools"][0]
    assert pool["used"] + pool["free"] + pool["reserved"] + pool["quarantined"] == pool["capacity"]
    return pool


def test_everything_stored_is_found_again(start_server, connect):
    server = start_server()
    client = connect(server).hello()
    client.store(keys(0, 100), parents=bytes(32))
    client.store(keys(200, 50), length=9000)
    client.reserve(keys(500, 3))
    kill(server)
    server = start_server()
    other = connect(server).hello()
    assert other.probe(keys(0, 100)) == b"\1" * 100
    assert other.probe(keys(200, 50)) == b"\1" * 50
    assert other.probe(keys(500, 3)) == b"\2" * 3, "the writer lives: its pages are its own"
    lease, statuses, entries = other.acquire(keys(0, 100))
    assert lease
    assert statuses == b"\1" * 100
    assert len(set(entries)) == 100
    assert capacity(other)["objects"] == 150


def test_a_client_goes_on_with_what_it_lists(start_server, connect):
    server = start_server()
    client = connect(server).hello()
    client.store(keys(0, 8))
    lease, _, read = client.acquire(keys(0, 4))
    given_up, _, _ = client.acquire(keys(4, 4))
    _, entries, generations = client.reserve(keys(20, 4))
    kill(server)
    server = start_server()
    with pytest.raises(Refused) as refused:
        client.probe(keys(0, 8))
    assert refused.value.code == Code.STALE_EPOCH, "nothing of the epoch before is executed"
    held = {lease: (read, [1] * 4)}
    assert client.resume(server.url, (entries[:2], generations[:2]), held)
    pool = capacity(client)
    assert pool["reserved"] == 2 * 4096, "what is not listed is free"
    assert pool["leased"] == 4 * 4096
    assert client.commit(entries[:2], generations[:2]) == bytes(2)
    assert client.probe(keys(20, 4)) == b"\1\1\0\0"
    other = client.acquire(keys(4, 4))[0]
    assert other not in (lease, given_up), "a new lease with an old id would end the old one"
    for number in (lease, other):
        assert client.call(Op.RELEASE, number.to_bytes(8, "little")) == [b"\0"]
    assert client.call(Op.RELEASE, given_up.to_bytes(8, "little")) == [b"\1"]
    assert capacity(client)["leased"] == 0


def test_a_lost_reply_to_hello_does_not_matter(start_server, connect):
    server = start_server()
    client = connect(server).hello()
    client.store(keys(0, 4))
    lease, _, read = client.acquire(keys(0, 4))
    _, entries, generations = client.reserve(keys(20, 2))
    kill(server)
    server = start_server()
    for _ in range(2):
        assert client.resume(server.url, (entries, generations), {lease: (read, [1] * 4)})
    assert (capacity(client)["reserved"], capacity(client)["leased"]) == (2 * 4096, 4 * 4096)
    assert client.call(Op.RELEASE, lease.to_bytes(8, "little")) == [b"\0"]
    assert capacity(client)["leased"] == 0
    assert not client.resume(server.url, (entries, generations)), "a session that went on is not resumed"


def part_of(
    session: int, attempt: int, part: int, last: bool, writing: list[int], reading: dict[int, list[int]]
) -> list[object]:
    """One part of what a session resumes, all of generation 1."""
    held = [entry for entries in reading.values() for entry in entries]
    sizes = [len(entries) for entries in reading.values()]
    handles = [pack(writing), pack([1] * len(writing)), u64(*reading), pack(sizes), pack(held), pack([1] * len(held))]
    return [session, attempt, part, last, *handles]


def test_a_list_in_parts_counts_when_its_last_part_is_there(start_server, connect):
    server = start_server("--lease-share", "1")
    client = connect(server).hello()
    client.store(keys(0, 704))
    lease, _, read = client.acquire(keys(0, 700))
    other, _, read_too = client.acquire(keys(700, 4))
    _, entries, _ = client.reserve(keys(1000, 4))
    session = client.session
    kill(server)
    server = start_server("--lease-share", "1")
    again = connect(server)
    # An attempt that is given up leaves nothing behind.
    again.hello(attach=False, resume=part_of(session, 1, 0, False, entries, {other: read_too}))
    assert again.session == session
    again.session = again.epoch = 0
    parts = [part_of(session, 2, 0, False, entries[:1], {lease: read[:600]})]
    parts += [part_of(session, 2, 1, False, entries[1:2], {lease: read[600:]}), part_of(session, 2, 2, True, [], {})]
    again.hello(attach=False, resume=parts[0])
    for late in (part_of(session, 1, 1, True, entries, {}), parts[2]):
        again.session = again.epoch = 0
        with pytest.raises(Refused, match="out of turn"):
            again.hello(attach=False, resume=late)
    for part in parts[1:]:
        assert (capacity(again)["reserved"], capacity(again)["leased"]) == (4 * 4096, 0)
        again.session = 0
        again.hello(attach=False, resume=part)
    assert again.session == session
    assert (capacity(again)["reserved"], capacity(again)["leased"]) == (2 * 4096, 700 * 4096)
    again.call(Op.ATTACH, False, False)
    assert again.call(Op.RELEASE, u64(lease, other)) == [b"\0\1"], "a lease that goes on in the next part is one"
    assert capacity(again)["leased"] == 0


def test_what_nobody_can_have_held_is_refused(start_server, connect):
    server = start_server(*SIXTEEN)
    client = connect(server).hello()
    session = client.session
    kill(server)
    server = start_server(*SIXTEEN)
    again = connect(server)
    most = [7] * MAX_RESUME
    for wrong, why in (
        (part_of(session, 1, 0, True, [*most, 1], {}), "in one part"),
        (part_of(session, 1, 0, True, [], {1: []}), "none of them empty"),
        (part_of(session, 1, 1, True, [], {}), "out of turn"),
    ):
        again.session = again.epoch = 0
        with pytest.raises(Refused, match=why):
            again.hello(attach=False, resume=wrong)
    again.session = again.epoch = 0
    again.hello(attach=False, resume=part_of(session, 1, 0, False, most, {}))
    again.session = again.epoch = 0
    with pytest.raises(Refused, match="more than it can have had"):
        again.hello(attach=False, resume=part_of(session, 1, 1, False, most, {}))
    again.session = again.epoch = 0
    again.hello(attach=False, resume=part_of(session, 2, 0, True, [], {}))
    assert again.session == session


def test_many_leases_of_an_unknown_session_cost_nothing(start_server, connect):
    server = start_server()
    client = connect(server)
    many = {number: [1] for number in range(1, MAX_RESUME + 1)}
    columns = part_of(99, 1, 0, True, [], many)
    for _ in range(20):
        client.session = client.epoch = 0
        client.hello(attach=False, resume=columns)
        assert client.session != 99
    assert client.stats()["server"]["longest_turn_s"] < 0.01


def test_nothing_is_evicted_before_everybody_is_back(start_server, connect, holder):
    server = start_server(*SIXTEEN)
    process = holder(server)
    first = connect(server).hello()
    first.store(keys(100, 8))
    os.kill(process.pid, signal.SIGSTOP)
    kill(server)
    server = start_server(*SIXTEEN)
    assert first.resume(server.url)
    time.sleep(1.5)
    refused = []
    assert quickest(lambda: refused.append(first.reserve(keys(200, 4))[0])) < 0.1
    assert set(refused) == {bytes([ReserveStatus.NO_ROOM] * 4)}, "a stopped client may read anything"
    pool = capacity(first)
    assert pool["reserved"] == 4 * 4096, "and its late writes hit its own pages"
    assert first.stats()["counters"]["evicted"] == 0
    process.kill()
    process.wait()
    eventually(lambda: first.reserve(keys(200, 4))[0] == bytes(4))
    assert capacity(first)["reserved"] == 4 * 4096
    # The dead client's leases went with it.
    eventually(lambda: capacity(first)["leased"] == 0)


def test_a_client_that_died_with_the_server_leaves_nothing(start_server, connect, holder):
    server = start_server()
    process = holder(server)
    kill(server)
    process.kill()
    process.wait()
    server = start_server()
    client = connect(server).hello()
    eventually(lambda: client.stats()["sessions"] == 1)
    eventually(lambda: capacity(client)["reserved"] == 0)
    assert client.probe(keys(0, 4)) == b"\1" * 4
    assert len(list((server.folder / "sessions").iterdir())) == 1


def test_a_session_without_proof_is_never_taken_for_dead(start_server, connect):
    server = start_server(*SIXTEEN)
    far = connect(server).hello(proof=False)
    far.store(keys(0, 8))
    _, entries, generations = far.reserve(keys(20, 2))
    kill(server)
    server = start_server(*SIXTEEN)
    client = connect(server).hello()
    time.sleep(1.2)
    assert client.stats()["sessions"] == 2
    assert client.reserve(keys(100, 9))[0].count(ReserveStatus.NO_ROOM) > 0
    assert far.resume(server.url, (entries, generations))
    assert far.commit(entries, generations) == bytes(2)
    eventually(lambda: client.reserve(keys(200, 9))[0].count(ReserveStatus.NO_ROOM) == 0)


def test_pages_whose_writer_is_not_known_stay_taken(start_server, connect):
    server = start_server()
    client = connect(server).hello()
    client.reserve(keys(0, 3))
    kill(server)
    os.unlink(client.lock_path)
    server = start_server()
    other = connect(server).hello()
    time.sleep(1.2)
    assert other.probe(keys(0, 3)) == b"\2" * 3
    assert capacity(other)["free"] == capacity(other)["capacity"] - 3 * 4096


def flipped_digest(line: bytes) -> bytes:
    at = line.index(b'"digest": "') + 11
    return line[:at] + (b"1" if line[at : at + 1] != b"1" else b"2") + line[at + 1 :]


DAMAGES = {
    "digest": flipped_digest,
    "garbage": lambda line: os.urandom(len(line)),
    "nested": lambda line: b"[" * 30_000,
    "checksummed nonsense": lambda line: b"%08x %s\n" % (zlib.crc32(b"[" * 30_000), b"[" * 30_000),
    "half": lambda line: line[: len(line) // 2],
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_record_costs_nothing_while_the_lock_tells(start_server, connect, holder, how):
    server = start_server(*SIXTEEN)
    process = holder(server)
    client = connect(server).hello()
    client.store(keys(100, 2))
    lease, _, read = client.acquire(keys(100, 2))
    _, entries, generations = client.reserve(keys(200, 2))
    reader = connect(server).hello()
    theirs, _, also_read = reader.acquire(keys(100, 2))
    kill(server)
    for path in (server.folder / "sessions").glob("*.lock"):
        path.write_bytes(DAMAGES[how](path.read_bytes()))
    server = start_server(*SIXTEEN)
    assert client.resume(server.url, (entries, generations), {lease: (read, [1] * 2)}), "nothing of it is lost"
    assert reader.resume(server.url, reading={theirs: (also_read, [1] * 2)}), "also where only HELLO tells"
    assert client.commit(entries, generations) == bytes(2)
    process.kill()
    process.wait()
    # Its lock is free now: it is known to be dead, and nobody is awaited any more.
    eventually(lambda: capacity(client)["reserved"] + capacity(client)["quarantined"] == 0)
    eventually(lambda: client.reserve(keys(300, 11))[0].count(ReserveStatus.NO_ROOM) == 0)


def test_a_record_of_a_later_version_is_understood(start_server, connect):
    server = start_server()
    client = connect(server).hello()
    client.reserve(keys(0, 1))
    kill(server)
    path = Path(client.lock_path)
    record = json.loads(path.read_bytes().split(b" ", 1)[1])
    text = json.dumps({**record, "colour": "red", "name": "n" * 9000}).encode()
    path.write_bytes(b"%08x %s\n" % (zlib.crc32(text), text))
    server = start_server()
    token = (server.folder / "admin.token").read_text().strip()
    ((session,), _) = connect(server).admin(token, "sessions", 0)
    assert (session["session"], session["awaited"], session["proof"]) == (client.session, True, True)
    assert session["namespace"] == record["digest"]


def test_an_operator_forgets_who_never_comes_back(start_server, connect):
    server = start_server(*SIXTEEN)
    far, lives = connect(server).hello(proof=False), connect(server).hello()
    far.store(keys(0, 8))
    far.reserve(keys(20, 2))
    kill(server)
    server = start_server(*SIXTEEN)
    token = (server.folder / "admin.token").read_text().strip()
    assert lives.resume(server.url)
    operator = connect(server)
    assert lives.reserve(keys(100, 9))[0].count(ReserveStatus.NO_ROOM) > 0
    awaited = [one["session"] for one in operator.admin(token, "sessions", 0)[0] if one["awaited"]]
    assert awaited == [far.session]
    for wrong, text in ((lives.session, "ends with its process"), (12345, "no session is 0000000000003039")):
        with pytest.raises(Refused, match=text):
            operator.admin(token, "forget", wrong)
    assert operator.admin(token, "forget", far.session) == []
    eventually(lambda: lives.reserve(keys(200, 9))[0].count(ReserveStatus.NO_ROOM) == 0)
    assert not far.resume(server.url), "it begins anew"
    other = connect(server).hello(proof=False)
    assert operator.admin(token, "forget", other.session) == [], "a session without proof that is not awaited"


def test_long_names_are_refused(start_server, connect):
    client = connect(start_server())
    for role, host, name in (("r" * 1025, "", ""), ("r", "h" * 1025, ""), ("r", "h", "\xe9" * 513)):
        with pytest.raises(Refused, match="at most 1024 bytes"):
            client.call(Op.HELLO, PROTOCOL_VERSION, role, [1, host, name], b"\x90", 0, [])
    longest = "\0" * 1024
    client.call(Op.HELLO, PROTOCOL_VERSION, longest, [1, longest, longest], b"\x90", 0, [])
    record = SessionRecord("ab" * 16, longest, longest, True, True, "k" * 40)
    assert len(record.to_line()) < 32 * 1024
    assert SessionRecord.from_line(record.to_line()) == record


def test_a_reset_outlives_the_server(start_server, connect):
    server = start_server()
    client = connect(server).hello()
    client.store(keys(0, 4))
    assert client.call(Op.RESET, 0) == [1]
    client.weights_epoch = 1
    client.store(keys(10, 4))
    kill(server)
    server = start_server()
    old = connect(server).hello()
    assert old.weights_epoch == 1
    assert old.probe(keys(0, 20)) == bytes(10) + b"\1" * 4 + bytes(6)
    old.weights_epoch = 0
    assert old.reserve(keys(50, 1))[0] == bytes([ReserveStatus.REFUSED]), "old weights cannot refill it"
    assert old.probe(keys(10, 4)) == bytes(4), "nor do they hit what the new ones stored"


def test_a_reset_that_was_cut_short_is_finished(start_server, connect):
    """The epoch is on disk first: bytes of before are not served although their headers are whole."""
    server = start_server()
    client = connect(server).hello()
    client.store(keys(0, 4))
    record = next(iter((server.folder / "sessions").glob("*.lock"))).read_text()
    kill(server)
    (server.folder / "weights.json").write_text(json.dumps({json.loads(record.split(" ", 1)[1])["digest"]: 1}))
    server = start_server()
    other = connect(server).hello()
    assert other.weights_epoch == 1
    assert other.probe(keys(0, 4)) == bytes(4)
    assert client.resume(server.url)
    eventually(lambda: capacity(other)["used"] == 0)


def test_unreadable_weights_epochs_stop_the_start(start_server, runtime_dir):
    (runtime_dir / "weights.json").write_text("{")
    with pytest.raises(AssertionError, match=r"weights\.json cannot be read.*stop all engines and remove the file"):
        start_server()


def test_a_damaged_table_is_a_cold_start(start_server, connect):
    server = start_server()
    client = connect(server).hello()
    client.store(keys(0, 4))
    table_offset = client.pools[0].table_offset
    kill(server)
    pool = Path(client.pools[0].location)
    with pool.open("r+b") as file:
        # The same object twice, over one another: no server leaves that behind.
        file.seek(table_offset)
        header = bytearray(file.read(HEADER_SIZE))
        file.seek(table_offset)
        file.write(_with_length(header, 3 * 4096))
    server = start_server()
    other = connect(server).hello()
    assert other.probe(keys(0, 4)) == bytes(4)
    assert capacity(other)["free"] == capacity(other)["capacity"]
    assert not client.resume(server.url), "nothing of before can be gone on with"
    assert "cannot be: entries up to" in (server.folder / "server.log").read_text()


def _with_length(header: bytearray, length: int) -> bytes:
    from attrs import evolve

    from maru_core.pool_format import pack_header, unpack_header

    decoded = unpack_header(bytes(header))
    assert decoded is not None
    assert decoded.state == State.READY
    return pack_header(evolve(decoded, length=length))


def test_another_size_is_a_cold_start(start_server, connect):
    server = start_server("--size", str(4 << 20))
    connect(server).hello().store(keys(0, 4))
    kill(server)
    server = start_server("--size", str(8 << 20))
    client = connect(server).hello()
    assert client.probe(keys(0, 4)) == bytes(4)
    assert capacity(client)["capacity"] > 4 << 20


def test_pools_are_kept_when_asked(start_server, connect):
    server = start_server("--keep-pools")
    client = connect(server).hello()
    client.store(keys(0, 4))
    _, entries, generations = client.reserve(keys(10, 2))
    server.process.terminate()
    server.process.wait()
    server = start_server()
    assert client.resume(server.url, (entries, generations))
    assert client.commit(entries, generations) == bytes(2)
    assert client.probe(keys(0, 4)) == b"\1" * 4
    server.process.terminate()
    server.process.wait()
    assert not Path(client.pools[0].location).exists()


def test_the_pages_of_a_dead_client_wait_for_its_devices(start_server, connect, context):
    server = start_server("--dma-grace", "1.5")
    watcher = connect(server).hello()
    plain, device = RawClient(context, server.url).hello(), RawClient(context, server.url).hello(dma=True)
    plain.reserve(keys(0, 2))
    device.reserve(keys(10, 3))
    for client in (plain, device):
        client.close()
    start = time.monotonic()
    eventually(lambda: capacity(watcher)["reserved"] + capacity(watcher)["quarantined"] == 3 * 4096)
    eventually(lambda: capacity(watcher)["quarantined"] == 3 * 4096)
    took = eventually(lambda: capacity(watcher)["free"] == capacity(watcher)["capacity"])
    assert took + (time.monotonic() - start) > 1.0
    assert time.monotonic() - start < 30


def test_another_set_of_pools_starts_cold(start_server, connect):
    """What was deleted while one of two pools was left out does not come back with it."""
    small = SIXTEEN
    both = (*small, "--size", str(1 << 20))
    server = start_server(*both)
    client = connect(server).hello()
    client.store(keys(0, 40))
    assert [pool["objects"] > 0 for pool in client.stats()["pools"]] == [True, True]
    kill(server)
    server = start_server(*both)
    assert connect(server).hello().probe(keys(0, 40)) == b"\1" * 40, "the same set is served as it was"
    kill(server)
    server = start_server(*small)
    assert connect(server).hello().probe(keys(0, 40)) == b"\0" * 40
    kill(server)
    server = start_server(*both)
    assert connect(server).hello().probe(keys(0, 40)) == b"\0" * 40


def test_only_what_was_left_and_is_not_taken_over_is_a_cold_start(start_server, connect, runtime_dir):
    log = runtime_dir / "server.log"
    server = start_server()
    assert "cold start" not in log.read_text(), "nothing was there"
    server.process.terminate()
    server.process.wait()
    server = start_server()
    assert "cold start" not in log.read_text(), "the one before left nothing"
    kill(server)
    start_server("--size", str(8 << 20))
    assert "cold start" in log.read_text()


def test_without_knowing_what_was_served_the_start_is_cold(start_server, connect, runtime_dir):
    server = start_server()
    connect(server).hello().store(keys(0, 4))
    kill(server)
    (runtime_dir / "pools.json").write_text("[" * 100_000)
    server = start_server()
    assert connect(server).hello().probe(keys(0, 4)) == b"\0" * 4
