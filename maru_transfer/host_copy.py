"""Copies between pages and objects that both lie in host memory, by a few threads of our own.

What one thread does is native code (:mod:`maru_transfer.host_library`) where it was built, else NumPy's
(:mod:`maru_transfer.host_views`). Either lets go of the interpreter lock, and neither looks at how many threads the
engine set for torch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Protocol

import torch

from maru_core.contracts import LayeredLoad
from maru_core.errors import TransferError
from maru_core.geometry import ChunkCopy, ObjectLayout, PagedLayout
from maru_transfer.helpers import share
from maru_transfer.host_library import HostLibrary, NativePages, unsupported
from maru_transfer.host_views import NumpyPages
from maru_transfer.layered import Arrival, Arrived, LoadThread, SteppedLoad
from maru_transfer.plan import Piece, plan_pieces, refuse_read_only
from maru_transfer.tensors import group_layers

#: Below this many bytes per transfer a second thread costs more than it brings.
MIN_BYTES_PER_THREAD = 1 << 20

#: Copies are bound by memory bandwidth, which a few cores exhaust.
MAX_THREADS = 4


class Work(Protocol):
    """What threads copy together: ``nbytes`` bytes in ``parts`` parts that each is one thread's."""

    nbytes: int
    parts: int

    def run(self) -> None:
        """Copy what no other thread has taken; raises after which nothing is right. Any thread."""

    def stop(self) -> None:
        """Leave what no thread has begun."""


class HostTransfer:
    """Implements :class:`maru_core.contracts.Transfer` and ``LoadsByLayer`` for KV tensors in host memory."""

    def __init__(
        self,
        layers: Sequence[torch.Tensor],
        paged: PagedLayout,
        stored: ObjectLayout,
        *,
        threads: int | None = None,
        library: HostLibrary | None = None,
    ) -> None:
        """``threads`` at most copy at once, ``None``: the usable cores, four at most; without ``library`` by NumPy."""
        self._paged = paged
        self._stored = stored
        # Refuses tensors that end before the layout does: what plan_pieces allows is within them.
        groups = group_layers(layers, paged)
        self._pages: NativePages | NumpyPages | None
        if library is None or unsupported(paged, stored):
            self._pages = NumpyPages(groups, paged, stored)
        else:
            self._pages = NativePages(library, layers, paged, stored)
        self._threads = threads
        self._pool: ThreadPoolExecutor | None = None
        # It copies, too: whichever core its starter was pinned to.
        self._layers = LoadThread(lambda: roam(process_cores()))

    def load(self, block_ids: Sequence[int], copies: Sequence[ChunkCopy]) -> None:
        """Objects to pages."""
        self._layers.settle()
        pieces = plan_pieces(self._paged, self._stored, block_ids, copies)
        self._run(False, pieces, copies)

    def begin_load(self, block_ids: Sequence[int], copies: Sequence[ChunkCopy]) -> LayeredLoad:
        """Objects to pages, one layer after another."""
        pieces = plan_pieces(self._paged, self._stored, block_ids, copies)
        if self._pages is None:
            raise TransferError("this transfer is closed")
        load = SteppedLoad(self._paged.num_layers, lambda layer: self._load_layer(layer, pieces, copies))
        self._layers.start(load)
        return load

    def store(self, block_ids: Sequence[int], copies: Sequence[ChunkCopy]) -> None:
        """Pages to objects."""
        self._layers.settle()
        pieces = plan_pieces(self._paged, self._stored, block_ids, copies, reads_pages=True)
        refuse_read_only(copies)
        self._run(True, pieces, copies)

    def close(self) -> None:
        """End the copying threads and let go of the tensors' memory; layered loads are cancelled."""
        self._layers.close()
        if self._pool:
            self._pool.shutdown()
            self._pool = None
        self._pages = None

    def _load_layer(self, layer: int, pieces: Sequence[Piece], copies: Sequence[ChunkCopy]) -> Arrival:
        parts = [piece for piece in pieces if piece.layer in (None, layer)]
        self._run(False, parts, copies, layer)
        return Arrived()

    def _run(self, store: bool, pieces: Sequence[Piece], copies: Sequence[ChunkCopy], layer: int | None = None) -> None:
        if self._pages is None:
            raise TransferError("this transfer is closed")
        work: Work = self._pages.work(store, pieces, copies, layer)
        pool, threads = self._copiers()
        threads = min(threads, work.nbytes // MIN_BYTES_PER_THREAD, work.parts)
        if threads < 2:
            work.run()
            return
        shares = [share(pool, work.run) for _ in range(1, threads)]
        try:
            work.run()
        finally:
            # Also after an error: no thread may touch pages or buffers once this call has returned.
            work.stop()
            errors = [helper.exception() for helper in shares]
        for error in errors:
            if error:
                raise error

    def _copiers(self) -> tuple[ThreadPoolExecutor, int]:
        """The copying threads (none runs before it has work) and how many share a copy, the caller included."""
        if self._pool is None:
            # Not before the first copy: only then has OpenMP placed the threads that show which cores are ours.
            cores = process_cores()
            self._threads = self._threads or min(MAX_THREADS, len(cores))
            # A caller that is pinned to some cores has them: helpers beside it would take turns with it.
            elsewhere = cores - os.sched_getaffinity(0) or cores
            self._pool = ThreadPoolExecutor(
                max(1, self._threads - 1), "maru-copy", initializer=roam, initargs=(elsewhere,)
            )
        return self._pool, self._threads or 1


def process_cores() -> set[int]:
    """Cores that any thread of this process may run on.

    An engine's OpenMP pins each thread to a core of its own, the calling one included, and threads that are started
    from a pinned thread would all share its core.
    """
    cores = os.sched_getaffinity(0)
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it ended since it was listed
            cores |= os.sched_getaffinity(int(thread))
    return cores


def roam(cores: set[int]) -> None:
    """Let the calling thread run on ``cores``."""
    with suppress(OSError):  # the cores were taken from this process; then the thread stays where it was started
        os.sched_setaffinity(0, cores)
