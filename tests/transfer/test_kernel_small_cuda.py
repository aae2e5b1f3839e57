"""A little of everything that the kernels do on a GPU, for tools under which all takes a hundred times as long.

Every kernel (either direction, accesses of 1 to 16 bytes), every engine on every way in which bytes travel, pages and
objects that align with nothing, slots that are used again. Not all combinations, because such a tool takes about a
second whenever an engine is opened. ``scripts/gpu-check.sh`` runs it under compute-sanitizer.
"""

from __future__ import annotations

from contextlib import closing
from functools import partial
from itertools import cycle, product

import numpy as np
import pytest
from attrs import evolve
from paged_forms import Engine, Size
from test_kernel_cuda import REASON, SMALL, WAYS, objects, on_device

from maru_core.contracts import LoadsByLayer
from maru_core.geometry import ChunkCopy
from maru_transfer.kernel import KernelEngine
from maru_transfer.layerwise import LayerwiseEngine

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
#: (engine, whether objects hold one layer)
ENGINES: dict[str, tuple[type[KernelEngine], bool]] = {
    "kernel": (KernelEngine, False),
    "layerwise, chunks": (LayerwiseEngine, False),
    "layerwise, layers": (LayerwiseEngine, True),
}


#: (way, engine, form, width): forms and widths take turns, and their numbers have no divisor in common.
CASES = [
    (way, engine, form, width)
    for (way, engine), form, width in zip(product(WAYS, ENGINES), cycle(FORMS), cycle(WIDTHS), strict=False)
]
#: What kernels move in place of many copies are accesses of 16 bytes only.
CASES += [(way, engine, "planes-first NHD", (8, 2)) for way in WAYS if "scattered" in way for engine in ENGINES]
CASES = list(dict.fromkeys(CASES))


@pytest.fixture(autouse=True)
def _slices_of_one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("maru_transfer.flow.LEAST_SLICE", 1)


def load_by_layer(transfer: LoadsByLayer, block_ids: list[int], copies: list[ChunkCopy]) -> None:
    load = transfer.begin_load(block_ids, copies)
    for layer in range(3):
        load.wait_layer(layer)
    load.finish()


@pytest.mark.parametrize(("way", "engine", "name", "width"), CASES)
def test_stores_and_loads(way: str, engine: str, name: str, width: tuple[int, int]) -> None:
    kind, layerwise = ENGINES[engine]
    tuning, locked = WAYS[way]
    if tuning.slot_bytes == SMALL.slot_bytes:
        tuning = evolve(tuning, slot_bytes=TINY, slots=2)
    layers: list[int | None] = [0, 2, 1] if layerwise else [None]
    moved = [(part, layer) for part in PARTS for layer in layers]
    dims, element = width
    size = Size(L=3, NB=10, BS=4, NH=3, HS=dims, element=element)
    source, target, expected = (Engine.make(name, size, seed) for seed in (7, None, None))
    stored = source.stored(CHUNK, layerwise=layerwise)
    wanted = [source.naive_object(TABLE, *part, CHUNK, layer) for part, layer in moved]
    buffers = objects(len(moved), stored.nbytes, locked=locked)
    for buffer, array in zip(buffers, wanted, strict=True):
        buffer[:] = np.full_like(array, 0xAB).tobytes()
    copies = [ChunkCopy(*part, buffer, layer) for (part, layer), buffer in zip(moved, buffers, strict=True)]
    with closing(kind(tuning).open(on_device(source), source.paged, stored)) as transfer:
        transfer.store(TABLE, copies)
    for (part, layer), buffer, array in zip(moved, buffers, wanted, strict=True):
        assert bytes(buffer) == array.tobytes()
        expected.naive_write(TABLE, *part, array, layer)
    pages = on_device(target)
    untouched = pages[0].clone()
    with closing(kind(tuning).open(pages, target.paged, stored)) as transfer:
        loads = [transfer.load]
        if isinstance(transfer, LoadsByLayer):
            loads.append(partial(load_by_layer, transfer))
        for load in loads:
            pages[0].copy_(untouched)
            load(TABLE, copies)
            found = pages[0].cpu().numpy().view(np.uint8)
            np.testing.assert_array_equal(found, expected.memory.reshape(-1).view(np.uint8))
