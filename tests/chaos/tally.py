"""Counts of a process that outlive it: a file that it maps, one number per name."""

from __future__ import annotations

import mmap
import os
import time
import traceback
from pathlib import Path

NAMES = (
    "hits",
    "stored",
    "busy",
    "no_room",
    "refused",
    "deleted",
    "cancelled",
    "away",
    "self_stops",
    "forks",
    # What must never be counted: wrong bytes that were verified; wrong bytes under a lease although not verified; a
    # reservation that somebody else wrote to; one that was lost without a reset or a cold start; any unexpected error.
    "wrong",
    "moved",
    "intruded",
    "lost",
    "faults",
    "ended",
)
FATAL = ("wrong", "moved", "intruded", "lost", "faults")


class Tally:
    """Counts of this process, kept in ``path``; what must never happen is told in ``told`` besides."""

    def __init__(self, path: Path, told: Path) -> None:
        with path.open("xb") as file:
            file.truncate(8 * len(NAMES))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 8 * len(NAMES))
        self._numbers = memoryview(self._map).cast("Q")
        self._told = told

    def add(self, name: str, count: int = 1) -> None:
        """Count."""
        self._numbers[NAMES.index(name)] += count

    def tell(self, name: str, text: str) -> None:
        """Count something that must never happen and say what it was."""
        self.add(name)
        with self._told.open("a") as file:
            file.write(f"{time.time():.3f} {os.getpid()} {name}: {text}\n")

    def fault(self, error: BaseException) -> None:
        """An error that no client should see."""
        self.tell("faults", "".join(traceback.format_exception(error)))


def totals(folder: Path) -> dict[str, int]:
    """Sums over all files of a folder."""
    sums = dict.fromkeys(NAMES, 0)
    for path in folder.iterdir():
        for name, number in counts_in(path).items():
            sums[name] += number
    return sums


def counts_in(path: Path) -> dict[str, int]:
    """What one process counted."""
    return dict(zip(NAMES, memoryview(path.read_bytes()).cast("Q"), strict=False))
