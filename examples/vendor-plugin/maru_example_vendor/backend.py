"""Pools as a server holds them: a locked file each, in a folder that an operator has marked."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import stat
import struct
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from attrs import evolve

from maru_core.contracts import PoolPlan, PoolRequest, PoolWish, Region, StorageBackend, one_pool
from maru_core.errors import BackendError
from maru_core.pool_format import SUPERBLOCK_SIZE, Superblock, pack_superblock, plan_pool, unpack_superblock
from maru_core.protocol import PoolDescriptor
from maru_core.sizes import parse_size
from maru_example_vendor.region import FileRegion, map_open, map_pool

MARK: Final = ".maru-example"
#: A plugin's variables start with MARU_, its name in capitals, and an underscore: then Maru does not warn of them.
SPARE: Final = "MARU_EXAMPLE_SPARE"
FOLDER: Final = "MARU_EXAMPLE_PATH"
_OWNER: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_PAGE: Final = 4096


class FilePool:
    """A pool file, locked as long as its server has it."""

    def __init__(self, region: FileRegion, fd: int) -> None:
        self.region: Final = region
        self._fd: int | None = fd

    def leave(self) -> None:
        """Unlock it and let it be."""
        fd, self._fd = self._fd, None
        if fd is not None:
            self.region.close()
            os.close(fd)

    def destroy(self) -> None:
        """Remove it. Engines that have it mapped keep its pages until they let go."""
        if self._fd is not None:
            with suppress(FileNotFoundError):
                os.unlink(self.region.descriptor.location)
        self.leave()


class ExampleBackend:
    """See ``maru_core.contracts.StorageBackend`` for what each method must do."""

    one_host: Final = True

    def __init__(self, name: str, environ: Mapping[str, str] = os.environ) -> None:
        self.name: Final = name
        self._environ: Final = environ

    def plan_pools(self, wish: PoolWish, backends: Callable[[str], StorageBackend]) -> Sequence[PoolPlan]:
        """One pool. With ``mixed`` the common path is that of other backends too, so there is one of our own."""
        return one_pool(evolve(wish, path=self._environ.get(FOLDER, "") or wish.path))

    def create_pool(self, request: PoolRequest) -> FilePool:
        """Make the file in full now: a disk that is full later would end an engine."""
        path = _file(request)
        _remove_left_over(path)
        descriptor = self._plan(request, path)
        self._check_room(request, descriptor, path.parent)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise BackendError(f"cannot make pool {path}: {error.strerror}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(fd, 0, descriptor.size)
            block = Superblock(
                descriptor.granule,
                descriptor.entry_count,
                descriptor.table_offset,
                descriptor.data_offset,
                descriptor.identity,
                _boot(),
                _place(fd),
            )
            os.pwrite(fd, pack_superblock(block), 0)
            return FilePool(map_open(fd, descriptor), fd)
        except BaseException as error:
            os.unlink(path)
            os.close(fd)
            if isinstance(error, OSError):
                text = f"a pool of {descriptor.size} bytes was asked for, not so many bytes are there ({path})"
                raise BackendError(f"{text}: {error.strerror}; lower {request.size_setting}") from error
            raise

    def adopt_pool(self, request: PoolRequest) -> FilePool | None:
        """The file that an earlier server of this owner left, if it is that very one, of this boot, and nobody's."""
        try:
            path = _file(request)
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except (OSError, BackendError):
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            plan = self._plan(request, path)
            block = unpack_superblock(os.pread(fd, SUPERBLOCK_SIZE, 0))
            status = os.fstat(fd)
            private = status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o077
            same = (block.granule, block.entry_count, block.table_offset, block.data_offset) == (
                plan.granule,
                plan.entry_count,
                plan.table_offset,
                plan.data_offset,
            )
            ours = block.place == _place(fd) and block.boot_id == _boot() != bytes(16)
            if not (private and same and ours and status.st_size == plan.size):
                raise BackendError(f"{path} is another pool")
            return FilePool(map_open(fd, evolve(plan, identity=block.identity)), fd)
        except (OSError, BackendError):
            os.close(fd)
            return None

    def map_region(self, descriptor: PoolDescriptor) -> Region:
        """A client's mapping."""
        return map_pool(descriptor)

    def _plan(self, request: PoolRequest, path: Path) -> PoolDescriptor:
        size = request.size // _PAGE * _PAGE
        entry_count, data_offset = plan_pool(size, request.granule, size_setting=request.size_setting)
        return PoolDescriptor(
            pool=request.pool,
            backend=self.name,
            location=str(path),
            identity=secrets.token_bytes(16),
            size=size,
            granule=request.granule,
            entry_base=request.entry_base,
            entry_count=entry_count,
            table_offset=SUPERBLOCK_SIZE,
            data_offset=data_offset,
        )

    def _check_room(self, request: PoolRequest, descriptor: PoolDescriptor, folder: Path) -> None:
        spare = self._environ.get(SPARE, "") or "64M"
        try:
            reserve = parse_size(spare)
        except ValueError:
            raise BackendError(f"{SPARE} is {spare!r}; expected a size such as 64M") from None
        found = os.statvfs(folder)
        free = max(0, found.f_bavail * found.f_frsize - reserve)
        if descriptor.size > free:
            raise BackendError(
                f"a pool of {descriptor.size} bytes was asked for, {free} bytes are there ({folder}, less {SPARE} "
                f"{spare}); lower {request.size_setting}"
            )


def _file(request: PoolRequest) -> Path:
    """Where the pool is, in a folder that bears the mark; raises BackendError."""
    if request.shared_by_hosts:
        raise BackendError("pools of example are files of one host; use it with maru_visibility=auto")
    if request.path is None or not _OWNER.fullmatch(request.owner):
        raise BackendError(
            f"example needs a folder, got {request.path} for {request.owner!r}; set {FOLDER} or maru_pool_path"
        )
    folder = Path(request.path)
    if not (folder / MARK).exists():
        raise BackendError(f"{folder} is not marked for pools of example; is it mounted? If so: touch {folder / MARK}")
    return folder.resolve() / f"{request.owner}.{request.pool}.pool"


def _remove_left_over(path: Path) -> None:
    """Remove the file of a server that was killed; raises BackendError while its server lives."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return
    except OSError as error:
        raise BackendError(f"{path} is in the way and no pool: {error.strerror}; remove it") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
    except BlockingIOError:
        raise BackendError(f"pool {path} is in use by a server that lives") from None
    finally:
        os.close(fd)


def _boot() -> bytes:
    try:
        return uuid.UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip()).bytes
    except (OSError, ValueError):
        return bytes(16)


def _place(fd: int) -> bytes:
    """Which file this is: a copy of it is another pool."""
    status = os.fstat(fd)
    return struct.pack("<QQ", status.st_dev, status.st_ino)
