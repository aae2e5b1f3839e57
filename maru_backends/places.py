"""Where a pool of whole aligned ranges can be: a DAX device, or a file that stands in for one during development."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

from attrs import field, frozen

from maru_backends import devdax
from maru_backends.capacity import NO_LIMIT, Available, filesystem_type, free_space
from maru_backends.devdax import DaxDevice
from maru_backends.ownership import MAGIC as RECORD_MAGIC
from maru_backends.ownership import SLOTS, Known, read_record
from maru_core.errors import BackendError
from maru_core.pool_format import MAGIC, SUPERBLOCK_SIZE, unpack_superblock
from maru_core.sizes import format_size

_MEMORY_FILESYSTEMS: Final = ("tmpfs", "ramfs", "devtmpfs", "")
_FLAGS: Final = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NOCTTY


class Flusher(Protocol):
    """Write-back and invalidation of the cache lines of mapped memory; each returns when that is complete."""

    def writeback(self, address: int, length: int) -> None:
        """Stores of this host to these bytes become visible to others."""

    def invalidate(self, address: int, length: int) -> None:
        """Later loads of these bytes come from memory."""


@frozen
class Place:
    """One device or stand-in. ``align`` and ``capacity`` in bytes.

    ``path``: its real one. ``capacity`` ``None``: a file that is made as large as a pool needs. ``made``: a file in a
    folder, which goes with its pool. ``device``: ``None`` for a file.
    """

    path: str
    align: int
    capacity: int | None
    device: DaxDevice | None = None
    made: bool = False
    number: int = field(default=0, repr=False)

    @classmethod
    def find(cls, path: str, name: str, sysfs: Path) -> Place:
        """What ``path`` stands for, links followed; in a folder it is the file ``name``. Raises BackendError.

        Nothing is opened or made. A device that cannot be used is refused with the remedy.
        """
        real = os.path.realpath(path)
        try:
            status = os.stat(real)
        except FileNotFoundError as error:
            folder = os.path.dirname(real)
            if folder == str(devdax.DEV) or not os.path.isdir(folder):
                device = devdax.find(path, sysfs)  # raises: it is not there
                raise BackendError(f"{device.path} appeared this very moment: start again") from error
            return cls(real, devdax.DEFAULT_ALIGN, None)
        except OSError as error:
            raise BackendError(f"cannot use {path}: {error.strerror}") from error
        if stat.S_ISDIR(status.st_mode):
            return cls(os.path.join(real, name), devdax.DEFAULT_ALIGN, None, made=True)
        if stat.S_ISREG(status.st_mode):
            capacity = status.st_size // devdax.DEFAULT_ALIGN * devdax.DEFAULT_ALIGN if status.st_size else None
            return cls(real, devdax.DEFAULT_ALIGN, capacity)
        if stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode):
            return cls.of_device(devdax.find(real, sysfs), status.st_rdev)
        raise BackendError(f"{path} is neither a DAX device nor a file or folder that could stand in for one")

    @classmethod
    def of_device(cls, device: DaxDevice, number: int = 0) -> Place:
        """That of a device; raises BackendError when it cannot be used. ``number``: of its node, if that is known."""
        if device.problem is not None:
            raise BackendError(f"cannot use {device.path}: {device.problem}")
        return cls(device.path, device.align, device.capacity, device, number=number)

    def memory(self) -> tuple[str, int, int]:
        """What tells it from others: a file may have several names, a device several nodes."""
        try:
            status = os.stat(self.path)
        except OSError:  # a file that is still to be made
            return self.path, 0, 0
        if stat.S_ISREG(status.st_mode):
            return "file", status.st_dev, status.st_ino
        return "device", status.st_rdev, 0

    def floor(self, size: int) -> int:
        """``size`` in whole alignments."""
        return size // self.align * self.align

    def describe(self) -> str:
        """What one has to know of it, in a line."""
        if self.device is not None:
            return self.device.describe()
        return f"{self.path}: a file that stands in for a device, align {format_size(self.align)}"

    def open(self, *, make: bool = False) -> int:
        """A descriptor for reading and writing; raises BackendError. ``make``: a file that is not there is made."""
        try:
            fd = os.open(self.path, _FLAGS | (os.O_CREAT if make and self.device is None else 0), 0o600)
        except OSError as error:
            raise BackendError(f"cannot open {self.path}: {error.strerror}{self._remedy(error)}") from error
        try:
            self._check(os.fstat(fd))
        except BaseException:
            os.close(fd)
            raise
        return fd

    def still_names(self, fd: int) -> bool:
        """Whether the path is that of the open file or node, and not of another one or of none by now."""
        try:
            return os.path.samestat(os.stat(self.path, follow_symlinks=False), os.fstat(fd))
        except OSError:
            return False

    def map(self, fd: int, size: int) -> mmap.mmap:
        """Map whole alignments from the start, shared and writable; raises BackendError."""
        if size <= 0 or size % self.align:
            raise BackendError(
                f"{size} bytes are not whole alignments of {self.align} bytes, in which {self.path} is mapped"
            )
        if self.capacity is not None and size > self.capacity:
            raise BackendError(f"{self.path} has {self.capacity} bytes that can be mapped, {size} are asked for")
        if self.device is not None and not huge_pages_allowed():
            raise BackendError(
                f"huge pages are off for this process (prctl PR_SET_THP_DISABLE), and the first use of {self.path} "
                f"would end it with SIGBUS: start it without that, its children inherit it"
            )
        try:
            return mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        except (OSError, ValueError, OverflowError) as error:
            doubts = [] if self.device is None else self.device.doubts
            hints = "".join(f"; {doubt}: {remedy}" for doubt, remedy in doubts)
            raise BackendError(f"cannot map {size} bytes: {error} ({self.describe()}){hints}") from error

    def look(self, fd: int, flusher: Flusher | None) -> Known:
        """What the first page of an open one says; zero where it is a file that is not that long."""
        if self.device is None and os.fstat(fd).st_size < self.align:
            # Too short to be mapped: new, or cut by somebody although it says whose it is.
            try:
                page = os.pread(fd, SUPERBLOCK_SIZE, 0).ljust(SUPERBLOCK_SIZE, b"\0")
            except OSError as error:
                raise BackendError(f"cannot read {self.path}: {error.strerror}") from error
        else:
            with self.map(fd, self.align) as mapping:
                if flusher is not None:  # another host may have written it since it was in a cache here
                    flusher.invalidate(address_of(mapping), SUPERBLOCK_SIZE)
                page = mapping[:SUPERBLOCK_SIZE]
        record, sequence, damaged = read_record(page)
        try:
            block = unpack_superblock(page)
        except BackendError:
            block = None
        magics = [page[: len(MAGIC)] == MAGIC, *(page[at : at + len(RECORD_MAGIC)] == RECORD_MAGIC for at in SLOTS)]
        if self.device is None and any(page) and not any(magics):
            raise BackendError(f"{self.path} is no file of Maru's, and what it holds would be lost: remove it first")
        return Known(record, sequence, damaged or (block is None and magics[0]), block)

    def allocate(self, fd: int, size: int, memory: Callable[[], Available], setting: str) -> None:
        """Make sure that ``size`` bytes, as ``setting`` asks for, are there; raises BackendError with both sizes."""
        if self.capacity is not None and size > self.capacity:
            source = "" if self.device is None else f", align {format_size(self.align)}"
            raise BackendError(no_room(size, Available(self.capacity, f"the capacity of {self.path}{source}"), setting))
        if self.device is not None:
            return
        limits = list(free_space(fd, self.path))
        status = os.fstat(fd)
        if filesystem_type(status.st_dev) in _MEMORY_FILESYSTEMS:
            limits.append(memory())
        tightest = min(limits, key=lambda available: available.size, default=NO_LIMIT)
        if size - status.st_blocks * 512 > tightest.size:
            raise BackendError(no_room(size, tightest, setting))
        try:
            if self.capacity is None and status.st_size > size:
                os.ftruncate(fd, size)
            # In full, or a page that cannot be had later would end an engine.
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            left = next(iter(free_space(fd, self.path)), NO_LIMIT)
            raise BackendError(f"{error.strerror}: {no_room(size, left, setting)}") from error

    def _check(self, status: os.stat_result) -> None:
        if self.device is not None:
            if not stat.S_ISCHR(status.st_mode) or self.number not in (0, status.st_rdev):
                raise BackendError(f"{self.path} became something else while it was opened: start again")
        elif not stat.S_ISREG(status.st_mode):
            raise BackendError(f"{self.path} is neither a DAX device nor a plain file")
        elif status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o022:
            raise BackendError(
                f"{self.path} belongs to uid {status.st_uid} with mode {stat.S_IMODE(status.st_mode):o}; a file that "
                f"stands in for a device must belong to uid {os.geteuid()}, and nobody else may write to it"
            )

    def _remedy(self, error: OSError) -> str:
        if self.device is None:
            return ""
        if error.errno in (errno.EACCES, errno.EPERM):
            return "; give this user read and write access to the node, best with a udev rule (docs/cxl.md)"
        if error.errno in (errno.ENXIO, errno.ENODEV):
            return f"; its driver is gone: `daxctl reconfigure-device --mode=devdax {self.device.name}`"
        return ""


def named_twice(places: Sequence[Place]) -> list[str]:
    """Paths of those whose memory another one has, too."""
    memories = [place.memory() for place in places]
    return sorted({place.path for place, memory in zip(places, memories, strict=True) if memories.count(memory) > 1})


def shares(places: Sequence[Place], size: int) -> list[int]:
    """How many bytes each of ``places`` gives to ``size`` bytes: what it has, in their order, until that is reached."""
    found: list[int] = []
    for number, place in enumerate(places):
        rest = size - sum(found)
        most = -(-rest // (len(places) - number)) if place.capacity is None else place.capacity
        found.append(place.floor(min(rest, most)))
    return found


def address_of(mapping: mmap.mmap) -> int:
    """Where a mapping is in this process."""
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


def huge_pages_allowed(root: Path = Path("/")) -> bool:
    """Whether this process may map huge pages, which a device that is aligned to them needs; True if not known."""
    try:
        status = (root / "proc/self/status").read_text()
    except OSError:
        return True
    return "\nTHP_enabled:\t0\n" not in status


def no_room(size: int, available: Available, setting: str) -> str:
    """The text of an error with both sizes."""
    return (
        f"a pool of {size} bytes ({format_size(size)}) was asked for, {available.size} bytes "
        f"({format_size(available.size)}) are there ({available.source}); lower {setting}, or name more "
        f"devices in maru_cxl_pool_path"
    )
