"""Logging for programs. Libraries of Maru only log; who runs them decides where that goes."""

from __future__ import annotations

import logging
import sys
from typing import Final, TextIO

import structlog

from maru_core.errors import ConfigError

LEVELS: Final = ("debug", "info", "warning", "error")


def setup(level: str = "info", *, json: bool = False, stream: TextIO | None = None) -> None:
    """Send structlog's events to ``stream`` (default: stderr, so that stdout is left to results).

    Called by a program's ``main`` and by nothing else: it changes the process's configuration. One line per event, for
    people or as JSON. Raises ConfigError on an unknown level.
    """
    if level not in LEVELS:
        raise ConfigError(f"log level {level!r} is unknown; expected one of {', '.join(LEVELS)}")
    sink = sys.stderr if stream is None else stream
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer() if json else structlog.dev.ConsoleRenderer(colors=sink.isatty())
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            *([structlog.processors.format_exc_info] if json else []),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sink),
        cache_logger_on_first_use=False,
    )
