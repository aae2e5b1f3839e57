"""Which hints are on: ``MARU_DAX_*`` variables, read when the first pool is mapped."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final, Literal, cast, get_args

import structlog
from attrs import frozen

PREFIX: Final = "MARU_DAX_"
_TRUE: Final = ("1", "true", "yes", "on")
_FALSE: Final = ("0", "false", "no", "off")
_MOST_THREADS: Final = 64


#: What is read ahead: nothing, files on a disk, or memory too.
Ahead = Literal["off", "disk", "all"]


@frozen
class Switches:
    """The defaults are what ``benchmarks/hints.py`` shows to help. ``threads``: those that populate one pool."""

    populate: bool = True
    huge_pages: bool = False
    numa: bool = True
    read_ahead: Ahead = "off"
    threads: int = 1

    @classmethod
    def from_environ(cls, environ: Mapping[str, str], cpus: int | None = None) -> Switches:
        """Read the variables; one with a value that cannot be is warned of and left at its default.

        ``cpus``: how many this process may run on; a quarter of them populate, at most four.
        """
        cpus = len(os.sched_getaffinity(0)) if cpus is None else cpus
        default = cls(threads=max(1, min(4, cpus // 4)))
        return cls(
            populate=_boolean(environ, "POPULATE", default.populate),
            huge_pages=_boolean(environ, "HUGE_PAGES", default.huge_pages),
            numa=_boolean(environ, "NUMA", default.numa),
            read_ahead=_ahead(environ, "READ_AHEAD", default.read_ahead),
            threads=_count(environ, "THREADS", default.threads),
        )


def _boolean(environ: Mapping[str, str], name: str, default: bool) -> bool:
    text = environ.get(PREFIX + name, "").strip().lower()
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    if text:
        _refuse(name, text, "true or false", default)
    return default


def _ahead(environ: Mapping[str, str], name: str, default: Ahead) -> Ahead:
    text = environ.get(PREFIX + name, "").strip().lower()
    if text in get_args(Ahead):
        return cast(Ahead, text)
    if text:
        _refuse(name, text, "off, disk or all", default)
    return default


def _count(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(PREFIX + name, "").strip()
    if text.isascii() and text.isdigit() and 1 <= int(text) <= _MOST_THREADS:
        return int(text)
    if text:
        _refuse(name, text, f"a whole number from 1 to {_MOST_THREADS}", default)
    return default


def _refuse(name: str, value: str, expected: str, used: object) -> None:
    log = structlog.get_logger(__name__)
    log.warning("variable_ignored", variable=PREFIX + name, value=value, expected=expected, used=used)
