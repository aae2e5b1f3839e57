"""Loads a library of native code that lies beside this package, if it is there and has the version that is needed."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from maru_transfer import build_info

T = TypeVar("T")


def load_library(place: Path, part: str, version: int, bind: Callable[[ctypes.CDLL], T], rebuild: str) -> T | str:
    """What ``bind`` makes of the library at ``place``; or why it cannot be used, with the remedy.

    ``part``: what the build calls it, and its function ``maru_<part>_abi_version``, which must answer ``version``.
    ``bind`` raises AttributeError when a function is missing. ``rebuild``: how to get the library anew.
    """
    if not place.exists():
        report = build_info.read(place.parent, part)
        return f"{place} does not exist: {report.why_not() or f'it was built, and removed since; {rebuild}'}"
    try:
        library = ctypes.CDLL(str(place))
        found = library[f"maru_{part}_abi_version"]()
        if found != version:
            return (
                f"{place} has version {found} of the interface, this Maru needs {version}: it is left over"
                f" from another one; {rebuild}"
            )
        return bind(library)
    except (OSError, AttributeError) as error:  # for another processor, cut short, or something else
        return f"{place} cannot be used: {error}; {rebuild}"
