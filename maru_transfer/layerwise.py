"""The ``layerwise`` engine: what ``kernel`` does, and loads whose layers arrive one after another.

Of every object the rows of layer 0 cross the bus first, then those of layer 1, with an event on the device behind each
layer, so that layer k is computed while layer k+1 is on its way. Objects may hold all layers or one. Where objects
follow each other in a pool, the rows of a layer are one copy of two dimensions; elsewhere each is a copy of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import frozen

from maru_core.brake import Brake
from maru_core.contracts import LayeredLoad, PreparedLayeredLoad
from maru_core.errors import TransferError
from maru_core.geometry import ChunkCopy
from maru_transfer.kernel import KernelEngine, KernelTransfer
from maru_transfer.layered import EndingLoad, LoadThread
from maru_transfer.prepared import Once

if TYPE_CHECKING:
    from maru_transfer.cuda_library import CudaLayers, Job
    from maru_transfer.exports import Exports


class LayerwiseTransfer(KernelTransfer):
    """Implements :class:`maru_core.contracts.Transfer` and ``LoadsByLayer`` for KV tensors on one CUDA device.

    Also ``PreparesLayeredLoads``. A thread of its own submits layered loads.
    """

    def __init__(self, *arguments: Any) -> None:
        """As KernelTransfer."""
        super().__init__(*arguments)
        self._num_layers = len(self._layers)
        self._thread = LoadThread()

    def begin_load(self, block_ids: Sequence[int], copies: Sequence[ChunkCopy]) -> LayeredLoad:
        """Objects to pages, layer by layer."""
        return self._begin(*self._plan_layers(block_ids, copies))

    def prepare_layers(self, block_ids: Sequence[int], copies: Sequence[ChunkCopy]) -> PreparedLayeredLoad:
        """See :class:`maru_core.contracts.PreparesLayeredLoads`."""
        held, job = self._plan_layers(block_ids, copies)
        return Once(lambda: self._begin(held, job), held.release)

    def close(self) -> None:
        """Cancel layered loads, wait for what is under way, and give everything back."""
        self._thread.close()
        super().close()

    def _move(self, direction: int, block_ids: Sequence[int], copies: Sequence[ChunkCopy]) -> None:
        self._thread.settle()
        super()._move(direction, block_ids, copies)

    def _run_prepared(self, job: Job, brake: Brake, least: int) -> int:
        self._thread.settle()
        return super()._run_prepared(job, brake, least)

    def _plan_layers(self, block_ids: Sequence[int], copies: Sequence[ChunkCopy]) -> tuple[Exports, Job]:
        from maru_transfer.cuda_library import LOAD

        return self._plan(LOAD, block_ids, copies, by_layer=True)

    def _begin(self, held: Exports, job: Job) -> LayeredLoad:
        """Start what was planned. Lets go of ``held`` when the load has ended, or none was begun."""
        try:
            if self._closed:
                raise TransferError("this transfer is closed")
            self._device.check()
            if self._lacks_bounce(job):
                # Taken here: memory that another thread locks first belongs to the first device.
                self._thread.settle()
                self._take_bounce()
            layers = self._device.follow(self._num_layers, self._memory.stream())
            load = FollowedLoad(layers, self._num_layers, lambda: self._run(held, job, layers), self._memory.stream)
            try:
                self._thread.start(load)
            except BaseException:
                layers.close()
                raise
        except BaseException:
            held.release()
            raise
        return load

    def _run(self, held: Exports, job: Job, layers: CudaLayers) -> None:
        try:
            self._pages.submit(job, self._how, 0, layers)
        finally:
            # Also after an error: no copy may still touch pages or buffers once the load has ended.
            try:
                self._pages.wait()
            finally:
                held.release()


class FollowedLoad(EndingLoad):
    """Implements :class:`maru_core.contracts.LayeredLoad` by events of the native code.

    As long as the load is under way, calls ask ``layers``; when it has ended, what became of it is known here, and the
    events are given back as soon as no call asks them any more.
    """

    def __init__(self, layers: CudaLayers, count: int, move: Callable[[], None], stream: Callable[[], int]) -> None:
        """``move`` submits the load and waits for its end. ``stream``: the calling thread's current one."""
        super().__init__(move)
        self._layers = layers
        self._count = count
        self._stream = stream
        self._asking = 0

    def run(self) -> None:
        """Moves all layers. Raises nothing."""
        super().run()
        with self._changed:
            # Whoever waits for a layer in the native code was told, too.
            self._changed.wait_for(lambda: not self._asking)
        self._layers.close()

    def layers_done(self) -> int:
        """See :class:`maru_core.contracts.LayeredLoad`; so are the others."""
        with self._asked() as layers:
            return self._count if layers is None else layers.done()

    def wait_layer(self, layer: int) -> None:
        """Blocks until the layer is submitted."""
        if not 0 <= layer < self._count:
            raise TransferError(f"layer {layer} is none of the {self._count} that this load moves")
        with self._asked() as layers:
            if layers is not None:
                layers.wait(layer, self._stream())

    def cancel(self) -> None:
        """Takes effect before the next slice."""
        self._process.check()
        with self._changed:
            if not self._ended:
                self._layers.cancel()

    @contextmanager
    def _asked(self) -> Iterator[CudaLayers | None]:
        """The events, which stay for so long; ``None`` when everything has arrived. Raises TransferError."""
        self._process.check()
        with self._changed:
            self._raise()
            layers = None if self._ended else self._layers
            self._asking += layers is not None
        try:
            yield layers
        finally:
            if layers is not None:
                with self._changed:
                    self._asking -= 1
                    self._changed.notify_all()


@frozen
class LayerwiseEngine(KernelEngine):
    """Moves pages of CUDA devices like ``kernel``, and by layer."""

    transfer: ClassVar[type[KernelTransfer]] = LayerwiseTransfer

    @property
    def name(self) -> str:
        """Equal to the plugin's entry-point name."""
        return "layerwise"
