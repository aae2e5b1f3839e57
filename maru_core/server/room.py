"""Room for new objects: taken from what is free, made by eviction, and a little of it made ahead.

An eviction takes time that a client would wait for. So when a pool is full, some room is made while the server has
nothing else to do: as much as the last batches took, and never more than a small share of the pool.

Of several pools the first one with room is written to. With demotion only the last one loses objects, as long as there
are any that may go: those of the others move down instead (:mod:`.moves`). Without it all pools lose the same share of
what they hold.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from maru_core.pool_format import State
from maru_core.protocol.messages import NO_ENTRY
from maru_core.server.arena import Arena
from maru_core.server.namespaces import Namespaces, NamespaceState
from maru_core.server.objects import FREE, READY, REPLICA, RETIRING, Objects, Run
from maru_core.server.withheld import Withheld

#: States of what may be evicted.
_STORED = (READY, REPLICA)
#: Victims that may be evicted one after the other without making room for one object before it is skipped.
_MAX_FRUITLESS = 64
#: Victims that may be left alone because what is around them stays anyway.
_MAX_SPARED = 256
#: Objects that are evicted at a time while somebody waits, and while nobody does.
_BATCH = 64
_AHEAD_BATCH = 16
#: From this many objects on they are to lie together, and by several; see :meth:`Room._spares_crumbs`.
_TOGETHER = 8
_SEVERAL = 4
#: The part of a pool that is free between objects when they have several sizes, and the most that is left there; each
#: as its reciprocal.
_MIXED = 64
_MOST_CRUMBS = 16
#: Parts of a pool of which one is evicted before it is another pool's turn.
_TURNS = 16
#: Room that is made ahead, in batches like the last one.
_AHEAD_BATCHES = 2


def _nothing_known(arena: Arena) -> None:
    return None


class Room:
    """Allocates in the pools of ``objects``, evicting what is worth least.

    ``ahead_share``: the part of all pools that may be kept free by eviction ahead. ``demote``: objects of all pools but
    the last one move down, so those of the last one are evicted first.
    """

    def __init__(
        self,
        objects: Objects,
        namespaces: Namespaces,
        counters: dict[str, int],
        ahead_share: float,
        lease_share: float,
        demote: bool = False,
    ) -> None:
        self._objects = objects
        self._namespaces = namespaces
        self._counters = counters
        self._arenas = objects.arenas
        # What no session may lease, nobody could ever read.
        self._longest_of = [int((arena.end - arena.base) * lease_share) * arena.granule for arena in self._arenas]
        self._longest = max(self._longest_of)
        self._most_ahead = int(sum(arena.end - arena.base for arena in self._arenas) * ahead_share)
        self._demote = demote and len(self._arenas) > 1
        #: Bytes per namespace that moves have taken beside what they copy; they do not count against a quota.
        self.moving: dict[int, int] = {}
        #: Length in bytes and number of the objects of the last batch.
        self.demand = (0, 0)
        #: While set nothing is evicted and nothing that was stored is freed: somebody unknown may still read it.
        self.frozen = False
        self.withheld = Withheld()
        #: RETIRING objects without a known reader that are freed when that is over.
        self._kept: list[int] = []
        #: Length in bytes and number of the objects that room is made ahead for; none when there is nothing to do.
        self._ahead = (0, 0)
        #: Namespaces that took more than their quota before it was lowered.
        self._over: list[NamespaceState] = []

    def fits(self, length: int) -> bool:
        """Whether an object of ``length`` bytes can be in some pool at all, and be read from there."""
        return 0 < length <= self._longest

    def review(self, namespace: NamespaceState) -> None:
        """The quota of ``namespace`` has changed."""
        if namespace not in self._over:
            self._over.append(namespace)

    def allocate(
        self, namespace: NamespaceState, length: int, count: int, worth: Callable[[Arena], int | None] = _nothing_known
    ) -> tuple[list[Run], int]:
        """Room for ``count`` objects, or for fewer when nothing more can be evicted.

        ``worth``: what they are worth in a pool, whose objects that are worth more are not evicted for them.

        Also returns for how many objects there is none because of the namespace's quota.
        """
        over_quota = 0
        if namespace.quota is not None:
            wanted, count = count, self._within_quota(namespace, namespace.quota, length, count)
            over_quota = wanted - count
            if not count:
                return [], over_quota
        self._ahead = self.demand = (length, count)
        runs: list[Run] = []
        arenas = self._arenas if len(self._arenas) == 1 else self._fitting(length)
        for arena in arenas:
            count -= self._take(arena, length, count, runs, self._spares_crumbs(arena, count))
            if not count:
                return runs, over_quota
        for arena in () if self.frozen else self._in_turn(arenas):
            pages = arena.pages_for(length)
            evicted: list[int] = []
            price = worth(arena)
            while count and self._make_room(arena, pages, min(count, _BATCH), evicted, price):
                taken = self._take(arena, length, count, runs, self._spares_crumbs(arena, count))
                count -= taken or self._take(arena, length, count, runs, False)
            if count:
                count -= self._take(arena, length, count, runs, False)
            self._mark_free(arena, evicted, [run for run in runs if run[0] is arena])
        return runs, over_quota

    def _fitting(self, length: int) -> list[Arena]:
        """The pools from which an object of ``length`` bytes can be read."""
        return [arena for arena, longest in zip(self._arenas, self._longest_of, strict=True) if length <= longest]

    def _in_turn(self, arenas: Sequence[Arena]) -> Sequence[Arena]:
        """``arenas`` in the order in which objects are evicted from them."""
        if len(arenas) == 1:
            return arenas
        if self._demote:
            return arenas[::-1]
        # In proportion to their sizes, or what was used long ago would stay in the later ones for ever; but a part of a
        # pool at a time, so that what is stored together comes to lie together.
        return sorted(arenas, key=lambda arena: _TURNS * arena.evicted // (arena.end - arena.base))

    def take_below(self, arena: Arena, length: int) -> tuple[Run | None, bool]:
        """Room for one object of ``length`` bytes in a pool after ``arena``, evicting from the last one if need be.

        Also returns whether there can be any at all.
        """
        below = [other for other in self._fitting(length) if other.number > arena.number]
        runs: list[Run] = []
        for other in below:
            if self._take(other, length, 1, runs, False):
                return runs[0], True
        if not below or below[-1] is not self._arenas[-1]:
            return None, bool(below)
        last = below[-1]
        evicted: list[int] = []
        if self._make_room(last, last.pages_for(length), 1, evicted, None):
            self._take(last, length, 1, runs, False)
        self._mark_free(last, evicted, runs)
        return (runs[0] if runs else None), True

    def _may_move_down(self, arena: Arena, entry: int) -> bool:
        """Whether ``entry``, which may not be evicted because of its children, may be demoted all the same."""
        return self._demote and arena is not self._arenas[-1] and self._objects.is_top(entry)

    def is_low(self, arena: Arena, coming: int) -> bool:
        """Whether ``arena`` has less room than batches like the last one take; ``coming`` granules are free soon."""
        length, count = self.demand
        pages = arena.pages_for(length)
        missing = min(_AHEAD_BATCHES * count * pages, self._most_ahead_of(arena)) - arena.free.free - coming
        return 0 < pages <= missing and not self.frozen

    def take_spare(self, arena: Arena, namespace: NamespaceState, length: int) -> Run | None:
        """Room for a replica of ``length`` bytes, if there is more than half of what is kept free for new objects."""
        pages = arena.pages_for(length)
        wanted, count = self.demand
        kept = min(_AHEAD_BATCHES * count * arena.pages_for(wanted), self._most_ahead_of(arena)) // 2
        if self.frozen or arena.free.free - pages < kept or length > self._longest_of[arena.number]:
            return None
        if namespace.quota is not None and self._bytes_of(namespace) + pages * arena.granule > namespace.quota:
            return None
        runs: list[Run] = []
        self._take(arena, length, 1, runs, False)
        return runs[0] if runs else None

    def _most_ahead_of(self, arena: Arena) -> int:
        return self._most_ahead * (arena.end - arena.base) // self._objects.total

    def drop(self, arena: Arena, victim: int) -> None:
        """Evict an object that the policy does not hold any more and that nobody reads."""
        evicted: list[int] = []
        self._evict(arena, victim, evicted)
        self._mark_free(arena, evicted, ())

    def _spares_crumbs(self, arena: Arena, count: int) -> bool:
        """Whether ``count`` objects rather take the place of others than be scattered over what is left between them.

        Where objects have one size, each fits wherever one was. Where they have several, small ones
        would always be laid into the gaps that large ones leave, one here and one there, and be moved one by one. The
        gaps join when what is between them goes.
        """
        entries = arena.end - arena.base
        return (
            count >= _TOGETHER
            and len(arena.sizes) > 1
            and not self.frozen
            and entries <= _MIXED * arena.free.free
            and entries > _MOST_CRUMBS * arena.free.free
        )

    def _take(self, arena: Arena, length: int, count: int, runs: list[Run], sparing: bool) -> int:
        """Take room for at most ``count`` objects that is free; ``sparing``: only where several fit. For how many."""
        pages = arena.pages_for(length)
        arena.sizes.add(pages)
        taken = 0
        for start, pieces in arena.free.take(pages, count, _SEVERAL if sparing else 1):
            runs.append((arena, pages, start + arena.base, pieces))
            taken += pieces
        return taken

    def is_short(self) -> bool:
        """Whether there is less room than :meth:`make_ahead` wants, and it did not yet find that it can make none."""
        length, count = self._ahead
        if not count or self.frozen:
            return False
        pages = self._arenas[0].pages_for(length)
        if self._missing(pages, count) >= pages:
            return True
        self._ahead = (0, 0)
        return False

    def make_ahead(self) -> None:
        """Evict a few objects if little is free, for batches like the last one."""
        if self.frozen:
            return
        length, count = self._ahead
        for arena in self._arenas[-1:] if self._demote else self._in_turn(self._arenas):
            pages = arena.pages_for(length)
            missing = self._missing(pages, count)
            if missing >= pages and self._evict_ahead(arena, pages, missing):
                return
        self._ahead = (0, 0)

    def _missing(self, pages: int, count: int) -> int:
        """Granules that are to be free beyond those that are, for batches of ``count`` times ``pages``."""
        free = sum([arena.free.free for arena in self._arenas])
        return min(_AHEAD_BATCHES * count * pages, self._most_ahead) - free

    def _evict_ahead(self, arena: Arena, pages: int, missing: int) -> bool:
        """Evict a few of the next victims, if each leaves room for ``pages`` granules and is not over ``missing``.

        Other victims are left to :meth:`allocate`, which knows what it needs. Returns whether there was a victim.
        """
        tenant, victims = self._victims(arena, min(missing // pages, _AHEAD_BATCH))
        if self._evict_tail(arena, victims, pages, missing):
            return True
        objects = self._objects
        fitting: list[int] = []
        for at, victim in enumerate(victims):
            if objects.children[victim]:
                arena.tenants.park(tenant, victim)
                continue
            size = objects.pages[victim]
            if not pages <= size <= missing:
                arena.tenants.put_back(tenant, victims[at:])
                victims = fitting
                break
            self._leave(arena, victim)
            fitting.append(victim)
            missing -= size
        evicted: list[int] = []
        self._evict_all(arena, fitting, evicted)
        self._mark_free(arena, evicted, ())
        return bool(victims)

    def _evict_tail(self, arena: Arena, victims: list[int], pages: int, missing: int) -> bool:
        """Evict ``victims`` if they are the end of one chain and lie side by side, as they do when stored together.

        Does what :meth:`_evict_ahead` does for any victims, at less than half the cost.
        """
        objects, count = self._objects, len(victims)
        entries = array("I", reversed(victims))
        steps = objects.steps(entries)
        if steps is None or objects.replica or not pages <= steps.step <= missing // count:
            return False
        if (
            objects.pages[steps] != array("I", [steps.step]) * count
            or objects.children[steps] != array("I", [1]) * (count - 1) + array("I", [0])
            or objects.parent[steps][1:] != entries[:-1]
            or objects.parent_generation[steps][1:] != objects.generation[steps][:-1]
        ):
            return False
        objects.unlink(entries[0])
        objects.parent[steps] = array("I", [NO_ENTRY]) * count
        objects.children[steps] = array("I", [0]) * count
        objects.state[steps] = bytes([FREE]) * count
        namespace = self._namespaces.by_number[objects.home[entries[0]]]
        namespace.forget_all(objects.tag[steps], entries)
        namespace.taken[arena.number] -= steps.step * count
        namespace.objects -= count
        namespace.stored_bytes -= sum(objects.length[steps])
        arena.evicted += steps.step * count
        arena.objects -= count
        arena.used -= steps.step * count
        arena.free.give(entries[0] - arena.base, steps.step * count)
        arena.headers.change_steps(steps, State.READY, State.FREE)
        self._counters["evicted"] += count
        return True

    def retire(self, entry: int) -> None:
        """Hide a READY object; free it at once unless somebody reads it."""
        objects = self._objects
        arena = objects.arena_of(entry)
        if entry in objects.replica:
            self.drop_replica(objects.replica[entry])
        self._hide(arena, entry)
        self._retire(arena, entry)

    def drop_replica(self, entry: int) -> None:
        """There is no such replica any more; its pages are free at once unless somebody reads them."""
        arena = self._objects.arena_of(entry)
        self._forget_replica(arena, entry)
        self._retire(arena, entry)

    def _retire(self, arena: Arena, entry: int) -> None:
        objects = self._objects
        if objects.readers[entry] or self.frozen:
            objects.state[entry] = RETIRING
            arena.headers.change_state([entry], State.READY, State.RETIRING)
            if not objects.readers[entry]:
                arena.tenants.remove(objects.home[entry], (entry,))
                self._kept.append(entry)
            return
        arena.tenants.remove(objects.home[entry], (entry,))
        arena.headers.change_state([entry], State.READY, State.FREE)
        self._give(arena, entry)

    def free_retired(self, arena: Arena, entries: Sequence[int]) -> None:
        """Free RETIRING objects whose last reader is gone."""
        if self.frozen:
            self._kept += entries
            return
        arena.headers.change_state(entries, State.RETIRING, State.FREE)
        for entry in entries:
            self._give(arena, entry)

    def keep(self, entry: int) -> None:
        """A RETIRING object that was recovered: freed by :meth:`thaw` unless somebody reads it by then."""
        self._kept.append(entry)

    def thaw(self, limit: int) -> bool:
        """Nothing is frozen any more: free at most ``limit`` objects that were kept; whether that was all of them."""
        self.frozen = False
        self.withheld.give_unclaimed()
        part = self._kept[-limit:]
        del self._kept[-limit:]
        objects = self._objects
        # One that was read since is kept twice, or freed by its last reader.
        gone = [e for e in dict.fromkeys(part) if objects.state[e] == RETIRING and not objects.readers[e]]
        for arena, entries in objects.by_arena(gone):
            self.free_retired(arena, entries)
        return not self._kept

    def _make_room(self, arena: Arena, pages: int, wanted: int, evicted: list[int], price: int | None) -> bool:
        """Evict until a run of ``pages`` granules is free, at best ``wanted`` of them; False when that cannot be."""
        made = fruitless = 0
        spared: list[tuple[int, int]] = []
        children, sizes = self._objects.children, self._objects.pages
        while made < wanted and fruitless < _MAX_FRUITLESS:
            tenant, victims = self._victims(arena, wanted - made, price)
            if not victims:
                break
            fitting: list[int] = []
            for at, victim in enumerate(victims):
                if children[victim]:
                    arena.tenants.park(tenant, victim)
                    if self._may_move_down(arena, victim) and len(spared) < _MAX_SPARED:
                        spared.append((tenant, victim))
                    continue
                if sizes[victim] >= pages:
                    self._leave(arena, victim)
                    fitting.append(victim)
                    made += sizes[victim] // pages
                elif len(spared) < _MAX_SPARED and self._is_hemmed_in(arena, victim, pages):
                    arena.tenants.park(tenant, victim)
                    spared.append((tenant, victim))
                    continue
                else:
                    start, size = self._evict(arena, victim, evicted)
                    if size >= pages or self._clear_around(arena, start, size, pages, evicted, victims):
                        made += 1
                    else:
                        fruitless += 1
                if made >= wanted or fruitless >= _MAX_FRUITLESS:
                    arena.tenants.put_back(tenant, victims[at + 1 :])
                    break
            self._evict_all(arena, fitting, evicted)
        # The last one first, so that they are the next victims again, in this order.
        for tenant, victim in reversed(spared):
            arena.tenants.unpark(tenant, victim)
        return made > 0

    def _victims(self, arena: Arena, count: int, price: int | None = None) -> tuple[int, list[int]]:
        """A namespace, and at most ``count`` of its objects that are worth less than all others of the pool."""
        for namespace in tuple(self._over):
            if namespace.quota is None or self._bytes_of(namespace) <= namespace.quota:
                self._over.remove(namespace)
                continue
            victims = arena.tenants.pop_of(namespace.number, count)
            if victims:
                return namespace.number, victims
        return arena.tenants.pop(count, None if price is None else price + 1)

    def _bytes_of(self, namespace: NamespaceState) -> int:
        """Bytes of the granules that ``namespace`` has taken, without copies that are being made."""
        taken = sum([pages * arena.granule for pages, arena in zip(namespace.taken, self._arenas, strict=True)])
        return taken - self.moving.get(namespace.number, 0)

    def _within_quota(self, namespace: NamespaceState, quota: int, length: int, count: int) -> int:
        """For how many of ``count`` objects the quota has room, after evicting objects of the namespace itself."""
        size = self._arenas[0].pages_for(length) * self._arenas[0].granule
        count = min(count, quota // size)
        for arena in () if self.frozen else self._in_turn(self._arenas):
            evicted: list[int] = []
            tops: list[int] = []
            while (excess := self._bytes_of(namespace) + count * size - quota) > 0:
                if not self._evict_of(namespace, arena, -(-excess // arena.granule), evicted, tops):
                    break
            for entry in reversed(tops):
                arena.tenants.unpark(namespace.number, entry)
            self._mark_free(arena, evicted, ())
        return max(0, min(count, (quota - self._bytes_of(namespace)) // size))

    def _evict_of(
        self, namespace: NamespaceState, arena: Arena, pages: int, evicted: list[int], tops: list[int]
    ) -> bool:
        """Evict a batch of objects of ``namespace``, ``pages`` granules at best; whether there was a victim.

        Those that are left alone and may be demoted are added to ``tops``, unless there are many.
        """
        objects = self._objects
        victims = arena.tenants.pop_of(namespace.number, min(pages, _BATCH))
        fitting: list[int] = []
        for at, victim in enumerate(victims):
            if pages <= 0:
                arena.tenants.put_back(namespace.number, victims[at:])
                break
            if objects.children[victim]:
                arena.tenants.park(namespace.number, victim)
                if len(tops) < _MAX_SPARED and self._may_move_down(arena, victim):
                    tops.append(victim)
                continue
            self._leave(arena, victim)
            fitting.append(victim)
            pages -= objects.pages[victim]
        self._evict_all(arena, fitting, evicted)
        return bool(victims)

    def _evict_all(self, arena: Arena, victims: list[int], evicted: list[int]) -> None:
        """Drop objects of one namespace that its policy does not hold any more and that are unlinked already."""
        if not victims:
            return
        objects = self._objects
        state, tags, pages, length = objects.state, objects.tag, objects.pages, objects.length
        namespace = self._namespaces.by_number[objects.home[victims[0]]]
        losses = victims
        if objects.original:
            losses = [entry for entry in victims if state[entry] != REPLICA]
            for entry in victims:
                if state[entry] == REPLICA:
                    self._forget_replica(arena, entry)
        namespace.forget_all([tags[entry] for entry in losses], losses)
        namespace.objects -= len(losses)
        namespace.stored_bytes -= sum([length[entry] for entry in losses])
        gone = sum([pages[entry] for entry in victims])
        namespace.taken[arena.number] -= gone
        arena.evicted += gone
        for entry in victims:
            state[entry] = FREE
        evicted += victims
        arena.objects -= len(losses)
        self._counters["evicted"] += len(losses)
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
        if entry in self._objects.replica:
            self._leave_to_replica(arena, entry)
        if self._objects.state[entry] == REPLICA:
            self._forget_replica(arena, entry)
        else:
            self._hide(arena, entry)
            self._counters["evicted"] += 1
        arena.evicted += self._objects.pages[entry]
        evicted.append(entry)
        return self._give(arena, entry)

    def _clear_around(
        self, arena: Arena, start: int, size: int, pages: int, evicted: list[int], doomed: Sequence[int]
    ) -> bool:
        """Evict neighbours of the free run too, but only if that makes it ``pages`` granules long.

        ``doomed`` are victims that were popped already and come next: they are left to their turn.
        """
        plan = self._neighbours(arena, start, size, pages, lambda entry: self._evictable(entry) and entry not in doomed)
        if plan is None:
            return False
        for entry in plan:
            arena.tenants.remove(self._objects.home[entry], (entry,))
            self._evict(arena, entry, evicted)
        return True

    def _is_hemmed_in(self, arena: Arena, entry: int, pages: int) -> bool:
        """Whether readers and writers around ``entry`` leave less than ``pages`` granules, whatever is evicted."""
        objects = self._objects
        state, readers = objects.state, objects.readers
        room = self._neighbours(
            arena, entry, objects.pages[entry], pages, lambda other: state[other] in _STORED and not readers[other]
        )
        return room is None

    def _neighbours(
        self, arena: Arena, start: int, size: int, pages: int, may_go: Callable[[int], bool]
    ) -> list[int] | None:
        """Objects around ``size`` granules at ``start`` without which ``pages`` granules are free in one piece.

        ``None`` where there are none that all may go.
        """
        objects = self._objects
        plan: list[int] = []
        left, right = start, start + size
        while right - left < pages and right < arena.end:
            gap = arena.free.run_at(right - arena.base)
            if not gap:
                if not may_go(right):
                    break
                plan.append(right)
                gap = objects.pages[right]
            right += gap
        while right - left < pages and left > arena.base:
            gap = arena.free.run_at(left - 1 - arena.base)
            if not gap:
                entry = objects.tail[left - 1]
                # What this very batch has taken has no tail yet: the one that is noted there is of the past.
                if entry + objects.pages[entry] != left or not may_go(entry):
                    break
                plan.append(entry)
                gap = objects.pages[entry]
            left -= gap
        return plan if right - left >= pages else None

    def _evictable(self, entry: int) -> bool:
        objects = self._objects
        return objects.state[entry] in _STORED and not objects.readers[entry] and not objects.children[entry]

    def _leave(self, arena: Arena, entry: int) -> None:
        """``entry``, which has no children, is about to be evicted: it leaves the prefix tree."""
        if entry in self._objects.replica:
            self._leave_to_replica(arena, entry)
        self._objects.unlink(entry)

    def _leave_to_replica(self, arena: Arena, entry: int) -> None:
        """``entry`` is about to be evicted: it and its replica change roles, if that can still be found."""
        objects = self._objects
        replica = objects.replica[entry]
        namespace = self._namespaces.by_number[objects.home[entry]]
        key = bytes(arena.headers.key(entry))
        if namespace.index.get(key) != entry:
            self.drop_replica(replica)
            return
        namespace.index.remove(objects.tag[entry], entry)
        namespace.index.enter(key, objects.tag[entry], replica)
        objects.relink(entry, replica)
        objects.part(replica)
        objects.pair(replica, entry)
        other = objects.arena_of(replica)
        other.objects += 1
        other.replicas -= 1
        arena.objects -= 1
        arena.replicas += 1

    def _forget_replica(self, arena: Arena, entry: int) -> None:
        self._objects.part(entry)
        arena.replicas -= 1
        self._counters["replicas_dropped"] += 1

    def _hide(self, arena: Arena, entry: int) -> None:
        objects = self._objects
        namespace = self._namespaces.by_number[objects.home[entry]]
        namespace.forget(objects.tag[entry], entry)
        namespace.objects -= 1
        namespace.stored_bytes -= objects.length[entry]
        arena.objects -= 1
        objects.unlink(entry)

    def _give(self, arena: Arena, entry: int) -> tuple[int, int]:
        """Free the pages of a READY or RETIRING object; returns the free run they are part of."""
        objects = self._objects
        objects.state[entry] = FREE
        pages = objects.pages[entry]
        arena.used -= pages
        self._namespaces.by_number[objects.home[entry]].taken[arena.number] -= pages
        start, size = arena.free.give(entry - arena.base, pages)
        return start + arena.base, size

    def _mark_free(self, arena: Arena, evicted: list[int], runs: Sequence[Run]) -> None:
        """Rewrite headers of evicted objects, except where a new header is about to replace them."""
        fresh: set[int] = set()
        for _, pages, start, pieces in runs:
            fresh.update(range(start, start + pieces * pages, pages))
        gone = sorted([entry for entry in evicted if entry not in fresh])
        steps = self._objects.steps(gone)
        if steps is not None:
            arena.headers.change_steps(steps, State.READY, State.FREE)
        else:
            arena.headers.change_state(gone, State.READY, State.FREE)
