"""What on this host decides how fast pools are registered with a GPU's driver: for ``maru doctor``. Needs no torch."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Final

from maru_core.config import MaruConfig
from maru_core.contracts import Finding
from maru_core.sizes import format_size
from maru_transfer.cuda_driver import NO_DRIVER, DriverError, driver_version
from maru_transfer.memlock import memlock_hint

ROOT: Final = Path("/")
#: Where the ``cpu`` backend makes pools unless it is told otherwise.
_DEFAULT_PATH: Final = "/dev/shm"
#: Mount options of a tmpfs with which it has huge pages where it can.
_HUGE: Final = ("huge=always", "huge=within_size", "huge=advise")


def diagnose(config: MaruConfig) -> list[Finding]:
    """What there is to say of the pools that ``config`` asks for, as far as they are shared memory of this host."""
    members = config.write_order if config.storage_backend == "mixed" else (config.storage_backend,)
    if "cpu" not in members:
        return [_driver(driver_version)]
    size = config.pool_size_of("cpu") or config.pool_size
    found = pinning_findings(config.pool_path_of("cpu") or _DEFAULT_PATH, size)
    # The limit itself is among those that the doctor shows anyway.
    return [finding for finding in found if finding.level != "ok" or finding.subject != "locked memory"]


def pinning_findings(
    pool_path: str,
    pool_size: int,
    *,
    root: Path = ROOT,
    version: Callable[[], tuple[int, int]] = driver_version,
) -> list[Finding]:
    """The driver, the limit on locked memory, and the pages that a pool of ``pool_size`` bytes in ``pool_path`` gets.

    ``root`` is where ``/proc`` and ``/sys`` are.
    """
    return [_driver(version), _memlock(pool_size, root), _pages(pool_path, pool_size, root)]


def _driver(version: Callable[[], tuple[int, int]]) -> Finding:
    try:
        number, devices = version()
    except DriverError as error:
        if error.code == NO_DRIVER:
            return Finding("note", "GPU driver", f"none, so that pools are not registered: {error}")
        return Finding("warning", "GPU driver", str(error), "look at nvidia-smi and the kernel's log")
    if devices == 0:
        return Finding("warning", "GPU driver", "there, but it shows no device", "look at CUDA_VISIBLE_DEVICES")
    return Finding("ok", "GPU driver", f"CUDA {number // 1000}.{number % 1000 // 10}, {devices} devices")


def _memlock(pool_size: int, root: Path) -> Finding:
    hint = memlock_hint(pool_size, root / "proc/self/status")
    if hint is None:
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        shown = f"{limit} bytes, which is no limit for this pool or this process"
        if limit == resource.RLIM_INFINITY:
            shown = "unlimited"
        return Finding("ok", "locked memory", shown)
    # NVIDIA's driver 580 does not look at the limit; others may.
    return Finding("note", "locked memory", hint, "only if a pool is reported as not registered")


def _pages(pool_path: str, pool_size: int, root: Path) -> Finding:
    subject = f"pages of {pool_path}"
    try:
        status, page = os.stat(pool_path), os.statvfs(pool_path).f_bsize
    except OSError as error:
        return Finding("warning", subject, str(error.strerror), "set maru_pool_path to a folder that is there")
    kind, options = _mount(status.st_dev, root)
    if kind == "hugetlbfs":
        return _huge_pages(subject, page, pool_size, root)
    if kind != "tmpfs":
        return Finding("note", subject, f"a file system of type {kind or 'unknown'}: small pages, and it may be a disk")
    setting = _setting(root / "sys/kernel/mm/transparent_hugepage/shmem_enabled")
    huge = next((option for option in options if option in _HUGE), None)
    if setting == "deny" and huge:
        remedy = "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled"
        return Finding("warning", subject, f"mounted with {huge}, but shmem_enabled=deny forbids huge pages", remedy)
    if setting == "force" or huge in _HUGE[:2]:
        return Finding("ok", subject, f"huge pages ({huge or 'shmem_enabled=force'})")
    return Finding(
        "note",
        subject,
        f"small pages ({huge or 'huge=never'}): a GPU engine takes several times as long to map a new pool",
        f"mount -o remount,huge=always {pool_path}, or a tmpfs of its own with huge=always as maru_pool_path",
    )


def _huge_pages(subject: str, page: int, pool_size: int, root: Path) -> Finding:
    folder = root / f"sys/kernel/mm/hugepages/hugepages-{page // 1024}kB"
    try:
        free = int((folder / "free_hugepages").read_text()) * page
    except (OSError, ValueError):
        return Finding("ok", subject, f"huge pages of {format_size(page)}; how many are free is not shown here")
    text = f"huge pages of {format_size(page)}, {format_size(free)} free"
    if free < pool_size:
        return Finding("warning", subject, text, f"sysctl vm.nr_hugepages={-(-pool_size // page)}, or a smaller pool")
    return Finding("ok", subject, text)


def _mount(device: int, root: Path) -> tuple[str, list[str]]:
    """Type and options of the mounted file system with this ``st_dev``."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return "", []
    for line in lines:
        fields = line.split()
        if fields[2:3] == [wanted] and "-" in fields[6:-1]:
            dash = fields.index("-", 6)
            return fields[dash + 1], fields[-1].split(",")
    return "", []


def _setting(path: Path) -> str:
    """The chosen word of a file such as ``always [madvise] never``."""
    try:
        return path.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return ""
