"""What the build of the native code said about itself (``csrc/build.py``), in a file beside the libraries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from attrs import frozen

#: The report of the whole build; every package with a library has a copy.
BUILD_INFO: Final = "_build_info.json"
NOT_BUILT: Final = "the native code was never built in this checkout"
INSTALL: Final = "install Maru (pip install .) where a C compiler and nvcc can be found"


@frozen
class BuildReport:
    """One part. Without a report nothing was built, and ``reason`` and ``remedy`` say that; they are empty when it was.

    ``architectures`` and ``unknown_architectures``: compute capabilities with machine code, and those that nvcc did not
    know; ``ptx``: the one that others are translated from. ``ignored``: variables that were set and named no nvcc.
    """

    built: bool = False
    reason: str = NOT_BUILT
    remedy: str = INSTALL
    toolkit: str = ""
    architectures: str = ""
    unknown_architectures: str = ""
    ptx: str = ""
    ignored: str = ""

    def why_not(self) -> str:
        """Reason and remedy in one line; empty when it was built."""
        return "; ".join(filter(None, (self.reason, self.remedy)))


def read(folder: Path, part: str) -> BuildReport:
    """The report on ``part`` in ``folder``; one that cannot be read counts as none."""
    try:
        found: Any = json.loads((folder / BUILD_INFO).read_text())[part]
        texts = {key: str(found.get(key) or "") for key in ("reason", "remedy", *_FACTS)}
        built = found["built"] is True
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # none, cut short, or not by us
        return BuildReport()
    if not built:
        texts["reason"] = texts["reason"] or "the build does not say why"
        texts["remedy"] = texts["remedy"] or INSTALL
    return BuildReport(built, **texts)


_FACTS: Final = ("toolkit", "architectures", "unknown_architectures", "ptx", "ignored")
