"""What the server writes is published, where hosts that are not coherent with each other share the pools."""

from __future__ import annotations

import pytest

from maru_core.pool_format import HEADER_SIZE
from maru_core.protocol import ReserveStatus
from maru_core.server.arena import Arena
from tests.server.churn import Churn
from tests.server.pure import GRANULE, World


def shared(arena: Arena, table: bytearray) -> tuple[bytearray, list[tuple[int, int]]]:
    """Make ``arena`` one of such a pool: the memory as others see it, and every range of it that was published."""
    memory, ranges = bytearray(table), []

    def publish(offset: int, length: int) -> None:
        ranges.append((offset, length))
        if offset < len(table):  # the data is behind it, and not there
            memory[offset : offset + length] = table[offset : offset + length]

    fresh = Arena.of(arena.number, arena.descriptor, memoryview(table), publish=publish)
    arena.publish, arena.headers = publish, fresh.headers
    return memory, ranges


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_every_change_of_a_header_is_in_memory_at_once(seed: int) -> None:
    """Random work of many clients, deaths included: a server on another host would find what this one has."""
    churn = Churn(seed)
    looked = 0
    for _ in range(60):
        world = churn.world
        seen = [shared(arena, table) for arena, table in zip(world.directory.arenas, world.tables, strict=True)]
        churn.run(25)
        if churn.world is not world:  # it crashed
            continue
        for (memory, ranges), table in zip(seen, world.tables, strict=True):
            assert memory == table
            looked += len(ranges)
            assert all(at >= 0 and at + length <= len(table) for at, length in ranges if at < len(table))
    assert looked > 100


def test_headers_close_behind_one_another_are_published_at_once() -> None:
    world = World.of(200)
    _, ranges = shared(world.directory.arenas[0], world.tables[0])
    session = world.session()
    names = [bytes([number]) * 32 for number in range(10)]
    world.directory.reserve(session, names, (), 2 * GRANULE)
    assert ranges == [(0, 19 * HEADER_SIZE)]
    ranges.clear()
    world.directory.reserve(session, [name[::-1][:31] + b"x" for name in names[:3]], (), 20 * GRANULE)
    assert ranges == [((20 + 20 * number) * HEADER_SIZE, HEADER_SIZE) for number in range(3)]


def test_pages_of_a_writer_that_died_are_written_back_before_others_get_them() -> None:
    """Its stores may still be in this host's caches, and would reach the memory after those of the next owner."""
    world = World.of(200)
    arena = world.directory.arenas[0]
    session = world.session()
    statuses, entries, _ = world.directory.reserve(session, [b"a" * 32, b"b" * 32], (), [3 * GRANULE, 150])
    assert set(statuses) == {ReserveStatus.NEW}
    told: list[tuple[int, int, int]] = []
    arena.publish = lambda offset, length: told.append((offset, length, arena.free.free))
    free = arena.free.free
    world.finish(session)
    assert sorted(told) == [
        (arena.descriptor.data_at(entry), pages * GRANULE, free) for entry, pages in zip(entries, (3, 2), strict=True)
    ]
    assert arena.free.free > free


def test_a_pool_of_one_host_pays_nothing() -> None:
    world = World.of(100)
    arena = world.directory.arenas[0]
    assert arena.publish is None
    session = world.session()
    world.directory.reserve(session, [b"a" * 32], (), GRANULE)
    world.finish(session)
