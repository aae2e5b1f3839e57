"""When a load that is under way is released although others compute, and what has to be known of their steps for that.

A step that reads a load waits for its layers, and at its end for the load's: with it waits everybody who decodes in
that step. So while anybody computes, a load is released only when the step that will read it hardly has to wait. vLLM
hears of a release when a step ends; that is when it is decided here, once per step.

Pure: no thread, no I/O, clocks are parameters.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Collection

from attrs import define, field, frozen

#: Measurements of which the median counts: one that is off by far changes nothing, and steps that have become longer
#: or shorter show after half as many hits.
_KEPT = 7

#: Seconds after which nobody waits for the step of a request that was reported: it was aborted meanwhile.
_FORGOTTEN = 10.0


@frozen
class Progress:
    """A load of ``layers`` layers of which ``done`` are there ``elapsed`` seconds after it began.

    ``usual``: seconds that a layer of so many bytes took lately; ``None``: not known.
    """

    done: int
    layers: int
    elapsed: float
    usual: float | None = None

    @property
    def remaining(self) -> float:
        """Seconds until the last layer is there when all take equally long."""
        if self.done >= self.layers:
            return 0.0
        # So many layers have come in that time and one more has not: that is all that this load says of its speed.
        least, most = self.elapsed / (self.done + 1), self.elapsed / self.done if self.done else math.inf
        layer = most if self.usual is None else min(max(self.usual, least), most)
        return max(0.0, layer * self.layers - self.elapsed)


@frozen
class Outlook:
    """How an engine steps, in seconds; ``None``: not known.

    ``lead``: from now until the step begins that reads a load which is reported now. ``step``: how long that one goes
    on until it needs the load to have ended, without what it waits for loads. ``patience``: how long it may wait.
    """

    lead: float | None = None
    step: float | None = None
    patience: float = 0.0


def is_due(progress: Progress, minimum: int, computing: int, outlook: Outlook) -> bool:
    """Whether to release a load when a step of ``computing`` requests ends, rather than when the next one does.

    Never before ``minimum`` layers are there. From then on at once when nobody computes, when the engine's steps are
    not known, and when all layers are there.
    """
    if progress.done < minimum:
        return False
    if not computing or outlook.lead is None or outlook.step is None:
        return True
    return progress.remaining <= outlook.lead + outlook.step + outlook.patience


@define
class Recent:
    """The last few values of something that is measured. One thread, or a lock around every call."""

    _values: deque[float] = field(factory=lambda: deque(maxlen=_KEPT))

    def add(self, value: float) -> float:
        """Note one; returns the median."""
        self._values.append(value)
        return statistics.median(self._values)

    @property
    def median(self) -> float | None:
        """Of those that are kept; ``None``: there are none."""
        return statistics.median(self._values) if self._values else None


@define
class Rhythm:
    """Measures an engine's steps: how often they begin while somebody computes and none reads a load, how many later
    one knows what was reported, and how long those go on that read a load.

    Told by the thread that runs them: :meth:`begin`, :meth:`waited`, :meth:`end` and :meth:`told`, in this order.

    Where the device ``queues`` work, a step that was submitted runs behind those submitted before, as many as vLLM is
    ahead: it needs the load when as many more intervals have passed as it took to hear of it, or when all of it is
    submitted, if that is later. There a load is released with the step that fits it best, up to half an interval early
    for the others. With the first step that none waits in, its request would wait up to an interval.
    """

    _clock: Callable[[], float] = time.monotonic
    _queues: bool = False
    _leads: Recent = field(factory=Recent)
    _steps: Recent = field(factory=Recent)
    _intervals: Recent = field(factory=Recent)
    #: In which step, and when, requests were reported as received of which no step knows so far.
    _told: dict[str, tuple[int, float]] = field(factory=dict)
    #: Whether the step that runs is measured: only then must its end be told.
    measures: bool = False
    _count: int = 0
    #: Whether the step that began last computes and reads no load.
    _is_usual: bool = False
    _began: float = 0.0
    _waited: float = 0.0

    def outlook(self) -> Outlook:
        """As far as it is known."""
        steps, interval, step = self._leads.median, self._intervals.median, self._steps.median
        if steps is None or interval is None or step is None:
            return Outlook()
        ahead = steps * interval
        lead = max(0.0, ahead - (self._clock() - self._began))
        return Outlook(lead, max(step, ahead), interval / 2) if self._queues else Outlook(lead, step)

    def begin(self, received: Collection[str], computing: int, *, by_layer: bool) -> None:
        """A step begins; vLLM knows from it on that these were ``received``.

        ``by_layer``: it waits for each layer when it needs it, and not for all before it begins.
        """
        now = self._clock()
        if computing and self._is_usual:
            self._intervals.add(now - self._began)
        self._count += 1
        self._began, self._waited = now, 0.0
        self._is_usual = bool(computing and not received)
        self.measures = False
        if not received:
            return
        for name in received:
            told = self._told.pop(name, None)
            if told is not None:
                self._leads.add(self._count - told[0])
        if computing and by_layer:
            self.measures = True
        elif computing:
            self._steps.add(0.0)

    def waited(self, seconds: float) -> None:
        """Of the step that runs, so much was spent on waiting for a layer."""
        self._waited += seconds

    def end(self) -> None:
        """From now on the step waits for the end of what it reads."""
        if self.measures:
            self.measures = False
            self._steps.add(max(0.0, self._clock() - self._began - self._waited))

    def told(self, request_ids: Collection[str], computing: int) -> None:
        """With the end of a step of ``computing`` requests these were reported as received."""
        if request_ids and computing:
            now = self._clock()
            self._told = {name: told for name, told in self._told.items() if now - told[1] < _FORGOTTEN}
            self._told.update(dict.fromkeys(request_ids, (self._count, now)))
