"""What ``maru doctor`` is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from attrs import frozen

from maru_core.config import MaruConfig

#: How bad a finding is.
Level = Literal["ok", "note", "warning", "error"]


@frozen
class Finding:
    """One thing that ``maru doctor`` says. ``error``: it cannot work as it is configured, and the exit code says so.

    ``subject``: what it is about, such as a path. ``remedy``: a command or setting; empty when there is nothing to do.
    """

    level: Level
    subject: str
    text: str
    remedy: str = ""


#: Looks at what a backend or engine needs, for ``maru doctor``, with the settings of the environment. It changes
#: nothing, takes a second at most (after three it is left behind), and raises nothing for what it finds.
Diagnose = Callable[[MaruConfig], Sequence[Finding]]
