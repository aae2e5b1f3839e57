"""Tells what is going on and since when, in a terminal or in a log."""

from __future__ import annotations

import time
from typing import TextIO

#: Seconds between signs of life where lines cannot be overwritten.
_QUIET = 15.0


class Failed(Exception):
    """The run cannot go on; the message says why and, if need be, what to do."""


class Progress:
    """Writes ``[seconds] message`` lines; :meth:`tick` shows that the current step is still going on."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._start = self._step_start = self._last = time.monotonic()
        self._step = ""
        self._open_line = False

    def step(self, text: str) -> None:
        """Something new begins."""
        self._step, self._step_start = text, time.monotonic()
        self._line(text)
        self._last = self._step_start

    def note(self, text: str) -> None:
        """Something worth a line of its own happened."""
        self._line("  " + text)

    def tick(self) -> None:
        """The current step goes on."""
        now = time.monotonic()
        if self._stream.isatty():
            if now - self._last >= 1:
                self._write(f"\r{self._prefix()}   … {now - self._step_start:.0f} s")
                self._open_line, self._last = True, now
        elif now - self._last >= _QUIET:
            self._line(f"  … still: {self._step} ({now - self._step_start:.0f} s)")
            self._last = now

    def _prefix(self) -> str:
        return f"[{time.monotonic() - self._start:4.0f} s] "

    def _line(self, text: str) -> None:
        # The erase sequence goes to terminals only: nothing else has an open line.
        self._write(("\r\033[K" if self._open_line else "") + self._prefix() + text + "\n")
        self._open_line = False

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
