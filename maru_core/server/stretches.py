"""Stretches of requests: what was found or added together, of which kind it is, and when it is used again.

A request comes in parts, and what is known of it in between is a *walk*: how far it came, and over what ground. A
stretch is remembered by the key of its last object for some time after the objects are gone.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Final

from maru_core.protocol.messages import NO_ENTRY
from maru_core.server.buckets import SCALE, Places
from maru_core.server.hazard import Kind

#: Stretches that are remembered: at least, and per object that is held.
_LEAST_STRETCHES: Final = 16384
_STRETCHES_PER_OBJECT: Final = 1 / 16
#: Requests between their lookup and their first store, or between parts, that are remembered.
_MAX_WALKS: Final = 4096

_FOUND, _SHARED, _ADDED, _UNKNOWN = 1, 2, 0, 3


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


class Stretches:
    """Those of one namespace in one pool. ``held`` tells how many objects of it are held."""

    def __init__(self, places: Places, held: Callable[[], int]) -> None:
        self._places = places
        self._clock = places.clock
        self._held = held
        self._number = places.policies
        places.policies += 1
        self._kinds: dict[tuple[int, ...], Kind] = {}
        #: The same by number; there are about a thousand at most.
        self._numbered: list[Kind] = [Kind(None, 0.0)]
        self._stretches: OrderedDict[bytes, _Stretch] = OrderedDict()
        self._walks: OrderedDict[bytes, _Walk] = OrderedDict()

    def looked_up(self, keys: Sequence[bytes], found: int, entries: Sequence[int], after: bytes | None = None) -> None:
        """See :meth:`.EvictionPolicy.looked_up`, also for the other two."""
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
        """What the best known kind of these is worth at its youngest."""
        if not self._places.guard.learned:
            return None
        walk = self._walk_at(keys, parent)
        if walk is not None and walk.kind is not None and walk.depth < walk.known:
            return int(walk.kind.worth[0] * SCALE)
        return int(self._added(walk, len(keys), self._clock()).worth[0] * SCALE)

    def stored(self, keys: Sequence[bytes], entries: Sequence[int], parent: bytes | None) -> None:
        """What is known ground of a walk is of the kind that was read; the rest is a stretch that was added."""
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

    def kind_of(self, number: int, now: float) -> Kind:
        """The kind that :class:`Places` has a number of; 0 is an unknown one."""
        return self._numbered[number] if number else self._kind(_UNKNOWN, 1, -1.0, 1, now)

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
        if len(stretches) > _LEAST_STRETCHES + self._held() * _STRETCHES_PER_OBJECT:
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
