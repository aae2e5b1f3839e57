"""Shared memory that Python's multiprocessing made: what a killed process leaves in ``/dev/shm``.

vLLM's own shutdown kills its workers when they are slow to end, and their segments (hundreds of megabytes) then stay
until the next boot. Whoever ends an engine notes what its processes have mapped, and removes that afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

_MAPPED = re.compile(r" (/dev/shm/(?:psm_|sem\.mp-)[\w-]+)$", re.MULTILINE)


def mapped_segments(pids: Iterable[int]) -> set[Path]:
    """Segments that these processes have mapped now, by name."""
    found: set[Path] = set()
    for pid in pids:
        try:
            maps = Path("/proc", str(pid), "maps").read_text(errors="replace")
        except OSError:  # gone meanwhile, or not ours to look at
            continue
        found |= {Path(name) for name in _MAPPED.findall(maps)}
    return found


def remove_segments(segments: Iterable[Path]) -> None:
    """Unlink those that are still there."""
    for segment in segments:
        segment.unlink(missing_ok=True)
