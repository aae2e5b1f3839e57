"""Host DRAM that all engines of one host share: a named file, by default in ``/dev/shm``. The reference backend.

A file with a name, because an anonymous one would die with its holder and could not be handed to other processes. It
is allocated in full when it is made: a page that cannot be had later would end an engine with SIGBUS.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import structlog
from attrs import evolve

from maru_backends.capacity import NO_LIMIT, Available, available_memory, filesystem_type, free_huge_pages, free_space
from maru_backends.checkup import check_cpu
from maru_backends.mapped import MappedRegion, map_fd, map_file, new_descriptor, superblock_of
from maru_backends.origin import UNKNOWN, boot_id, place_of
from maru_core.contracts import BackendProvision, PoolPlan, PoolRequest, PoolWish, StorageBackend, one_pool
from maru_core.errors import BackendError
from maru_core.plugin import hookimpl
from maru_core.pool_format import MAGIC, SUPERBLOCK_SIZE, pack_superblock, unpack_superblock
from maru_core.protocol import PoolDescriptor
from maru_core.sizes import format_size

NAME: Final = "cpu"
DEFAULT_PATH: Final = "/dev/shm"
_OWNER: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_FOLDER: Final = "maru-"
_FILE: Final = "pool-"
_KEPT: Final = ".kept"
#: File systems whose files are memory of the host. Pages of hugetlbfs were set apart before and are counted by itself.
_MEMORY_FILESYSTEMS: Final = ("tmpfs", "ramfs", "devtmpfs", "")
#: How long to wait, in seconds, for another server that allocates its pool in the same place.
_TURN_TIMEOUT: Final = 60.0
#: How often, 10 ms apart, a lock is tried that others hold for a moment only.
_LOOKS: Final = 100


def _mark(location: str) -> Path:
    """The file that says that a pool was left for the next server."""
    return Path(location + _KEPT)


class CpuPool:
    """A pool file as its owner holds it: locked, so that others can tell that it is in use. See contracts.Pool."""

    def __init__(self, region: MappedRegion, fd: int) -> None:
        self._region = region
        self._fd: int | None = fd

    @property
    def region(self) -> MappedRegion:
        """The pool mapped in this process."""
        return self._region

    def leave(self) -> None:
        """Unmap the pool and give up the lock; the file stays, and nobody takes it for an orphan."""
        fd, self._fd = self._fd, None
        if fd is not None:
            self._region.close()
            with suppress(OSError):  # a full disk: then it is only safe while an engine uses it
                _mark(self._region.descriptor.location).touch(0o600)
            os.close(fd)

    def destroy(self) -> None:
        """Unmap the pool and remove its file; engines that still map it keep their pages until they let go."""
        fd, self._fd = self._fd, None
        if fd is None:
            return
        self._region.close()
        path = Path(self._region.descriptor.location)
        with suppress(FileNotFoundError):
            named = path.lstat()
            held = os.fstat(fd)
            if (named.st_dev, named.st_ino) == (held.st_dev, held.st_ino):
                path.unlink()
                _mark(str(path)).unlink(missing_ok=True)
        with suppress(OSError):  # not empty: another pool of this owner is in there
            path.parent.rmdir()
        os.close(fd)


class CpuBackend:
    """Makes and maps pools of host memory. Implements :class:`maru_core.contracts.StorageBackend`."""

    name: Final = NAME
    one_host: Final = True

    def __init__(self, memory: Callable[[], Available] = available_memory) -> None:
        """``memory`` tells how much there is to take."""
        self._memory = memory

    def plan_pools(self, wish: PoolWish, backends: Callable[[str], StorageBackend]) -> Sequence[PoolPlan]:
        """One pool."""
        return one_pool(wish)

    def create_pool(self, request: PoolRequest) -> CpuPool:
        """Allocate ``<path>/maru-<owner>/pool-<n>`` in full, mode 0600, and lock it.

        The size is rounded down to whole pages of the file system. A file that a dead owner left behind is removed; one
        whose owner lives is an error.
        """
        _check_shared(request)
        if not _OWNER.fullmatch(request.owner):
            raise BackendError(
                f"pool owner {request.owner!r} is not a file name: use letters, digits, '.', '_' and '-'"
            )
        root = Path(request.path or DEFAULT_PATH)
        with _opened_folder(root) as root_fd, _turn(root_fd) as alone:
            if alone:
                _remove_orphans(root_fd)
            folder = _FOLDER + request.owner
            with _private_folder(root_fd, folder, root) as folder_fd:
                name = f"{_FILE}{request.pool}"
                location = root.resolve() / folder / name
                descriptor = _plan(request, str(location), os.fstatvfs(folder_fd).f_bsize)
                _remove_stale(folder_fd, name, location)
                _mark(str(location)).unlink(missing_ok=True)
                self._check_room(request, descriptor, folder_fd, root)
                return _allocate(folder_fd, name, descriptor, request)

    def adopt_pool(self, request: PoolRequest) -> CpuPool | None:
        """Take over ``<path>/maru-<owner>/pool-<n>`` if its owner is dead and it is of this boot and of this size."""
        _check_shared(request)
        folder = Path(request.path or DEFAULT_PATH).resolve() / f"{_FOLDER}{request.owner}"
        location = folder / f"{_FILE}{request.pool}"
        try:
            fd = os.open(location, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        pool = None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            descriptor = _existing(fd, request, str(location), os.fstatvfs(fd).f_bsize)
            pool = CpuPool(MappedRegion(descriptor, map_fd(fd, descriptor)), fd)
        except (OSError, BackendError) as error:
            structlog.get_logger(__name__).info("pool not taken over", location=str(location), reason=str(error))
        finally:
            if pool is None:
                os.close(fd)
            else:
                _mark(str(location)).unlink(missing_ok=True)
        return pool

    def map_region(self, descriptor: PoolDescriptor) -> MappedRegion:
        """Map an existing pool; raises BackendError when it is not the one that ``descriptor`` describes."""
        # Shows that the memory is in use although its owner may be dead: nobody takes it for an orphan meanwhile.
        folder = _lock_shared(Path(descriptor.location).parent)
        try:
            return map_file(descriptor, boot_id(), folder)
        except BaseException:
            if folder is not None:
                os.close(folder)
            raise

    def _check_room(self, request: PoolRequest, descriptor: PoolDescriptor, folder_fd: int, root: Path) -> None:
        kind = filesystem_type(os.fstat(folder_fd).st_dev)
        limits = list(free_space(folder_fd, str(root)))
        if kind in _MEMORY_FILESYSTEMS:
            limits.append(self._memory())
        elif kind == "hugetlbfs":
            limits.append(free_huge_pages(os.fstatvfs(folder_fd).f_bsize))
        tightest = min(limits, key=lambda available: available.size, default=NO_LIMIT)
        if descriptor.size > tightest.size:
            raise BackendError(_no_room(descriptor.size, tightest, request.size_setting))


@hookimpl
def maru_storage_backends() -> Sequence[BackendProvision]:
    """The ``cpu`` backend."""
    return [
        BackendProvision(
            NAME,
            CpuBackend,
            summary="shared memory of this host, a file in /dev/shm or maru_pool_path",
            diagnose=check_cpu,
        )
    ]


def _check_shared(request: PoolRequest) -> None:
    if request.shared_by_hosts:
        raise BackendError(
            "pools of cpu are memory of one host, and maru_visibility=hosts asks for pools that several share; make "
            "them of cxl, or set maru_visibility=auto (with mixed, cpu is then for this host and cxl for all)"
        )


def _no_room(size: int, available: Available, setting: str) -> str:
    return (
        f"a pool of {size} bytes ({format_size(size)}) was asked for, {available.size} bytes "
        f"({format_size(available.size)}) are there ({available.source}); lower {setting}, or set maru_pool_path"
    )


def _plan(request: PoolRequest, location: str, page: int) -> PoolDescriptor:
    return new_descriptor(request, NAME, location, request.size // page * page)


def _existing(fd: int, request: PoolRequest, location: str, page: int) -> PoolDescriptor:
    """What is in an open pool file; raises BackendError when it is not what a new one would be."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise BackendError("it is not a private file of this user")
    block = unpack_superblock(os.pread(fd, SUPERBLOCK_SIZE, 0))
    if block.boot_id != boot_id() or block.boot_id == UNKNOWN:
        raise BackendError("it was made before this host was started, or the host does not say when that was")
    if block.place != place_of(fd):
        raise BackendError("it is a copy: engines that go on with the pool write to the original")
    wanted = _plan(request, location, page)
    found = (status.st_size, block.granule, block.entry_count, block.table_offset, block.data_offset)
    asked = (wanted.size, wanted.granule, wanted.entry_count, wanted.table_offset, wanted.data_offset)
    if found != asked:
        names = ("size", "granule", "entries", "table offset", "data offset")
        differ = [
            f"{name} {there}, not {new}" for name, there, new in zip(names, found, asked, strict=True) if there != new
        ]
        raise BackendError(f"it is not what is asked for: {', '.join(differ)}")
    return evolve(wanted, identity=block.identity)


def _allocate(folder_fd: int, name: str, descriptor: PoolDescriptor, request: PoolRequest) -> CpuPool:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        fd = os.open(name, flags, 0o600, dir_fd=folder_fd)
    except OSError as error:
        raise BackendError(f"cannot make pool {descriptor.location}: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            os.posix_fallocate(fd, 0, descriptor.size)
        except OSError as error:
            left = next(iter(free_space(fd, descriptor.location)), NO_LIMIT)
            raise BackendError(f"{error.strerror}: {_no_room(descriptor.size, left, request.size_setting)}") from error
        region = MappedRegion(descriptor, map_fd(fd, descriptor))
        block = superblock_of(descriptor, boot_id(), place_of(fd))
        # Last, so that whoever finds a valid superblock finds a whole pool.
        packed = pack_superblock(block)
        region.buffer[: len(packed)] = packed
        if os.fstat(fd).st_nlink == 0:
            # Somebody who found the new file before it was locked took it for an orphan (see _turn).
            raise BackendError(f"pool {descriptor.location} was removed while it was made: start again")
        structlog.get_logger(__name__).info(
            "pool made", location=descriptor.location, size=descriptor.size, page_size=_page_size(fd)
        )
        return CpuPool(region, fd)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder_fd)
        os.close(fd)
        raise


def _page_size(fd: int) -> int:
    """Bytes of the pages that the file's memory comes in: the huge ones of a hugetlbfs or of a tmpfs that has them."""
    return os.fstat(fd).st_blksize


@contextmanager
def _opened_folder(root: Path) -> Iterator[int]:
    try:
        fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise BackendError(f"cannot use maru_pool_path {root}: {error.strerror}") from error
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def _private_folder(root_fd: int, name: str, root: Path) -> Iterator[int]:
    """Open ``name`` in ``root``, made with mode 0700; refused when somebody else could have put files there."""
    try:
        with suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=root_fd)
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=root_fd)
    except OSError as error:
        raise BackendError(f"cannot make the pool folder {root / name}: {error.strerror}") from error
    try:
        status = os.fstat(fd)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise BackendError(
                f"pool folder {root / name} belongs to uid {status.st_uid} with mode {stat.S_IMODE(status.st_mode):o}; "
                f"it must belong to uid {os.geteuid()} with mode 700: remove it"
            )
        try:
            yield fd
        except BaseException:
            with suppress(OSError):  # not empty: it holds another pool
                os.rmdir(name, dir_fd=root_fd)
            raise
    finally:
        os.close(fd)


@contextmanager
def _turn(root_fd: int) -> Iterator[bool]:
    """One server at a time checks for room and takes it, or several would count the same free memory.

    The lock is on the folder itself, which anybody may take: held for very long, it only takes this protection away.
    Yields whether it was taken.
    """
    deadline = time.monotonic() + _TURN_TIMEOUT
    while True:
        try:
            fcntl.flock(root_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(0.02)
                continue
            yield False
        else:
            yield True
        return


def _remove_orphans(root_fd: int) -> None:
    """Remove pools of this user whose owner is dead: their memory would be missing for ever.

    Not while an engine uses one, nor when a server left it on purpose: the next one may come back for it. The lock is
    the proof of death and the superblock that it is a pool: a name alone is neither.
    """
    for entry in os.listdir(root_fd):
        if not entry.startswith(_FOLDER):
            continue
        try:
            fd = os.open(entry, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=root_fd)
        except OSError:  # of another user, or gone in the meantime
            continue
        try:
            names = os.listdir(fd)
            pools = [name for name in names if name.startswith(_FILE) and _is_pool(fd, name)]
            if any(name.endswith(_KEPT) for name in names):
                continue
            if pools and os.fstat(fd).st_uid == os.geteuid() and not _in_use(fd):
                for name in pools:
                    _remove_unlocked(fd, name)
                with suppress(OSError):  # in use
                    os.rmdir(entry, dir_fd=root_fd)
        finally:
            os.close(fd)


def _lock_shared(folder: Path) -> int | None:
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # then the pool is not there either, which is found next
        return None
    for _ in range(_LOOKS):
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:  # somebody looks for orphans this very moment
            time.sleep(0.01)
        else:
            return fd
    os.close(fd)
    return None


def _in_use(folder_fd: int) -> bool:
    """Whether an engine has a pool of this folder mapped; while not, this descriptor keeps others from doing so."""
    try:
        fcntl.flock(folder_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _is_pool(folder_fd: int, name: str) -> bool:
    """Whether the file begins as a pool does; one that was never finished does not."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder_fd)
    except OSError:
        return False
    try:
        return stat.S_ISREG(os.fstat(fd).st_mode) and os.pread(fd, len(MAGIC), 0) == MAGIC
    finally:
        os.close(fd)


def _remove_stale(folder_fd: int, name: str, location: Path) -> None:
    if not _remove_unlocked(folder_fd, name):
        raise BackendError(f"pool {location} is in use by a server that lives, or is no file of Maru's: remove it")


def _remove_unlocked(folder_fd: int, name: str) -> bool:
    """Remove a pool file unless its owner lives; True when it is not there any more."""
    try:
        fd = os.open(name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=folder_fd)
    except FileNotFoundError:
        return True
    except OSError:  # a link, a folder, or of another user: not made here, not removed here
        return False
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return False
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(name, dir_fd=folder_fd)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
