"""Loads and stores that are planned first, for every transfer: done in one call where it can, else part by part."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from maru_core.brake import Brake, Pull
from maru_core.contracts import (
    LayeredLoad,
    LoadsByLayer,
    PreparedCopies,
    PreparedLayeredLoad,
    PreparesLayeredLoads,
    PreparesLoads,
    PreparesStores,
    Transfer,
)
from maru_core.errors import TransferError
from maru_core.geometry import ChunkCopy


def prepare(transfer: Transfer, block_ids: Sequence[int], copies: Sequence[ChunkCopy]) -> PreparedCopies:
    """As :meth:`maru_core.contracts.PreparesLoads.prepare_load`, of any transfer."""
    if isinstance(transfer, PreparesLoads):
        return transfer.prepare_load(block_ids, copies)
    return InParts(transfer.load, block_ids, copies)


def prepare_store(transfer: Transfer, block_ids: Sequence[int], copies: Sequence[ChunkCopy]) -> PreparedCopies:
    """As :meth:`maru_core.contracts.PreparesStores.prepare_store`, of any transfer."""
    if isinstance(transfer, PreparesStores):
        return transfer.prepare_store(block_ids, copies)
    return InParts(transfer.store, block_ids, copies)


def prepare_layers(
    transfer: LoadsByLayer, block_ids: Sequence[int], copies: Sequence[ChunkCopy]
) -> PreparedLayeredLoad:
    """As :meth:`maru_core.contracts.PreparesLayeredLoads.prepare_layers`, of any transfer that loads by layer."""
    if isinstance(transfer, PreparesLayeredLoads):
        return transfer.prepare_layers(block_ids, copies)
    return Once(lambda: transfer.begin_load(block_ids, copies))


class Once:
    """Implements PreparedLayeredLoad by a call that begins the load, and one that lets go of what was planned for it.

    Of the two one is made, once.
    """

    def __init__(self, begin: Callable[[], LayeredLoad], let_go: Callable[[], None] = lambda: None) -> None:
        """``begin`` lets go of everything itself, also when it raises."""
        self._calls: tuple[Callable[[], LayeredLoad], Callable[[], None]] | None = begin, let_go

    def begin(self) -> LayeredLoad:
        """See :class:`maru_core.contracts.PreparedLayeredLoad`."""
        calls, self._calls = self._calls, None
        if calls is None:
            raise TransferError("a load that was begun or closed before cannot be begun; prepare it again")
        return calls[0]()

    def close(self) -> None:
        """Lets go if nothing was begun."""
        calls, self._calls = self._calls, None
        if calls is not None:
            calls[1]()


class InParts:
    """Implements PreparedCopies by calls between which the brake is looked at."""

    def __init__(
        self,
        move: Callable[[Sequence[int], Sequence[ChunkCopy]], None],
        block_ids: Sequence[int],
        copies: Sequence[ChunkCopy],
    ) -> None:
        """``move``: the transfer's ``load`` or ``store``."""
        self._move = move
        self._block_ids = tuple(block_ids)  # the next part's, whatever a plugin does with what it is given
        self._copies = copies

    def run(self, brake: Brake, least: int) -> int:
        """``least`` copies at a time."""
        done = 0
        while done < len(self._copies):
            pull = brake.pull
            if pull is Pull.STOP or (pull is Pull.YIELD and done >= least):
                break
            end = min(done + max(1, least), len(self._copies))
            self._move(self._block_ids, self._copies[done:end])
            done = end
        return done

    def close(self) -> None:
        """Forget the buffers."""
        self._copies = ()
