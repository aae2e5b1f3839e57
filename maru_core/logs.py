"""Logging. Libraries of Maru only log; who runs them decides where that goes.

A line that cannot be written (a full disk, a closed pipe, no descriptor left for a traceback's source) is lost, and
nothing else: what logs goes on.
"""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from typing import Any, Final, TextIO

import structlog
from attrs import define, field

from maru_core.errors import ConfigError

LEVELS: Final = ("debug", "info", "warning", "error")


class Log:
    """A logger that never raises, whatever the program's configuration of structlog does."""

    __slots__ = ("_log",)

    def __init__(self, log: Any) -> None:
        self._log = log

    def bind(self, **facts: Any) -> Log:
        """One that adds ``facts`` to every event."""
        return Log(self._log.bind(**facts))

    def debug(self, event: str, **facts: Any) -> None:
        """Log at this level."""
        self._tell("debug", event, facts)

    def info(self, event: str, **facts: Any) -> None:
        """Log at this level."""
        self._tell("info", event, facts)

    def warning(self, event: str, **facts: Any) -> None:
        """Log at this level."""
        self._tell("warning", event, facts)

    def error(self, event: str, **facts: Any) -> None:
        """Log at this level."""
        self._tell("error", event, facts)

    def exception(self, event: str, **facts: Any) -> None:
        """Log an error with the exception that is being handled."""
        self._tell("exception", event, facts)

    def _tell(self, level: str, event: str, facts: dict[str, Any]) -> None:
        try:
            getattr(self._log, level)(event, **facts)
        except Exception:  # noqa: BLE001 - whoever logs has something to do that matters more
            return


def get_logger(name: str) -> Log:
    """The logger of a module."""
    return Log(structlog.get_logger(name))


def visible(text: str) -> str:
    """``text`` without anything that a terminal would obey, line ends included: clients choose names and facts."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )


def _all_visible(_logger: Any, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """What goes to a terminal obeys this program alone."""
    return {name: visible(value) if isinstance(value, str) else value for name, value in event.items()}


def _trace(stream: TextIO, error: structlog.typing.ExcInfo) -> None:
    """Where something was raised, and nothing of what variables held: credentials and what clients sent."""
    for line in "".join(traceback.format_exception(*error)).splitlines():
        stream.write("\n" + visible(line))


@define(eq=False)
class _Sink:
    """Writes lines; tells how many were lost once lines can be written again."""

    _stream: TextIO
    _lost: int = field(init=False, default=0)
    _lock: threading.Lock = field(init=False, factory=threading.Lock)

    def msg(self, line: str) -> None:
        """Write one line."""
        with self._lock:
            try:
                if self._lost:
                    self._stream.write(f"{self._lost} log lines could not be written\n")
                    self._stream.flush()
                    self._lost = 0
                self._stream.write(line + "\n")
                self._stream.flush()
            except (OSError, ValueError):  # full, gone, or closed
                self._lost += 1

    log = debug = info = warning = error = critical = exception = fatal = failure = err = msg


def setup(level: str = "info", *, json: bool = False, stream: TextIO | None = None) -> None:
    """Send structlog's events to ``stream`` (default: stderr, so that stdout is left to results).

    Called by a program's ``main`` and by nothing else: it changes the process's configuration. One line per event, for
    people or as JSON. Raises ConfigError on an unknown level.
    """
    if level not in LEVELS:
        raise ConfigError(f"log level {level!r} is unknown; expected one of {', '.join(LEVELS)}")
    sink = sys.stderr if stream is None else stream
    written = _Sink(sink)
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if json
        else structlog.dev.ConsoleRenderer(colors=sink.isatty(), exception_formatter=_trace)
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *([] if json else [_all_visible]),
            structlog.processors.StackInfoRenderer(),
            *([structlog.processors.format_exc_info] if json else []),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=lambda *_: written,
        cache_logger_on_first_use=False,
    )
