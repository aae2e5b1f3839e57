"""What the bindings to the native libraries (``csrc/maru.h``) have in common."""

from __future__ import annotations

import ctypes
from typing import Final

from maru_core.geometry import ObjectLayout, PagedLayout

#: MARU_ABI_VERSION of the header that these bindings were written for.
ABI_VERSION: Final = 1
#: MARU_PLANES: what a layout may have.
MOST_PLANES: Final = 2


class _Plane(ctypes.Structure):
    """struct maru_plane."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in ("offset", "block", "token", "head", "dim"))


class Geometry(ctypes.Structure):
    """struct maru_geometry."""

    _fields_ = (
        ("plane", _Plane * MOST_PLANES),
        *(
            (name, ctypes.c_uint32)
            for name in (
                "planes",
                "layers",
                "blocks",
                "block_size",
                "heads",
                "head_size",
                "element_size",
                "chunk_tokens",
            )
        ),
    )


def geometry_of(paged: PagedLayout, stored: ObjectLayout) -> Geometry:
    """The layout of pages, and how many tokens an object has."""
    planes = [_Plane(p.offset, p.block, p.token, p.head, p.dim) for p in paged.planes]
    return Geometry(
        (_Plane * MOST_PLANES)(*planes),
        len(planes),
        paged.num_layers,
        paged.num_blocks,
        paged.block_size,
        paged.num_heads,
        paged.head_size,
        paged.element_size,
        stored.chunk_tokens,
    )
