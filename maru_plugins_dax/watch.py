"""One mapped pool under the hints: its threads populate it, look where it is, and end when it is unmapped."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Final

import structlog
from attrs import field, frozen

from maru_core.contracts import ReadExtent, Region
from maru_core.errors import BackendError
from maru_plugins_dax.coverage import BLOCK, Coverage
from maru_plugins_dax.figures import Figures
from maru_plugins_dax.medium import Medium, medium_of
from maru_plugins_dax.memory import (
    HUGE_PAGE,
    MADV_COLLAPSE,
    MADV_HUGEPAGE,
    MADV_POPULATE_READ,
    MADV_WILLNEED,
    Kernel,
    huge_aligned,
)
from maru_plugins_dax.placement import Topology, judge, node_of_device
from maru_plugins_dax.switches import Switches

#: Pages that the placement check looks at, evenly over the pool.
_SAMPLES: Final = 64
#: Seconds that a load which follows at once has for itself, before threads work on a new mapping.
_HEAD_START: Final = 0.02
#: While something is read from a pool, populating waits: so long between two looks, and at most, in seconds a slice.
_LOOK: Final = 0.01
_GIVE_WAY: Final = 0.1
#: Parts that are populated by one call, about a millisecond: each call more costs a turn of the interpreter, which the
#: thread that loads has to wait for where CPUs are few.
_STEP: Final = 4
#: Longest wait, in seconds, for threads to notice that the pool is unmapped. They keep it mapped for one slice more.
_FAREWELL: Final = 0.05


@frozen
class Surroundings:
    """What the hints look at outside of the pool; tests give their own."""

    kernel: Kernel = field(factory=Kernel.load)
    topology: Callable[[], Topology] = Topology.read
    medium: Callable[[str], Medium] = medium_of
    node_of_device: Callable[[tuple[int, int]], int] = node_of_device
    cpus: Callable[[], set[int]] = field(default=lambda: os.sched_getaffinity(0))


class Watch:
    """The hints of one region. Every method is quick, but for the threads that :meth:`start` starts."""

    def __init__(
        self, region: Region, switches: Switches, figures: Figures, around: Surroundings, readers: Collection[int]
    ) -> None:
        """``readers``: while there are any, populating gives way."""
        self.region: Final = region
        self._switches: Final = switches
        self._figures: Final = figures
        self._around: Final = around
        self._readers: Final = readers
        self._medium: Final = around.medium(region.descriptor.location)
        self._size: Final = region.descriptor.size
        self._coverage: Final = Coverage(self._size)
        self._next: Final = itertools.count()
        self._stopped = threading.Event()
        #: The kernel does not populate this memory (too old, or not that kind); it is not asked again.
        self._refused = False
        self._huge = switches.huge_pages and self._medium.huge
        self._threads: list[threading.Thread] = []
        self._running = 0
        self._lock: Final = threading.Lock()

    @property
    def may_read_ahead(self) -> bool:
        """Whether there is anything to do ahead of a read: not when all of it is in the page tables for good."""
        if self._medium.kind == "disk":
            return self._switches.read_ahead != "off"
        return self._switches.read_ahead == "all" and not (self._coverage.complete or self._refused)

    def start(self) -> None:
        """Start what works in the background."""
        # Not a file on a disk: that would read all of it, which may be more than there is memory.
        populates = self._switches.populate and self._medium.kind != "disk"
        names = [f"maru-dax-populate-{n}" for n in range(self._switches.threads)] if populates else []
        if not names and (self._switches.numa or self._huge):
            names = ["maru-dax-look"]
        self._running = len(names)
        for name in names:
            thread = threading.Thread(target=self._run, args=(populates,), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """End the threads: at the latest after the slice that each is at."""
        self._stopped.set()
        deadline = time.monotonic() + _FAREWELL
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def read_ahead(self, extents: Sequence[ReadExtent]) -> None:
        """Prepare these bytes. Takes as long as it takes: not for the hot path."""
        view = self._view()
        if view is None:
            return
        advise = self._around.kernel.advise
        if self._medium.kind == "disk":
            for extent in extents:
                if advise(view, extent.offset, extent.length, MADV_WILLNEED) == 0:
                    self._figures.add("ahead_bytes", extent.length)
            return
        for block in self._coverage.missing([(extent.offset, extent.length) for extent in extents]):
            if self._stopped.is_set() or not self._populate(view, block, 1, "ahead"):
                return

    def _run(self, populates: bool) -> None:
        if self._stopped.wait(_HEAD_START):
            return
        started = time.perf_counter()
        view = self._view()
        if view is None:
            return
        if self._huge:
            self._make_huge(view)
        if populates:
            self._populate_all(view)
        with self._lock:
            self._running -= 1
            last = not self._running
        if last and populates:
            self._figures.add("populate_ms", (time.perf_counter() - started) * 1e3)
        if last and self._switches.numa and not self._stopped.is_set():
            self._look(view)

    def _populate_all(self, view: memoryview) -> None:
        # Threads take the next parts each, so that none waits for another.
        while not self._stopped.is_set() and (block := next(self._next) * _STEP) * BLOCK < self._size:
            self._give_way()
            if not self._populate(view, block, _STEP, "populate"):
                return

    def _give_way(self) -> None:
        until = time.monotonic() + _GIVE_WAY
        while self._readers and time.monotonic() < until and not self._stopped.wait(_LOOK):
            pass

    def _populate(self, view: memoryview, first: int, count: int, by: str) -> bool:
        """Enter ``count`` parts from ``first`` on; False when the kernel refuses."""
        last = min(first + count, -(-self._size // BLOCK))
        missing = [block for block in range(first, last) if not self._coverage.covers(block)]
        if not missing:
            return True
        start, end = missing[0] * BLOCK, min((missing[-1] + 1) * BLOCK, self._size)
        error = self._around.kernel.advise(view, start, end - start, MADV_POPULATE_READ)
        if error:
            self._refused = True
            self._figures.add(f"{by}_errors")
            self._figures.put(f"{by}_error", os.strerror(error))
            return False
        for block in missing:
            self._coverage.cover(block)
        self._figures.add(f"{by}_bytes", end - start)
        return True

    def _make_huge(self, view: memoryview) -> None:
        """One thread is enough, and pages that somebody holds (for a device) stay as they are."""
        with self._lock:
            if not self._huge:
                return
            self._huge = False
        advise = self._around.kernel.advise
        if advise(view, 0, self._size, MADV_HUGEPAGE) or not huge_aligned(view):
            self._figures.add("huge_refused")
            return
        for offset in range(0, self._size - HUGE_PAGE + 1, HUGE_PAGE):
            if self._stopped.is_set():
                return
            self._figures.add("huge_refused" if advise(view, offset, HUGE_PAGE, MADV_COLLAPSE) else "huge_pages")

    def _look(self, view: memoryview) -> None:
        """Where the memory is, and a line in the log when that is not where this process runs."""
        around, device = self._around, self._medium.device
        if device is not None:
            nodes = [around.node_of_device(device)]
        else:
            step = max(1, self._size // _SAMPLES)
            offsets = list(range(0, self._size, step))[:_SAMPLES]
            for offset in offsets:
                around.kernel.advise(view, offset, 1, MADV_POPULATE_READ)
            nodes = around.kernel.nodes(view, offsets)
        placement = judge(nodes, around.cpus(), around.topology())
        shown = " ".join(f"{node}:{count}" for node, count in sorted(placement.nodes.items())) or "unknown"
        number = self.region.descriptor.pool
        self._figures.put(f"pool_{number}_nodes", shown)
        self._figures.put(f"pool_{number}_far", placement.far)
        if placement.far:
            structlog.get_logger(__name__).warning(
                "pool_is_far",
                pool=self.region.descriptor.location,
                pages_by_node=shown,
                share=round(placement.far, 3),
                remedy=placement.remedy,
            )

    def _view(self) -> memoryview | None:
        try:
            return self.region.buffer
        except BackendError:  # closed in the meantime
            return None
