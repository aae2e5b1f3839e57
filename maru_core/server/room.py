"""Room for new objects: taken from what is free, made by eviction, and a little of it made ahead.

An eviction takes time that a client would wait for. So when a pool is full, some room is made while the server has
nothing else to do: as much as the last batches took, and never more than a small share of the pool.

Of several pools the first one with room is written to. With demotion only the last one loses objects, as long as there
are any that may go: those of the others move down instead (:mod:`.moves`). Without it all pools lose the same share of
what they hold. What goes from a pool is chosen by :mod:`.clearing`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from maru_core.server.arena import Arena
from maru_core.server.clearing import Clearing
from maru_core.server.namespaces import NamespaceState
from maru_core.server.objects import Objects, Run
from maru_core.server.quotas import Quotas
from maru_core.server.removal import Removal

#: From this many objects on they are to lie together, and by several; see :meth:`Room._spares_crumbs`.
_TOGETHER = 8
_SEVERAL = 4
#: The part of a pool that is free between objects when they have several sizes, and the most that is left there; each
#: as its reciprocal.
_MIXED = 64
_MOST_CRUMBS = 16
#: Parts of a pool of which one is evicted before it is another pool's turn.
_TURNS = 16
#: Objects that a pool must be able to hold for room for one of them to be kept free.
_FEW = 8
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
        removal: Removal,
        quotas: Quotas,
        ahead_share: float,
        lease_share: float,
        demote: bool = False,
    ) -> None:
        self._objects = objects
        self._removal = removal
        self._quotas = quotas
        self._arenas = objects.arenas
        # What no session may lease, nobody could ever read.
        self._longest_of = [int((arena.end - arena.base) * lease_share) * arena.granule for arena in self._arenas]
        self._longest = max(self._longest_of)
        self._most_ahead = int(sum(arena.end - arena.base for arena in self._arenas) * ahead_share)
        self._demote = demote and len(self._arenas) > 1
        self._clearing = Clearing(objects, removal, quotas, self._demote)
        #: Length in bytes and number of the objects of the last batch.
        self.demand = (0, 0)
        #: Length in bytes and number of the objects that room is made ahead for; none when there is nothing to do.
        self._ahead = (0, 0)

    def fits(self, length: int) -> bool:
        """Whether an object of ``length`` bytes can be in some pool at all, and be read from there."""
        return 0 < length <= self._longest

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
        before = 0
        # What went from one pool may have been all that kept its parents in another: those may go in the next round.
        while count and count != before and not self._removal.frozen:
            before = count
            for arena in self._in_turn(arenas):
                count -= self._replace(arena, length, count, runs, worth(arena))
            if len(arenas) == 1:
                break
        return runs, over_quota

    def _replace(self, arena: Arena, length: int, wanted: int, runs: list[Run], price: int | None) -> int:
        """Take room for at most ``wanted`` objects, evicting what is worth less than ``price``. For how many."""
        pages, count = arena.pages_for(length), wanted
        evicted: list[int] = []
        while count and self._clearing.make_room(arena, pages, count, evicted, price):
            taken = self._take(arena, length, count, runs, self._spares_crumbs(arena, count))
            count -= taken or self._take(arena, length, count, runs, False)
        if count:
            count -= self._take(arena, length, count, runs, False)
        self._removal.mark_free(arena, evicted, [run for run in runs if run[0] is arena])
        return wanted - count

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
        if self._clearing.make_room(last, last.pages_for(length), 1, evicted, None):
            self._take(last, length, 1, runs, False)
        self._removal.mark_free(last, evicted, runs)
        return (runs[0] if runs else None), True

    def take_spare(self, arena: Arena, namespace: NamespaceState, length: int) -> Run | None:
        """Room for a replica of ``length`` bytes, if there is more than half of what is kept free for new objects."""
        pages = arena.pages_for(length)
        wanted, count = self.demand
        pages_wanted = arena.pages_for(wanted)
        kept = min(_AHEAD_BATCHES * count * pages_wanted, self._most_ahead_of(arena, pages_wanted)) // 2
        if self._removal.frozen or arena.free.free - pages < kept or length > self._longest_of[arena.number]:
            return None
        if namespace.quota is not None and self._quotas.bytes_of(namespace) + pages * arena.granule > namespace.quota:
            return None
        runs: list[Run] = []
        self._take(arena, length, 1, runs, False)
        return runs[0] if runs else None

    def is_low(self, arena: Arena, coming: int) -> bool:
        """Whether ``arena`` has less room than batches like the last one take; ``coming`` granules are free soon."""
        length, count = self.demand
        pages = arena.pages_for(length)
        most = self._most_ahead_of(arena, pages)
        missing = min(_AHEAD_BATCHES * count * pages, most) - arena.free.free - coming
        return 0 < pages <= missing and not self._removal.frozen

    def is_short(self) -> bool:
        """Whether there is less room than :meth:`make_ahead` wants, and it did not yet find that it can make none."""
        length, count = self._ahead
        if not count or self._removal.frozen:
            return False
        pages = self._arenas[0].pages_for(length)
        if self._missing(pages, count) >= pages:
            return True
        self._ahead = (0, 0)
        return False

    def make_ahead(self) -> None:
        """Evict a few objects if little is free, for batches like the last one."""
        length, count = self._ahead
        if not count or self._removal.frozen:
            return
        for arena in self._arenas[-1:] if self._demote else self._in_turn(self._arenas):
            pages = arena.pages_for(length)
            missing = self._missing(pages, count)
            if missing >= pages and self._clearing.evict_ahead(arena, pages, missing):
                return
        self._ahead = (0, 0)

    def _within_quota(self, namespace: NamespaceState, quota: int, length: int, count: int) -> int:
        """For how many of ``count`` objects the quota has room, after evicting objects of the namespace itself."""
        size = self._arenas[0].pages_for(length) * self._arenas[0].granule
        count = min(count, quota // size)
        before = -1
        # As in allocate: what goes from one pool may set its parents in another free.
        while not self._removal.frozen and before != (taken := self._quotas.bytes_of(namespace)) > quota - count * size:
            before = taken
            for arena in self._in_turn(self._arenas):
                self._cut(namespace, arena, quota - count * size)
        return max(0, min(count, (quota - self._quotas.bytes_of(namespace)) // size))

    def _cut(self, namespace: NamespaceState, arena: Arena, most: int) -> None:
        """Evict objects of ``namespace`` in one pool until it has at most ``most`` bytes, or no more that may go."""
        evicted: list[int] = []
        tops: list[int] = []
        while (excess := self._quotas.bytes_of(namespace) - most) > 0:
            if not self._clearing.evict_of(namespace, arena, -(-excess // arena.granule), evicted, tops):
                break
        for entry in reversed(tops):
            arena.tenants.unpark(namespace.number, entry)
        self._removal.mark_free(arena, evicted, ())

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

    def _take(self, arena: Arena, length: int, count: int, runs: list[Run], sparing: bool) -> int:
        """Take room for at most ``count`` objects that is free; ``sparing``: only where several fit. For how many."""
        pages = arena.pages_for(length)
        arena.sizes.add(pages)
        taken = 0
        for start, pieces in arena.free.take(pages, count, _SEVERAL if sparing else 1):
            runs.append((arena, pages, start + arena.base, pieces))
            taken += pieces
        return taken

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
            and not self._removal.frozen
            and entries <= _MIXED * arena.free.free
            and entries > _MOST_CRUMBS * arena.free.free
        )

    def _most_ahead_of(self, arena: Arena, pages: int) -> int:
        """Granules of ``arena`` that are kept free at most: one object of ``pages`` at least, if it holds several."""
        size = arena.end - arena.base
        share = self._most_ahead * size // self._objects.total
        return max(share, pages) if _FEW * pages <= size else share

    def _missing(self, pages: int, count: int) -> int:
        """Granules that are to be free beyond those that are, for batches of ``count`` times ``pages``."""
        free = sum([arena.free.free for arena in self._arenas])
        return min(_AHEAD_BATCHES * count * pages, self._most_ahead) - free
