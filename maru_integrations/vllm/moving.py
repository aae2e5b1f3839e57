"""Fetching and writing objects: the same functions for steps that wait for it and for threads beside them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, Generic, Protocol, TypeVar

from attrs import define, frozen

from maru_core import logs
from maru_core.brake import Brake
from maru_core.client import Located, MaruHandler
from maru_core.contracts import LoadsByLayer, PreparedCopies, PreparedLayeredLoad, Transfer
from maru_core.errors import TransferError
from maru_core.foreign import pass_interrupt, show
from maru_core.geometry import ChunkCopy, ObjectLayout
from maru_core.protocol import CommitStatus, ReserveStatus
from maru_integrations.vllm.checking import Checking
from maru_integrations.vllm.copies import ChunkShape, StoreItems, chunks_of, load_copies, store_copies
from maru_integrations.vllm.metadata import NO_ROOM, PREEMPTED, REFUSED, UNAVAILABLE, LoadOp
from maru_transfer.prepared import prepare, prepare_layers

#: Wraps a copy. Yields whether it may be made; when it is left, pages and buffers are touched no more.
Copying = Callable[[], AbstractContextManager[bool]]
#: Makes copies from pages to objects by a transfer. How many, from the first, hold what was to be stored: those behind
#: them were not made, or from blocks that were somebody else's by then. Afterwards nothing is touched any more.
Copier = Callable[[Transfer, Sequence[int], Sequence[ChunkCopy]], int]


@define
class Link:
    """What a worker needs to move bytes: its session, and its paged memory bound to a transfer engine.

    ``storing``: a second transfer, for stores, when loads and stores are made by different threads. ``engine``: whose
    they are, for people.
    """

    handler: MaruHandler
    transfer: Transfer
    stored: ObjectLayout
    storing: Transfer | None = None
    engine: str = ""

    @property
    def name(self) -> str:
        """Whose transfers these are, for people."""
        return self.engine or type(self.stores).__name__

    @property
    def stores(self) -> Transfer:
        """The transfer that stores."""
        return self.storing or self.transfer

    def close(self) -> None:
        """Let go of the pages, unmap, end the session; which is kept when a transfer could not be closed."""
        self.handler.close(may_end=close_all((self.storing, self.transfer)))

    def abandon(self) -> None:
        """A copy has not returned: what it touches stays mapped, and this session's, until the process ends."""
        self.handler.close(may_end=False)


def close_all(transfers: Iterable[Transfer | None]) -> bool:
    """Have transfers let go of their pages. When one raises, that is told, and False: it may still copy."""
    closed = True
    for transfer in transfers:
        try:
            if transfer is not None:
                transfer.close()
        except BaseException as error:  # noqa: BLE001 - a plugin's code, see pass_interrupt
            pass_interrupt(error)
            closed = False
            logs.get_logger(__name__).warning(
                "maru.transfer_not_closed",
                transfer=type(transfer).__name__,
                error=show(error),
                effect="session and memory are kept until the process ends",
            )
    return closed


def fetch(link: Link, op: LoadOp, shape: ChunkShape) -> int:
    """Copy a whole load into its blocks, in the step that waits for it.

    Returns how many of its objects, from the front, are there and proven after the copy to be those that were granted.
    Raises MaruError; then none of them is.
    """
    located, copies = _find(link, op, shape, range(chunks_of(op, shape)))
    with located.reading():
        link.transfer.load(tuple(op.blocks), copies)
    return leading(located.check())


class Closes(Protocol):
    """What a prepared load of either kind is."""

    def close(self) -> None:
        """Let go of the buffers."""


LoadT = TypeVar("LoadT", bound=Closes)


@frozen(eq=False)
class Planned(Generic[LoadT]):
    """A load of ``count`` copies of which only the copying and the proof are left. ``load`` must be closed."""

    located: Located
    load: LoadT
    count: int
    #: Whose it is, for people.
    engine: str


def plan(link: Link, op: LoadOp, shape: ChunkShape, chunks: range) -> Planned[PreparedCopies]:
    """Plan a load of ``chunks`` (counted from its first) into their blocks. Any thread. Raises MaruError."""
    located, copies = _find(link, op, shape, chunks)
    # Which blocks failed is looked up afterwards: what a plugin gets is its own.
    load = prepare(link.transfer, tuple(op.blocks), copies)
    return Planned(located, load, len(copies), type(link.transfer).__name__)


def plan_layers(link: Link, op: LoadOp, shape: ChunkShape, chunks: range) -> Planned[PreparedLayeredLoad]:
    """The same by layer, for a link whose transfer loads so. Any thread. Raises MaruError."""
    assert isinstance(link.transfer, LoadsByLayer)
    located, copies = _find(link, op, shape, chunks)
    load = prepare_layers(link.transfer, tuple(op.blocks), copies)
    return Planned(located, load, len(copies), type(link.transfer).__name__)


def _find(link: Link, op: LoadOp, shape: ChunkShape, chunks: range) -> tuple[Located, Sequence[ChunkCopy]]:
    objects = shape.objects_of(chunks)
    part = slice(objects.start, objects.stop)
    located = link.handler.adopt(op.epoch, op.entries[part], op.generations[part], op.lengths[part], op.keys[part])
    return located, load_copies(op, shape, chunks, located.views())


def carry_out(
    planned: Planned[PreparedCopies],
    copying: Copying,
    brake: Brake,
    least: int,
    beside: ThreadPoolExecutor,
    begun: Callable[[], None],
) -> tuple[int, int]:
    """Do what was planned. Ends early when ``brake`` is pulled; with Pull.YIELD not before ``least`` objects.

    Objects are looked at by ``beside`` while they are copied: they cannot change meanwhile without losing their
    generation, which is looked at afterwards. ``begun``: called before the copy. Returns how many objects, from the
    front, were copied, and how many of these are proven.
    """
    located = planned.located
    with located.reading(), copying() as allowed:
        if not allowed:
            return 0, 0
        checking = Checking.begin(beside, located.check, planned.count)
        begun()
        moved = said_to_move(planned.engine, planned.load.run(brake, least), planned.count)
    good = min(leading(checking.result()), leading(located.verify()))
    return moved, min(moved, good)


def said_to_move(engine: str, said: Any, count: int) -> int:
    """What a prepared copy of ``count`` copies answered, as a number: it is a plugin's. Raises TransferError."""
    try:
        moved = operator.index(said)
    except TypeError:
        raise TransferError(
            f"{engine} answers with {type(said).__name__}; run() must return how many of the {count} copies it moved"
        ) from None
    if not 0 <= moved <= count:
        raise TransferError(f"{engine} says that it moved {moved} of {count} copies")
    return moved


def leading(fine: Sequence[bool]) -> int:
    """How many are fine before the first that is not."""
    return next((index for index, good in enumerate(fine) if not good), len(fine))


def store_all(transfer: Transfer, blocks: Sequence[int], copies: Sequence[ChunkCopy]) -> int:
    """All of them, in the step that waits for it."""
    transfer.store(blocks, copies)
    return len(copies)


def write(
    link: Link,
    items: StoreItems,
    shape: ChunkShape,
    weights_epoch: int,
    copy: Copier = store_all,
    timeout: float | None = None,
) -> tuple[int, str]:
    """Copy what nobody has stored yet into the pool.

    Returns how many objects are there now or are being written by somebody else, and one of metadata's reasons when
    that is not all of them: PREEMPTED when ``copy`` did not make all of its copies. Raises MaruError, and whatever
    ``copy`` raises; then nothing stays reserved.
    """
    handler = link.handler
    if not handler.is_up:
        return 0, UNAVAILABLE
    grants = handler.reserve(
        items.keys, link.stored.nbytes, items.parents, weights_epoch=weights_epoch, timeout=timeout
    )
    statuses = grants.statuses
    kept = statuses.count(ReserveStatus.PRESENT) + statuses.count(ReserveStatus.BUSY)
    reason = NO_ROOM if ReserveStatus.NO_ROOM in statuses else REFUSED if ReserveStatus.REFUSED in statuses else ""
    new = grants.new
    if not new:
        return kept, reason
    try:
        copies = store_copies(shape, new, handler.rooms(grants, new))
        moved = copy(link.stores, items.blocks, copies)
        if moved < len(new):
            handler.abort(grants, new[moved:])
            new, reason = new[:moved], PREEMPTED
        if not new:
            return kept, reason
        committed = handler.commit(grants, new, checksums=True, timeout=timeout).count(CommitStatus.OK)
    except BaseException:
        handler.abort(grants, new)
        raise
    return kept + committed, reason if committed == len(new) else REFUSED
