"""Two tenants on one server: nothing that one does reads, changes or reveals what the other has.

Everything goes over the raw protocol, with the numbers that the other tenant really uses. Each attempt has a twin that
shows that it would have worked for the owner: a server that answers nothing would pass the first half, too.
"""

from __future__ import annotations

import pytest

from maru_core.protocol import Code, Op
from tests.server.keyed import descriptor, own_address, tenants
from tests.server.raw import RawClient, Refused, keys, pack, u32, u64

pytestmark = pytest.mark.slow

KEYS = keys(0, 4)


@pytest.fixture(params=["ipc", "curve"])
def two(request, start_server, connect, runtime_dir) -> tuple[RawClient, RawClient]:
    """A victim with four objects and an intruder with none, in namespaces of their own."""
    if request.param == "ipc":
        server = start_server()
        victim = connect(server).hello(descriptor("red"))
        intruder = connect(server).hello(descriptor("blue"))
    else:
        known = tenants(runtime_dir)
        server = start_server("--url", f"tcp://{own_address()}:*", "--keys", str(runtime_dir / "keys"))
        victim = connect(server, known["red"]).hello(descriptor("red"))
        intruder = connect(server, known["blue"]).hello(descriptor("blue"))
    assert victim.store(KEYS, 5000) == bytes(4)
    return victim, intruder


def test_probe(two):
    victim, intruder = two
    assert intruder.probe(KEYS) == bytes(4)
    assert victim.probe(KEYS) == b"\1" * 4


def test_acquire(two):
    victim, intruder = two
    for leading in (False, True):
        lease, statuses, entries, generations, lengths = intruder.call(Op.ACQUIRE, 0, KEYS, leading)
        assert (lease, statuses, entries) == (0, bytes(4), b"\xff" * 16)
        assert not any(generations + lengths), "a length or generation would tell that there is something"
    lease, statuses, _ = victim.acquire(KEYS)
    assert lease
    assert statuses == b"\1" * 4


def test_delete(two):
    victim, intruder = two
    assert intruder.call(Op.DELETE, 0, KEYS) == [bytes(4)]
    assert victim.probe(KEYS) == b"\1" * 4
    assert victim.call(Op.DELETE, 0, KEYS) == [b"\1" * 4]
    assert victim.probe(KEYS) == bytes(4)


def test_reset(two):
    victim, intruder = two
    assert intruder.call(Op.RESET, 0) == [1]
    assert victim.probe(KEYS) == b"\1" * 4
    assert victim.call(Op.RESET, 0) == [1]
    victim.weights_epoch = 1
    assert victim.probe(KEYS) == bytes(4)


def test_reserve_of_the_same_keys(two):
    victim, intruder = two
    writing = keys(10, 2)
    _, theirs, _ = victim.reserve(writing)
    assert victim.reserve(writing)[0] == b"\2\2", "the owner is told that it is being written"
    assert victim.reserve(KEYS)[0] == b"\1" * 4, "and that it is there"
    statuses, entries, _ = intruder.reserve(KEYS + writing)
    assert statuses == bytes(6), "the intruder is told NEW, as if nobody had them"
    held = set(victim.acquire(KEYS)[2])
    assert not held & set(entries)
    assert not set(theirs) & set(entries)


def test_what_the_intruder_stores_under_the_same_key_is_another_object(two):
    victim, intruder = two
    mine = victim.acquire(KEYS)[2]
    assert intruder.store(KEYS, 700) == bytes(4)
    assert not set(intruder.acquire(KEYS)[2]) & set(mine)
    lengths = victim.call(Op.ACQUIRE, 0, KEYS, False)[4]
    assert lengths == u64(*[5000] * 4)


@pytest.mark.parametrize("op", [Op.COMMIT, Op.ABORT])
def test_commit_and_abort_of_the_others_reservation(two, op):
    victim, intruder = two
    _, entries, generations = victim.reserve(keys(20, 3))
    more = [b""] if op == Op.COMMIT else []
    assert intruder.call(op, pack(entries), pack(generations), *more) == [b"\1\1\1"]
    unused = intruder.call(op, pack([entry + 50 for entry in entries]), pack(generations), *more)
    assert unused == [b"\1\1\1"], "the same answer as for what does not exist"
    assert victim.probe(keys(20, 3)) == b"\2\2\2"
    assert victim.call(op, pack(entries), pack(generations), *more) == [bytes(3)]


def test_release_of_the_others_lease(two):
    victim, intruder = two
    lease, _, _ = victim.acquire(KEYS)
    for guess in (lease, lease + 1000):
        assert intruder.call(Op.RELEASE, u64(guess)) == [b"\1"]
    assert intruder.stats()["pools"][0]["leased"] == 4 * 8192
    assert victim.call(Op.RELEASE, u64(lease)) == [b"\0"]


def test_cancel_of_the_others_requests(two):
    victim, intruder = two
    victim.call(Op.ACQUIRE, 0, KEYS, False)
    acquired = victim.request
    victim.reserve(keys(30, 2))
    reserved = victim.request
    assert intruder.call(Op.CANCEL, u64(acquired, reserved, victim.request + 1)) == []
    assert victim.probe(keys(30, 2)) == b"\2\2"
    pool = victim.stats()["pools"][0]
    assert (pool["leased"], pool["reserved"]) == (4 * 8192, 2 * 4096)
    victim.call(Op.CANCEL, u64(acquired, reserved))
    pool = victim.stats()["pools"][0]
    assert (pool["leased"], pool["reserved"]) == (0, 0)


def test_stats_list_only_ones_own_namespace(two):
    victim, intruder = two
    intruder.store(keys(0, 1), 10)
    (own,) = intruder.stats()["namespaces"]
    assert (own["objects"], own["bytes"]) == (1, 10)
    (theirs,) = victim.stats()["namespaces"]
    assert theirs["objects"] == 4
    assert own["digest"] != theirs["digest"]
    intruder.session = 0
    assert intruder.stats()["namespaces"] == []


def test_the_others_session_cannot_be_used_by_a_neighbouring_number(two):
    victim, intruder = two
    for number in (victim.session ^ 1, victim.session + 1, 1):
        intruder.session = number
        with pytest.raises(Refused) as refused:
            intruder.probe(KEYS)
        assert refused.value.code == Code.NO_SESSION


def test_parents_lead_to_no_object_of_the_other(two):
    """A chain onto the other's key must not pin, reveal or unpin it."""
    victim, intruder = two
    statuses, entries, generations = intruder.reserve(keys(40, 2), 4096, keys(3, 1))
    assert statuses == bytes(2)
    assert intruder.commit(entries, generations) == bytes(2)
    assert intruder.acquire(keys(3, 1) + keys(40, 2), leading=True)[1] == bytes(3)
    assert victim.acquire(KEYS, leading=True)[1] == b"\1" * 4
    assert u32(victim.call(Op.ACQUIRE, 0, keys(40, 2), False)[2]) == [0xFFFFFFFF] * 2
