"""Loads that are planned before their turn, for every transfer: in one call where it can, else part by part."""

from __future__ import annotations

from collections.abc import Sequence

from maru_core.brake import Brake, Pull
from maru_core.contracts import PreparedLoad, PreparesLoads, Transfer
from maru_core.geometry import ChunkCopy


def prepare(transfer: Transfer, block_ids: Sequence[int], copies: Sequence[ChunkCopy]) -> PreparedLoad:
    """As :meth:`maru_core.contracts.PreparesLoads.prepare_load`, of any transfer."""
    if isinstance(transfer, PreparesLoads):
        return transfer.prepare_load(block_ids, copies)
    return InParts(transfer, block_ids, copies)


class InParts:
    """Implements PreparedLoad by calls of ``load`` between which the brake is looked at."""

    def __init__(self, transfer: Transfer, block_ids: Sequence[int], copies: Sequence[ChunkCopy]) -> None:
        self._transfer = transfer
        self._block_ids = block_ids
        self._copies = copies

    def run(self, brake: Brake, least: int) -> int:
        """``least`` copies at a time."""
        done = 0
        while done < len(self._copies):
            pull = brake.pull
            if pull is Pull.STOP or (pull is Pull.YIELD and done >= least):
                break
            part = self._copies[done : done + max(1, least)]
            self._transfer.load(self._block_ids, part)
            done += len(part)
        return done

    def close(self) -> None:
        """Forget the buffers."""
        self._copies = ()
