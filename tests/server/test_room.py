"""Room that is made while nobody waits: how much, of what, and that a full pool then answers like a free one."""

from __future__ import annotations

import pytest

from maru_core.protocol.messages import ReserveStatus
from tests.server.pure import GRANULE, World
from tests.server.raw import key
from tests.server.raw import keys as column
from tests.waiting import eventually


def keys(first: int, count: int) -> list[bytes]:
    return [key(number) for number in range(first, first + count)]


def make_ahead(world: World) -> int:
    """Until there is nothing to do; granules that are free then."""
    while world.directory.is_short():
        world.directory.make_ahead()
    world.check()
    return world.directory.arenas[0].free.free


def full(count: int, batch: int, chain: bool = True, length: int = GRANULE) -> World:
    world = World.of(count)
    session = world.session()
    for first in range(0, count // (length // GRANULE), batch):
        parents = (key(10**6 + first),) if chain else ()
        assert not any(world.store(session, keys(first, batch), length, parents))
    return world


def test_nothing_is_made_ahead_where_nothing_is_missing():
    """It is asked for all the same while objects move between pools."""
    world = full(4, 4)
    assert not world.directory.is_short()
    world.directory.make_ahead()
    assert len(world.ready()) == 4
    world.check()


@pytest.mark.slow
def test_two_batches_are_kept_free():
    world = full(1000, 4)
    assert make_ahead(world) == 8
    assert world.directory.counters["evicted"] == 8
    session = world.session()
    assert world.store(session, keys(5000, 4)) == bytes(4)
    assert world.directory.counters["evicted"] == 8, "the room that was made is not used"
    assert make_ahead(world) == 8


def test_one_hundredth_of_the_pool_is_kept_free_at_most():
    for chain in (True, False):
        world = full(1000, 100, chain)
        assert make_ahead(world) == 10
        assert world.directory.counters["evicted"] == 10


def test_nothing_is_evicted_while_there_is_room():
    world = World.of(1000)
    session = world.session()
    for first in range(0, 900, 100):
        world.store(session, keys(first, 100))
        assert not world.directory.is_short()


def test_a_small_pool_keeps_nothing_free():
    assert make_ahead(full(96, 16)) == 0
    assert make_ahead(full(800, 10, length=10 * GRANULE)) == 0


def test_a_chain_loses_its_tail():
    world = full(1000, 20)
    make_ahead(world)
    session = world.session()
    assert world.directory.probe(session, keys(0, 20)) == b"\1" * 10 + bytes(10)


@pytest.mark.slow
def test_many_are_evicted_together_when_they_lie_together():
    world = full(4000, 20)
    assert make_ahead(world) == 40
    session = world.session()
    assert world.directory.probe(session, keys(0, 60)) == bytes(40) + b"\1" * 20
    assert world.directory.counters["evicted"] == 40
    assert world.store(session, keys(0, 40), parents=(key(59),)) == bytes(40)
    world.check()


def test_objects_that_lie_together_in_two_namespaces_are_counted_in_theirs():
    world = World.of(1000)
    for first in range(0, 1000, 5):
        world.store(world.session(b"%d" % (first % 2)), keys(first, 5))
    assert make_ahead(world) == 10


def test_a_head_older_than_its_tail_waits_for_it():
    world = World.of(1000)
    session = world.session()
    for number in range(20):
        world.store(session, keys(number, 1), parents=(key(number - 1 if number else 999),))
    world.store(session, keys(100, 980))
    assert make_ahead(world) == 10
    found = world.directory.probe(session, keys(0, 20))
    assert found == found.rstrip(b"\0") + bytes(20 - len(found.rstrip(b"\0"))), "a hole in the middle of a prefix"
    assert b"\0" not in found.rstrip(b"\0")
    assert found[0] == 1


def test_a_child_from_elsewhere_keeps_its_parent():
    world = full(1000, 20)
    session = world.session()
    world.directory.delete(session, keys(999, 1))
    assert world.store(session, keys(5000, 1), parents=(key(19),)) == b"\0"
    world.check()
    assert make_ahead(world) == 2
    world.directory.reserve(session, keys(6000, 20), (), GRANULE)
    make_ahead(world)
    assert world.directory.probe(session, keys(19, 1)) == b"\1"


def test_who_took_the_place_of_a_parent_is_no_parent():
    world = World.of(3, ahead=1.0)
    session = world.session()
    parent, child, stranger, heir = keys(0, 4)
    world.store(session, [parent, child], parents=(key(99),))
    world.directory.delete(session, [parent])
    world.store(session, [stranger], parents=(key(99),))
    world.store(session, [heir], parents=(stranger,))
    assert make_ahead(world) == 2
    assert world.directory.probe(session, [child, stranger, heir]) == b"\0\1\0"


def test_leased_objects_stay():
    world = full(400, 100)
    reader = world.session()
    assert not any(world.directory.acquire(reader, 1, keys(0, 400), True)[0].translate(None, b"\1"))
    assert world.store(world.session(), keys(5000, 4)) == bytes([ReserveStatus.NO_ROOM] * 4)
    assert make_ahead(world) == 0
    assert not world.directory.is_short(), "it would be tried for ever"
    assert world.directory.probe(reader, keys(0, 400)) == b"\1" * 400


def test_what_a_batch_has_taken_already_is_no_neighbour_to_evict():
    """The pages of a reservation lead nowhere before it is entered: not to whoever was there before."""
    world = World.of(14)
    session, reader = world.session(), world.session()
    for number, pages in enumerate((1, 1, 3, 2, 1, 1, 1, 4)):
        assert world.store(session, keys(number, 1), pages * GRANULE) == b"\0"
    world.directory.acquire(reader, 1, [key(1), key(6)], False)
    world.directory.acquire(reader, 2, keys(0, 1), False)
    world.directory.release(reader, 2, 1)
    statuses, entries, _ = world.directory.reserve(session, keys(100, 2), (), 4 * GRANULE)
    assert (bytes(statuses), entries.tolist()) == (b"\0\0", [2, 10])
    assert world.directory.probe(session, keys(0, 1)) == b"\1", "it was used last, and lies elsewhere"
    world.check()


def test_what_is_larger_than_the_room_that_is_missing_stays():
    world = World.of(1000)
    session = world.session()
    world.store(session, keys(0, 1), 500 * GRANULE)
    world.store(session, keys(1, 500))
    assert make_ahead(world) == 0
    assert world.directory.probe(session, keys(0, 1)) == b"\1"
    # The one that was spared is still the first to go when somebody needs the room.
    assert world.store(session, keys(9000, 1)) == b"\0"
    assert world.directory.probe(session, keys(0, 2)) == b"\0\1"


@pytest.mark.slow
def test_a_server_makes_room_when_it_is_idle(start_server, connect):
    server = start_server("--size", str(1000 * 4224 + 8192))
    client = connect(server).hello()
    for first in range(0, 1100, 100):
        client.store(column(first, 100), 100)
    pool = client.stats()["pools"][0]
    ahead = pool["capacity"] // pool["granule"] // 100 * pool["granule"]
    eventually(lambda: client.stats()["pools"][0]["free"] == ahead)


@pytest.mark.parametrize("demote", [False, True])
@pytest.mark.parametrize("quota", [None, 12 * GRANULE - 1, 10 * GRANULE])
def test_room_is_made_where_only_the_children_in_another_pool_were_in_the_way(demote, quota):
    world = World.of(6, 6, demote=demote)
    session = world.session()
    heads, tails = [key(number) for number in range(6)], [key(number) for number in range(6, 12)]
    world.store(session, heads)
    world.store(session, tails, parents=tuple(heads))
    if demote:  # it evicts from the last pool first, so heads are to be there
        world.directory.delete(session, heads)
        world.store(session, heads, parents=tuple(tails))
    world.check()
    fitting = 12 if quota is None else quota // GRANULE
    world.directory.set_quota(session.namespace, quota)
    assert world.store(session, [key(number) for number in range(20, 32)]).count(0) == fitting
    world.check()
