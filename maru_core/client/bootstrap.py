"""``maru_server_url = "auto"``: this user's server on this host, started when there is none. Never two of them."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import maru_core
from maru_core import logs
from maru_core.config import PREFIX, MaruConfig
from maru_core.errors import BackendError, ConfigError, Unavailable
from maru_core.runtime_dir import RuntimeDir

#: Exit code of a server that found another one in its runtime folder.
EXIT_TAKEN = 3
#: Allocation granule of a started server when neither the settings nor the engine ask for another, in bytes.
DEFAULT_GRANULE = 64 * 1024
#: Longest wait for a server that was started, seconds.
START_TIMEOUT = 10.0
#: Settings of pools that a started server is told when they are set.
_POOL_SETTINGS = (
    *("pool_size", "pool_path", "cpu_pool_size", "cxl_pool_size", "cxl_pool_path"),
    *("write_order", "read_order", "demote", "promote", "visibility"),
)
_POLL = 0.02
_RETRY = 0.2
_LOG_TAIL = 400
#: Runs its arguments as a grandchild and exits, so that the grandchild is no descendant of whoever started this.
#: Engines pin their threads to cores that they keep busy, and a process inherits that: the server may use every core.
_DETACH = """
import os, sys
if os.fork():
    os._exit(0)
os.sched_setaffinity(0, range(os.cpu_count() or 1))
os.execv(sys.argv[1], sys.argv[1:])
"""


class ServerStarter:
    """Sees to it that somebody listens on the runtime folder's socket. Used by one background thread."""

    def __init__(self, config: MaruConfig, folder: RuntimeDir, granule: int | None) -> None:
        self._config = config
        self._folder = folder
        self._granule = granule or config.chunk_size or DEFAULT_GRANULE

    def __call__(self, closing: Callable[[], bool]) -> None:
        """Return when a server listens, frozen or not; start one if none does.

        Raises ConfigError when the folder cannot be used, BackendError when the server that was started fails, and
        Unavailable when neither happens in START_TIMEOUT. Returns early when ``closing()`` is true.
        """
        if is_listening(self._folder.server_socket):
            return
        deadline = time.monotonic() + START_TIMEOUT
        with _turn(self._folder.start_lock, deadline, closing) as mine:
            # Another engine may have started one while this one waited for its turn.
            if mine and not is_listening(self._folder.server_socket):
                self._start(deadline, closing)

    def _start(self, deadline: float, closing: Callable[[], bool]) -> None:
        log_path = self._folder.server_log
        # A server that ends in order takes both away.
        killed, left = self._folder.read_info(), self._folder.read_pools()
        report = self._spawn(log_path)
        try:
            while time.monotonic() < deadline and not closing():
                if is_listening(self._folder.server_socket):
                    if killed is not None and left is not None and left != self._folder.read_pools():
                        self._tell_cold(killed)
                    return
                code = _exit_code(report)
                if code == EXIT_TAKEN:
                    # One that is on its way out, or on its way in. One that stays where nobody looks is a mistake.
                    url = (self._folder.read_info() or {}).get("url", self._folder.url)
                    if url != self._folder.url:
                        raise ConfigError(
                            f"the server of {self._folder.path} listens at {url}; set maru_server_url to that, not auto"
                        )
                    time.sleep(_RETRY)
                    # First the new one: what fails to start leaves the old one open, to be closed below, once.
                    over, report = report, self._spawn(log_path)
                    os.close(over)
                elif code is not None:
                    raise BackendError(
                        f"the Maru server that maru_server_url=auto started has ended: {_tail(log_path)}; "
                        f"see {log_path}"
                    )
                time.sleep(_POLL)
        finally:
            os.close(report)
        if not closing():
            raise Unavailable(
                f"no Maru server listens in {self._folder.path} after {START_TIMEOUT:g} s; see {log_path}"
            )

    def _tell_cold(self, killed: Mapping[str, Any]) -> None:
        logs.get_logger(__name__).warning(
            "a server that was killed is replaced by one with other pools: what it had stored is gone",
            killed_pid=killed.get("pid"),
            pool_size=self._config.pool_size,
            granule=self._granule,
            log=str(self._folder.server_log),
            remedy="the log says what differs; give engines the sizes of `maru serve` (maru_pool_size, maru_chunk_size "
            f"and so on), or, so that they start none of their own, set maru_server_url={self._folder.url}",
        )

    def _options(self) -> list[str]:
        """What ``maru serve`` is told; of pools only what was set, as no size can mean another one (``cxl``: all)."""
        config = self._config
        said, defaults = config.describe(), MaruConfig().describe()
        options = [
            *("--runtime-dir", self._folder.path),
            *("--url", "auto"),
            *("--storage-backend", config.storage_backend),
            *("--eviction-policy", config.eviction_policy),
            *("--granule", self._granule),
            *("--idle-exit", config.idle_exit),
            *("--lease-share", config.lease_share),
            *("--dma-grace", config.dma_grace),
        ]
        for name in _POOL_SETTINGS:
            value, source = said[PREFIX + name]
            if source != "default" or value != defaults[PREFIX + name][0]:
                option = name.replace("_", "-")
                if isinstance(value, bool):
                    options.append(f"--{option}" if value else f"--no-{option}")
                else:
                    options += [f"--{option}", ",".join(value) if isinstance(value, tuple) else value]
        return [str(option) for option in options]

    def _spawn(self, log_path: Path) -> int:
        """Start the server as a process of its own: it outlives this engine.

        Returns a descriptor from which :func:`_exit_code` reads. Engines end every descendant when they stop (vLLM
        looks them up), so the server must be nobody's: a process in between forks and exits at once.
        """
        # The child runs in /, so what made this package importable here must not be a relative path there.
        source = str(Path(maru_core.__file__).resolve().parent.parent)
        paths = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, source])}
        try:
            log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            # A symbolic link would make the server write to wherever it leads.
            reason = "it is a symbolic link" if log_path.is_symlink() else error.strerror
            raise ConfigError(f"cannot write the server's log {log_path}: {reason}; remove it") from error
        report, result = os.pipe()
        command = [sys.executable, "-c", _DETACH, sys.executable, "-m", "maru_core.cli", "serve"]
        command += ["--report-fd", str(result), *self._options()]
        try:
            subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env=environ,
                start_new_session=True,
                pass_fds=(result,),
                check=True,
            )
        except (OSError, subprocess.CalledProcessError) as error:
            os.close(report)
            raise BackendError(f"a Maru server cannot be started: {error}; see {log_path}") from error
        finally:
            os.close(log)
            os.close(result)
        os.set_blocking(report, False)
        logs.get_logger(__name__).info("maru server started", log=str(log_path))
        return report


def _exit_code(report: int) -> int | None:
    """``None`` while the server lives, its exit code when it failed to start, -1 when it just ended."""
    try:
        told = os.read(report, 1)
    except BlockingIOError:
        return None
    return told[0] if told else -1


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
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}; set maru_runtime_dir to a folder of yours"
        ) from error
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
    # The last line says what happened, also at the end of a traceback.
    return text.splitlines()[-1].strip() if text else "it wrote nothing"
