"""A little of everything that the kernels do on a GPU, for tools under which all takes a hundred times as long.

Every kernel (either direction, accesses of 1 to 16 bytes), every way in which bytes travel, pages and objects that
align with nothing, slots that are used again. ``scripts/gpu-check.sh`` runs it under compute-sanitizer.
"""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest
from attrs import evolve
from paged_forms import Engine, Size
from test_kernel_cuda import REASON, SMALL, WAYS, objects, on_device

from maru_core.geometry import ChunkCopy
from maru_transfer.kernel import KernelEngine

pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

FORMS = ["MLA", "packed per head", "planes-first NHD", "CPU pages"]
#: (elements of a head, bytes of an element): the widest access that fits is of 1, 2, 4, 8 and 16 bytes.
WIDTHS = [(1, 1), (5, 2), (1, 4), (3, 8), (8, 2)]
TABLE = [6, 2, 3, 8, 1, 4, 9]
CHUNK = 10
#: A whole chunk, one that begins and ends within blocks of 4, and the last, which is cut short.
PARTS = [(0, 0, 10), (1, 13, 19), (2, 20, 26)]
#: Slots so small that each is used several times.
TINY = 512


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FORMS)
def test_stores_and_loads_of_every_width(name: str, way: str) -> None:
    tuning, locked = WAYS[way]
    engine = KernelEngine(evolve(tuning, slot_bytes=TINY, slots=2) if tuning.slot_bytes == SMALL.slot_bytes else tuning)
    for dims, element in WIDTHS:
        size = Size(L=3, NB=10, BS=4, NH=3, HS=dims, element=element)
        source, target, expected = (Engine.make(name, size, seed) for seed in (7, None, None))
        stored = source.stored(CHUNK)
        wanted = [source.naive_object(TABLE, *part, CHUNK) for part in PARTS]
        buffers = objects(len(PARTS), stored.nbytes, locked=locked)
        for buffer, array in zip(buffers, wanted, strict=True):
            buffer[:] = np.full_like(array, 0xAB).tobytes()
        copies = [ChunkCopy(*part, buffer) for part, buffer in zip(PARTS, buffers, strict=True)]
        with closing(engine.open(on_device(source), source.paged, stored)) as transfer:
            transfer.store(TABLE, copies)
        for part, buffer, array in zip(PARTS, buffers, wanted, strict=True):
            assert bytes(buffer) == array.tobytes()
            expected.naive_write(TABLE, *part, array)
        pages = on_device(target)
        with closing(engine.open(pages, target.paged, stored)) as transfer:
            transfer.load(TABLE, copies)
        found = pages[0].cpu().numpy().view(np.uint8)
        np.testing.assert_array_equal(found, expected.memory.reshape(-1).view(np.uint8))
