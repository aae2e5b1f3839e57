"""The ``kernel`` engine: bulk bytes by the copy engine, placement by kernels, both behind a plain C interface.

An object crosses the bus as it is stored, in slices of some megabytes, into or out of a ring of staging memory on the
device; a kernel places each slice while the next one crosses. Few multiprocessors are busy for a short time, and what
is under way on the bus is bounded, so that an engine's own small copies find a gap. Runs that are long on both sides
skip staging, requests that are tiny skip the copy engine, and memory that the driver does not know takes a detour
through a locked buffer. ``csrc/maru.h`` says how copies are ordered.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import field, frozen

from maru_core.batches import ChunkCopies
from maru_core.brake import Brake
from maru_core.contracts import PinnedMemory, PreparedCopies, Transfer
from maru_core.errors import TransferError
from maru_core.geometry import ChunkCopy, ObjectLayout, PagedLayout
from maru_transfer.memory import Memory, TorchMemory, asking, told
from maru_transfer.plan import mismatch, plan_pieces

if TYPE_CHECKING:
    from maru_transfer.cuda_library import CudaDevice, CudaLibrary, Job
    from maru_transfer.exports import Array, Exports

#: Planes, elements of a byte or a few: what the kernels know.
_ELEMENT_SIZES = (1, 2, 4, 8)
_MOST_PLANES = 2
#: Objects that are smaller share a slice, so that it is worth a launch.
_LEAST_SLOT = 8 << 20


@frozen
class Tuning:
    """How much is under way at once, and when which way is taken; see docs/performance.md for the figures behind it.

    ``slots`` of at most ``slot_bytes`` make the staging memory (less for small objects); somebody else's copy waits for
    all of them but one. At most ``window`` slices are submitted at a time, and ``burst`` of them waited for at once.
    ``grid``: thread blocks of one launch. ``direct_bytes`` and ``mapped_bytes``: see maru_transfer.slices.Limits.
    ``one_by_one``: no batches of copies. ``fold``: so many copies at one distance, or more, are one copy of two
    dimensions; 0: never. ``scattered``: a slice that would be so many copies, or more, is moved by a kernel that
    reaches host memory itself, of ``scattered_grid`` thread blocks; 0: none is, since that slows what else computes.
    """

    slot_bytes: int = 32 << 20
    slots: int = 2
    window: int = 16
    burst: int = 12
    grid: int = 16
    direct_bytes: int = 2 << 20
    mapped_bytes: int = 4 << 20
    one_by_one: bool = False
    fold: int = 3
    scattered: int = 0
    scattered_grid: int = 8


class KernelTransfer:
    """Implements :class:`maru_core.contracts.Transfer` for KV tensors on one CUDA device."""

    def __init__(
        self,
        device: CudaDevice,
        memory: Memory,
        layers: Sequence[Any],
        paged: PagedLayout,
        stored: ObjectLayout,
        tuning: Tuning,
    ) -> None:
        """Takes staging memory. Raises TransferError."""
        from maru_transfer.cuda_library import Submission
        from maru_transfer.slices import Limits, Slicer
        from maru_transfer.tensors import group_layers

        group_layers(layers, paged)  # for what it checks
        self._device = device
        self._memory = memory
        self._layers: Sequence[Any] = layers
        token = stored.hidden * stored.element_size
        chunk = stored.nbytes * (paged.num_layers // stored.num_layers)
        wanted = min(tuning.slot_bytes, max(chunk, _LEAST_SLOT))
        self._slot_bytes = -(-max(wanted, token) // 256) * 256
        self._slots = tuning.slots
        self._how = Submission(
            window=tuning.window,
            burst=tuning.burst,
            grid=tuning.grid,
            one_by_one=tuning.one_by_one,
            fold=tuning.fold,
            scattered=tuning.scattered,
            scattered_grid=tuning.scattered_grid,
        )
        mapped = tuning.mapped_bytes if device.info.maps_host else -1
        self._slicer = Slicer(paged, stored, Limits(self._slot_bytes, tuning.direct_bytes, mapped))
        self._pinned: PinnedMemory | None = None
        nbytes = self._slots * self._slot_bytes + 8 * paged.num_layers
        try:
            self._staging, address = memory.on_device(nbytes)
        except RuntimeError as error:
            raise TransferError(f"no {nbytes} bytes of device memory for staging: {error}") from error
        self._bounce: Any = None
        #: Bytes of staging memory on the device, and of locked memory on the host.
        self.staging_bytes = nbytes
        self.locked_bytes = 0
        self._pages = device.bind(
            paged, stored, [layer.data_ptr() for layer in layers], address, self._slot_bytes, self._slots
        )
        self._closed = False

    def use_pinned(self, pinned: PinnedMemory) -> None:
        """Ask ``pinned`` which memory is locked, not the driver. See maru_core.contracts.UsesPinnedMemory."""
        self._pinned = pinned

    def load(self, block_ids: Sequence[int], copies: Sequence[ChunkCopy]) -> None:
        """Objects to pages."""
        from maru_transfer.cuda_library import LOAD

        self._move(LOAD, block_ids, copies)

    def store(self, block_ids: Sequence[int], copies: Sequence[ChunkCopy]) -> None:
        """Pages to objects."""
        from maru_transfer.cuda_library import STORE

        self._move(STORE, block_ids, copies)

    def prepare_load(self, block_ids: Sequence[int], copies: Sequence[ChunkCopy]) -> PreparedCopies:
        """See :class:`maru_core.contracts.PreparesLoads`."""
        from maru_transfer.cuda_library import LOAD

        held, job = self._plan(LOAD, block_ids, copies)
        return _Prepared(held, job, len(copies), self._run_prepared)

    def prepare_store(self, block_ids: Sequence[int], copies: Sequence[ChunkCopy]) -> PreparedCopies:
        """See :class:`maru_core.contracts.PreparesStores`."""
        from maru_transfer.cuda_library import STORE

        held, job = self._plan(STORE, block_ids, copies)
        return _Prepared(held, job, len(copies), self._run_prepared)

    def close(self) -> None:
        """Wait for what is under way, give staging and locked memory back, let go of the tensors."""
        if self._closed:
            return
        self._closed = True
        self._pages.close()
        self._device.close()
        self._staging = self._bounce = None
        self._layers = ()
        self.staging_bytes = self.locked_bytes = 0

    def _move(self, direction: int, block_ids: Sequence[int], copies: Sequence[ChunkCopy]) -> None:
        held, job = self._plan(direction, block_ids, copies)
        try:
            # One native call: each return from one must wait for the interpreter's lock, which an engine may hold.
            if self._lacks_bounce(job):
                self._take_bounce()
            self._pages.run(job, self._how, self._memory.stream())
        finally:
            held.release()

    def _run_prepared(self, job: Job, brake: Brake, least: int) -> int:
        """Segments that were moved. ``least``: segments."""
        if self._closed:
            raise TransferError("this transfer is closed")
        if self._lacks_bounce(job):
            self._take_bounce()
        return self._pages.run(job, self._how, self._memory.stream(), brake, least)

    def _plan(
        self, direction: int, block_ids: Sequence[int], copies: Sequence[ChunkCopy], *, by_layer: bool = False
    ) -> tuple[Exports, Job]:
        """What holds the buffers' memory, and what is to be done."""
        from maru_transfer import slices
        from maru_transfer.cuda_library import STORE

        if self._closed:
            raise TransferError("this transfer is closed")
        self._device.check()
        try:
            held = self._device.export(_buffers(copies))
        except (BufferError, TypeError, ValueError) as error:  # not contiguous, no buffer, or released
            paged, stored = self._slicer.paged, self._slicer.stored
            plan_pieces(paged, stored, block_ids, copies, reads_pages=direction == STORE)
            raise TransferError(f"a buffer cannot be used: {error}") from error
        try:
            slices.writable(direction, copies, readonly=held.readonly)
            # What is registered now may not be any more when the next call comes.
            spans = asking(self._device) if self._pinned is None else told(self._pinned)
            return held, self._slicer.job(direction, block_ids, copies, held.addresses, spans, by_layer=by_layer)
        except BaseException:
            held.release()
            raise

    def _submit(self, job: Job) -> None:
        """Start a job: returns when its last slice is under way. ``self._pages.wait()`` ends it."""
        if self._lacks_bounce(job):
            self._take_bounce()
        self._pages.submit(job, self._how, self._memory.stream())

    def _lacks_bounce(self, job: Job) -> bool:
        from maru_transfer.cuda_library import BOUNCED

        return self._bounce is None and bool((job.segments["way"] == BOUNCED).any())

    def _take_bounce(self) -> None:
        nbytes = self._slots * self._slot_bytes
        try:
            self._bounce, address = self._memory.locked(nbytes)
        except RuntimeError as error:
            raise TransferError(f"no {nbytes} bytes of locked memory: {error}") from error
        self.locked_bytes = nbytes
        self._pages.set_bounce(address)


class _Prepared:
    """Implements PreparedCopies for a job whose segments are in the order of the copies."""

    def __init__(self, held: Exports, job: Job, count: int, run: Callable[[Job, Brake, int], int]) -> None:
        self._held = held
        self._job = job
        self._count = count
        self._run = run
        self._closed = False

    def run(self, brake: Brake, least: int) -> int:
        """All in one native call."""
        if self._closed:  # the memory of its buffers may be gone
            raise TransferError("this load or store is closed; run it before that, or prepare it again")
        job, owners = self._job, self._owners()
        behind = (owners >= least).nonzero()[0]
        moved = self._run(job, brake, int(behind[0]) if len(behind) else len(owners))
        # A copy is complete when no segment of it, nor of one before it, is left.
        return self._count if moved >= len(owners) else int(owners[moved:].min())

    def close(self) -> None:
        """Idempotent."""
        self._closed = True
        self._held.release()

    def _owners(self) -> Array:
        """The copy of each segment: the first whose object has the last address that is not behind the segment's."""
        if self._job.owners is not None:
            return self._job.owners
        addresses = self._held.addresses
        order = addresses.argsort(kind="stable")
        ascending = addresses[order]
        found = ascending.searchsorted(self._job.segments["host"].astype(addresses.dtype), side="right") - 1
        owners: Array = order[ascending.searchsorted(ascending[found])]
        return owners


def _buffers(copies: Sequence[ChunkCopy]) -> Sequence[memoryview]:
    """Those of copies, which need not be made for that."""
    return copies.buffers if isinstance(copies, ChunkCopies) else [copy.buffer for copy in copies]


@frozen
class KernelEngine:
    """Moves pages of CUDA devices; needs the native library, a driver and torch.

    ``library`` and ``driver``: paths, in place of the library beside this module and of the system's driver.
    ``transfer``: what :meth:`open` makes.
    """

    tuning: Tuning = field(factory=Tuning)
    library: Path | None = None
    driver: str | None = None
    transfer: ClassVar[type[KernelTransfer]] = KernelTransfer

    @property
    def name(self) -> str:
        """Equal to the plugin's entry-point name."""
        return "kernel"

    def is_available(self) -> bool:
        """Whether the library, a driver with a device, and torch for it are there."""
        return self.import_error() is None

    def import_error(self) -> str | None:
        """What is missing and how to get it; ``None`` when nothing is."""
        library = self._load()
        if isinstance(library, str):
            return library
        try:
            torch = importlib.import_module("torch")
        except (ImportError, OSError) as error:  # OSError: a shared library of torch that does not load
            return f"torch cannot be imported ({error}); install it beside the engine: pip install torch"
        if not torch.cuda.is_available():
            return f"torch {torch.__version__} sees no CUDA device; install torch for CUDA and NVIDIA's driver"
        try:
            self._open(library, torch.cuda.current_device()).close()
        except (TransferError, RuntimeError) as error:  # RuntimeError: torch's, as in a forked process
            return str(error)
        return None

    def unsupported(self, paged: PagedLayout, stored: ObjectLayout, device: str) -> str | None:
        """Why not; every layout of one or two planes on a CUDA device can be moved."""
        if device != "cuda":
            return f"pages on {device}; the kernels move those of CUDA devices"
        if paged.element_size not in _ELEMENT_SIZES:
            return f"elements of {paged.element_size} bytes; the kernels move 1, 2, 4 or 8"
        if len(paged.planes) > _MOST_PLANES:
            return f"{len(paged.planes)} planes; the kernels move 1 or 2"
        return mismatch(paged, stored)

    def open(self, layers: Sequence[Any], paged: PagedLayout, stored: ObjectLayout) -> Transfer:
        """Bind to KV tensors in true layer order.

        Raises TransferError when the layout is unsupported, a tensor's memory is smaller than the layout says, or the
        device has no memory for staging.
        """
        library = self._load()
        problem = library if isinstance(library, str) else None
        if problem is None and len(layers) != paged.num_layers:
            problem = f"{len(layers)} layers were given, the layout has {paged.num_layers}"
        problem = problem or self.unsupported(paged, stored, layers[0].device.type)
        if problem or isinstance(library, str):
            raise TransferError(problem)
        device = self._open(library, layers[0].device.index)
        try:
            return self.transfer(device, TorchMemory(layers[0].device), layers, paged, stored, self.tuning)
        except BaseException:
            device.close()
            raise

    def _load(self) -> CudaLibrary | str:
        try:
            from maru_transfer.cuda_library import load
        except ImportError as error:
            return f"numpy cannot be imported ({error}); install it beside the engine: pip install numpy"
        return load(self.library)

    def _open(self, library: CudaLibrary, number: int) -> CudaDevice:
        from maru_transfer.cuda_library import CudaDevice

        return CudaDevice(library, number, self.driver)
