"""The server's socket: bound where it should be, private, and bound again when its name goes away."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

import zmq
from attrs import define, field
from zmq.auth.thread import ThreadAuthenticator

from maru_core import logs
from maru_core.access import KeyRing
from maru_core.address import Address
from maru_core.errors import ConfigError
from maru_core.server.loop import ZAP_DOMAIN


class Binder(Protocol):
    """The part of the loop that listens."""

    @property
    def listens(self) -> bool:
        """Whether there is an address at which new clients are let in."""

    def bind(self, url: str) -> str:
        """Listen; returns the address. Raises zmq.ZMQError."""

    def unbind(self, address: str) -> None:
        """Listen no more. Raises zmq.ZMQError."""


def listen(loop: Binder, url: str, cleanup: ExitStack) -> tuple[str, Callable[[], None]]:
    """Bind ``url``; returns the address, and what keeps it bound: call that now and then. Raises ConfigError."""
    address = Address.parse(url)
    if address.scheme == "tcp":
        bound = _bind(loop, url)
        return bound, PortWatch(loop, bound)
    _check_folder(Path(address.path).parent)
    # bind() would silently take the path over from whoever listens there; a killed server only leaves the name.
    if _listens(address.path):
        raise ConfigError(f"somebody already listens at {url}; choose another maru_server_url")
    _unlink(address.path)
    bound = _bind_private(loop, url, address.path)
    watch = SocketWatch(loop, url, bound, address.path)
    cleanup.callback(watch.remove)
    return bound, watch


@define
class PortWatch:
    """Binds a port again after the loop hung up on everybody."""

    _loop: Binder
    _bound: str

    def __call__(self) -> None:
        """Look. Raises zmq.ZMQError while the port is not free yet."""
        if not self._loop.listens:
            self._loop.bind(self._bound)


@define
class SocketWatch:
    """Binds a unix socket again whose name was removed, as cleaners of ``/tmp`` do."""

    _loop: Binder
    _url: str
    _bound: str
    _path: str
    _inode: int = field(init=False)
    _told: str = field(init=False, default="")

    def __attrs_post_init__(self) -> None:
        self._inode = os.stat(self._path).st_ino

    def __call__(self) -> None:
        """Look, and bind again if need be. Takes microseconds when all is well. Never raises."""
        if not self._loop.listens:
            # The loop hung up on everybody; nobody listens behind the name any more.
            self._bound = ""
            self.remove()
        try:
            if os.stat(self._path).st_ino == self._inode:
                return
            # Somebody else's by now: two servers that take a name from each other would serve nobody.
            self._tell("another socket is where this server's was; clients do not find it")
            return
        except FileNotFoundError:
            pass
        except OSError as error:
            self._tell(f"the socket's folder cannot be read: {error.strerror}")
            return
        try:
            if self._bound:
                # Unbinding unlinks the name a moment later: a new socket there would go with it, so next time.
                bound, self._bound = self._bound, ""
                self._loop.unbind(bound)
                return
            self._bound = _bind_private(self._loop, self._url, self._path)
            self._inode = os.stat(self._path).st_ino
        except (OSError, zmq.ZMQError, ConfigError) as error:
            self._tell(f"the socket was removed and cannot be made again: {error}")
        else:
            self._told = ""
            logs.get_logger(__name__).warning("the socket was removed, and made again", path=self._path)

    def remove(self) -> None:
        """Unlink the socket, unless it is another one's by now."""
        try:
            if os.stat(self._path).st_ino == self._inode:
                os.unlink(self._path)
        except OSError:
            return

    def _tell(self, reason: str) -> None:
        if reason != self._told:
            self._told = reason
            logs.get_logger(__name__).error("not reachable for new clients", path=self._path, reason=reason)


@contextmanager
def authenticator(context: zmq.Context[zmq.Socket[bytes]], keys: KeyRing) -> Iterator[None]:
    """Answers ZeroMQ's question whether a public key is among ``keys``, on a thread of its own."""
    thread = ThreadAuthenticator(context)
    thread.start()
    try:
        thread.configure_curve_callback(domain=ZAP_DOMAIN, credentials_provider=_Provider(keys))
        yield
    finally:
        thread.stop()


class KeyWatch:
    """Lets clients in whose key files were added, and shuts out those whose files are gone."""

    def __init__(self, keys: KeyRing) -> None:
        self._keys = keys

    def __call__(self) -> None:
        """Look. Takes microseconds when nothing changed."""
        if self._keys.refresh():
            log = logs.get_logger(__name__)
            if self._keys.unreadable:
                log.error("the keys cannot be read; those of before count", reason=self._keys.unreadable)
                return
            log.info("keys read again", clients=sorted(client.name for client in self._keys.clients.values()))
            for problem in self._keys.problems.values():
                log.error("a key file lets nobody in", reason=problem)


class _Provider:
    def __init__(self, keys: KeyRing) -> None:
        self._keys = keys

    def callback(self, domain: str, key: bytes) -> bool:
        return key.decode("ascii", "replace") in self._keys.clients


def _bind(loop: Binder, url: str) -> str:
    try:
        return loop.bind(url)
    except zmq.ZMQError as error:
        raise ConfigError(f"cannot listen at {url}: {error}; choose another maru_server_url") from error


def _bind_private(loop: Binder, url: str, path: str) -> str:
    # Private from its first moment on, whatever the caller's mask.
    mask = os.umask(0o177)
    try:
        bound = _bind(loop, url)
    finally:
        os.umask(mask)
    os.chmod(path, 0o600)
    return bound


def _check_folder(folder: Path) -> None:
    """Refuse a folder in which somebody else could put another socket in this one's place."""
    try:
        found = os.stat(folder)
    except OSError as error:
        raise ConfigError(f"no socket can be made in {folder}: {error.strerror}") from error
    if found.st_uid not in (os.getuid(), 0):
        raise ConfigError(f"the folder {folder} belongs to user {found.st_uid}; put the socket into one of your own")
    if found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX:
        raise ConfigError(f"others can write to the folder {folder}; put the socket into one of your own")


def _listens(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(path) == 0


def _unlink(path: str) -> None:
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise ConfigError(f"{path} is there and no socket; choose another maru_server_url")
        os.unlink(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"cannot listen at {path}: {error.strerror}; choose another maru_server_url") from error
