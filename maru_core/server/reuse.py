"""An order of eviction that learns: what is likely to be used again soon stays, even if it was used longer ago.

Objects of one request share their fate: a conversation goes on, and then all of them are used, or it does not. So what
is learned is learned of *stretches*: the objects that a request found, and those that it added. A stretch is of a kind
(found or added, how many turns the conversation has, how long its last pause was, how long it is), and
:mod:`maru_core.server.hazard` tells how soon stretches of a kind are used again. Objects lie in buckets by kind and
time of use; the bucket that is worth least is evicted first, and in it whole conversations one after the other.

Stretches are remembered by the key of their last object for some time after the objects are gone, or the policy could
only learn from what it kept.
"""

from __future__ import annotations

import heapq
import math
from array import array
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from itertools import compress, groupby
from time import monotonic
from typing import Final

from maru_core.contracts import NewPolicy
from maru_core.protocol.messages import NO_ENTRY
from maru_core.server.guard import Guard
from maru_core.server.hazard import STARTS, Kind

#: Stretches that are remembered: at least, and per object that is held.
_LEAST_STRETCHES: Final = 16384
_STRETCHES_PER_OBJECT: Final = 1 / 16
#: Requests between their lookup and their first store, or between parts, that are remembered.
_MAX_WALKS: Final = 4096
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
_SCALE: Final = 1e12
#: Victims between two orders of the buckets, at least.
_LEAST_RANKED: Final = 16
#: Entries that a bucket may hold in vain before it is cleaned.
_MAX_STALE: Final = 64

_FOUND, _SHARED, _ADDED, _UNKNOWN = 1, 2, 0, 3


class _Bucket:
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


class _Stretch:
    """What is remembered of one stretch: when it was used, and in what kind of request."""

    __slots__ = ("gap", "kind", "length", "time", "turn", "whole")

    def __init__(self, kind: Kind, time: float, turn: int, gap: float, length: int, whole: bool) -> None:
        self.kind = kind
        self.time = time
        self.turn = turn
        self.gap = gap
        self.length = length
        #: Whether it is more than the first object of a chain, which anybody may share.
        self.whole = whole


class _Walk:
    """A request between its parts: how far it came, how far it asked, and how far it went over known ground."""

    __slots__ = ("asked", "depth", "gap", "kind", "known", "turn")

    def __init__(self, depth: int, asked: int, known: int, turn: int, gap: float, kind: Kind | None) -> None:
        self.depth = depth
        self.asked = asked
        self.known = known
        self.turn = turn
        self.gap = gap
        self.kind = kind


class _Places:
    """In which bucket each object of a pool is, by its entry less ``base``.

    ``bucket`` has the bucket's number times two, plus one for a parked object; 0 for one that is not held. ``kind`` has
    for what is written or read now the number of the kind that it is of when that ends; 0 when that is not known.
    """

    __slots__ = ("base", "bucket", "buckets", "clock", "guard", "held", "kind", "last", "policies")

    def __init__(self, base: int, count: int, clock: Callable[[], float], trusting: bool) -> None:
        self.base = base
        self.bucket = array("Q", bytes(8 * count))
        self.kind = array("H", bytes(2 * count))
        #: Buckets with objects that are held or parked, by number; the highest number so far.
        self.buckets: dict[int, _Bucket] = {}
        self.last = 0
        self.clock = clock
        self.guard = Guard(count, trusting)
        #: Objects that are held or parked, in all namespaces; policies that there were.
        self.held = self.policies = 0


def _neighbours(objects: Sequence[int]) -> slice | None:
    """The slice that names ``objects``, which differ, in any order; ``None`` when there is none."""
    low = min(objects)
    return slice(low, low + len(objects)) if max(objects) - low == len(objects) - 1 else None


def reuse_policy(base: int, count: int, clock: Callable[[], float] = monotonic, trusting: bool = False) -> NewPolicy:
    """Policies of one pool that evict what is worth least by what was seen of its kind; see the module.

    ``trusting``: also where least recently used would serve more, for comparison.
    """
    places = _Places(base, count, clock, trusting)
    return lambda: ReusePolicy(places)


class ReusePolicy:
    """See :func:`reuse_policy`."""

    def __init__(self, places: _Places) -> None:
        self._places = places
        self._clock = places.clock
        self._number = places.policies
        places.policies += 1
        #: Objects that are held or parked.
        self._held = 0
        self._kinds: dict[tuple[int, ...], Kind] = {}
        #: The same by number; there are about a thousand at most.
        self._numbered: list[Kind] = [Kind(None, 0.0)]
        self._open: dict[Kind, _Bucket] = {}
        self._buckets: dict[_Bucket, None] = {}
        self._returned = self._new_bucket(Kind(None, 0.0), 0.0)
        self._stretches: OrderedDict[bytes, _Stretch] = OrderedDict()
        self._walks: OrderedDict[bytes, _Walk] = OrderedDict()
        self._ranking: list[tuple[int, float, int, _Bucket]] = []
        self._serial = 0
        #: Victims of the last call of ``pop``, for ``park``.
        self._popped: dict[int, _Bucket] = {}
        self._until_ranking = 0
        self._ranked_until = -math.inf
        self._ranked_learned = False
        #: Seconds of use that share a bucket now.
        self._span = _BUCKET
        #: Buckets at which there are too many for that.
        self._limit = _MANY_BUCKETS

    # -- what requests do ----------------------------------------------------------------------------------------------

    def looked_up(self, keys: Sequence[bytes], found: int, entries: Sequence[int], after: bytes | None = None) -> None:
        if not keys:
            return
        now = self._clock()
        stretches = self._stretches
        walk = self._walks.pop(after, None) if after is not None else None
        depth = walk.depth if walk is not None else 0
        turn, gap = (walk.turn, walk.gap) if walk is not None else (1, -1.0)
        goes_on = turn > 1
        known = 0
        for at in list(compress(range(len(keys)), map(stretches.__contains__, keys))):
            stretch = stretches.pop(keys[at])
            stretch.kind.end(stretch.time, now, stretch.length, True)
            known = at + 1
            if stretch.whole:
                goes_on, turn, gap = True, stretch.turn + 1, now - stretch.time
            elif walk is None:
                goes_on, turn, gap = False, 1, -1.0
        known = max(known, found)
        self._places.guard.looked_up(self._number, keys, entries, found, known, after)
        kind = None
        if known:
            kind = self._kind(_FOUND if goes_on else _SHARED, turn, gap, depth + len(keys), now)
            self._remember(keys[known - 1], _Stretch(kind, now, turn, gap, known, depth + known > 1), now)
            self._note(entries, kind)
        reached = _Walk(depth + found, depth + len(keys), depth + known, turn, gap, kind)
        self._walk(keys[found - 1] if found else keys[0], reached)

    def worth_of(self, keys: Sequence[bytes], parent: bytes | None) -> int | None:
        if not self._places.guard.learned:
            return None
        walk = self._walk_at(keys, parent)
        if walk is not None and walk.kind is not None and walk.depth < walk.known:
            return int(walk.kind.worth[0] * _SCALE)
        return int(self._added(walk, len(keys), self._clock()).worth[0] * _SCALE)

    def stored(self, keys: Sequence[bytes], entries: Sequence[int], parent: bytes | None) -> None:
        if not keys:
            return
        now = self._clock()
        walk = self._walk_at(keys, parent)
        asked = max(0, walk.asked - walk.depth) if walk is not None else 0
        self._places.guard.stored(self._number, keys, entries, asked, parent)
        old = min(len(keys), max(0, walk.known - walk.depth)) if walk is not None and walk.kind is not None else 0
        if old:
            assert walk is not None
            assert walk.kind is not None
            self._note(entries[:old], walk.kind)
        kind = self._added(walk, len(keys), now)
        depth = (walk.depth if walk is not None else 0) + len(keys)
        turn, gap = (walk.turn, walk.gap) if walk is not None else (1, -1.0)
        if old < len(keys):
            self._note(entries[old:] if old else entries, kind)
            self._remember(keys[-1], _Stretch(kind, now, turn, gap, len(keys) - old, depth > 1), now)
        if walk is not None:
            self._walks.pop(parent if parent is not None and parent in self._walks else keys[0], None)
        known, asked, read = (walk.known, walk.asked, walk.kind) if walk is not None else (0, 0, None)
        self._walk(keys[-1], _Walk(depth, asked, known, turn, gap, read))

    def _note(self, entries: Sequence[int], kind: Kind) -> None:
        """``entries``, some of which may be NO_ENTRY, are of ``kind`` as soon as they may be evicted."""
        if not entries:
            return
        column, number, base = self._places.kind, kind.number, self._places.base
        low, high = min(entries), max(entries)
        if high - low == len(entries) - 1 and high != NO_ENTRY:
            # Neighbours, in any order.
            column[low - base : high + 1 - base] = array("H", [number]) * len(entries)
            return
        for entry in entries:
            if entry != NO_ENTRY:
                column[entry - base] = number

    def _walk_at(self, keys: Sequence[bytes], parent: bytes | None) -> _Walk | None:
        walk = self._walks.get(parent) if parent is not None else None
        return walk if walk is not None else self._walks.get(keys[0])

    def _walk(self, key: bytes, walk: _Walk) -> None:
        self._walks[key] = walk
        self._walks.move_to_end(key)
        if len(self._walks) > _MAX_WALKS:
            self._walks.popitem(last=False)

    def _added(self, walk: _Walk | None, count: int, now: float) -> Kind:
        if walk is None:
            return self._kind(_ADDED, 1, -1.0, count, now)
        return self._kind(_ADDED, walk.turn, walk.gap, walk.depth + count, now)

    def _remember(self, key: bytes, stretch: _Stretch, now: float) -> None:
        stretches = self._stretches
        old = stretches.pop(key, None)
        if old is not None:
            old.kind.end(old.time, now, old.length, True)
        stretches[key] = stretch
        stretch.kind.begin(now, stretch.length)
        if len(stretches) > _LEAST_STRETCHES + self._held * _STRETCHES_PER_OBJECT:
            _, old = stretches.popitem(last=False)
            old.kind.end(old.time, now, old.length, False)

    def _kind(self, what: int, turn: int, gap: float, length: int, now: float) -> Kind:
        turns = 0 if turn <= 1 else 1 if turn == 2 else 2 if turn <= 4 else 3
        pause = 0 if gap < 0 else 1 + min(6, int(gap / 8).bit_length())
        path = (what, turns, pause, min(6, (length // 8).bit_length()))
        kind = self._kinds.get(path)
        if kind is None:
            for count in range(1, len(path) + 1):
                narrower = self._kinds.get(path[:count])
                if narrower is None:
                    narrower = self._kinds[path[:count]] = Kind(kind, now, len(self._numbered))
                    self._numbered.append(narrower)
                kind = narrower
            assert kind is not None
        return kind

    # -- what may be evicted -------------------------------------------------------------------------------------------

    def add(self, entries: Sequence[int]) -> None:
        now = self._clock()
        places = self._places
        column, kinds = places.bucket, places.kind
        objects = self._objects(entries)
        if not objects:
            return
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
            kind = self._numbered[number] if number else self._kind(_UNKNOWN, 1, -1.0, 1, now)
            bucket = self._bucket_at(kind, now)
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
        self._held += len(entries)
        places.held += len(entries)

    def touch(self, entries: Sequence[int]) -> None:
        places = self._places
        for at in self._objects(entries):
            code = places.bucket[at]
            if code:
                places.kind[at] = places.buckets[code >> 1].kind.number
        self.remove(entries)
        self.add(entries)

    def remove(self, entries: Sequence[int]) -> None:
        objects = self._objects(entries)
        if objects:
            self._remove(objects, _neighbours(objects))

    def pop(self, count: int, before: int | None = None) -> list[int]:
        victims: list[int] = []
        count = min(count, max(1, self._places.guard.slack))
        self._popped = {}
        if before is None or before > 0:
            self._take(self._returned, count, victims)
        if len(victims) < count and self._held:
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
        base = self._places.base
        if base:
            victims = [at + base for at in victims]
        self._places.guard.evicted(victims)
        return victims

    def put_back(self, entries: Sequence[int]) -> None:
        returned, places = self._returned, self._places
        places.guard.kept(entries)
        for entry in reversed(entries):
            at = entry - places.base
            places.bucket[at] = 2 * returned.number
            returned.first.append(at)
        returned.alive += len(entries)
        self._held += len(entries)
        self._places.held += len(entries)

    def park(self, entry: int) -> None:
        self._places.guard.kept((entry,))
        at = entry - self._places.base
        bucket = self._popped.get(at, self._returned)
        self._places.buckets[bucket.number] = bucket
        self._places.bucket[at] = 2 * bucket.number + 1
        bucket.parked += 1
        self._held += 1
        self._places.held += 1

    def unpark(self, entry: int) -> None:
        places = self._places
        at = entry - places.base
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
        if self._returned.alive:
            return 0
        best = self._best() if self._held else None
        return None if best is None else best[0]

    def _best(self) -> tuple[int, float, int, _Bucket] | None:
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

    def _take(self, bucket: _Bucket, count: int, victims: list[int]) -> None:
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
        self._held -= len(victims) - before
        self._places.held -= len(victims) - before
        if not bucket.alive:
            self._empty(bucket)

    def _objects(self, entries: Sequence[int]) -> Sequence[int]:
        base = self._places.base
        return [entry - base for entry in entries] if base else entries

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
            self._held -= count
            places.held -= count
            bucket = places.buckets[code >> 1]
            if code & 1:
                bucket.parked -= count
            else:
                bucket.alive -= count
            if not bucket.alive:
                self._empty(bucket)
            elif len(bucket.items) + len(bucket.first) - bucket.head > 2 * bucket.alive + _MAX_STALE:
                self._clean(bucket)

    def _empty(self, bucket: _Bucket) -> None:
        bucket.items, bucket.head, bucket.first = array("I"), 0, []
        if not bucket.parked and bucket is not self._returned and self._open.get(bucket.kind) is not bucket:
            self._places.buckets.pop(bucket.number, None)

    def _clean(self, bucket: _Bucket) -> None:
        """Forget the objects that ``bucket`` names in vain."""
        column, code = self._places.bucket, 2 * bucket.number
        first = dict.fromkeys([at for at in bucket.first if column[at] == code])
        items = dict.fromkeys(bucket.items[bucket.head :])
        kept = [at for at in items if column[at] == code and at not in first]
        bucket.items, bucket.head, bucket.first = array("I", kept), 0, list(first)

    def _new_bucket(self, kind: Kind, now: float) -> _Bucket:
        places = self._places
        places.last += 1
        bucket = places.buckets[places.last] = _Bucket(places.last, kind, now)
        return bucket

    def _bucket_at(self, kind: Kind, now: float) -> _Bucket:
        bucket = self._open.get(kind)
        if bucket is None or now - bucket.time > self._span:
            if bucket is not None and not bucket.alive and not bucket.parked:
                self._places.buckets.pop(bucket.number, None)
            bucket = self._open[kind] = self._new_bucket(kind, now)
        self._list(bucket, now)
        return bucket

    def _list(self, bucket: _Bucket, now: float) -> None:
        """See to it that victims are looked for in ``bucket``."""
        if bucket.listed or bucket is self._returned:
            return
        if len(self._buckets) >= self._limit:
            self._thin_out(now)
        bucket.listed = True
        self._buckets[bucket] = None
        self._serial += 1
        heapq.heappush(self._ranking, (self._value(bucket, now), bucket.time, self._serial, bucket))

    def _thin_out(self, now: float) -> None:
        """Forget empty buckets, and make fewer from now on if that does not help."""
        self._rank(now)
        if len(self._buckets) > _MANY_BUCKETS:
            self._span *= 2

    def _value(self, bucket: _Bucket, now: float) -> int:
        if not self._places.guard.learned:
            # Least recently used, and the same at any time, so that namespaces can be compared.
            return int(bucket.time * 1000)
        return int(bucket.kind.worth[bisect_right(STARTS, now - bucket.time)] * _SCALE)

    def _rank(self, now: float) -> None:
        """Order the buckets by what their objects are worth now."""
        kept: list[_Bucket] = []
        for bucket in self._buckets:
            if bucket.alive:
                kept.append(bucket)
            else:
                bucket.listed = False
        stale = [kind for kind in dict.fromkeys(bucket.kind for bucket in kept) if kind.is_stale(now)]
        for kind in sorted(stale, key=Kind.made)[:_MAX_REFRESHED]:
            kind.refresh(now)
        self._buckets = dict.fromkeys(kept)
        learned = self._places.guard.learned
        if learned:
            self._ranking = [
                (int(bucket.kind.worth[bisect_right(STARTS, now - bucket.time)] * _SCALE), bucket.time, at, bucket)
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
