"""Chooses what goes from one pool to make room in it: what is worth least, and what stands around it.

An object is free to go when nobody reads or writes it and nothing that is stored continues it. Eviction frees one
piece; where it is too short for what is to be stored, neighbours go, too, if that helps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from maru_core.server.arena import Arena
from maru_core.server.namespaces import NamespaceState
from maru_core.server.objects import READY, REPLICA, Objects
from maru_core.server.quotas import Quotas
from maru_core.server.removal import Removal

#: States of what may be evicted.
_STORED = (READY, REPLICA)
#: Victims that may be evicted one after the other without making room for one object before it is skipped.
_MAX_FRUITLESS = 64
#: Victims that may be left alone because what is around them stays anyway.
_MAX_SPARED = 256
#: Objects that are evicted at a time while somebody waits, and while nobody does.
_BATCH = 64
_AHEAD_BATCH = 16


class Clearing:
    """Evicts from the pools of ``objects`` by their orders of eviction.

    ``demote``: objects of all pools but the last one can move down instead of being lost.
    """

    def __init__(self, objects: Objects, removal: Removal, quotas: Quotas, demote: bool) -> None:
        self._objects = objects
        self._removal = removal
        self._quotas = quotas
        self._last = objects.arenas[-1]
        self._demote = demote

    def make_room(self, arena: Arena, pages: int, wanted: int, evicted: list[int], price: int | None) -> bool:
        """Evict until a run of ``pages`` granules is free, at best ``wanted`` of them, or a batch.

        ``price``: what is worth more stays. False when there is no such run.
        """
        wanted = min(wanted, _BATCH)
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
                    self._removal.leave(arena, victim)
                    fitting.append(victim)
                    made += sizes[victim] // pages
                elif len(spared) < _MAX_SPARED and self._is_hemmed_in(arena, victim, pages):
                    arena.tenants.park(tenant, victim)
                    spared.append((tenant, victim))
                    continue
                else:
                    start, size = self._removal.evict(arena, victim, evicted)
                    if size >= pages or self._clear_around(arena, start, size, pages, evicted, victims):
                        made += 1
                    else:
                        fruitless += 1
                if made >= wanted or fruitless >= _MAX_FRUITLESS:
                    arena.tenants.put_back(tenant, victims[at + 1 :])
                    break
            self._removal.evict_all(arena, fitting, evicted)
        # The last one first, so that they are the next victims again, in this order.
        for tenant, victim in reversed(spared):
            arena.tenants.unpark(tenant, victim)
        return made > 0

    def evict_of(
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
            self._removal.leave(arena, victim)
            fitting.append(victim)
            pages -= objects.pages[victim]
        self._removal.evict_all(arena, fitting, evicted)
        return bool(victims)

    def evict_ahead(self, arena: Arena, pages: int, missing: int) -> bool:
        """Evict a few of the next victims, if each leaves room for ``pages`` granules and is not over ``missing``.

        Other victims are left to :meth:`make_room`, which is told what is needed. Returns whether there was a victim.
        """
        tenant, victims = self._victims(arena, min(missing // pages, _AHEAD_BATCH))
        if self._removal.evict_tail(arena, victims, pages, missing):
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
            self._removal.leave(arena, victim)
            fitting.append(victim)
            missing -= size
        evicted: list[int] = []
        self._removal.evict_all(arena, fitting, evicted)
        self._removal.mark_free(arena, evicted, ())
        return bool(victims)

    def _victims(self, arena: Arena, count: int, price: int | None = None) -> tuple[int, list[int]]:
        """A namespace, and at most ``count`` of its objects that are worth less than all others of the pool."""
        for namespace in self._quotas.over():
            victims = arena.tenants.pop_of(namespace.number, count)
            if victims:
                return namespace.number, victims
        return arena.tenants.pop(count, None if price is None else price + 1)

    def _may_move_down(self, arena: Arena, entry: int) -> bool:
        """Whether ``entry``, which may not be evicted because of its children, may be demoted all the same."""
        return self._demote and arena is not self._last and self._objects.is_top(entry)

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
            self._removal.evict(arena, entry, evicted)
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
