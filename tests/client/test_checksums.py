"""R139: damaged or exchanged bytes and headers are misses with a reason and a counter, and are never handed out."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import maru_core.checksum
from maru_core.checksum import NO_CHECKSUM, SAMPLE, checksum, is_covered
from maru_core.client import MaruHandler, StoreResult
from maru_core.client.checks import Checks
from maru_core.config import MaruConfig
from maru_core.errors import ConfigError
from maru_core.host import PluginHost
from maru_core.namespace import Namespace
from maru_core.pool_format import HEADER_SIZE, KEY_SIZE, Header, State
from tests.budgets import examples
from tests.client.pool_bytes import Stored, flip, swap
from tests.client.real import Folder
from tests.waiting import eventually

BITS = st.integers(1, 255)


@pytest.fixture
def handler(folder: Folder) -> MaruHandler:
    return folder.connect(verify="full")


def found(handler: MaruHandler) -> tuple[int, int]:
    """Damaged headers and payloads that this handler has seen."""
    client = handler.stats()["client"]
    return client["header_mismatches"], client["checksum_mismatches"]


def dropped(handler: MaruHandler) -> int:
    number: int = handler.stats()["counters"]["damaged"]
    return number


def read(handler: MaruHandler, key: str) -> bytes | None:
    held = handler.retrieve(key)
    if held is None:
        return None
    with held:
        return bytes(held.view)


def sampled(handler: MaruHandler, wanted: bool = True, count: int = 1) -> list[str]:
    """Keys that are in the sample, or that are not."""
    names = (f"n{number}" for number in range(100_000))
    return [name for name in names if is_covered("sample", handler.key(name)) == wanted][:count]


def is_a_miss_and_dropped(handler: MaruHandler, key: str, data: bytes, headers: int, payloads: int) -> None:
    """The damage to ``key`` was found for this reason, and is over once it is found."""
    before, gone = found(handler), dropped(handler)
    assert read(handler, key) is None
    assert found(handler) == (before[0] + headers, before[1] + payloads)
    eventually(lambda: dropped(handler) == gone + 1)
    assert not handler.exists(key), "nobody hits it again"
    assert handler.store(key, data) is StoreResult.STORED
    assert read(handler, key) == data
    assert handler.delete(key)


def is_a_miss(handler: MaruHandler, key: str, data: bytes) -> None:
    """The server itself reads keys from headers: an object whose header names another may not be found at all."""
    assert read(handler, key) is None
    eventually(lambda: handler.store(key, data) is StoreResult.STORED)
    assert read(handler, key) == data
    assert handler.delete(key)


@pytest.mark.slow
def test_a_changed_byte_of_a_payload_is_a_miss(handler: MaruHandler) -> None:
    @settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(st.data(), st.integers(1, 10_000), BITS)
    def check(data: st.DataObject, size: int, bits: int) -> None:
        payload = bytes(number * 7 % 251 for number in range(size))
        assert handler.store("a", payload) is StoreResult.STORED
        flip(Stored.of(handler, handler.key("a")).payload, data.draw(st.integers(0, size - 1)), bits)
        is_a_miss_and_dropped(handler, "a", payload, 0, 1)

    check()


@pytest.mark.slow
def test_a_changed_byte_anywhere_in_a_header_is_a_miss(handler: MaruHandler) -> None:
    for position in range(HEADER_SIZE):
        assert handler.store("a", b"some bytes") is StoreResult.STORED
        flip(Stored.of(handler, handler.key("a")).raw_header, position, 1 + position % 255)
        if position < HEADER_SIZE - KEY_SIZE:
            is_a_miss_and_dropped(handler, "a", b"some bytes", 1, 0)
        else:
            is_a_miss(handler, "a", b"some bytes")


#: What a header says, changed so that its CRC still holds.
WRONG: dict[str, Callable[[Header], dict[str, Any]]] = {
    "generation": lambda header: {"generation": header.generation + 1},
    "shorter": lambda header: {"length": header.length - 1},
    "longer": lambda header: {"length": header.length + 1},
    "namespace": lambda header: {"digest": bytes(16)},
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["off", "sample", "full"])
@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_a_header_of_something_else_is_a_miss_in_every_mode(
    folder: Folder, mode: str, change: Callable[[Header], dict[str, Any]]
) -> None:
    handler = folder.connect(verify=mode)
    for name in (*sampled(handler), *sampled(handler, False)):
        assert handler.store(name, b"some bytes") is StoreResult.STORED
        stored = Stored.of(handler, handler.key(name))
        stored.change(**change(stored.header))
        is_a_miss_and_dropped(handler, name, b"some bytes", 1, 0)


@pytest.mark.slow
def test_a_header_that_names_another_key_is_a_miss(handler: MaruHandler) -> None:
    """For the server, and for who leased the object before."""
    handler.store("a", b"some bytes")
    held = handler.retrieve("a")
    assert held is not None
    Stored.of(handler, handler.key("a")).change(key=bytes(32))
    assert not held.verify()
    assert found(handler) == (1, 0)
    held.close()
    is_a_miss(handler, "a", b"some bytes")


@pytest.mark.slow
@pytest.mark.parametrize("state", [State.FREE, State.RESERVED, State.RETIRING])
def test_what_is_not_ready_is_a_miss_but_no_damage(handler: MaruHandler, state: State) -> None:
    handler.store("a", b"some bytes")
    Stored.of(handler, handler.key("a")).change(state=state)
    assert read(handler, "a") is None
    assert found(handler) == (0, 0)


@pytest.mark.slow
def test_a_truncated_object_is_a_miss(handler: MaruHandler) -> None:
    """Its tail is gone: the bytes are zero, whether the header admits it or not."""
    data = bytes(range(1, 101)) * 50
    for admitted in (False, True):
        handler.store("a", data)
        stored = Stored.of(handler, handler.key("a"))
        stored.payload[-100:] = bytes(100)
        if admitted:
            stored.change(length=len(data) - 100)
        is_a_miss_and_dropped(handler, "a", data, int(admitted), int(not admitted))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sample", "full"])
def test_exchanged_payloads_are_misses(folder: Folder, mode: str) -> None:
    handler = folder.connect(verify=mode)
    first, second = sampled(handler, count=2)
    handler.batch_store([first, second], [b"1" * 5000, b"2" * 5000])
    swap(*(Stored.of(handler, handler.key(name)).payload for name in (first, second)))
    assert handler.batch_retrieve([first, second]) == [None, None]
    assert found(handler) == (0, 2)
    eventually(lambda: dropped(handler) == 2)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["off", "sample", "full"])
def test_exchanged_headers_are_misses(folder: Folder, mode: str) -> None:
    """Both are READY, of one generation, length and namespace; only the keys differ."""
    handler = folder.connect(verify=mode)
    handler.batch_store(["a", "b"], [b"1" * 5000, b"2" * 5000])
    first, second = (Stored.of(handler, handler.key(name)) for name in "ab")
    assert first.header.generation == second.header.generation
    swap(first.raw_header, second.raw_header)
    assert handler.batch_retrieve(["a", "b"]) == [None, None]


@pytest.mark.slow
def test_undamaged_neighbours_of_a_damaged_object_are_handed_out(handler: MaruHandler) -> None:
    handler.batch_store(["a", "b", "c"], [b"1" * 100, b"2" * 100, b"3" * 100])
    flip(Stored.of(handler, handler.key("b")).payload, 50, 1)
    some = handler.batch_retrieve(["a", "b", "c"])
    assert [None if one is None else bytes(one.view) for one in some] == [b"1" * 100, None, b"3" * 100]
    for one in some:
        if one is not None:
            one.close()
    eventually(lambda: handler.stats()["pools"][0]["leased"] == 0)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "share"), [("off", 0.0), ("sample", 1 / SAMPLE), ("full", 1.0)])
def test_the_writers_mode_says_which_objects_have_a_checksum(folder: Folder, mode: str, share: float) -> None:
    handler = folder.connect(verify=mode)
    names = [f"k{number}" for number in range(400)]
    assert set(handler.batch_store(names[:399], [name.encode() for name in names[:399]])) == {StoreResult.STORED}
    with handler.alloc(names[399], 4) as room:
        room.view[:] = b"k399"
    have = []
    for name in names:
        stored = Stored.of(handler, handler.key(name))
        assert stored.header.checksum in (NO_CHECKSUM, checksum(name.encode()))
        assert (stored.header.checksum != NO_CHECKSUM) == is_covered(mode, handler.key(name))  # type: ignore[arg-type]
        have.append(stored.header.checksum != NO_CHECKSUM)
    assert abs(sum(have) / 400 - share) < 0.05


@pytest.mark.slow
def test_a_checksum_is_of_the_bytes_in_the_pool_when_an_allocation_is_committed(handler: MaruHandler) -> None:
    with handler.alloc("a", 5) as room:
        room.view[:] = b"first"
        room.view[:] = b"later"
    assert Stored.of(handler, handler.key("a")).header.checksum == checksum(b"later")
    assert read(handler, "a") == b"later"


@pytest.mark.slow
def test_raw_commits_have_a_checksum_when_asked_for(folder: Folder) -> None:
    """Of those that are committed, each its own, and of the sample only."""
    handler = folder.connect(verify="sample")
    keys = [bytes([number]) * 32 for number in (1, 32, 48, 64, 2)]
    grants = handler.reserve(keys, 100)
    for index in range(5):
        handler.view(grants.epoch, grants.entries[index], 100)[:] = bytes([index]) * 100
    handler.commit(grants, [1])
    handler.commit(grants, [4, 3, 0], checksums=True)
    handler.abort(grants, [2])
    sums = [Stored.of(handler, keys[index]).header.checksum for index in (0, 1, 3, 4)]
    assert sums == [NO_CHECKSUM, NO_CHECKSUM, checksum(b"\3" * 100), NO_CHECKSUM]


@pytest.mark.slow
def test_readers_compare_what_their_own_mode_covers(folder: Folder) -> None:
    full, sample, off = (folder.connect(verify=mode) for mode in ("full", "sample", "off"))
    (inside,), (outside,) = sampled(full), sampled(full, False)
    for writer in (full, sample):
        for name in (inside, outside):
            assert writer.store(name, b"right bytes") is StoreResult.STORED
            has_one = writer is full or name == inside
            flip(Stored.of(writer, writer.key(name)).payload, 0, 1)
            assert read(off, name) is not None
            assert (read(sample, name) is None) == (name == inside)
            assert (read(full, name) is None) == has_one
            eventually(lambda name=name, gone=has_one: full.exists(name) != gone)
            full.delete(name)
    assert found(off) == (0, 0)


@pytest.mark.slow
def test_full_looks_at_the_bytes_again_when_the_copy_is_complete(folder: Folder) -> None:
    full, sample = folder.connect(verify="full"), folder.connect(verify="sample")
    (name,) = sampled(full)
    full.store(name, b"right bytes")
    held, other = full.retrieve(name), sample.retrieve(name)
    assert held is not None
    assert other is not None
    assert held.verify()
    assert other.verify()
    flip(Stored.of(full, full.key(name)).payload, 0, 1)
    assert other.verify(), "a sample is compared when it is handed out"
    assert not held.verify()
    assert found(full) == (0, 1)


@pytest.mark.slow
def test_a_damaged_object_is_dropped_although_others_lease_it(folder: Folder, capsys: pytest.CaptureFixture) -> None:
    """It is hidden at once, who holds it learns that it proves nothing, and its pages come back with the last lease."""
    full, off = folder.connect(verify="full"), folder.connect(verify="off")
    full.store("a", b"right bytes")
    held = off.retrieve("a")
    assert held is not None
    flip(Stored.of(full, full.key("a")).payload, 3, 1)
    for _ in range(3):
        assert full.retrieve("a") is None
    eventually(lambda: dropped(full) == 1)
    assert found(full) == (0, 1), "counted once"
    told = [line for line in capsys.readouterr().out.splitlines() if "damaged object" in line]
    assert len(told) == 1
    assert full.key("a").hex() in told[0]
    assert "checksum" in told[0]
    assert not off.exists("a")
    assert not held.verify()
    assert bytes(held.view) == b"rig" + bytes([b"right bytes"[3] ^ 1]) + b"t bytes", "nobody writes where it lies"
    assert full.store("a", b"right bytes") is StoreResult.STORED
    held.close()
    eventually(lambda: full.stats()["pools"][0]["used"] == 4096)
    assert read(off, "a") == b"right bytes"


@pytest.mark.slow
def test_what_was_deleted_or_reset_under_a_lease_proves_nothing_and_is_no_damage(handler: MaruHandler) -> None:
    handler.batch_store(["a", "b"], [b"1" * 100, b"2" * 100])
    first, second = handler.batch_retrieve(["a", "b"])
    assert first is not None
    assert second is not None
    handler.delete("a")
    assert not first.verify()
    assert second.verify()
    handler.reset()
    assert not second.verify()
    assert bytes(first.view) == b"1" * 100
    first.close()
    assert not first.verify()
    assert found(handler) == (0, 0)
    assert dropped(handler) == 0


@pytest.mark.slow
def test_another_namespace_cannot_have_an_object_dropped(folder: Folder, handler: MaruHandler) -> None:
    handler.store("a", b"right bytes")
    lease = handler.acquire([handler.key("a")], leading=True)
    host = PluginHost.with_plugins({}, built_ins=True)
    stranger = MaruHandler.connect(MaruConfig(**folder.settings()), Namespace.of({"model": "other"}), host=host)
    with stranger:
        stranger._checks._report(lease.epoch, lease.entries[0], lease.generations[0], lease.keys[0], "checksum")
        stranger._checks._report(lease.epoch, 900, 1, lease.keys[0], "checksum")
        stranger.store("b", b"so that the report has been delivered")
        eventually(lambda: not stranger._link.inbox.qsize())
    assert read(handler, "a") == b"right bytes"
    assert dropped(handler) == 0


def test_bytes_that_went_away_while_they_were_read_are_no_damage() -> None:
    """The server may end, and its pages be others', between the look at the header and that at the bytes."""

    class Regions:
        granted = 1

        def is_granted(self, *_: object) -> bool:
            self.granted -= 1
            return self.granted >= 0

        def header(self, *_: object) -> Header:
            return Header(State.READY, 1, 3, 1, 12345, bytes(16), 0, bytes(32), bytes(32))

        def room(self, *_: object) -> memoryview:
            return memoryview(b"new")

    told: list[object] = []
    checks = Checks("full", lambda *what: told.append(what))
    regions = Regions()
    assert not checks.judge(regions, 7, bytes(32), 1, 1, 3)  # type: ignore[arg-type]
    assert not told
    regions.granted = 2
    assert not checks.judge(regions, 7, bytes(32), 1, 1, 3)  # type: ignore[arg-type]
    assert told == [(7, 1, 1, bytes(32), "checksum")]


@pytest.mark.slow
def test_a_handler_without_a_server_judges_nothing_whole(folder: Folder, handler: MaruHandler) -> None:
    handler.store("a", b"1")
    held = handler.retrieve("a")
    assert held is not None
    handler.close()
    assert not held.verify()


@settings(max_examples=examples(50), deadline=None)
@given(st.binary(max_size=300), st.integers(0, 299), BITS)
def test_any_change_of_one_byte_changes_the_checksum(data: bytes, position: int, bits: int) -> None:
    other = bytearray(data)
    if data:
        other[position % len(data)] ^= bits
        assert checksum(data) != checksum(memoryview(other))
    assert checksum(data) != NO_CHECKSUM


def test_no_payload_has_the_checksum_that_means_none(monkeypatch: pytest.MonkeyPatch) -> None:
    zero = SimpleNamespace(update=lambda _: None, intdigest=lambda: 0)
    monkeypatch.setattr(maru_core.checksum.xxhash, "xxh3_64", lambda: zero)
    assert checksum(b"unlucky") != NO_CHECKSUM


def test_the_setting_has_three_values() -> None:
    assert MaruConfig().verify == "sample"
    assert MaruConfig(verify="FULL").verify == "full"  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="maru_verify is 'always'"):
        MaruConfig(verify="always")  # type: ignore[arg-type]


def test_other_threads_run_while_a_checksum_is_made() -> None:
    """An engine's own thread would wait for it else: xxhash before its version 4 keeps the lock in its short form."""
    payload = bytearray(64 << 20)

    def is_seen_under_way() -> bool:
        ended: list[int] = []
        begun = threading.Event()

        def make() -> None:
            begun.set()
            ended.append(checksum(payload))

        thread = threading.Thread(target=make)
        thread.start()
        begun.wait()
        seen = not ended
        thread.join()
        return seen

    usual = sys.getswitchinterval()
    # So this thread goes on only when the other one lets it.
    sys.setswitchinterval(1000)
    try:
        # It may be late, since others use this machine, too.
        assert any(is_seen_under_way() for _ in range(20))
    finally:
        sys.setswitchinterval(usual)
