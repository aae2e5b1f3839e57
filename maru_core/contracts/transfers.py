"""What a transfer engine must do, and what it can do besides. Tensors are opaque here (``Any``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from attrs import frozen

from maru_core.brake import Brake
from maru_core.contracts.findings import Diagnose
from maru_core.geometry import ChunkCopy, ObjectLayout, PagedLayout


class Transfer(Protocol):
    """A transfer engine bound to one engine rank's paged memory. Used by one thread at a time."""

    def load(self, block_ids: Sequence[int], copies: Sequence[ChunkCopy]) -> None:
        """Objects to pages: writes exactly the slots of ``[first, last)`` of each copy, for every plane and layer.

        A slot that holds its bytes already holds them throughout: somebody may be reading it.
        Ordered before everything the calling thread's device stream runs later; returns when ``buffer`` may be
        reused. Raises TransferError and leaves the slots undefined.
        """

    def store(self, block_ids: Sequence[int], copies: Sequence[ChunkCopy]) -> None:
        """Pages to objects, ordered after everything queued on the calling thread's device stream.

        A block may stand at several places of ``block_ids``: requests that share blocks are stored together.

        Returns when all bytes are in ``buffer``. Raises TransferError and leaves the buffers undefined.
        """

    def close(self) -> None:
        """Give staging memory back. Idempotent."""


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


#: Called once, when the engine is first used; it may import what is heavy.
EngineFactory = Callable[[], TransferEngine]


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


class PreparedCopies(Protocol):
    """A load or store that is planned and holds its buffers: what is left needs hardly any time of the interpreter."""

    def run(self, brake: Brake, least: int) -> int:
        """Do what was planned, once, and return how many of the copies, from the first, are complete.

        All of them, unless ``brake`` was pulled: with Pull.YIELD it ends soon after ``least`` copies are complete, with
        Pull.STOP soon. Ordered like :meth:`Transfer.load` or :meth:`Transfer.store`, and when it returns the pages are
        done with: every byte that a load moved is in them, for every stream; those of a store may be given to somebody
        else at once, also when it raises. Called by the thread that uses the transfer. Raises TransferError; then none
        of the copies is complete.
        """

    def close(self) -> None:
        """Let go of the buffers. Idempotent; not while :meth:`run` is under way."""


@runtime_checkable
class PreparesLoads(Protocol):
    """A :class:`Transfer` with this method plans a load before its turn, and does it in one piece that can be cut."""

    def prepare_load(self, block_ids: Sequence[int], copies: Sequence[ChunkCopy]) -> PreparedCopies:
        """Plan what :meth:`Transfer.load` does; :meth:`PreparedCopies.close` must be called.

        Another load may be running meanwhile, in another thread. Raises TransferError as :meth:`Transfer.load` does for
        a request that makes no sense.
        """


@runtime_checkable
class PreparesStores(Protocol):
    """A :class:`Transfer` with this method does a store in one piece that can be cut.

    Without it :meth:`Transfer.store` is called part by part, and only between parts can a store be stopped.
    """

    def prepare_store(self, block_ids: Sequence[int], copies: Sequence[ChunkCopy]) -> PreparedCopies:
        """Plan what :meth:`Transfer.store` does; :meth:`PreparedCopies.close` must be called.

        Raises TransferError as :meth:`Transfer.store` does for a request that makes no sense.
        """


class LayeredLoad(Protocol):
    """A load under way whose layers arrive in true layer order. Every method may be called from any thread.

    Whoever began it calls :meth:`finish`, also after an error or :meth:`cancel`: until then buffers are being read and
    pages written. A layer that has arrived is not touched any more; a load that failed or was cancelled leaves the
    slots of all others undefined.
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
