"""A client with enormous requests does not delay the others."""

from __future__ import annotations

import threading
import time

import msgpack
import pytest
import zmq

from maru_core.protocol import Op
from tests.server.raw import RawClient, keys, u64

pytestmark = pytest.mark.slow

MANY = 100_000
LONGEST_TURN = 0.010


def test_probes_are_answered_between_the_slices_of_a_large_batch(start_server, connect, context):
    """Several probes while each call lasts, of which every one is many slices.

    A turn is measured by the server itself, in processor time; the clock would also see the noise of the machine.
    """
    server = start_server("--size", str(MANY * 300), "--granule", "128", "--lease-share", "1.0")
    polite, greedy = connect(server).hello(), connect(server).hello()
    polite.store(keys(10**6, 64), 100)
    greedy.timeout = 60
    replies: list[object] = []
    calls: list[tuple[Op, float, float]] = []

    def call(op: Op, *arguments: object) -> list:
        began = time.monotonic()
        results = greedy.call(op, *arguments)
        calls.append((op, began, time.monotonic()))
        return results

    def bother() -> None:
        for tag in (b"", b"\2"):
            statuses, entries, generations = call(Op.RESERVE, 0, keys(0, MANY, tag), b"", 100)
            replies.append(statuses.count(0))
            replies.append(call(Op.COMMIT, entries, generations, b"")[0].count(0))
            replies.append(call(Op.PROBE, 0, keys(0, MANY, tag))[0].count(1))
            lease, found, *_ = call(Op.ACQUIRE, 0, keys(0, MANY, tag), True)
            replies.append(found.count(1))
            greedy.call(Op.RELEASE, u64(lease))
            with context.socket(zmq.DEALER) as rude:
                rude.connect(server.url)
                rude.send(msgpack.packb([Op.PROBE, 1, greedy.epoch, greedy.session, 0, bytes(32 * 1_000_000)]))
        replies.append(greedy.call(Op.RESET, 0))

    thread = threading.Thread(target=bother)
    thread.start()
    probes = []
    while thread.is_alive():
        started = time.monotonic()
        polite.probe(keys(10**6, 64))
        probes.append((started, time.monotonic()))
        time.sleep(0.001)
    thread.join()
    assert replies == [MANY] * 8 + [[1]]
    for op, began, ended in calls:
        # One could be read before the call is, and one be answered while its reply is under way.
        assert sum(began < sent and done < ended for sent, done in probes) > 3, op.name
    assert polite.stats()["server"]["longest_turn_s"] < LONGEST_TURN


def test_objects_of_many_lengths_are_made_room_for_a_few_at_a_time(start_server, connect):
    """Each of them is a search of its own, and here an eviction as well."""
    server = start_server("--size", str(3000 * 300), "--granule", "128")
    client = connect(server).hello()
    client.timeout = 60
    lengths = [128 * (1 + at % 7) - at % 100 for at in range(2000)]
    assert max(lengths) > min(lengths) > 0
    for tag in range(5):
        client.store(keys(0, 2000, bytes([tag])), u64(*lengths))
    assert client.stats()["counters"]["evicted"] > 2000
    assert client.stats()["server"]["longest_turn_s"] < LONGEST_TURN


def test_many_pipelined_large_requests_are_all_answered_or_refused(start_server, connect):
    server = start_server()
    greedy, polite = connect(server).hello(), connect(server).hello()
    requests = [greedy.send(Op.PROBE, 0, bytes(32 * 50_000)) for _ in range(10)]
    polite.call(Op.PING)
    answered = {greedy.receive()[0] for _ in requests}
    assert answered == set(requests)


def test_a_slice_boundary_changes_nothing(start_server, connect: RawClient):
    """3,000 keys are three slices: one chain, one lease, answered in order."""
    server = start_server("--size", str(4000 * 300), "--granule", "128")
    client = connect(server).hello()
    statuses, entries, generations = client.reserve(keys(0, 3000), 100, keys(9999, 1))
    assert statuses == bytes(3000)
    assert client.commit(entries, generations) == bytes(3000)
    assert client.probe(keys(1, 3000)) == b"\1" * 2999 + b"\0"
    _, found, where = client.acquire(keys(0, 1500) + keys(5000, 1) + keys(1500, 1500), leading=True)
    assert found == b"\1" * 1500 + bytes(1501)
    assert where[:1500] == entries[:1500]
