"""Waiting in tests for what other threads and processes do.

How long that takes is the machine's business: a wait fails when something will never happen, not when it is late. What
is promised about time is asserted beside it, and measured in a way that a busy machine cannot spoil.
"""

from __future__ import annotations

import time
from collections.abc import Callable

#: Seconds after which something will not happen any more, however busy the machine.
NEVER = 60.0


def eventually(condition: Callable[[], object], within: float = NEVER) -> float:
    """Wait until ``condition()`` holds; fails the test when it does not within so many seconds. Returns how many."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < within, f"did not come true within {within} s"
        time.sleep(0.005)
    return time.monotonic() - started


def quickest(call: Callable[[], object], tries: int = 5) -> float:
    """Seconds of the fastest of some calls: what it takes, without what the machine did to others meanwhile."""
    took = []
    for _ in range(tries):
        started = time.monotonic()
        call()
        took.append(time.monotonic() - started)
    return min(took)
