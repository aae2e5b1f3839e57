"""Proof of death: a file per session that its owner locks, and that the kernel unlocks when the owner is gone.

The server opens each file itself and judges by that descriptor, so unlinking or recreating the name changes nothing. A
stopped process (SIGSTOP) still holds its lock; a killed one does not. The file also says whose session it is, so that
the next server knows for whom it must keep the memory if this one is killed.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from attrs import asdict, frozen

from maru_core import logs
from maru_core.errors import ConfigError

#: Longest record that is read, in bytes: more than names of the greatest length need, however they are escaped.
_MOST = 32 * 1024
_KINDS: Final[Mapping[str, type]] = {
    "digest": str,
    "role": str,
    "name": str,
    "proof": bool,
    "dma": bool,
    "owner": str,
}


@frozen
class SessionRecord:
    """What the next server has to know of an attached session.

    ``digest`` is its namespace's, in hexadecimal, and empty when a damaged record does not tell.
    """

    digest: str
    role: str
    name: str
    proof: bool
    dma: bool
    #: Public key of the client that it belongs to; empty where clients have none.
    owner: str = ""

    def to_line(self) -> bytes:
        """As a line of text that shows damage: CRC-32 in hexadecimal, and JSON."""
        text = json.dumps(asdict(self)).encode()
        return b"%08x %s\n" % (zlib.crc32(text), text)

    @classmethod
    def from_line(cls, line: bytes) -> SessionRecord:
        """Read what :meth:`to_line` made, by this version or a later one; raises ValueError."""
        checksum, _, text = line.rstrip(b"\n").partition(b" ")
        if checksum != b"%08x" % zlib.crc32(text):
            raise ValueError("the checksum does not match")
        found = json.loads(text)
        values = {name: found[name] for name in _KINDS if name in found}
        if any(type(value) is not _KINDS[name] for name, value in values.items()):
            raise ValueError("a value of another type")
        bytes.fromhex(values["digest"])
        return cls(**values)


class SessionLocks:
    """Lock files of all sessions, in a private folder that only this server uses."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptors: dict[int, int] = {}

    def prepare(self) -> dict[int, SessionRecord]:
        """Create the folder, and take over the attached sessions of a server that was killed, by id.

        Other files are removed. Raises ConfigError.
        """
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            found = os.lstat(self._folder)
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
                raise ConfigError(f"{self._folder} is no private folder of this user: remove it, or chmod 700 it")
            files = sorted(self._folder.glob("*.lock"))
        except OSError as error:
            raise ConfigError(f"cannot keep sessions in {self._folder}: {error}; remove what is there") from error
        earlier = {}
        for path in files:
            record = self._take_over(path)
            if record is None:
                _remove(path)
            else:
                earlier[int(path.stem, 16)] = record
        return earlier

    def create(self, session: int) -> str:
        """Make the lock file of a new session; returns its path. Raises OSError."""
        path = self._path(session)
        self._folder.mkdir(mode=0o700, exist_ok=True)  # cleaners of temporary folders remove those that look unused
        self._descriptors[session] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        return str(path)

    def ensure(self, session: int) -> str:
        """The path of a session's lock file, which is made anew for one whose file was lost. Raises OSError."""
        return str(self._path(session)) if session in self._descriptors else self.create(session)

    def record(self, session: int, record: SessionRecord) -> None:
        """Write down whose session it is, from when on it may hold something. Raises OSError."""
        line = record.to_line()
        # One small write: it is there in whole or not at all when this process is killed.
        os.pwrite(self._descriptors[session], line, 0)
        os.ftruncate(self._descriptors[session], len(line))

    def held(self, session: int) -> bool:
        """Whether somebody holds the lock now."""
        return _is_locked(self._descriptors[session])

    def remove(self, session: int) -> None:
        """Forget the session and unlink its file: everything that it held is free."""
        descriptor = self._descriptors.pop(session, None)
        if descriptor is not None:
            self._path(session).unlink(missing_ok=True)
            os.close(descriptor)

    def close(self, keep: bool = False) -> None:
        """Forget all sessions; their files stay, for the next server, if ``keep``."""
        for session, descriptor in list(self._descriptors.items()):
            if keep:
                os.close(descriptor)
                del self._descriptors[session]
            else:
                self.remove(session)

    def _take_over(self, path: Path) -> SessionRecord | None:
        try:
            number = int(path.stem, 16)
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except (OSError, ValueError):
            return None
        try:
            line = os.pread(descriptor, _MOST, 0)
            if not line:
                # Never attached, so it holds nothing.
                os.close(descriptor)
                return None
            record = SessionRecord.from_line(line)
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            # Whoever has it may still use memory, and nobody knows which. Its lock is proof enough when it holds it,
            # and devices may move bytes for it; without a lock it may be any session that never had one.
            proof = _is_locked(descriptor)
            logs.get_logger(__name__).warning(
                "session record damaged", session=path.stem, path=str(path), proof=proof, reason=repr(error)
            )
            record = SessionRecord("", "unknown", "", proof, True)
        self._descriptors[number] = descriptor
        return record

    def _path(self, session: int) -> Path:
        return self._folder / f"{session:016x}.lock"


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        # A folder, say: no session has that name, and nothing else depends on it.
        logs.get_logger(__name__).warning("not a session's lock file", path=str(path), reason=str(error))


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False
