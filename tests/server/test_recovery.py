"""What is left in memory when a server dies at any moment, and what the next one makes of it."""

from __future__ import annotations

import random
import sys
from array import array
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

import maru_core.server
from maru_core.errors import BackendError, ProtocolError
from maru_core.pool_format import HEADER_SIZE, Header, State, pack_header, unpack_header
from maru_core.protocol.messages import Presence
from maru_core.server.eviction import least_recently_used
from maru_core.server.headers import HeaderTable, pairs_of
from maru_core.server.reuse import reuse_policy
from maru_core.server.sessions import Session
from tests.budgets import examples
from tests.server.pure import GRANULE, World
from tests.server.raw import key

SERVER = str(Path(maru_core.server.__file__).parent)


def keys(first: int, count: int) -> list[bytes]:
    return [key(number) for number in range(first, first + count)]


def tables_at_each_line(world: World, act: Callable[[], Any]) -> list[list[bytearray]]:
    """The header tables as a server would leave them that is killed before any line of ``act``, and after it."""
    seen: list[list[bytearray]] = [[bytearray(table) for table in world.tables]]

    def look(frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(SERVER):
            return None
        if event == "line" and seen[-1] != world.tables:
            seen.append([bytearray(table) for table in world.tables])
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        act()
        world.directory.settle()
    finally:
        sys.settrace(before)
    seen.append([bytearray(table) for table in world.tables])
    return seen


def busy_world() -> tuple[World, Session, Session]:
    """A full pool: a chain and single objects, some leased by the second session, two reserved by the first."""
    world = World.of(12)
    writer, reader = world.session(), world.session()
    world.store(writer, keys(0, 5), parents=(key(99),))
    world.store(writer, keys(20, 1), length=3 * GRANULE)
    world.store(writer, keys(30, 2))
    world.directory.acquire(reader, 7, keys(0, 2), False)
    world.directory.reserve(writer, tuple(keys(40, 2)), (), GRANULE)
    world.directory.settle()
    return world, writer, reader


def reserving(world: World, writer: Session, reader: Session) -> None:
    world.directory.reserve(writer, tuple(keys(50, 3)), (), GRANULE)


def reserving_much(world: World, writer: Session, reader: Session) -> None:
    world.directory.reserve(writer, tuple(keys(50, 1)), (), 4 * GRANULE)


def committing(world: World, writer: Session, reader: Session) -> None:
    entries = sorted(writer.reserved)
    world.directory.commit(writer, array("I", entries), array("I", [1] * len(entries)), [5, 6])


def aborting(world: World, writer: Session, reader: Session) -> None:
    entries = sorted(writer.reserved)
    world.directory.abort(writer, entries, [1] * len(entries))


def releasing(world: World, writer: Session, reader: Session) -> None:
    world.directory.release(reader, 7, 10)


def deleting(world: World, writer: Session, reader: Session) -> None:
    world.directory.delete(writer, keys(0, 5))


def resetting(world: World, writer: Session, reader: Session) -> None:
    hidden = world.directory.reset(writer.namespace, 0)
    assert hidden is not None
    while not world.directory.drain(writer.namespace, hidden, 3):
        pass


def evicting_ahead(world: World, writer: Session, reader: Session) -> None:
    world.directory.make_ahead()


def ending(world: World, writer: Session, reader: Session) -> None:
    world.sessions.close(reader)
    while not world.directory.end_session(reader, 3):
        pass


ACTS = [
    reserving,
    reserving_much,
    committing,
    aborting,
    releasing,
    deleting,
    resetting,
    evicting_ahead,
    ending,
]


@pytest.mark.parametrize("act", ACTS)
def test_killed_before_any_line(act):
    """Whatever was READY before and after is found; nothing else is, except what changes between the two."""
    world, writer, reader = busy_world()
    before = world.ready()
    reserved = set(writer.reserved)
    epochs = {writer.namespace.digest: 1} if act is resetting else {}
    moments = tables_at_each_line(world, lambda: act(world, writer, reader))
    after = world.ready()
    assert len(moments) > 2 or act in (releasing, ending, evicting_ahead)
    for tables in moments:
        # A reset is noted on disk before it begins.
        again = world.reborn(epochs, tables)
        again.check()
        found = again.ready()
        if act is resetting:
            assert not found
        for name, place in found.items():
            assert place in (before.get(name), after.get(name)), "something is served that never was"
        for name, place in before.items():
            assert after.get(name) != place or found.get(name) == place, "something is lost that was never dropped"
        mine = again.sessions.get(writer.id)
        if act not in (committing, aborting):
            assert reserved <= {*mine.reserved, *mine.doomed}, "pages that are being written were given away"
        # What the reader leases is neither free nor reserved by somebody else.
        for name in keys(0, 2):
            entry, generation = before[writer.namespace.digest, name]
            assert again.directory.objects.generation[entry] == generation
            if act is not ending and act is not releasing:
                assert again.directory.objects.state[entry] in (State.READY, State.RETIRING)


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, HEADER_SIZE), st.booleans())
def test_a_torn_header_is_noticed(old_generation, generation, cut, backwards):
    """A header that is replaced by another one byte by byte is the old one, the new one, or recognised as neither."""
    old = Header(State.READY, old_generation, 9, 1, 0, bytes(16), 0, key(1), key(2))
    table = bytearray(pack_header(old))
    before = bytes(table)
    HeaderTable(memoryview(table), 0).write_reserved(
        0, 1, pairs_of([key(3)], [key(4)]), array("I", [generation]), 8, 2, bytes(16), 1
    )
    after = bytes(table)
    torn = after[:cut] + before[cut:] if not backwards else before[:cut] + after[cut:]
    assert unpack_header(torn) in (None, unpack_header(before), unpack_header(after))


@given(st.data())
@settings(max_examples=examples(200), deadline=None)
def test_any_bytes_are_refused_or_make_a_sound_directory(data):
    """Damage of a table never ends in a directory that does not fit together."""
    world, *_ = busy_world()
    table = bytearray(world.tables[0])
    rng = random.Random(data.draw(st.integers(0, 1 << 20)))
    for _ in range(data.draw(st.integers(1, 4))):
        kind = data.draw(st.sampled_from(["byte", "copy", "sound"]))
        at = rng.randrange(len(table) // HEADER_SIZE) * HEADER_SIZE
        if kind == "byte":
            table[at + rng.randrange(HEADER_SIZE)] ^= 1 << rng.randrange(8)
        elif kind == "copy":
            source = rng.randrange(len(table) // HEADER_SIZE) * HEADER_SIZE
            table[at : at + HEADER_SIZE] = table[source : source + HEADER_SIZE]
        else:
            state = State(rng.randrange(4))
            length = rng.choice([0, 1, GRANULE, 5 * GRANULE, 1 << 40])
            digest = rng.choice([bytes(16), next(iter(world.directory.namespaces)).digest])
            sound = Header(
                state, rng.randrange(3), length, 1, 0, digest, 0, key(rng.randrange(6)), key(rng.randrange(6))
            )
            table[at : at + HEADER_SIZE] = pack_header(sound)
    try:
        again = world.reborn(tables=[table])
    except BackendError:
        return
    again.check()
    session = again.session()
    for number in range(100, 120):
        again.store(session, [key(number)])
    again.check()
    for owner in list(again.sessions):
        again.finish(owner)
    while not again.directory.thaw(2):
        pass
    again.check()
    session = again.session()
    assert again.store(session, keys(200, 12)) == bytes(12), "everything can be evicted: no cycle, nothing lost"


def test_a_cycle_of_parents_can_be_evicted():
    """Keys alone can name each other as parents; reserved one after the other they never do."""
    world = World.of(4)
    session = world.session()
    world.store(session, keys(1, 1), parents=(key(2),))
    world.store(session, keys(2, 1), parents=(key(1),))
    world.store(session, keys(3, 1), parents=(key(3),))
    again = world.reborn()
    assert len(again.ready()) == 3
    again.finish(again.sessions.get(session.id))
    again.directory.thaw(10)
    again.check()
    fresh = again.session()
    assert again.store(fresh, keys(10, 4)) == bytes(4)


def test_the_table_of_an_earlier_weights_epoch_is_not_served():
    world = World.of(8)
    session = world.session()
    world.store(session, keys(0, 3))
    world.directory.reserve(session, tuple(keys(5, 1)), (), GRANULE)
    again = world.reborn({session.namespace.digest: 1})
    assert again.ready() == {}
    mine = again.sessions.get(session.id)
    assert len(mine.doomed) == 1, "its late write hits its own page"
    assert again.directory.commit(mine, list(mine.doomed), [1]) == b"\1"
    again.directory.thaw(10)
    assert again.directory.arenas[0].free.free == 8


def test_what_became_something_else_is_not_held_again():
    """A client may list what was freed and given out anew while its request to free it was on the way."""
    world = World.of(8)
    session = world.session()
    world.store(session, keys(0, 1))
    _, entries, generations = world.directory.reserve(session, tuple(keys(1, 2)), (), GRANULE)
    again = world.reborn()
    mine = again.sessions.get(session.id)
    stored, generation = again.ready()[session.namespace.digest, key(0)]
    outside = 1 << 31
    listed = again.directory.unlisted(mine, [entries[0], entries[1], outside], [generations[0], generations[1] + 1, 1])
    lost = list(chain.from_iterable(listed))
    assert lost == [entries[1]]
    again.directory.give_back(mine, [*lost, stored, outside])
    again.directory.resume_lease(mine, 1, [stored, outside, entries[0]], [generation + 1, 1, generations[0]])
    again.check()
    assert {*mine.reserved} == {entries[0]}
    assert not mine.held
    again.directory.resume_lease(mine, 1, [stored], [generation])
    again.check()
    assert set(mine.held) == {stored}
    assert again.directory.release(mine, 1, 10) == (True, True)


@pytest.mark.parametrize("after", range(5))
def test_a_reset_while_a_session_says_what_it_uses_frees_nothing_twice(after, monkeypatch):
    """It shows reservations among those that may be committed, and then among those that may not."""
    monkeypatch.setattr("maru_core.server.reservations.SLICE", 1)
    world = World.of(8)
    session = world.session()
    _, entries, generations = world.directory.reserve(session, tuple(keys(0, 3)), (), GRANULE)
    again = world.reborn()
    mine, directory = again.sessions.get(session.id), again.directory
    lost = []
    for at, some in enumerate(directory.unlisted(mine, entries[:1], generations[:1])):
        if at == after:
            directory.reset(mine.namespace, 0)
        lost += some
    directory.give_back(mine, lost)
    again.check()
    assert {*mine.reserved, *mine.doomed} == {entries[0]}
    assert (directory.arenas[0].reserved, directory.arenas[0].free.free) == (1, 7)


@pytest.mark.parametrize("policy", [least_recently_used, reuse_policy])
def test_nobody_goes_on_reading_what_is_in_another_namespace(policy):
    world = World.of(8, policy=policy)
    session, other = world.session(), world.session(b"other")
    world.store(session, keys(0, 2))
    world.store(other, keys(0, 4))
    again = world.reborn()
    mine, theirs = (again.sessions.get(each.id) for each in (session, other))
    listed = [again.ready()[each.namespace.digest, key(0)] for each in (session, other)]
    again.directory.resume_lease(mine, 1, *zip(*listed, strict=True))
    again.check()
    assert set(mine.held) == {listed[0][0]}
    assert again.directory.release(mine, 1, 10) == (True, True)
    while not again.directory.thaw(10):
        pass
    assert again.store(theirs, keys(20, 8)) == bytes(8), "what goes for it is of both"
    again.check()


def test_nobody_goes_on_with_more_leases_than_anybody_can_have(monkeypatch):
    monkeypatch.setattr("maru_core.server.leases._LEASE_ITEMS", 16)
    monkeypatch.setattr("maru_core.server.leases._LEASE_TIMES", 0)
    world = World.of(8)
    session = world.session()
    world.store(session, keys(0, 8))
    again = world.reborn()
    mine = again.sessions.get(session.id)
    entries = [again.ready()[session.namespace.digest, name][0] for name in keys(0, 8)]
    for part in (entries[:4], entries[4:], entries[:4]):  # a lease may go on
        again.directory.resume_lease(mine, 1, part, [1] * 4)
    with pytest.raises(ProtocolError, match="16 objects"):
        again.directory.resume_lease(mine, 2, entries[:1], [1])
    again.check()
    assert mine.lease_items == 16


def test_nothing_is_freed_while_somebody_is_awaited():
    world = World.of(4)
    session = world.session()
    world.store(session, keys(0, 4))
    again = world.reborn()
    newcomer = again.session()
    assert again.store(newcomer, keys(9, 1)) == b"\3", "no room: nothing may be evicted"
    assert again.directory.delete(newcomer, keys(0, 1)) == bytes([Presence.READY])
    assert again.directory.probe(newcomer, keys(0, 1)) == bytes([Presence.ABSENT])
    assert again.store(newcomer, keys(9, 1)) == b"\3", "the deleted object may still be read"
    again.directory.acquire(newcomer, 1, keys(1, 1), False)
    again.directory.delete(newcomer, keys(1, 1))
    again.directory.release(newcomer, 1, 1)
    assert again.store(newcomer, keys(9, 1)) == b"\3"
    again.check()
    assert again.directory.thaw(1) is False
    assert again.directory.thaw(1) is True
    assert again.store(newcomer, keys(9, 2)) == bytes(2)
    again.check()


@pytest.mark.parametrize("use", ["writes", "reads", "nothing"])
def test_pages_behind_a_damaged_header_wait_for_whoever_uses_them(use):
    """A header that was damaged looks like one that was torn; its object may be in use all the same."""
    world = World.of(16)
    session = world.session()
    _, entries, generations = world.directory.reserve(session, tuple(keys(0, 1)), (), 3 * GRANULE)
    world.directory.reserve(session, tuple(keys(10, 1)), (), GRANULE)
    if use == "reads":
        world.directory.commit(session, entries, generations)
    table = bytearray(world.tables[0])
    table[entries[0] * HEADER_SIZE + 40] ^= 1
    again = world.reborn(tables=[table])
    again.check()
    mine, other = again.sessions.get(session.id), again.session()
    assert again.store(other, keys(20, 16)).count(0) == 12, "all but the three behind the damage and the reserved one"
    listed = ([entries[0]], [generations[0]])
    if use == "writes":
        again.directory.give_back(mine, list(chain.from_iterable(again.directory.unlisted(mine, *listed))))
        assert again.directory.commit(mine, array("I", listed[0]), array("I", listed[1])) == b"\1"
    elif use == "reads":
        again.directory.resume_lease(mine, 1, *listed)
    while not again.directory.thaw(10):
        pass
    again.check()
    again.store(other, keys(40, 16))
    taken = {entry for _, (entry, _) in again.ready().items()}
    behind = set(range(entries[0], entries[0] + 3))
    assert taken.isdisjoint(behind) is (use != "nothing")
    again.finish(mine)
    again.check()
    again.store(other, keys(60, 16))
    assert behind <= {entry for _, (entry, _) in again.ready().items()}
    again.check()
