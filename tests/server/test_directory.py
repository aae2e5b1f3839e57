"""Directed cases of the directory: order of eviction, fragmentation, shares, resets."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from maru_core.contracts import NewPolicy
from maru_core.pool_format import State
from maru_core.protocol.messages import CommitStatus, Presence, ReserveStatus
from maru_core.server.eviction import LeastRecentlyUsed, least_recently_used
from maru_core.server.objects import Postponed
from maru_core.server.reuse import reuse_policy
from tests.server.pure import GRANULE, World
from tests.server.raw import key


def keys(first: int, count: int) -> list[bytes]:
    return [key(number) for number in range(first, first + count)]


def test_neighbouring_chunks_lie_next_to_each_other():
    world = World.of(64)
    _, entries, _ = world.directory.reserve(world.session(), keys(0, 16), (), 2 * GRANULE)
    assert [entries[at + 1] - entries[at] for at in range(15)] == [2] * 15


def test_a_key_is_visible_only_once_it_is_committed():
    world = World.of(4)
    writer, reader = world.session(), world.session()
    _, entries, generations = world.directory.reserve(writer, keys(0, 1), (), 1)
    assert world.directory.probe(reader, keys(0, 1)) == bytes([Presence.WRITING])
    assert world.directory.acquire(reader, 1, keys(0, 1), False)[0] == bytes([Presence.WRITING])
    assert world.directory.reserve(reader, keys(0, 1), (), 1)[0] == bytes([ReserveStatus.BUSY])
    world.directory.commit(writer, list(entries), list(generations))
    assert world.directory.probe(reader, keys(0, 1)) == bytes([Presence.READY])
    assert world.directory.reserve(reader, keys(0, 1), (), 1)[0] == bytes([ReserveStatus.PRESENT])
    world.check()


def test_the_least_recently_used_object_goes_first():
    world = World.of(3)
    session = world.session()
    for name in keys(0, 3):
        world.store(session, [name])
    world.directory.acquire(session, 1, keys(0, 1), False)
    world.directory.release(session, 1, 10)
    world.store(session, keys(9, 1))
    assert world.directory.probe(session, keys(0, 3)) == bytes([1, 0, 1])


def test_a_prefix_loses_its_tail_before_its_head():
    world = World.of(6)
    session = world.session()
    world.store(session, keys(0, 6), parents=(key(99),))
    lengths = []
    for number in range(100, 105):
        world.store(session, keys(number, 1))
        found = world.directory.probe(session, keys(0, 6))
        lengths.append(len(found) - len(found.lstrip(b"\1")))
        assert found == found[: lengths[-1]] + bytes(6 - lengths[-1]), "a hole in the middle of a prefix"
        # What was stored last is the least valuable for this test: keep it out of the way.
        world.directory.delete(session, keys(number, 1))
        world.store(session, keys(number, 1))
    assert lengths[0] == 5
    world.check()


def test_a_head_that_is_older_than_its_tail_waits_for_it():
    world = World.of(4)
    session = world.session()
    world.store(session, keys(0, 1))
    world.store(session, keys(1, 1), parents=(key(0),))
    world.store(session, keys(2, 1), parents=(key(1),))
    world.store(session, keys(7, 1))
    world.directory.acquire(session, 1, keys(2, 1), False)
    world.directory.release(session, 1, 10)
    # 0 and 1 are colder than 7 but have descendants.
    world.store(session, keys(8, 1))
    assert world.directory.probe(session, keys(0, 3)) == b"\1\1\1"
    assert world.directory.probe(session, keys(7, 1)) == b"\0"
    world.store(session, keys(9, 2))
    assert world.directory.probe(session, keys(0, 3)) in (b"\1\1\0", b"\1\0\0")
    world.check()


def test_a_parent_is_not_evicted_for_its_child():
    world = World.of(1)
    session = world.session()
    world.store(session, keys(0, 1))
    assert world.store(session, keys(1, 1), parents=(key(0),)) == bytes([ReserveStatus.NO_ROOM])
    assert world.directory.probe(session, keys(0, 1)) == b"\1"
    assert world.store(session, keys(1, 1)) == bytes([ReserveStatus.NEW])


def test_odd_parents_make_nothing_immortal():
    world = World.of(4)
    session = world.session()
    a, b = keys(0, 2)
    world.store(session, [a, b], parents=(b, a))
    world.store(session, keys(2, 1), parents=(key(2),))
    world.check()
    assert world.store(session, keys(10, 4)) == bytes(4)


def test_a_leased_neighbour_is_not_evicted():
    world = World.of(4)
    writer, reader = world.session(), world.session()
    for name in keys(0, 4):
        world.store(writer, [name])
    world.directory.acquire(reader, 1, keys(1, 1), False)
    assert world.store(writer, keys(10, 1), 2 * GRANULE) == b"\0"
    assert world.directory.probe(reader, keys(0, 4)) == b"\1\1\0\0", "what is hemmed in makes no room, and stays"
    world.check()


def test_a_neighbour_with_children_is_not_evicted():
    world = World.of(4)
    session = world.session()
    for name in keys(0, 3):
        world.store(session, [name])
    world.store(session, keys(3, 1), parents=(key(1),))
    assert world.store(session, keys(10, 1), 2 * GRANULE) == b"\0"
    assert world.directory.probe(session, keys(0, 4)) in (b"\0\1\0\0", b"\0\1\0\1")
    world.check()


def test_everything_leased_means_no_room_and_then_room_again():
    world = World.of(8)
    reader, writer = world.session(), world.session()
    world.store(writer, keys(0, 8))
    world.directory.acquire(reader, 1, keys(0, 8), True)
    assert world.store(writer, keys(10, 2)) == bytes([ReserveStatus.NO_ROOM] * 2)
    assert world.directory.counters["skipped_no_room"] == 2
    world.directory.release(reader, 1, 100)
    assert world.store(writer, keys(10, 2)) == bytes(2)
    world.check()


def test_fragments_are_joined_by_evicting_neighbours():
    """Objects of 20 and 36 granules in turn, every second one gone: a further 36 must fit."""
    world = World.of(560)
    session = world.session()
    for number in range(10):
        assert world.store(session, keys(2 * number, 1), 20 * GRANULE) == b"\0"
        assert world.store(session, keys(2 * number + 1, 1), 36 * GRANULE) == b"\0"
    world.directory.delete(session, keys(0, 20)[1::2])
    for number in range(10):
        assert world.store(session, keys(100 + number, 1), 37 * GRANULE) == b"\0"
        world.check()
    assert world.directory.counters["evicted"] <= 20


def test_a_large_object_replaces_many_small_ones():
    world = World.of(64)
    session = world.session()
    world.store(session, keys(0, 64))
    assert world.store(session, keys(100, 1), 64 * GRANULE) == b"\0"
    world.check()
    assert world.store(session, keys(200, 3)) == b"\0\0\0"
    assert world.directory.probe(session, keys(100, 1)) == b"\0"
    world.check()


def test_small_objects_do_not_evict_more_than_they_need():
    world = World.of(100)
    session = world.session()
    for number in range(10):
        world.store(session, keys(number, 1), 10 * GRANULE)
    world.store(session, keys(50, 10))
    assert world.directory.counters["evicted"] == 1
    world.check()


def test_an_object_larger_than_any_pool_is_refused():
    world = World.of(4)
    session = world.session()
    for length in (0, 4 * GRANULE + 1):
        assert world.directory.reserve(session, keys(0, 1), (), length)[0] == bytes([ReserveStatus.REFUSED])


def test_a_session_leases_at_most_its_share():
    world = World.of(10, share=0.5)
    writer, reader, other = world.session(), world.session(), world.session()
    world.store(writer, keys(0, 10))
    statuses = world.directory.acquire(reader, 1, keys(0, 8), False)[0]
    assert statuses == bytes([Presence.READY] * 5 + [Presence.BUSY] * 3)
    assert world.directory.acquire(reader, 2, keys(0, 8), True)[0] == bytes([1] * 5 + [3, 0, 0])
    assert world.directory.acquire(other, 3, keys(5, 5), True)[0] == bytes([1] * 5)
    world.check()


def test_a_deleted_object_stays_until_its_reader_is_done():
    world = World.of(1)
    writer, reader = world.session(), world.session()
    world.store(writer, keys(0, 1))
    _, entries, generations, _ = world.directory.acquire(reader, 1, keys(0, 1), False)
    assert world.directory.delete(writer, keys(0, 1)) == b"\1"
    assert world.directory.probe(writer, keys(0, 1)) == b"\0"
    header = world.directory.arenas[0].headers.read(entries[0])
    assert (header.state, header.generation) == (State.RETIRING, generations[0])
    assert world.store(writer, keys(1, 1)) == bytes([ReserveStatus.NO_ROOM])
    world.directory.release(reader, 1, 1)
    world.check()
    assert world.directory.arenas[0].headers.read(entries[0]).state == State.FREE
    assert world.store(writer, keys(1, 1)) == b"\0"


def test_a_store_in_flight_cannot_survive_a_reset():
    world = World.of(8)
    writer = world.session()
    world.store(writer, keys(0, 2))
    _, entries, generations = world.directory.reserve(writer, keys(2, 2), (), 1)
    hidden = world.directory.reset(writer.namespace, 0)
    assert world.directory.probe(writer, keys(0, 4)) == bytes(4)
    while not world.directory.drain(writer.namespace, hidden, 1):
        pass
    # The same key may be stored anew before the old writer is done.
    assert world.store(writer, keys(2, 1)) == b"\0"
    assert world.directory.commit(writer, list(entries), list(generations)) == bytes([CommitStatus.UNKNOWN] * 2)
    assert world.directory.probe(writer, keys(2, 2)) == b"\1\0"
    assert world.directory.arenas[0].free.free == 7
    world.check()


def test_checksums_reach_the_header():
    world = World.of(4)
    session = world.session()
    _, entries, generations = world.directory.reserve(session, keys(0, 2), (), 1)
    world.directory.commit(session, list(entries), list(generations), [7, 0])
    assert [world.directory.arenas[0].headers.read(entry).checksum for entry in entries] == [7, 0]
    assert world.directory.arenas[0].headers.read(entries[0]).state == State.READY


def test_what_its_reader_found_damaged_is_dropped_whoever_reads_it():
    world = World.of(8)
    writer, reader, stranger = world.session(), world.session(), world.session(b"other")
    world.store(writer, keys(0, 3))
    _, entries, generations, _ = world.directory.acquire(reader, 5, keys(0, 3), False)
    unknown = bytes([CommitStatus.UNKNOWN])
    assert world.directory.drop_damaged(stranger, entries, generations) == unknown * 3
    assert world.directory.drop_damaged(writer, entries[:1], [generations[0] + 1]) == unknown
    assert world.directory.drop_damaged(writer, [8, 7, 2**32 - 1], [1, 1, 1]) == unknown * 3
    assert world.directory.probe(writer, keys(0, 3)) == b"\1\1\1"
    assert world.directory.drop_damaged(writer, [*entries[:2], entries[0]], [*generations[:2], generations[0]]) == (
        b"\0\0" + unknown
    )
    assert world.directory.probe(writer, keys(0, 3)) == b"\0\0\1"
    assert world.directory.counters["damaged"] == 2
    assert world.directory.arenas[0].free.free == 5, "leased bytes stay"
    assert world.store(writer, keys(0, 1)) == b"\0", "the key can be stored anew at once"
    world.check()
    world.directory.release(reader, 5, 100)
    assert world.directory.arenas[0].free.free == 6
    world.check()


def test_what_is_being_written_or_was_hidden_by_a_reset_is_not_dropped_as_damaged():
    world = World.of(4)
    session = world.session()
    _, entries, generations = world.directory.reserve(session, keys(0, 1), (), 1)
    assert world.directory.drop_damaged(session, entries, generations) == bytes([CommitStatus.UNKNOWN])
    world.directory.commit(session, list(entries), list(generations))
    hidden = world.directory.reset(session.namespace, 0)
    world.directory.drop_damaged(session, entries, generations)
    while not world.directory.drain(session.namespace, hidden, 100):
        pass
    assert world.directory.arenas[0].free.free == 4
    world.check()


def test_a_writer_that_is_gone_finishes_too_late():
    world = World.of(4)
    first, second = world.session(), world.session()
    _, entries, generations = world.directory.reserve(first, keys(0, 4), (), GRANULE)
    world.finish(first)
    assert world.store(second, keys(0, 4)) == bytes(4)
    for session in (first, second, world.session()):
        assert world.directory.commit(session, entries, generations) == b"\1" * 4
        assert world.directory.abort(session, entries, generations) == b"\1" * 4
    assert (world.directory.arenas[0].used, world.directory.counters["stored"]) == (4, 4)
    assert world.directory.probe(second, keys(0, 4)) == b"\1" * 4
    world.check()


def test_a_key_asked_for_twice_is_leased_twice():
    world = World.of(8, policy=reuse_policy)
    session = world.session()
    world.store(session, keys(0, 3))
    names = [*keys(0, 3), *keys(2, 1)]
    assert world.directory.acquire(session, 1, names, True)[0] == bytes([Presence.READY]) * 4
    world.check()
    world.directory.release(session, 1, 4)
    world.check()
    assert world.store(session, keys(3, 8)) == bytes(8), "nothing is held any more"


def test_what_was_put_off_behind_a_fault_is_done_later():
    postponed, done = Postponed(), []
    for act in (lambda: done.append(1), lambda: done.append(1 // 0), lambda: done.append(3)):
        postponed.add(act)
    with pytest.raises(ZeroDivisionError):
        postponed.settle()
    postponed.settle()
    assert done == [1, 3]


class Faulty(LeastRecentlyUsed):
    """Raises at the first object."""

    failed = False

    def add(self, entries):
        if not self.failed:
            self.failed = True
            raise ValueError("a plugin's fault")
        super().add(entries)


def test_a_policy_that_raises_breaks_nothing_else():
    def policy(base: int, count: int, clock: Callable[[], float]) -> NewPolicy:
        new = least_recently_used(base, count, clock)
        return lambda: Faulty(new()._uses)

    world = World.of(4, policy=policy)
    session = world.session()
    world.store(session, keys(0, 2))
    with pytest.raises(ValueError, match="a plugin"):
        world.check()
    world.check()
    assert world.directory.acquire(session, 1, keys(0, 2), True)[0] == bytes([Presence.READY]) * 2
    world.directory.release(session, 1, 2)
    world.check()
    assert world.store(session, keys(2, 4)) == bytes(4)
