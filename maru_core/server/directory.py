"""The directory: which object lies where, who writes it, who reads it, and what may be evicted.

A pure state machine. It is given time, memory for the headers and sessions; it does no I/O and never waits. Every call
handles one batch of keys and leaves all invariants holding; callers bound the batch (:mod:`maru_core.server.handlers`).

What is known of an object stands in plain packed columns, at the index of its first entry. Batches go through them with
comprehensions and slices, so that 64 keys cost tens of microseconds.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence

from maru_core.pool_format import NO_KEY, State
from maru_core.protocol.messages import NO_ENTRY, CommitStatus, Presence, ReserveStatus
from maru_core.server.arena import Arena
from maru_core.server.index import KeyIndex
from maru_core.server.namespaces import Namespaces, NamespaceState
from maru_core.server.sessions import Session

_FREE, _RESERVED, _READY, _RETIRING = (int(state) for state in State)
_MAX_GENERATION = 0xFFFF_FFFF
#: Victims that may be evicted one after the other without making room for one object before it is skipped.
_MAX_FRUITLESS = 64

_ALL_READY = bytes([_READY])
_ABSENT = int(Presence.ABSENT)
#: Presence by state of an object that is in an index.
_PRESENCE = {_RESERVED: int(Presence.WRITING), _READY: int(Presence.READY)}

#: Neighbouring objects of one size: pool, granules per object, first entry, number of objects.
Run = tuple[Arena, int, int, int]
Reserved = tuple[bytearray, "array[int]", "array[int]"]
Acquired = tuple[bytearray, "array[int]", "array[int]", "array[int]"]


class Directory:
    """Objects of all namespaces in all pools. ``lease_share``: the part of a pool that one session may lease."""

    def __init__(self, arenas: Sequence[Arena], lease_share: float = 0.5) -> None:
        self.arenas = list(arenas)
        self.namespaces = Namespaces()
        self.counters = dict.fromkeys(
            ("hits", "misses", "stored", "evicted", "skipped_no_room", "aborted", "deleted", "resets"), 0
        )
        self._later: list[Callable[[], None]] = []
        self._bases = [arena.base for arena in self.arenas]
        self._lease_limits = [int((arena.end - arena.base) * lease_share) for arena in self.arenas]
        self._longest = max((arena.end - arena.base) * arena.granule for arena in self.arenas)
        self._single = self.arenas[0] if len(self.arenas) == 1 else None
        self.total = total = self.arenas[-1].end
        # Indexed by first entry. ``tail`` is indexed by *last* entry and leads back to the first.
        self.state = bytearray(total)
        self.generation = array("I", bytes(4 * total))
        self.pages = array("I", bytes(4 * total))
        self.tail = array("I", bytes(4 * total))
        self.length = array("Q", bytes(8 * total))
        self.home = array("I", bytes(4 * total))
        self.readers = array("I", bytes(4 * total))
        self.children = array("I", bytes(4 * total))
        self.parent = array("I", [NO_ENTRY]) * total
        self.parent_generation = array("I", bytes(4 * total))
        self.key: list[bytes] = [NO_KEY] * total

    def settle(self) -> None:
        """Do what the last call left for later: bookkeeping that no reply has to wait for.

        Every call does this first, so a caller only gains by calling it after it has sent the reply.
        """
        if self._later:
            later, self._later = self._later, []
            for act in later:
                act()

    # -- RESERVE ---------------------------------------------------------------------------------------------------

    def reserve(
        self, session: Session, keys: Sequence[bytes], parents: Sequence[bytes], length: int | Sequence[int]
    ) -> Reserved:
        """Take pages for keys that nobody has; ``length`` in bytes.

        ``parents`` is empty, or as long as ``keys``, or one key: the parent of the first of a chain, in which each
        key is the parent of the next.

        Returns columns of :class:`ReserveStatus`, first entry (NO_ENTRY without one) and generation (0 likewise).
        """
        self.settle()
        index = session.namespace.index
        count = len(keys)
        found = index.find(keys)
        if type(length) is int and found.count(None) == count and len(set(keys)) == count:
            return self._reserve_new(session, keys, parents, length)
        if len(parents) == 1:
            parents = (*parents, *keys[:-1])
        statuses = bytearray(count)
        entries = array("I", [NO_ENTRY]) * count
        generations = array("I", bytes(4 * count))
        state, policy_touch = self.state, []
        lengths: Sequence[int] = [length] * count if type(length) is int else length  # type: ignore[assignment]
        groups: list[tuple[int, list[int]]] = []
        seen = set()
        for at, (key, entry, size) in enumerate(zip(keys, found, lengths, strict=True)):
            if entry is not None:
                if state[entry] == _READY:
                    statuses[at] = ReserveStatus.PRESENT
                    if not self.readers[entry]:
                        policy_touch.append(entry)
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
        for arena, part in self._by_arena(policy_touch):
            arena.policy.touch(part[::-1])
        for size, places in groups:
            part_keys = [keys[at] for at in places]
            part_parents = [parents[at] for at in places] if parents else ()
            got = self._reserve_new(session, part_keys, part_parents, size)
            self.settle()
            for at, status, entry, generation in zip(places, *got, strict=True):
                statuses[at], entries[at], generations[at] = status, entry, generation
        return statuses, entries, generations

    def _reserve_new(self, session: Session, keys: Sequence[bytes], parents: Sequence[bytes], length: int) -> Reserved:
        """Keys that differ and are not in the index, all of one length."""
        count = len(keys)
        if not 0 < length <= self._longest:
            nowhere = array("I", [NO_ENTRY]) * count
            return bytearray([ReserveStatus.REFUSED]) * count, nowhere, array("I", bytes(4 * count))
        namespace = session.namespace
        index = namespace.index
        chain = len(parents) == 1
        if not chain and parents and parents[1:] == keys[:-1]:
            chain, parents = True, parents[:1]
        # A parent must not be evicted to make room for its own child, so it counts the child before there is room. In
        # a chain only the first parent can be an object that exists.
        elders = [index.get(parents[0])] if chain else index.find(parents)
        held = [entry for entry in elders if entry is not None]
        for entry in held:
            self.children[entry] += 1
        if chain:
            header_parents: Sequence[bytes] = (*parents, *keys[:-1])
        else:
            header_parents = parents or (NO_KEY,) * count
        entries, generations = array("I"), array("I")
        done = 0
        runs = self._allocate(length, count)
        for arena, pages, start, pieces in runs:
            part = keys[done : done + pieces]
            taken = pieces * pages
            first = slice(start, start + taken, pages)
            before = self.generation[first]
            if before.count(before[0]) == pieces:
                fresh = array("I", [before[0] % _MAX_GENERATION + 1]) * pieces
            else:
                fresh = array("I", [generation % _MAX_GENERATION + 1 for generation in before])
            self.generation[first] = fresh
            arena.headers.write_reserved(
                start,
                pages,
                part,
                header_parents[done : done + pieces],
                fresh,
                length,
                session.id,
                namespace.digest,
                namespace.weights_epoch,
            )
            arena.reserved += taken
            session.reserved_pages[arena.number] += taken
            entries.extend(range(start, start + taken, pages))
            generations += fresh
            done += pieces
        granted, fresh_generations = entries[:], generations[:]

        def enter() -> None:
            self._fill(runs, keys, length, namespace.number)
            index.put(keys, granted)
            session.reserved.update(granted)
            if chain:
                self._link_chain(elders[0], granted, fresh_generations)
            elif parents:
                self._link(keys, parents, elders, granted)
            for entry in held:
                self._drop_child(entry)

        self._later.append(enter)
        if done == count:
            return bytearray(count), entries, generations
        missing = count - done
        self.counters["skipped_no_room"] += missing
        entries.extend([NO_ENTRY] * missing)
        generations.extend([0] * missing)
        return bytearray(done) + bytearray([ReserveStatus.NO_ROOM]) * missing, entries, generations

    def _fill(self, runs: list[Run], keys: Sequence[bytes], length: int, home: int) -> None:
        """The columns of objects that were reserved just now."""
        done = 0
        for _, pages, start, pieces in runs:
            end = start + pieces * pages
            first = slice(start, end, pages)
            self.state[first] = bytes([_RESERVED]) * pieces
            self.pages[first] = array("I", [pages]) * pieces
            self.tail[start + pages - 1 : end : pages] = array("I", range(start, end, pages))
            self.length[first] = array("Q", [length]) * pieces
            self.home[first] = array("I", [home]) * pieces
            self.children[first] = array("I", bytes(4 * pieces))
            self.parent[first] = array("I", [NO_ENTRY]) * pieces
            self.key[first] = keys[done : done + pieces]
            done += pieces

    def _link_chain(self, elder: int | None, entries: array[int], generations: array[int]) -> None:
        """Each of ``entries`` is the parent of the next, ``elder`` that of the first."""
        if not entries:
            return
        parent, parent_generation, children = self.parent, self.parent_generation, self.children
        head, count = entries[0], len(entries)
        if elder is not None:
            parent[head] = elder
            parent_generation[head] = self.generation[elder]
            children[elder] += 1
        stride = entries[1] - head if count > 1 else 1
        if (
            stride > 0
            and entries[-1] - head == stride * (count - 1)
            and entries == array("I", range(head, entries[-1] + 1, stride))
        ):
            parent[head + stride : entries[-1] + 1 : stride] = entries[:-1]
            parent_generation[head + stride : entries[-1] + 1 : stride] = generations[:-1]
            children[head : entries[-1] : stride] = array("I", [1]) * (count - 1)
            return
        previous = head
        for entry, generation in zip(entries[1:], generations, strict=False):
            parent[entry] = previous
            parent_generation[entry] = generation
            children[previous] = 1
            previous = entry

    def _link(
        self, keys: Sequence[bytes], parents: Sequence[bytes], elders: list[int | None], entries: array[int]
    ) -> None:
        """Tell children from heads. A link leads to an object that was there before its child, so there is no cycle."""
        parent, generation = self.parent, self.generation
        parent_generation, children = self.parent_generation, self.children
        earlier: dict[bytes, int] = {}
        for key, name, elder, entry in zip(keys, parents, elders, entries, strict=False):
            if elder is None:
                elder = earlier.get(name)
            if elder is not None:
                parent[entry] = elder
                parent_generation[entry] = generation[elder]
                children[elder] += 1
            earlier[key] = entry

    # -- room ------------------------------------------------------------------------------------------------------

    def _allocate(self, length: int, count: int) -> list[Run]:
        """Room for ``count`` objects, or for fewer when nothing more can be evicted."""
        runs: list[Run] = []
        for arena in self.arenas:
            pages = arena.pages_for(length)
            for start, pieces in arena.free.take(pages, count):
                runs.append((arena, pages, start + arena.base, pieces))
                count -= pieces
            if not count:
                return runs
        for arena in self.arenas:
            pages = arena.pages_for(length)
            evicted: list[int] = []
            while count and self._make_room(arena, pages, min(count, 64), evicted):
                for start, pieces in arena.free.take(pages, count):
                    runs.append((arena, pages, start + arena.base, pieces))
                    count -= pieces
            self._mark_free(arena, evicted, [run for run in runs if run[0] is arena])
        return runs

    def _mark_free(self, arena: Arena, evicted: list[int], runs: list[Run]) -> None:
        """Rewrite headers of evicted objects, except where a new header is about to replace them."""
        if not evicted:
            return
        fresh: set[int] = set()
        for _, pages, start, pieces in runs:
            fresh.update(range(start, start + pieces * pages, pages))
        gone = [entry for entry in evicted if entry not in fresh]
        if gone:
            arena.headers.change_state(gone, State.READY, State.FREE)

    def _make_room(self, arena: Arena, pages: int, wanted: int, evicted: list[int]) -> bool:
        """Evict until a run of ``pages`` granules is free, at best ``wanted`` of them; False when that cannot be."""
        made = fruitless = 0
        children, sizes = self.children, self.pages
        while made < wanted and fruitless < _MAX_FRUITLESS:
            victims = arena.policy.pop(wanted - made)
            if not victims:
                break
            fitting: list[int] = []
            for at, victim in enumerate(victims):
                if children[victim]:
                    arena.policy.park(victim)
                    continue
                if sizes[victim] >= pages:
                    self._unlink(victim)
                    fitting.append(victim)
                    made += sizes[victim] // pages
                else:
                    start, size = self._evict(arena, victim, evicted)
                    if size >= pages or self._clear_around(arena, start, size, pages, evicted, victims):
                        made += 1
                    else:
                        fruitless += 1
                if made >= wanted or fruitless >= _MAX_FRUITLESS:
                    arena.policy.put_back(victims[at + 1 :])
                    break
            self._evict_all(arena, fitting, evicted)
        return made > 0

    def _evict_all(self, arena: Arena, victims: list[int], evicted: list[int]) -> None:
        """Drop objects that the policy does not hold any more and that are unlinked already."""
        if not victims:
            return
        state, keys, pages, home, length = self.state, self.key, self.pages, self.home, self.length
        by_number = self.namespaces.by_number
        number, namespace = -1, None
        for entry in victims:
            if home[entry] != number:
                number = home[entry]
                namespace = by_number[number]
                index = namespace.index
            key = keys[entry]
            if not index.remove(key, entry):
                namespace.forget(key, entry)  # type: ignore[union-attr]
            namespace.objects -= 1  # type: ignore[union-attr]
            namespace.stored_bytes -= length[entry]  # type: ignore[union-attr]
            state[entry] = _FREE
        evicted += victims
        arena.objects -= len(victims)
        self.counters["evicted"] += len(victims)
        # Neighbours go back in one piece.
        end = begin = -1
        for entry in sorted(victims):
            if entry != end:
                if end > begin:
                    arena.used -= end - begin
                    arena.free.give(begin - arena.base, end - begin)
                begin = end = entry
            end += pages[entry]
        arena.used -= end - begin
        arena.free.give(begin - arena.base, end - begin)

    def _evict(self, arena: Arena, entry: int, evicted: list[int]) -> tuple[int, int]:
        """Drop an object that the policy does not hold any more; returns the free run it became part of."""
        self._hide(arena, entry)
        self.counters["evicted"] += 1
        evicted.append(entry)
        return self._give(arena, entry)

    def _clear_around(
        self, arena: Arena, start: int, size: int, pages: int, evicted: list[int], doomed: Sequence[int]
    ) -> bool:
        """Evict neighbours of the free run too, but only if that makes it ``pages`` granules long.

        ``doomed`` are victims that were popped already and come next: they are left to their turn.
        """
        plan: list[int] = []
        left, right = start, start + size
        while right - left < pages and right < arena.end:
            gap = arena.free.run_at(right - arena.base)
            if not gap:
                if not self._evictable(right) or right in doomed:
                    break
                plan.append(right)
                gap = self.pages[right]
            right += gap
        while right - left < pages and left > arena.base:
            gap = arena.free.run_at(left - 1 - arena.base)
            if not gap:
                entry = self.tail[left - 1]
                if not self._evictable(entry) or entry in doomed:
                    break
                plan.append(entry)
                gap = self.pages[entry]
            left -= gap
        if right - left < pages:
            return False
        arena.policy.remove(plan)
        for entry in plan:
            self._evict(arena, entry, evicted)
        return True

    def _evictable(self, entry: int) -> bool:
        return self.state[entry] == _READY and not self.readers[entry] and not self.children[entry]

    # -- COMMIT, ABORT ---------------------------------------------------------------------------------------------

    def commit(
        self, session: Session, entries: list[int], generations: list[int], checksums: Sequence[int] = ()
    ) -> bytearray:
        """Make reserved objects READY; returns a column of :class:`CommitStatus`. Idempotent.

        What a reset came between is freed instead.
        """
        self.settle()
        generation, reserved = self.generation, session.reserved
        statuses = bytearray(len(entries))
        if (
            reserved.issuperset(entries)
            and [generation[entry] for entry in entries] == generations
            and len(set(entries)) == len(entries)
        ):
            good = entries
        else:
            mine: dict[int, None] = {}
            lost: dict[int, None] = {}
            for at, (entry, wanted) in enumerate(zip(entries, generations, strict=True)):
                if entry in reserved and generation[entry] == wanted:
                    mine[entry] = None
                elif not self._committed(session, entry, wanted):
                    statuses[at] = CommitStatus.UNKNOWN
                    if entry in session.doomed and generation[entry] == wanted:
                        lost[entry] = None
            good = list(mine)
            self._free_reserved(session, list(lost))
        if checksums:
            publishing = set(good)
            for entry, checksum in zip(entries, checksums, strict=True):
                if checksum and entry in publishing:
                    self._arena_of(entry).headers.set_checksum(entry, checksum)
        self._publish(session, good)
        return statuses

    def _publish(self, session: Session, entries: list[int]) -> None:
        if not entries:
            return
        state = self.state
        for arena, part in self._by_arena(entries):
            arena.headers.change_state(part, State.RESERVED, State.READY)
        for entry in entries:
            state[entry] = _READY

        def account() -> None:
            pages, length = self.pages, self.length
            for arena, part in self._by_arena(entries):
                taken = sum([pages[entry] for entry in part])
                arena.reserved -= taken
                session.reserved_pages[arena.number] -= taken
                arena.used += taken
                arena.objects += len(part)
                arena.policy.add(part[::-1])
            session.reserved.difference_update(entries)
            namespace = session.namespace
            namespace.objects += len(entries)
            namespace.stored_bytes += sum([length[entry] for entry in entries])
            self.counters["stored"] += len(entries)

        self._later.append(account)

    def abort(self, session: Session, entries: list[int], generations: list[int]) -> bytearray:
        """Give reserved pages back; returns a column of :class:`CommitStatus`. Idempotent."""
        self.settle()
        statuses = bytearray(len(entries))
        mine: dict[int, None] = {}
        for at, (entry, wanted) in enumerate(zip(entries, generations, strict=True)):
            if (entry in session.reserved or entry in session.doomed) and self.generation[entry] == wanted:
                mine[entry] = None
            else:
                statuses[at] = CommitStatus.UNKNOWN
        self._free_reserved(session, list(mine))
        return statuses

    def _committed(self, session: Session, entry: int, generation: int) -> bool:
        if entry >= self.total or self.generation[entry] != generation or self.state[entry] != _READY:
            return False
        header = self._arena_of(entry).headers.read(entry)
        return header is not None and header.session == session.id

    def _free_reserved(self, session: Session, entries: list[int]) -> None:
        for arena, part in self._by_arena(entries):
            arena.headers.change_state(part, State.RESERVED, State.FREE)
            for entry in part:
                session.namespace.forget(self.key[entry], entry)
                self._unlink(entry)
                pages = self.pages[entry]
                arena.reserved -= pages
                session.reserved_pages[arena.number] -= pages
                self.state[entry] = _FREE
                arena.free.give(entry - arena.base, pages)
        session.reserved.difference_update(entries)
        session.doomed.difference_update(entries)
        self.counters["aborted"] += len(entries)

    # -- PROBE, ACQUIRE, RELEASE -----------------------------------------------------------------------------------

    def probe(self, session: Session, keys: Sequence[bytes]) -> bytes:
        """A column of :class:`Presence`. Says nothing about what holds a moment later."""
        self.settle()
        state = self.state
        found = session.namespace.index.find(keys)
        return bytes([_ABSENT if entry is None else _PRESENCE[state[entry]] for entry in found])

    def acquire(self, session: Session, lease: int, keys: Sequence[bytes], leading: bool) -> Acquired:
        """Lease what is READY, under ``lease`` (which may exist already).

        Returns columns of :class:`Presence`, first entry, generation and length in bytes. With ``leading`` only the
        READY keys at the head are leased and all keys after the first other one are answered ABSENT.
        """
        self.settle()
        count = len(keys)
        state, held = self.state, session.held
        found = session.namespace.index.find(keys)
        if None not in found and bytes(map(state.__getitem__, found)) == _ALL_READY * count:  # type: ignore[arg-type]
            hits: list[int] = found  # type: ignore[assignment]
            statuses = bytearray(b"\1") * count
        else:
            statuses = bytearray([_ABSENT if entry is None else _PRESENCE[state[entry]] for entry in found])
            if leading:
                head = count - len(statuses.lstrip(b"\1"))
                statuses[head + 1 :] = bytes(max(0, count - head - 1))
            hits = [entry for entry, status in zip(found, statuses, strict=True) if status == Presence.READY]  # type: ignore[misc]
        unique = dict.fromkeys(hits, 1)
        simple = len(unique) == len(hits) and held.keys().isdisjoint(hits)
        fresh = hits if simple else [entry for entry in unique if entry not in held]
        if fresh and not self._within_share(session, fresh):
            hits = self._cut_to_share(session, found, statuses, leading)
            fresh = [entry for entry in dict.fromkeys(hits) if entry not in held]
            simple = False

        def hold() -> None:
            if simple:
                held.update(unique)
            else:
                for entry in hits:
                    held[entry] = held.get(entry, 0) + 1
            if fresh:
                self._start_reading(session, fresh)
            session.leases.setdefault(lease, array("I")).extend(hits)

        if hits:
            self._later.append(hold)
        self.counters["hits"] += len(hits)
        self.counters["misses"] += count - len(hits)
        entries, generations, lengths = self._locate(hits)
        if len(hits) < count:
            return statuses, *_spread(statuses, entries, generations, lengths)
        return statuses, entries, generations, lengths

    def _locate(self, entries: list[int]) -> tuple[array[int], array[int], array[int]]:
        generation, length = self.generation, self.length
        return (
            array("I", entries),
            array("I", [generation[entry] for entry in entries]),
            array("Q", [length[entry] for entry in entries]),
        )

    def _within_share(self, session: Session, fresh: list[int]) -> bool:
        pages = self.pages
        for arena, part in self._by_arena(fresh):
            wanted = sum([pages[entry] for entry in part])
            if session.leased_pages[arena.number] + wanted > self._lease_limits[arena.number]:
                return False
        return True

    def _cut_to_share(self, session: Session, found: list[int | None], statuses: bytearray, leading: bool) -> list[int]:
        """Answer BUSY for what is over the session's share; returns what may be leased."""
        leased = list(session.leased_pages)
        hits: list[int] = []
        counted: set[int] = set()
        for at, entry in enumerate(found):
            if entry is None or statuses[at] != Presence.READY:
                continue
            if entry not in session.held and entry not in counted:
                arena = self._arena_of(entry)
                wanted = leased[arena.number] + self.pages[entry]
                if wanted > self._lease_limits[arena.number]:
                    statuses[at] = Presence.BUSY
                    if leading:
                        statuses[at + 1 :] = bytes(len(statuses) - at - 1)
                        break
                    continue
                leased[arena.number] = wanted
                counted.add(entry)
            hits.append(entry)
        return hits

    def _start_reading(self, session: Session, fresh: list[int]) -> None:
        """``session`` begins to hold ``fresh``, whose entries differ."""
        readers, pages = self.readers, self.pages
        for arena, part in self._by_arena(fresh):
            taken = sum([pages[entry] for entry in part])
            session.leased_pages[arena.number] += taken
            first = [entry for entry in part if not readers[entry]]
            for entry in part:
                readers[entry] += 1
            arena.leased += taken if len(first) == len(part) else sum([pages[entry] for entry in first])
            arena.policy.remove(first)

    def release(self, session: Session, lease: int, limit: int) -> tuple[bool, bool]:
        """End at most ``limit`` keys of ``lease``; returns whether it was known and whether all of it has ended."""
        self.settle()
        entries = session.leases.get(lease)
        if entries is None:
            return False, True
        part = entries[-limit:].tolist()
        del entries[-limit:]
        if not entries:
            del session.leases[lease]
        held = session.held
        part.reverse()
        counts = list(map(held.__getitem__, part))
        if counts.count(1) == len(part):
            ended = part
            for entry in ended:
                del held[entry]
        else:
            ended = []
            for entry in part:
                held[entry] -= 1
                if not held[entry]:
                    del held[entry]
                    ended.append(entry)
        self._stop_reading(session, ended)
        return True, not entries

    def _stop_reading(self, session: Session, ended: list[int]) -> None:
        readers, pages, state = self.readers, self.pages, self.state
        for arena, part in self._by_arena(ended):
            taken = sum([pages[entry] for entry in part])
            session.leased_pages[arena.number] -= taken
            for entry in part:
                readers[entry] -= 1
            last = [entry for entry in part if not readers[entry]]
            arena.leased -= taken if len(last) == len(part) else sum([pages[entry] for entry in last])
            ready = [entry for entry in last if state[entry] == _READY]
            arena.policy.add(ready)
            if len(ready) != len(last):
                gone = [entry for entry in last if state[entry] == _RETIRING]
                arena.headers.change_state(gone, State.RETIRING, State.FREE)
                for entry in gone:
                    self._give(arena, entry)

    # -- DELETE, RESET, end of a session ---------------------------------------------------------------------------

    def delete(self, session: Session, keys: Sequence[bytes]) -> bytes:
        """Drop READY objects; returns a column of :class:`Presence` from before. What is being written stays."""
        self.settle()
        statuses = bytearray(len(keys))
        index, state = session.namespace.index, self.state
        for at, key in enumerate(keys):
            entry = index.get(key)
            if entry is None:
                continue
            statuses[at] = _PRESENCE[state[entry]]
            if state[entry] == _READY:
                self._retire(entry)
                self.counters["deleted"] += 1
        return bytes(statuses)

    def reset(self, namespace: NamespaceState, weights_epoch: int) -> KeyIndex | None:
        """Hide all objects of ``namespace`` and begin a new weights epoch, unless ``weights_epoch`` is past already.

        Reservations that exist cannot commit any more. Returns what :meth:`drain` has to free, ``None`` for nothing.
        """
        self.settle()
        if weights_epoch != namespace.weights_epoch:
            return None
        old, namespace.index = namespace.index, KeyIndex()
        namespace.weights_epoch += 1
        self.counters["resets"] += 1
        for session in namespace.sessions.values():
            if session.doomed:
                session.doomed |= session.reserved
            else:
                session.doomed = session.reserved
            session.reserved = set()
        if not len(old):
            return None
        namespace.draining.append(old)
        return old

    def drain(self, namespace: NamespaceState, old: KeyIndex, limit: int) -> bool:
        """Free at most ``limit`` objects that a reset hid; whether that was all of them."""
        self.settle()
        for _ in range(limit):
            entry = old.take_any()
            if entry is None:
                namespace.draining = [index for index in namespace.draining if index is not old]
                return True
            if self.state[entry] == _READY:
                self._retire(entry)
        return False

    def end_session(self, session: Session, limit: int) -> bool:
        """Free at most ``limit`` things that a closed session holds; whether that was all of them."""
        self.settle()
        session.leases.clear()
        for mine in (session.reserved, session.doomed):
            if mine:
                self._free_reserved(session, [entry for entry, _ in zip(mine, range(limit), strict=False)])
                return not (session.reserved or session.doomed or session.held)
        part = [session.held.popitem()[0] for _ in range(min(limit, len(session.held)))]
        self._stop_reading(session, part)
        return not session.held

    # -- pieces ----------------------------------------------------------------------------------------------------

    def _retire(self, entry: int) -> None:
        """Hide a READY object; free it at once unless somebody reads it."""
        arena = self._arena_of(entry)
        self._hide(arena, entry)
        if self.readers[entry]:
            self.state[entry] = _RETIRING
            arena.headers.change_state([entry], State.READY, State.RETIRING)
            return
        arena.policy.remove((entry,))
        arena.headers.change_state([entry], State.READY, State.FREE)
        self._give(arena, entry)

    def _hide(self, arena: Arena, entry: int) -> None:
        namespace = self.namespaces.by_number[self.home[entry]]
        namespace.forget(self.key[entry], entry)
        namespace.objects -= 1
        namespace.stored_bytes -= self.length[entry]
        arena.objects -= 1
        self._unlink(entry)

    def _give(self, arena: Arena, entry: int) -> tuple[int, int]:
        """Free the pages of a READY or RETIRING object; returns the free run they are part of."""
        self.state[entry] = _FREE
        pages = self.pages[entry]
        arena.used -= pages
        start, size = arena.free.give(entry - arena.base, pages)
        return start + arena.base, size

    def _unlink(self, entry: int) -> None:
        """Its parent, if it is still the object it was, has a child less."""
        elder = self.parent[entry]
        if elder != NO_ENTRY:
            self.parent[entry] = NO_ENTRY
            if self.generation[elder] == self.parent_generation[entry]:
                self._drop_child(elder)

    def _drop_child(self, elder: int) -> None:
        self.children[elder] -= 1
        if not self.children[elder]:
            self._arena_of(elder).policy.unpark(elder)

    def _arena_of(self, entry: int) -> Arena:
        return self._single or self.arenas[bisect_right(self._bases, entry) - 1]

    def _by_arena(self, entries: list[int]) -> Iterable[tuple[Arena, list[int]]]:
        """``entries`` grouped by pool, order kept; nothing for an empty list."""
        if not entries:
            return ()
        if self._single is not None:
            return ((self._single, entries),)
        groups: dict[int, list[int]] = {}
        for entry in entries:
            groups.setdefault(bisect_right(self._bases, entry) - 1, []).append(entry)
        return [(self.arenas[number], part) for number, part in groups.items()]


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
