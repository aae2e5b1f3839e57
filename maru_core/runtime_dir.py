"""The runtime folder: where a server and its clients on this host find each other.

The rule: an explicit ``maru_runtime_dir``, else ``/tmp/maru-<uid>``. The folder is private to its user (0700); anything
else is refused, because whoever can write there can pose as the server.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from maru_core.errors import ConfigError, MaruError

#: Longest path of a Unix socket in bytes (``sun_path`` less its terminator).
MAX_SOCKET_PATH = 107


class AlreadyRunning(MaruError):
    """Another process holds the lock of this runtime folder."""


@frozen
class RuntimeDir:
    """Names in one runtime folder. Build with :meth:`open`."""

    path: Path

    @classmethod
    def open(cls, path: str | os.PathLike[str] | None = None) -> RuntimeDir:
        """Create the folder (0700) if need be and check whose it is; raises ConfigError."""
        folder = Path(path) if path else Path(f"/tmp/maru-{os.getuid()}")
        folder = folder.absolute()
        try:
            folder.mkdir(mode=0o700, parents=path is not None, exist_ok=True)
            found = os.lstat(folder)
        except OSError as error:
            raise ConfigError(f"cannot use the runtime folder {folder}: {error}; set maru_runtime_dir") from error
        if not stat.S_ISDIR(found.st_mode):
            raise ConfigError(f"the runtime folder {folder} is not a folder; set maru_runtime_dir to another path")
        if found.st_uid != os.getuid():
            raise ConfigError(
                f"the runtime folder {folder} belongs to user {found.st_uid}, not to {os.getuid()}; "
                f"set maru_runtime_dir to a folder of your own"
            )
        if found.st_mode & 0o077:
            raise ConfigError(
                f"the runtime folder {folder} has mode {stat.S_IMODE(found.st_mode):04o}; others must not reach it: "
                f"chmod 700 {folder}"
            )
        return cls(folder)

    @property
    def server_lock(self) -> Path:
        """Held exclusively by the server as long as it lives; never unlinked."""
        return self.path / "server.lock"

    @property
    def start_lock(self) -> Path:
        """Held by whoever is starting a server."""
        return self.path / "start.lock"

    @property
    def server_socket(self) -> Path:
        """The server's default socket."""
        return self.path / "server.sock"

    @property
    def server_info(self) -> Path:
        """What :meth:`read_info` reads."""
        return self.path / "server.json"

    @property
    def server_log(self) -> Path:
        """Output of a server that a client started."""
        return self.path / "server.log"

    @property
    def sessions(self) -> Path:
        """Lock files of sessions, by which the server proves that a client died."""
        return self.path / "sessions"

    @property
    def weights(self) -> Path:
        """Weights epochs of namespaces that were reset."""
        return self.path / "weights.json"

    @property
    def url(self) -> str:
        """Where a server of this folder listens unless told otherwise; raises ConfigError when too long."""
        return check_url(f"ipc://{self.server_socket}")

    @property
    def owner(self) -> str:
        """A name for pools that is unique to this folder."""
        digest = hashlib.blake2b(os.fsencode(os.path.realpath(self.path)), digest_size=6).hexdigest()
        return f"{os.getuid()}-{digest}"

    def lock_server(self) -> int:
        """Take ``server.lock``; returns the descriptor that holds it. Raises AlreadyRunning."""
        descriptor = os.open(self.server_lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            info = self.read_info()
            where = f" (pid {info.get('pid')}, {info.get('url')})" if info else ""
            raise AlreadyRunning(
                f"a server already runs in {self.path}{where}; connect to it, or choose another maru_runtime_dir"
            ) from None
        return descriptor

    def read_info(self) -> dict[str, Any] | None:
        """What the server wrote about itself (pid, version, protocol, url, started); ``None`` without a readable one.

        A killed server leaves it behind: the lock tells who lives, this only where.
        """
        try:
            info = json.loads(self.server_info.read_text())
        except (OSError, ValueError):
            return None
        return info if isinstance(info, dict) else None

    def write_info(self, info: Mapping[str, Any]) -> None:
        """Replace the description atomically."""
        temporary = self.path / f"server.json.{os.getpid()}"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(dict(info), file)
        os.replace(temporary, self.server_info)


def check_url(url: str) -> str:
    """``url`` itself, when this Maru can serve and use it; raises ConfigError."""
    scheme, _, rest = url.partition("://")
    if scheme == "ipc" and rest:
        if len(os.fsencode(rest)) > MAX_SOCKET_PATH:
            raise ConfigError(
                f"the socket path {rest} has {len(os.fsencode(rest))} bytes, the limit is {MAX_SOCKET_PATH}; "
                f"set maru_runtime_dir to a shorter path"
            )
        return url
    if scheme == "tcp":
        host, _, port = rest.rpartition(":")
        if host.strip("[]") not in ("127.0.0.1", "::1", "localhost"):
            raise ConfigError(
                f"maru_server_url {url}: only loopback addresses are served (127.0.0.1), because the protocol has no "
                f"authentication across hosts"
            )
        if port == "*" or (port.isdigit() and 0 < int(port) < 65536):
            return url
    raise ConfigError(f"maru_server_url {url!r}: expected ipc:///path/of/socket or tcp://127.0.0.1:port")
