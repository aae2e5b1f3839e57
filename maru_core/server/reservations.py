"""Who writes what: pages that are reserved for keys, until they are committed or given back."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Sequence
from itertools import chain, islice

from maru_core.pool_format import KEY_SIZE, State
from maru_core.protocol.messages import NO_ENTRY, CommitStatus, ReserveStatus
from maru_core.server.arena import Arena
from maru_core.server.headers import chain_pairs, pairs_of
from maru_core.server.holdings import EntrySet
from maru_core.server.index import tags_of
from maru_core.server.objects import FREE, READY, Objects, Postponed, Run
from maru_core.server.orphans import Orphans
from maru_core.server.room import Room
from maru_core.server.sessions import Session
from maru_core.server.steps import SLICE

_MAX_GENERATION = 0xFFFF_FFFF
_KEY = f"{KEY_SIZE}s"

Reserved = tuple[bytearray, "array[int]", "array[int]"]


def keys_of(packed: bytes) -> tuple[bytes, ...]:
    """The keys of a column."""
    return struct.unpack(_KEY * (len(packed) // KEY_SIZE), packed)


class Reservations:
    """``counters``: stored, aborted, skipped_no_room, skipped_over_quota."""

    def __init__(self, objects: Objects, room: Room, postponed: Postponed, counters: dict[str, int]) -> None:
        self._objects = objects
        self._room = room
        self._postponed = postponed
        self._counters = counters

    def reserve(
        self,
        session: Session,
        keys: Sequence[bytes],
        parents: Sequence[bytes],
        length: int | Sequence[int],
        packed: bytes,
        orphans: Orphans,
    ) -> Reserved:
        """:meth:`Directory.reserve`; ``packed`` are the keys as one column. The results may not be changed."""
        count = len(packed) // KEY_SIZE
        tags = tags_of(packed)
        found = session.namespace.index.find(packed, tags)
        if type(length) is int and orphans.is_empty and found.count(None) == count and len(set(tags)) == count:
            return self._reserve_new(session, parents, length, packed, tags, orphans)
        keys = keys or keys_of(packed)
        if len(parents) == 1:
            parents = (*parents, *keys[:-1])
        statuses = bytearray(count)
        entries = array("I", [NO_ENTRY]) * count
        generations = array("I", bytes(4 * count))
        lengths: Sequence[int] = [length] * count if type(length) is int else length  # type: ignore[assignment]
        for size, places in self._sort(session, keys, found, lengths, statuses):
            part_keys = [keys[at] for at in places]
            part_parents = [parents[at] for at in places] if parents else []
            skipped = orphans.leading(part_keys, part_parents)
            if skipped:
                self._counters[orphans.reason] += skipped
                for at in places[:skipped]:
                    statuses[at] = ReserveStatus.NO_ROOM
                places, part_keys, part_parents = places[skipped:], part_keys[skipped:], part_parents[skipped:]
                if not places:
                    continue
            part = b"".join(part_keys)
            got = self._reserve_new(session, part_parents, size, part, tags_of(part), orphans)
            self._postponed.settle()
            for at, status, entry, generation in zip(places, *got, strict=True):
                statuses[at], entries[at], generations[at] = status, entry, generation
        return statuses, entries, generations

    def _sort(
        self,
        session: Session,
        keys: Sequence[bytes],
        found: Sequence[int | None],
        lengths: Sequence[int],
        statuses: bytearray,
    ) -> list[tuple[int, list[int]]]:
        """Answer keys that are there already; returns the places of the others, by neighbours of one length."""
        objects = self._objects
        used: list[int] = []
        groups: list[tuple[int, list[int]]] = []
        seen = set()
        for at, (key, entry, size) in enumerate(zip(keys, found, lengths, strict=True)):
            if entry is not None:
                if objects.state[entry] == READY:
                    statuses[at] = ReserveStatus.PRESENT
                    if not objects.readers[entry]:
                        used.append(entry)
                else:
                    statuses[at] = ReserveStatus.BUSY
            elif key in seen:
                statuses[at] = ReserveStatus.BUSY
            else:
                seen.add(key)
                if groups and groups[-1][0] == size:
                    groups[-1][1].append(at)
                else:
                    groups.append((size, [at]))
        for arena, part in objects.by_arena(list(dict.fromkeys(used))):
            arena.tenants.touch(session.namespace.number, part[::-1])
        return groups

    def _reserve_new(
        self,
        session: Session,
        parents: Sequence[bytes],
        length: int,
        packed: bytes,
        tags: array[int],
        orphans: Orphans,
    ) -> Reserved:
        """Keys that differ and are not in the index, all of one length; ``orphans`` is told of those without room."""
        count = len(tags)
        if not self._room.fits(length):
            nowhere = array("I", [NO_ENTRY]) * count
            return bytearray([ReserveStatus.REFUSED]) * count, nowhere, array("I", bytes(4 * count))
        objects, namespace = self._objects, session.namespace
        index = namespace.index
        chain = len(parents) == 1
        keys: Sequence[bytes] = () if chain else keys_of(packed)
        if not chain and parents and tuple(parents[1:]) == keys[:-1]:
            chain, parents = True, parents[:1]
        # A parent must not be evicted to make room for its own child, so it counts the child before there is room. In
        # a chain only the first parent can be an object that exists.
        elders = [index.get(parents[0])] if chain else index.find(column := b"".join(parents), tags_of(column))
        held = [entry for entry in elders if entry is not None]
        for entry in held:
            objects.children[entry] += 1
        pairs = chain_pairs(parents[0], packed) if chain else pairs_of(parents, keys)
        parent = parents[0] if parents else None

        def worth(arena: Arena) -> int | None:
            return arena.tenants.worth_of(namespace.number, keys_of(packed), parent)

        runs, over_quota = self._room.allocate(namespace, length, count, worth)
        entries, generations = self._write(session, runs, pairs, length)
        done = len(entries)

        def enter() -> None:
            objects.fill(runs, tags, length, namespace.number)
            index.put(packed, tags, entries)
            session.reserved.update(entries)
            if chain:
                objects.link_chain(elders[0], entries, generations)
            elif parents:
                objects.link(keys, parents, elders, entries)
            if parents:
                objects.note_cross(entries)
            for entry in held:
                objects.drop_child(entry)
            for arena in objects.arenas:
                mine = entries if len(objects.arenas) == 1 else _within(arena, entries)
                arena.tenants.stored(namespace.number, keys_of(packed), mine, parent)

        self._postponed.add(enter)
        if done == count:
            return bytearray(count), entries, generations
        missing = count - done
        orphans.note(keys_of(packed)[done:], "skipped_over_quota" if over_quota else "skipped_no_room")
        self._counters["skipped_over_quota"] += over_quota
        self._counters["skipped_no_room"] += missing - over_quota
        return (
            bytearray(done) + bytearray([ReserveStatus.NO_ROOM]) * missing,
            entries + array("I", [NO_ENTRY]) * missing,
            generations + array("I", [0]) * missing,
        )

    def _write(
        self, session: Session, runs: Sequence[Run], pairs: Sequence[bytes], length: int
    ) -> tuple[array[int], array[int]]:
        """Write the headers of objects of ``length`` bytes, and count their pages; entries and generations.

        ``pairs``: parent key and key of each, also of those behind them that there is no room for.
        """
        objects, namespace = self._objects, session.namespace
        entries, generations = array("I"), array("I")
        done = 0
        for arena, pages, start, pieces in runs:
            taken = pieces * pages
            first = slice(start, start + taken, pages)
            before = objects.generation[first]
            if before == before[:1] * pieces:
                fresh = array("I", [before[0] % _MAX_GENERATION + 1]) * pieces
            else:
                fresh = array("I", [generation % _MAX_GENERATION + 1 for generation in before])
            objects.generation[first] = fresh
            arena.headers.write_reserved(
                start,
                pages,
                pairs if pieces == len(pairs) else pairs[done : done + pieces],
                fresh,
                length,
                session.id,
                namespace.digest,
                namespace.weights_epoch,
            )
            arena.reserved += taken
            session.reserved_pages[arena.number] += taken
            namespace.taken[arena.number] += taken
            namespace.reserved[arena.number] += taken
            entries += objects.entry[first]
            generations += fresh
            done += pieces
        return entries, generations

    def commit(
        self, session: Session, entries: Sequence[int], generations: Sequence[int], checksums: Sequence[int]
    ) -> bytearray:
        """:meth:`Directory.commit`."""
        objects = self._objects
        reserved = session.reserved
        statuses = bytearray(len(entries))
        good: Sequence[int]
        # What was reserved together lies together, and is usually committed together.
        steps = objects.steps(entries)
        if steps is not None and reserved.issuperset(entries) and objects.generation[steps] == generations:
            good = entries
        else:
            steps = None
            mine: dict[int, None] = {}
            lost: dict[int, None] = {}
            generation = objects.generation
            known = reserved.intersection(entries)
            for at, (entry, wanted) in enumerate(zip(entries, generations, strict=True)):
                if entry in known and generation[entry] == wanted:
                    mine[entry] = None
                elif not self._committed(session, entry, wanted):
                    statuses[at] = CommitStatus.UNKNOWN
                    if entry in session.doomed and generation[entry] == wanted:
                        lost[entry] = None
            good = list(mine)
            self._free(session, list(lost))
        if checksums:
            publishing = set(good)
            for entry, checksum in zip(entries, checksums, strict=True):
                if checksum and entry in publishing:
                    objects.arena_of(entry).headers.set_checksum(entry, checksum)
        if good:
            self._publish(session, good, steps)
        return statuses

    def _publish(self, session: Session, entries: Sequence[int], steps: slice | None) -> None:
        objects, state = self._objects, self._objects.state
        if steps is not None:
            objects.arena_of(entries[0]).headers.change_steps(steps, State.RESERVED, State.READY)
            state[steps] = bytes([READY]) * len(entries)
        else:
            for arena, part in objects.by_arena(entries):
                arena.headers.change_state(part, State.RESERVED, State.READY)
            for entry in entries:
                state[entry] = READY

        def account() -> None:
            namespace = session.namespace
            by_arena = objects.by_arena(entries)
            for arena, part in by_arena:
                taken = objects.pages_of(part)
                arena.reserved -= taken
                namespace.reserved[arena.number] -= taken
                session.reserved_pages[arena.number] -= taken
                arena.used += taken
                arena.objects += len(part)
            session.reserved.difference_update(entries)
            namespace.objects += len(entries)
            namespace.stored_bytes += objects.length_of(entries)
            self._counters["stored"] += len(entries)
            for arena, part in by_arena:
                arena.tenants.add(namespace.number, part[::-1])

        self._postponed.add(account)

    def abort(self, session: Session, entries: Sequence[int], generations: Sequence[int]) -> bytearray:
        """:meth:`Directory.abort`."""
        statuses = bytearray(len(entries))
        mine: dict[int, None] = {}
        for at, (entry, wanted) in enumerate(zip(entries, generations, strict=True)):
            if (entry in session.reserved or entry in session.doomed) and self._objects.generation[entry] == wanted:
                mine[entry] = None
            else:
                statuses[at] = CommitStatus.UNKNOWN
        self._free(session, list(mine))
        return statuses

    def unlisted(self, session: Session, entries: Sequence[int], generations: Sequence[int]) -> Iterator[list[int]]:
        """:meth:`Directory.unlisted`."""
        generation, total = self._objects.generation, self._objects.total
        kept = EntrySet()
        for at in range(0, len(entries), SLICE):
            part = zip(entries[at : at + SLICE], generations[at : at + SLICE], strict=True)
            kept.update([entry for entry, wanted in part if entry < total and generation[entry] == wanted])
            yield []
        mine = chain(session.reserved, session.doomed)
        while taken := list(islice(mine, SLICE)):
            listed = kept.intersection(taken)
            # A reset meanwhile shows entries twice, in one slice or in two.
            yield [entry for entry in dict.fromkeys(taken) if entry not in listed]

    def give_back(self, session: Session, entries: Sequence[int]) -> None:
        """:meth:`Directory.give_back`."""
        mine = dict.fromkeys(entries)
        self._free(session, [entry for entry in mine if entry in session.reserved or entry in session.doomed])

    def drop(self, session: Session, limit: int) -> bool:
        """Free at most ``limit`` reservations of a closed session; whether it had any."""
        for mine in (session.reserved, session.doomed):
            if mine:
                entries = mine.first(limit)
                for arena, part in self._objects.by_arena(entries):
                    for entry in part:
                        arena.settle(entry, self._objects.pages[entry])
                self._free(session, entries)
                return True
        return False

    def _committed(self, session: Session, entry: int, generation: int) -> bool:
        objects = self._objects
        if entry >= objects.total or objects.generation[entry] != generation or objects.state[entry] != READY:
            return False
        header = objects.arena_of(entry).headers.read(entry)
        return header is not None and header.session == session.id

    def _free(self, session: Session, entries: list[int]) -> None:
        objects, namespace = self._objects, session.namespace
        for arena, part in objects.by_arena(entries):
            arena.headers.change_state(part, State.RESERVED, State.FREE)
            for entry in part:
                namespace.forget(objects.tag[entry], entry)
                objects.unlink(entry)
                pages = objects.pages[entry]
                arena.reserved -= pages
                namespace.taken[arena.number] -= pages
                namespace.reserved[arena.number] -= pages
                session.reserved_pages[arena.number] -= pages
                objects.state[entry] = FREE
                arena.free.give(entry - arena.base, pages)
        session.reserved.difference_update(entries)
        session.doomed.difference_update(entries)
        self._counters["aborted"] += len(entries)


def _within(arena: Arena, entries: array[int]) -> array[int]:
    """``entries`` with NO_ENTRY in the places of those in other pools."""
    return array("I", [entry if arena.base <= entry < arena.end else NO_ENTRY for entry in entries])
