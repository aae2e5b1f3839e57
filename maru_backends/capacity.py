"""How much memory there is to take: the host's, and that of every cgroup this process is in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

from attrs import frozen

ROOT: Final = Path("/")


@frozen
class Available:
    """Bytes that can still be taken, and who says so (for an error)."""

    size: int
    source: str


NO_LIMIT: Final = Available(2**63, "no limit is known")


def available_memory(root: Path = ROOT) -> Available:
    """The tightest of the host's ``MemAvailable`` and the limits of this process's cgroups, v2 and v1.

    Page cache that a cgroup could drop at once counts as available. ``root`` is where ``/proc`` and ``/sys`` are.
    What cannot be read does not limit; with nothing readable at all the answer is NO_LIMIT.
    """
    found = [NO_LIMIT]
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            found.append(Available(int(line.split()[1]) * 1024, "MemAvailable of the host"))
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            found.extend(_limits(root / "sys/fs/cgroup", path, _V2))
        elif "memory" in controllers.split(","):
            found.extend(_limits(root / "sys/fs/cgroup/memory", path, _V1))
    return min(found, key=lambda available: available.size)


def filesystem_type(device: int, root: Path = ROOT) -> str:
    """Type of the mounted file system with this ``st_dev`` (``tmpfs``, ``hugetlbfs``, …); empty when not known."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in _lines(root / "proc/self/mountinfo"):
        fields = line.split()
        if wanted in fields[2:3] and "-" in fields[6:-1]:
            return fields[fields.index("-", 6) + 1]
    return ""


def free_space(fd: int, where: str) -> Iterator[Available]:
    """What the file system of an open file or folder has left for this user; nothing when it sets no limit."""
    status = os.fstatvfs(fd)
    # A tmpfs or hugetlbfs that is mounted without a size reports no blocks at all.
    if status.f_blocks:
        yield Available(status.f_bavail * status.f_frsize, f"free space of {where}")


def free_huge_pages(page: int, root: Path = ROOT) -> Available:
    """Bytes in huge pages of ``page`` bytes that are neither used nor promised to somebody."""
    folder = root / f"sys/kernel/mm/hugepages/hugepages-{page // 1024}kB"
    free, promised = _number(folder / "free_hugepages"), _number(folder / "resv_hugepages")
    if free is None:
        return NO_LIMIT
    return Available(max(0, free - (promised or 0)) * page, f"free huge pages of {page} bytes")


@frozen
class _Files:
    """Names of a cgroup version's files, and of the droppable page cache in its ``memory.stat``."""

    limit: str
    usage: str
    droppable: str


_V2: Final = _Files("memory.max", "memory.current", "inactive_file")
_V1: Final = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _limits(mount: Path, path: str, files: _Files) -> Iterator[Available]:
    """What the cgroup ``path`` and each of its parents leave. In a container the path may lie outside the mount."""
    cgroup = PurePosixPath(path.lstrip("/"))
    for level in (cgroup, *cgroup.parents):
        folder = mount / level
        limit, usage = _number(folder / files.limit), _number(folder / files.usage)
        if limit is None or usage is None:
            continue
        droppable = 0
        for line in _lines(folder / "memory.stat"):
            if line.startswith(files.droppable + " "):
                droppable = int(line.split()[1])
        yield Available(max(0, limit - usage + droppable), f"{files.limit} {limit} of {folder}")


def _number(path: Path) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # absent in this kernel, container or cgroup version: it does not limit
        return []
