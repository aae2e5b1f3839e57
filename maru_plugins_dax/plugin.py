"""Hooks of the ``dax`` plugin. The entry point is the object :data:`dax`, which does nothing until a pool is mapped."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from maru_core.contracts import ReadExtent, Region
from maru_core.plugin import hookimpl
from maru_plugins_dax.ahead import ReadAhead
from maru_plugins_dax.figures import Figures, Value
from maru_plugins_dax.switches import Switches
from maru_plugins_dax.watch import Surroundings, Watch


class DaxHints:
    """The hints of one process, for all its hosts and pools."""

    def __init__(
        self,
        switches: Callable[[], Switches] = lambda: Switches.from_environ(os.environ),
        around: Callable[[], Surroundings] = Surroundings,
    ) -> None:
        """Both are asked for when the first pool is mapped."""
        self._make_switches = switches
        self._make_around = around
        self._lock = threading.Lock()
        self._reset()

    def _reset(self) -> None:
        self._process = os.getpid()
        self._switches: Switches | None = None
        self._around: Surroundings | None = None
        self._figures = Figures("populate_bytes", "ahead_bytes", "ahead_dropped")
        self._ahead = ReadAhead(self._figures)
        self._watches: dict[int, Watch] = {}
        #: Threads that read, and since when.
        self._readers: dict[int, float] = {}

    @hookimpl
    def maru_region_mapped(self, region: Region) -> None:
        """Populate it and look where it is, on threads of our own."""
        with self._lock:
            if self._process != os.getpid():  # forked: threads, and what they were at, stayed behind
                self._reset()
            if self._switches is None or self._around is None:
                self._switches, self._around = self._make_switches(), self._make_around()
            watch = Watch(region, self._switches, self._figures, self._around, self._readers)
            self._watches[id(region)] = watch
            if watch.may_read_ahead:
                self._ahead.start()
        watch.start()

    @hookimpl
    def maru_before_read(self, region: Region, extents: Sequence[ReadExtent]) -> None:
        """Hand the extents to the thread that reads ahead, while there is anything to do for it."""
        watch = self._watches.get(id(region))
        if watch is not None and watch.may_read_ahead:
            self._ahead.put(watch, extents)
        self._readers[threading.get_ident()] = time.perf_counter()

    @hookimpl
    def maru_after_read(self, region: Region, extents: Sequence[ReadExtent]) -> None:
        """Count."""
        ended = time.perf_counter()
        since = self._readers.pop(threading.get_ident(), ended)
        self._figures.add_read(sum([extent.length for extent in extents]), (ended - since) * 1e3)

    @hookimpl
    def maru_region_unmapping(self, region: Region) -> None:
        """End its threads and forget it."""
        with self._lock:
            watch = self._watches.pop(id(region), None)
            if not self._watches:
                self._ahead.stop()
        if watch is not None:
            watch.stop()

    @hookimpl
    def maru_hint_stats(self) -> Mapping[str, Value]:
        """All figures of this process."""
        return self._figures.all()


#: What the entry point names.
dax = DaxHints()
