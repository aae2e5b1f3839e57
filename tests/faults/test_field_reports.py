"""Failures that users of comparable systems reported, as short recipes. The numbers are those of the reports."""

from __future__ import annotations

import os
import signal
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq

from maru_backends.cxl import load_flusher
from maru_core.access import ClientKeys, make_keys
from maru_core.client import MaruHandler, StoreResult
from maru_core.config import MaruConfig
from maru_core.errors import Unavailable
from maru_core.host import PluginHost
from maru_core.protocol import CommitStatus, Op, ReserveStatus
from maru_core.testing import ServerFactory
from tests.client.fake_server import FakeServer
from tests.client.real import NAMESPACE, Folder
from tests.faults.test_existing_maru_faults import nothing_is_held, pool, read, stamped, wait_for_line
from tests.server.keyed import free_port, own_address
from tests.server.pure import World
from tests.server.raw import RawClient, keys
from tests.waiting import eventually


def columns(count: int) -> list[bytes]:
    return [keys(number, 1) for number in range(count)]


@pytest.mark.slow
def test_r037_what_is_looked_up_and_never_loaded_does_not_stay_pinned(folder: Folder) -> None:
    """Each lookup ends its own lease, used or not; everything can be evicted afterwards."""
    handler = folder.connect(pool_size="1M")
    names = [f"k{number}" for number in range(8)]
    handler.batch_store(names, [stamped(name, 50_000) for name in names])
    for turn in range(50):
        pending = handler.submit_acquire([handler.key(name) for name in names[:4]], leading=True)
        if turn % 2:
            lease = pending.poll(2)
            assert lease is not None
            handler.release(lease)
        else:
            pending.cancel()
    nothing_is_held(handler)
    for number in range(40):
        assert handler.store(f"more{number}", stamped(f"more{number}", 50_000)) is StoreResult.STORED


@pytest.mark.slow
def test_r040_ending_a_lease_twice_takes_nobody_elses(folder: Folder) -> None:
    """Two requests share a block, and the first finishes twice: the second still holds it."""
    first, second = folder.connect(pool_size="1M"), folder.connect(pool_size="1M")
    first.store("a", stamped("a", 100_000))
    key = [first.key("a")]
    for other in (first, second):  # both leases of one session, then of two
        mine, theirs = first.acquire(key, leading=True), other.acquire(key, leading=True)
        first.release(mine)
        first.release(mine)
        eventually(lambda: first._link.inbox.qsize() == 0)
        for number in range(30):
            first.store(f"fill{number}", stamped(f"fill{number}", 100_000))
        assert pool(first)["leased"] == 25 * 4096
        assert bytes(other.view(theirs.epoch, theirs.entries[0], 100_000)) == stamped("a", 100_000)
        assert other.verify(theirs.epoch, theirs.entries, theirs.generations, theirs.lengths) == [True]
        other.release(theirs)
        nothing_is_held(first)


def test_r041_being_used_is_no_pin() -> None:
    """A thousand lookups with a lease, and as many of what is there already: held is what somebody owns."""
    world = World.of(8)
    session = world.session()
    world.store(session, columns(4))
    for lease in range(1, 1001):
        world.directory.acquire(session, lease, tuple(columns(4)), False)
        world.directory.probe(session, columns(4))
        assert world.directory.reserve(session, tuple(columns(4)), (), 1)[0] == bytes([ReserveStatus.PRESENT] * 4)
        world.directory.settle()
        assert list(world.directory.objects.readers[:8]).count(1) == 4
        world.directory.release(session, lease, 100)
    world.directory.settle()
    assert not any(world.directory.objects.readers)
    world.check()


@pytest.mark.slow
def test_r045_a_lookup_that_is_cancelled_before_its_answer_holds_nothing(folder: Folder) -> None:
    """Whenever it is cancelled: before the request is sent on, while it is answered, after the answer came."""
    handler = folder.connect()
    handler.batch_store(["a", "b"], [b"1" * 100] * 2)
    for turn in range(100):
        pending = handler.submit_acquire([handler.key("a"), handler.key("b")], leading=True)
        time.sleep(turn % 5 * 0.0003)
        pending.cancel()
        pending.cancel()
        with pytest.raises(Unavailable):
            pending.poll(0)
    nothing_is_held(handler)
    eventually(lambda: not handler._link.holdings._reading)


@pytest.mark.slow
def test_r051_a_writer_that_dies_before_it_commits_blocks_nobody(folder: Folder) -> None:
    """Another writer stores the key once the death is proven; the late commit of the first is refused."""
    handler = folder.connect()
    process = folder.run(
        "h = connect()\n"
        "grants = h.reserve([b'k' * 32], 5000)\n"
        "print('ready', grants.entries[0], grants.generations[0], flush=True)\ntime.sleep(60)\n"
    )
    entry, generation = map(int, wait_for_line(process, "ready").split()[1:])
    assert handler.reserve([b"k" * 32], 5000).statuses == bytes([ReserveStatus.BUSY])
    process.kill()
    nothing_is_held(handler)
    grants = handler.reserve([b"k" * 32], 5000)
    assert grants.statuses == bytes([ReserveStatus.NEW])
    late = type(grants)(
        grants.epoch, grants.session, grants.keys, b"\0", array("I", [entry]), array("I", [generation]), [5000]
    )
    if (entry, generation) != (grants.entries[0], grants.generations[0]):
        assert handler.commit(late) == bytes([CommitStatus.UNKNOWN])
    assert handler.commit(grants) == bytes([CommitStatus.OK])
    assert pool(handler)["used"] == 2 * 4096


@pytest.mark.slow
def test_r096_a_server_that_stood_still_takes_nobody_for_dead(folder: Folder) -> None:
    """Absence counts only while the server could have heard: what live clients hold and stored survives."""
    handler, other = folder.connect(request_timeout=0.3), folder.connect(request_timeout=0.3)
    names = [f"k{number}" for number in range(10)]
    handler.batch_store(names, [stamped(name, 1000) for name in names])
    held = other.retrieve("k0")
    grants = handler.reserve([b"k" * 32], 100)
    epoch, server = handler.epoch, folder.pid()
    os.kill(server, signal.SIGSTOP)
    time.sleep(3)
    os.kill(server, signal.SIGCONT)
    eventually(lambda: handler.is_up and other.is_up)
    time.sleep(1.2)  # two rounds of looking for the dead
    assert handler.epoch == epoch
    assert handler.stats()["counters"]["expired_sessions"] == 0
    assert handler.commit(grants) == bytes([CommitStatus.OK])
    assert held is not None
    assert held.verify()
    assert [read(handler, name) for name in names] == [stamped(name, 1000) for name in names]


@pytest.mark.parametrize("op", [Op.RESERVE, Op.COMMIT])
def test_r097_a_store_whose_reply_is_lost_is_no_success(
    fake: FakeServer, connect: Callable[..., MaruHandler], op: Op
) -> None:
    """The caller hears of the failure, the pages come back, and a retry stores no second copy."""
    handler = connect()

    def swallow(request: list[Any], reply: list[Any]) -> list[Any] | None:
        return None if request[0] == op else reply

    fake.spoil = swallow
    with pytest.raises(Unavailable):
        handler.store("a", b"some bytes")
    fake.spoil = lambda request, reply: reply
    eventually(lambda: handler.is_up and not fake.held)
    assert handler.store("a", b"some bytes") is (StoreResult.STORED if op is Op.RESERVE else StoreResult.PRESENT)
    assert len(fake.stored) == 1
    assert read(handler, "a") == b"some bytes"


@pytest.mark.slow
def test_r019_memory_of_one_host_is_never_said_to_be_shared_by_hosts(
    maru_server: ServerFactory, maru_runtime_dir: Path
) -> None:
    """Insisting on it is refused, not ignored; by itself only what other hosts can map is flushed for them."""
    with pytest.raises(RuntimeError, match=r"pools of cpu are memory of one host.*maru_visibility=auto"):
        maru_server(maru_runtime_dir, visibility="hosts")
    assert not list((maru_runtime_dir / "pools").iterdir())
    if isinstance(load_flusher(), str):
        pytest.skip(f"not run: {load_flusher()}")
    make_keys(maru_runtime_dir / "keys", ["client"])
    host = own_address()
    server = maru_server(
        maru_runtime_dir,
        server_url=f"tcp://{host}:{free_port(host)}",
        keys=maru_runtime_dir / "keys",
        storage_backend="mixed",
        cxl_pool_path=maru_runtime_dir / "pools",
    )
    config = MaruConfig(server_url=server.url, keys=str(maru_runtime_dir / "keys"), connect_timeout=20)
    with MaruHandler.connect(config, NAMESPACE, host=PluginHost.with_plugins({}, built_ins=True)) as handler:
        assert handler.store("a", b"a" * 10_000) is StoreResult.STORED
        with zmq.Context() as context:
            own = ClientKeys.load(str(maru_runtime_dir / "keys"))
            client = RawClient(context, server.url, keys=own).hello()
            assert [(pool.backend, pool.flush) for pool in client.pools] == [("cpu", False), ("cxl", True)]
            client.close()
