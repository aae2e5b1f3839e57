"""Which object goes first when a pool is full.

The directory tells a policy about objects that may be evicted at all (READY, not leased) and asks it for victims. It
refuses a victim that still has children and *parks* it, so that a prefix loses its tail before its head; the policy
gets it back when the last child is gone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Protocol


class EvictionPolicy(Protocol):
    """Order of eviction in one pool. Objects are named by their first entry. Every call is O(1) per object."""

    def add(self, entries: Iterable[int]) -> None:
        """These became evictable, or were used while they were: the last one is the most valuable."""

    def remove(self, entries: Iterable[int]) -> None:
        """These are leased or gone. Entries that the policy does not hold are ignored."""

    def pop(self, count: int) -> list[int]:
        """At most ``count`` victims, the least valuable first; they are no longer held."""

    def put_back(self, entries: Iterable[int]) -> None:
        """Victims of ``pop`` that were not evicted: they are the next victims again, in this order."""

    def park(self, entry: int) -> None:
        """A victim of ``pop`` has children. Do not offer it again before ``unpark`` or ``add``."""

    def unpark(self, entry: int) -> None:
        """The last child of ``entry`` is gone; ignored unless it is parked."""


PolicyFactory = Callable[[], EvictionPolicy]


class LeastRecentlyUsed:
    """Evicts what was used longest ago.

    A parked object was older than everything that was held at that moment, so it goes back to the cold end: the order
    stays exact without searching. Each use of an object parks it at most once, hence amortised O(1).
    """

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()
        self._parked: set[int] = set()

    def add(self, entries: Iterable[int]) -> None:
        order, parked = self._order, self._parked
        for entry in entries:
            if entry in order:
                order.move_to_end(entry)
            else:
                order[entry] = None
        if parked:
            parked.difference_update(entries)

    def remove(self, entries: Iterable[int]) -> None:
        forget, parked = self._order.pop, self._parked
        for entry in entries:
            forget(entry, None)
        if parked:
            parked.difference_update(entries)

    def pop(self, count: int) -> list[int]:
        order = self._order
        take = order.popitem
        return [take(last=False)[0] for _ in range(min(count, len(order)))]

    def put_back(self, entries: Iterable[int]) -> None:
        for entry in reversed(list(entries)):
            self._order[entry] = None
            self._order.move_to_end(entry, last=False)

    def park(self, entry: int) -> None:
        self._parked.add(entry)

    def unpark(self, entry: int) -> None:
        if entry in self._parked:
            self._parked.discard(entry)
            self._order[entry] = None
            self._order.move_to_end(entry, last=False)
