"""What a storage backend must do, and the values that go with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from attrs import frozen

from maru_core.contracts.findings import Diagnose
from maru_core.errors import BackendError
from maru_core.protocol.messages import PoolDescriptor


class Region(Protocol):
    """One pool, mapped into this process. Made by :meth:`StorageBackend.map_region`; thread-safe.

    One with an attribute ``in_place`` that is true lies where the next server makes its pools, which it cannot as long
    as this is mapped: clients that use nothing of it let go of it when the server is away for some seconds.
    """

    @property
    def descriptor(self) -> PoolDescriptor:
        """The pool that is mapped."""

    @property
    def buffer(self) -> memoryview:
        """The whole pool as writable bytes, superblock first."""

    def publish(self, offset: int, length: int) -> None:
        """Make bytes written by this process visible to every reader of the pool. Called before COMMIT is sent.

        Also for pages that are given up, before the server hears of it, and by the server for what it writes.

        A no-op within one coherent host; a cache-line write-back and fence on memory shared by hosts that are not
        coherent with each other. May not block for longer than the flush takes.
        """

    def acquire(self, offset: int, length: int) -> None:
        """Forget stale copies of these bytes before they are read. Called after ACQUIRE was answered.

        And before a header is looked at; only of pools whose descriptor says ``flush``, and by the server when it makes
        or takes over a pool. May not lose what this process has written.
        """

    def populate(self, offset: int, length: int) -> None:
        """Prepare these bytes so that their first read or write by this process is as fast as later ones.

        Only speed depends on it: it never raises, and does nothing where it cannot. Blocks for up to about a
        millisecond per MiB, in slices that let other threads run; call it off the hot path.
        """

    def close(self) -> None:
        """Unmap. Idempotent; memory that a live ``memoryview`` still shows stays mapped until that is released."""


@frozen
class ReadExtent:
    """Bytes of a pool that are about to be read: offset and length in bytes in the region."""

    pool: int
    offset: int
    length: int


@frozen
class PoolWish:
    """What an operator wants of one backend. ``path`` is the operator's (``None``: the backend's default).

    ``size`` in bytes over all its pools; ``None``: all there is, which only a backend of whole devices is asked for.
    ``members``: what the backends that this one puts together shall give, in the order in which objects are placed.
    ``size_setting``: what the operator set to get this size, for errors.
    """

    backend: str
    size: int | None
    path: str | None
    members: tuple[PoolWish, ...] = ()
    size_setting: str = "maru_pool_size"


@frozen
class PoolPlan:
    """One pool that is to be made: by which backend, its size in bytes, and where. ``size_setting`` as wished."""

    backend: str
    size: int
    path: str | None
    size_setting: str = "maru_pool_size"


@frozen
class PoolRequest:
    """What the server asks a backend for. Sizes in bytes; ``path`` and ``size_setting`` are those of the plan.

    ``owner`` is unique to this server's runtime folder: two servers never ask for pools of one owner.
    ``shared_by_hosts``: clients on hosts that are not coherent with this one will map the pool; its descriptor must say
    ``flush`` then, or the backend refuses. ``take_over``: the operator's word that whoever used this memory before has
    ended.
    """

    pool: int
    size: int
    granule: int
    entry_base: int
    path: str | None
    owner: str
    shared_by_hosts: bool = False
    take_over: bool = False
    size_setting: str = "maru_pool_size"


class Pool(Protocol):
    """A pool as its owner, the server, holds it. Made by :meth:`StorageBackend.create_pool`.

    One with a method ``nobody_left()`` is told so before :meth:`destroy` when every client on every host has said
    goodbye, or is dead for certain or by the operator's word.
    """

    @property
    def region(self) -> Region:
        """The pool mapped in the server, superblock written; of a new pool the header table is zero."""

    def destroy(self) -> None:
        """Unmap and remove the pool's memory (a device stays, a file goes). Idempotent."""

    def leave(self) -> None:
        """Unmap the pool and leave it to the next server of this owner, which may adopt it. Idempotent."""


class StorageBackend(Protocol):
    """Kinds of memory: creates pools (server side) and maps them (client side).

    One with an attribute ``one_host`` that is true makes pools that no other host can map. It is asked for pools that
    hosts share only when the operator insists (``maru_visibility=hosts``), and must refuse then.
    """

    @property
    def name(self) -> str:
        """The name that configuration uses, equal to the plugin's entry-point name."""

    def plan_pools(self, wish: PoolWish, backends: Callable[[str], StorageBackend]) -> Sequence[PoolPlan]:
        """The pools that fulfil ``wish``, in the order in which objects are placed; usually :func:`one_pool`.

        ``backends`` finds a backend by name, for one that only puts others together. Takes and changes nothing. Raises
        BackendError with what was asked for and what is there.
        """

    def create_pool(self, request: PoolRequest) -> Pool:
        """Allocate memory in full and write a new superblock.

        Raises BackendError, with the size that is there and the size that was asked for, rather than let a later page
        fault kill an engine.
        """

    def adopt_pool(self, request: PoolRequest) -> Pool | None:
        """Take over the pool that an earlier server of ``request.owner`` left behind when it was killed.

        Superblock, header table and data as that server left them. ``None`` when there is none, when another one lives
        that owns it, or when it is not exactly what ``request`` asks for, or not of this boot: then a new one is made.
        Changes nothing in that case; raises only BackendError.
        """

    def map_region(self, descriptor: PoolDescriptor) -> Region:
        """Map an existing pool; raises BackendError when the superblock's identity is not ``descriptor``'s."""


def one_pool(wish: PoolWish) -> tuple[PoolPlan]:
    """The plan of a backend that makes one pool, as large as it is told."""
    if wish.size is None:
        raise BackendError(f"no size was given for a pool of {wish.backend}; set {wish.size_setting}")
    return (PoolPlan(wish.backend, wish.size, wish.path, wish.size_setting),)


#: Called once, when the backend is first used; it may import what is heavy.
BackendFactory = Callable[[], StorageBackend]


@frozen
class BackendProvision:
    """What the hook ``maru_storage_backends`` returns per backend.

    ``summary``: one line for ``maru plugins``. ``diagnose``: what ``maru doctor`` calls, without making the backend.
    """

    name: str
    factory: BackendFactory
    summary: str = ""
    diagnose: Diagnose | None = None
