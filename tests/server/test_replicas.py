"""Replicas in the first pool of what is used again and again in a lower one."""

from __future__ import annotations

import pytest

from maru_core.pool_format import State
from maru_core.protocol.messages import Presence
from maru_core.server import moves
from maru_core.server.moves import Move
from maru_core.server.objects import REPLICA
from maru_core.server.sessions import Session
from tests.server.pure import GRANULE, World
from tests.server.raw import key
from tests.server.test_moves import killed_in_a_move, pool_of
from tests.server.test_recovery import keys

READY, ABSENT = bytes([Presence.READY]), bytes([Presence.ABSENT])


def tiers(upper: int, lower: int, **options: object) -> tuple[World, Session]:
    """Chain 0..3 in the lower pool; the upper one is free."""
    world = World.of(upper, lower, promote=True, **options)  # type: ignore[arg-type]
    session = world.session()
    world.store(session, keys(100, upper))
    world.store(session, keys(0, 4), parents=(key(99),))
    world.directory.delete(session, keys(100, upper))
    assert [pool_of(world, name) for name in keys(0, 4)] == [1] * 4
    world.check()
    return world, session


def use(world: World, session: Session, names: list[bytes], lease: int = 50) -> list[int]:
    """Read once; the pools that were read from."""
    statuses, entries, _, _ = world.directory.acquire(session, lease, names, True)
    assert bytes(statuses) == READY * len(names)
    pools = [world.directory.objects.arena_of(entry).number for entry in entries]
    world.directory.release(session, lease, 99)
    world.check()
    return pools


def copy_up(world: World, session: Session, names: list[bytes]) -> list[Move]:
    """Use them twice, and make replicas of them."""
    for _ in range(2):
        use(world, session, names)
    done = []
    while (move := world.directory.next_move()) is not None:
        world.check()
        assert not move.down
        assert world.directory.finish_move(move, True)
        world.check()
        done.append(move)
    return done


def test_what_is_used_twice_is_read_from_the_first_pool():
    world, session = tiers(4, 8)
    use(world, session, keys(0, 4))
    assert not world.directory.has_next_move(), "once is not enough"
    links, ready = world.links(), world.ready()
    assert len(copy_up(world, session, keys(0, 2))) == 2
    assert use(world, session, keys(0, 4)) == [0, 0, 1, 1]
    assert world.directory.probe(session, keys(0, 5)) == READY * 4 + ABSENT
    assert (world.links(), world.ready()) == (links, ready), "the objects themselves stay where they are"
    upper, lower = world.directory.arenas
    assert (upper.replicas, upper.promoted_in, upper.objects, lower.objects) == (2, 2, 0, 4)
    assert (session.namespace.objects, sum(session.namespace.taken)) == (4, 6)
    assert len(copy_up(world, session, keys(0, 4))) == 2, "the others are there already"


def test_the_read_order_decides():
    world, session = tiers(4, 8, read_order=(1, 0))
    copy_up(world, session, keys(0, 2))
    assert use(world, session, keys(0, 2)) == [1, 1]


def test_a_replica_only_takes_what_is_free():
    world, session = tiers(4, 8, ahead=0.5)
    world.store(session, keys(20, 3))
    # Batches of three: twice as much is kept free, but no more than a half of the pool; and of that one half.
    assert copy_up(world, session, keys(0, 4)) == []
    world.store(session, keys(30, 1))
    assert world.directory.arenas[0].free.free == 0
    assert copy_up(world, session, keys(0, 4)) == []
    world.directory.delete(session, [*keys(20, 3), *keys(30, 1)])
    assert len(copy_up(world, session, keys(0, 4))) == 3


def test_a_replica_that_somebody_reads_stays_until_the_end():
    world, session = tiers(4, 8)
    (move,) = copy_up(world, session, keys(0, 1))
    reader = world.session()
    _, entries, generations, _ = world.directory.acquire(reader, 1, keys(0, 1), True)
    assert (entries[0], generations[0]) == (move.target, move.target_generation)
    world.directory.delete(session, keys(0, 1))
    world.check()
    assert world.directory.objects.state[move.target] == State.RETIRING
    assert world.directory.objects.state[move.source] == State.FREE
    world.directory.release(reader, 1, 9)
    world.check()
    assert world.directory.objects.state[move.target] == State.FREE


def dropped(world: World, session: Session, move: Move) -> None:
    world.directory.delete(session, keys(0, 1))


def damaged(world: World, session: Session, move: Move) -> None:
    assert world.directory.drop_damaged(session, [move.source], [move.source_generation]) == b"\0"


def damaged_above(world: World, session: Session, move: Move) -> None:
    assert world.directory.drop_damaged(session, [move.target], [move.target_generation]) == b"\0"


def evicted(world: World, session: Session, move: Move) -> None:
    world.directory.evict(session.namespace, [move.source])


def reset(world: World, session: Session, move: Move) -> None:
    hidden = world.directory.reset(session.namespace, 0)
    assert not any(world.directory.probe(session, keys(0, 4)))
    assert hidden is not None
    while not world.directory.drain(session.namespace, hidden, 1):
        world.check()


@pytest.mark.parametrize("what", [dropped, damaged, damaged_above, evicted, reset])
def test_a_replica_goes_with_its_object(what):
    world, session = tiers(4, 8)
    (move,) = copy_up(world, session, keys(0, 1))
    what(world, session, move)
    world.check()
    assert world.directory.probe(session, keys(0, 1)) == ABSENT
    assert world.directory.arenas[0].free.free == 4
    assert world.directory.arenas[0].replicas == 0


@pytest.mark.parametrize("what", [dropped, damaged, evicted, reset])
def test_no_replica_of_what_is_gone(what):
    world, session = tiers(4, 8)
    for _ in range(2):
        use(world, session, keys(0, 1))
    move = world.directory.next_move()
    assert move is not None
    what(world, session, move)
    world.check()
    assert not world.directory.finish_move(move, True)
    world.check()
    assert world.directory.arenas[0].free.free == 4


def test_what_is_read_all_the_time_can_be_copied():
    world, session = tiers(4, 8)
    use(world, session, keys(0, 1))
    world.directory.acquire(session, 1, keys(0, 1), True)
    move = world.directory.next_move()
    assert move is not None
    assert world.directory.finish_move(move, True)
    world.check()
    assert use(world, world.session(), keys(0, 1)) == [0]
    world.directory.release(session, 1, 9)
    world.check()


def test_a_replica_makes_room_without_a_loss():
    world, session = tiers(4, 8)
    copy_up(world, session, keys(0, 4))
    assert world.directory.arenas[0].free.free == 0
    world.store(session, keys(40, 4))
    assert world.directory.arenas[1].free.free == 0
    assert world.store(session, keys(60, 3)) == bytes(3)
    world.check()
    assert world.directory.probe(session, [*keys(0, 4), *keys(40, 4), *keys(60, 3)]) == READY * 11
    assert world.directory.counters["evicted"] == 0
    assert world.directory.counters["replicas_dropped"] == 3


def test_a_replica_moves_nowhere():
    world, session = tiers(4, 8, demote=True, ahead=1.0)
    copy_up(world, session, keys(3, 1))
    world.store(session, keys(40, 3))
    use(world, session, keys(40, 3))
    world.directory.next_move()
    assert world.directory.counters["replicas_dropped"] == 1
    world.check()


def test_an_object_changes_roles_with_its_replica_rather_than_go():
    """Below it looks as if nobody used it, since all read the replica."""
    world, session = tiers(4, 4)
    (move,) = copy_up(world, session, keys(3, 1))
    links = world.links()
    upper = world.session()
    world.directory.acquire(upper, 1, keys(3, 1), True)
    world.store(session, keys(40, 3))
    assert world.directory.arenas[0].free.free == world.directory.arenas[1].free.free == 0
    world.directory.acquire(upper, 2, keys(40, 3), True)
    assert world.store(session, keys(50, 1)) == b"\0", "the only one that may go is there twice"
    world.check()
    assert world.directory.probe(session, keys(0, 4)) == READY * 4
    assert world.directory.counters["evicted"] == 0
    assert world.ready()[session.namespace.digest, key(3)] == (move.target, move.target_generation)
    assert world.links().items() >= links.items()
    assert not world.directory.objects.replica


def test_what_a_reset_hid_does_not_come_back_with_its_replica():
    world, session = tiers(4, 4)
    copy_up(world, session, keys(3, 1))
    reader = world.session()
    world.directory.acquire(reader, 2, keys(3, 1), True)
    hidden = world.directory.reset(session.namespace, 0)
    assert hidden is not None
    world.store(session, keys(40, 3))
    world.directory.acquire(session, 1, keys(40, 3), True)
    for number in range(60, 64):
        assert world.store(session, [key(number)]) == b"\0"
        world.check()
    assert world.directory.probe(session, keys(0, 4)) == ABSENT * 4
    assert not world.directory.objects.replica


def test_a_replica_that_was_read_can_be_dropped_again():
    world, session = tiers(4, 8)
    copy_up(world, session, keys(0, 4))
    assert use(world, session, keys(0, 4)) == [0] * 4
    world.store(session, keys(40, 4))
    reader = world.session()
    world.directory.acquire(reader, 1, keys(40, 4), True)
    assert world.store(session, keys(60, 4)) == bytes(4)
    assert world.directory.counters["replicas_dropped"] == 4


def test_an_operator_drops_nothing_that_is_read_above():
    world, session = tiers(4, 8)
    (move,) = copy_up(world, session, keys(3, 1))
    world.directory.acquire(session, 1, keys(3, 1), True)
    world.directory.evict(session.namespace, [move.source])
    assert world.directory.probe(session, keys(3, 1)) == READY
    world.directory.release(session, 1, 9)
    world.directory.evict(session.namespace, [move.source])
    assert world.directory.probe(session, keys(3, 1)) == ABSENT


def test_room_is_made_ahead_of_replicas():
    world, session = tiers(8, 8, ahead=0.5)
    copy_up(world, session, keys(0, 4))
    world.store(session, keys(40, 7))
    world.store(session, keys(50, 1))
    world.directory.delete(session, keys(50, 1))
    assert world.directory.is_short()
    world.directory.make_ahead()
    world.check()
    assert world.directory.counters["replicas_dropped"] == 1


def test_a_quota_has_no_room_for_replicas():
    world, session = tiers(4, 8)
    world.directory.set_quota(session.namespace, 5 * GRANULE)
    assert len(copy_up(world, session, keys(0, 4))) == 1


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(moves, "_MOST_RECENT", 2)
    world, session = tiers(4, 8)
    for number in (0, 1, 2, 0, 1, 2):
        use(world, session, keys(number, 1))
    assert not world.directory.has_next_move(), "all were forgotten again"
    monkeypatch.setattr(moves, "_MOST_RECENT", 9)
    monkeypatch.setattr(moves, "_MOST_WAITING", 1)
    assert len(copy_up(world, session, keys(0, 4))) == 1


def test_killed_before_any_line_of_copying_up():
    world, session = tiers(4, 8)
    for _ in range(2):
        use(world, session, keys(0, 1))
    before, taken = world.ready(), sum(arena.free.free for arena in world.directory.arenas)
    move, moments = killed_in_a_move(world)
    served = set()
    for tables in moments:
        again = world.reborn(tables=tables)
        again.check()
        found = again.ready()
        assert found.keys() == before.keys()
        served.add(found[session.namespace.digest, key(0)])
        assert again.links() == world.links()
        again.finish(again.sessions.get(session.id))
        while not again.directory.thaw(3):
            pass
        again.check()
        assert sum(arena.free.free for arena in again.directory.arenas) == taken
        assert not again.directory.objects.replica
    assert served == {(move.source, move.source_generation), (move.target, move.target_generation)}
    assert world.directory.objects.state[move.target] == REPLICA


def test_what_has_a_replica_stays_until_its_children_are_elsewhere():
    """Its child is on its way down. Moved as well, it would leave a replica of nothing behind."""
    world = World.of(4, 4, 40, promote=True, demote=True, ahead=0.5)
    session = world.session()
    objects = world.directory.objects
    world.store(session, keys(100, 4))
    world.store(session, keys(0, 2), parents=(key(99),))
    world.directory.delete(session, keys(100, 4))
    assert [pool_of(world, name) for name in keys(0, 2)] == [1, 1]
    for _ in range(2):
        use(world, session, keys(0, 1))
    while (move := world.directory.next_move()) is not None and move.down:
        assert world.directory.finish_move(move, False) is False
    assert move is not None
    assert world.directory.finish_move(move, True)
    (parent,) = objects.replica
    for number in range(20, 26):
        world.store(session, keys(number, 1))
    started = []
    while (move := world.directory.next_move()) is not None:
        world.check()
        started.append(move)
        assert move.source != parent or parent not in objects.replica
    for move in started:
        world.directory.finish_move(move, True)
        world.check()
    assert all(objects.state[entry] != State.FREE for entry in objects.replica)
    assert world.directory.probe(session, keys(0, 1)) == READY
