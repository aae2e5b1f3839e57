"""Which object goes first when a pool is full.

The directory tells a policy about objects that may be evicted at all (READY, not leased) and asks it for victims. It
refuses a victim that still has children and *parks* it, so that a prefix loses its tail before its head; the policy
gets it back when the last child is gone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Protocol


class EvictionPolicy(Protocol):
    """Order of eviction in one pool. Objects are named by their first entry. Every call is O(1) per object."""

    def add(self, entries: Sequence[int]) -> None:
        """These became evictable just now: the last one is the most valuable."""

    def touch(self, entries: Sequence[int]) -> None:
        """These were used while they were held or parked: the last one is the most valuable."""

    def remove(self, entries: Sequence[int]) -> None:
        """These are leased or gone. Entries that the policy does not hold are ignored."""

    def pop(self, count: int) -> list[int]:
        """At most ``count`` victims, the least valuable first; they are no longer held."""

    def put_back(self, entries: Sequence[int]) -> None:
        """Victims of ``pop`` that were not evicted: they are the next victims again, in this order."""

    def park(self, entry: int) -> None:
        """A victim of ``pop`` has children. Do not offer it again before ``unpark`` or ``touch``."""

    def unpark(self, entry: int) -> None:
        """The last child of ``entry`` is gone; ignored unless it is parked."""


#: Victims that are queued at a time, at least.
_REFILL = 256

PolicyFactory = Callable[[], EvictionPolicy]


class LeastRecentlyUsed:
    """Evicts what was used longest ago.

    A dict keeps the order, because whole batches go in and out of it at the speed of C. Taking its first item again and
    again would walk over the places of deleted ones, so victims come from a queue that is refilled with many at a time;
    a stamp per batch tells whether a queued object was used since.

    A parked object was older than everything that was held at that moment, so it goes back to the cold end: the order
    stays exact without searching. Each use of an object parks it at most once, hence amortised O(1).
    """

    def __init__(self) -> None:
        self._stamp_of: dict[int, int] = {}
        self._stamp = 0
        self._coldest: deque[tuple[int, int]] = deque()
        self._parked: set[int] = set()

    def add(self, entries: Sequence[int]) -> None:
        self._stamp += 1
        self._stamp_of.update(dict.fromkeys(entries, self._stamp))

    def touch(self, entries: Sequence[int]) -> None:
        self.remove(entries)
        self.add(entries)

    def remove(self, entries: Sequence[int]) -> None:
        forget = self._stamp_of.pop
        for entry in entries:
            forget(entry, None)
        if self._parked:
            self._parked.difference_update(entries)

    def pop(self, count: int) -> list[int]:
        stamp_of, coldest = self._stamp_of, self._coldest
        victims: list[int] = []
        while len(victims) < count and stamp_of:
            if not coldest:
                coldest.extend(islice(stamp_of.items(), _REFILL + len(stamp_of) // 64))
            entry, stamp = coldest.popleft()
            if stamp_of.get(entry) == stamp:
                del stamp_of[entry]
                victims.append(entry)
        return victims

    def put_back(self, entries: Sequence[int]) -> None:
        self._stamp += 1
        self._stamp_of.update(dict.fromkeys(entries, self._stamp))
        self._coldest.extendleft((entry, self._stamp) for entry in reversed(entries))

    def park(self, entry: int) -> None:
        self._parked.add(entry)

    def unpark(self, entry: int) -> None:
        if entry in self._parked:
            self._parked.discard(entry)
            self.put_back((entry,))
