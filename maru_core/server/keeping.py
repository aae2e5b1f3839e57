"""Keeps the runtime folder from those who clean ``/tmp``: they remove what nobody touched for days."""

from __future__ import annotations

import fcntl
import os
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

from maru_core.runtime_dir import RuntimeDir

#: Seconds between two times that every file is touched; cleaners wait for days.
TOUCH_INTERVAL = 3600.0
#: Files that are touched before others get their turn.
_TOUCHED = 256


class FolderKeeper:
    """Holds shared locks on the folders, which systemd's cleaner leaves alone then, and touches their files.

    ``clock`` in seconds, monotonic. ``pool_paths``: folders that stay without a lock, as backends lock them themselves.
    """

    def __init__(self, runtime: RuntimeDir, clock: Callable[[], float], pool_paths: Iterable[str] = ()) -> None:
        self._runtime = runtime
        elsewhere = {os.path.realpath(path) for path in pool_paths}
        self._lockable = [path for path in (runtime.path, runtime.sessions) if os.path.realpath(path) not in elsewhere]
        self._clock = clock
        self._due = clock() + TOUCH_INTERVAL
        self._waiting: deque[Path] = deque()
        #: Descriptors that hold a lock, by folder.
        self._held: dict[Path, int] = {}

    def __call__(self) -> None:
        """Do a little of what is due. Takes microseconds mostly; never raises. Call about twice a second."""
        for folder in self._lockable:
            if folder not in self._held:
                self._hold(folder)
        now = self._clock()
        if now >= self._due:
            self._due = now + TOUCH_INTERVAL
            self._waiting = deque(self._everything())
        for _ in range(min(_TOUCHED, len(self._waiting))):
            try:
                os.utime(self._waiting.popleft(), follow_symlinks=False)
            except OSError:
                continue  # it ended meanwhile

    def close(self) -> None:
        """Let go of the folders."""
        while self._held:
            os.close(self._held.popitem()[1])

    def _hold(self, folder: Path) -> None:
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            # A cleaner is just at work: next time.
            os.close(descriptor)
            return
        self._held[folder] = descriptor

    def _everything(self) -> list[Path]:
        found = [self._runtime.path]
        for folder in (self._runtime.path, self._runtime.sessions):
            try:
                found += folder.iterdir()
            except OSError:
                continue
        return found
