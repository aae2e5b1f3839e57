"""The high-level calls, against a real server."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import hashlib
import pickle
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import attrs
import pytest

from maru_core.client import MaruHandler, StoreResult
from maru_core.client.objects import Shown
from maru_core.config import MaruConfig
from maru_core.errors import MaruError
from maru_core.protocol import Presence
from tests.client.fake_server import FakeServer
from tests.client.real import NAMESPACE, Folder
from tests.waiting import eventually, quickest


def pool(handler: MaruHandler) -> dict[str, int]:
    found: dict[str, int] = handler.stats()["pools"][0]
    return found


@pytest.fixture
def handler(folder: Folder) -> MaruHandler:
    return folder.connect()


@pytest.mark.slow
def test_store_retrieve_exists_delete(handler: MaruHandler) -> None:
    assert handler.retrieve("a") is None
    assert not handler.exists("a")
    assert handler.store("a", b"some bytes") is StoreResult.STORED
    assert handler.store("a", b"other bytes") is StoreResult.PRESENT
    assert handler.exists("a")
    with handler.retrieve("a") as found:  # type: ignore[union-attr]
        assert bytes(found.view) == b"some bytes"
        assert found.view.readonly
        assert len(found) == 10
        assert found.verify()
    assert handler.delete("a")
    assert not handler.delete("a")
    assert handler.retrieve("a") is None


@pytest.mark.slow
def test_stats_name_the_transfer_engine_of_those_who_have_one(folder: Folder, handler: MaruHandler) -> None:
    assert "transfer_engine" not in handler.stats()["client"]
    config = MaruConfig(**folder.settings())
    with MaruHandler.connect(config, NAMESPACE, role="worker", transfer_engine="torch-copy") as worker:
        assert worker.stats()["client"]["transfer_engine"] == "torch-copy"


@pytest.mark.slow
def test_keys_of_other_types_and_namespaces_differ(folder: Folder, handler: MaruHandler) -> None:
    assert handler.store("a", b"text") is StoreResult.STORED
    assert not handler.exists(b"a")
    assert handler.store(b"a", b"bytes") is StoreResult.STORED
    with handler.retrieve("a") as found:  # type: ignore[union-attr]
        assert bytes(found.view) == b"text"


@pytest.mark.slow
def test_batches_answer_every_key_in_order(handler: MaruHandler) -> None:
    data = [bytes([index]) * (index * 1000 + 1) for index in range(10)]
    assert handler.batch_store([f"k{index}" for index in range(10)], data) == [StoreResult.STORED] * 10
    asked = ["k3", "missing", "k0", "k9"]
    assert handler.batch_exists(asked) == [True, False, True, True]
    found = handler.batch_retrieve(asked)
    assert [None if one is None else bytes(one.view) for one in found] == [data[3], None, data[0], data[9]]
    leased = pool(handler)["leased"]
    assert leased > 0
    for one in found[:3]:
        if one is not None:
            one.close()
    time.sleep(0.05)
    assert pool(handler)["leased"] == leased, "one lease for the batch lasts until its last object is closed"
    assert found[3] is not None
    found[3].close()
    eventually(lambda: pool(handler)["leased"] == 0)
    assert handler.batch_delete(asked) == [True, False, True, True]


@pytest.mark.slow
def test_alloc_writes_in_place(handler: MaruHandler) -> None:
    with handler.alloc("a", 5) as room:
        room.view[:] = b"hello"
        assert not handler.exists("a"), "not visible before it is complete"
    with handler.retrieve("a") as found:  # type: ignore[union-attr]
        assert bytes(found.view) == b"hello"
    with pytest.raises(MaruError, match="committed"):
        _ = room.view
    refused = handler.alloc("a", 5)
    assert refused.refusal is StoreResult.PRESENT
    with pytest.raises(MaruError, match="present"):
        _ = refused.view
    assert refused.commit() is StoreResult.PRESENT


@pytest.mark.slow
def test_an_allocation_whose_block_raises_is_given_back(handler: MaruHandler) -> None:
    def write() -> None:
        with handler.alloc("a", 5) as room:
            room.view[:1] = b"x"
            raise KeyError("on the way")

    with pytest.raises(KeyError):
        write()
    eventually(lambda: pool(handler)["reserved"] == 0)
    assert handler.store("a", b"1") is StoreResult.STORED


#: Everything that goes on showing a view's bytes without being an export that ``memoryview.release`` would count.
DERIVED: dict[str, Callable[[memoryview], object]] = {
    "slice": lambda view: view[:3],
    "memoryview": memoryview,
    "cast": lambda view: view.cast("c"),
    "ctypes": lambda view: (ctypes.c_ubyte * len(view)).from_buffer(view),
    "pickle": pickle.PickleBuffer,
    "array": lambda view: pytest.importorskip("numpy").frombuffer(view, dtype="u1"),
}


@pytest.mark.slow
@pytest.mark.parametrize("make", DERIVED.values(), ids=DERIVED)
def test_commit_and_abort_are_refused_while_something_could_still_write(
    handler: MaruHandler, make: Callable[[memoryview], object]
) -> None:
    room = handler.alloc("a", 5)
    room.view[:] = b"first"
    shown = make(room.view)
    for end in (room.commit, room.abort):
        with pytest.raises(MaruError, match="still shows"):
            end()
    assert room.is_open
    assert bytes(room.view) == b"first"
    del shown
    assert room.commit() is StoreResult.STORED


@pytest.mark.slow
@pytest.mark.parametrize("make", [DERIVED["slice"], DERIVED["memoryview"], DERIVED["array"]])
def test_what_is_made_from_a_retrieved_view_holds_the_lease(
    handler: MaruHandler, make: Callable[[memoryview], object]
) -> None:
    """An array made from a temporary is what users write; its bytes must not change under it."""
    handler.store("a", b"12345")
    found = handler.retrieve("a")
    assert found is not None
    shown = make(found.view)
    found.close()
    del found
    time.sleep(0.7)
    assert pool(handler)["leased"] > 0
    del shown
    eventually(lambda: pool(handler)["leased"] == 0)


@pytest.mark.slow
def test_what_no_session_may_lease_is_refused(folder: Folder) -> None:
    """It would fill the pool and could never be read."""
    handler = folder.connect(pool_size=1 << 20, lease_share=0.25)
    assert handler.store("big", bytes(400_000)) is StoreResult.REFUSED
    assert handler.store("small", bytes(100_000)) is StoreResult.STORED


@pytest.mark.slow
def test_a_key_is_text_or_bytes(handler: MaruHandler) -> None:
    with pytest.raises(TypeError, match="got int 5"):
        handler.store(5, b"x")  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_dropped_allocation_keeps_its_pages_for_the_life_of_the_process(folder: Folder, handler: MaruHandler) -> None:
    room = handler.alloc("a", 5)
    slice_ = room.view[1:3]
    del room
    gc.collect()
    handler.close()
    time.sleep(0.7)
    other = folder.connect()
    assert pool(other)["reserved"] == 4096, "a slice could still write there"
    slice_[:] = b"zz"


@pytest.mark.slow
def test_close_gives_open_allocations_back(folder: Folder, handler: MaruHandler) -> None:
    room = handler.alloc("a", 5)
    handler.close()
    with pytest.raises(MaruError, match="no bytes to write"):
        room.view[:] = b"later"
    other = folder.connect()
    # A goodbye that is late on its way is as good as a death, which is noticed a little later.
    eventually(lambda: pool(other)["reserved"] == 0)


@pytest.mark.slow
def test_a_lease_lasts_as_long_as_the_view(handler: MaruHandler) -> None:
    handler.store("a", b"x" * 5000)
    view = handler.retrieve("a").view  # type: ignore[union-attr]
    gc.collect()
    time.sleep(0.05)
    assert pool(handler)["leased"] > 0
    assert bytes(view) == b"x" * 5000
    del view
    eventually(lambda: pool(handler)["leased"] == 0)


@pytest.mark.slow
def test_what_is_read_stays_while_it_is_deleted_and_the_pool_is_refilled(handler: MaruHandler) -> None:
    handler.store("a", b"a" * 4096)
    with handler.retrieve("a") as found:  # type: ignore[union-attr]
        assert handler.delete("a")
        for index in range(1500):
            assert handler.store(f"fill{index}", b"f" * 4096) is StoreResult.STORED
        assert bytes(found.view) == b"a" * 4096
    assert pool(handler)["objects"] < 1500


@pytest.mark.slow
def test_full_is_an_answer(handler: MaruHandler) -> None:
    rooms = handler.batch_alloc([f"k{index}" for index in range(1200)], [4096] * 1200)
    refused = [room for room in rooms if room.refusal is not None]
    assert {room.refusal for room in refused} == {StoreResult.NO_ROOM}
    results = []
    assert quickest(lambda: results.append(handler.store("more", b"x"))) < 0.1
    assert set(results) == {StoreResult.NO_ROOM}
    for room in rooms:
        room.abort()
    eventually(lambda: pool(handler)["reserved"] == 0)
    assert handler.store("more", b"x") is StoreResult.STORED


@pytest.mark.slow
def test_reset_hides_what_older_weights_computed(folder: Folder, handler: MaruHandler) -> None:
    other = folder.connect()
    handler.store("a", b"old")
    with handler.alloc("b", 3) as room:
        room.view[:] = b"old"
        assert handler.reset() == 1
        assert room.commit() is StoreResult.REFUSED, "a store in flight cannot undo a reset"
    assert handler.retrieve("a") is None
    assert handler.store("a", b"new") is StoreResult.STORED
    assert other.retrieve("a") is None, "an engine that has not seen the new weights hits nothing"
    assert other.store("c", b"old") is StoreResult.REFUSED
    assert other.reset() == 1
    with other.retrieve("a") as found:  # type: ignore[union-attr]
        assert bytes(found.view) == b"new"


@pytest.mark.slow
def test_asyncio(handler: MaruHandler) -> None:
    async def main() -> list[bytes]:
        await asyncio.gather(*(asyncio.to_thread(handler.store, f"k{i}", bytes([i]) * 100) for i in range(8)))
        found = await asyncio.gather(*(asyncio.to_thread(handler.retrieve, f"k{i}") for i in range(8)))
        return [bytes(one.view) for one in found if one is not None]

    assert asyncio.run(main()) == [bytes([i]) * 100 for i in range(8)]


def test_a_reused_object_is_not_handed_out(fake: FakeServer, connect: object) -> None:
    """The header is judged when the view is handed out, and again by ``verify``."""
    handler: MaruHandler = connect()  # type: ignore[operator]
    handler.store("a", b"1" * 10)
    found = handler.retrieve("a")
    assert found is not None
    assert found.verify()
    fake.damage(handler.key("a"))
    assert not found.verify()
    assert handler.retrieve("a") is None
    found.close()
    eventually(lambda: not fake.leases)


def stamped(key: int, version: int, size: int) -> bytes:
    """Bytes that depend on key, version and position, so that any neighbour's or torn bytes show."""
    seed = hashlib.sha256(f"{key}/{version}".encode()).digest()
    return b"".join(position.to_bytes(4, "big") + seed[:28] for position in range(-(-size // 32)))[:size]


@pytest.mark.slow
def test_eight_threads_mixing_everything_never_see_wrong_bytes(folder: Folder) -> None:
    handler = folder.connect(pool_size="1M")
    failures: list[str] = []
    reads = [0] * 8
    stop = time.monotonic() + 3

    def work(number: int) -> None:
        random_ = random.Random(number)
        try:
            while time.monotonic() < stop:
                keys = random_.sample(range(60), 4)
                # The size and bytes of a key are the same whoever stores it.
                payload = {key: stamped(key, 0, 1000 + key * 150) for key in keys}
                names = [f"k{key}" for key in keys]
                action = random_.randrange(6)
                if action == 0:
                    handler.batch_store(names, [payload[key] for key in keys])
                elif action == 1:
                    with handler.alloc(names[0], len(payload[keys[0]])) as room:
                        if room.refusal is None:
                            room.view[:] = payload[keys[0]]
                elif action == 2:
                    handler.batch_delete(names[:1])
                elif action == 3:
                    grants = handler.reserve([handler.key(name) for name in names], 3000)
                    handler.abort(grants)
                elif action == 4:
                    pending = handler.submit_acquire([handler.key(name) for name in names], leading=False)
                    if random_.random() < 0.5:
                        pending.cancel()
                    else:
                        lease = pending.poll(2)
                        if lease is not None:
                            handler.release(lease)
                else:
                    for key, found in zip(keys, handler.batch_retrieve(names), strict=True):
                        if found is not None:
                            copy = bytes(found.view)
                            verified = found.verify()
                            found.close()
                            reads[number] += verified
                            # The lease keeps the bytes even when a delete makes them unverifiable meanwhile.
                            if copy != payload[key]:
                                failures.append(f"key {key}: wrong bytes, verified {verified}")
        except BaseException as error:  # noqa: BLE001 - handed to the test's own thread
            failures.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert sum(reads) > 100
    eventually(lambda: pool(handler)["leased"] == pool(handler)["reserved"] == 0)
    assert pool(handler)["used"] + pool(handler)["free"] == pool(handler)["capacity"]


@pytest.mark.slow
def test_the_probe_of_a_million_keys_does_not_starve_others(folder: Folder) -> None:
    handler = folder.connect()
    many = [index.to_bytes(32, "big") for index in range(1_000_000)]
    waits: list[float] = []
    done = threading.Event()

    def others() -> None:
        while not done.is_set():
            waits.append(handler.ping())
            time.sleep(0.005)

    thread = threading.Thread(target=others)
    thread.start()
    try:
        assert handler.probe(many) == bytes([Presence.ABSENT]) * 1_000_000
    finally:
        done.set()
        thread.join()
    # Mostly this process's own work on the keys; a server that served nobody else would show as the whole time.
    assert max(waits) < 0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "error", "named"),
    [
        (lambda h: h.alloc("a", -1), ValueError, "size"),
        (lambda h: h.alloc("a", 1 << 64), ValueError, "size"),
        (lambda h: h.alloc("a", 1.5), TypeError, "size"),
        (lambda h: h.alloc("a", "5"), TypeError, "size"),
        (lambda h: h.batch_alloc(["a"], [-1]), ValueError, "sizes"),
        (lambda h: h.batch_alloc("a", [1]), TypeError, "keys"),
        (lambda h: h.store("a", "text"), TypeError, "data"),
        (lambda h: h.store("a", memoryview(bytes(8))[::2]), TypeError, "data"),
        (lambda h: h.batch_store("abc", [b"1", b"2", b"3"]), TypeError, "keys"),
        (lambda h: h.batch_store(["a"], b"1"), TypeError, "data"),
        (lambda h: h.batch_retrieve("abc"), TypeError, "keys"),
        (lambda h: h.batch_retrieve(None), TypeError, "keys"),
        (lambda h: h.batch_exists(b"abc"), TypeError, "keys"),
        (lambda h: h.batch_delete(5), TypeError, "keys"),
        (lambda h: h.reserve(bytes(32), 8), TypeError, "keys"),
        (lambda h: h.reserve(["x" * 32], 8), TypeError, "key"),
        (lambda h: h.reserve([5], 8), TypeError, "key"),
        (lambda h: h.reserve([bytes(32)], -1), ValueError, "length"),
        (lambda h: h.reserve([bytes(32)], [-1]), ValueError, "length"),
        (lambda h: h.reserve([bytes(32)], [0.5]), TypeError, "length"),
        (lambda h: h.reserve([bytes(32)], 0.5), TypeError, "length"),
        (lambda h: h.reserve([bytes(32)], 8, "x" * 32), TypeError, "parents"),
        (lambda h: h.acquire(bytes(32), leading=True), TypeError, "keys"),
        (lambda h: h.probe(None), TypeError, "keys"),
        (lambda h: h.probe([bytes(32)], timeout="1"), TypeError, "timeout"),
    ],
)
def test_a_wrong_argument_is_named(
    fake: FakeServer, connect: Any, call: Any, error: type[Exception], named: str
) -> None:
    handler = connect()
    before = [len(fake.held), len(fake.leases)]
    with pytest.raises(error, match=rf"^(a )?{named}\b"):
        call(handler)
    assert [len(fake.held), len(fake.leases)] == before


@pytest.mark.slow
def test_generators_are_lists(handler: MaruHandler) -> None:
    assert handler.batch_store((key for key in "ab"), (data for data in (b"1", b"2"))) == [StoreResult.STORED] * 2
    assert handler.batch_exists(key for key in "abc") == [True, True, False]
    found = handler.batch_retrieve(key for key in "ab")
    assert [bytes(item.view) for item in found if item is not None] == [b"1", b"2"]


def test_ids_that_are_none_keep_no_others_from_being_delivered(fake: FakeServer, connect: Any) -> None:
    handler = connect()
    handler.store("a", b"1")
    lease = handler.acquire([handler.key("a")], leading=True)
    for forged in (1 << 70, -1, "x", None):
        handler.release(attrs.evolve(lease, ids=(forged,)))
    grants = handler.reserve([bytes(32)], 8)
    handler.abort(attrs.evolve(grants, entries=[1 << 70], generations=[1]))
    handler.release(lease)
    handler.abort(grants)
    eventually(lambda: not fake.leases and not fake.held)
    assert handler.is_up


@pytest.mark.slow
@pytest.mark.parametrize("end", ["commit", "abort"])
def test_an_interrupted_end_of_an_allocation_can_be_repeated(
    handler: MaruHandler, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """A signal handler raises just after the view was taken back."""
    allocation = handler.alloc("a", 8)
    allocation.view[:] = b"12345678"
    take_back = Shown.end

    def interrupted(shown: Shown) -> bool:
        take_back(shown)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Shown, "end", interrupted)
        with pytest.raises(KeyboardInterrupt):
            getattr(allocation, end)()
    assert allocation.is_open
    assert getattr(allocation, end)() is (StoreResult.STORED if end == "commit" else None)
    assert not allocation.is_open
    assert handler.exists("a") is (end == "commit")
    eventually(lambda: handler.stats()["pools"][0]["reserved"] == 0)
    assert handler._goodbye


@pytest.mark.slow
def test_an_allocation_whose_commit_is_interrupted_is_given_back(
    handler: MaruHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocation = handler.alloc("a", 8)

    def interrupted(*_: object, **__: object) -> bytes:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(handler, "commit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            allocation.commit()
    assert not allocation.is_open
    eventually(lambda: handler.stats()["pools"][0]["reserved"] == 0)
