"""How soon a thread of an engine's process gets the interpreter's lock when another one computes."""

from __future__ import annotations

import sys
from collections.abc import Callable

#: Seconds that a thread goes on for when another one wants the lock; by default 5 ms.
SOON = 0.0001


def take_prompt_turns() -> Callable[[], None]:
    """From now on no thread of this process waits much longer than :data:`SOON` for one that runs Python.

    In vLLM's engine process one thread makes requests, some milliseconds of Python each, one schedules and submits
    layers, and ours plan and begin copies; each of them lets go of the lock hundreds of times in a hit, in calls into
    sockets and drivers. What they wait for each other by default is more than what they compute.

    The interval is the process's, so it is set once and not around what is urgent: whoever sets it back for one thread
    does so for all. Returns what puts back the interval that was there; a shorter one stays, and so does one that
    somebody has set since.
    """
    before = sys.getswitchinterval()
    if before <= SOON:
        return _nothing
    sys.setswitchinterval(SOON)
    ours = sys.getswitchinterval()

    def put_back() -> None:
        if sys.getswitchinterval() == ours:
            sys.setswitchinterval(before)

    return put_back


def _nothing() -> None:
    """It is not ours."""
