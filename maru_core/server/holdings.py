"""What one session holds, which may be a million entries, without ever rebuilding a large table in one go.

A set or dict that grows is rebuilt at once, and one of a million entries takes tens of milliseconds for it, in which
nobody is served. So a collection here begins another part when the last one is large. Nearly every session has one
part.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Generic, TypeVar

#: Entries of a part before the next one begins; it is rebuilt in half a millisecond.
_PART = 1 << 15


Part = TypeVar("Part", set[int], dict[int, int])


class _InParts(Collection[int], Generic[Part]):
    """Entries in parts, none of which is in two of them."""

    __slots__ = ("_parts",)

    def __init__(self, first: Part) -> None:
        self._parts: list[Part] = [first]

    def __contains__(self, entry: object) -> bool:
        return any(entry in part for part in self._parts)

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self._parts)

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __bool__(self) -> bool:
        return any(self._parts)


class EntrySet(_InParts[set[int]]):
    """A set of entries."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(set())

    def update(self, entries: Iterable[int]) -> None:
        """Add ``entries``, none of which is in here."""
        part = self._parts[-1]
        if len(part) >= _PART:
            part = set()
            self._parts.append(part)
        part.update(entries)

    def take_over(self, other: EntrySet) -> None:
        """Add all of ``other``, which may not be used any more; none of them is in here."""
        self._parts = [*other._parts, *self._parts] if self else other._parts

    def difference_update(self, entries: Collection[int]) -> None:
        """Take ``entries`` out; those that are not in here are ignored."""
        for part in self._parts:
            part.difference_update(entries)
        if len(self._parts) > 1:
            self._parts = [part for part in self._parts if part] or [set()]

    def issuperset(self, entries: Collection[int]) -> bool:
        """Whether all of ``entries`` are in here."""
        if len(self._parts) == 1:
            return self._parts[0].issuperset(entries)
        return len(self.intersection(entries)) == len(set(entries))

    def intersection(self, entries: Collection[int]) -> set[int]:
        """Those of ``entries`` that are in here."""
        if len(self._parts) == 1:
            return self._parts[0].intersection(entries)
        return set().union(*[part.intersection(entries) for part in self._parts])

    def first(self, limit: int) -> list[int]:
        """At most ``limit`` of them."""
        return list(islice(self, limit))


class EntryCounts(_InParts[dict[int, int]]):
    """How many times each entry is held; those that are held no more are forgotten."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__({})

    def hold(self, entries: Sequence[int]) -> Sequence[int]:
        """Hold each of ``entries`` once more, twice if it is there twice; returns those that were not held before."""
        parts = self._parts
        part = parts[-1]
        if len(part) >= _PART:
            part = {}
            parts.append(part)
        unique = dict.fromkeys(entries, 1)
        if len(unique) == len(entries) and all(each.keys().isdisjoint(unique) for each in parts):
            part.update(unique)
            return entries
        fresh = []
        for entry in entries:
            for each in parts:
                if entry in each:
                    each[entry] += 1
                    break
            else:
                part[entry] = 1
                fresh.append(entry)
        return fresh

    def let_go(self, entries: Sequence[int]) -> Sequence[int]:
        """Hold each of ``entries`` once less; returns those that are not held any more. All must be held."""
        parts = self._parts
        # What was held last is let go first.
        part = parts[-1]
        counts = list(map(part.get, entries))
        if counts.count(1) == len(entries):
            for entry in entries:
                del part[entry]
            ended = entries
        else:
            ended = [entry for entry in entries if self._let_go(entry)]
        if len(parts) > 1 and not part:
            parts.pop()
        return ended

    def pop(self, limit: int) -> list[int]:
        """Take at most ``limit`` entries out, however often they are held."""
        popped: list[int] = []
        while len(popped) < limit:
            part = self._parts[-1]
            if part:
                popped.append(part.popitem()[0])
            elif len(self._parts) > 1:
                self._parts.pop()
            else:
                break
        return popped

    def _let_go(self, entry: int) -> bool:
        part = next(part for part in reversed(self._parts) if entry in part)
        part[entry] -= 1
        if part[entry]:
            return False
        del part[entry]
        return True
