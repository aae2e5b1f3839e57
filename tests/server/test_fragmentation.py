"""Objects of several sizes in one pool: room for large ones, room next to each other, and none at all."""

from __future__ import annotations

import random
import time
from itertools import pairwise
from pathlib import Path

import pytest

from maru_core.protocol import Op
from maru_core.protocol.messages import Presence, ReserveStatus
from tests.server.pure import GRANULE, World
from tests.server.raw import key, u64
from tests.server.raw import keys as column

#: Objects of 20 and 36 MB in granules of 4 MB.
SMALL, LARGE = 5, 9
#: Objects that one store may evict. Two were seen: a victim and its neighbour.
MOST_EVICTED = 4


def keys(first: int, count: int) -> list[bytes]:
    return [key(number) for number in range(first, first + count)]


def full_of_two_sizes(granules: int = 1400) -> tuple[World, list[tuple[int, int]]]:
    """A pool in which small and large objects take turns, and (number of the key, granules) of each."""
    world = World.of(granules)
    session = world.session()
    stored: list[tuple[int, int]] = []
    while True:
        pages = (SMALL, LARGE)[len(stored) % 2]
        if world.directory.arenas[0].free.free < pages:
            return world, stored
        assert world.store(session, keys(len(stored), 1), pages * GRANULE) == b"\0"
        stored.append((len(stored), pages))


@pytest.mark.parametrize("deleted", [SMALL, LARGE])
def test_large_objects_find_room_among_small_ones(deleted):
    world, stored = full_of_two_sizes()
    session = world.session()
    world.directory.delete(session, [key(number) for number, pages in stored if pages == deleted])
    for number in range(1000, 1200):
        before = world.directory.counters["evicted"]
        assert world.store(session, keys(number, 1), LARGE * GRANULE) == b"\0"
        # One neighbour of a gap is enough: a gap and what was beside it are longer than the object.
        assert world.directory.counters["evicted"] - before <= 1 + (deleted == LARGE)
    world.check()


def widest_gap(world: World) -> int:
    """The most granules in a row that are free or could be evicted."""
    objects, most, here, entry = world.directory.objects, 0, 0, 0
    while entry < objects.total:
        step = objects.pages[entry] if objects.state[entry] else 1
        here = 0 if objects.state[entry] and objects.readers[entry] else here + step
        most = max(most, here)
        entry += step
    return most


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5])
@pytest.mark.parametrize("seed", range(3))
def test_leased_objects_that_lie_scattered_only_cost_the_room_they_take(share, seed):
    world, stored = full_of_two_sizes()
    session, reader = world.session(), world.session()
    rng = random.Random(seed)
    rng.shuffle(stored)
    leased = [key(number) for number, _ in stored[: int(len(stored) * share)]]
    assert world.directory.acquire(reader, 1, leased, False)[0] == bytes([Presence.READY]) * len(leased)
    for number in range(1000, 1300):
        pages = rng.choice((SMALL, LARGE))
        possible = widest_gap(world) >= pages
        before = world.directory.counters["evicted"]
        answer = world.store(session, keys(number, 1), pages * GRANULE)
        assert answer == bytes([ReserveStatus.NEW if possible else ReserveStatus.NO_ROOM])
        assert world.directory.counters["evicted"] - before <= MOST_EVICTED
    assert world.directory.probe(reader, leased) == bytes([Presence.READY]) * len(leased)
    world.check()


def test_gaps_that_are_too_narrow_are_no_reason_to_search_for_ever():
    """Every large object is leased, every small one is gone: much is free, and nothing large fits."""
    world, stored = full_of_two_sizes()
    session, reader = world.session(), world.session()
    large = [key(number) for number, pages in stored if pages == LARGE]
    world.directory.acquire(reader, 1, large, False)
    world.directory.delete(session, [key(number) for number, pages in stored if pages == SMALL])
    begin = time.process_time()
    assert world.store(session, keys(5000, 64), LARGE * GRANULE) == bytes([ReserveStatus.NO_ROOM]) * 64
    assert time.process_time() - begin < 0.1
    assert world.directory.counters["skipped_no_room"] == 64
    assert not world.directory.is_short(), "it would be tried for ever"
    assert world.store(session, keys(6000, 100), SMALL * GRANULE) == bytes(100)
    world.directory.release(reader, 1, 1)
    assert world.store(session, keys(7000, 1), LARGE * GRANULE) == b"\0"
    world.check()


def neighbours_after_churn(sizes: tuple[int, ...], pool: int, seed: int) -> float:
    """The part of chunks that lie right behind the one before them, in a full pool where prefixes are used again.

    Each size has a namespace of its own. Batches have up to 32 chunks; all but the first of each count.
    """
    world = World.of(pool)
    rng = random.Random(seed)
    sessions = [world.session(b"%d" % pages) for pages in sizes]
    chains: list[tuple[int, list[bytes]]] = []
    recent = pool * len(sizes) // (32 * sum(sizes))
    adjacent = counted = 0
    for step in range(900):
        which = rng.randrange(len(sizes))
        session, pages = sessions[which], sizes[which]
        names = keys(100 * step, rng.choice([32, 32, rng.randrange(1, 33)]))
        statuses, entries, generations = world.directory.reserve(session, names, (key(10**9 + step),), pages * GRANULE)
        assert not any(statuses)
        assert not any(world.directory.commit(session, entries, generations))
        chains.append((which, names))
        if step >= 300:
            counted += len(entries) - 1
            adjacent += sum(entry == before + pages for before, entry in pairwise(entries))
        for lease in range(2):
            other, used = rng.choice(chains[-recent:])
            found = world.directory.acquire(sessions[other], lease, used[: rng.randrange(1, 33)], True)[0]
            if Presence.READY in found:
                assert world.directory.release(sessions[other], lease, 1000) == (True, True)
        while rng.random() < 0.9 and world.directory.is_short():
            world.directory.make_ahead()
    assert world.directory.arenas[0].free.free < pool // 12, "room is wasted"
    world.check()
    return adjacent / counted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "chunks"),
    # Seen: 0.83, and 0.78 to 0.80. Of several sizes it is 0.5 when small ones go into every gap. Of one size nothing is
    # left in gaps for that, so in a small pool it is 0.4.
    [((2,), 4000), ((1, 3, 5), 1500)],
)
def test_chunks_that_are_stored_together_lie_together(sizes, chunks):
    for seed in range(2):
        assert neighbours_after_churn(sizes, chunks * sum(sizes), seed) > 0.7


def test_small_batches_go_into_gaps():
    """Room is only left between objects for the sake of batches that would be scattered."""
    world, stored = full_of_two_sizes()
    session = world.session()
    world.directory.delete(session, [key(number) for number, pages in stored[:20] if pages == SMALL])
    before = world.directory.counters["evicted"]
    for number in range(50):
        assert world.store(session, keys(2000 + number, 1)) == b"\0"
    assert world.directory.counters["evicted"] == before
    assert world.store(session, keys(3000, 50), SMALL * GRANULE) == bytes(50)
    world.check()


def test_nothing_is_evicted_for_the_sake_of_order_when_much_is_free():
    world, stored = full_of_two_sizes()
    session = world.session()
    gaps = [key(number) for number, pages in stored if pages == SMALL][::2][:20]
    world.directory.delete(session, gaps)
    assert world.store(session, keys(3000, 18), SMALL * GRANULE) == bytes(18)
    assert world.directory.counters["evicted"] == 0, "evicted while more than a sixteenth was free"
    world.check()


def test_what_is_hemmed_in_is_left_alone_and_goes_in_its_turn():
    world = World.of(10)
    session, reader = world.session(), world.session()
    for number, pages in enumerate((1, 1, 1, 1, 1, 1, 2, 2)):
        world.store(session, keys(number, 1), pages * GRANULE)
    hemmed = [key(0), key(2), key(4)]
    world.directory.acquire(reader, 1, [key(1), key(3), key(5)], False)
    assert world.store(session, keys(100, 1), 2 * GRANULE) == b"\0"
    assert world.directory.probe(session, [*hemmed, key(6)]) == b"\1\1\1\0"
    for number, left in ((200, b"\0\1\1"), (201, b"\0\0\1"), (202, b"\0\0\0")):
        assert world.store(session, keys(number, 1)) == b"\0"
        assert world.directory.probe(session, hemmed) == left
    world.check()


def test_a_search_in_vain_ends_and_costs_little():
    """Hundreds of small objects, and a leased one between any two of them."""
    world, stored = full_of_two_sizes(600 * (SMALL + LARGE))
    session, reader = world.session(), world.session()
    world.directory.acquire(reader, 1, [key(number) for number, pages in stored if pages == LARGE], False)
    begin = time.process_time()
    assert world.store(session, keys(5000, 64), LARGE * GRANULE) == bytes([ReserveStatus.NO_ROOM]) * 64
    assert time.process_time() - begin < 0.1
    assert world.directory.counters["evicted"] <= 64
    world.check()


def test_gaps_are_used_when_nothing_can_be_evicted():
    world, stored = full_of_two_sizes()
    session, reader = world.session(), world.session()
    gone = [number for number, pages in stored[:20] if pages == SMALL]
    world.directory.acquire(reader, 1, [key(number) for number, _ in stored if number not in gone], False)
    world.directory.delete(session, [key(number) for number in gone])
    assert world.store(session, keys(3000, 12), SMALL * GRANULE) == bytes(10) + bytes([ReserveStatus.NO_ROOM] * 2)
    world.check()


def test_two_readers_of_one_object_and_one_of_them_lets_go_twice():
    world = World.of(4)
    first, second = world.session(), world.session()
    world.store(first, keys(0, 4))
    for session in (first, second):
        assert world.directory.acquire(session, 1, keys(0, 4), True)[0] == b"\1" * 4
    assert world.directory.release(first, 1, 10) == (True, True)
    assert world.directory.release(first, 1, 10) == (False, True)
    world.finish(first)
    world.check()
    third = world.session()
    assert world.store(third, keys(10, 1)) == bytes([ReserveStatus.NO_ROOM])
    assert world.directory.release(second, 1, 10) == (True, True)
    assert world.store(third, keys(10, 1)) == b"\0"


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has used."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


@pytest.mark.slow
def test_a_pool_that_is_leased_as_a_whole_says_so_and_rests(start_server, connect):
    server = start_server("--size", str(100 * 4224 + 8192), "--lease-share", "1.0")
    writer, reader = connect(server).hello(), connect(server).hello()
    capacity = writer.stats()["pools"][0]["capacity"] // 4096
    assert not any(writer.store(column(0, capacity)))
    last, statuses, _ = reader.acquire(column(0, 1))
    assert statuses == b"\1"
    _, others, _ = reader.acquire(column(1, capacity - 1))
    # While nobody asks, the server makes a little room ahead: an object that is gone is stored and leased again.
    for gone in [at for at, status in enumerate(others, 1) if status != Presence.READY]:
        assert writer.store(column(gone, 1)) == b"\0"
        assert reader.acquire(column(gone, 1))[1] == b"\1"
    waits = []
    for attempt in range(20):
        begin = time.monotonic()
        assert writer.reserve(column(1000 + 100 * attempt, 64))[0] == bytes([ReserveStatus.NO_ROOM] * 64)
        waits.append(time.monotonic() - begin)
        reader.call(Op.PING)
    assert sorted(waits)[10] < 0.1
    assert writer.stats()["counters"]["skipped_no_room"] == 20 * 64
    before = cpu_seconds(server.process.pid)
    time.sleep(1)
    assert cpu_seconds(server.process.pid) - before < 0.2, "it turns in circles"
    begin = time.monotonic()
    reader.call(Op.PING)
    assert time.monotonic() - begin < 1
    reader.call(Op.RELEASE, u64(last))
    assert writer.store(column(9000, 1)) == b"\0"
