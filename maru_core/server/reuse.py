"""An order of eviction that learns: what is likely to be used again soon stays, even if it was used longer ago.

Objects of one request share their fate: a conversation goes on, and then all of them are used, or it does not. So what
is learned is learned of *stretches*: the objects that a request found, and those that it added. A stretch is of a kind
(found or added, how many turns the conversation has, how long its last pause was, how long it is), and
:mod:`maru_core.server.hazard` tells how soon stretches of a kind are used again. Objects lie in buckets by kind and
time of use; the bucket that is worth least is evicted first, and in it whole conversations one after the other.

Stretches are remembered by the key of their last object for some time after the objects are gone, or the policy could
only learn from what it kept.

:mod:`.stretches` learns, :mod:`.buckets` orders, and :mod:`.guard` says whether what was learned is to be followed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic

from maru_core.contracts import NewPolicy
from maru_core.server.buckets import Buckets, Places
from maru_core.server.stretches import Stretches


def reuse_policy(base: int, count: int, clock: Callable[[], float] = monotonic, trusting: bool = False) -> NewPolicy:
    """Policies of one pool that evict what is worth least by what was seen of its kind; see the module.

    ``trusting``: also where least recently used would serve more, for comparison.
    """
    places = Places(base, count, clock, trusting)
    return lambda: ReusePolicy(places)


class ReusePolicy:
    """See :func:`reuse_policy`."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._buckets = buckets = Buckets(places)
        self._stretches = Stretches(places, lambda: buckets.held)

    # -- what requests do ----------------------------------------------------------------------------------------------

    def looked_up(self, keys: Sequence[bytes], found: int, entries: Sequence[int], after: bytes | None = None) -> None:
        self._stretches.looked_up(keys, found, entries, after)

    def worth_of(self, keys: Sequence[bytes], parent: bytes | None) -> int | None:
        return self._stretches.worth_of(keys, parent)

    def stored(self, keys: Sequence[bytes], entries: Sequence[int], parent: bytes | None) -> None:
        self._stretches.stored(keys, entries, parent)

    def moved_in(self, entries: Sequence[int]) -> None:
        self._places.guard.moved_in()
        self._buckets.forget_kinds(self._objects(entries))

    # -- what may be evicted -------------------------------------------------------------------------------------------

    def add(self, entries: Sequence[int]) -> None:
        objects = self._objects(entries)
        if objects:
            self._buckets.add(objects, self._stretches.kind_of)

    def touch(self, entries: Sequence[int]) -> None:
        self._buckets.keep_kinds(self._objects(entries))
        self.remove(entries)
        self.add(entries)

    def remove(self, entries: Sequence[int]) -> None:
        objects = self._objects(entries)
        if objects:
            self._buckets.remove(objects)

    def pop(self, count: int, before: int | None = None) -> list[int]:
        guard, base = self._places.guard, self._places.base
        victims = self._buckets.pop(min(count, max(1, guard.slack)), before)
        if base:
            victims = [at + base for at in victims]
        guard.evicted(victims)
        return victims

    def put_back(self, entries: Sequence[int]) -> None:
        self._places.guard.kept(entries)
        self._buckets.put_back(self._objects(entries))

    def park(self, entry: int) -> None:
        self._places.guard.kept((entry,))
        self._buckets.park(entry - self._places.base)

    def unpark(self, entry: int) -> None:
        self._buckets.unpark(entry - self._places.base)

    def coldest(self) -> int | None:
        return self._buckets.coldest()

    def _objects(self, entries: Sequence[int]) -> Sequence[int]:
        """Places of ``entries`` in the pool."""
        base = self._places.base
        return [entry - base for entry in entries] if base else entries
