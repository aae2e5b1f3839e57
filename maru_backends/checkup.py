"""What ``maru doctor`` says of the memory that the built-in backends use."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from maru_backends import devdax
from maru_backends.capacity import available_memory, filesystem_type, free_space
from maru_backends.devdax import DaxDevice
from maru_backends.locks import is_owned
from maru_backends.ownership import Known
from maru_backends.places import Place, huge_pages_allowed, named_twice, shares
from maru_core.config import MaruConfig
from maru_core.contracts import Finding
from maru_core.errors import BackendError
from maru_core.sizes import format_size

ROOT: Final = Path("/")
_SHM: Final = "/dev/shm"


def check_cpu(config: MaruConfig, root: Path = ROOT) -> Sequence[Finding]:
    """The folder that ``cpu`` pools are made in, and huge pages."""
    folder = config.pool_path_of("cpu") or _SHM
    used = _is_used(config, "cpu")
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        text = f"cannot be used: {error.strerror}"
        return [Finding("error" if used else "note", folder, text, "set maru_pool_path to another folder")]
    try:
        kind = filesystem_type(os.fstat(fd).st_dev, root) or "unknown file system"
        status = os.fstatvfs(fd)
        space = next(iter(free_space(fd, folder)), None)
    finally:
        os.close(fd)
    size = format_size(status.f_blocks * status.f_frsize) if status.f_blocks else "without a limit"
    free = "" if space is None else f", {format_size(space.size)} free"
    text = f"{kind} of {size}{free}, pages of {format_size(status.f_bsize)}"
    memory = available_memory(root)
    found = [
        Finding("ok", folder, text),
        Finding("ok", "memory", f"{format_size(memory.size)} can be taken ({memory.source})"),
    ]
    wanted = config.pool_size_of("cpu") if used else None
    if wanted and space is not None and space.size < wanted:
        found.append(
            Finding(
                "warning",
                folder,
                f"a pool of {format_size(wanted)} does not fit into what is free now (unless one is there already)",
                f"lower {config.size_setting_of('cpu')}, or in a container raise --shm-size",
            )
        )
    return [*found, *_huge_pages(root)]


def check_cxl(
    config: MaruConfig, sysfs: Path = devdax.SYSFS, dev: Path = devdax.DEV, root: Path = ROOT
) -> Sequence[Finding]:
    """Every DAX device of this host and who has it, and what the settings name."""
    used = _is_used(config, "cxl")
    paths = (config.pool_path_of("cxl") or "").split(",") if config.pool_path_of("cxl") else []
    named = {os.path.realpath(path) for path in paths}
    found: list[Finding] = []
    try:
        devices = devdax.discover(sysfs, dev)
    except BackendError as error:
        return [Finding("error" if used else "warning", "cxl", str(error))]
    for device in devices:
        found += _device(device, broken=used and device.path in named)
    if not devices:
        found.append(Finding("note", "cxl", "this kernel has no DAX device", "docs/cxl.md: how to set one up"))
    known = {device.path for device in devices}
    for path in paths if used else ():
        if os.path.realpath(path) not in known:
            found += _named(path, sysfs)
    if used:
        found += _together(config, paths, sysfs)
    usable = [device.path for device in devices if device.problem is None]
    if used and not paths and len(usable) != 1:
        text = f"{len(usable)} devices could be used and none is named"
        found.append(
            Finding("error", "maru_cxl_pool_path", text, "set it to the devices to use, with commas in between")
        )
    if devices and not huge_pages_allowed(root):
        text = "huge pages are off for this process: it would end with SIGBUS when it uses a device"
        found.append(
            Finding("error" if used else "warning", "huge pages", text, "do not start it with PR_SET_THP_DISABLE")
        )
    return found


def _device(device: DaxDevice, *, broken: bool) -> Iterator[Finding]:
    if device.problem is not None:
        reason, _, remedy = device.problem.partition(": ")
        yield Finding("error" if broken else "warning", device.path, f"{device.describe()}: {reason}", remedy)
        return
    try:
        state = _state(Place.of_device(device))
    except BackendError as error:
        yield Finding("error" if broken else "warning", device.path, f"{device.describe()}: {error}")
    else:
        yield Finding("ok", device.path, f"{device.describe()}\n{state}")
    for doubt, remedy in device.doubts:
        yield Finding("warning", device.path, doubt, remedy)


def _named(path: str, sysfs: Path) -> Iterator[Finding]:
    """What a setting names that is no device of this host."""
    try:
        place = Place.find(path, "", sysfs)
        fresh = place.made or not os.path.exists(place.path)
        state = "nothing there yet" if fresh else _state(place)
    except BackendError as error:
        yield Finding("error", path, str(error))
        return
    text = f"a file stands in for a device, for development only: {state}"
    yield Finding("warning", path, text, "set maru_cxl_pool_path to a DAX device")


def _together(config: MaruConfig, paths: Sequence[str], sysfs: Path) -> Iterator[Finding]:
    """Which of the named devices are the same, and which the size leaves unused."""
    size, setting = config.pool_size_of("cxl"), config.size_setting_of("cxl")
    try:
        places = [Place.find(path, "", sysfs) for path in paths]
    except BackendError:
        return  # told of by itself
    for path in named_twice(places):
        yield Finding("error", path, "is named twice, by another name or node", "name it once in maru_cxl_pool_path")
    if size is None:
        return
    for place, share in zip(places, shares(places, size), strict=True):
        if not share:
            text = f"stays unused: {setting} is {format_size(size)}, which is reached without it"
            yield Finding("warning", place.path, text, f"raise {setting}, or leave it out of maru_cxl_pool_path")


def _state(place: Place) -> str:
    """Whose it is; raises BackendError when it cannot be looked at."""
    fd = place.open()
    try:
        known, owned = place.look(fd, None), is_owned(fd)
    finally:
        os.close(fd)
    return _whose(known, owned=owned)


def _whose(known: Known, *, owned: bool) -> str:
    record = known.record
    if record is None:
        who = "does not say whose it is" if known.damaged or known.block is not None else "never used by Maru"
        return f"in use, {who}" if owned else who
    who = record.describe()
    if owned:
        return f"in use by {who}"
    return {
        "released": f"free, last used by {who}",
        "left": f"left for the next server by {who}",
        "used": f"not released by {who}, which has ended, or runs where no lock reaches",
    }[record.state]


def _huge_pages(root: Path) -> Iterator[Finding]:
    mode = _chosen(root / "sys/kernel/mm/transparent_hugepage/shmem_enabled")
    if mode:
        helps = mode in ("always", "within_size", "force", "advise")
        remedy = "" if helps else "mount a tmpfs with huge=always, or hugetlbfs, and set maru_pool_path to it"
        yield Finding("ok" if helps else "note", "huge pages", f"shared memory: {mode}", remedy)
    for folder in sorted((root / "sys/kernel/mm/hugepages").glob("hugepages-*kB")):
        total, free = _count(folder / "nr_hugepages"), _count(folder / "free_hugepages")
        if total:
            text = f"{free} of {total} pages of {folder.name.removeprefix('hugepages-')} are free (hugetlbfs)"
            yield Finding("ok", "huge pages", text)


def _is_used(config: MaruConfig, backend: str) -> bool:
    return backend in (config.write_order if config.storage_backend == "mixed" else (config.storage_backend,))


def _chosen(path: Path) -> str:
    """The word in brackets, as the kernel shows a choice."""
    try:
        return path.read_text().partition("[")[2].partition("]")[0]
    except (OSError, ValueError):
        return ""


def _count(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0
