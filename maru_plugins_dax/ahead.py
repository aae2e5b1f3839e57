"""Hands reads that are about to happen over to a thread, without ever waiting for it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from typing import Final

from maru_core.contracts import ReadExtent
from maru_plugins_dax.figures import Figures
from maru_plugins_dax.watch import Watch

#: Reads that wait; one more is dropped, because by then it happens without help.
DEPTH: Final = 8

Item = tuple[Watch, Sequence[ReadExtent]]


class ReadAhead:
    """A thread with a short queue."""

    def __init__(self, figures: Figures) -> None:
        self._figures: Final = figures
        self._lock: Final = threading.Lock()
        self._queue: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, unless it runs. Not in the first read: starting one takes long."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="maru-dax-ahead", daemon=True)
                self._thread.start()

    def put(self, watch: Watch, extents: Sequence[ReadExtent]) -> None:
        """Hand over, or drop. Takes microseconds."""
        if self._queue.qsize() >= DEPTH or self._thread is None:
            self._figures.add("ahead_dropped")
        else:
            self._queue.put((watch, extents))

    def stop(self) -> None:
        """End the thread after what it is at; it can be started again."""
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is not None:
                self._queue.put(None)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            watch, extents = item
            del item
            watch.read_ahead(extents)
            # Else the last pool would stay mapped until the next read.
            del watch, extents
