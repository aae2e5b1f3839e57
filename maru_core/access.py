"""Key files: who may reach a server over ``tcp://``, and as whom.

A folder made by ``maru keygen`` holds the server's pair (``server.key``, ``server.pub``) and pairs of clients
(``NAME.key``, ``NAME.pub``). Files have ZeroMQ's certificate format: a ``metadata`` and a ``curve`` section of
``name = value`` lines, keys as 40 characters of Z85. ``namespaces = a, b`` in a client's public file binds its key to
these values of ``maru_cache_namespace``.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import zmq
from attrs import define, field, frozen
from zmq import auth
from zmq.utils import z85

from maru_core.errors import ConfigError
from maru_core.namespace import cache_namespace_of

SERVER: Final = "server"
SECRET_SUFFIX: Final = ".key"
PUBLIC_SUFFIX: Final = ".pub"
#: Key file that a client takes from a folder.
DEFAULT_CLIENT: Final = "client"

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_NAMESPACES: Final = re.compile(r"\s*namespaces\s*=(.*)")
_KEY_LENGTH: Final = 40


@frozen
class KeyPair:
    """A CURVE pair, each 40 characters of Z85."""

    public: bytes
    secret: bytes = field(repr=False)


@frozen
class ClientKeys:
    """What a client needs: its own pair and the server's public key. ``source``: the file of the pair."""

    own: KeyPair
    server: bytes
    source: str

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ClientKeys:
        """From a key file, or a folder with ``client.key``; ``server.pub`` lies beside it. Raises ConfigError."""
        own = Path(path)
        if own.is_dir():
            own = own / (DEFAULT_CLIENT + SECRET_SUFFIX)
        if own.name == SERVER + SECRET_SUFFIX:
            raise ConfigError(f"maru_keys {own} is the server's secret key; give a client's, such as client.key")
        return cls(read_pair(own), read_public(own.parent / (SERVER + PUBLIC_SUFFIX)), str(own))

    def apply(self, socket: zmq.Socket[bytes]) -> None:
        """Make a socket use these keys; before it connects."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.server)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.own.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.own.secret)


@frozen
class Client:
    """One client that a server knows. ``namespaces`` ``None``: any."""

    name: str
    namespaces: frozenset[str] | None


@define
class KeyRing:
    """The server's pair and the clients whose public keys lie in ``folder``, by key (text).

    :meth:`refresh` notices files that come, change and go. A file that cannot be read, or whose key another file has
    too, lets nobody in.
    """

    folder: Path
    pair: KeyPair
    clients: Mapping[str, Client] = field(factory=dict)
    #: Why a file lets nobody in, by its name.
    problems: Mapping[str, str] = field(factory=dict)
    #: Why the folder cannot be read now; what was read before counts until it can.
    unreadable: str = ""
    _seen: Mapping[str, tuple[int, int]] = field(factory=dict)
    _read: Mapping[str, tuple[str, Client]] = field(factory=dict)

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> KeyRing:
        """Read the whole folder; raises ConfigError, also for a client's file that cannot be used."""
        path = Path(folder)
        pair = read_pair(path / (SERVER + SECRET_SUFFIX))
        ring = cls(path, pair)
        ring.refresh()
        for problem in ring.problems.values():
            raise ConfigError(problem)
        return ring

    def refresh(self) -> bool:
        """Read the files that changed; whether anything did, or the folder became unreadable.

        A folder that cannot be read (but is there) lets in whom it let in before.
        """
        try:
            seen = {name: (modified, inode) for name, modified, inode in _public_files(self.folder)}
        except (FileNotFoundError, NotADirectoryError):
            seen = {}
        except OSError as error:
            before, self.unreadable = self.unreadable, f"{self.folder}: {error.strerror}"
            return before != self.unreadable
        self.unreadable = ""
        if seen == self._seen:
            return False
        read: dict[str, tuple[str, Client]] = {}
        found: dict[str, Client] = {}
        problems: dict[str, str] = {}
        names: dict[str, str] = {}
        for name in sorted(seen):
            path = self.folder / (name + PUBLIC_SUFFIX)
            try:
                # A file that is as it was needs no reading, which may fail for a moment.
                if name in self._read and seen[name] == self._seen.get(name):
                    read[name] = self._read[name]
                else:
                    read[name] = read_public(path).decode(), Client(name, _namespaces_in(path))
            except ConfigError as error:
                problems[name] = str(error)
                if isinstance(error.__cause__, OSError):
                    del seen[name]  # looked at again the next time
                continue
            key, client = read[name]
            if key in names:
                problems[name] = f"{path} has the key of {names[key]}{PUBLIC_SUFFIX}; each client needs one of its own"
                found.pop(key, None)
                continue
            names[key] = name
            found[key] = client
        changed = (found, problems) != (self.clients, self.problems)
        self.clients, self.problems, self._seen, self._read = found, problems, seen, read
        return changed

    def refuses(self, identity: str, descriptor: bytes) -> str | None:
        """Why the client with this public key may not use the namespace of ``descriptor``; ``None`` when it may."""
        client = self.clients.get(identity)
        if client is None:
            return "this client's key is no longer among the server's keys"
        if client.namespaces is None:
            return None
        wanted = cache_namespace_of(descriptor)
        if wanted is not None and wanted in client.namespaces:
            return None
        allowed = ", ".join(map(repr, sorted(client.namespaces)))
        return (
            f"the key of client {client.name} is bound to maru_cache_namespace {allowed}, "
            f"this is {'none' if wanted is None else repr(wanted)}"
        )


def make_keys(
    folder: Path, clients: Iterable[str], namespaces: Iterable[str] = (), *, force: bool = False
) -> list[Path]:
    """Write the server's pair if there is none, and a pair for each client; returns the files written.

    Files get mode 0600, the folder 0700. Nothing is replaced unless ``force``, and then only clients of these names.
    ``namespaces`` binds the clients. Raises ConfigError.
    """
    clients = list(clients)
    for name in clients:
        if name == SERVER or not _NAME.fullmatch(name):
            raise ConfigError(f"{name!r} is no name for a client: letters, digits, '.', '_', '-', and not {SERVER!r}")
    bound = list(namespaces)
    for value in bound:
        if "," in value or '"' in value or not value.isprintable() or value != value.strip():
            raise ConfigError(f"a key cannot be bound to the namespace {value!r}: printable text without ',' and '\"'")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if stat.S_IMODE(folder.stat().st_mode) & 0o077:
            raise ConfigError(f"others can reach the key folder {folder}: chmod 700 {folder}")
        written: list[Path] = []
        if not (folder / (SERVER + SECRET_SUFFIX)).exists():
            written += _write_pair(folder, SERVER, [], force=False)
        for name in clients:
            written += _write_pair(folder, name, bound, force=force)
    except OSError as error:
        raise ConfigError(f"cannot write keys to {folder}: {error}") from error
    return written


def read_pair(path: Path) -> KeyPair:
    """Both keys of a secret file; raises ConfigError when others can read it."""
    public, secret = _read(path)
    if secret is None:
        raise ConfigError(f"{path} holds no secret key; give the file that ends in {SECRET_SUFFIX}")
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise ConfigError(f"{path} has mode {mode:04o}; others must not read a secret key: chmod 600 {path}")
    return KeyPair(public, secret)


def read_public(path: Path) -> bytes:
    """The public key in a file; raises ConfigError."""
    return _read(path)[0]


def _read(path: Path) -> tuple[bytes, bytes | None]:
    try:
        public, secret = auth.load_certificate(path)
        for key in filter(None, (public, secret)):
            if len(key) != _KEY_LENGTH or len(z85.decode(key)) != 32:
                raise ValueError("not a key of 40 characters")
    except OSError as error:
        raise ConfigError(
            f"no key file {path} ({error.strerror or 'not found'}); make keys with `maru keygen`"
        ) from error
    except Exception as error:  # the decoder raises whatever a damaged file makes it trip over
        raise ConfigError(f"{path} is no key file ({error}); make keys with `maru keygen`") from error
    return public, secret


def _namespaces_in(path: Path) -> frozenset[str] | None:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    found = [match[1] for line in lines if (match := _NAMESPACES.fullmatch(line))]
    if not found:
        return None
    if len(found) > 1:
        raise ConfigError(f"{path} names namespaces twice; give one line")
    return frozenset(part.strip() for part in found[0].strip().strip('"').split(","))


def _public_files(folder: Path) -> Iterable[tuple[str, int, int]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            name = entry.name.removesuffix(PUBLIC_SUFFIX)
            if name not in (entry.name, SERVER):
                with suppress(FileNotFoundError):
                    facts = entry.stat()
                    yield name, facts.st_mtime_ns, facts.st_ino


def _write_pair(folder: Path, name: str, namespaces: list[str], *, force: bool) -> list[Path]:
    public, secret = zmq.curve_keypair()
    metadata = f'    name = "{name}"\n'
    if namespaces:
        metadata += f'    namespaces = "{", ".join(namespaces)}"\n'
    text = f'metadata\n{metadata}curve\n    public-key = "{public.decode()}"\n'
    files = {folder / (name + SECRET_SUFFIX): f'{text}    secret-key = "{secret.decode()}"\n'}
    files[folder / (name + PUBLIC_SUFFIX)] = text
    if not force:
        for path in files:
            if path.exists():
                raise ConfigError(f"{path} is there already; --force replaces it, and shuts out who uses it")
    for path, content in files.items():
        temporary = path.with_name(path.name + ".new")
        temporary.unlink(missing_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(content)
        os.replace(temporary, path)
    return list(files)
