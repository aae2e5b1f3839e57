"""Moves of objects between pools: what is used least moves down instead of being lost, what is used much is copied up.

A pool that has little room gives its next victims to the pools below it, in times when nobody waits. Somebody else
copies the bytes (:mod:`.mover`), and meanwhile the object is found where it always was. Only when the copy is whole the
directory looks for it there, and the old place is free. A copy that is not wanted any more when it is made - the object
was dropped, hidden by a reset, or is being read, and so is not among those that are used least - is thrown away.

Of an object in a lower pool that is used again and again a *replica* is made in the first pool, where there is room.
The object itself stays where it is, with its place in the prefix tree; readers are sent to whichever the read order
prefers. A replica is dropped like any object that is used least, only that nothing is lost with it. An object that is
to be evicted while it has a replica changes roles with it first.

A copy being made is a RESERVED object of the session MOVER, in no index and in no prefix tree. The object that is
copied has one reader more, which keeps its place from being used for something else.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Final

from attrs import frozen

from maru_core.pool_format import State
from maru_core.server.arena import Arena
from maru_core.server.namespaces import Namespaces
from maru_core.server.objects import FREE, READY, REPLICA, RETIRING, Objects, Run
from maru_core.server.removal import Removal
from maru_core.server.room import Room

#: The session that copies are reserved by. No client has this number.
MOVER: Final = 0
#: Moves in progress, and the bytes that they copy unless it is a single one.
MOST_MOVES: Final = 32
MOST_BYTES: Final = 64 << 20
#: Victims that are looked at in one call.
_MOST_LOOKED_AT: Final = 16
#: Children in other pools that are told of a move in one go. What has more is shared by many and stays.
_MOST_CHILDREN: Final = 256
#: Objects of lower pools whose last use is remembered, and those that wait to be copied up.
_MOST_RECENT: Final = 4096
_MOST_WAITING: Final = 256
_MAX_GENERATION: Final = 0xFFFF_FFFF


@frozen
class Move:
    """``length`` bytes to be copied between two pools.

    ``source_pool`` and ``target_pool`` are places in the list of pools, the offsets are in bytes in their regions.
    """

    source: int
    target: int
    source_pool: int
    target_pool: int
    source_offset: int
    target_offset: int
    length: int
    source_generation: int
    target_generation: int

    @property
    def down(self) -> bool:
        """Whether the object itself moves down; else a replica of it is made above."""
        return self.target_pool > self.source_pool


class Moves:
    """``counters``: demoted, promoted, moves_dropped, damaged. With a single pool there is nothing to do.

    ``moving``: see :attr:`.Quotas.moving`, which is kept here.
    """

    def __init__(
        self,
        objects: Objects,
        namespaces: Namespaces,
        room: Room,
        removal: Removal,
        moving: dict[int, int],
        counters: dict[str, int],
        demote: bool,
        promote: bool,
    ) -> None:
        self._objects = objects
        self._namespaces = namespaces
        self._room = room
        self._removal = removal
        self._moving = moving
        self._counters = counters
        #: Pools that there is one below of, the lowest first.
        self._upper = objects.arenas[-2::-1] if demote else []
        self._promote = promote and len(objects.arenas) > 1
        #: Objects of lower pools that were used lately, and those that were used twice; each with its generation.
        self._recent: OrderedDict[int, int] = OrderedDict()
        self._waiting: OrderedDict[int, int] = OrderedDict()
        #: By entry that is copied.
        self._moves: dict[int, Move] = {}
        self._bytes = 0
        #: Granules per pool that will be free when its moves are over.
        self._leaving = [0] * len(objects.arenas)
        #: The demand for which nothing more can be done at the moment.
        self._done: object = None

    def __len__(self) -> int:
        return len(self._moves)

    def __iter__(self) -> Iterator[Move]:
        return iter(list(self._moves.values()))

    def reads(self, entry: int) -> bool:
        """Whether one of the readers of ``entry`` is a move."""
        return entry in self._moves

    def is_due(self) -> bool:
        """Whether :meth:`next` may find something to move."""
        if len(self._moves) >= MOST_MOVES or self._bytes >= MOST_BYTES:
            return False
        return self._is_down_due() or bool(self._waiting)

    def _is_down_due(self) -> bool:
        if not self._upper or self._done is self._room.demand:
            return False
        return any(self._is_low(arena) for arena in self._upper)

    def used(self, entries: Iterable[int]) -> None:
        """Somebody reads these. What is used twice while it is remembered, in a lower pool, is copied up."""
        objects, recent, waiting = self._objects, self._recent, self._waiting
        generation, end = objects.generation, objects.arenas[0].end
        for entry in entries:
            if entry < end:
                continue
            if recent.pop(entry, None) == generation[entry]:
                waiting[entry] = generation[entry]
            recent[entry] = generation[entry]
        while len(recent) > _MOST_RECENT:
            recent.popitem(last=False)
        while len(waiting) > _MOST_WAITING:
            waiting.popitem(last=False)

    def next(self) -> Move | None:
        """Begin to move one object down, or to copy one up; takes tens of microseconds."""
        if not self.is_due():
            return None
        return (self._next_down() if self._is_down_due() else None) or self._next_up()

    def _next_up(self) -> Move | None:
        objects = self._objects
        first = objects.arenas[0]
        for _ in range(min(_MOST_LOOKED_AT, len(self._waiting))):
            source, generation = self._waiting.popitem()
            if (
                objects.state[source] != READY
                or objects.generation[source] != generation
                or source in objects.replica
                or source in self._moves
                or (self._bytes and self._bytes + objects.length[source] > MOST_BYTES)
            ):
                continue
            arena = objects.arena_of(source)
            namespace = self._namespaces.by_number[objects.home[source]]
            header = arena.headers.read(source)
            if header is None:
                continue
            run = self._room.take_spare(first, namespace, objects.length[source])
            if run is None:
                continue
            if not objects.readers[source]:
                arena.tenants.remove(namespace.number, (source,))
            pair = header.parent + header.key
            return self._start(arena, source, run, pair, header.digest, header.weights_epoch, header.checksum)
        return None

    def _next_down(self) -> Move | None:
        for arena in self._upper:
            if self._is_low(arena):
                move = self._begin(arena)
                if move is not None:
                    return move
        self._done = self._room.demand
        return None

    def _is_low(self, arena: Arena) -> bool:
        return self._room.is_low(arena, self._leaving[arena.number])

    def _begin(self, arena: Arena) -> Move | None:
        objects = self._objects
        for _ in range(_MOST_LOOKED_AT):
            tenant, victims = arena.tenants.pop(1)
            if not victims:
                return None
            victim = victims[0]
            if objects.state[victim] == REPLICA or (victim in objects.replica and objects.is_top(victim)):
                # It is there twice.
                self._removal.drop(arena, victim)
                if not self._is_low(arena):
                    return None
                continue
            if not self._may_move(arena, victim):
                arena.tenants.park(tenant, victim)
                continue
            length = objects.length[victim]
            if self._bytes and self._bytes + length > MOST_BYTES:
                arena.tenants.put_back(tenant, victims)
                return None
            header = arena.headers.read(victim)
            if header is None:
                # Its memory is damaged: no reader would take it.
                self._counters["damaged"] += 1
                self._removal.retire(victim)
                continue
            run, possible = self._room.take_below(arena, length)
            if run is not None:
                pair = header.parent + header.key
                return self._start(arena, victim, run, pair, header.digest, header.weights_epoch, header.checksum)
            if possible:
                arena.tenants.put_back(tenant, victims)
                return None
            # It can be nowhere below.
            if objects.children[victim]:
                arena.tenants.park(tenant, victim)
            else:
                self._removal.drop(arena, victim)
        return None

    def _may_move(self, arena: Arena, entry: int) -> bool:
        """Whether all children of ``entry`` are in other pools, or on their way: moves end in the order they began."""
        objects = self._objects
        children, elsewhere = objects.children[entry], len(objects.cross.get(entry, ()))
        if elsewhere > _MOST_CHILDREN or entry in objects.replica:
            return False  # one with a replica is dropped once all its children are elsewhere, see _begin
        if children == elsewhere:
            return True
        leaving = [
            move
            for move in self._moves.values()
            if objects.parent[move.source] == entry and move.source_pool == arena.number
        ]
        return children == elsewhere + len(leaving)

    def _start(
        self, arena: Arena, source: int, run: Run, pair: bytes, digest: bytes, weights_epoch: int, checksum: int
    ) -> Move:
        objects = self._objects
        below, pages, target, _ = run
        length, home = objects.length[source], objects.home[source]
        namespace = self._namespaces.by_number[home]
        generation = objects.generation[target] % _MAX_GENERATION + 1
        objects.generation[target] = generation
        fresh = array("I", [generation])
        below.headers.write_reserved(target, pages, [pair], fresh, length, MOVER, digest, weights_epoch)
        if checksum:
            below.headers.set_checksum(target, checksum)
        objects.fill([run], array("I", [objects.tag[source]]), length, home)
        below.reserved += pages
        below.moving += pages
        namespace.taken[below.number] += pages
        namespace.reserved[below.number] += pages
        self._count_moving(home, pages * below.granule)
        arena.leased += 0 if objects.readers[source] else objects.pages[source]
        objects.readers[source] += 1
        move = Move(
            source,
            target,
            arena.number,
            below.number,
            arena.descriptor.data_offset + (source - arena.base) * arena.granule,
            below.descriptor.data_offset + (target - below.base) * below.granule,
            length,
            objects.generation[source],
            generation,
        )
        self._moves[source] = move
        self._bytes += length
        if move.down:
            self._leaving[arena.number] += objects.pages[source]
        return move

    def _count_moving(self, home: int, amount: int) -> None:
        moving = self._moving
        moving[home] = moving.get(home, 0) + amount
        if not moving[home]:
            del moving[home]

    def finish(self, move: Move, copied: bool) -> bool:
        """A move is over; whether the object is in its new place now, too. ``copied``: all bytes are there."""
        objects = self._objects
        if self._moves.get(move.source) is not move:
            return False
        del self._moves[move.source]
        self._bytes -= move.length
        if move.down:
            self._leaving[move.source_pool] -= objects.pages[move.source]
        self._done = None
        arena, below = objects.arenas[move.source_pool], objects.arenas[move.target_pool]
        pages = objects.pages[move.target]
        home = objects.home[move.target]
        namespace = self._namespaces.by_number[home]
        below.reserved -= pages
        below.moving -= pages
        namespace.reserved[below.number] -= pages
        self._count_moving(home, -pages * below.granule)
        good = copied and self._is_wanted(move)
        if good and move.down:
            self._change_place(move, arena, below)
        elif good:
            self._add_replica(move, below)
        else:
            below.headers.change_state([move.target], State.RESERVED, State.FREE)
            namespace.taken[below.number] -= pages
            objects.state[move.target] = FREE
            below.free.give(move.target - below.base, pages)
            self._counters["moves_dropped"] += 1
        self._let_go(arena, move.source, home)
        if good:
            below.tenants.move_in(home, (move.target,))
        return good

    def _is_wanted(self, move: Move) -> bool:
        """Whether the object is still what it was, and is to be where its copy is."""
        objects, source = self._objects, move.source
        if move.down and (objects.readers[source] != 1 or not objects.is_top(source)):
            return False
        # What was dropped is in no index, and a reset takes the index away with all that is of earlier weights.
        key = bytes(objects.arenas[move.source_pool].headers.key(source))
        return self._namespaces.by_number[objects.home[source]].index.get(key) == source

    def _change_place(self, move: Move, arena: Arena, below: Arena) -> None:
        """The object is at the target from now on, and its old place is to be freed when nobody reads there."""
        objects, source, target = self._objects, move.source, move.target
        namespace = self._namespaces.by_number[objects.home[source]]
        tag, pages = objects.tag[source], objects.pages[target]
        # A server that is killed here leaves the object twice, never not at all.
        below.headers.change_state([target], State.RESERVED, State.READY)
        objects.state[target] = READY
        key = bytes(below.headers.key(target))
        namespace.index.remove(tag, source)
        namespace.index.enter(key, tag, target)
        objects.relink(source, target)
        arena.headers.change_state([source], State.READY, State.RETIRING)
        objects.state[source] = RETIRING
        arena.objects -= 1
        arena.demoted_out += 1
        below.used += pages
        below.objects += 1
        below.demoted_in += 1
        self._counters["demoted"] += 1

    def _add_replica(self, move: Move, above: Arena) -> None:
        objects, target = self._objects, move.target
        above.headers.change_state([target], State.RESERVED, State.READY)
        objects.pair(move.source, target)
        above.used += objects.pages[target]
        above.replicas += 1
        above.promoted_in += 1
        self._counters["promoted"] += 1

    def _let_go(self, arena: Arena, entry: int, home: int) -> None:
        """The move does not read ``entry`` any more."""
        objects = self._objects
        objects.readers[entry] -= 1
        if objects.readers[entry]:
            return
        arena.leased -= objects.pages[entry]
        if objects.state[entry] == READY:
            arena.tenants.add(home, (entry,))
        else:
            self._removal.free_retired(arena, [entry])
