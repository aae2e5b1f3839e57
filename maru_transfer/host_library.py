"""Binding to the native copies between host pages and objects (``csrc/maru.h``), and why they cannot be used.

The library is optional: :mod:`maru_transfer.host_views` does the same with NumPy, more slowly.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from maru_core.errors import TransferError
from maru_core.geometry import ChunkCopy, ObjectLayout, PagedLayout
from maru_transfer.abi import ABI_VERSION, MOST_PLANES, geometry_of
from maru_transfer.native_library import load_library
from maru_transfer.plan import Piece

LIBRARY: Final = "libmaru_copy.so"
REBUILD: Final = "install Maru again with a C compiler there (pip install . or pip install --editable .)"

#: A job of more bytes than this is written past the caches: they would not keep it, and reading lines only to
#: overwrite them takes a third of the bandwidth.
PAST_CACHES: Final = 8 << 20

#: struct maru_piece.
PIECE: Final = np.dtype(
    [
        ("object", "u8"),
        ("block", "u4"),
        ("slot", "u4"),
        ("token", "u4"),
        ("tokens", "u4"),
        ("layer", "u4"),
        ("row", "u4"),
    ]
)
_LARGEST: Final = (1 << 32) - 1


class _Job(ctypes.Structure):
    """struct maru_copy_job."""

    _fields_ = (
        ("geometry", ctypes.c_void_p),
        ("layer_addresses", ctypes.c_void_p),
        ("pieces", ctypes.c_void_p),
        *(
            (name, ctypes.c_uint32)
            for name in ("piece_count", "object_layers", "layers", "direction", "past_caches", "reserved")
        ),
        ("taken", ctypes.c_uint64),
    )


class HostLibrary:
    """The library, loaded. Thread-safe; a copy lets go of the interpreter lock. Made by :func:`load`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Raises AttributeError when the library lacks a function."""
        self.copy_pieces: Callable[..., int] = library.maru_copy_pieces
        library.maru_copy_pieces.argtypes = (ctypes.c_void_p,)


def load(path: Path | None = None) -> HostLibrary | str:
    """The library beside this module, or that at ``path``; or why it cannot be used, with the remedy."""
    return load_library(path or Path(__file__).with_name(LIBRARY), "copy", ABI_VERSION, HostLibrary, REBUILD)


class NativePages:
    """Pages of one engine rank in host memory. Thread-safe."""

    def __init__(self, library: HostLibrary, layers: Sequence[Any], paged: PagedLayout, stored: ObjectLayout) -> None:
        """The memory of ``layers``, tensors which are kept, must reach as far as the layout does.

        Raises TransferError for a layout that the library cannot express.
        """
        problem = unsupported(paged, stored)
        if problem:
            raise TransferError(problem)
        self._library = library
        self._layers = tuple(layers)
        self._addresses = np.array([layer.data_ptr() for layer in layers], np.uint64)
        self._geometry = geometry_of(paged, stored)
        self._stored = stored

    def work(
        self, store: bool, pieces: Sequence[Piece], copies: Sequence[ChunkCopy], layer: int | None = None
    ) -> NativeWork:
        """The pieces that :func:`maru_transfer.plan.plan_pieces` made of ``copies``; with ``layer`` only that one."""
        held = [np.frombuffer(copy.buffer, np.uint8) for copy in copies]
        starts = [array.__array_interface__["data"][0] for array in held]
        rows = self._stored.num_layers
        one = None if layer is None else (layer, layer % rows)
        table = np.array(
            [(starts[p.copy], p.block, p.slot, p.token, p.count, *(one or (p.layer or 0, 0))) for p in pieces],
            PIECE,
        )
        layers = rows if one is None else 1
        nbytes = sum(p.count for p in pieces) * self._stored.nbytes // self._stored.chunk_tokens * layers // rows
        job = _Job(
            ctypes.addressof(self._geometry),
            self._addresses.ctypes.data,
            table.ctypes.data,
            len(table),
            rows,
            layers,
            int(store),  # enum maru_direction
            int(nbytes >= PAST_CACHES),
            0,
            0,
        )
        return NativeWork(self._library, job, nbytes, (self, held, table))


class NativeWork:
    """What threads copy together, each by one call of :meth:`run`. Implements :class:`maru_transfer.host_copy.Work`."""

    def __init__(self, library: HostLibrary, job: _Job, nbytes: int, keeps: Any) -> None:
        """``keeps``: what must stay in memory meanwhile."""
        self._library = library
        self._job = job
        self._keeps = keeps
        self.nbytes = nbytes
        self.parts = job.piece_count * job.layers

    def run(self) -> None:
        """Copy what no other thread has taken. Raises TransferError."""
        status = self._library.copy_pieces(ctypes.byref(self._job))
        if status:
            raise TransferError(f"the native copy refused its job with status {status}; nothing was copied")

    def stop(self) -> None:
        """Nothing: what was begun takes a moment, and no call fails halfway."""


def unsupported(paged: PagedLayout, stored: ObjectLayout) -> str | None:
    """Why the library cannot express a layout, ``None`` when it can."""
    if not 1 <= len(paged.planes) <= MOST_PLANES:
        return f"{len(paged.planes)} planes; the native copy moves 1 or 2"
    sizes = (paged.num_layers, paged.num_blocks, paged.block_size, paged.num_heads, paged.head_size)
    if max(*sizes, stored.chunk_tokens) > _LARGEST:
        return f"a size is above {_LARGEST}: {paged}"
    return None
