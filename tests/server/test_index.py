"""Keys that an index finds by their last bytes alone, and that must not be taken for each other."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings

from maru_core.server.index import KeyIndex, tags_of
from tests.budgets import examples
from tests.server.pure import World

#: Twelve keys with three different endings.
KEYS = [bytes([first]) + bytes(27) + last for first in range(4) for last in (b"\0\0\0\0", b"\0\0\0\1", b"\1\0\0\0")]


class Keys:
    """Whole keys by entry."""

    def __init__(self) -> None:
        self.of: dict[int, bytes] = {}

    def same_keys(self, entries, packed):
        assert len(entries) * 32 == len(packed)
        return b"".join(self.of[entry] for entry in entries) == packed


@settings(max_examples=examples(300), deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["put", "remove", "find", "take"]), st.sets(st.sampled_from(KEYS), min_size=1)))
)
def test_a_key_leads_to_its_own_object_or_to_none(steps):
    table = Keys()
    index = KeyIndex(table)
    model: dict[bytes, int] = {}
    taken = False
    for what, names in steps:
        column = b"".join(names)
        tags = tags_of(column)
        if what == "put" and not taken:
            fresh = [name for name in names if name not in model]
            entries = [max(table.of, default=0) + 1 + at for at in range(len(fresh))]
            table.of.update(zip(entries, fresh, strict=True))
            column = b"".join(fresh)
            index.put(column, tags_of(column), entries)
            model.update(zip(fresh, entries, strict=True))
        elif what == "remove":
            entries = [model.get(name, 999) for name in names]
            strange = index.remove_all(tags, entries)
            assert [entry for _, entry in strange] == [999] * sum(name not in model for name in names)
            for name in names:
                model.pop(name, None)
        elif what == "take":
            # Nothing is put into an index any more from which everything is taken.
            taken = True
            entry = index.take_any()
            assert (entry is None) == (not model)
            if entry is not None:
                assert model.pop(table.of[entry]) == entry
        found = index.find(column, tags_of(column))
        asked = [column[at : at + 32] for at in range(0, len(column), 32)]
        assert list(found) == [model.get(name) for name in asked]
        assert [index.get(name) for name in KEYS] == [model.get(name) for name in KEYS]
        assert len(index) == len(model)
        assert sorted(index) == sorted(model.values())


def test_keys_with_one_ending_are_objects_of_their_own():
    world = World.of(24)
    session = world.session()
    column = b"".join(KEYS)
    assert world.store(session, KEYS[:6]) == bytes(6)
    assert world.store(session, KEYS) == b"\1" * 6 + bytes(6)
    assert world.directory.probe(session, KEYS) == b"\1" * 12
    entries = world.directory.acquire(session, 1, (), True, column)[1]
    headers = [world.directory.arenas[0].headers.read(entry) for entry in entries]
    assert [header.key for header in headers] == KEYS
    world.directory.release(session, 1, 100)
    assert world.directory.delete(session, KEYS[:3]) == b"\1" * 3
    assert world.directory.probe(session, KEYS) == bytes(3) + b"\1" * 9
    world.check()
    for number in range(4):
        world.store(session, [bytes([200 + number]) + bytes(31)] * 2)
        world.check()


def test_a_damaged_header_is_a_miss_and_nothing_is_lost():
    world = World.of(8)
    session = world.session()
    world.store(session, KEYS[:2])
    entry = session.namespace.index.get(KEYS[0])
    table = world.directory.arenas[0].headers._bytes
    before = bytes(table)
    table[entry * 128 + 100] ^= 1
    assert world.directory.probe(session, KEYS[:2]) == b"\0\1"
    assert world.store(session, KEYS[:1]) == b"\0"
    assert world.directory.probe(session, KEYS[:2]) == b"\1\1"
    table[entry * 128 + 100] = before[entry * 128 + 100]
    # Whichever of the two goes first: all are evicted, and none is found any more.
    assert world.store(session, KEYS[4:12]) == bytes(8)
    assert world.directory.probe(session, KEYS[:2]) == bytes(2)
    world.check()
