"""Who reads what: leases of READY objects, and how much of a pool one session may hold that way."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from maru_core.errors import ProtocolError
from maru_core.protocol.messages import NO_ENTRY, Presence
from maru_core.server.objects import READY, REPLICA, RESERVED, RETIRING, Objects, Postponed
from maru_core.server.removal import Removal
from maru_core.server.sessions import Session

_ABSENT = int(Presence.ABSENT)
#: Presence by state of an object that is in an index, or of its replica.
PRESENCE = {RESERVED: int(Presence.WRITING), READY: int(Presence.READY), REPLICA: int(Presence.READY)}
_IS_READY = bytes([READY])
#: What a lease takes beside an item for each object that it names; a session's items are limited.
LEASE_COST = 4
#: Items that any session may have, and how many times all entries of the pools it may have where that is more.
_LEASE_ITEMS = 1 << 18
_LEASE_TIMES = 4
_FOUND = bytes([Presence.READY])

Acquired = tuple[bytes | bytearray, "array[int]", "array[int]", "array[int]"]


class Leases:
    """``share``: the part of a pool that one session may lease. ``counters``: hits and misses."""

    def __init__(
        self, objects: Objects, removal: Removal, postponed: Postponed, counters: dict[str, int], share: float
    ) -> None:
        self._objects = objects
        self._removal = removal
        self._postponed = postponed
        self._counters = counters
        self._limits = [int((arena.end - arena.base) * share) for arena in objects.arenas]
        self._most_items = max(_LEASE_ITEMS, _LEASE_TIMES * objects.total)

    def presence(self, found: Sequence[int | None]) -> bytes:
        """A Presence for each entry of an index, ``None`` where it has none."""
        state = self._objects.state
        return bytes([_ABSENT if entry is None else PRESENCE[state[entry]] for entry in found])

    def acquire(self, session: Session, lease: int, found: Sequence[int | None], leading: bool) -> Acquired:
        """:meth:`Directory.acquire` for keys that the index has at ``found``."""
        count = len(found)
        if session.lease_items + count + LEASE_COST > self._most_items:
            return self._refuse(found)
        entries = found if isinstance(found, array) else None
        objects = self._objects
        steps = objects.steps(entries) if entries is not None else None
        if entries is not None and steps is not None and objects.state[steps] == _IS_READY * count:
            # What was stored together lies together, and is usually found together.
            arena = objects.arena_of(entries[0])
            number = arena.number
            if session.leased_pages[number] + sum(objects.pages[steps]) <= self._limits[number]:
                self._take(session, lease, entries)
                arena.hits += count
                self._counters["hits"] += count
                return _FOUND * count, entries, objects.generation[steps], objects.length[steps]
        return self._acquire_one_by_one(session, lease, found, leading)

    def _acquire_one_by_one(self, session: Session, lease: int, found: Sequence[int | None], leading: bool) -> Acquired:
        count = len(found)
        statuses = bytearray(self.presence(found))
        if leading:
            head = count - len(statuses.lstrip(_FOUND))
            statuses[head + 1 :] = bytes(max(0, count - head - 1))
        hits = [entry for entry, status in zip(found, statuses, strict=True) if status == Presence.READY]
        held = session.held
        fresh = [entry for entry in dict.fromkeys(hits) if entry not in held]
        if fresh and not self._within_share(session, fresh):  # type: ignore[arg-type]
            hits = self._cut_to_share(session, found, statuses, leading)  # type: ignore[assignment]
        entries = _column(hits)
        if hits:
            self._take(session, lease, entries)
        for arena, part in self._objects.by_arena(entries):
            arena.hits += len(part)
        self._counters["hits"] += len(hits)
        self._counters["misses"] += count - len(hits)
        generation, length = self._objects.generation, self._objects.length
        generations = array("I", [generation[entry] for entry in entries])
        lengths = array("Q", [length[entry] for entry in entries])
        if len(hits) < count:
            return statuses, *_spread(statuses, entries, generations, lengths)
        return statuses, entries, generations, lengths

    def _refuse(self, found: Sequence[int | None]) -> Acquired:
        """The answer to a session whose leases name as much as they may."""
        count = len(found)
        statuses = bytearray(self.presence(found).replace(_FOUND, bytes([Presence.BUSY])))
        self._counters["misses"] += count
        return statuses, *_spread(statuses, *_NOTHING)

    def _take(self, session: Session, lease: int, hits: array[int]) -> None:
        """``lease`` begins to hold ``hits`` as soon as the reply is sent; nobody comes before that."""

        def hold() -> None:
            fresh = session.held.hold(hits)
            self._start_reading(session, fresh)
            if lease in session.leases:
                session.leases[lease].extend(hits)
                session.lease_items += len(hits)
            else:
                session.leases[lease] = array("I", hits)
                session.lease_items += len(hits) + LEASE_COST

        self._postponed.add(hold)

    def resume(self, session: Session, lease: int, entries: Sequence[int], generations: Sequence[int]) -> None:
        """:meth:`Directory.resume_lease`."""
        objects, mine = self._objects, session.namespace.number
        state, generation, home = objects.state, objects.generation, objects.home
        held = [
            entry
            for entry, wanted in zip(entries, generations, strict=True)
            if entry < objects.total
            and generation[entry] == wanted
            and home[entry] == mine
            and state[entry] in (READY, RETIRING)
        ]
        cost = len(held) + (0 if lease in session.leases else LEASE_COST)
        if session.lease_items + cost > self._most_items:
            raise ProtocolError(
                f"session {session.id} lists leases of more than {self._most_items} objects, which no session can have"
            )
        if held:
            self._take(session, lease, array("I", held))

    def _within_share(self, session: Session, entries: Sequence[int]) -> bool:
        """Whether the session may hold ``entries`` beside what it holds."""
        for arena, part in self._objects.by_arena(entries):
            if session.leased_pages[arena.number] + self._objects.pages_of(part) > self._limits[arena.number]:
                return False
        return True

    def _cut_to_share(
        self, session: Session, found: Sequence[int | None], statuses: bytearray, leading: bool
    ) -> list[int]:
        """Answer BUSY for what is over the session's share; returns what may be leased."""
        leased = list(session.leased_pages)
        hits: list[int] = []
        counted: set[int] = set()
        for at, entry in enumerate(found):
            if entry is None or statuses[at] != Presence.READY:
                continue
            if entry not in session.held and entry not in counted:
                arena = self._objects.arena_of(entry)
                wanted = leased[arena.number] + self._objects.pages[entry]
                if wanted > self._limits[arena.number]:
                    statuses[at] = Presence.BUSY
                    if leading:
                        statuses[at + 1 :] = bytes(len(statuses) - at - 1)
                        break
                    continue
                leased[arena.number] = wanted
                counted.add(entry)
            hits.append(entry)
        return hits

    def _start_reading(self, session: Session, fresh: Sequence[int]) -> None:
        """``session`` begins to hold ``fresh``, whose entries differ."""
        objects, readers = self._objects, self._objects.readers
        for arena, part in objects.by_arena(fresh):
            taken = objects.pages_of(part)
            session.leased_pages[arena.number] += taken
            first = [entry for entry in part if not readers[entry]]
            for entry in part:
                readers[entry] += 1
            arena.leased += taken if len(first) == len(part) else objects.pages_of(first)
            arena.tenants.remove(session.namespace.number, first)

    def release(self, session: Session, lease: int, limit: int) -> tuple[bool, bool]:
        """:meth:`Directory.release`."""
        entries = session.leases.get(lease)
        if entries is None:
            return False, True
        part = entries[-limit:].tolist()
        del entries[-limit:]
        session.lease_items -= len(part)
        if not entries:
            del session.leases[lease]
            session.lease_items -= LEASE_COST
        part.reverse()
        ended = session.held.let_go(part)
        self._stop_reading(session, ended)
        return True, not entries

    def drop(self, session: Session, limit: int) -> None:
        """End at most ``limit`` of all that a closed session holds."""
        session.leases.clear()
        session.lease_items = 0
        self._stop_reading(session, session.held.pop(limit))

    def _stop_reading(self, session: Session, ended: Sequence[int]) -> None:
        objects = self._objects
        readers, state = objects.readers, objects.state
        for arena, part in objects.by_arena(ended):
            taken = objects.pages_of(part)
            session.leased_pages[arena.number] -= taken
            for entry in part:
                readers[entry] -= 1
            last = [entry for entry in part if not readers[entry]]
            arena.leased -= taken if len(last) == len(part) else objects.pages_of(last)
            ready = [entry for entry in last if state[entry] == READY]
            arena.tenants.add(session.namespace.number, ready)
            if len(ready) != len(last):
                arena.tenants.add(session.namespace.number, [entry for entry in last if state[entry] == REPLICA])
                self._removal.free_retired(arena, [entry for entry in last if state[entry] == RETIRING])


_NOTHING = array("I"), array("I"), array("Q")


def _column(entries: Iterable[int | None]) -> array[int]:
    """A column of ``entries`` among which there is no ``None``."""
    return array("I", entries)  # type: ignore[arg-type]


def _spread(
    statuses: bytearray, entries: array[int], generations: array[int], lengths: array[int]
) -> tuple[array[int], array[int], array[int]]:
    """Columns of the READY keys, with NO_ENTRY, 0, 0 in the places of the others."""
    count = len(statuses)
    wide = array("I", [NO_ENTRY]) * count, array("I", bytes(4 * count)), array("Q", bytes(8 * count))
    ready = [at for at, status in enumerate(statuses) if status == Presence.READY]
    for at, entry, generation, length in zip(ready, entries, generations, lengths, strict=True):
        wide[0][at], wide[1][at], wide[2][at] = entry, generation, length
    return wide
