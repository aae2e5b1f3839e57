"""How stored objects go: evicted at once, or hidden and freed when nobody reads them any more.

What is to go is for others to say (:mod:`.clearing`, :mod:`.directory`). Here index, prefix tree, replicas, eviction
order, headers, free granules and all that is counted are kept in step.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from maru_core.pool_format import State
from maru_core.protocol.messages import NO_ENTRY
from maru_core.server.arena import Arena
from maru_core.server.namespaces import Namespaces
from maru_core.server.objects import FREE, REPLICA, RETIRING, Objects, Run
from maru_core.server.withheld import Withheld


class Removal:
    """Of objects in all pools. ``counters``: evicted, replicas_dropped.

    Where a list ``evicted`` is asked for, entries are added to it whose headers :meth:`mark_free` has to rewrite.
    """

    def __init__(self, objects: Objects, namespaces: Namespaces, counters: dict[str, int]) -> None:
        self._objects = objects
        self._namespaces = namespaces
        self._counters = counters
        #: While set nothing is evicted and nothing that was stored is freed: somebody unknown may still read it.
        self.frozen = False
        self.withheld = Withheld()
        #: RETIRING objects without a known reader that are freed when that is over.
        self._kept: list[int] = []

    # -- eviction --------------------------------------------------------------------------------------------------

    def drop(self, arena: Arena, victim: int) -> None:
        """Evict an object that the policy does not hold any more and that nobody reads."""
        evicted: list[int] = []
        self.evict(arena, victim, evicted)
        self.mark_free(arena, evicted, ())

    def evict(self, arena: Arena, entry: int, evicted: list[int]) -> tuple[int, int]:
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

    def evict_all(self, arena: Arena, victims: list[int], evicted: list[int]) -> None:
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

    def evict_tail(self, arena: Arena, victims: list[int], pages: int, missing: int) -> bool:
        """Evict ``victims`` if they are the end of one chain and lie side by side, as they do when stored together.

        Does what :meth:`.Clearing.evict_ahead` does for any victims, at less than half the cost.
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

    def leave(self, arena: Arena, entry: int) -> None:
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

    def mark_free(self, arena: Arena, evicted: list[int], runs: Sequence[Run]) -> None:
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

    # -- what may still be read ------------------------------------------------------------------------------------

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

    # -- what both do ----------------------------------------------------------------------------------------------

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
