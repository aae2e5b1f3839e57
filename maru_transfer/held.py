"""Transfers during whose copies no memory is unregistered."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from maru_core.contracts import (
    LayeredLoad,
    LoadsByLayer,
    PreparedCopies,
    PreparedLayeredLoad,
    Transfer,
)
from maru_core.geometry import ChunkCopy
from maru_transfer.pinning import PinnedPools
from maru_transfer.prepared import prepare, prepare_layers, prepare_store


class HeldTransfer:
    """A transfer during whose copies nothing is unregistered. Implements :class:`maru_core.contracts.Transfer`."""

    def __init__(self, transfer: Transfer, pools: PinnedPools) -> None:
        self._transfer = transfer
        self._pools = pools

    def load(self, block_ids: Sequence[int], copies: Sequence[ChunkCopy]) -> None:
        """Objects to pages."""
        with self._pools.held():
            self._transfer.load(block_ids, copies)

    def store(self, block_ids: Sequence[int], copies: Sequence[ChunkCopy]) -> None:
        """Pages to objects."""
        with self._pools.held():
            self._transfer.store(block_ids, copies)

    def prepare_load(self, block_ids: Sequence[int], copies: Sequence[ChunkCopy]) -> PreparedCopies:
        """A load that is planned now; nothing is unregistered from now on until it is closed."""
        with ExitStack() as held:
            # What it plans by holds only as long as nothing is unregistered.
            held.enter_context(self._pools.held())
            load = prepare(self._transfer, block_ids, copies)
            return _HeldPrepared(load, held.pop_all())

    def prepare_store(self, block_ids: Sequence[int], copies: Sequence[ChunkCopy]) -> PreparedCopies:
        """The same for a store."""
        with ExitStack() as held:
            held.enter_context(self._pools.held())
            store = prepare_store(self._transfer, block_ids, copies)
            return _HeldPrepared(store, held.pop_all())

    @property
    def staging_bytes(self) -> int:
        """Device memory that the transfer took for itself; 0 when it does not say."""
        return int(getattr(self._transfer, "staging_bytes", 0))

    def close(self) -> None:
        """Close the transfer, then unregister the pools."""
        self._transfer.close()
        self._pools.close()


class HeldByLayer(HeldTransfer):
    """The same for one that loads layer by layer. Implements ``LoadsByLayer`` and ``PreparesLayeredLoads``, too."""

    def __init__(self, transfer: Transfer, pools: PinnedPools) -> None:
        super().__init__(transfer, pools)
        assert isinstance(transfer, LoadsByLayer)
        self._by_layer: LoadsByLayer = transfer

    def begin_load(self, block_ids: Sequence[int], copies: Sequence[ChunkCopy]) -> LayeredLoad:
        """Begin a load, during which nothing is unregistered until its :meth:`~LayeredLoad.finish`."""
        with ExitStack() as held:
            held.enter_context(self._pools.held())
            load = self._by_layer.begin_load(block_ids, copies)
            return _HeldLoad(load, held.pop_all())

    def prepare_layers(self, block_ids: Sequence[int], copies: Sequence[ChunkCopy]) -> PreparedLayeredLoad:
        """A load that is planned now; nothing is unregistered until it was closed, or begun and has finished."""
        with ExitStack() as held:
            held.enter_context(self._pools.held())
            load = prepare_layers(self._by_layer, block_ids, copies)
            return _HeldLayers(load, held.pop_all())


class _HeldPrepared:
    """A prepared load or store that lets go of the pools when it is closed."""

    def __init__(self, prepared: PreparedCopies, held: ExitStack) -> None:
        self._prepared = prepared
        self._held = held
        self.run = prepared.run

    def close(self) -> None:
        """Let go of the buffers, then of the pools."""
        with self._held:
            self._prepared.close()


class _HeldLayers:
    """A prepared load by layer that lets go of the pools when it is closed, unless it was begun."""

    def __init__(self, prepared: PreparedLayeredLoad, held: ExitStack) -> None:
        self._prepared = prepared
        self._held = held

    def begin(self) -> LayeredLoad:
        """From here on the load holds the pools."""
        load = self._prepared.begin()
        return _HeldLoad(load, self._held.pop_all())

    def close(self) -> None:
        """Let go of the buffers, then of the pools."""
        with self._held:
            self._prepared.close()


class _HeldLoad:
    """A load that lets go of the pools when it has finished."""

    def __init__(self, load: LayeredLoad, held: ExitStack) -> None:
        self._load = load
        self._held = held
        self.layers_done = load.layers_done
        self.wait_layer = load.wait_layer
        self.cancel = load.cancel

    def finish(self) -> None:
        """Wait for the load, then let go."""
        with self._held:
            self._load.finish()


def held(transfer: Transfer, pools: PinnedPools) -> Transfer:
    """The transfer, with nothing unregistered while it copies; what it can do besides stays possible."""
    return HeldByLayer(transfer, pools) if isinstance(transfer, LoadsByLayer) else HeldTransfer(transfer, pools)
