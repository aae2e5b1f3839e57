"""Objects by kind and time of use, and which of them are worth least now.

A bucket has the objects of one kind that were used at about one time, and they are worth the same. So only buckets are
put in order, and as their worth changes with their age, anew from time to time.
"""

from __future__ import annotations

import heapq
import math
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Final

from maru_core.server.guard import Guard
from maru_core.server.hazard import STARTS, Kind

#: Seconds of use that share a bucket, at least; doubled while there are more buckets than the second figure, and halved
#: while there are less than half of them.
_BUCKET: Final = 0.125
_MANY_BUCKETS: Final = 512
#: Seconds after which the buckets are ordered again: at least, and per bucket.
_REORDERED: Final = 2.0
_REORDERED_PER_BUCKET: Final = 0.002
#: Tables that are made anew in one call.
_MAX_REFRESHED: Final = 4
#: What is worth one expected use per second.
SCALE: Final = 1e12
#: Victims between two orders of the buckets, at least.
_LEAST_RANKED: Final = 16
#: Entries that a bucket may hold in vain before it is cleaned.
_MAX_STALE: Final = 64


class Bucket:
    """Objects of one kind that were used at about one time, those to be evicted first at the head."""

    __slots__ = ("alive", "first", "head", "items", "kind", "listed", "number", "parked", "time")

    def __init__(self, number: int, kind: Kind, time: float) -> None:
        self.number = number
        self.kind = kind
        self.time = time
        self.items = array("I")
        self.head = 0
        #: Taken from its end, before ``items``.
        self.first: list[int] = []
        #: Objects of this bucket that are held, and that are parked; ``items`` may name others, too.
        self.alive = 0
        self.parked = 0
        self.listed = False


class Places:
    """In which bucket each object of a pool is, by its entry less ``base``.

    ``bucket`` has the bucket's number times two, plus one for a parked object; 0 for one that is not held. ``kind`` has
    for what is written or read now the number of the kind that it is of when that ends; 0 when that is not known.
    """

    __slots__ = ("base", "bucket", "buckets", "clock", "guard", "held", "kind", "last", "policies")

    def __init__(self, base: int, count: int, clock: Callable[[], float], trusting: bool) -> None:
        self.base = base
        self.bucket = array("Q", bytes(8 * count))
        self.kind = array("H", bytes(2 * count))
        #: Buckets with objects that are held or parked, by number, and no others: they would outlive their namespace.
        #: The highest number so far.
        self.buckets: dict[int, Bucket] = {}
        self.last = 0
        self.clock = clock
        self.guard = Guard(count, trusting)
        #: Objects that are held or parked, in all namespaces; policies that there were.
        self.held = self.policies = 0


def _neighbours(objects: Sequence[int]) -> slice | None:
    """The slice that names ``objects``, which differ, in any order; ``None`` when there is none."""
    low = min(objects)
    return slice(low, low + len(objects)) if max(objects) - low == len(objects) - 1 else None


class Buckets:
    """Those of one namespace in one pool."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._clock = places.clock
        #: Objects that are held or parked.
        self.held = 0
        #: The bucket of each kind that objects are added to, those in which victims are looked for, and that of victims
        #: that were none after all.
        self._open: dict[Kind, Bucket] = {}
        self._listed: dict[Bucket, None] = {}
        self._returned = self._new(Kind(None, 0.0), 0.0)
        self._ranking: list[tuple[int, float, int, Bucket]] = []
        self._serial = 0
        #: Victims of the last call of :meth:`pop`, for :meth:`park`.
        self._popped: dict[int, Bucket] = {}
        self._until_ranking = 0
        self._ranked_until = -math.inf
        self._ranked_learned = False
        #: Seconds of use that share a bucket now.
        self._span = _BUCKET
        #: Buckets at which there are too many for that.
        self._limit = _MANY_BUCKETS

    def add(self, objects: Sequence[int], kind_of: Callable[[int, float], Kind]) -> None:
        """These, which differ, may be evicted from now on. ``kind_of``: of the number in :class:`Places`, and now."""
        now = self._clock()
        column, kinds = self._places.bucket, self._places.kind
        place = _neighbours(objects)
        if any(column[place] if place is not None else [column[at] for at in objects]):
            self._remove(objects, place)
        numbers = kinds[place] if place is not None else [kinds[at] for at in objects]
        if numbers.count(numbers[0]) == len(numbers):
            groups = [(numbers[0], objects)]
        else:
            place = None
            pairs = groupby(objects, kinds.__getitem__)
            groups = [(number, list(part)) for number, part in pairs]
        for number, part in groups:
            bucket = self._bucket_at(kind_of(number, now), now)
            self._places.buckets[bucket.number] = bucket
            code = 2 * bucket.number
            if place is not None:
                column[place] = array("Q", [code]) * len(part)
                kinds[place] = array("H", bytes(2 * len(part)))
            else:
                for at in part:
                    column[at] = code
                    kinds[at] = 0
            bucket.items.extend(part)
            bucket.alive += len(part)
        self._count(len(objects))

    def remove(self, objects: Sequence[int]) -> None:
        """Those of ``objects``, which differ, that are held or parked are so no more."""
        self._remove(objects, _neighbours(objects))

    def keep_kinds(self, objects: Sequence[int]) -> None:
        """Those of ``objects`` that are held or parked are of the same kind when they are added again."""
        places = self._places
        for at in objects:
            code = places.bucket[at]
            if code:
                places.kind[at] = places.buckets[code >> 1].kind.number

    def forget_kinds(self, objects: Sequence[int]) -> None:
        """Of which kind these, which are neither held nor parked, will be is not known."""
        kinds = self._places.kind
        for at in objects:
            kinds[at] = 0

    def pop(self, count: int, before: int | None) -> list[int]:
        """At most ``count`` victims, the least valuable first, and none that is worth ``before`` or more."""
        victims: list[int] = []
        self._popped = {}
        if before is None or before > 0:
            self._take(self._returned, count, victims)
        if len(victims) < count and self.held:
            while len(victims) < count and (best := self._best()) is not None:
                if before is not None and best[0] >= before:
                    break
                bucket, before_it = best[3], len(victims)
                unparked = bool(bucket.first)
                self._take(bucket, count, victims)
                if unparked and len(victims) > before_it:
                    # What these continue is parked perhaps, and must come before what is worth more.
                    break
        self._until_ranking -= len(victims)
        return victims

    def put_back(self, objects: Sequence[int]) -> None:
        """Victims that are the next ones again, in this order."""
        if not objects:
            return
        returned, column = self._returned, self._places.bucket
        self._places.buckets[returned.number] = returned
        for at in reversed(objects):
            column[at] = 2 * returned.number
            returned.first.append(at)
        returned.alive += len(objects)
        self._count(len(objects))

    def park(self, at: int) -> None:
        """A victim of the last :meth:`pop` is not to be one before :meth:`unpark`."""
        bucket = self._popped.get(at, self._returned)
        self._places.buckets[bucket.number] = bucket
        self._places.bucket[at] = 2 * bucket.number + 1
        bucket.parked += 1
        self._count(1)

    def unpark(self, at: int) -> None:
        """It may be a victim again, the next one of its bucket; ignored unless it is parked."""
        places = self._places
        code = places.bucket[at]
        if not code & 1:
            return
        bucket = places.buckets[code >> 1]
        places.bucket[at] = code - 1
        bucket.parked -= 1
        bucket.first.append(at)
        bucket.alive += 1
        self._list(bucket, self._clock())

    def coldest(self) -> int | None:
        """What the next victim is worth; ``None`` without one."""
        if self._returned.alive:
            return 0
        best = self._best() if self.held else None
        return None if best is None else best[0]

    def _count(self, more: int) -> None:
        self.held += more
        self._places.held += more

    def _bucket_at(self, kind: Kind, now: float) -> Bucket:
        bucket = self._open.get(kind)
        if bucket is None or now - bucket.time > self._span:
            bucket = self._open[kind] = self._new(kind, now)
        self._list(bucket, now)
        return bucket

    def _best(self) -> tuple[int, float, int, Bucket] | None:
        """The first of the ranking that holds something."""
        now = self._clock()
        learned = self._places.guard.learned
        # Least recently used is the same order at any time.
        if learned != self._ranked_learned or now >= self._ranked_until or (learned and self._until_ranking <= 0):
            self._rank(now)
        ranking = self._ranking
        while ranking:
            if ranking[0][3].alive:
                return ranking[0]
            heapq.heappop(ranking)[3].listed = False
        return None

    def _take(self, bucket: Bucket, count: int, victims: list[int]) -> None:
        """Victims from ``bucket`` until there are ``count`` or it is empty."""
        column, popped = self._places.bucket, self._popped
        first, items, head = bucket.first, bucket.items, bucket.head
        code, before = 2 * bucket.number, len(victims)
        only_first = bool(first)
        while bucket.alive and len(victims) < count:
            if first:
                at = first.pop()
            elif only_first and len(victims) > before:
                break
            else:
                at = items[head]
                head += 1
            if column[at] == code:
                column[at] = 0
                popped[at] = bucket
                bucket.alive -= 1
                victims.append(at)
        bucket.head = head
        self._count(before - len(victims))
        if not bucket.alive:
            self._empty(bucket)

    def _remove(self, objects: Sequence[int], place: slice | None) -> None:
        """Those of ``objects``, which differ, that are held or parked are so no more; ``place``: where all are."""
        places = self._places
        column = places.bucket
        if place is not None:
            codes: Sequence[int] = column[place]
            column[place] = array("Q", bytes(8 * len(codes)))
        else:
            codes = [column[at] for at in objects]
            for at in objects:
                column[at] = 0
        alike = codes.count(codes[0]) == len(codes)
        for code, count in ((codes[0], len(codes)),) if alike else Counter(codes).items():
            if not code:
                continue
            self._count(-count)
            bucket = places.buckets[code >> 1]
            if code & 1:
                bucket.parked -= count
            else:
                bucket.alive -= count
            if not bucket.alive:
                self._empty(bucket)
            elif len(bucket.items) + len(bucket.first) - bucket.head > 2 * bucket.alive + _MAX_STALE:
                self._clean(bucket)

    def _empty(self, bucket: Bucket) -> None:
        bucket.items, bucket.head, bucket.first = array("I"), 0, []
        if not bucket.parked:
            self._places.buckets.pop(bucket.number, None)

    def _clean(self, bucket: Bucket) -> None:
        """Forget the objects that ``bucket`` names in vain."""
        column, code = self._places.bucket, 2 * bucket.number
        first = dict.fromkeys([at for at in bucket.first if column[at] == code])
        items = dict.fromkeys(bucket.items[bucket.head :])
        kept = [at for at in items if column[at] == code and at not in first]
        bucket.items, bucket.head, bucket.first = array("I", kept), 0, list(first)

    def _new(self, kind: Kind, now: float) -> Bucket:
        places = self._places
        places.last += 1
        return Bucket(places.last, kind, now)

    def _list(self, bucket: Bucket, now: float) -> None:
        """See to it that victims are looked for in ``bucket``."""
        if bucket.listed or bucket is self._returned:
            return
        if len(self._listed) >= self._limit:
            self._thin_out(now)
        bucket.listed = True
        self._listed[bucket] = None
        self._serial += 1
        heapq.heappush(self._ranking, (self._value(bucket, now), bucket.time, self._serial, bucket))

    def _thin_out(self, now: float) -> None:
        """Forget empty buckets, and make fewer from now on if that does not help."""
        self._rank(now)
        if len(self._listed) > _MANY_BUCKETS:
            self._span *= 2

    def _value(self, bucket: Bucket, now: float) -> int:
        if not self._places.guard.learned:
            # Least recently used, and the same at any time, so that namespaces can be compared.
            return int(bucket.time * 1000)
        return int(bucket.kind.worth[bisect_right(STARTS, now - bucket.time)] * SCALE)

    def _rank(self, now: float) -> None:
        """Order the buckets by what their objects are worth now."""
        kept: list[Bucket] = []
        for bucket in self._listed:
            if bucket.alive:
                kept.append(bucket)
            else:
                bucket.listed = False
        stale = [kind for kind in dict.fromkeys(bucket.kind for bucket in kept) if kind.is_stale(now)]
        for kind in sorted(stale, key=Kind.made)[:_MAX_REFRESHED]:
            kind.refresh(now)
        self._listed = dict.fromkeys(kept)
        learned = self._places.guard.learned
        if learned:
            self._ranking = [
                (int(bucket.kind.worth[bisect_right(STARTS, now - bucket.time)] * SCALE), bucket.time, at, bucket)
                for at, bucket in enumerate(kept)
            ]
        else:
            self._ranking = [(int(bucket.time * 1000), bucket.time, at, bucket) for at, bucket in enumerate(kept)]
        heapq.heapify(self._ranking)
        self._serial = len(kept)
        self._until_ranking = max(_LEAST_RANKED, len(kept) // 2)
        self._ranked_until = now + max(_REORDERED, self._span, _REORDERED_PER_BUCKET * len(kept))
        self._ranked_learned = learned
        self._limit = max(_MANY_BUCKETS, len(kept) + _MANY_BUCKETS // 2)
        if len(kept) < _MANY_BUCKETS // 2:
            self._span = max(_BUCKET, self._span / 2)
