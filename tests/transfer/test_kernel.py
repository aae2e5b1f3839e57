"""The kernel engine against the naive reader, on a fake driver that runs everything as late as it may."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import closing
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from attrs import evolve, frozen
from cases import Case, cases
from fake_device import FakeDriver, aligned, compiler, registered
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paged_forms import FORMS, Engine, Size
from test_torch_copy import buffers_for, check_load, check_store, layers_of

from maru_core.contracts import TransferEngine
from maru_core.errors import TransferError
from maru_core.geometry import ChunkCopy
from maru_transfer.cuda_library import CudaDevice
from maru_transfer.kernel import KernelEngine, KernelTransfer, Tuning
from maru_transfer.kernel_plugin import maru_transfer_engines
from maru_transfer.memory import TorchMemory, asking

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C compiler")

SIZE = Size(L=3, NB=9, BS=4, NH=2, HS=4)
CASE = Case(SIZE, 8, [6, 2, 3, 5, 1, 4], [(0, 0, 8), (1, 8, 16), (2, 17, 23)])
#: So little that every request takes many slices, and slots are used again and again.
TIGHT = Tuning(slot_bytes=256, slots=3, window=3, burst=1, grid=3, direct_bytes=1 << 40, mapped_bytes=0, scattered=0)


@pytest.fixture(scope="module")
def driver(tmp_path_factory) -> FakeDriver:
    return FakeDriver.build(tmp_path_factory.mktemp("kernel"))


@frozen(eq=False)
class Registering:
    """A transfer of which every buffer is registered when it comes, in ``pieces``; 0: not at all."""

    driver: FakeDriver
    transfer: KernelTransfer
    pieces: int

    def load(self, block_ids, copies) -> None:
        self._register(copies)
        self.transfer.load(block_ids, copies)

    def store(self, block_ids, copies) -> None:
        self._register(copies)
        self.transfer.store(block_ids, copies)

    def close(self) -> None:
        self.transfer.close()

    def _register(self, copies) -> None:
        for copy in copies if self.pieces else ():
            registered(self.driver, copy.buffer, self.pieces)


#: (tuning, pieces in which buffers are registered)
WAYS: dict[str, tuple[Tuning, int]] = {
    "bounced": (evolve(TIGHT, slots=2, window=6, burst=4), 0),
    "staged": (evolve(TIGHT, slots=2, window=8, burst=6), 1),
    "staged across registrations": (TIGHT, 5),
    "direct": (evolve(TIGHT, direct_bytes=1), 1),
    "direct across registrations": (evolve(TIGHT, direct_bytes=1, window=2, burst=2), 2),
    "mapped": (evolve(TIGHT, mapped_bytes=1 << 40), 1),
    "one slice": (evolve(TIGHT, slot_bytes=1 << 20, slots=1, window=1), 1),
    "one by one": (evolve(TIGHT, one_by_one=True, window=2, burst=2), 2),
    "scattered": (evolve(TIGHT, scattered=1, scattered_grid=1), 1),
    "scattered, two lanes": (evolve(TIGHT, scattered=1, slots=2, window=8, burst=6), 1),
    "scattered in part": (evolve(TIGHT, slot_bytes=1536, slots=2, scattered=2, fold=0, window=6, burst=3), 1),
}


def wrap(way: str) -> Callable[[list[Any]], list[memoryview]]:
    """Objects where kernels can reach them, or at no aligned address."""
    return at_aligned if WAYS[way][0].mapped_bytes or WAYS[way][0].scattered else buffers_for


def at_aligned(arrays: list[Any]) -> list[memoryview]:
    buffers = [aligned(array.nbytes) for array in arrays]
    for buffer, array in zip(buffers, arrays, strict=True):
        buffer[:] = array.tobytes()
    return buffers


def opener(driver: FakeDriver, way: str, seed: int = 1) -> Callable[..., Any]:
    tuning, pieces = WAYS[way]

    def open_(layers, paged, stored) -> Registering:
        driver.hooks.fake_reset(seed)
        return Registering(driver, driver.transfer(layers, paged, stored, tuning), pieces)

    return open_


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases(), seed=st.integers(0, 1000))
def test_stored_objects_hold_what_the_naive_reader_reads(driver, way: str, name: str, case: Case, seed: int):
    check_store(opener(driver, way, seed), name, case, wrap(way))
    assert driver.counts()["misaligned"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases(), seed=st.integers(0, 1000))
def test_loading_writes_exactly_the_slots_that_were_asked_for(driver, way: str, name: str, case: Case, seed: int):
    check_load(opener(driver, way, seed), name, case, wrap(way))
    assert driver.counts()["misaligned"] == 0


def opened(driver: FakeDriver, tuning: Tuning = TIGHT, name: str = "planes-first NHD", seed: int | None = 5):
    driver.hooks.fake_reset(1)
    engine = Engine.make(name, SIZE, seed)
    return engine, driver.transfer(layers_of(engine), engine.paged, engine.stored(8), tuning)


def request(engine: Engine, count: int = 3) -> tuple[list[int], list[ChunkCopy]]:
    nbytes = engine.stored(8).nbytes
    return CASE.block_ids, [ChunkCopy(chunk, chunk * 8, chunk * 8 + 8, aligned(nbytes)) for chunk in range(count)]


@pytest.mark.parametrize("batch", [0, 12, 13])
def test_every_driver_gets_copies_in_the_way_that_it_takes(tmp_path, batch):
    """None has batches before CUDA 12.8, and 13.0 changed their signature."""
    driver = FakeDriver.build(tmp_path, batch=batch)
    check_store(opener(driver, "direct"), "planes-first NHD", CASE)
    assert bool(driver.counts()["batches"]) is (batch > 0)
    check_load(opener(driver, "staged across registrations"), "packed per head", CASE)
    assert driver.device().info.batches is (batch > 0)


def test_neighbouring_blocks_are_one_direct_copy_and_others_are_not(driver):
    engine, transfer = opened(driver, evolve(TIGHT, direct_bytes=1, slot_bytes=1 << 20, fold=0))
    for table, runs in (([1, 2, 3, 4, 5, 6], 1), ([1, 3, 2, 4, 5, 6], 2)):
        driver.hooks.fake_reset(1)
        (copy,) = request(engine, 1)[1]
        transfer.store(table, [evolve_buffer(copy, registered(driver, copy.buffer))])
        assert driver.counts()["copies"] == 2 * SIZE.L * runs
        assert driver.counts()["launches"] == 0
    transfer.close()


def evolve_buffer(copy: ChunkCopy, buffer: memoryview) -> ChunkCopy:
    return ChunkCopy(copy.chunk, copy.first, copy.last, buffer)


def test_a_small_request_needs_no_copy_engine(driver):
    engine, transfer = opened(driver, evolve(TIGHT, mapped_bytes=1 << 40))
    table, copies = request(engine)
    for copy in copies:
        registered(driver, copy.buffer)
    transfer.store(table, copies)
    assert (driver.counts()["copies"], driver.counts()["launches"] > 0) == (0, True)
    for copy in copies:
        assert bytes(copy.buffer) == engine.naive_object(table, copy.chunk, copy.first, copy.last, 8).tobytes()
    target, loading = opened(driver, evolve(TIGHT, mapped_bytes=1 << 40), seed=None)
    for copy in copies:
        registered(driver, copy.buffer)
    loading.load(table, copies)
    loading.close()
    transfer.close()
    for copy in copies:
        found = target.naive_object(table, copy.chunk, copy.first, copy.last, 8)
        assert bytes(copy.buffer) == found.tobytes()


def in_pieces(driver: FakeDriver, tuning: Tuning, *, offset: int = 0) -> dict[str, int]:
    """What the driver is asked for a store of one object of 8 tokens whose 6 rows are short of a token, each a copy."""
    engine, transfer = opened(driver, evolve(tuning, slot_bytes=1 << 12, fold=0))
    memory = registered(driver, aligned(engine.stored(8).nbytes + offset))
    transfer.store(CASE.block_ids, [ChunkCopy(0, 1, 8, memory[offset:])])
    transfer.close()
    found, wanted = np.frombuffer(memory[offset:], np.uint16), engine.naive_object(CASE.block_ids, 0, 1, 8, 8)
    np.testing.assert_array_equal(found.reshape(wanted.shape)[:, :, 1:], wanted[:, :, 1:])
    return driver.counts()


@pytest.mark.parametrize(("scattered", "copies"), [(0, 6), (1, 0), (6, 0), (7, 6)])
def test_a_slice_of_many_copies_is_moved_by_a_kernel(driver, scattered: int, copies: int):
    counts = in_pieces(driver, evolve(TIGHT, scattered=scattered))
    assert (counts["copies"], counts["launches"], counts["misaligned"]) == (copies, 1, 0)


def test_where_a_kernel_would_need_narrow_accesses_there_are_copies(driver):
    assert in_pieces(driver, evolve(TIGHT, scattered=1), offset=16)["copies"] == 0
    assert in_pieces(driver, evolve(TIGHT, scattered=1), offset=8)["copies"] == 6


def test_where_a_kernel_does_not_reach_host_memory_there_are_copies(driver):
    driver.hooks.fake_maps_host(0)
    try:
        assert in_pieces(driver, evolve(TIGHT, scattered=1))["copies"] == 6
        assert in_pieces(driver, evolve(TIGHT, mapped_bytes=1 << 40, scattered=1))["copies"] == 6
    finally:
        driver.hooks.fake_maps_host(1)


def test_copies_that_are_folded_count_as_one(driver):
    """Whole chunks whose rows lie at one distance; two of them are short of a token, at another one."""
    for scattered, copies in ((2, 0), (3, 2)):
        engine, transfer = opened(driver, evolve(TIGHT, slot_bytes=1 << 12, fold=2, scattered=scattered))
        both = [registered(driver, aligned(engine.stored(8).nbytes)) for _ in range(2)]
        parts = [ChunkCopy(0, 1, 8, both[0]), ChunkCopy(1, 9, 16, both[1])]
        transfer.store(CASE.block_ids, parts)
        transfer.close()
        assert driver.counts()["copies"] == copies, scattered


def test_a_kernel_that_reaches_host_memory_has_its_own_number_of_blocks(driver):
    size = Size(L=2, NB=70, BS=16, NH=4, HS=32)
    engine = Engine.make("planes-first NHD", size, 5)
    stored = engine.stored(1024)
    tuning = evolve(TIGHT, slot_bytes=1 << 20, slots=2, fold=0, grid=7)
    for scattered, blocks in ((0, 7), (2, 3)):
        driver.hooks.fake_reset(1)
        tuned = evolve(tuning, scattered=scattered, scattered_grid=3)
        with closing(driver.transfer(layers_of(engine), engine.paged, stored, tuned)) as transfer:
            transfer.store(list(range(64)), [ChunkCopy(0, 1, 1024, registered(driver, aligned(stored.nbytes)))])
        assert driver.counts()["most_blocks"] == blocks


#: Of 16 chunks, those from the seventh to the twelfth lie apart from each other.
LONG = Case(evolve(SIZE, NB=33), 8, [*range(32, 0, -1)], [(chunk, chunk * 8, chunk * 8 + 8) for chunk in range(16)])
APART = range(6, 12)


@pytest.mark.parametrize("lanes", [2, 3])
def test_copies_give_way_and_kernels_that_reach_host_memory_only_to_copies(driver, lanes: int):
    check_crossing(driver, lanes, seeds=5)


def check_crossing(driver: FakeDriver, lanes: int, seeds: int) -> None:
    """What may be on the bus at once: copies of all lanes but one, and a kernel of each; in two lanes a copy is alone.

    Slices of two chunks: three that are copied, three that a kernel moves, two that are copied.
    """
    tuning = evolve(TIGHT, slot_bytes=1536, slots=lanes, window=8, burst=6, fold=0, scattered=2)
    source, target = LONG.engine("planes-first NHD", 3), LONG.engine("planes-first NHD", None)
    stored = source.stored(8)
    most = dict.fromkeys(("most_copying", "most_reaching", "copying_and_reaching"), 0)
    for seed, engine in product(range(seeds), (source, target)):
        driver.hooks.fake_reset(seed)
        driver.hooks.fake_lazy(seed % 2)
        pool = registered(driver, aligned(2 * 16 * stored.nbytes))
        places = [2 * n + 1 if n in APART else n if n < APART.start else n + 16 for n in range(16)]
        buffers = [pool[place * stored.nbytes : (place + 1) * stored.nbytes] for place in places]
        copies = [ChunkCopy(*part, buffer) for part, buffer in zip(LONG.parts, buffers, strict=True)]
        with closing(driver.transfer(layers_of(engine), engine.paged, stored, tuning)) as transfer:
            if engine is source:
                transfer.store(LONG.block_ids, copies)
            else:
                for copy in copies:
                    copy.buffer[:] = source.naive_object(LONG.block_ids, *part_of(copy), 8).tobytes()
                transfer.load(LONG.block_ids, copies)
            for copy in copies:
                assert bytes(copy.buffer) == source.naive_object(LONG.block_ids, *part_of(copy), 8).tobytes()
            counts = driver.counts()
        assert (counts["copies"], counts["launches"]) == (5, 8)
        most = {name: max(count, counts[name]) for name, count in most.items()}
    driver.hooks.fake_drain()
    for copy in copies:
        found, wanted = (one.naive_object(LONG.block_ids, *part_of(copy), 8) for one in (target, source))
        np.testing.assert_array_equal(found, wanted)
    assert (most["most_copying"], most["most_reaching"]) == (lanes - 1, lanes)
    assert lanes > 2 or most["copying_and_reaching"] == 0


def part_of(copy: ChunkCopy) -> tuple[int, int, int]:
    return copy.chunk, copy.first, copy.last


def test_lanes_go_before_the_engines_own_kernels(driver):
    """The highest priority that the driver has, which is the lowest number: bytes on the bus wait for placement."""
    _, transfer = opened(driver)
    found = [driver.hooks.fake_priority(number) for number in range(256)]
    assert [priority for priority in found if priority <= 0] == [-5] * TIGHT.slots
    transfer.close()


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10_000))
def test_a_store_is_ordered_after_what_is_on_the_callers_stream(driver, way: str, seed: int):
    """R002, on a driver that runs the caller's kernels as late as it may."""
    tuning, pieces = WAYS[way]
    engine, transfer = opened(driver, tuning, seed=None)
    driver.hooks.fake_reset(seed)
    table, copies = request(engine)
    for copy in copies if pieces else ():
        registered(driver, copy.buffer, pieces)
    start, size = engine.memory.ctypes.data, engine.memory.nbytes
    for value in (0x11, 0x22, 0x33):
        driver.hooks.fake_fill(0, start, size, value)
    transfer.store(table, copies)
    driver.hooks.fake_fill(0, start, size, 0x44)
    assert all(set(bytes(copy.buffer)) == {0x33} for copy in copies)
    driver.hooks.fake_drain()
    transfer.close()


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10_000))
def test_a_load_is_ordered_between_what_was_on_the_stream_and_what_comes(driver, way: str, seed: int):
    """A reader before sees what was there, a reader behind what was loaded, and buffers may be reused at once."""
    tuning, pieces = WAYS[way]
    engine, transfer = opened(driver, tuning, seed=None)
    driver.hooks.fake_reset(seed)
    table, copies = request(engine)
    for copy in copies:
        copy.buffer[:] = b"\x55" * copy.buffer.nbytes
        if pieces:
            registered(driver, copy.buffer, pieces)
    memory = engine.memory
    before, after = np.zeros_like(memory), np.zeros_like(memory)
    driver.hooks.fake_copy(0, before.ctypes.data, memory.ctypes.data, memory.nbytes)
    transfer.load(table, copies)
    for copy in copies:
        copy.buffer[:] = b"\x66" * copy.buffer.nbytes
    driver.hooks.fake_copy(0, after.ctypes.data, memory.ctypes.data, memory.nbytes)
    driver.hooks.fake_drain()
    assert (before == 0xEE).all()
    for copy in copies:
        seen = Engine(engine.form, engine.size, after).naive_object(table, copy.chunk, copy.first, copy.last, 8)
        assert set(seen.tobytes()) == {0x55}
    transfer.close()


@pytest.mark.parametrize(
    "call", ["cuMemcpyAsync", "cuMemcpyBatchAsync", "cuLaunchKernel", "cuEventRecord", "cuStreamWaitEvent"]
)
@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize("direct", [False, True])
def test_a_failure_is_told_and_leaves_nothing_under_way(driver, call, after, direct):
    engine, transfer = opened(driver, evolve(TIGHT, direct_bytes=1 if direct else 1 << 40))
    table, copies = request(engine)
    for copy in copies:
        registered(driver, copy.buffer)
    driver.hooks.fake_fail(call.encode(), after)
    if call in ({"cuLaunchKernel", "cuMemcpyAsync"} if direct else {"cuMemcpyBatchAsync"}):  # not called at all
        transfer.store(table, copies)
    else:
        with pytest.raises(TransferError, match=r"CUDA_ERROR_FAKE .* as the test wanted"):
            transfer.store(table, copies)
        driver.hooks.fake_fail(b"", -1)
        held = [bytes(copy.buffer) for copy in copies]
        driver.hooks.fake_drain()
        assert [bytes(copy.buffer) for copy in copies] == held
    transfer.store(table, copies)
    for copy in copies:
        assert bytes(copy.buffer) == engine.naive_object(table, copy.chunk, copy.first, copy.last, 8).tobytes()
    transfer.close()


def test_closing_gives_streams_back_and_is_done_once(driver):
    _, transfer = opened(driver)
    assert driver.hooks.fake_streams() == TIGHT.slots
    transfer.close()
    transfer.close()
    assert driver.hooks.fake_streams() == 0
    assert (transfer.staging_bytes, transfer.locked_bytes) == (0, 0)
    with pytest.raises(TransferError, match="closed"):
        transfer.load([], [])


def test_locked_memory_is_taken_only_when_it_is_needed_and_accounted(driver):
    engine, transfer = opened(driver)
    table, copies = request(engine)
    for copy in copies:
        registered(driver, copy.buffer)
    transfer.store(table, copies)
    assert transfer.locked_bytes == 0
    transfer.store(table, request(engine)[1])
    assert transfer.locked_bytes == TIGHT.slots * TIGHT.slot_bytes
    assert transfer.staging_bytes == TIGHT.slots * TIGHT.slot_bytes + 8 * SIZE.L
    transfer.close()


def test_who_knows_what_is_locked_is_believed(driver):
    class Nothing:
        def spans(self, address, length):
            return [Span(0, length, False)]

    engine, transfer = opened(driver)
    table, copies = request(engine)
    for copy in copies:
        registered(driver, copy.buffer)
    transfer.use_pinned(Nothing())
    transfer.store(table, copies)
    assert transfer.locked_bytes > 0
    transfer.close()


def test_a_driver_that_tells_of_other_addresses_is_not_believed():
    """So it does where the device does not see registered memory at the host's address."""

    elsewhere = 1 << 40

    class Device:
        def host_range(self, address: int) -> tuple[int, int]:
            return address + elsewhere, 1 << 20

    spans = asking(Device())
    for address in (4096, 4096 + elsewhere):
        assert spans(address, 8192) == [(address, address + 8192, False)]


def test_memory_of_the_device_is_given_when_what_had_it_has_run(monkeypatch):
    """Torch's allocator gives memory away again while work is queued that uses it, ordered by the stream alone."""
    queued = ["an earlier kernel"]

    class Stream:
        def synchronize(self) -> None:
            queued.clear()

    class Tensor:
        def data_ptr(self) -> int:
            return 256

    cuda = SimpleNamespace(current_stream=lambda device: Stream())
    fake = SimpleNamespace(empty=lambda *_, **__: Tensor(), uint8=None, cuda=cuda)
    monkeypatch.setitem(sys.modules, "torch", fake)
    assert TorchMemory("cuda:0").on_device(17)[1] == 256
    assert not queued


@frozen
class Span:
    offset: int
    length: int
    pinned: bool


@pytest.mark.parametrize("way", WAYS)
def test_chunks_of_requests_that_share_a_block_are_stored_together(driver, way):
    case = Case(SIZE, 8, [3, 2, 3, 1], [(0, 0, 8), (1, 8, 16)])
    check_store(opener(driver, way), "planes-first NHD", case, wrap(way))


@pytest.mark.parametrize(
    ("table", "part", "culprit"),
    [
        ([1, 9], (0, 0, 8), "block 9 at place 1"),
        ([1, -1], (0, 0, 8), "block -1 at place 1"),
        ([1], (0, 0, 8), "holds 1 blocks"),
        ([1, 1], (0, 0, 8), "block 1 stands at places 0 and 1"),
        ([1, 2], (0, 0, 9), r"tokens \[0, 9\)"),
        ([1, 2], (1, 7, 8), r"tokens \[7, 8\)"),
        ([1, 1 << 70], (0, 0, 8), "at place 1"),
    ],
)
def test_what_cannot_be_moved_is_refused_in_the_words_of_the_plan(driver, table, part, culprit):
    engine, transfer = opened(driver, seed=None)
    with pytest.raises(TransferError, match=culprit):
        transfer.load(table, [ChunkCopy(*part, aligned(engine.stored(8).nbytes))])
    with pytest.raises(TransferError, match="read-only"):
        transfer.store([1, 2], [ChunkCopy(0, 0, 8, aligned(engine.stored(8).nbytes).toreadonly())])
    with pytest.raises(TransferError, match="buffer of 8 bytes"):
        transfer.load([1, 2], [ChunkCopy(0, 0, 8, aligned(8))])
    transfer.load([1, 2], [ChunkCopy(0, 3, 3, aligned(engine.stored(8).nbytes))])
    transfer.close()
    assert (engine.memory == 0xEE).all()


class TestEngine:
    def test_it_says_what_is_missing(self, tmp_path):
        engine: TransferEngine = KernelEngine(library=tmp_path / "none.so")
        assert engine.name == "kernel"
        assert not engine.is_available()
        assert "was never built" in (engine.import_error() or "")
        (tmp_path / "none.so").write_bytes(b"not a library")
        assert "cannot be used" in (engine.import_error() or "")
        (tmp_path / "_build_info.json").write_text('{"cuda": {"built": false, "reason": "nvcc was not found"}}')
        (tmp_path / "none.so").unlink()
        assert "nvcc was not found" in (engine.import_error() or "")
        with pytest.raises(TransferError, match="nvcc was not found"):
            engine.open([], Engine.make("MLA", SIZE, 5).paged, Engine.make("MLA", SIZE, 5).stored(8))

    def test_a_driver_that_is_not_there_is_named(self, driver, tmp_path):
        with pytest.raises(TransferError, match=r"nowhere\.so cannot be opened"):
            CudaDevice(driver.native, 0, str(tmp_path / "nowhere.so"))
        with pytest.raises(TransferError, match="DeviceGet failed"):
            CudaDevice(driver.native, 7, str(driver.path))

    def test_a_forked_process_is_told_what_torch_says(self, driver, monkeypatch):
        """Whether an engine is available is asked of anybody, and answered."""

        def refuse() -> int:
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

        cuda = SimpleNamespace(is_available=lambda: True, current_device=refuse)
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
        monkeypatch.setattr(KernelEngine, "_load", lambda engine: driver.native)
        assert not KernelEngine().is_available()
        assert "forked" in (KernelEngine().import_error() or "")

    def test_what_it_cannot_move_is_said_before(self):
        engine = Engine.make("packed per head", SIZE, 5)
        stored = engine.stored(8)
        assert KernelEngine().unsupported(engine.paged, stored, "cuda") is None
        assert "cpu" in (KernelEngine().unsupported(engine.paged, stored, "cpu") or "")
        assert "planes" in (KernelEngine().unsupported(engine.paged, evolve(stored, num_planes=1), "cuda") or "")
        by_layer = engine.stored(8, layerwise=True)
        assert KernelEngine().unsupported(engine.paged, by_layer, "cuda") is None
        odd = evolve(engine.paged, element_size=3), evolve(stored, element_size=3)
        assert "3 bytes" in (KernelEngine().unsupported(*odd, "cuda") or "")

    def test_its_plugin_offers_it_before_the_reference(self):
        (provision,) = maru_transfer_engines()
        assert (provision.name, provision.rank) == ("kernel", 10)
        assert provision.factory().name == provision.name
