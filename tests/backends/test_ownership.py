"""Who may make a new pool on a device: records that are never half, and rules that err on the side of refusing."""

from __future__ import annotations

from pathlib import Path

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from maru_backends.origin import UNKNOWN, Host
from maru_backends.ownership import (
    SLOT_SIZE,
    SLOTS,
    Known,
    OwnerRecord,
    ended,
    left,
    pack_record,
    read_record,
    refusal,
)
from maru_core.pool_format import SUPERBLOCK_SIZE, Superblock

HERE = Host("here", b"i" * 16, b"b" * 16)
NODE, OTHER_NODE = b"n" * 16, b"o" * 16
ME = "owner"


def record_of(host: Host = HERE, place: bytes = NODE, owner: str = ME, abroad: bool = False) -> OwnerRecord:
    return OwnerRecord.of_this(owner, 0, host, place, abroad=abroad)


def known(record: OwnerRecord | None, block: Superblock | None = None, damaged: bool = False) -> Known:
    return Known(record, 1, damaged, block)


def block_of(boot: bytes, place: bytes) -> Superblock:
    return Superblock(4096, 1, 4096, 8192, b"x" * 16, boot, place)


def test_what_was_never_used_is_free() -> None:
    assert refusal(known(None), HERE, NODE, ME, "/dev/dax0.0") is None


@pytest.mark.parametrize("state", ["used", "left", "released"])
def test_where_locks_reach_they_decide(state: str) -> None:
    record = evolve(record_of(), state=state, mapped=True)
    assert refusal(known(record), HERE, NODE, ME, "/dev/dax0.0") is None


OTHER_HOST = Host("there", b"j" * 16, b"c" * 16)
REBOOTED = evolve(HERE, boot=b"d" * 16)
#: A copy of this host's machine id that was started by itself, told apart by its name alone.
NAMELESS = evolve(HERE, identity=UNKNOWN, boot=b"d" * 16)


@pytest.mark.parametrize(
    ("host", "place", "why"),
    [
        (OTHER_HOST, NODE, "no lock reaches from one host to another"),
        (HERE, OTHER_NODE, "another node of the same device"),
        (NAMELESS, NODE, "no lock reaches"),
        (evolve(HERE, boot=UNKNOWN), NODE, "no lock reaches"),
    ],
)
def test_where_locks_do_not_reach_only_what_was_released_with_nobody_left_is_free(
    host: Host, place: bytes, why: str
) -> None:
    record = record_of(host, place)
    for state in (record, left(record), ended(record, mapped=True)):
        reason = refusal(known(state), HERE, NODE, ME, "/dev/dax0.0")
        assert reason is not None
        for part in ("/dev/dax0.0", f"process {record.pid} on host {host.name!r}", why, "--take-over"):
            assert part in reason
    assert refusal(known(ended(record, mapped=False)), HERE, NODE, ME, "/dev/dax0.0") is None


def test_nothing_is_left_of_an_earlier_boot_of_this_host() -> None:
    for state in (record_of(REBOOTED), left(record_of(REBOOTED)), ended(record_of(REBOOTED, OTHER_NODE), mapped=True)):
        assert refusal(known(state), HERE, NODE, "somebody", "/dev/dax0.0") is None


@pytest.mark.parametrize("host", [HERE, REBOOTED, OTHER_HOST])
def test_what_other_hosts_may_have_mapped_is_free_on_the_operators_word_only(host: Host) -> None:
    for record in (record_of(host, abroad=True), ended(record_of(host, abroad=True), mapped=False)):
        reason = refusal(known(record), HERE, NODE, ME, "/dev/dax0.0")
        assert reason is not None
        assert "shared with other hosts" in reason
        assert "--take-over" in reason


def test_what_was_left_is_for_its_owner() -> None:
    record = left(record_of(owner="another"))
    reason = refusal(known(record), HERE, NODE, ME, "/dev/dax0.0")
    assert reason is not None
    assert "left for the next server" in reason
    assert refusal(known(record), HERE, NODE, "another", "/dev/dax0.0") is None


def test_a_pool_without_a_record_is_free_only_where_locks_reach() -> None:
    assert refusal(known(None, block_of(HERE.boot, NODE)), HERE, NODE, ME, "/d") is None
    for block in (block_of(HERE.boot, OTHER_NODE), block_of(b"z" * 16, NODE), block_of(UNKNOWN, NODE), None):
        reason = refusal(known(None, block, damaged=True), HERE, NODE, ME, "/d")
        assert reason is not None
        assert "does not tell" in reason


names = st.text(st.characters(min_codepoint=32, max_codepoint=0xFFFF, blacklist_categories=("Cs",)), max_size=64)
records = st.builds(
    OwnerRecord,
    state=st.sampled_from(["used", "left", "released"]),
    owner=st.text("abcXYZ09._-", min_size=1, max_size=128),
    pool=st.integers(0, 1000),
    host=names,
    host_id=st.binary(min_size=16, max_size=16).map(bytes.hex),
    boot_id=st.binary(min_size=16, max_size=16).map(bytes.hex),
    place=st.binary(min_size=16, max_size=16).map(bytes.hex),
    pid=st.integers(1, 1 << 22),
    started=st.floats(0, 9e10),
    abroad=st.booleans(),
    mapped=st.booleans(),
)


@given(st.lists(records, min_size=1, max_size=5), st.data())
def test_a_record_is_the_new_one_or_the_one_before_whenever_its_writer_dies(
    written: list[OwnerRecord], data: st.DataObject
) -> None:
    page = bytearray(SUPERBLOCK_SIZE)
    before = None
    for number, record in enumerate(written):
        assert read_record(bytes(page)) == (before, number, False)
        offset, packed = pack_record(record, number + 1)
        assert offset in SLOTS
        assert len(packed) <= SLOT_SIZE
        cut = data.draw(st.integers(0, len(packed) - 1))
        torn = page.copy()
        torn[offset : offset + cut] = packed[:cut]
        found = read_record(bytes(torn))[0]
        assert found in (before, record)
        page[offset : offset + len(packed)] = packed
        assert read_record(bytes(page))[0] == record
        record.describe()
        before = record


@given(st.integers(0, SLOT_SIZE - 1), st.integers(1, 255))
def test_damage_is_noticed(at: int, change: int) -> None:
    offset, packed = pack_record(record_of(), 1)
    page = bytearray(SUPERBLOCK_SIZE)
    page[offset : offset + len(packed)] = packed
    page[offset + at] ^= change
    found, _, damaged = read_record(bytes(page))
    if at >= len(packed):
        assert (found, damaged) == (record_of_page(packed), False)
    else:
        # A damaged first word looks as if there had never been one; the superblock is there all the same.
        assert found is None
        assert damaged or at < 8


def record_of_page(packed: bytes) -> OwnerRecord | None:
    page = bytearray(SUPERBLOCK_SIZE)
    page[SLOTS[1] : SLOTS[1] + len(packed)] = packed
    return read_record(bytes(page))[0]


def tree(root: Path, machine: str, boot: str, product: str = "") -> Path:
    for name, text in (
        ("etc/machine-id", machine),
        ("proc/sys/kernel/random/boot_id", boot),
        ("sys/class/dmi/id/product_uuid", product),
    ):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


BOOT = "6a204bd8-9e9d-4a3c-8d5e-0123456789ab"


def test_a_host_is_known_by_its_machine_and_kernel(tmp_path: Path) -> None:
    first = Host.current(tree(tmp_path / "a", "0" * 31 + "1", BOOT))
    again = Host.current(tree(tmp_path / "b", "0" * 31 + "1", BOOT.replace("6", "7")))
    copy = Host.current(tree(tmp_path / "c", "0" * 31 + "1", BOOT.replace("6", "8"), "another-board"))
    assert first.is_this_boot(first.boot)
    assert again.was_rebooted_since(first.identity, first.boot)
    assert not copy.was_rebooted_since(first.identity, first.boot), "a copy of its disk is another machine"
    assert not first.was_rebooted_since(first.identity, first.boot)


@pytest.mark.parametrize("machine", ["", "uninitialized"])
def test_what_a_host_does_not_tell_proves_nothing(tmp_path: Path, machine: str) -> None:
    silent = Host.current(tree(tmp_path, machine, "?"))
    assert (silent.identity, silent.boot) == (UNKNOWN, UNKNOWN)
    assert not silent.is_this_boot(UNKNOWN)
    assert not silent.was_rebooted_since(UNKNOWN, UNKNOWN)
    assert not HERE.was_rebooted_since(UNKNOWN, b"z" * 16)
    assert not HERE.was_rebooted_since(HERE.identity, UNKNOWN)
