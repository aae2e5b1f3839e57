"""Which object goes first when a pool is full.

Each namespace has a policy of its own in each pool, so that tenants do not disturb each other's order, and a namespace
at its quota loses objects of its own. :mod:`maru_core.server.tenants` decides between namespaces.

The directory tells a policy (:class:`maru_core.contracts.EvictionPolicy`) about objects that may be evicted at all
(READY, not leased) and asks it for victims. It refuses a victim that still has children and *parks* it, so that a
prefix loses its tail before its head; the policy gets it back when the last child is gone.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from itertools import compress
from operator import eq
from time import monotonic

from maru_core.contracts import NewPolicy

#: Items per segment of a queue.
_SEGMENT = 1024
#: Stale items that a queue may have in any case.
_SLACK = 4 * _SEGMENT
#: Items that the hand looks at for each one that is appended.
_PACE = 4
_END = 1 << 64


class _Uses:
    """When each object of a pool was used last: a number that counts the batches of uses in all namespaces.

    ``last`` has it times two, plus one for a parked object; 0 for one that is not held. Here and in the queues an
    object is named by its entry less ``base``.
    """

    __slots__ = ("base", "last", "now")

    def __init__(self, base: int, count: int) -> None:
        self.base = base
        self.last = array("Q", bytes(8 * count))
        self.now = 0


class _Segment:
    """A part of a queue: objects and their times. The first ``head`` are taken already."""

    __slots__ = ("head", "objects", "times")

    def __init__(self) -> None:
        self.objects = array("I")
        self.times = array("Q")
        self.head = 0


def least_recently_used(base: int, count: int, clock: Callable[[], float] = monotonic) -> NewPolicy:
    """Policies of one pool that evict what was used longest ago in any namespace; ``clock`` is not looked at."""
    uses = _Uses(base, count)
    return lambda: LeastRecentlyUsed(uses)


class LeastRecentlyUsed:
    """See :func:`least_recently_used`.

    A queue in the order of use, in packed columns. A use appends to it; what the object left where it was before is
    recognised by its time and skipped. Stale items at the cold end are dropped as they come to be. When more than a
    third of the queue is stale, a hand goes from its cold end to its warm one and closes the gaps, a few items for each
    one that is appended. So there are never many to skip when a victim is looked for.

    A parked object was older than everything that was held at that moment, so it goes back to the cold end: the order
    stays exact without searching. Each use of an object parks it at most once, hence amortised O(1).
    """

    def __init__(self, uses: _Uses) -> None:
        self._uses = uses
        #: Objects that are held or parked, and items of the queue.
        self._held = self._length = 0
        #: What comes before the queue, as object and time; the next victim last.
        self._front: list[tuple[int, int]] = []
        #: The queue: what the hand has passed, and what it has not.
        self._passed: deque[_Segment] = deque()
        self._ahead: deque[_Segment] = deque()
        #: The victims of the last :meth:`pop` and their times.
        self._popped: dict[int, int] = {}

    def add(self, entries: Sequence[int]) -> None:
        count = len(entries)
        if not count:
            return
        uses = self._uses
        uses.now = now = uses.now + 2
        last = uses.last
        objects = self._objects(entries)
        for at in objects:
            last[at] = now
        self._held += count
        self._length += count
        ahead = self._ahead
        if not ahead or len(ahead[-1].objects) >= _SEGMENT:
            ahead.append(_Segment())
        segment = ahead[-1]
        segment.objects.extend(objects)
        segment.times.extend(array("Q", [now]) * count)
        if 2 * self._length > 3 * self._held + _SLACK:
            self._close_gaps(_PACE * count)
        self._skip(_PACE * count)

    def touch(self, entries: Sequence[int]) -> None:
        self.remove(entries)
        self.add(entries)

    def remove(self, entries: Sequence[int]) -> None:
        last = self._uses.last
        for at in self._objects(entries):
            last[at] = 0
        # Too many are subtracted when some were not held, and gaps are closed earlier: nothing else depends on it.
        self._held -= len(entries)
        self._skip(_PACE * len(entries))

    def pop(self, count: int, before: int | None = None) -> list[int]:
        last = self._uses.last
        limit = _END if before is None else before
        popped: dict[int, int] = {}
        while len(popped) < count:
            time = self.coldest()
            if time is None or time >= limit:
                break
            if self._front:
                at, _ = self._front.pop()
                last[at] = 0
                popped[at] = time
                continue
            segment = (self._passed or self._ahead)[0]
            head = segment.head
            part = slice(head, head + count - len(popped))
            for at, time in zip(segment.objects[part], segment.times[part], strict=True):
                if last[at] == time:
                    if time >= limit:
                        break
                    last[at] = 0
                    popped[at] = time
                segment.head += 1
            self._length -= segment.head - head
        self._held -= len(popped)
        self._popped = popped
        base = self._uses.base
        return [at + base for at in popped] if base else list(popped)

    def put_back(self, entries: Sequence[int]) -> None:
        for at in reversed(self._objects(entries)):
            self._return(at, self._popped[at])
        self._held += len(entries)

    def park(self, entry: int) -> None:
        at = entry - self._uses.base
        self._uses.last[at] = self._popped[at] + 1
        self._held += 1

    def unpark(self, entry: int) -> None:
        at = entry - self._uses.base
        time = self._uses.last[at]
        if time & 1:
            self._return(at, time - 1)

    def coldest(self) -> int | None:
        last, front = self._uses.last, self._front
        while front:
            at, time = front[-1]
            if last[at] == time:
                return time
            front.pop()
        return self._skip(self._length + 1)

    def looked_up(self, keys: Sequence[bytes], found: int, entries: Sequence[int], after: bytes | None = None) -> None:
        pass

    def worth_of(self, keys: Sequence[bytes], parent: bytes | None) -> int | None:
        return None

    def stored(self, keys: Sequence[bytes], entries: Sequence[int], parent: bytes | None) -> None:
        pass

    def moved_in(self, entries: Sequence[int]) -> None:
        pass

    def _objects(self, entries: Sequence[int]) -> Sequence[int]:
        base = self._uses.base
        return [entry - base for entry in entries] if base else entries

    def _skip(self, budget: int) -> int | None:
        """Drop at most ``budget`` stale items from the cold end of the queue; the time of the first valid one."""
        last = self._uses.last
        while budget > 0 and (queue := self._passed or self._ahead):
            segment = queue[0]
            objects, times, head = segment.objects, segment.times, segment.head
            end = min(head + budget, len(objects))
            for index in range(head, end):
                time = times[index]
                if last[objects[index]] == time:
                    self._length -= index - head
                    segment.head = index
                    return time
            self._length -= end - head
            budget -= end - head
            segment.head = end
            if end == len(objects):
                queue.popleft()
        return None

    def _return(self, at: int, time: int) -> None:
        self._uses.last[at] = time
        self._front.append((at, time))

    def _close_gaps(self, budget: int) -> None:
        """Let the hand look at ``budget`` items."""
        if len(self._ahead) == 1:
            # The last segment is the one that is appended to.
            self._passed.extend(self._ahead)
            self._passed, self._ahead = deque(), self._passed
            if len(self._ahead) == 1:
                return
        segment = self._ahead[0]
        part = slice(segment.head, segment.head + budget)
        objects, times = segment.objects[part], segment.times[part]
        segment.head += len(objects)
        if segment.head == len(segment.objects):
            self._ahead.popleft()
        valid = list(map(eq, map(self._uses.last.__getitem__, objects), times))
        self._length -= valid.count(False)
        if not self._passed or len(self._passed[-1].objects) >= _SEGMENT:
            self._passed.append(_Segment())
        target = self._passed[-1]
        target.objects.extend(compress(objects, valid))
        target.times.extend(compress(times, valid))
