"""Low-level calls against a server that may spoil its replies."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from maru_core.client import MaruHandler
from maru_core.errors import ProtocolError, StaleEpoch, Unavailable
from maru_core.protocol import CommitStatus, Op, Presence, ReserveStatus
from maru_core.protocol.codec import pack_u32
from tests.client.fake_server import FakeServer
from tests.waiting import eventually


def keys(count: int, start: int = 0) -> list[bytes]:
    return [index.to_bytes(32, "big") for index in range(start + 1, start + count + 1)]


def put(handler: MaruHandler, some: list[bytes], length: int = 100) -> None:
    grants = handler.reserve(some, length)
    for index in grants.new:
        handler.view(grants.epoch, grants.entries[index], length)[:] = some[index][-1:] * length
    assert handler.commit(grants) == bytes([CommitStatus.OK]) * len(grants.new)


def spoil_once(server: FakeServer, op: Op, change: Any) -> None:
    """Change the next reply to ``op`` only."""
    done = []

    def spoil(request: list[Any], reply: list[Any]) -> list[Any] | None:
        if request[0] != op or done:
            return reply
        done.append(1)
        return change(reply)

    server.spoil = spoil


def drop(reply: list[Any]) -> None:
    return None


def test_reserve_commit_acquire_release(fake: FakeServer, handler: MaruHandler) -> None:
    some = keys(5)
    put(handler, some)
    lease = handler.acquire(some + keys(1, 100), leading=True)
    assert lease.leading == 5
    assert lease.statuses == bytes([Presence.READY] * 5 + [Presence.ABSENT])
    for index in range(5):
        view = handler.view(lease.epoch, lease.entries[index], lease.lengths[index])
        assert bytes(view) == some[index][-1:] * 100
    verdicts = handler.verify(lease.epoch, lease.entries[:5], lease.generations[:5], lease.lengths[:5])
    assert verdicts == [True] * 5
    handler.release(lease)
    handler.release(lease)
    eventually(lambda: not fake.leases)


def test_verify_detects_reuse_and_wrong_length(fake: FakeServer, handler: MaruHandler) -> None:
    some = keys(3)
    put(handler, some)
    lease = handler.acquire(some, leading=False)
    located = handler.adopt(lease.epoch, lease.entries, lease.generations, lease.lengths)
    assert located.verify() == [True, True, True]
    fake.damage(some[1])
    assert located.verify() == [True, False, True]
    assert handler.verify(lease.epoch, lease.entries, lease.generations, [100, 100, 99]) == [True, False, False]
    with pytest.raises(StaleEpoch):
        handler.adopt(lease.epoch + 1, lease.entries, lease.generations, lease.lengths)


def test_statuses_tell_what_not_to_copy(handler: MaruHandler) -> None:
    put(handler, keys(1))
    first = handler.reserve(keys(2), [100, 100])
    again = handler.reserve(keys(3), 100)
    assert first.statuses == bytes([ReserveStatus.PRESENT, ReserveStatus.NEW])
    assert again.statuses == bytes([ReserveStatus.PRESENT, ReserveStatus.BUSY, ReserveStatus.NEW])
    assert list(again.new) == [2]
    handler.abort(first)
    handler.abort(again)


def shorter(column: int) -> Any:
    return lambda reply: [*reply[: 3 + column], reply[3 + column][:-4], *reply[4 + column :]]


def longer(column: int) -> Any:
    return lambda reply: [*reply[: 3 + column], reply[3 + column] + bytes(4), *reply[4 + column :]]


@pytest.mark.parametrize("change", [shorter, longer])
@pytest.mark.parametrize("column", [0, 1, 2])
def test_a_reserve_reply_of_another_length_voids_the_batch(
    fake: FakeServer, handler: MaruHandler, change: Any, column: int
) -> None:
    spoil_once(fake, Op.RESERVE, change(column))
    with pytest.raises(ProtocolError):
        handler.reserve(keys(8), 100)
    eventually(lambda: not fake.held)
    put(handler, keys(8))


@pytest.mark.parametrize("change", [shorter, longer])
@pytest.mark.parametrize("column", [1, 2, 3, 4])
def test_an_acquire_reply_of_another_length_voids_the_batch(
    fake: FakeServer, handler: MaruHandler, change: Any, column: int
) -> None:
    put(handler, keys(8))
    spoil_once(fake, Op.ACQUIRE, change(column))
    with pytest.raises(ProtocolError):
        handler.acquire(keys(8), leading=True)
    eventually(lambda: not fake.leases)


@pytest.mark.parametrize("change", [shorter, longer])
@pytest.mark.parametrize("op", [Op.PROBE, Op.DELETE])
def test_a_presence_column_of_another_length_is_refused(
    fake: FakeServer, handler: MaruHandler, op: Op, change: Any
) -> None:
    spoil_once(fake, op, change(0))
    call = handler.probe if op is Op.PROBE else handler.delete_keys
    with pytest.raises(ProtocolError):
        call(keys(8))


@pytest.mark.parametrize("change", [shorter, longer])
def test_a_commit_reply_of_another_length_voids_the_batch(fake: FakeServer, handler: MaruHandler, change: Any) -> None:
    grants = handler.reserve(keys(8), 100)
    spoil_once(fake, Op.COMMIT, change(0))
    with pytest.raises(ProtocolError):
        handler.commit(grants)
    eventually(lambda: not fake.held)


@pytest.mark.parametrize("entry", [10**6, 0xFFFF_FFFF])
@pytest.mark.parametrize("place", [0, 3])
def test_an_entry_outside_the_pool_voids_the_batch(
    fake: FakeServer, handler: MaruHandler, entry: int, place: int
) -> None:
    def misplace(reply: list[Any]) -> list[Any]:
        entries = [0, 1, 2, 3]
        entries[place] = entry
        return [*reply[:4], pack_u32(entries), *reply[5:]]

    spoil_once(fake, Op.RESERVE, misplace)
    with pytest.raises(ProtocolError, match="outside the pools"):
        handler.reserve(keys(4), 100)
    eventually(lambda: not fake.held)


def test_an_object_that_reaches_over_the_end_of_the_pool_voids_the_batch(
    fake: FakeServer, handler: MaruHandler
) -> None:
    last = fake._pool.region.descriptor.entry_count - 1
    spoil_once(fake, Op.RESERVE, lambda reply: [*reply[:4], pack_u32([last]), reply[5]])
    with pytest.raises(ProtocolError, match="outside the pools"):
        handler.reserve(keys(1), 4097)


def test_an_unknown_status_voids_the_batch(fake: FakeServer, handler: MaruHandler) -> None:
    spoil_once(fake, Op.RESERVE, lambda reply: [*reply[:3], b"\x09", *reply[4:]])
    with pytest.raises(ProtocolError, match="unknown status"):
        handler.reserve(keys(1), 100)


def test_a_swallowed_reserve_reply_leaks_nothing_and_a_retry_gets_the_pages(
    fake: FakeServer, handler: MaruHandler
) -> None:
    spoil_once(fake, Op.RESERVE, drop)
    start = time.monotonic()
    with pytest.raises(Unavailable):
        handler.reserve(keys(4), 100)
    assert time.monotonic() - start < 5
    eventually(lambda: handler.is_up)
    grants = handler.reserve(keys(4), 100)
    assert grants.statuses == bytes([ReserveStatus.NEW] * 4)
    assert len(fake.held) == 4
    handler.commit(grants)


def test_a_swallowed_commit_reply_is_a_failed_store_without_a_second_copy(
    fake: FakeServer, handler: MaruHandler
) -> None:
    grants = handler.reserve(keys(2), 100)
    spoil_once(fake, Op.COMMIT, drop)
    with pytest.raises(Unavailable):
        handler.commit(grants)
    eventually(lambda: fake.count(Op.ABORT) == 1)
    assert len(fake.stored) == 2
    assert handler.reserve(keys(2), 100).statuses == bytes([ReserveStatus.PRESENT] * 2)


def test_a_swallowed_acquire_reply_leaks_no_lease(fake: FakeServer, handler: MaruHandler) -> None:
    put(handler, keys(2))
    spoil_once(fake, Op.ACQUIRE, drop)
    with pytest.raises(Unavailable):
        handler.acquire(keys(2), leading=True)
    assert fake.count(Op.ACQUIRE) == 1
    eventually(lambda: not fake.leases)


@pytest.mark.slow
def test_a_swallowed_cancellation_is_sent_again(fake: FakeServer, handler: MaruHandler) -> None:
    """The server must confirm a cancellation; here the first two are lost before it sees them."""
    original, lost = fake._cancel, []

    def cancel(request_id: int, blob: bytes) -> list[Any]:
        if len(lost) < 2:
            lost.append(request_id)
            return []
        return original(request_id, blob)

    fake._cancel = cancel  # type: ignore[method-assign]

    def spoil(request: list[Any], reply: list[Any]) -> list[Any] | None:
        return None if request[0] == Op.RESERVE or request[1] in lost else reply

    fake.spoil = spoil
    with pytest.raises(Unavailable):
        handler.reserve(keys(4), 100)
    eventually(lambda: not fake.held)


def test_the_cancellation_reaches_the_server_before_anything_newer_of_the_thread(
    fake: FakeServer, handler: MaruHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that the background thread sends may come too late for a retry, so it does not count here."""
    monkeypatch.setattr(handler._link, "defer", lambda *_: None)
    spoil_once(fake, Op.RESERVE, drop)
    with pytest.raises(Unavailable):
        handler.reserve(keys(4), 100, timeout=0.05)
    assert handler.reserve(keys(4), 100).statuses == bytes([ReserveStatus.NEW] * 4)
    ops = [request[0] for request in fake.requests if request[0] in (Op.RESERVE, Op.CANCEL)]
    assert ops == [Op.RESERVE, Op.CANCEL, Op.RESERVE]


@pytest.mark.slow
def test_while_the_server_is_silent_calls_fail_at_once(fake: FakeServer, handler: MaruHandler) -> None:
    fake.spoil = lambda request, reply: None
    with pytest.raises(Unavailable):
        handler.probe(keys(1))
    start = time.monotonic()
    for _ in range(50):
        with pytest.raises(Unavailable):
            handler.probe(keys(1), timeout=30)
    assert time.monotonic() - start < 15, "all together wait for less than one deadline"
    fake.spoil = lambda request, reply: reply
    eventually(lambda: handler.is_up)
    assert fake.sessions == 1, "the session is the same after a pause"
    assert handler.probe(keys(1)) == bytes([Presence.ABSENT])


def test_pending_acquire(fake: FakeServer, handler: MaruHandler) -> None:
    put(handler, keys(3))
    pending = handler.submit_acquire(keys(4), leading=True)
    lease = None
    while lease is None:
        lease = pending.poll(0.1)
    assert lease.leading == 3
    with pytest.raises(Unavailable):
        pending.poll()
    handler.release(lease)
    eventually(lambda: not fake.leases)


def test_a_pending_acquire_does_not_disturb_other_calls_of_its_thread(fake: FakeServer, handler: MaruHandler) -> None:
    put(handler, keys(3))
    pending = handler.submit_acquire(keys(3), leading=True)
    assert handler.probe(keys(3)) == bytes([Presence.READY] * 3)
    second = handler.submit_acquire(keys(2), leading=True)
    lease = second.poll(1.0)
    assert lease is not None
    assert lease.leading == 2
    lease = pending.poll(1.0)
    assert lease is not None
    assert lease.leading == 3


@pytest.mark.parametrize("how", ["cancel", "drop"])
def test_a_pending_acquire_that_is_given_up_leases_nothing(fake: FakeServer, handler: MaruHandler, how: str) -> None:
    put(handler, keys(3))
    spoil_once(fake, Op.ACQUIRE, drop)
    pending = handler.submit_acquire(keys(3), leading=True)
    assert pending.poll(0.02) is None
    eventually(lambda: len(fake.leases) == 1)
    if how == "cancel":
        pending.cancel()
        pending.cancel()
    del pending
    eventually(lambda: not fake.leases)
    assert handler.acquire(keys(3), leading=True).leading == 3


def test_batches_over_the_limit_go_as_several_messages(fake: FakeServer, handler: MaruHandler) -> None:
    """The fake takes messages of 1 MiB: 14,549 keys with parents and lengths."""
    many = keys(40_000)
    put(handler, many[20_000:20_003])
    found = handler.probe(many, timeout=5)
    assert fake.count(Op.PROBE) == 3
    assert len(found) == 40_000
    assert [index for index, status in enumerate(found) if status] == [20_000, 20_001, 20_002]
    lease = handler.acquire(many[19_990:], leading=False, timeout=5)
    assert fake.count(Op.ACQUIRE) == 2
    assert len(lease.entries) == len(lease.lengths) == len(lease.statuses) == 20_010
    assert lease.entries[10] == fake.stored[many[20_000]][0]


def test_leading_over_several_messages_stops_at_the_first_gap(fake: FakeServer, handler: MaruHandler) -> None:
    put(handler, keys(2))
    lease = handler.acquire(keys(40_000), leading=True, timeout=5)
    assert fake.count(Op.ACQUIRE) == 1
    assert lease.leading == 2
    assert len(lease.statuses) == len(lease.entries) == 40_000


@pytest.mark.slow
def test_a_batch_that_fails_half_way_gives_back_what_it_took(fake: FakeServer, handler: MaruHandler) -> None:
    many = keys(20_000)
    count = []

    def spoil(request: list[Any], reply: list[Any]) -> list[Any] | None:
        if request[0] in (Op.RESERVE, Op.ACQUIRE):
            count.append(1)
            return None if len(count) == 2 else reply
        return reply

    fake.spoil = spoil
    with pytest.raises(Unavailable):
        handler.reserve(many, 100, timeout=0.5)
    eventually(lambda: not fake.held)
    eventually(lambda: handler.is_up)
    put(handler, many[:3])
    count.clear()
    with pytest.raises(Unavailable):
        handler.acquire(many, leading=False, timeout=0.5)
    eventually(lambda: not fake.leases)


def test_wrong_keys_are_refused_before_they_are_sent(fake: FakeServer, handler: MaruHandler) -> None:
    before = len(fake.requests)
    for wrong in ([b"x" * 31, b"y" * 33], [b""]):
        with pytest.raises(ProtocolError, match="32 bytes"):
            handler.probe(wrong)
    with pytest.raises(ProtocolError, match="one of each"):
        handler.reserve(keys(2), [1])
    assert not [request for request in fake.requests[before:] if request[0] in (Op.PROBE, Op.RESERVE)]


def test_a_chain_needs_one_parent_only(fake: FakeServer, handler: MaruHandler) -> None:
    many = keys(20_000)
    handler.abort(handler.reserve(many, 4096, b"p" * 32, timeout=5))
    first, second = [request for request in fake.requests if request[0] == Op.RESERVE]
    assert first[6] == b"p" * 32
    assert second[6] == first[5][-32:], "the second message goes on where the first ended"
    with pytest.raises(ProtocolError, match="32 bytes"):
        handler.reserve(many[:2], 4096, b"p" * 64)


def test_no_keys_need_no_message(fake: FakeServer, handler: MaruHandler) -> None:
    assert handler.probe([]) == b""
    assert handler.acquire([], leading=True).leading == 0
    assert handler.commit(handler.reserve([], 1)) == b""
    lease = handler.submit_acquire([], leading=True).poll()
    assert lease is not None
    assert lease.leading == 0
    assert not fake.count(Op.PROBE) + fake.count(Op.ACQUIRE) + fake.count(Op.RESERVE) + fake.count(Op.COMMIT)


@pytest.mark.slow
def test_grants_of_an_earlier_server_are_never_used(serve: Any, connect: Any) -> None:
    first = serve(epoch=7)
    handler = connect()
    grants = handler.reserve(keys(2), 100)
    put(handler, keys(1, 50))
    lease = handler.acquire(keys(1, 50), leading=True)
    first.stop()
    second = serve(epoch=8)
    eventually(lambda: handler.is_up and handler.epoch == 8)
    with pytest.raises(StaleEpoch):
        handler.commit(grants)
    with pytest.raises(StaleEpoch):
        handler.view(grants.epoch, grants.entries[0], 100)
    with pytest.raises(StaleEpoch):
        handler.verify(lease.epoch, lease.entries, lease.generations, lease.lengths)
    handler.abort(grants)
    handler.release(lease)
    handler.ping()
    time.sleep(0.05)
    assert not second.count(Op.COMMIT) + second.count(Op.ABORT) + second.count(Op.RELEASE)


def test_a_request_under_an_old_epoch_opens_a_new_session(fake: FakeServer, handler: MaruHandler) -> None:
    fake.epoch = 99
    with pytest.raises(StaleEpoch):
        handler.probe(keys(1))
    eventually(lambda: handler.is_up and handler.epoch == 99)
    assert fake.sessions == 2


def test_an_answer_under_another_epoch_is_no_answer(fake: FakeServer, handler: MaruHandler) -> None:
    spoil_once(fake, Op.PROBE, lambda reply: [reply[0], 1234, *reply[2:]])
    with pytest.raises(StaleEpoch):
        handler.probe(keys(1))
    eventually(lambda: handler.is_up)


@pytest.mark.slow
def test_the_weights_epoch_survives_a_restart(serve: Any, connect: Any) -> None:
    first = serve(epoch=7)
    handler = connect()
    assert handler.weights_epoch == 0
    assert handler.reset() == 1
    assert handler.reset() == 2
    first.stop()
    second = serve(epoch=8)
    eventually(lambda: handler.is_up and handler.epoch == 8)
    assert second.weights_epoch == 2, "others with old weights must not share with this one"
    put(handler, keys(1))


def test_calls_from_many_threads_use_their_own_sockets(fake: FakeServer, handler: MaruHandler) -> None:
    put(handler, keys(3))
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(30):
                assert handler.probe(keys(4)) == bytes([1, 1, 1, 0])
        except BaseException as error:  # noqa: BLE001 - handed to the test's own thread
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_closed_handler_says_so(fake: FakeServer, handler: MaruHandler) -> None:
    handler.close()
    handler.close()
    assert fake.goodbyes == 1
    with pytest.raises(Unavailable, match="closed"):
        handler.probe(keys(1))
