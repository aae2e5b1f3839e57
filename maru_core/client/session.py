"""A session: HELLO, the lock file that proves this process is alive, ATTACH."""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from attrs import field, frozen

from maru_core.client.columns import expect_results
from maru_core.client.holdings import Snapshot
from maru_core.client.regions import Regions
from maru_core.errors import ProtocolError
from maru_core.protocol import MAX_MESSAGE, PROTOCOL_VERSION, Op
from maru_core.protocol.codec import describe
from maru_core.protocol.messages import PoolDescriptor


@frozen(eq=False)
class Session:
    """What one HELLO gave: who we are for the server, and the pools. ``proof`` is the locked descriptor or ``None``.

    ``lineage``: earlier epochs in which it was the same session on the same memory: what was held then still is.
    """

    epoch: int
    id: int
    weights_epoch: int
    pools: tuple[PoolDescriptor, ...]
    regions: Regions
    max_message: int
    server_version: str
    server_pid: int
    proof: int | None = field(default=None)
    lineage: frozenset[int] = field(default=frozenset())

    def covers(self, epoch: int) -> bool:
        """Whether what was held under the server of ``epoch`` is held now."""
        return epoch == self.epoch or epoch in self.lineage

    @property
    def holder(self) -> tuple[int, int]:
        """Epoch and id: reservations and leases hold only under an equal pair."""
        return self.epoch, self.id


class Requester(Protocol):
    """Sends one request of a session that is being opened and returns the results of its reply."""

    def __call__(self, op: Op, epoch: int, session_id: int, arguments: Sequence[Any], /) -> tuple[int, list[Any]]:
        """Answer the server's epoch and the results; raises MaruError."""


class ForkGuard:
    """Keeps lock files out of forked children, and the children from using what is their parent's.

    A child that kept an open copy of a lock file would keep its parent "alive" after the parent's death. The copies
    are closed, never unlocked: an unlock in the child would end the parent's lock. No file is opened between the two
    halves of a fork, so none escapes.
    """

    def __init__(self, on_fork: Callable[[], None]) -> None:
        self._lock = threading.Lock()
        self._open: set[int] = set()
        self._on_fork = weakref.WeakMethod(on_fork)
        os.register_at_fork(
            before=self._lock.acquire, after_in_parent=self._lock.release, after_in_child=self._after_in_child
        )

    def lock(self, path: str) -> int | None:
        """Open and lock the server's file; ``None`` when this process cannot see it (another host or container)."""
        with self._lock:
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            except OSError:
                return None
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(descriptor)
                return None
            self._open.add(descriptor)
            return descriptor

    def renew(self, descriptor: int | None, path: str) -> int | None:
        """A lock on the server's file: one that is held already if there is, else a new one; ``descriptor`` if neither.

        The server makes the file anew when it was removed while no server had it open. What is held stays held:
        letting go of any file that a server may look at ends the session.
        """
        with self._lock:
            try:
                wanted = os.stat(path, follow_symlinks=False)
                for held in self._open:
                    if os.path.samestat(os.fstat(held), wanted):
                        return held
            except OSError:  # not to be seen from here, or removed since while the server has it open
                return descriptor
        renewed = self.lock(path)
        return descriptor if renewed is None else renewed

    def keep_only(self, descriptor: int | None) -> None:
        """Give up every other proof: nothing is held by them any more."""
        with self._lock:
            for other in self._open - {descriptor}:
                self._open.remove(other)
                os.close(other)

    def close(self, descriptor: int | None) -> None:
        """Give the proof up; the server may take the session for dead from here on. Idempotent."""
        with self._lock:
            if descriptor in self._open:
                self._open.remove(descriptor)
                os.close(descriptor)

    def _after_in_child(self) -> None:
        for descriptor in self._open:
            os.close(descriptor)
        self._open.clear()
        self._lock.release()
        on_fork = self._on_fork()
        if on_fork is not None:
            on_fork()


def open_session(
    request: Requester,
    guard: ForkGuard,
    make_regions: Callable[[tuple[PoolDescriptor, ...]], Regions],
    *,
    role: str,
    name: str,
    descriptor: bytes,
    quota: int = 0,
    dma: bool = False,
    previous: Session | None = None,
    held: Snapshot | None = None,
) -> Session:
    """HELLO, lock, ATTACH; raises MaruError. A session that fails half-way holds nothing on the server.

    ``quota``: bytes that the namespace shall be able to hold; 0: no wish. ``dma``: whether devices may move bytes of
    this process by themselves. If the server has the memory of the one before it, ``previous`` goes on with ``held``,
    its regions and its proof; the result has the same id then. Otherwise it is a new one.
    """
    identity = [os.getpid(), socket.gethostname(), name]
    parts: Iterable[list[Any]] = [[]]
    if previous is not None and held is not None:
        parts = held.to_wire(previous.id, secrets.randbits(63))
    epoch, reply = 0, None
    for resume in parts:
        # All parts must reach the same server: the next one knows nothing of those before.
        arguments = [PROTOCOL_VERSION, role, identity, descriptor, quota, resume]
        epoch, results = request(Op.HELLO, epoch, 0, arguments)
        reply = _Welcome.from_wire(results)
        if previous is None or reply.session != previous.id:
            break
    assert reply is not None
    resumed = previous if previous is not None and previous.id == reply.session else None
    if resumed is not None and reply.pools != resumed.pools:
        raise ProtocolError(
            f"a reply to HELLO resumes session {reply.session} on other pools: {reply.pools}, not {resumed.pools}"
        )
    proof = guard.lock(reply.lock_path) if resumed is None else guard.renew(resumed.proof, reply.lock_path)
    try:
        request(Op.ATTACH, epoch, reply.session, [proof is not None, dma])
        return Session(
            epoch=epoch,
            id=reply.session,
            weights_epoch=reply.weights_epoch,
            pools=reply.pools,
            regions=make_regions(reply.pools) if resumed is None else resumed.regions,
            max_message=min(MAX_MESSAGE, reply.max_message),
            server_version=reply.version,
            server_pid=reply.pid,
            proof=proof,
            lineage=frozenset() if resumed is None else resumed.lineage | {resumed.epoch},
        )
    except BaseException:
        if resumed is None:
            guard.close(proof)
        raise


@frozen
class _Welcome:
    """A reply to HELLO."""

    session: int
    lock_path: str
    weights_epoch: int
    pools: tuple[PoolDescriptor, ...]
    max_message: int
    version: str
    pid: int

    @classmethod
    def from_wire(cls, results: list[Any]) -> _Welcome:
        """Check and decode it; raises ProtocolError."""
        expect_results(results, 6, "HELLO")
        for value, kind in zip(results, (int, str, int, list, list, list), strict=True):
            if type(value) is not kind:
                raise ProtocolError(f"a reply to HELLO: expected {kind.__name__}, got {describe(value)}")
        session, lock_path, weights_epoch, raw_pools, limits, server = results
        if not limits or type(limits[0]) is not int or list(map(type, server)) != [str, int]:
            raise ProtocolError(
                f"a reply to HELLO must carry limits and the server's version, got {limits!r}, {server!r}"
            )
        pools = tuple(PoolDescriptor.from_wire(raw) for raw in raw_pools)
        return cls(session, lock_path, weights_epoch, pools, limits[0], *server)
