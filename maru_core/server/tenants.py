"""The eviction policies of one pool, one per namespace, and which of them gives the next victim."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush, heapreplace

from maru_core.contracts import EvictionPolicy, NewPolicy

#: Decisions between two times that all policies are looked at, at least.
_LEAST_DECISIONS = 64


class Tenants:
    """Policies by the number of their namespace.

    With a single namespace there is nothing to choose. With several, a heap has for each of them a value that its next
    victim is worth at least. It is corrected when it comes to the top, so a decision costs O(log namespaces) at most.
    """

    def __init__(self, new_policy: NewPolicy) -> None:
        self._new_policy = new_policy
        self._policies: dict[int, EvictionPolicy] = {}
        self._several = False
        #: Decisions until all policies are looked at.
        self._until_listed = 0
        self._heap: list[tuple[int, int]] = []
        #: The value of each namespace that counts; others that the heap has of it are outdated.
        self._listed: dict[int, int] = {}

    def add(self, namespace: int, entries: Sequence[int]) -> None:
        """:meth:`EvictionPolicy.add` for objects of one namespace."""
        self._policy(namespace).add(entries)
        if self._several and namespace not in self._listed:
            self._list(namespace)

    def move_in(self, namespace: int, entries: Sequence[int]) -> None:
        """The same for what comes from another pool."""
        self._policy(namespace).moved_in(entries)
        self.add(namespace, entries)

    def touch(self, namespace: int, entries: Sequence[int]) -> None:
        """:meth:`EvictionPolicy.touch` likewise."""
        self._policy(namespace).touch(entries)
        if self._several and namespace not in self._listed:
            self._list(namespace)

    def remove(self, namespace: int, entries: Sequence[int]) -> None:
        """:meth:`EvictionPolicy.remove` likewise."""
        if entries:
            self._policy(namespace).remove(entries)

    def unpark(self, namespace: int, entry: int) -> None:
        """:meth:`EvictionPolicy.unpark` likewise."""
        self._policy(namespace).unpark(entry)
        if self._several:
            self._list(namespace)

    def park(self, namespace: int, entry: int) -> None:
        """:meth:`EvictionPolicy.park` likewise."""
        self._policies[namespace].park(entry)

    def put_back(self, namespace: int, entries: Sequence[int]) -> None:
        """:meth:`EvictionPolicy.put_back` likewise."""
        if entries:
            self._policies[namespace].put_back(entries)
            if self._several:
                self._list(namespace)

    def pop_of(self, namespace: int, count: int) -> list[int]:
        """At most ``count`` victims of this namespace."""
        policy = self._policies.get(namespace)
        return policy.pop(count) if policy is not None else []

    def pop(self, count: int, price: int | None = None) -> tuple[int, list[int]]:
        """A namespace and its victims, which are worth less than those of all others: at most ``count``.

        ``price``: none that is worth as much.

        No victims: there are none at all.
        """
        if not self._several:
            for namespace, policy in self._policies.items():
                return namespace, policy.pop(count, price)
            return 0, []
        self._until_listed -= 1
        if self._until_listed <= 0:
            self._list_all()
        heap, listed, policies = self._heap, self._listed, self._policies
        while heap:
            value, namespace = heap[0]
            if listed.get(namespace) != value:
                heappop(heap)
                continue
            actual = policies[namespace].coldest()
            if actual is None:
                heappop(heap)
                del listed[namespace]
            elif actual != value:
                listed[namespace] = actual
                heapreplace(heap, (actual, namespace))
            else:
                bound = min((item[0] for item in heap[1:3]), default=None)
                # Outdated values may be as low, yet there is a victim here.
                before = price if bound is None else max(bound, value + 1)
                if price is not None and before is not None:
                    before = min(before, price)
                return namespace, policies[namespace].pop(count, before)
        return 0, []

    def looked_up(
        self, namespace: int, keys: Sequence[bytes], found: int, entries: Sequence[int], after: bytes | None
    ) -> None:
        """:meth:`EvictionPolicy.looked_up` likewise."""
        self._policy(namespace).looked_up(keys, found, entries, after)

    def worth_of(self, namespace: int, keys: Sequence[bytes], parent: bytes | None) -> int | None:
        """:meth:`EvictionPolicy.worth_of` likewise."""
        return self._policy(namespace).worth_of(keys, parent)

    def stored(self, namespace: int, keys: Sequence[bytes], entries: Sequence[int], parent: bytes | None) -> None:
        """:meth:`EvictionPolicy.stored` likewise."""
        self._policy(namespace).stored(keys, entries, parent)

    def forget(self, namespace: int) -> None:
        """The namespace is gone, and with it its policy."""
        self._policies.pop(namespace, None)
        self._listed.pop(namespace, None)
        self._several = len(self._policies) > 1
        if len(self._heap) > 2 * len(self._policies) + _LEAST_DECISIONS:
            self._list_all()

    def _policy(self, namespace: int) -> EvictionPolicy:
        policy = self._policies.get(namespace)
        if policy is None:
            policy = self._policies[namespace] = self._new_policy()
            self._until_listed = max(self._until_listed, len(self._policies))
            if len(self._policies) == 2:
                # The heap was not kept up for a single one.
                self._several = True
                self._list_all()
        return policy

    def _list_all(self) -> None:
        """Look at every policy: with time some things become worth less, and nobody says so."""
        self._heap.clear()
        self._listed.clear()
        for number in self._policies:
            self._list(number)
        self._until_listed = max(_LEAST_DECISIONS, len(self._policies))

    def _list(self, namespace: int) -> None:
        """See to it that the heap has no higher value of this namespace than is true."""
        value = self._policies[namespace].coldest()
        if value is not None and value < self._listed.get(namespace, value + 1):
            self._listed[namespace] = value
            heappush(self._heap, (value, namespace))
