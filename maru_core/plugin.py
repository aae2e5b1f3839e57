"""All that a plugin imports to register: the marker for its hook implementations."""

from __future__ import annotations

from typing import Final

import pluggy

#: The project name that pluggy markers share, and the entry-point group is ``maru.plugins``.
NAME: Final = "maru"

#: Decorator for hook implementations, see :mod:`maru_core.hookspecs`.
hookimpl = pluggy.HookimplMarker(NAME)
