"""The runtime folder: where a server and its clients on this host find each other.

The rule: an explicit ``maru_runtime_dir``, else ``/tmp/maru-<uid>``. The folder is private to its user (0700); anything
else is refused, because whoever can write there can pose as the server.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from attrs import frozen

from maru_core.address import MAX_SOCKET_PATH, Address
from maru_core.config import needs_keys
from maru_core.errors import ConfigError, MaruError

#: Characters of the administration's credential: 32 random bytes in hex.
TOKEN_LENGTH: Final = 64
#: Most bytes of a server's description that are read.
_MOST_INFO: Final = 64 * 1024
#: How often a starting server tries for its lock, and seconds in between.
_LOCK_TRIES: Final = 5
_LOCK_WAIT: Final = 0.01


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
            if path is not None:
                make_private(folder)
            with suppress(FileExistsError):
                folder.mkdir(mode=0o700)
            found = os.lstat(folder)
        except OSError as error:
            raise _unusable(folder, error) from error
        _check(folder, found, os.getuid())
        return cls(folder)

    @classmethod
    def inspect(cls, path: str | os.PathLike[str]) -> RuntimeDir:
        """The folder for a tool that only asks its server: never created, and root may look at anybody's.

        Raises ConfigError when it is there and somebody else could have made what is in it, or when it cannot be seen.
        """
        folder = Path(path).absolute()
        try:
            found = os.lstat(folder)
        except FileNotFoundError:
            return cls(folder)
        except OSError as error:
            raise _unusable(folder, error) from error
        _check(folder, found, found.st_uid if os.getuid() == 0 else os.getuid())
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
    def admin_token(self) -> Path:
        """The credential of administration: who can read it may do anything to the server."""
        return self.path / "admin.token"

    @property
    def sessions(self) -> Path:
        """Lock files of sessions, by which the server proves that a client died."""
        return self.path / "sessions"

    @property
    def pools(self) -> Path:
        """Which pools were served last."""
        return self.path / "pools.json"

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
        try:
            descriptor = os.open(self.server_lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise ConfigError(f"cannot write {self.server_lock}: {error.strerror}; set maru_runtime_dir") from error
        if not _locked(descriptor):
            os.close(descriptor)
            info = self.read_info()
            where = f" (pid {info.get('pid')}, {info.get('url')})" if info else ""
            raise AlreadyRunning(
                f"a server already runs in {self.path}{where}; connect to it, or choose another maru_runtime_dir"
            )
        return descriptor

    def is_served(self) -> bool:
        """Whether a server holds the lock of the folder; true also when that cannot be found out."""
        try:
            descriptor = os.open(self.server_lock, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(descriptor)
        return False

    def read_credential(self) -> str:
        """The credential in the folder; raises ConfigError, also when the folder's owner made it lead elsewhere."""
        path = self.admin_token
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            with os.fdopen(descriptor, "rb") as file:
                found = os.fstat(descriptor)
                if not stat.S_ISREG(found.st_mode) or found.st_uid != os.lstat(self.path).st_uid:
                    raise ValueError("it is not a file of the folder's owner")
                text = file.read(2 * TOKEN_LENGTH).decode("ascii")
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read the administration's credential {path}: {error}") from error
        return _credential(path, text)

    def make_token(self) -> str:
        """The administration's credential, made (0600) if there is none; raises ConfigError when others can read it."""
        path = self.admin_token
        try:
            with suppress(FileExistsError):
                temporary = self.path / f"admin.token.{os.getpid()}"
                descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
                try:
                    with os.fdopen(descriptor, "w") as file:
                        file.write(secrets.token_hex(32) + "\n")
                    os.link(temporary, path)
                finally:
                    temporary.unlink()
            found = os.lstat(path)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from error
        if not stat.S_ISREG(found.st_mode) or found.st_mode & 0o077 or found.st_uid != os.getuid():
            raise ConfigError(
                f"others could read or replace {path}: remove it, and a new one is made at the next start"
            )
        return read_token(path)

    def read_info(self) -> dict[str, Any] | None:
        """What the server wrote about itself (pid, version, protocol, url, started); ``None`` without a readable one.

        A killed server leaves it behind: the lock tells who lives, this only where.
        """
        try:
            descriptor = os.open(self.server_info, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            with os.fdopen(descriptor, "rb") as file:
                info = json.loads(file.read(_MOST_INFO))
        except (OSError, ValueError, RecursionError):
            return None
        return info if isinstance(info, dict) else None

    def read_pools(self) -> bytes | None:
        """Which pools were served last, in the server's own terms: equal ones are the same; ``None`` if none are."""
        try:
            return self.pools.read_bytes()
        except OSError:
            return None

    def write_info(self, info: Mapping[str, Any]) -> None:
        """Replace the description atomically; raises ConfigError."""
        temporary = self.path / f"server.json.{os.getpid()}"
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                with os.fdopen(descriptor, "w") as file:
                    json.dump(dict(info), file)
                os.replace(temporary, self.server_info)
            except OSError:
                temporary.unlink()
                raise
        except OSError as error:
            raise ConfigError(f"cannot write {self.server_info}: {error.strerror}; remove what is there") from error


def check_url(url: str, *, secured: bool = False) -> str:
    """``url`` itself, when a server may listen there; raises ConfigError. ``secured``: it has keys."""
    try:
        address = Address.parse(url)
    except ValueError as error:
        remedy = "; set maru_runtime_dir to a shorter path" if str(MAX_SOCKET_PATH) in str(error) else ""
        raise ConfigError(f"maru_server_url {url!r} cannot be used: {error}{remedy}") from None
    if not address.is_local and not secured:
        raise ConfigError(needs_keys(url))
    return url


def read_token(path: Path) -> str:
    """The credential in a file that an operator names; raises ConfigError."""
    try:
        token = path.read_text(encoding="ascii")
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the administration's credential {path}: {error}") from error
    return _credential(path, token)


def make_private(folder: Path) -> None:
    """Make ``folder`` and whatever is missing above it, for this user only whatever its mask; raises OSError."""
    missing = [folder, *folder.parents]
    for above in reversed(missing):
        with suppress(FileExistsError):
            if not above.exists():
                above.mkdir(mode=0o700)


def _unusable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot use the runtime folder {folder}: {error.strerror}; set maru_runtime_dir to another path"
    )


def _check(folder: Path, found: os.stat_result, owner: int) -> None:
    """Raise ConfigError unless it is a private folder of ``owner``."""
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"the runtime folder {folder} is not a folder; set maru_runtime_dir to another path")
    if found.st_uid != owner:
        raise ConfigError(
            f"the runtime folder {folder} belongs to user {found.st_uid}, not to {owner}; "
            f"set maru_runtime_dir to a folder of your own"
        )
    if found.st_mode & 0o077:
        raise ConfigError(
            f"the runtime folder {folder} has mode {stat.S_IMODE(found.st_mode):04o}; others must not reach it: "
            f"chmod 700 {folder}"
        )


def _locked(descriptor: int) -> bool:
    """Take the lock; False when a server has it. A tool that looks whether one has, has it for a moment itself."""
    for _ in range(_LOCK_TRIES):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_LOCK_WAIT)
        else:
            return True
    return False


def _credential(path: Path, text: str) -> str:
    token = text.strip()
    if len(token) != TOKEN_LENGTH:
        raise ConfigError(f"{path} holds no credential of {TOKEN_LENGTH} characters; remove it and restart the server")
    return token
