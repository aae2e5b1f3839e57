"""How likely is it that something is used again, by how long ago it was used and by what kind of thing it is.

Each kind has a table over ages, in half-octave bins: how much was used again at that age, and how long how much had
waited for it. From it follows what a place in the pool is worth if it is left to a thing of that kind and age: the best
ratio of expected uses to expected time, over all times that one could wait. That is the price at which it is just not
evicted, and it is the right order of eviction for any pool size (the index rule for a stopping problem).

A kind that was seen little borrows from the wider kind that it is part of, and the widest one from a prior that makes
everything least recently used.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import Final

BINS: Final = 34
#: Lower edges of the age bins in seconds, and the upper edge of the last one.
EDGES: Final = (0.0, *(2.0 ** (at / 2) for at in range(BINS)))
#: Where the second and later bins start, for bisection.
STARTS: Final = EDGES[1:]
#: What the prior counts as, in stretches of average length; and a wider kind for a narrower one.
_PRIOR_WEIGHT: Final = 50.0
_WIDER_WEIGHT: Final = 6.0
#: Under the prior, what was used just now comes back this many seconds later.
_PRIOR_TIME: Final = 10.0
#: Seconds between new tables of one kind; and after which what was counted counts half.
_REFRESH: Final = 20.0
_HALF_LIFE: Final = 4 * 3600.0
#: Seconds that are told apart in the time of use of what still waits.
_TICK: Final = 4.0
#: Of what waits in very many ticks a table is made less often: seconds per tick.
_REFRESH_PER_TICK: Final = 0.05


def bin_of(age: float) -> int:
    """The bin that ``age`` in seconds is in."""
    return min(BINS - 1, bisect_right(STARTS, age))


class Kind:
    """Counts of one kind of thing, and what an object of it is worth by age (``worth``, by bin).

    ``wider``: the kind that it is part of. ``now``: seconds of any steady clock. ``number``: any, for the caller's use.
    """

    __slots__ = (
        "_begun",
        "_ended",
        "_length",
        "_made",
        "_rate",
        "_used",
        "_waited",
        "_waiting",
        "number",
        "wider",
        "worth",
    )

    def __init__(self, wider: Kind | None, now: float, number: int = 0) -> None:
        self.wider = wider
        self.number = number
        self._used = [0.0] * BINS
        self._ended = [0.0] * BINS
        self._waited = [0.0] * BINS
        self._waiting: dict[int, float] = {}
        #: Stretches that began to wait, and their objects.
        self._begun = self._length = 0.0
        self._made = now
        if wider is None:
            self._rate = [1 / (edge + _PRIOR_TIME) for edge in EDGES[:BINS]]
            self.worth = [*self._rate, self._rate[-1]]
        else:
            self._rate, self.worth = wider._rate, wider.worth

    def begin(self, now: float, weight: float) -> None:
        """``weight`` objects were used at ``now`` and wait for their next use."""
        tick = int(now / _TICK)
        kind: Kind | None = self
        while kind is not None:
            kind._waiting[tick] = kind._waiting.get(tick, 0.0) + weight
            kind._begun += 1
            kind._length += weight
            kind = kind.wider

    def end(self, since: float, now: float, weight: float, used: bool) -> None:
        """What began to wait at ``since`` was used, or nobody looks for it any more."""
        tick, age = int(since / _TICK), max(0.0, now - since)
        at = bin_of(age)
        kind: Kind | None = self
        while kind is not None:
            left = kind._waiting.get(tick, 0.0) - weight
            if left > 0.5:
                kind._waiting[tick] = left
            else:
                kind._waiting.pop(tick, None)
            kind._ended[at] += weight
            kind._waited[at] += weight * (age - EDGES[at])
            if used:
                kind._used[at] += weight
            kind = kind.wider

    def made(self) -> float:
        """When the tables were made."""
        return self._made

    def is_stale(self, now: float) -> bool:
        """Whether it is time for :meth:`refresh`."""
        return now - self._made > max(_REFRESH, _REFRESH_PER_TICK * len(self._waiting))

    def refresh(self, now: float) -> None:
        """Make the tables anew from what was counted, those of the wider kinds first when they are old."""
        if self.wider is not None and self.wider.is_stale(now):
            self.wider.refresh(now)
        fade = 0.5 ** ((now - self._made) / _HALF_LIFE)
        self._made = now
        for column in (self._used, self._ended, self._waited):
            column[:] = [count * fade for count in column]
        ended, waited = list(self._ended), list(self._waited)
        for tick, weight in self._waiting.items():
            age = max(0.0, now - (tick + 0.5) * _TICK)
            at = bin_of(age)
            ended[at] += weight
            waited[at] += weight * (age - EDGES[at])
        beyond, rate = 0.0, [0.0] * BINS
        # Objects of one stretch share their fate, so a long one says no more than a short one.
        prior_weight = _PRIOR_WEIGHT if self.wider is None else _WIDER_WEIGHT
        prior_weight *= self._length / self._begun if self._begun else 1.0
        for at in range(BINS - 1, -1, -1):
            prior = 1 / (EDGES[at] + _PRIOR_TIME) if self.wider is None else self.wider._rate[at]
            time = waited[at] + beyond * (EDGES[at + 1] - EDGES[at])
            rate[at] = (self._used[at] + prior_weight) / (time + prior_weight / max(prior, 1e-9))
            beyond += ended[at]
        self._rate = rate
        self.worth = _worth(rate)


def _worth(rate: list[float]) -> list[float]:
    """For each bin the most uses per second that can be had by waiting on from there."""
    dies = [1 - math.exp(-rate[at] * (EDGES[at + 1] - EDGES[at])) for at in range(BINS)]
    worth = []
    for start in range(BINS):
        uses = time = best = 0.0
        left = 1.0
        for at in range(start, BINS):
            here = left * dies[at]
            uses += here
            time += here / rate[at]
            left -= here
            if uses > best * time:
                best = uses / time
            elif left < 0.01:
                break
        worth.append(best)
    # So that the place of an age among STARTS is one in here, too.
    return [*worth, worth[-1]]
