"""Locks that the kernel lets go when the memory that they protect cannot be written any more.

A lock of an open file description goes with the last reference to that description, and a mapping is one: whoever maps
a device through the description that it locked holds the lock until it is unmapped, in forked children too, whatever
becomes of descriptors, and however the process ends.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time
from collections.abc import Callable
from typing import Final

from maru_core.errors import BackendError

#: struct flock of 64-bit Linux: type, whence, start, length, process. The last one must be 0.
_LOCK: Final = struct.Struct("@hhqqi0q")
#: The byte that is locked; nothing is there that anybody else would lock.
_BYTE: Final = (1 << 62) - 1
#: Seconds between two attempts.
_PAUSE: Final = 0.02
_TAKEN: Final = (errno.EAGAIN, errno.EACCES)


def lock_shared(fd: int, patience: float = 0.0) -> bool:
    """Hold the shared lock by ``fd``, open for reading; False when it could not be had within ``patience`` seconds.

    Raises BackendError where there are no such locks.
    """
    return _repeat(lambda: _set(fd, fcntl.F_RDLCK), patience)


def lock_alone(fd: int, patience: float = 0.0) -> bool:
    """Hold the exclusive lock by ``fd``, open for writing; otherwise as :func:`lock_shared`."""
    return _repeat(lambda: _set(fd, fcntl.F_WRLCK), patience)


def unlock(fd: int) -> None:
    """Let go of either."""
    _set(fd, fcntl.F_UNLCK)


def own(fd: int, patience: float = 0.0) -> bool:
    """Take the ``flock`` of the owner; False when another one has it for longer than ``patience`` seconds."""
    return _repeat(lambda: _flock(fd, fcntl.LOCK_EX), patience)


def is_owned(fd: int) -> bool:
    """Whether a process has the ``flock`` of the owner now. Whoever wants it at this very moment has to try again."""
    if not _flock(fd, fcntl.LOCK_SH):
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False


def _flock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise _no_locks(error) from error
    return True


def _set(fd: int, kind: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _LOCK.pack(kind, os.SEEK_SET, _BYTE, 1, 0))
    except OSError as error:
        if error.errno in _TAKEN:
            return False
        raise _no_locks(error) from error
    return True


def _repeat(attempt: Callable[[], bool], patience: float) -> bool:
    deadline = time.monotonic() + patience
    while not attempt():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_PAUSE)
    return True


def _no_locks(error: OSError) -> BackendError:
    return BackendError(
        f"this kernel or file system has no locks that could keep the users of a pool apart: {error.strerror}; use a "
        f"local device or file system on Linux 3.15 or later"
    )
