"""What a storage backend and a transfer engine must do. Vendors implement these; so do the built-ins.

Nothing here needs torch: tensors are opaque to the core (``Any``) and only transfer engines look inside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from attrs import frozen

from maru_core.brake import Brake
from maru_core.config import MaruConfig
from maru_core.errors import BackendError
from maru_core.geometry import ChunkCopy, ObjectLayout, PagedLayout
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


class Transfer(Protocol):
    """A transfer engine bound to one engine rank's paged memory. Used by one thread at a time."""

    def load(self, block_ids: Sequence[int], copies: Sequence[ChunkCopy]) -> None:
        """Objects to pages: writes exactly the slots of ``[first, last)`` of each copy, for every plane and layer.

        Ordered before everything the calling thread's device stream runs later; returns when ``buffer`` may be
        reused. Raises TransferError and leaves the slots undefined.
        """

    def store(self, block_ids: Sequence[int], copies: Sequence[ChunkCopy]) -> None:
        """Pages to objects, ordered after everything queued on the calling thread's device stream.

        Returns when all bytes are in ``buffer``. Raises TransferError and leaves the buffers undefined.
        """

    def close(self) -> None:
        """Give staging memory back. Idempotent."""


class LayeredLoad(Protocol):
    """A load under way whose layers arrive in true layer order. Every method may be called from any thread.

    Whoever began it calls :meth:`finish`, also after an error or :meth:`cancel`: until then buffers are being read and
    pages written. A load that failed or was cancelled leaves the slots of all of its layers undefined.
    """

    def layers_done(self) -> int:
        """How many layers, counted from layer 0, have arrived in full. Never blocks, never falls.

        Raises TransferError when the load failed or was cancelled.
        """

    def wait_layer(self, layer: int) -> None:
        """What the calling thread's current device stream runs later comes after the arrival of layers 0 to ``layer``.

        On a device this blocks only until the layer's copies are submitted, not until they have run; on the host until
        the layer is there. It needs no call of anybody else to go on. Raises TransferError when the layer will not
        arrive, or is none.
        """

    def finish(self) -> None:
        """Block until every layer has arrived, or nothing is under way any more: buffers may be reused. Idempotent.

        Raises TransferError when not everything arrived.
        """

    def cancel(self) -> None:
        """Submit nothing more, so that :meth:`finish` returns soon. Never blocks; nothing happens if all is submitted.

        Later calls raise TransferError if anything is missing.
        """


@runtime_checkable
class LoadsByLayer(Protocol):
    """A :class:`Transfer` with this method can be overlapped with the layers that read the pages."""

    def begin_load(self, block_ids: Sequence[int], copies: Sequence[ChunkCopy]) -> LayeredLoad:
        """Begin what :meth:`Transfer.load` does, layer by layer, and return without waiting for it.

        A layer has arrived when it was written to the pages for every one of ``copies``, of whichever format; one for
        which there is nothing to write arrives with the layer before. Pages are written after what is on the calling
        thread's current device stream now; only streams that are told by :meth:`LayeredLoad.wait_layer` wait for that.
        Called by the thread that uses the transfer. Loads run one at a time, in the order in which they were begun, and
        other calls of the transfer wait for all of them; ``close`` cancels them.
        Raises TransferError, having begun nothing, as :meth:`Transfer.load` does for a request that makes no sense.
        """


class PreparedLayeredLoad(Protocol):
    """A load by layer that is planned and holds its buffers: it can begin at once."""

    def begin(self) -> LayeredLoad:
        """What :meth:`LoadsByLayer.begin_load` does, once; from then on :meth:`LayeredLoad.finish` lets go.

        Called by the thread that uses the transfer. Raises TransferError, having begun nothing, as ``begin_load`` does;
        also when it was begun or closed before, or the transfer was closed.
        """

    def close(self) -> None:
        """Let go of the buffers if it was not begun. Idempotent; a load under way is left alone."""


@runtime_checkable
class PreparesLayeredLoads(Protocol):
    """A transfer with this method, which is :class:`LoadsByLayer`, too, plans a load by layer before its turn."""

    def prepare_layers(self, block_ids: Sequence[int], copies: Sequence[ChunkCopy]) -> PreparedLayeredLoad:
        """Plan what :meth:`LoadsByLayer.begin_load` does; :meth:`PreparedLayeredLoad.close` must be called.

        Another load may be running meanwhile, in another thread. Raises TransferError as :meth:`Transfer.load` does for
        a request that makes no sense.
        """


class PreparedLoad(Protocol):
    """A load that is planned and holds its buffers: what is left needs hardly any time of the interpreter."""

    def run(self, brake: Brake, least: int) -> int:
        """Do what :meth:`Transfer.load` does, once, and return how many of the copies, from the first, are complete.

        All of them, unless ``brake`` was pulled: with Pull.YIELD it ends soon after ``least`` copies are complete, with
        Pull.STOP soon. Ordered like :meth:`Transfer.load`, but when it returns every byte it moved is in the pages, for
        every stream. Called by the thread that uses the transfer. Raises TransferError; then none of them is complete.
        """

    def close(self) -> None:
        """Let go of the buffers. Idempotent; not while :meth:`run` is under way."""


@runtime_checkable
class PreparesLoads(Protocol):
    """A :class:`Transfer` with this method plans a load before its turn, and does it in one piece that can be cut."""

    def prepare_load(self, block_ids: Sequence[int], copies: Sequence[ChunkCopy]) -> PreparedLoad:
        """Plan what :meth:`Transfer.load` does; :meth:`PreparedLoad.close` must be called.

        Another load may be running meanwhile, in another thread. Raises TransferError as :meth:`Transfer.load` does for
        a request that makes no sense.
        """


class PreparedStore(Protocol):
    """A store that is planned and holds its buffers: what is left needs hardly any time of the interpreter."""

    def run(self, brake: Brake, least: int) -> int:
        """Do what :meth:`Transfer.store` does, once, and return how many of the copies, from the first, are complete.

        All of them, unless ``brake`` was pulled: as for :meth:`PreparedLoad.run`. Ordered like :meth:`Transfer.store`.
        When it returns, or raises, pages are read and buffers are written no more: the pages may be given to somebody
        else at once. Called by the thread that uses the transfer. Raises TransferError; then none of them is complete.
        """

    def close(self) -> None:
        """Let go of the buffers. Idempotent; not while :meth:`run` is under way."""


@runtime_checkable
class PreparesStores(Protocol):
    """A :class:`Transfer` with this method does a store in one piece that can be cut.

    Without it :meth:`Transfer.store` is called part by part, and only between parts can a store be stopped.
    """

    def prepare_store(self, block_ids: Sequence[int], copies: Sequence[ChunkCopy]) -> PreparedStore:
        """Plan what :meth:`Transfer.store` does; :meth:`PreparedStore.close` must be called.

        Raises TransferError as :meth:`Transfer.store` does for a request that makes no sense.
        """


class TransferEngine(Protocol):
    """A way to move bytes between paged memory and pools."""

    @property
    def name(self) -> str:
        """The name that ``maru_transfer_engine`` uses, equal to the plugin's entry-point name."""

    def is_available(self) -> bool:
        """Whether what the engine needs (torch, kernels, a device) is there. Imports it if need be; never raises."""

    def import_error(self) -> str | None:
        """Why not, and the remedy; ``None`` when available."""

    def unsupported(self, paged: PagedLayout, stored: ObjectLayout, device: str) -> str | None:
        """Why this engine cannot move this layout on this device type (``cpu``, ``cuda``); ``None`` when it can.

        Asked of engines that are not available, too: the answer is the same.
        """

    def open(self, layers: Sequence[Any], paged: PagedLayout, stored: ObjectLayout) -> Transfer:
        """Bind to the engine's KV tensors, one per layer in true layer order; raises TransferError."""


#: How bad a finding is.
Level = Literal["ok", "note", "warning", "error"]


@frozen
class Finding:
    """One thing that ``maru doctor`` says. ``error``: it cannot work as it is configured, and the exit code says so.

    ``subject``: what it is about, such as a path. ``remedy``: a command or setting; empty when there is nothing to do.
    """

    level: Level
    subject: str
    text: str
    remedy: str = ""


#: Looks at what a backend or engine needs, for ``maru doctor``, with the settings of the environment. It changes
#: nothing, takes a second at most (after three it is left behind), and raises nothing for what it finds.
Diagnose = Callable[[MaruConfig], Sequence[Finding]]


@frozen
class MemorySpan:
    """``length`` bytes, ``offset`` bytes behind the address that was asked about. ``pinned``: see PinnedMemory."""

    offset: int
    length: int
    pinned: bool


class PinnedMemory(Protocol):
    """Which host memory is registered with the device's driver, so that its copy engines reach it without help."""

    def spans(self, address: int, length: int) -> Sequence[MemorySpan]:
        """The bytes from ``address`` on, cut so that a span lies within one registration or outside of all.

        Together the spans are the whole stretch, in order. Holds until the transfer's call ends, not for longer: pieces
        are registered, and unregistered between calls, while engines work. A copy that crosses the edge of two spans
        may be refused by the driver. Takes microseconds.
        """


@runtime_checkable
class UsesPinnedMemory(Protocol):
    """A :class:`Transfer` with this method is told once, before its first call, where to ask. For device engines."""

    def use_pinned(self, pinned: PinnedMemory) -> None:
        """Copy directly only where ``pinned`` says so, elsewhere through memory that the engine locked itself."""


class PoolRegistrar(Protocol):
    """Follows the pools that a handler maps, to register them with a device's driver. Thread-safe; never raises."""

    def region_mapped(self, region: Region) -> None:
        """A pool was mapped. Returns at once; other threads populate and register it."""

    def region_unmapping(self, region: Region) -> None:
        """A pool is about to be unmapped. Returns at once.

        Whoever still unregisters it keeps a ``memoryview`` of it, and with that the mapping.
        """

    def stats(self) -> Mapping[str, int | float | str]:
        """Figures for the handler's stats. Must not block."""


#: A factory is called once, when the thing is first used; it may import what is heavy.
BackendFactory = Callable[[], StorageBackend]
EngineFactory = Callable[[], TransferEngine]


@frozen
class BackendProvision:
    """What the hook ``maru_storage_backends`` returns per backend.

    ``summary``: one line for ``maru plugins``. ``diagnose``: what ``maru doctor`` calls, without making the backend.
    """

    name: str
    factory: BackendFactory
    summary: str = ""
    diagnose: Diagnose | None = None


@frozen
class EngineProvision:
    """What the hook ``maru_transfer_engines`` returns for each engine. ``auto`` tries higher ``rank`` first.

    Of Maru's own, ``layerwise`` has rank 20, ``kernel`` 10 and ``torch-copy`` 0. ``diagnose`` as for backends.
    """

    name: str
    factory: EngineFactory
    rank: int = 0
    summary: str = ""
    diagnose: Diagnose | None = None


class EvictionPolicy(Protocol):
    """Order of eviction of one namespace in one pool.

    Objects are named by their first entry. Every call is O(1) amortised per object and never works on all objects in
    one go: a pause is felt by every client.
    """

    def add(self, entries: Sequence[int]) -> None:
        """These became evictable just now: the last one is the most valuable."""

    def touch(self, entries: Sequence[int]) -> None:
        """These were used while they were held or parked: the last one is the most valuable."""

    def remove(self, entries: Sequence[int]) -> None:
        """These are leased or gone. Entries that the policy does not hold are ignored."""

    def pop(self, count: int, before: int | None = None) -> list[int]:
        """At most ``count`` victims, the least valuable first; they are no longer held.

        ``before``: none that is worth as much as that, on the scale of :meth:`coldest`.
        """

    def put_back(self, entries: Sequence[int]) -> None:
        """Victims of ``pop`` that were not evicted: they are the next victims again, in this order."""

    def park(self, entry: int) -> None:
        """A victim of ``pop`` has children, or its place is too narrow for what is to be stored.

        Do not offer it again before ``unpark`` or ``touch``.
        """

    def unpark(self, entry: int) -> None:
        """That is over: ``entry`` may be offered again. Ignored unless it is parked."""

    def coldest(self) -> int | None:
        """What the next victim is worth, comparable among the policies of one pool; ``None`` without a victim."""

    def looked_up(self, keys: Sequence[bytes], found: int, entries: Sequence[int], after: bytes | None = None) -> None:
        """A request asked for ``keys``, a chain, and is about to read the first ``found`` of them.

        ``entries``: those of the ``found`` objects that are in this pool. ``after``: the key before them in the same
        request, when it comes in parts.
        """

    def worth_of(self, keys: Sequence[bytes], parent: bytes | None) -> int | None:
        """What new objects behind ``parent`` are worth, on the scale of :meth:`coldest`.

        They are not stored in place of what is worth more; ``None``: they are worth more than all there is.
        """

    def stored(self, keys: Sequence[bytes], entries: Sequence[int], parent: bytes | None) -> None:
        """``keys``, a chain behind ``parent``, are about to be written to ``entries``, or the first of them are.

        An entry that is in another pool is NO_ENTRY.
        """


#: Makes the policies of one pool, one call per namespace: they may share columns and a clock.
NewPolicy = Callable[[], EvictionPolicy]
#: What a pool is given: called with its first entry, its number of entries, and a clock of steady seconds.
PolicyFactory = Callable[[int, int, Callable[[], float]], NewPolicy]


@frozen
class PolicyProvision:
    """What the hook ``maru_eviction_policies`` returns for each order of eviction."""

    name: str
    factory: PolicyFactory
    summary: str = ""


@frozen
class ReadExtent:
    """Bytes of a pool that are about to be read: offset and length in bytes in the region."""

    pool: int
    offset: int
    length: int
