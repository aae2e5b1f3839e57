"""The kernel engine on a real GPU: bytes equal to torch-copy's, order on the device, errors.

Skipped where there is no CUDA device or the native library was not built.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from contextlib import closing
from itertools import product

import numpy as np
import pytest
import torch
from attrs import evolve
from paged_forms import FORMS, Engine, Size

from maru_core.brake import Brake, Pull
from maru_core.errors import TransferError
from maru_core.geometry import ChunkCopy
from maru_transfer.cuda_driver import CudaDriver
from maru_transfer.kernel import KernelEngine, Tuning
from maru_transfer.prepared import prepare_store
from maru_transfer.torch_copy import TorchCopyEngine

REASON = KernelEngine().import_error()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
NEVER = 1 << 40
SMALL = Tuning(slot_bytes=16 << 10, slots=4, window=3, burst=2, direct_bytes=NEVER, mapped_bytes=0, scattered=0)
#: (tuning, whether objects are locked)
WAYS = {
    "staged": (SMALL, True),
    "staged, one by one": (evolve(SMALL, one_by_one=True), True),
    "bounced": (SMALL, False),
    "direct": (evolve(SMALL, direct_bytes=1), True),
    "mapped": (evolve(SMALL, mapped_bytes=NEVER), True),
    "scattered": (evolve(SMALL, scattered=1, scattered_grid=2), True),
    "scattered in part": (evolve(SMALL, slots=2, scattered=3, fold=0), True),
    "as tuned": (Tuning(), True),
}
#: (layers, block size, heads, head size): block size equal to heads and not, sizes that no power of two divides.
SIZES = [(3, 16, 8, 64), (2, 8, 3, 80), (2, 16, 2, 128), (1, 5, 7, 12), (2, 32, 1, 576), (4, 1, 4, 16)]


def on_device(engine: Engine) -> list[torch.Tensor]:
    size = engine.size
    raw = torch.from_numpy(engine.memory.reshape(-1).view("u1")).cuda().view(INTEGERS[size.element])
    return [raw[engine.form.layer(size) * layer :] for layer in range(size.L)]


def objects(count: int, nbytes: int, *, locked: bool, offset: int = 0) -> list[memoryview]:
    made = []
    for _ in range(count):
        tensor = torch.full((nbytes + offset,), 0xAB, dtype=torch.uint8, pin_memory=locked)
        made.append(memoryview(tensor.numpy())[offset:])
    return made


def request(size: Size, chunk_tokens: int, *, together: bool) -> tuple[list[int], list[tuple[int, int, int]]]:
    """A table whose blocks follow each other, or not, and three chunks: whole, from the middle, to the middle."""
    tokens = 3 * chunk_tokens - 3
    blocks = -(-tokens // size.BS)
    table = [block + 1 for block in range(blocks)]
    if not together:
        np.random.default_rng(4).shuffle(table)
    middle = chunk_tokens + min(5, chunk_tokens - 1)
    return table, [(0, 0, chunk_tokens), (1, middle, 2 * chunk_tokens), (2, 2 * chunk_tokens, tokens)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", sorted(FORMS))
def test_bytes_are_those_of_torch_copy(name: str, way: str):
    tuning, locked = WAYS[way]
    for (layers, block_size, heads, head_size), element, together in product(SIZES, INTEGERS, (False, True)):
        chunk_tokens = 4 * block_size + (3 if together else 0)
        size = Size(layers, 3 * chunk_tokens // block_size + 3, block_size, heads, head_size, element)
        source = Engine.make(name, size, 7)
        stored = source.stored(chunk_tokens)
        table, parts = request(size, chunk_tokens, together=together)
        offset = 0 if element > 1 else 1
        wanted = objects(3, stored.nbytes, locked=False)
        found = objects(3, stored.nbytes, locked=locked, offset=offset)
        tensors = on_device(source)
        with (
            closing(TorchCopyEngine().open(tensors, source.paged, stored)) as reference,
            closing(KernelEngine(tuning).open(tensors, source.paged, stored)) as transfer,
        ):
            reference.store(table, [ChunkCopy(*part, b) for part, b in zip(parts, wanted, strict=True)])
            transfer.store(table, [ChunkCopy(*part, b) for part, b in zip(parts, found, strict=True)])
        tokens_of = [slice(first - chunk * chunk_tokens, last - chunk * chunk_tokens) for chunk, first, last in parts]
        shape = (stored.num_planes, stored.num_layers, chunk_tokens, -1)
        for tokens, one, other in zip(tokens_of, wanted, found, strict=True):
            wanted_array = np.frombuffer(one, np.uint8).reshape(shape)
            found_array = np.frombuffer(other, np.uint8).reshape(shape)
            assert (wanted_array[:, :, tokens] == found_array[:, :, tokens]).all(), (size, together)
            found_array = np.delete(found_array, np.r_[tokens], axis=2)
            assert (found_array == 0xAB).all(), (size, together)
        results = []
        for engine, buffers in ((TorchCopyEngine(), wanted), (KernelEngine(tuning), found)):
            target = Engine.make(name, size, None)
            tensors = on_device(target)
            copies = [ChunkCopy(*part, b.toreadonly()) for part, b in zip(parts, buffers, strict=True)]
            with closing(engine.open(tensors, target.paged, stored)) as transfer:
                transfer.load(table, copies)
            results.append(tensors[0].clone())
        assert torch.equal(*results), (size, together)


SIZE = Size(L=8, NB=66, BS=16, NH=8, HS=128)
TABLE = list(range(64, 0, -1))


@pytest.mark.parametrize("way", WAYS)
def test_a_store_sees_the_last_value_of_a_slow_write_on_its_stream(way: str):
    """R002: 150 of 150, each time on a new stream, while the kernel that writes the pages still runs."""
    tuning, locked = WAYS[way]
    engine = Engine.make("planes-first NHD", SIZE, None)
    stored = engine.stored(256)
    layers = on_device(engine)
    (buffer,) = objects(1, stored.nbytes, locked=locked)
    right = 0
    with closing(KernelEngine(tuning).open(layers, engine.paged, stored)) as transfer:
        for value in range(1, 151):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                torch.cuda._sleep(1_000_000)
                layers[0].fill_(value)
                transfer.store(TABLE, [ChunkCopy(0, 0, 256, buffer)])
            right += bool((np.frombuffer(buffer, "i2") == value).all())
    assert right == 150


@pytest.mark.parametrize("way", WAYS)
def test_a_store_that_is_stopped_has_what_it_says_and_reads_no_more_when_it_returns(way: str):
    """Another stream overwrites the pages at once; objects of four blocks each, stopped earlier or later."""
    tuning, locked = WAYS[way]
    engine = Engine.make("planes-first NHD", SIZE, None)
    stored = engine.stored(64)
    layers = on_device(engine)
    buffers = objects(16, stored.nbytes, locked=locked)
    copies = [ChunkCopy(n, 64 * n, 64 * n + 64, buffer) for n, buffer in enumerate(buffers)]
    other = torch.cuda.Stream()
    brake = Brake()
    with closing(KernelEngine(tuning).open(layers, engine.paged, stored)) as transfer:
        for value in range(1, 61):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            for buffer in buffers:
                np.frombuffer(buffer, "i2")[:] = 0
            with torch.cuda.stream(stream), closing(prepare_store(transfer, TABLE, copies)) as store:
                layers[0].fill_(value)
                brake.pull = Pull.STOP if value == 1 else Pull.GO_ON
                timer = threading.Timer(value * 2e-5, setattr, (brake, "pull", Pull.STOP))
                timer.start()
                moved = store.run(brake, 1)
            with torch.cuda.stream(other):
                layers[0].fill_(-value)
            other.synchronize()
            timer.join()
            assert moved == 0 or value > 1
            for number, buffer in enumerate(buffers):
                found = np.frombuffer(buffer, "i2")
                assert (found == value).all() if number < moved else (found != -value).all()


@pytest.mark.parametrize("way", WAYS)
def test_a_load_waits_for_readers_of_its_pages_and_is_seen_by_what_comes_next(way: str):
    """Both edges, 150 of 150: slow work that still reads the pages first, and a reader that is queued behind."""
    tuning, locked = WAYS[way]
    engine = Engine.make("planes-first NHD", SIZE, None)
    stored = engine.stored(256)
    layers = on_device(engine)
    (buffer,) = objects(1, stored.nbytes, locked=locked)
    pages = layers[0].view(SIZE.L, 2, SIZE.NB, -1)
    used = torch.tensor(TABLE[:16], device="cuda")
    pages[:, :, used] = 0
    right = 0
    with closing(KernelEngine(tuning).open(layers, engine.paged, stored)) as transfer:
        for value in range(1, 151):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                torch.cuda._sleep(1_000_000)
                before = pages[:, :, used].clone()
                np.frombuffer(buffer, "i2")[:] = value
                transfer.load(TABLE, [ChunkCopy(0, 0, 256, buffer)])
                np.frombuffer(buffer, "i2")[:] = -1  # it may be reused now
                after = pages[:, :, used].clone()
            stream.synchronize()
            right += bool((before == value - 1).all()) and bool((after == value).all())
    assert right == 150


def test_registered_memory_of_two_registrations_is_copied_across_their_edge():
    engine = Engine.make("planes-first NHD", SIZE, 3)
    stored = engine.stored(256)
    raw = np.full(2 * stored.nbytes + 8192, 0xAB, np.uint8)
    first = -raw.ctypes.data % 4096
    middle = first + (stored.nbytes // 2) // 4096 * 4096
    runtime = torch.cuda.cudart()
    for start, end in ((first, middle), (middle, first + stored.nbytes)):
        assert int(runtime.cudaHostRegister(raw.ctypes.data + start, end - start, 3)) == 0
    try:
        buffer = memoryview(raw[first : first + stored.nbytes])
        (wanted,) = objects(1, stored.nbytes, locked=False)
        layers = on_device(engine)
        with closing(KernelEngine(SMALL).open(layers, engine.paged, stored)) as transfer:
            transfer.store(TABLE, [ChunkCopy(0, 0, 256, wanted)])
            assert transfer.locked_bytes > 0
        with closing(KernelEngine(SMALL).open(layers, engine.paged, stored)) as transfer:
            transfer.store(TABLE, [ChunkCopy(0, 0, 256, buffer)])
            assert transfer.locked_bytes == 0, "the driver does not tell which memory is registered"
        assert buffer == wanted
    finally:
        for start in (first, middle):
            runtime.cudaHostUnregister(raw.ctypes.data + start)


def test_staging_is_accounted_by_torch_and_given_back():
    engine = Engine.make("planes-first NHD", SIZE, 3)
    layers = on_device(engine)
    before = torch.cuda.memory_allocated()
    transfer = KernelEngine(SMALL).open(layers, engine.paged, engine.stored(256))
    assert transfer.staging_bytes == SMALL.slots * SMALL.slot_bytes + 8 * SIZE.L
    assert torch.cuda.memory_allocated() - before >= transfer.staging_bytes
    transfer.close()
    transfer.close()
    assert torch.cuda.memory_allocated() == before
    with pytest.raises(TransferError, match="closed"):
        transfer.load(TABLE, [])


def test_staging_is_not_used_before_what_had_its_memory_has_run():
    """Torch gives memory away again at once: what is still queued on the same stream may write to it."""
    engine = Engine.make("planes-first NHD", SIZE, None)
    stored = engine.stored(256)
    (buffer,) = objects(1, stored.nbytes, locked=True)
    np.frombuffer(buffer, "i2")[:] = 7
    layers = on_device(engine)
    nbytes = SMALL.slots * SMALL.slot_bytes + 8 * SIZE.L
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        earlier = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        address = earlier.data_ptr()
        torch.cuda._sleep(100_000_000)
        earlier.fill_(0xDD)
        del earlier
        with closing(KernelEngine(SMALL).open(layers, engine.paged, stored)) as transfer:
            assert transfer._staging.data_ptr() == address, "this test needs the same memory"
            transfer.load(TABLE, [ChunkCopy(0, 0, 256, buffer)])
            torch.cuda.synchronize()
    pages = layers[0].view(SIZE.L, 2, SIZE.NB, -1)[:, :, torch.tensor(TABLE[:16], device="cuda")]
    assert bool((pages == 7).all())


def test_a_capture_of_the_engine_survives_what_other_threads_do_meanwhile():
    """vLLM captures its CUDA graphs while pools are registered, and might while something is loaded."""
    engine = Engine.make("packed per token", Size(2, 9, 16, 8, 64, 2), 7)
    stored = engine.stored(32)
    buffers = objects(1, stored.nbytes, locked=True)
    transfer = KernelEngine(SMALL).open(on_device(engine), engine.paged, stored)
    driver, region = CudaDriver(0), mmap.mmap(-1, 64 << 20)
    address = ctypes.addressof(ctypes.c_char.from_buffer(region))
    done, rounds, problems = threading.Event(), [0], []

    def others() -> None:
        try:
            driver.attach()
            while not done.is_set():
                driver.register(address, 64 << 20)
                transfer.store([1, 2], [ChunkCopy(0, 0, 32, buffers[0])])
                driver.unregister(address, 64 << 20)
                rounds[0] += 1
        except Exception as error:  # noqa: BLE001 - told by the test's own thread
            problems.append(error)

    matrix = torch.rand(512, 512, device="cuda")
    expected = matrix @ matrix
    torch.cuda.synchronize()
    worker = threading.Thread(target=others)
    worker.start()
    try:
        for _ in range(20):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                result = matrix @ matrix
                before = rounds[0]
                deadline = time.monotonic() + 20
                while rounds[0] < before + 2 and not problems and time.monotonic() < deadline:
                    time.sleep(0.001)
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(result, expected)
    finally:
        done.set()
        worker.join()
        transfer.close()
    assert not problems
    assert rounds[0] >= 40
