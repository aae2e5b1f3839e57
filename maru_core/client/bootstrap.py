"""``maru_server_url = "auto"``: this user's server on this host, started when there is none. Never two of them."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog

import maru_core
from maru_core.config import MaruConfig
from maru_core.errors import BackendError, ConfigError, Unavailable

#: Exit code of a server that found another one in its runtime folder.
EXIT_TAKEN = 3
#: Allocation granule of a started server when neither the settings nor the engine ask for another, in bytes.
DEFAULT_GRANULE = 64 * 1024
#: Longest wait for a server that was started, seconds.
START_TIMEOUT = 10.0
_POLL = 0.02
_LOG_TAIL = 400


class ServerStarter:
    """Sees to it that somebody listens on the runtime folder's socket. Used by one background thread."""

    def __init__(self, config: MaruConfig, folder: Path, granule: int | None) -> None:
        self._config = config
        self._folder = folder
        self._granule = granule or config.chunk_size or DEFAULT_GRANULE

    def __call__(self, closing: Callable[[], bool]) -> None:
        """Return when a server listens, frozen or not; start one if none does.

        Raises ConfigError when the folder cannot be used, BackendError when the server that was started fails, and
        Unavailable when neither happens in START_TIMEOUT. Returns early when ``closing()`` is true.
        """
        if is_listening(self._folder / "server.sock"):
            return
        deadline = time.monotonic() + START_TIMEOUT
        with _turn(self._folder / "start.lock", deadline, closing) as mine:
            # Another engine may have started one while this one waited for its turn.
            if mine and not is_listening(self._folder / "server.sock"):
                self._start(deadline, closing)

    def _start(self, deadline: float, closing: Callable[[], bool]) -> None:
        log_path = self._folder / "server.log"
        process = self._spawn(log_path)
        structlog.get_logger(__name__).info("maru server started", pid=process.pid, log=str(log_path))
        while time.monotonic() < deadline and not closing():
            if is_listening(self._folder / "server.sock"):
                return
            code = process.poll()
            if code not in (None, EXIT_TAKEN):
                raise BackendError(
                    f"the Maru server that maru_server_url=auto started ended with code {code}: "
                    f"{_tail(log_path)}; see {log_path}"
                )
            time.sleep(_POLL)
        if not closing():
            raise Unavailable(f"no Maru server listens in {self._folder} after {START_TIMEOUT:g} s; see {log_path}")

    def _spawn(self, log_path: Path) -> subprocess.Popen[bytes]:
        """Start the server as a process of its own: it outlives this engine."""
        config = self._config
        command = [sys.executable, "-m", "maru_core.cli", "serve"]
        options = {
            "--runtime-dir": self._folder,
            "--storage-backend": config.storage_backend,
            "--pool-size": config.pool_size_of(config.storage_backend),
            "--granule": self._granule,
            "--idle-exit": config.idle_exit,
            "--lease-share": config.lease_share,
        }
        if config.pool_path is not None:
            options["--pool-path"] = config.pool_path
        for option, value in options.items():
            command += [option, str(value)]
        # The child runs in /, so what made this package importable here must not be a relative path there.
        source = str(Path(maru_core.__file__).resolve().parent.parent)
        paths = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, source])}
        descriptor = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=descriptor,
                stderr=descriptor,
                cwd="/",
                env=environ,
                start_new_session=True,
            )
        finally:
            os.close(descriptor)
        # Collects the exit status, so that the server leaves no zombie behind in a long-lived engine.
        threading.Thread(target=process.wait, name="maru-server-reaper", daemon=True).start()
        return process


def private_folder(path: str) -> Path:
    """The runtime folder, made if need be; raises ConfigError unless it is ours alone and a socket fits in it."""
    folder = Path(path)
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = os.lstat(folder)
    except OSError as error:
        raise ConfigError(
            f"maru_runtime_dir {folder} cannot be made or used: {error.strerror}; set it to a folder you may write"
        ) from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(
            f"maru_runtime_dir {folder} belongs to uid {status.st_uid} with mode {stat.S_IMODE(status.st_mode):o}; "
            f"it must be a folder of uid {os.geteuid()} with mode 700"
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"maru_runtime_dir {folder} is not writable; set it to a folder you may write")
    return folder


def is_listening(path: Path) -> bool:
    """Whether some process listens on this unix socket: true for a server that is stopped, false once it is dead."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except BlockingIOError:
            return True  # its queue is full, which only a listener has
        except OSError as error:
            if error.errno in (errno.ECONNREFUSED, errno.ENOENT):
                return False
            raise ConfigError(f"the Maru server's socket {path} cannot be used: {error.strerror}") from error
        return True


@contextmanager
def _turn(path: Path, deadline: float, closing: Callable[[], bool]) -> Iterator[bool]:
    """Hold an exclusive lock on ``path``; False when it was not to be had before the deadline."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        while not closing():
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    break
                time.sleep(_POLL)
            else:
                yield True
                return
        yield False
    finally:
        os.close(descriptor)


def _tail(path: Path) -> str:
    try:
        text = path.read_bytes()[-_LOG_TAIL:].decode(errors="replace").strip()
    except OSError as error:
        return f"its log cannot be read ({error.strerror})"
    return text or "it wrote nothing"
