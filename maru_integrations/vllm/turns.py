"""Taking the interpreter's lock back soon after a call that has let go of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

#: Seconds that another thread may go on for when this one wants the lock.
SOON = 0.0001


@contextmanager
def prompt_turns() -> Iterator[None]:
    """What touches a socket in this block waits hardly longer for a thread that computes than for the socket.

    A thread that runs Python keeps the interpreter's lock for ``sys.getswitchinterval()`` seconds after another has
    asked for it, 5 ms by default, and every call into a socket gives it away. In vLLM's engine process one thread makes
    the requests of a burst, some milliseconds of Python each, while the scheduler's thread asks for the first of them.
    The interval is the process's: other threads that wait for the lock meanwhile get it as soon.
    """
    before = sys.getswitchinterval()
    if before <= SOON:
        yield
        return
    sys.setswitchinterval(SOON)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
