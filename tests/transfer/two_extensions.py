"""LMCache's extension and ours in one process: ``python two_extensions.py FIRST SECOND FILE``.

FIRST and SECOND are ``ours`` and ``theirs`` in either order, FILE is LMCache's ``c_ops`` library. Each is imported and
used in turn, and then both once more; they have to store the same bytes. Run by test_lmcache_cuda.py.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from maru_core.geometry import ChunkCopy, ObjectLayout, PagedLayout, PlaneStrides
from maru_transfer import cuda_library

L, NB, BS, H, D, CHUNK = 2, 8, 16, 2, 16, 64
TABLE = [5, 2, 7, 3]
PAGE = BS * H * D
PAGED = PagedLayout(tuple(PlaneStrides(p * NB * PAGE, PAGE, H * D, D, 1) for p in range(2)), L, NB, BS, H, D, 2)
STORED = ObjectLayout(2, L, CHUNK, H * D, 2)


def pages() -> list[Any]:
    """KV tensors of two layers, planes first, always the same."""
    import torch

    made = torch.arange(L * 2 * NB * PAGE, dtype=torch.int32).to(torch.int16)
    return list(made.cuda().view(torch.bfloat16).view(L, 2, NB, BS, H, D))


def import_ours() -> Callable[[], bytes]:
    """The library, and a device of it, before torch is there if nobody has imported it."""
    library = cuda_library.load()
    assert isinstance(library, cuda_library.CudaLibrary), library
    cuda_library.CudaDevice(library, 0).close()
    return store_by_ours


def store_by_ours() -> bytes:
    from maru_transfer.kernel import KernelEngine

    buffer = memoryview(bytearray(STORED.nbytes))
    with closing(KernelEngine().open(pages(), PAGED, STORED)) as transfer:
        transfer.store(TABLE, [ChunkCopy(0, 0, CHUNK, buffer)])
    return bytes(buffer)


def import_theirs(file: Path) -> Callable[[], bytes]:
    """The extension; it needs torch to be imported before."""
    import torch

    spec = importlib.util.spec_from_file_location("c_ops", file)
    assert spec is not None
    assert spec.loader is not None
    ops = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(ops)

    def store() -> bytes:
        layers = pages()
        pointers = torch.tensor([layer.data_ptr() for layer in layers], dtype=torch.int64, device="cuda")
        blocks = torch.tensor(TABLE, device="cuda")
        slots = (blocks[:, None] * BS + torch.arange(BS, device="cuda")).flatten()
        packed = torch.zeros(2, L, CHUNK, H * D, dtype=torch.bfloat16, device="cuda")
        device, direction = torch.device("cuda:0"), ops.TransferDirection.D2H
        kind = ops.GPUKVFormat.NL_X_TWO_NB_BS_NH_HS
        ops.multi_layer_kv_transfer(
            packed, pointers, slots, device, NB * BS, direction, kind, block_size=BS, head_size=D
        )
        return packed.view(torch.int16).cpu().numpy().tobytes()

    return store


def main(first: str, second: str, file: Path) -> None:
    """Import and use them in this order; AssertionError if they disagree."""
    importers = {"ours": import_ours, "theirs": lambda: import_theirs(file)}
    stores, seen = [], []
    for name in (first, second):
        stores.append(importers[name]())
        seen.append(stores[-1]())
    seen += [store() for store in stores]
    assert len(set(seen)) == 1, "they store different bytes"
    assert any(seen[0])
    print(f"{first} before {second}: {len(seen)} stores of {len(seen[0])} equal bytes")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
