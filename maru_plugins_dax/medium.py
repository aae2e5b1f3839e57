"""What a pool is made of, as far as hints care: a device, memory, or a file on a disk."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Literal

from attrs import frozen

Kind = Literal["device", "memory", "disk", "unknown"]

_MEMORY: Final = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")


@frozen
class Medium:
    """``huge``: whether advice makes huge pages of it. ``device``: major and minor number of a character device."""

    kind: Kind = "unknown"
    huge: bool = False
    device: tuple[int, int] | None = None


def medium_of(location: str, mounts: Path = Path("/proc/self/mountinfo")) -> Medium:
    """Look at the file or device that a pool's descriptor names; a location that is no path is unknown."""
    try:
        status = os.stat(location)
    except (OSError, ValueError):
        return Medium()
    if stat.S_ISCHR(status.st_mode):
        return Medium("device", device=(os.major(status.st_rdev), os.minor(status.st_rdev)))
    if not stat.S_ISREG(status.st_mode):
        return Medium()
    try:
        lines = mounts.read_text(errors="replace").splitlines()
    except OSError:
        return Medium()
    return medium_on(f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}", lines)


def medium_on(device: str, mountinfo: Iterable[str]) -> Medium:
    """What files are made of on the file system ``major:minor``, by lines of ``/proc/self/mountinfo``."""
    for line in mountinfo:
        mount, separator, system = line.partition(" - ")
        if not separator or len(mount.split()) < 3 or mount.split()[2] != device:
            continue
        kind, *rest = system.split()
        if kind not in _MEMORY:
            return Medium("disk")
        options = rest[-1].split(",") if rest else []
        return Medium("memory", huge=kind == "tmpfs" and bool({"huge=advise", "huge=within_size"} & {*options}))
    return Medium("disk")
