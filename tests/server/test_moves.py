"""Several pools: where objects are stored, how they move down, and that they are found meanwhile."""

from __future__ import annotations

from array import array

import pytest

from maru_core.pool_format import State
from maru_core.protocol.messages import Presence
from maru_core.server import moves
from maru_core.server.moves import MOVER, Move
from maru_core.server.reuse import reuse_policy
from maru_core.server.sessions import Session
from tests.server.pure import GRANULE, World
from tests.server.raw import key
from tests.server.test_recovery import keys, tables_at_each_line

READY, WRITING, ABSENT = (bytes([int(each)]) for each in (Presence.READY, Presence.WRITING, Presence.ABSENT))


def tiers(*counts: int, **options: object) -> tuple[World, Session]:
    world = World.of(*counts, ahead=0.5, demote=True, **options)  # type: ignore[arg-type]
    return world, world.session()


def pool_of(world: World, name: bytes) -> int:
    """The pool in which the object of this key is, in the only namespace."""
    places = {found: entry for (_, found), (entry, _) in world.ready().items()}
    return world.directory.objects.arena_of(places[name]).number


def pools_of(world: World, names: list[bytes]) -> list[int]:
    return [pool_of(world, name) for name in names]


def begin(world: World) -> Move:
    move = world.directory.next_move()
    assert move is not None, "there is something to move"
    world.check()
    return move


def move_all(world: World) -> int:
    """Move until nothing is to be moved any more; how many did."""
    done = 0
    while (move := world.directory.next_move()) is not None:
        assert world.directory.finish_move(move, True)
        world.check()
        done += 1
    return done


def full(*counts: int) -> tuple[World, Session, list[bytes]]:
    """The upper pool is full of objects that nobody else precedes; the last one is the one used last."""
    world, session = tiers(*counts)
    names = keys(0, counts[0])
    for name in names:
        world.store(session, [name])
    assert pools_of(world, names) == [0] * counts[0]
    return world, session, names


def test_what_has_no_room_above_goes_below():
    world, session = tiers(4, 8)
    assert world.store(session, keys(0, 10)) == bytes(10)
    assert pools_of(world, keys(0, 10)) == [0] * 4 + [1] * 6
    world.check()
    assert world.directory.acquire(session, 1, keys(0, 10), True)[0] == READY * 10, "one prefix over both"
    assert [arena.hits for arena in world.directory.arenas] == [4, 6]


@pytest.mark.parametrize(("count", "low"), [(8, True), (7, False)])
def test_a_small_pool_keeps_room_for_one_object(count, low):
    """A hundredth of it would be less than that, and then what is in it would stay there for ever."""
    world = World.of(count, 100, ahead=0.01, demote=True)
    session = world.session()
    for name in keys(0, count):
        world.store(session, [name])
    assert world.directory.has_next_move() is low
    assert move_all(world) == low
    assert world.directory.arenas[0].free.free == low


def test_an_object_moves_down_and_is_found_all_the_time():
    world, session, names = full(4, 4)
    move = begin(world)
    assert (move.source_pool, move.target_pool, move.length) == (0, 1, GRANULE)
    assert (move.source_offset, move.target_offset) == (0, 0), "the one that was used longest ago"
    assert world.directory.arenas[1].moving == world.directory.arenas[1].reserved == 1
    assert world.directory.probe(session, names) == READY * 4
    assert world.directory.finish_move(move, True)
    assert world.directory.probe(session, names) == READY * 4
    assert pools_of(world, names) == [1, 0, 0, 0]
    statuses, entries, generations, _ = world.directory.acquire(session, 1, names, True)
    assert (bytes(statuses), entries[0], generations[0]) == (READY * 4, move.target, move.target_generation)
    upper, lower = world.directory.arenas
    assert (upper.demoted_out, lower.demoted_in, lower.moving, world.directory.counters["demoted"]) == (1, 1, 0, 1)
    world.check()


def test_bytes_that_were_not_copied_are_not_served():
    world, *_ = full(4, 4)
    before = world.ready()
    assert not world.directory.finish_move(begin(world), False)
    assert world.ready() == before
    assert world.directory.arenas[1].free.free == 4
    assert world.directory.counters["moves_dropped"] == 1
    world.check()


def test_whoever_reads_keeps_it_where_it_is():
    """It is not among those that are used least, and its header proves to the reader that the bytes were right."""
    world, session, names = full(4, 4)
    move = begin(world)
    _, entries, _, _ = world.directory.acquire(session, 7, names[:1], True)
    assert not world.directory.finish_move(move, True)
    world.check()
    assert list(entries) == [move.source]
    header = world.directory.arenas[0].headers.read(move.source)
    assert header is not None
    assert (header.state, header.generation) == (State.READY, move.source_generation)
    assert world.directory.arenas[0].leased == 1
    world.directory.release(session, 7, 9)
    world.check()
    assert world.directory.arenas[0].leased == 0
    assert begin(world).source != move.source, "it was used just now"


def test_a_reader_that_is_gone_again_does_not_hinder():
    world, session, names = full(4, 4)
    move = begin(world)
    world.directory.acquire(session, 7, names[:1], True)
    world.directory.release(session, 7, 9)
    world.check()
    assert world.directory.finish_move(move, True)
    world.check()


def dropped(world: World, session: Session, move: Move) -> None:
    world.directory.delete(session, [key(0)])


def damaged(world: World, session: Session, move: Move) -> None:
    assert world.directory.drop_damaged(session, [move.source], [move.source_generation]) == b"\0"


def evicted(world: World, session: Session, move: Move) -> None:
    world.directory.evict(session.namespace, [move.source])


def reset(world: World, session: Session, move: Move) -> None:
    world.directory.reset(session.namespace, 0)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("what", [dropped, damaged, evicted, reset])
def test_what_is_gone_meanwhile_does_not_come_back(what, again):
    world, session, names = full(4, 4)
    move = begin(world)
    what(world, session, move)
    world.check()
    assert world.directory.objects.generation[move.source] == move.source_generation
    if again:
        world.store(session, names[:1])
    assert not world.directory.finish_move(move, True)
    world.check()
    assert world.directory.probe(session, names[:1]) == (READY if again else ABSENT)
    assert world.directory.objects.state[move.source] == (State.READY if what is reset else State.FREE)
    assert world.directory.objects.state[move.target] == State.FREE


def test_a_chain_goes_tail_first_and_stays_one():
    world, session = tiers(4, 8)
    world.store(session, keys(0, 4), parents=(key(99),))
    links = world.links()
    first, second = begin(world), begin(world)
    assert (first.source, second.source) == (3, 2), "the next one need not wait"
    assert world.directory.finish_move(first, True)
    assert world.directory.finish_move(second, True)
    world.check()
    assert world.links() == links
    assert pools_of(world, keys(0, 4)) == [0, 0, 1, 1]
    world.store(session, keys(10, 1))
    world.store(session, keys(20, 1))
    assert move_all(world) == 2
    assert (pools_of(world, keys(0, 4)), world.links()) == ([1] * 4, links)
    assert not world.directory.objects.cross


def test_a_head_does_not_overtake_its_tail():
    world, session = tiers(4, 8)
    world.store(session, keys(0, 4), parents=(key(99),))
    first, second = begin(world), begin(world)
    assert not world.directory.finish_move(first, False)
    assert not world.directory.finish_move(second, True), "its child is still in the upper pool"
    world.check()
    assert pools_of(world, keys(0, 4)) == [0] * 4


def test_an_object_moves_to_where_another_namespace_gave_up():
    world = World.of(4, 8, ahead=0.5, demote=True, policy=reuse_policy)
    session, other = world.session(), world.session(b"other")
    names = keys(0, 4)
    for name in names:
        world.store(session, [name])
    for count in (1, 8):  # a short and a long request are of different kinds
        _, entries, generations = world.directory.reserve(other, tuple(keys(8, count)), (), GRANULE)
        world.directory.abort(other, entries, generations)
    assert move_all(world) == 2
    assert pools_of(world, names) == [1, 1, 0, 0]


def test_a_child_that_comes_meanwhile_keeps_its_parent():
    world, session = tiers(4, 8)
    world.store(session, keys(0, 3), parents=(key(99),))
    world.store(session, keys(8, 1))
    move = begin(world)
    assert move.source == 2
    world.directory.delete(session, keys(8, 1))
    world.store(session, keys(5, 1), parents=(key(2),))
    assert pool_of(world, key(5)) == 0
    assert not world.directory.finish_move(move, True)
    world.check()


def test_only_the_last_pool_loses_objects():
    world, session, _ = full(4, 4)
    assert move_all(world) == 2
    for number in range(10, 30):
        assert world.store(session, [key(number)]) == b"\0"
        move_all(world)
    assert [arena.evicted for arena in world.directory.arenas] == [0, world.directory.counters["evicted"]]
    assert pools_of(world, keys(26, 4)) == [1, 1, 0, 0], "what was used last is in the upper pool"


def test_the_upper_pool_loses_objects_when_nothing_below_may_go():
    world, session, _ = full(4, 4)
    world.store(session, keys(10, 4))
    reader = world.session()
    world.directory.acquire(reader, 1, keys(10, 4), False)
    world.directory.settle()
    assert world.directory.next_move() is None
    assert not world.directory.has_next_move(), "nobody tries again and again"
    assert world.store(session, keys(20, 2)) == bytes(2)
    assert pools_of(world, keys(20, 2)) == [0, 0]
    assert world.directory.arenas[0].evicted == 2
    world.check()
    world.directory.release(reader, 1, 9)
    world.store(session, keys(30, 1))
    assert pool_of(world, key(30)) == 1, "there is something below again"


def test_what_was_passed_over_for_eviction_can_still_move():
    """A head whose children are below may not be evicted, but it is not forgotten either."""
    world, session = tiers(4, 4)
    world.store(session, keys(0, 8), parents=(key(99),))
    assert pools_of(world, keys(0, 8)) == [0] * 4 + [1] * 4
    reader = world.session()
    world.directory.acquire(reader, 1, keys(4, 4), False)
    assert world.store(session, keys(20, 1)) == b"\3", "all are heads of what is being read"
    world.directory.delete(session, keys(7, 1))
    world.directory.release(reader, 1, 9)
    assert begin(world).source == 3
    world.check()


def test_an_object_that_could_not_be_read_below_is_evicted_instead():
    world, session = tiers(8, 4)
    world.store(session, keys(0, 1), length=5 * GRANULE)
    world.store(session, keys(1, 3))
    assert world.directory.arenas[0].free.free == 0
    world.store(session, keys(10, 1))
    assert pool_of(world, key(10)) == 1
    move = begin(world)
    assert world.directory.counters["evicted"] == 1
    assert move.length == GRANULE
    assert world.directory.probe(session, keys(0, 1)) == ABSENT


def test_no_object_lies_where_nobody_may_lease_it():
    world = World.of(8, 4, share=0.5)
    session = world.session()
    world.store(session, keys(0, 8))
    assert world.store(session, keys(10, 1), length=3 * GRANULE) == b"\0"
    assert pool_of(world, key(10)) == 0
    assert world.directory.acquire(session, 1, keys(10, 1), False)[0] == READY


def test_moves_in_progress_are_bounded(monkeypatch):
    world, session = tiers(40, 40)
    world.store(session, keys(0, 40))
    monkeypatch.setattr(moves, "MOST_MOVES", 3)
    begun = [begin(world) for _ in range(3)]
    assert world.directory.next_move() is None
    world.directory.finish_move(begun[0], True)
    begun[0] = begin(world)
    monkeypatch.setattr(moves, "MOST_MOVES", 100)
    monkeypatch.setattr(moves, "MOST_BYTES", 4 * GRANULE)
    begun.append(begin(world))
    assert world.directory.next_move() is None
    for move in begun:
        assert world.directory.finish_move(move, True)
    world.check()


def test_a_large_object_moves_alone(monkeypatch):
    world = World.of(8, 8, ahead=1.0, demote=True)
    session = world.session()
    world.store(session, keys(0, 2), length=4 * GRANULE)
    monkeypatch.setattr(moves, "MOST_BYTES", 5 * GRANULE)
    move = begin(world)
    assert world.directory.next_move() is None
    assert not world.directory.has_next_move(), "nobody tries again and again"
    world.directory.finish_move(move, True)
    assert world.directory.finish_move(begin(world), True)
    world.check()


def test_the_checksum_goes_along():
    world, session = tiers(2, 4)
    _, entries, generations = world.directory.reserve(session, keys(0, 2), (), GRANULE)
    world.directory.commit(session, entries, generations, [77, 78])
    move = begin(world)
    world.directory.finish_move(move, True)
    header = world.directory.arenas[1].headers.read(move.target)
    assert header is not None
    assert (header.checksum, header.key, header.digest) == (
        77 + entries.index(move.source),
        key(entries.index(move.source)),
        session.namespace.digest,
    )


def test_copies_do_not_count_against_a_quota():
    world, session = tiers(4, 8)
    world.directory.set_quota(session.namespace, 6 * GRANULE)
    for number in range(4):
        world.store(session, [key(number)])
    begun = [begin(world), begin(world)]
    assert world.store(session, keys(10, 2)) == bytes(2)
    assert world.directory.counters["evicted"] == 0, "six are stored, and two are there twice for a moment"
    for move in begun:
        assert world.directory.finish_move(move, True)
    world.check()
    assert world.store(session, keys(20, 1)) == b"\0"
    assert world.directory.counters["evicted"] == 1


def test_three_pools_fill_one_after_the_other():
    world, session, _ = full(4, 4, 4)
    for number in range(10, 40):
        world.store(session, [key(number)])
        move_all(world)
    upper, middle, last = world.directory.arenas
    assert upper.evicted == middle.evicted == 0
    assert middle.demoted_in > 0
    assert last.demoted_in > 0
    assert last.evicted > 0


def test_without_demotion_all_pools_lose_their_share():
    world = World.of(8, 16)
    session = world.session()
    for number in range(24 + 48):
        assert world.store(session, [key(number)]) == b"\0"
    assert world.directory.next_move() is None
    assert [arena.evicted for arena in world.directory.arenas] == [16, 32]
    world.check()


def test_a_head_that_very_many_share_stays(monkeypatch):
    monkeypatch.setattr(moves, "_MOST_CHILDREN", 3)
    world, session = tiers(2, 8)
    world.store(session, keys(0, 1))
    for number in range(10, 15):
        world.store(session, [key(number)], parents=(key(0),))
    assert pools_of(world, keys(10, 5)) == [0] + [1] * 4
    assert move_all(world) == 1
    assert pool_of(world, key(0)) == 0
    for number in range(10, 13):
        world.directory.delete(session, [key(number)])
    world.store(session, keys(20, 1))
    assert move_all(world) == 1
    assert pool_of(world, key(0)) == 1, "two are not too many"
    world.check()


# What a server leaves behind that is killed while objects move.


def killed_in_a_move(world: World) -> tuple[Move, list[list[bytearray]]]:
    """The next move, made to its end, and the header tables of a server that is killed before any line of it."""
    held: list[Move] = []

    def act() -> None:
        move = world.directory.next_move()
        assert move is not None
        held.append(move)
        assert world.directory.finish_move(move, True)

    moments = tables_at_each_line(world, act)
    return held[0], moments


def test_killed_before_any_line_of_a_move():
    world, session = tiers(4, 4)
    world.store(session, keys(0, 4), parents=(key(99),))
    before = world.ready()
    _, moments = killed_in_a_move(world)
    after = world.ready()
    twice = 0
    assert len(moments) > 4
    for tables in moments:
        again = world.reborn(tables=tables)
        again.check()
        found = again.ready()
        assert found.keys() == before.keys()
        for name, place in found.items():
            assert place in (before[name], after[name])
        headers = [
            arena.headers.read(entry) for arena in again.directory.arenas for entry in range(arena.base, arena.end)
        ]
        retiring = [header for header in headers if header is not None and header.state == State.RETIRING]
        twice += bool(retiring)
        assert {header.key for header in retiring} <= {key(3)}
        again.finish(again.sessions.get(session.id))
        while not again.directory.thaw(3):
            pass
        again.check()
        assert sum(arena.free.free for arena in again.directory.arenas) == 4, "something is not free again"
        assert again.links() == world.links()
    assert twice, "both places were READY for a moment"


def test_half_a_copy_is_free_at_once():
    world, session = tiers(4, 4)
    world.store(session, keys(0, 4))
    move = begin(world)
    header = world.directory.arenas[1].headers.read(move.target)
    assert header is not None
    assert (header.state, header.session) == (State.RESERVED, MOVER)
    again = world.reborn()
    again.check()
    assert [arena.free.free for arena in again.directory.arenas] == [0, 4]
    assert again.directory.frozen
    assert again.directory.next_move() is None, "somebody unknown may read what would be moved"


def test_of_two_copies_the_one_above_is_served():
    world, session = tiers(4, 4)
    world.store(session, keys(0, 4))
    before = world.ready()
    tables = [bytearray(table) for table in world.tables]
    move = begin(world)
    world.directory.finish_move(move, True)
    again = world.reborn(tables=[tables[0], world.tables[1]])
    again.check()
    assert again.ready() == before
    assert again.directory.objects.state[move.target] == State.RETIRING
    mine = again.sessions.get(session.id)
    again.directory.resume_lease(mine, 1, [move.target], [move.target_generation])
    again.sessions.resumed(mine)
    while not again.directory.thaw(3):
        pass
    again.check()
    assert again.directory.objects.generation[move.target] == move.target_generation, "somebody read there"
    again.directory.release(mine, 1, 9)
    again.check()
    assert again.directory.arenas[1].free.free == 4


def test_links_between_pools_survive():
    world, session = tiers(4, 8)
    world.store(session, keys(0, 8), parents=(key(99),))
    again = world.reborn()
    again.check()
    assert again.directory.objects.cross == {3: {4}}
    assert array("I", again.directory.objects.children[:8]) == array("I", [1] * 7 + [0])
