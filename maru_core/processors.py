"""How many threads may work beside an engine's own."""

from __future__ import annotations

import os


def spare(most: int) -> int:
    """A quarter of this process's processors, from 1 to ``most``: the others are the engine's."""
    return max(1, min(most, len(os.sched_getaffinity(0)) // 4))
