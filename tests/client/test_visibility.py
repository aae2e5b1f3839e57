"""Hosts that are not coherent with each other: every path, over a model that shows stale bytes wherever it may."""

from __future__ import annotations

import random
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from attrs import define

from maru_core.client import MaruHandler
from maru_core.client.channel import Channel
from maru_core.config import MaruConfig
from maru_core.contracts import BackendProvision
from maru_core.host import PluginHost
from maru_core.namespace import Namespace
from maru_core.plugin import hookimpl
from maru_core.protocol import Op
from maru_core.protocol.codec import decode
from tests.incoherent import NAME, IncoherentBackend
from tests.waiting import eventually

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
NAMESPACE = Namespace.of({"model": "test", "tokens": 256})


def key(number: int) -> bytes:
    return bytes([number]) * 32


class Fabric:
    """A server and any number of hosts on one memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hosts: list[Machine] = []
        self._servers: list[subprocess.Popen[str]] = []
        self.serve()

    def serve(self) -> None:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.incoherent", str(self.folder)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._servers.append(process)
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], 20)[0], "the server did not come up"
        self.url = process.stdout.readline().strip()

    def kill_server(self) -> None:
        self._servers[-1].send_signal(signal.SIGKILL)
        self._servers[-1].wait()

    def host(self, verify: str = "full") -> Machine:
        backend = IncoherentBackend()
        config = MaruConfig(server_url=self.url, verify=verify, request_timeout=5.0)
        handler = MaruHandler.connect(config, NAMESPACE, host=PluginHost.with_plugins({NAME: backend}))
        self.hosts.append(Machine(handler, backend))
        backend.trace.clear()
        return self.hosts[-1]

    def end(self) -> None:
        for host in self.hosts:
            host.handler.close()
        for process in self._servers:
            process.terminate()
            process.communicate(timeout=20)


@define
class Machine:
    """A host with one engine on it."""

    handler: MaruHandler
    backend: IncoherentBackend

    def memory(self, entry: int, length: int) -> bytes:
        """Bytes of an object as they are in the memory."""
        for host in self.backend.hosts.values():
            pool = host.descriptor
            if pool.entry_base <= entry < pool.entry_base + pool.entry_count:
                return host.memory(pool.data_at(entry), length)
        raise AssertionError(entry)

    def extents(self, entries: Any, lengths: Any) -> set[tuple[int, int]]:
        """Pool and number of every cache line of these objects."""
        lines = set()
        for entry, length in zip(entries, lengths, strict=True):
            for number, host in self.backend.hosts.items():
                pool = host.descriptor
                if pool.entry_base <= entry < pool.entry_base + pool.entry_count:
                    start = pool.data_at(entry)
                    lines |= {(number, line) for line in range(start // 64, -(-(start + length) // 64))}
        return lines


@pytest.fixture
def fabric(maru_runtime_dir: Path) -> Iterator[Fabric]:
    made = Fabric(maru_runtime_dir)
    yield made
    made.end()


def read_back(machine: Machine, name: bytes) -> bytes | None:
    found = machine.handler.retrieve(name)
    if found is None:
        return None
    with found:
        data = bytes(found.view)
        assert found.verify()
    return data


# -- bytes: whatever is stored on one host is what another one reads ---------------------------------------------------


def store(machine: Machine, number: int, data: bytes) -> None:
    assert machine.handler.store(key(number), data).name == "STORED"


def batch_store(machine: Machine, number: int, data: bytes) -> None:
    machine.handler.batch_store([b"beside", key(number)], [b"x" * 100, data])


def allocation(machine: Machine, number: int, data: bytes) -> None:
    with machine.handler.alloc(key(number), len(data)) as room:
        room.view[:] = data


def columns(machine: Machine, number: int, data: bytes) -> None:
    grants = machine.handler.reserve([machine.handler.key(key(number))], len(data))
    machine.handler.room(grants, 0)[:] = data
    machine.handler.commit(grants, checksums=True)


def viewed(machine: Machine, number: int, data: bytes) -> None:
    """As programs did before ``room`` was there."""
    grants = machine.handler.reserve([machine.handler.key(key(number))], len(data))
    machine.handler.view(grants.epoch, grants.entries[0], grants.lengths[0])[:] = data
    machine.handler.commit(grants)


def retrieve(machine: Machine, number: int) -> bytes | None:
    return read_back(machine, key(number))


def located(machine: Machine, number: int) -> bytes | None:
    """As an engine's worker reads under the lease of its scheduler."""
    handler = machine.handler
    pending = handler.submit_acquire([handler.key(key(number))], leading=True)
    lease = None
    while lease is None:
        lease = pending.poll(1.0)
    if not lease.ids:
        return None
    found = handler.adopt(lease.epoch, lease.entries, lease.generations, lease.lengths, lease.keys)
    with found.reading():
        data = bytes(found.view(0))
    assert found.check() == found.verify() == [True]
    handler.release(lease)
    return data


def leased(machine: Machine, number: int) -> bytes | None:
    handler = machine.handler
    lease = handler.acquire([handler.key(key(number))], leading=False)
    if not lease.ids:
        return None
    data = bytes(handler.view(lease.epoch, lease.entries[0], lease.lengths[0]))
    assert handler.verify(lease.epoch, lease.entries, lease.generations, lease.lengths) == [True]
    handler.release(lease)
    return data


WRITERS = [store, batch_store, allocation, columns, viewed]
READERS = [retrieve, located, leased]


@pytest.mark.parametrize("writer", WRITERS)
def test_every_way_to_write_is_seen_by_every_way_to_read(fabric: Fabric, writer: Callable[..., None]) -> None:
    """Over and over on the same pages, so that every cache has something old to show."""
    one, two = fabric.host(), fabric.host()
    chance = random.Random(writer.__name__)
    for reader in READERS * 6:
        data = chance.randbytes(chance.choice([1, 63, 64, 4096, 9000]))
        source, target = chance.sample([one, two], 2)
        writer(source, 1, data)
        assert reader(target, 1) == data
        assert reader(source, 1) == data
        if chance.random() < 0.5:
            chance.choice([one, two]).backend.evict()
        target.handler.batch_delete([key(1), b"beside"])
        assert reader(source, 1) is None
    for machine in (one, two):
        client = machine.handler.stats()["client"]
        assert (client["checksum_mismatches"], client["header_mismatches"]) == (0, 0)


def test_many_objects_of_both_pools(fabric: Fabric) -> None:
    """More than the first pool takes: a batch that goes on in the second one."""
    one, two = fabric.host(), fabric.host()
    names = [key(number) for number in range(60)]
    for round_ in range(3):
        data = [bytes([number + round_ + 1]) * 25_000 for number in range(60)]
        assert {result.name for result in one.handler.batch_store(names, data)} == {"STORED"}
        found = two.handler.batch_retrieve(names)
        assert [item and bytes(item.view) for item in found] == data
        assert {pool for what, pool, *_ in two.backend.trace if what == "acquire"} == {0, 1}
        for item in found:
            assert item is not None
            item.close()
        two.backend.trace.clear()
        assert all(two.handler.batch_delete(names))
        eventually(lambda: not any(pool["used"] for pool in two.handler.stats()["pools"]))


def test_a_server_on_another_host_takes_over(fabric: Fabric) -> None:
    """Its cache knows nothing of what the first one wrote."""
    one = fabric.host()
    for number in range(5):
        store(one, number, bytes([number]) * 5000)
    fabric.kill_server()
    fabric.serve()
    three = fabric.host()
    assert [retrieve(three, number) for number in range(5)] == [bytes([number]) * 5000 for number in range(5)]
    assert [pool["quarantined"] for pool in three.handler.stats()["pools"]] == [0, 0]  # no header was torn
    store(three, 9, b"new" * 1000)
    assert retrieve(fabric.host(), 9) == b"new" * 1000


def test_a_header_that_has_changed_is_seen(fabric: Fabric) -> None:
    """What a look at a header proves is about the memory, not about an old line of it."""
    one, two = fabric.host(), fabric.host()
    store(one, 1, b"first" * 1000)
    handler = two.handler
    lease = handler.acquire([handler.key(key(1))], leading=False)
    found = handler.adopt(lease.epoch, lease.entries, lease.generations, lease.lengths, lease.keys)
    assert found.verify() == found.check() == [True]
    handler.release(lease)
    assert one.handler.delete(key(1))
    while retrieve(two, 1) is not None:
        pass
    store(one, 2, b"second" * 800)
    assert found.verify() == found.check() == [False]
    # Whether the second object took the first one's place, which a check without a lease counts, is a race.
    before = handler.stats()["client"]["header_mismatches"]
    assert found.check_again(0) is False
    assert handler.stats()["client"]["header_mismatches"] == before


# -- pages that are given up: no cache writes to them later ------------------------------------------------------------


class Broken(bytes):
    pass


def given_back(machine: Machine, size: int) -> None:
    room = machine.handler.alloc(b"given back", size)
    room.view[:] = b"\xaa" * size
    room.abort()


def raised(machine: Machine, size: int) -> None:
    def fill() -> None:
        with machine.handler.alloc(b"raised", size) as room:
            room.view[:] = b"\xaa" * size
            raise OSError("in between")

    with suppress(OSError):
        fill()


def raw(machine: Machine, size: int) -> None:
    grants = machine.handler.reserve([machine.handler.key(b"raw")], size)
    machine.handler.room(grants, 0)[:] = b"\xaa" * size
    machine.handler.abort(grants)


def closed(machine: Machine, size: int) -> None:
    """Nobody ends the reservation: closing the handler does."""
    grants = machine.handler.reserve([machine.handler.key(b"closed")], size)
    machine.handler.room(grants, 0)[:] = b"\xaa" * size
    machine.handler.close()


def not_stored(machine: Machine, size: int) -> None:
    """The copy of a batch fails half-way."""
    handler = machine.handler
    room = handler.room

    def torn(grants: Any, index: int) -> memoryview:
        room(grants, index)[:] = b"\xaa" * size
        raise OSError("torn")

    handler.room = torn  # type: ignore[method-assign]
    with pytest.raises(OSError, match="torn"):
        handler.batch_store([b"not stored"], [b"\xaa" * size])


@pytest.mark.parametrize("give_up", [given_back, raised, raw, closed, not_stored])
def test_pages_that_were_given_up_are_not_written_behind_their_next_owners_back(
    fabric: Fabric, give_up: Callable[[Machine, int], None]
) -> None:
    one, two, three = fabric.host(), fabric.host(), fabric.host()
    pool = two.handler.stats()["pools"][0]["capacity"]
    # The second pool is full, and stays so; in the first one no other pages would do.
    for number in (8, 9):
        store(three, number, bytes(900_000))
    with three.handler.retrieve(key(9)) as kept:  # type: ignore[union-attr]
        assert kept is not None
        assert three.handler.delete(key(8))
        size = 600_000
        assert pool < 2 * size
        give_up(one, size)
        data = bytes(range(250)) * 2400
        while two.handler.store(key(1), data).name != "STORED":  # until the server has heard of it
            pass
        one.backend.evict()
        assert retrieve(three, 1) == data


# -- order -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Callable[[Machine], list[tuple[Any, ...]]]:
    """Messages among the barriers of a host: ``("send", op, memory)``, ``("reply", op)``."""

    def trace(machine: Machine) -> list[tuple[Any, ...]]:
        ops: dict[int, Op] = {}
        events: list[tuple[Any, ...]] = machine.backend.trace  # type: ignore[assignment]
        send, receive = Channel.send, Channel.receive

        def sending(self: Channel, frame: bytes) -> None:
            request = decode(frame)
            ops[request[1]] = Op(request[0])
            if request[0] in (Op.COMMIT, Op.ABORT, Op.ACQUIRE):
                memory = {number: host.memory(0, 1 << 20) for number, host in machine.backend.hosts.items()}
                events.append(("send", Op(request[0]), memory))
            send(self, frame)

        def receiving(self: Channel, request_id: int, timeout: float) -> Any:
            reply = receive(self, request_id, timeout)
            if reply is not None and ops.get(request_id) is Op.ACQUIRE:
                events.append(("reply", Op.ACQUIRE))
            return reply

        monkeypatch.setattr(Channel, "send", sending)
        monkeypatch.setattr(Channel, "receive", receiving)
        events.clear()
        return events

    return trace


Traced = Callable[[Machine], list[tuple[Any, ...]]]


def lines_of(events: list[tuple[Any, ...]], what: str) -> set[tuple[int, int]]:
    return {
        (pool, line)
        for name, pool, *place in events
        if name == what
        for line in range(place[0] // 64, -(-(place[0] + place[1]) // 64))
    }


@pytest.mark.parametrize("writer", WRITERS)
def test_bytes_are_in_memory_when_commit_leaves(fabric: Fabric, traced: Traced, writer: Callable[..., None]) -> None:
    one = fabric.host()
    events = traced(one)
    data = random.Random(5).randbytes(70_001)
    writer(one, 3, data)
    names = [event[:2] for event in events]
    assert names.count(("send", Op.COMMIT)) == 1
    at = names.index(("send", Op.COMMIT))
    memory = events[at][2]
    lease = one.handler.acquire([one.handler.key(key(3))], leading=False)
    pool = one.backend.hosts[0].descriptor
    place = pool.data_at(lease.entries[0])
    assert memory[0][place : place + len(data)] == data
    # All of it by publish, none of it later.
    assert lines_of(events[:at], "publish") >= one.extents(lease.entries, lease.lengths)
    assert not lines_of(events[at:], "publish")


@pytest.mark.parametrize("reader", READERS)
def test_bytes_are_acquired_between_the_lease_and_the_first_look(
    fabric: Fabric, traced: Traced, reader: Callable[..., bytes | None]
) -> None:
    one, two = fabric.host(), fabric.host()
    data = random.Random(6).randbytes(70_001)
    store(one, 4, data)
    events = traced(two)
    assert reader(two, 4) == data
    names = [event[:2] for event in events]
    granted = names.index(("reply", Op.ACQUIRE))
    assert not lines_of(events[:granted], "acquire")
    lease = two.handler.acquire([two.handler.key(key(4))], leading=False)
    extents = two.extents(lease.entries, lease.lengths)
    assert lines_of(events[granted:], "acquire") >= extents
    # Once, as a whole: nobody can have written them since.
    touching = [event for event in events[granted:] if event[0] == "acquire" and lines_of([event], "acquire") & extents]
    assert len(touching) == 1


def test_neighbours_are_published_and_acquired_at_once(fabric: Fabric, traced: Traced) -> None:
    one, two = fabric.host("off"), fabric.host("off")
    names = [key(number) for number in range(10)]
    events = traced(one)
    one.handler.batch_store(names, [bytes(4096)] * 10)
    assert [event[2:] for event in events if event[0] == "publish"] == [
        (one.backend.hosts[0].descriptor.data_offset, 40_960)
    ]
    events = traced(two)
    handler = two.handler
    lease = handler.acquire([handler.key(name) for name in names], leading=True)
    found = handler.adopt(lease.epoch, lease.entries, lease.generations, lease.lengths, lease.keys)
    with found.reading():
        assert [bytes(found.view(index)) for index in range(10)] == [bytes(4096)] * 10
    assert found.verify() == [True] * 10
    pool = two.backend.hosts[0].descriptor
    assert [event[2:] for event in events if event[0] == "acquire"] == [
        (pool.data_offset, 40_960),
        (pool.table_offset, 10 * 128),
    ]


def test_device_hints_come_after_the_barrier(fabric: Fabric) -> None:
    """A hint may read ahead, and would fetch what is stale back into the cache."""
    one = fabric.host()
    store(one, 1, b"a" * 5000)

    class Hints(IncoherentBackend):
        @hookimpl
        def maru_storage_backends(self) -> list[BackendProvision]:
            return [BackendProvision(NAME, lambda: self)]

        @hookimpl
        def maru_before_read(self, region: Any, extents: Any) -> None:
            self.trace.append(("before read", *[(extent.offset, extent.length) for extent in extents]))  # type: ignore[arg-type]

    hints = Hints()
    config = MaruConfig(server_url=fabric.url)
    with MaruHandler.connect(config, NAMESPACE, host=PluginHost.with_plugins({NAME: hints})) as handler:
        lease = handler.acquire([handler.key(key(1))], leading=False)
        found = handler.adopt(lease.epoch, lease.entries, lease.generations, lease.lengths, lease.keys)
        hints.trace.clear()
        with found.reading():
            pass
        assert [event[0] for event in hints.trace] == ["acquire", "before read"]
