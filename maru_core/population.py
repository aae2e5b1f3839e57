"""Takes the page faults of a mapped pool ahead of time, on several threads, in order."""

from __future__ import annotations

import threading
from typing import Final

from maru_core.contracts import Region
from maru_core.processors import spare

#: Bytes that a thread populates at a time.
STEP: Final = 64 << 20
#: More threads than this wait for each other in the kernel.
MAX_THREADS: Final = 8


class Population:
    """Starts at once; ends by itself, and early after :meth:`stop`. Thread-safe.

    A new pool's pages are zeroed by who touches them first: a second for every 4 GiB and thread.
    """

    def __init__(self, region: Region, *, step: int = STEP, threads: int | None = None) -> None:
        """``threads``: ``None`` takes a quarter of the cores, as an engine starts on them meanwhile; from 1 to 8.

        Raises RuntimeError when none can be started.
        """
        self._region = region
        self._size = region.descriptor.size
        self._step = step
        #: A range's iterator gives each step to one thread only.
        self._steps = iter(range(0, self._size, step))
        self._changed = threading.Condition()
        self._done: set[int] = set()
        self._reached = 0
        self._stopped = False
        for number in range(threads or spare(MAX_THREADS)):
            try:
                threading.Thread(target=self._work, name=f"maru-populate-{number}", daemon=True).start()
            except RuntimeError:
                if not number:
                    raise
                break  # those that run do all of it

    def reach(self, end: int, timeout: float | None = None) -> bool:
        """Wait until all bytes up to the offset ``end`` are populated; False after ``timeout`` seconds, or stopped."""
        end = min(end, self._size)
        with self._changed:
            self._changed.wait_for(lambda: self._reached >= end or self._stopped, timeout)
            return self._reached >= end

    def stop(self) -> None:
        """Have every thread end after its step. Idempotent."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _work(self) -> None:
        for offset in self._steps:
            if self._stopped:
                return
            try:
                self._region.populate(offset, self._step)
            finally:
                with self._changed:
                    self._done.add(offset)
                    while self._reached in self._done:
                        self._done.remove(self._reached)
                        self._reached += self._step
                    self._changed.notify_all()
