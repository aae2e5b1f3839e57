"""Which granules of one pool are free: best fit over runs of granules, with coalescing.

Free runs carry boundary tags (their length, at their first and last granule) and are kept in buckets by length. There
are at most about ``sqrt(2 * count)`` distinct lengths, so the sorted list of lengths stays short for any pool.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterable


class Allocator:
    """Free runs of granules ``0 .. count-1``. Not thread-safe; knows nothing of objects."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.free = 0
        #: Length of a free run at its first and last granule; 0 at every other granule.
        self._tag = array("I", bytes(4 * (count + 2)))
        self._buckets: dict[int, dict[int, None]] = {}
        self._lengths: list[int] = []
        if count:
            self._insert(0, count)
            self.free = count

    @classmethod
    def of_runs(cls, count: int, runs: Iterable[tuple[int, int]]) -> Allocator:
        """Only these runs ``(start, length)`` are free; they must not overlap."""
        allocator = cls(0)
        allocator.count = count
        allocator._tag = array("I", bytes(4 * (count + 2)))
        for start, length in runs:
            allocator.give(start, length)
        return allocator

    def take(self, pages: int, count: int, least: int = 1) -> list[tuple[int, int]]:
        """Take ``count`` neighbouring pieces of ``pages`` granules each, or as many as there are.

        Returns ``(start, pieces)`` per contiguous run, in the order of allocation; fewer pieces than ``count`` in all
        when no free run holds all others or at least ``least`` of them.
        """
        runs = []
        lengths = self._lengths
        while count:
            at = bisect_left(lengths, pages * count)
            if at < len(lengths):
                length, pieces = lengths[at], count
            elif lengths and lengths[-1] >= pages * least:
                length = lengths[-1]
                pieces = length // pages
            else:
                break
            bucket = self._buckets[length]
            start, _ = bucket.popitem()
            if not bucket:
                self._drop_bucket(length)
            self._clear_tags(start, length)
            used = pieces * pages
            if used < length:
                self._insert(start + used, length - used)
            self.free -= used
            runs.append((start, pieces))
            count -= pieces
        return runs

    def give(self, start: int, pages: int) -> tuple[int, int]:
        """Give granules back; returns the free run ``(start, length)`` that they are now part of.

        The granules must be taken and inside the pool: the directory answers for that.
        """
        tag = self._tag
        self.free += pages
        before = tag[start - 1] if start else 0
        if before:
            self._remove(start - before, before)
            start -= before
            pages += before
        after = tag[start + pages]
        if after:
            self._remove(start + pages, after)
            pages += after
        self._insert(start, pages)
        return start, pages

    def run_at(self, granule: int) -> int:
        """Length of the free run whose first or last granule this is, else 0."""
        return self._tag[granule] if 0 <= granule < self.count else 0

    def runs(self) -> list[tuple[int, int]]:
        """All free runs as ``(start, length)``, by address."""
        return sorted((start, length) for length, bucket in self._buckets.items() for start in bucket)

    def _insert(self, start: int, length: int) -> None:
        bucket = self._buckets.get(length)
        if bucket is None:
            self._buckets[length] = {start: None}
            insort(self._lengths, length)
        else:
            bucket[start] = None
        self._tag[start] = self._tag[start + length - 1] = length

    def _remove(self, start: int, length: int) -> None:
        bucket = self._buckets[length]
        del bucket[start]
        if not bucket:
            self._drop_bucket(length)
        self._clear_tags(start, length)

    def _clear_tags(self, start: int, length: int) -> None:
        self._tag[start] = self._tag[start + length - 1] = 0

    def _drop_bucket(self, length: int) -> None:
        del self._buckets[length]
        del self._lengths[bisect_left(self._lengths, length)]
