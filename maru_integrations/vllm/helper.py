"""A thread beside vLLM's: started when there is work, and again when it has died."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Helper:
    """For the thread that gives it work; what is worked on is shared under a lock of theirs."""

    def __init__(self, name: str, run: Callable[[], None]) -> None:
        """``run`` is the thread's whole life."""
        self._name = name
        self._run = run
        self._thread: threading.Thread | None = None

    @property
    def has_died(self) -> bool:
        """Whether it was started and runs no more: nobody works on what it was given."""
        return self._thread is not None and not self._thread.is_alive()

    def start(self) -> None:
        """Have it run; nothing if it does. Raises RuntimeError when the process gets no more threads."""
        if self._thread is not None and self._thread.is_alive():
            return
        self._thread = None
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        thread.start()
        self._thread = thread

    def join(self, timeout: float) -> bool:
        """Whether it has ended, after so many seconds at most."""
        if self._thread is None:
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()
