"""How often a request asks the driver for something: what that costs a thread on a GPU, no machine here can tell.

A prompt of 16,384 tokens of a model with the layers, blocks and chunks of Llama-3.1-8B, of which a token has a 128th of
the bytes; so have slices. So a request makes as many slices, copies and launches as one of 2 GiB.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from attrs import evolve, frozen
from fake_device import FakeDriver, aligned, compiler, registered
from paged_forms import Engine, Size
from test_torch_copy import layers_of

from maru_core.batches import ChunkCopies, Rooms
from maru_core.brake import Brake
from maru_core.contracts import LayeredLoad
from maru_core.geometry import ChunkCopy
from maru_transfer.kernel import KernelTransfer, Tuning
from maru_transfer.layerwise import LayerwiseTransfer

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C compiler")

SMALLER = 128
SIZE = Size(L=32, NB=1032, BS=16, NH=1, HS=8, element=2)
CHUNK, CHUNKS = 256, 64
SLICES = 64
#: The engine's own settings, for so few bytes.
TUNING = evolve(Tuning(), slot_bytes=Tuning().slot_bytes // SMALLER, direct_bytes=1 << 40, mapped_bytes=0)
#: Copies of a slice that are too many where kernels may move it.
MANY = 8
TABLE: list[int] = (np.random.default_rng(1).permutation(SIZE.NB - 1)[: CHUNKS * CHUNK // SIZE.BS] + 1).tolist()


@frozen(eq=False)
class Bench:
    """Pages, objects in one registered pool, and what makes the copies of either format."""

    driver: FakeDriver
    engine: Engine
    pool: memoryview

    @classmethod
    def make(cls, driver: FakeDriver) -> Bench:
        engine = Engine.make("planes-first NHD", SIZE, 5)
        return cls(driver, engine, aligned(CHUNKS * engine.stored(CHUNK).nbytes))

    def wanted(self) -> Any:
        """[chunks, planes, layers, tokens, elements]: what objects must hold."""
        pages = self.engine.memory.reshape(SIZE.L, 2, SIZE.NB, SIZE.BS, -1)[:, :, TABLE]
        return pages.reshape(SIZE.L, 2, CHUNKS, CHUNK, -1).transpose(2, 1, 0, 3, 4)

    def objects(self, copies: Sequence[ChunkCopy]) -> Any:
        """The same, from objects of either format."""
        found = np.empty_like(self.wanted())
        for copy in copies:
            array = np.frombuffer(copy.buffer, np.uint16).reshape(2, -1, CHUNK, SIZE.NH * SIZE.HS)
            if copy.layer is None:
                found[copy.chunk] = array
            else:
                found[copy.chunk, :, copy.layer] = array[:, 0]
        return found

    def fill(self, copies: Sequence[ChunkCopy], wanted: Any) -> None:
        """Objects, as :meth:`wanted` says."""
        for copy in copies:
            array = wanted[copy.chunk] if copy.layer is None else wanted[copy.chunk, :, copy.layer]
            copy.buffer[:] = array.tobytes()

    def copies(self, *, layerwise: bool, scattered: bool) -> ChunkCopies:
        objects = SIZE.L if layerwise else 1
        nbytes = self.engine.stored(CHUNK, layerwise=layerwise).nbytes
        places = list(range(CHUNKS * objects))
        if scattered:
            places = np.random.default_rng(2).permutation(places).tolist()
        return ChunkCopies(range(len(places)), objects, CHUNK, Rooms(self.pool, places, 0, nbytes, nbytes))


def store(transfer: KernelTransfer, copies: Sequence[ChunkCopy]) -> None:
    transfer.store(TABLE, copies)


def load(transfer: KernelTransfer, copies: Sequence[ChunkCopy]) -> None:
    transfer.load(TABLE, copies)


def prepared(transfer: KernelTransfer, copies: Sequence[ChunkCopy]) -> None:
    with closing(transfer.prepare_load(TABLE, copies)) as found:
        assert found.run(Brake(), 1) == len(copies)


def by_layer(transfer: KernelTransfer, copies: Sequence[ChunkCopy]) -> None:
    assert isinstance(transfer, LayerwiseTransfer)
    underway: LayeredLoad = transfer.begin_load(TABLE, copies)
    underway.finish()
    transfer._thread.settle()


@frozen
class Way:
    """``copies`` by the copy engine, however many go in one call; ``events``: recorded, and waited for by streams."""

    move: Callable[[KernelTransfer, Sequence[ChunkCopy]], None]
    copies: int
    events: int
    layerwise: bool = False
    scattered: bool = False
    #: Slices of many copies are left to kernels that reach host memory.
    by_kernels: bool = False


#: Of each slice the end of its crossing, and the wait of the next one for that; a kernel that reaches host memory does
#: not wait for one.
CROSSING, MAPPED_CROSSING = 2 * SLICES - 1, SLICES
#: Where pages may be touched, for each lane; and the end of what each does with them, which the caller's stream awaits.
BEFORE, BEHIND = 1 + 2, 2 * 2
#: Of each layer the end of the slice before its last, the wait for that, and its own event. What a kernel brings from
#: host memory into pages has one end only.
LAYERS, MAPPED_LAYERS = 3 * SIZE.L, 2 * SIZE.L
#: Scattered, an object of a layer is a copy, and of one that holds all layers each plane of a layer.
OBJECTS, PIECES = CHUNKS * SIZE.L, 2 * CHUNKS * SIZE.L
#: The most that a request may take.
WAYS = {
    "load": Way(load, SLICES, BEFORE + CROSSING + BEHIND),
    "load, prepared": Way(prepared, SLICES, BEFORE + CROSSING),
    "store": Way(store, SLICES, BEFORE + CROSSING),
    "store, scattered": Way(store, SLICES, BEFORE + CROSSING, scattered=True),
    "load by layer": Way(by_layer, SLICES, BEFORE + CROSSING + LAYERS),
    "load by layer, scattered": Way(by_layer, PIECES, BEFORE + CROSSING + LAYERS, scattered=True),
    "load by layer, scattered, by kernels": Way(
        by_layer, 0, BEFORE + MAPPED_CROSSING + MAPPED_LAYERS, scattered=True, by_kernels=True
    ),
    "load by layer, an object each": Way(by_layer, SLICES, BEFORE + CROSSING + LAYERS, layerwise=True),
    "load by layer, an object each, scattered": Way(
        by_layer, OBJECTS, BEFORE + CROSSING + LAYERS, layerwise=True, scattered=True
    ),
    "load by layer, an object each, scattered, by kernels": Way(
        by_layer, 0, BEFORE + MAPPED_CROSSING + MAPPED_LAYERS, layerwise=True, scattered=True, by_kernels=True
    ),
    "store, an object for each layer": Way(store, SLICES, BEFORE + CROSSING, layerwise=True),
    "store, an object for each layer, scattered": Way(
        store, OBJECTS, BEFORE + CROSSING, layerwise=True, scattered=True
    ),
    "store, an object for each layer, scattered, by kernels": Way(
        store, 0, BEFORE + MAPPED_CROSSING, layerwise=True, scattered=True, by_kernels=True
    ),
}
#: Calls of which a request makes a few, whatever its size: they take a tenth of a microsecond.
CHEAP = {
    "cuCtxGetCurrent",
    "cuCtxPushCurrent",
    "cuCtxPopCurrent",
    "cuThreadExchangeStreamCaptureMode",
    "cuPointerGetAttributes",
}


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> FakeDriver:
    return FakeDriver.build(tmp_path_factory.mktemp("calls"))


@pytest.mark.parametrize("columns", [False, True], ids=["one by one", "columns"])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (name, kind)
        for name, way in WAYS.items()
        for kind in (KernelTransfer, LayerwiseTransfer)
        if kind is LayerwiseTransfer or way.move is not by_layer
    ],
)
def test_a_request_asks_the_driver_no_more_than_this(
    driver, monkeypatch, name: str, kind: type[KernelTransfer], columns: bool
) -> None:
    way = WAYS[name]
    monkeypatch.setattr("maru_transfer.flow.LEAST_SLICE", (8 << 20) // SMALLER)
    monkeypatch.setattr("maru_transfer.kernel._LEAST_SLOT", TUNING.slot_bytes)
    bench = Bench.make(driver)
    wanted = bench.wanted()
    copies = bench.copies(layerwise=way.layerwise, scattered=way.scattered)
    stored = bench.engine.stored(CHUNK, layerwise=way.layerwise)
    if way.move is not store:
        bench.fill(copies, wanted)
        bench.engine.memory[:] = 0
    tuning = evolve(TUNING, scattered=MANY if way.by_kernels else 0)
    with closing(driver.transfer(layers_of(bench.engine), bench.engine.paged, stored, tuning, kind)) as transfer:
        # What the first request makes, the next ones use.
        for _ in range(2):
            driver.hooks.fake_reset(1)
            registered(driver, bench.pool)
            way.move(transfer, copies if columns else list(copies))
            calls, counts = driver.calls(), driver.counts()
    driver.hooks.fake_drain()
    np.testing.assert_array_equal(bench.wanted(), wanted)
    np.testing.assert_array_equal(bench.objects(copies), wanted)

    assert counts["copies"] <= way.copies
    # However many copies a slice has, they are given to the driver at once, but for the few that lie at one distance.
    assert sum(count for name, count in calls.items() if name.startswith("cuMemcpy")) <= min(way.copies, 3 * SLICES)
    assert calls.pop("cuLaunchKernel") == SLICES
    assert calls.pop("cuEventRecord") + calls.pop("cuStreamWaitEvent") <= way.events
    # A thread sleeps until most of those under way have gone, and in the end: for the last, or for that of each lane.
    sleeps = 1 + -(-(SLICES - TUNING.window) // TUNING.burst)
    assert calls.pop("cuEventSynchronize") <= sleeps * (1 if way.copies else TUNING.slots)
    # Of a load whose end nobody's stream awaits, for the placement in both lanes.
    assert calls.pop("cuStreamSynchronize", 0) <= 2
    rest = {name: count for name, count in calls.items() if not name.startswith("cuMemcpy")}
    assert rest.keys() <= CHEAP
    assert sum(rest.values()) <= 40


#: Bytes of an object, and of a row of it: one plane of one layer.
OBJECT = 2 * SIZE.L * CHUNK * SIZE.NH * SIZE.HS * SIZE.element
ROW = OBJECT // (2 * SIZE.L)


@frozen
class Edges:
    """The pool is registered in pieces of so many ``objects``; the first edge lies ``first`` bytes from its beginning.

    ``copies``: of a slice, which has the rows of 32 objects. But ``torn`` slices would be ``many``, so that they are a
    kernel's, if any is.
    """

    objects: int
    first: int
    copies: int
    torn: int = 0
    many: int = 0


EDGES = {
    "between objects": Edges(8, 8 * OBJECT, 4),
    "between objects, large": Edges(32, 32 * OBJECT, 1),
    "between planes of an object": Edges(8, 4 * OBJECT + OBJECT // 2, 5),
    "between rows of an object": Edges(8, 4 * OBJECT + 5 * ROW, 5),
    # Of one layer: four rows are two copies each, and what lies before, between and behind them is one.
    "within a row": Edges(8, 4 * OBJECT + 5 * ROW + ROW // 2, 5, torn=2, many=8 + 5),
    "around every object": Edges(1, OBJECT, 0, torn=SLICES, many=64),
}


@pytest.mark.parametrize("name", EDGES)
@pytest.mark.parametrize("scattered", [MANY, 0])
def test_rows_are_one_copy_as_far_as_a_registration_reaches(driver, monkeypatch, name: str, scattered: int) -> None:
    """A load by layer takes few copies only if registrations hold many objects, wherever their edges lie."""
    monkeypatch.setattr("maru_transfer.flow.LEAST_SLICE", (8 << 20) // SMALLER)
    monkeypatch.setattr("maru_transfer.kernel._LEAST_SLOT", TUNING.slot_bytes)
    edges, bench = EDGES[name], Bench.make(driver)
    wanted, copies = bench.wanted(), bench.copies(layerwise=False, scattered=False)
    bench.fill(copies, wanted)
    bench.engine.memory[:] = 0
    tuning = evolve(TUNING, scattered=scattered)
    stored = bench.engine.stored(CHUNK)
    driver.hooks.fake_reset(1)
    cuts = [0, *range(edges.first, bench.pool.nbytes, edges.objects * OBJECT), bench.pool.nbytes]
    for first, last in pairwise(cuts):
        registered(driver, bench.pool[first:last])
    with closing(
        driver.transfer(layers_of(bench.engine), bench.engine.paged, stored, tuning, LayerwiseTransfer)
    ) as transfer:
        by_layer(transfer, copies)
    driver.hooks.fake_drain()
    np.testing.assert_array_equal(bench.wanted(), wanted)

    assert driver.calls()["cuLaunchKernel"] == SLICES
    torn = 0 if scattered else edges.torn * edges.many
    assert driver.counts()["copies"] == (SLICES - edges.torn) * edges.copies + torn
