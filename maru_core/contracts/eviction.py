"""What an order of eviction must do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from attrs import frozen


class EvictionPolicy(Protocol):
    """Order of eviction of one namespace in one pool.

    Objects are named by their first entry. Every call is O(1) amortised per object and never works on all objects in
    one go: a pause is felt by every client.
    """

    def add(self, entries: Sequence[int]) -> None:
        """These became evictable just now: the last one is the most valuable."""

    def moved_in(self, entries: Sequence[int]) -> None:
        """Objects of another pool are here from now on, and :meth:`add` follows; :meth:`stored` was not called.

        What was said of these entries before is true of objects that are gone, perhaps of another namespace.
        """

    def touch(self, entries: Sequence[int]) -> None:
        """These were used while they were held or parked: the last one is the most valuable."""

    def remove(self, entries: Sequence[int]) -> None:
        """These are leased or gone. Entries that the policy does not hold are ignored."""

    def pop(self, count: int, before: int | None = None) -> list[int]:
        """At most ``count`` victims, the least valuable first; they are no longer held.

        ``before``: none that is worth as much as that, on the scale of :meth:`coldest`.
        """

    def put_back(self, entries: Sequence[int]) -> None:
        """Victims of ``pop`` that were not evicted: they are the next victims again, in this order."""

    def park(self, entry: int) -> None:
        """A victim of ``pop`` has children, or its place is too narrow for what is to be stored.

        Do not offer it again before ``unpark`` or ``touch``.
        """

    def unpark(self, entry: int) -> None:
        """That is over: ``entry`` may be offered again. Ignored unless it is parked."""

    def coldest(self) -> int | None:
        """What the next victim is worth, comparable among the policies of one pool; ``None`` without a victim."""

    def looked_up(self, keys: Sequence[bytes], found: int, entries: Sequence[int], after: bytes | None = None) -> None:
        """A request asked for ``keys``, a chain whose keys differ, and is about to read the first ``found`` of them.

        ``entries``: those of the ``found`` objects that are in this pool. ``after``: the key before them in the same
        request, when it comes in parts.
        """

    def worth_of(self, keys: Sequence[bytes], parent: bytes | None) -> int | None:
        """What new objects behind ``parent`` are worth, on the scale of :meth:`coldest`.

        They are not stored in place of what is worth more; ``None``: they are worth more than all there is.
        """

    def stored(self, keys: Sequence[bytes], entries: Sequence[int], parent: bytes | None) -> None:
        """``keys``, a chain behind ``parent``, are about to be written to ``entries``, or the first of them are.

        An entry that is in another pool is NO_ENTRY.
        """


#: Makes the policies of one pool, one call per namespace: they may share columns and a clock.
NewPolicy = Callable[[], EvictionPolicy]
#: What a pool is given: called with its first entry, its number of entries, and a clock of steady seconds.
PolicyFactory = Callable[[int, int, Callable[[], float]], NewPolicy]


@frozen
class PolicyProvision:
    """What the hook ``maru_eviction_policies`` returns for each order of eviction."""

    name: str
    factory: PolicyFactory
    summary: str = ""
