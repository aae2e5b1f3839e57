"""A session: HELLO, the lock file that proves this process is alive, ATTACH."""

from __future__ import annotations

import fcntl
import os
import socket
import threading
import weakref
from collections.abc import Callable, Sequence
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
    resume = [] if previous is None or held is None else held.to_wire(previous.id)
    epoch, results = request(Op.HELLO, 0, 0, [PROTOCOL_VERSION, role, identity, descriptor, quota, resume])
    expect_results(results, 6, "HELLO")
    session, lock_path, weights_epoch, raw_pools, limits, server = results
    kinds: tuple[tuple[object, type], ...] = (
        (session, int),
        (lock_path, str),
        (weights_epoch, int),
        (raw_pools, list),
        (limits, list),
        (server, list),
    )
    for value, kind in kinds:
        if type(value) is not kind:
            raise ProtocolError(f"a reply to HELLO: expected {kind.__name__}, got {describe(value)}")
    if not limits or type(limits[0]) is not int or len(server) != 2:
        raise ProtocolError(f"a reply to HELLO must carry limits and the server's version, got {limits!r}, {server!r}")
    pools = tuple(PoolDescriptor.from_wire(raw) for raw in raw_pools)
    resumed = previous if previous is not None and previous.id == session else None
    if resumed is not None and pools != resumed.pools:
        raise ProtocolError(f"a reply to HELLO resumes session {session} on other pools: {pools}, not {resumed.pools}")
    proof = resumed.proof if resumed is not None else None
    if proof is None:
        proof = guard.lock(lock_path)
    try:
        request(Op.ATTACH, epoch, session, [proof is not None, dma])
        return Session(
            epoch=epoch,
            id=session,
            weights_epoch=weights_epoch,
            pools=pools,
            regions=make_regions(pools) if resumed is None else resumed.regions,
            max_message=min(MAX_MESSAGE, limits[0]),
            server_version=str(server[0]),
            server_pid=int(server[1]),
            proof=proof,
            lineage=frozenset() if resumed is None else resumed.lineage | {resumed.epoch},
        )
    except BaseException:
        if resumed is None:
            guard.close(proof)
        raise
