"""``MaruHandler``: what any program uses to keep bytes in Maru and find them again."""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from maru_core import logs
from maru_core.access import ClientKeys
from maru_core.checksum import Verify
from maru_core.client.arguments import bytes_of, length_of, lengths_of, sequence_of
from maru_core.client.bootstrap import ServerStarter, is_listening
from maru_core.client.keycalls import KeyCalls
from maru_core.client.link import Link, SharedLease
from maru_core.client.objects import REFUSALS, Allocation, Retrieved
from maru_core.client.opener import SessionOpener
from maru_core.client.taken import Taken
from maru_core.client.upkeep import Upkeep
from maru_core.client.values import StoreResult
from maru_core.config import MaruConfig, PluginSettings
from maru_core.contracts import PoolRegistrar
from maru_core.errors import MaruError
from maru_core.host import PluginHost
from maru_core.namespace import Namespace
from maru_core.protocol import CommitStatus, Presence, ReserveStatus
from maru_core.runtime_dir import RuntimeDir

Key = bytes | str
Bytes = bytes | bytearray | memoryview


class MaruHandler(KeyCalls):
    """A session with the metadata server and the pools mapped into this process. Thread-safe, not fork-safe.

    Two levels of calls: ``store``, ``retrieve`` and so on with keys of your own, and those of
    :class:`~maru_core.client.keycalls.KeyCalls` with raw 32-byte keys and columns. All of them may be used through
    ``asyncio.to_thread``. A lost server is found again, or with ``auto`` started again, by itself.
    """

    def __init__(
        self,
        link: Link,
        upkeep: Upkeep,
        namespace: Namespace,
        host: PluginHost,
        verify: Verify,
        registrar: PoolRegistrar | None = None,
        transfer_engine: str = "",
    ) -> None:
        """Use :meth:`connect`."""
        super().__init__(link, verify)
        self._registrar = registrar
        self._transfer_engine = transfer_engine
        self._upkeep = upkeep
        self._namespace = namespace
        self._host = host
        self._open: weakref.WeakSet[Allocation] = weakref.WeakSet()
        self._closed = False
        self._goodbye = True
        # Also at exit: it tells the server goodbye, and lets the process end while no server is there. What is open
        # then may still be written to by a thread, so such a session is left to end with the process.
        self._finalizer = weakref.finalize(self, _stop, upkeep, self._open)

    @classmethod
    def connect(
        cls,
        config: MaruConfig,
        namespace: Namespace,
        *,
        role: str = "client",
        name: str = "",
        host: PluginHost | None = None,
        pool_granule: int | None = None,
        dma: bool = False,
        registrar: PoolRegistrar | None = None,
        transfer_engine: str = "",
        object_bytes: int | None = None,
    ) -> MaruHandler:
        """Connect and wait up to ``maru_connect_timeout`` for the first session.

        ``role`` (``scheduler``: maps no memory until it is used) and ``name`` are for logs and hints. ``pool_granule``
        is the allocation granule of a server that ``auto`` starts, unless ``maru_chunk_size`` is set. ``dma``: whether
        devices may move bytes of the pools by themselves, and so for a moment after this process died. ``registrar``
        is told of every pool that is mapped and unmapped; its figures are in :meth:`stats`, and so is the name of the
        ``transfer_engine`` that the caller uses, if it has one. ``object_bytes``: the length of its objects, where they
        have one, for a warning when the granule of the server's pools is too large for them.

        An absent server leaves the handler down, and it keeps looking. Raises ConfigError (address, keys or runtime
        folder cannot be used), VersionMismatch, BackendError (``auto`` could not start a server), ServerError,
        Unavailable (no file descriptor is left for a socket).
        """
        host = host or PluginHost.discover(PluginSettings.from_environ(os.environ))
        opener = SessionOpener(config, namespace, host, role, name, dma, registrar, object_bytes)
        if config.server_url == "auto":
            folder = RuntimeDir.open(config.runtime_path)
            url = folder.url
            ensure: Callable[[Callable[[], bool]], None] = ServerStarter(
                config, folder, config.chunk_size or pool_granule
            )
        else:
            url, ensure = config.server_url, _expect_server
        keys = ClientKeys.load(config.keys) if config.keys is not None and url.startswith("tcp:") else None
        link = Link(url, request_timeout=config.request_timeout, keys=keys)
        upkeep = Upkeep(link, opener, ensure, _death_of(url))
        handler = cls(link, upkeep, namespace, host, config.verify, registrar, transfer_engine)
        try:
            upkeep.start(config.connect_timeout)
        except BaseException:
            handler.close()
            raise
        return handler

    @property
    def namespace(self) -> Namespace:
        """What everything of this handler is stored under."""
        return self._namespace

    def key(self, key: Key) -> bytes:
        """The 32-byte key of a user's key in this namespace. ``"a"`` and ``b"a"`` are different keys."""
        if not isinstance(key, str | bytes | bytearray | memoryview):
            raise TypeError(f"a key is text or bytes, got {type(key).__name__} {key!r}")
        tag, raw = (b"s", key.encode()) if isinstance(key, str) else (b"b", bytes(key))
        return hashlib.blake2b(self._namespace.root + tag + raw, digest_size=32, person=b"maru-user-key").digest()

    def alloc(self, key: Key, size: int) -> Allocation:
        """Room for ``size`` bytes under ``key``, to be written in place; see :class:`Allocation` for a refusal."""
        return self.batch_alloc([key], [length_of(size, "size")])[0]

    def batch_alloc(self, keys: Sequence[Key], sizes: Sequence[int]) -> list[Allocation]:
        """:meth:`alloc` for many keys in one round trip."""
        taken = Taken()
        allocations: list[Allocation] = []
        try:
            keys = sequence_of(keys, "keys")
            grants = self._reserve(taken, [self.key(key) for key in keys], lengths_of(sizes, "sizes"))
            for index in range(len(keys)):
                allocations.append(Allocation(self, grants, index, self._keep_session))
            self._open.update(allocations)
            return allocations
        except BaseException:
            for allocation in allocations:
                allocation.abort()
            taken.undo(self._link)
            raise

    def store(self, key: Key, data: Bytes) -> StoreResult:
        """Copy ``data`` into the pool unless the key is there already."""
        return self.batch_store([key], [bytes_of(data, "data")])[0]

    def batch_store(self, keys: Sequence[Key], data: Sequence[Bytes]) -> list[StoreResult]:
        """:meth:`store` for many keys in two round trips. When it raises, nothing of the batch stays reserved."""
        keys = sequence_of(keys, "keys")
        views = [bytes_of(item, f"data[{index}]") for index, item in enumerate(sequence_of(data, "data"))]
        taken = Taken()
        try:
            grants = self._reserve(taken, [self.key(key) for key in keys], [view.nbytes for view in views])
            for index in grants.new:
                self.room(grants, index)[:] = views[index]
            results = [REFUSALS.get(ReserveStatus(status), StoreResult.STORED) for status in grants.statuses]
            for index, status in zip(grants.new, self.commit(grants, checksums=True), strict=True):
                if status != CommitStatus.OK:
                    results[index] = StoreResult.REFUSED
            return results
        except BaseException:
            taken.undo(self._link)
            raise

    def retrieve(self, key: Key) -> Retrieved | None:
        """The stored bytes, ``None`` when there are none."""
        return self.batch_retrieve([key])[0]

    def batch_retrieve(self, keys: Sequence[Key]) -> list[Retrieved | None]:
        """:meth:`retrieve` for many keys in one round trip."""
        keys = sequence_of(keys, "keys")
        taken = Taken()
        try:
            lease = self._acquire(taken, [self.key(key) for key in keys], leading=False)
            located = self.adopt(lease.epoch, lease.entries, lease.generations, lease.lengths, lease.keys)
            ready = [index for index, status in enumerate(lease.statuses) if status == Presence.READY]
            # Objects are judged when they are handed out, and again by the caller once its copy is complete.
            views = {
                index: located.view(index) for index, fine in zip(ready, located.check(ready), strict=True) if fine
            }
            if not views:
                self.release(lease)
            shared = SharedLease((lease.epoch, lease.session), lease.ids, len(views))
            watch = partial(self._link.watch, shared)
            return [
                # The handler stays as long as anything shows the bytes: its session keeps them in place.
                Retrieved(located, index, views[index], watch, self) if index in views else None
                for index in range(len(keys))
            ]
        except BaseException:
            taken.undo(self._link)
            raise

    def exists(self, key: Key) -> bool:
        """Whether the key is stored now."""
        return self.batch_exists([key])[0]

    def batch_exists(self, keys: Sequence[Key]) -> list[bool]:
        """:meth:`exists` for many keys in one round trip."""
        return [
            presence == Presence.READY for presence in self.probe([self.key(key) for key in sequence_of(keys, "keys")])
        ]

    def batch_delete(self, keys: Sequence[Key]) -> list[bool]:
        """:meth:`delete` for many keys in one round trip."""
        deleted = self.delete_keys([self.key(key) for key in sequence_of(keys, "keys")])
        return [presence == Presence.READY for presence in deleted]

    def delete(self, key: Key) -> bool:
        """Remove the object; whether there was one. Who reads it right now can finish."""
        return self.batch_delete([key])[0]

    def stats(self) -> dict[str, Any]:
        """What the server counts, and under ``client`` this handler's connection and what plugins report and cost."""
        client = {
            "url": self._link.url,
            "epoch": self.epoch,
            "weights_epoch": self.weights_epoch,
            "verify": self._checks.mode,
            "checksum_mismatches": self._checks.checksum_mismatches,
            "header_mismatches": self._checks.header_mismatches,
            "plugins": dict(self._host.hint_stats()),
            "hints": self._host.hint_health(),
        }
        if self._transfer_engine:
            client["transfer_engine"] = self._transfer_engine
        if self._registrar is not None:
            client["registration"] = dict(self._registrar.stats())
        return {**self.server_stats(), "client": client}

    def close(self, *, may_end: bool = True) -> None:
        """End the session. Allocations that are still open are given back. Idempotent, at most about a second.

        ``may_end``: false when a thread may still write to reserved pages; then the session lasts until the process
        ends.
        An allocation whose view something else still shows keeps the session until the process ends: what is written
        through it later must not hit pages of others.
        """
        if self._closed:
            return
        self._closed = True
        self._finalizer.detach()
        for allocation in list(self._open):
            try:
                allocation.abort()
            except MaruError as error:
                logs.get_logger(__name__).warning("session kept until the process ends", reason=str(error))
                self._goodbye = False
        self._upkeep.stop(may_end=self._goodbye and may_end)

    def __enter__(self) -> MaruHandler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _keep_session(self) -> None:
        self._goodbye = False


def _stop(upkeep: Upkeep, open_allocations: weakref.WeakSet[Allocation]) -> None:
    upkeep.stop(may_end=not any(allocation.is_open for allocation in open_allocations))


def _death_of(url: str) -> Callable[[], bool]:
    """A quick test whether the server is certainly gone; only a unix socket has one."""
    if not url.startswith("ipc://"):
        return lambda: False
    path = Path(url.removeprefix("ipc://"))
    return lambda: not is_listening(path)


def _expect_server(closing: Callable[[], bool]) -> None:
    """With an explicit address somebody else starts the server."""
