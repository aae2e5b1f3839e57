"""Proof of death: a file per session that its owner locks, and that the kernel unlocks when the owner is gone.

The server opens each file itself and judges by that descriptor, so unlinking or recreating the name changes nothing. A
stopped process (SIGSTOP) still holds its lock; a killed one does not.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class SessionLocks:
    """Lock files of all sessions, in a private folder that only this server uses."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptors: dict[int, int] = {}

    def prepare(self) -> None:
        """Create the folder and remove what an earlier server left there."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        for stale in self._folder.glob("*.lock"):
            stale.unlink(missing_ok=True)

    def create(self, session: int) -> str:
        """Make the lock file of a new session; returns its path. Raises OSError."""
        path = self._path(session)
        self._descriptors[session] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        return str(path)

    def held(self, session: int) -> bool:
        """Whether somebody holds the lock now."""
        descriptor = self._descriptors[session]
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        return False

    def remove(self, session: int) -> None:
        """Forget the session and unlink its file."""
        descriptor = self._descriptors.pop(session, None)
        if descriptor is not None:
            self._path(session).unlink(missing_ok=True)
            os.close(descriptor)

    def close(self) -> None:
        """Forget all sessions."""
        for session in list(self._descriptors):
            self.remove(session)

    def _path(self, session: int) -> Path:
        return self._folder / f"{session:016x}.lock"
