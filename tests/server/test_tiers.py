"""Servers over several pools, and real bytes in them."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from maru_core.protocol import Op, Presence
from maru_core.protocol.messages import PoolDescriptor
from tests.server.fakes import FileRegion
from tests.server.raw import RawClient, key, keys, u64
from tests.server.test_restart import kill
from tests.waiting import NEVER, eventually

pytestmark = pytest.mark.slow

GRANULE = 4096
READY = bytes([Presence.READY])
#: A megabyte above, eight below.
TIERS = ("--size", str(1 << 20), "--size", str(8 << 20))


class Bytes:
    """The pools as a client maps them; every object says in each of its 16 bytes whose it is."""

    def __init__(self, pools: list[PoolDescriptor]) -> None:
        self.pools = pools
        self.regions = [FileRegion(pool) for pool in pools]

    def place(self, entry: int) -> tuple[int, int]:
        for number, pool in enumerate(self.pools):
            if pool.entry_base <= entry < pool.entry_base + pool.entry_count:
                return number, pool.data_at(entry)
        raise AssertionError(f"entry {entry} is in no pool")

    def write(self, entry: int, number: int) -> None:
        pool, at = self.place(entry)
        self.regions[pool].buffer[at : at + GRANULE] = number.to_bytes(16, "little") * (GRANULE // 16)

    def check(self, entry: int, number: int) -> int:
        pool, at = self.place(entry)
        found = bytes(self.regions[pool].buffer[at : at + GRANULE])
        assert found == number.to_bytes(16, "little") * (GRANULE // 16), "these are other bytes"
        return pool

    def close(self) -> None:
        for region in self.regions:
            region.close()


def store(client: RawClient, memory: Bytes, first: int, count: int, parent: bytes = b"") -> None:
    statuses, entries, generations = client.reserve(keys(first, count), GRANULE, parent)
    assert not any(statuses)
    for at, entry in enumerate(entries):
        memory.write(entry, first + at)
    assert client.commit(entries, generations) == bytes(count)


def read(client: RawClient, memory: Bytes, first: int, count: int) -> list[int]:
    """In which pools they are, all of which must be there, with their bytes."""
    pools = []
    for start in range(first, first + count, 64):  # fewer than one session may lease of the upper pool
        part = min(64, first + count - start)
        lease, statuses, entries = client.acquire(keys(start, part))
        assert statuses == READY * part, "a miss"
        pools += [memory.check(entry, start + at) for at, entry in enumerate(entries)]
        assert client.call(Op.RELEASE, u64(lease)) == [b"\0"]
    return pools


def moving(client: RawClient) -> int:
    pools = client.stats()["pools"]
    for pool in pools:
        assert pool["used"] + pool["free"] + pool["reserved"] + pool["quarantined"] == pool["capacity"]
    return sum(pool["moving"] for pool in pools)


def counters(client: RawClient) -> dict[str, int]:
    return client.stats()["counters"]


@pytest.fixture
def mapped():
    made = []

    def new(client: RawClient) -> Bytes:
        made.append(Bytes(client.pools))
        return made[-1]

    yield new
    for memory in made:
        memory.close()


def test_objects_move_down_under_load_and_none_is_missed(start_server, connect, mapped):
    """One chain, longer than the upper pool, while others read all over it."""
    server = start_server(*TIERS)
    client, reader = connect(server).hello(), connect(server).hello()
    memory = mapped(client)
    rng = random.Random(1)
    stored = 0
    while stored < 1200:
        store(client, memory, stored, 8, key(stored - 1) if stored else bytes(32))
        stored += 8
        first = rng.randrange(stored)
        read(reader, memory, first, min(16, stored - first))
        if stored % 80 == 0:
            time.sleep(0.02)
    assert client.probe(keys(0, stored)) == READY * stored
    eventually(lambda: moving(client) == 0)
    assert counters(client)["demoted"] > 10
    assert counters(client)["evicted"] == counters(client)["internal_errors"] == 0
    pools = read(client, memory, 0, stored)
    assert set(pools) == {0, 1}
    upper, lower = client.stats()["pools"]
    assert upper["demoted_out"] == lower["demoted_in"] == counters(client)["demoted"]
    assert upper["hits"] + lower["hits"] == counters(client)["hits"]
    assert upper["free"] > 0, "room for the next ones"


def test_only_the_lower_pool_evicts(start_server, connect, mapped):
    server = start_server(*TIERS)
    client = connect(server).hello()
    memory = mapped(client)
    for first in range(0, 4800, 8):
        store(client, memory, first, 8)
        if first % 400 == 0:
            read(client, memory, max(0, first - 100), 100 if first else 8)
            time.sleep(0.01)
    stats = client.stats()
    upper, lower = stats["pools"]
    assert lower["evicted"] == stats["counters"]["evicted"] * GRANULE > 0
    assert upper["evicted"] == 0
    assert counters(client)["demoted"] > 10


def test_without_demotion_nothing_moves(start_server, connect, mapped):
    server = start_server(*TIERS, "--no-demote")
    client = connect(server).hello()
    memory = mapped(client)
    for first in range(0, 3200, 32):
        store(client, memory, first, 32)
    assert counters(client)["demoted"] == 0
    assert all(pool["evicted"] > 0 for pool in client.stats()["pools"])


def test_what_is_read_often_is_copied_up(start_server, connect, mapped):
    server = start_server(*TIERS, "--promote", "--no-demote")
    client = connect(server).hello()
    memory = mapped(client)
    room = client.pools[0].entry_count
    store(client, memory, 0, room)
    store(client, memory, 5000, 8)
    assert read(client, memory, 5000, 8) == [1] * 8
    client.call(Op.DELETE, 0, keys(0, 20))
    read(client, memory, 5000, 8)
    eventually(lambda: counters(client)["promoted"] == 8)
    assert read(client, memory, 5000, 8) == [0] * 8
    assert client.stats()["pools"][0]["replicas"] == 8


def test_a_server_that_is_killed_while_objects_move_loses_none(start_server, connect, mapped):
    server = start_server(*TIERS)
    client = connect(server).hello()
    memory = mapped(client)
    stored = 0
    for life in range(4):
        for _ in range(40):
            store(client, memory, stored, 8)
            stored += 8
        time.sleep(0.003 * life)
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
        server = start_server(*TIERS)
        assert client.resume(server.url)
        assert client.probe(keys(0, stored)) == READY * stored
        read(client, memory, 0, stored)
    eventually(lambda: moving(client) == 0)
    used = sum(pool["used"] for pool in client.stats()["pools"])
    assert used == stored * GRANULE, "something is there twice"
    assert "half_moved" in Path(server.folder / "server.log").read_text()
    kill(server)


def test_a_server_ends_while_objects_move(start_server, connect, mapped):
    server = start_server(*TIERS)
    client = connect(server).hello()
    memory = mapped(client)
    for first in range(0, 400, 8):
        store(client, memory, first, 8)
    server.process.terminate()
    assert server.process.wait(NEVER) == 0
    assert not list(server.folder.glob("pool-*"))
