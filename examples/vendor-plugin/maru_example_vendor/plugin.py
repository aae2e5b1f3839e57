"""Hooks of the plugin. Imported in every process of every engine, so it imports nothing heavy by itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence

from maru_core.contracts import BackendProvision, ReadExtent, Region, StorageBackend
from maru_core.plugin import hookimpl

NAME = "example"


def make_backend() -> StorageBackend:
    """Called when the backend is first used: this is the place for imports of drivers and the like."""
    from maru_example_vendor.backend import ExampleBackend

    return ExampleBackend(NAME)


class ExamplePlugin:
    """Offers the backend, and counts reads from its pools. One object per process, whatever hosts there are."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._started: dict[int, float] = {}
        self._reads = 0
        self._bytes = 0
        self._seconds = 0.0

    @hookimpl
    def maru_storage_backends(self) -> Sequence[BackendProvision]:
        """The backend ``example``."""
        return [BackendProvision(NAME, make_backend, summary="files of a folder that is marked for it")]

    @hookimpl
    def maru_before_read(self, region: Region, extents: Sequence[ReadExtent]) -> None:
        """On the hot path: microseconds, or the host will not call it again."""
        if region.descriptor.backend == NAME:
            self._started[threading.get_ident()] = time.perf_counter()

    @hookimpl
    def maru_after_read(self, region: Region, extents: Sequence[ReadExtent]) -> None:
        """On the hot path, too."""
        started = self._started.pop(threading.get_ident(), None)
        if started is not None:
            with self._lock:
                self._reads += 1
                self._bytes += sum(extent.length for extent in extents)
                self._seconds += time.perf_counter() - started

    @hookimpl
    def maru_hint_stats(self) -> Mapping[str, int | float | str]:
        """Names start with the plugin's own."""
        with self._lock:
            return {
                "example.reads": self._reads,
                "example.read_bytes": self._bytes,
                "example.read_ms": round(self._seconds * 1e3, 3),
            }


#: What the entry point names.
plugin = ExamplePlugin()
