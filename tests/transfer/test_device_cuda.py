"""The device path on a real GPU: bytes, ordering on the current stream, pinned, registered and pageable objects.

Skipped where there is no CUDA device; ``pytest tests/transfer/test_device_cuda.py`` on a host that has one.
"""

from __future__ import annotations

import resource
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from attrs import evolve
from fake_driver import FakeRegion
from paged_forms import FORMS, Engine, Size

from maru_core.geometry import ChunkCopy
from maru_transfer.cuda_driver import ALREADY_REGISTERED, OUT_OF_MEMORY, CudaDriver, DriverError
from maru_transfer.device_copy import DeviceTransfer
from maru_transfer.held import HeldTransfer
from maru_transfer.pinning import PinnedPools, address_of
from maru_transfer.torch_copy import TorchCopyEngine
from tests.waiting import eventually

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

PAGE = resource.getpagesize()
SIZE = Size(L=3, NB=9, BS=16, NH=2, HS=32)
TABLE = [5, 3, 8, 1, 7, 2]
#: (chunk, first, last): a whole chunk of 32 tokens, one that starts late and one that ends early.
PARTS = [(0, 0, 32), (1, 35, 64), (2, 64, 83)]


def on_device(engine: Engine) -> list[torch.Tensor]:
    flat = torch.from_numpy(engine.memory.reshape(-1).view("i2")).cuda()
    return [flat[engine.form.layer(engine.size) * layer :] for layer in range(engine.size.L)]


def buffers(nbytes: int, *, pinned: bool) -> list[memoryview]:
    tensors = [torch.full((nbytes,), 0xAB, dtype=torch.uint8, pin_memory=pinned) for _ in PARTS]
    return [memoryview(tensor.numpy()) for tensor in tensors]


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder whose files the driver registers: in shared memory."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="maru-cuda-") as folder:
        yield Path(folder)


@contextmanager
def registered(folder: Path, nbytes: int, pieces: int | None) -> Iterator[tuple[PinnedPools, list[memoryview]]]:
    """Objects one after the other in a pool that is registered page by page, up to ``pieces`` pages."""
    region = FakeRegion(folder / "pool", len(PARTS) * nbytes + 3 * PAGE)

    class UpTo(CudaDriver):
        def register(self, address: int, length: int) -> None:
            if pieces is not None and pools.stats()["pieces"] == pieces:
                raise DriverError(OUT_OF_MEMORY, "no more")
            super().register(address, length)

    pools = PinnedPools(lambda: UpTo(0), piece=PAGE)
    pools.region_mapped(region)
    eventually(lambda: pools.stats()["state"] != "registering")
    assert pieces is None or pools.stats()["pieces"] == pieces, pools.stats()
    objects = [region.buffer[PAGE + 6 + i * nbytes : PAGE + 6 + (i + 1) * nbytes] for i in range(len(PARTS))]
    for buffer in objects:
        buffer[:] = b"\xab" * nbytes
    try:
        yield pools, objects
    finally:
        pools.region_unmapping(region)
        region.close()
        pools.close()
        assert pools.stats()["state"] == "no pool"


def copies(objects: list[memoryview]) -> list[ChunkCopy]:
    return [ChunkCopy(*part, buffer) for part, buffer in zip(PARTS, objects, strict=True)]


def check_objects(engine: Engine, objects: list[memoryview]) -> None:
    """They hold what the naive reader reads from the engine's pages."""
    for part, buffer in zip(PARTS, objects, strict=True):
        wanted = engine.naive_object(TABLE, *part, 32)
        tokens = slice(part[1] - part[0] * 32, part[2] - part[0] * 32)
        found = np.frombuffer(buffer, wanted.dtype).reshape(wanted.shape)
        np.testing.assert_array_equal(found[:, :, tokens], wanted[:, :, tokens])


def check_pages(engine: Engine, name: str, layers: list[torch.Tensor]) -> None:
    """Pages of the same form that were empty hold what the naive writer writes of the engine's objects, and no more."""
    expected = Engine.make(name, SIZE, None)
    for part in PARTS:
        expected.naive_write(TABLE, *part, engine.naive_object(TABLE, *part, 32))
    found = layers[0].cpu().numpy().view("u2").reshape(expected.memory.shape)
    np.testing.assert_array_equal(found, expected.memory)


@pytest.mark.parametrize("pieces", [None, 0, 4], ids=["all", "nothing", "a part"])
@pytest.mark.parametrize("name", sorted(FORMS))
def test_the_same_with_registered_pools(name, pieces, memory):
    """R105 to R107: copies that cross the edges of registrations, and those that must go through a locked buffer."""
    engine = Engine.make(name, SIZE, 3)
    stored = engine.stored(32)
    with registered(memory, stored.nbytes, pieces) as (pools, objects):
        with closing(DeviceTransfer(on_device(engine), engine.paged, stored)) as transfer:
            transfer.use_pinned(pools)
            HeldTransfer(transfer, pools).store(TABLE, copies(objects))
        check_objects(engine, objects)
        target = Engine.make(name, SIZE, None)
        layers = on_device(target)
        with closing(DeviceTransfer(layers, target.paged, stored)) as transfer:
            transfer.use_pinned(pools)
            HeldTransfer(transfer, pools).load(TABLE, copies([buffer.toreadonly() for buffer in objects]))
        check_pages(engine, name, layers)


def test_the_driver_refuses_what_the_fake_one_refuses(memory):
    region = FakeRegion(memory / "pool", 64 * PAGE)
    torch.zeros(1, device="cuda")
    driver = CudaDriver(0)
    driver.attach()
    address = address_of(region.buffer)
    driver.register(address, 32 * PAGE)
    whole = torch.frombuffer(region.buffer, dtype=torch.uint8)
    assert whole.is_pinned(), "torch asks about the first byte of the storage"
    assert not torch.frombuffer(region.buffer[40 * PAGE :], dtype=torch.uint8).is_pinned()
    with pytest.raises(DriverError) as caught:
        driver.register(address + 16 * PAGE, 32 * PAGE)
    assert caught.value.code == ALREADY_REGISTERED
    driver.register(address + 32 * PAGE, 32 * PAGE)
    with pytest.raises(RuntimeError, match="invalid argument"):
        whole.to("cuda", non_blocking=True)  # two registrations: why copies are cut
    driver.unregister(address, 32 * PAGE)
    driver.unregister(address + 32 * PAGE, 32 * PAGE)
    with pytest.raises(DriverError, match="CUDA_ERROR"):
        driver.unregister(address, 32 * PAGE)
    assert torch.ones(3, device="cuda").sum().item() == 3, "no error is left for the engine"
    driver.close()


def test_a_pool_on_a_disk_is_not_registered_and_works(tmp_path):
    """R107: the driver refuses files of ordinary file systems. Whatever it says, the bytes are right."""
    engine = Engine.make("packed per token", SIZE, 3)
    stored = engine.stored(32)
    with registered(tmp_path, stored.nbytes, None) as (pools, objects):
        stats = pools.stats()
        assert stats["state"] == "registered" or "CUDA_ERROR" in stats["reason"]
        with closing(DeviceTransfer(on_device(engine), engine.paged, stored)) as transfer:
            transfer.use_pinned(pools)
            HeldTransfer(transfer, pools).store(TABLE, copies(objects))
        wanted = engine.naive_object(TABLE, *PARTS[0], 32)
        np.testing.assert_array_equal(np.frombuffer(objects[0], wanted.dtype).reshape(wanted.shape), wanted)


@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
@pytest.mark.parametrize("name", sorted(FORMS))
def test_objects_hold_what_the_naive_reader_reads_and_load_back(name, pinned):
    engine = Engine.make(name, SIZE, 3)
    stored = engine.stored(32)
    layers = on_device(engine)
    objects = buffers(stored.nbytes, pinned=pinned)
    with closing(TorchCopyEngine().open(layers, engine.paged, stored)) as transfer:
        assert isinstance(transfer, DeviceTransfer)
        transfer.store(TABLE, copies(objects))
    check_objects(engine, objects)

    target = Engine.make(name, SIZE, None)
    layers = on_device(target)
    with closing(TorchCopyEngine().open(layers, target.paged, stored)) as transfer:
        transfer.load(TABLE, copies([buffer.toreadonly() for buffer in objects]))
    check_pages(engine, name, layers)


@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
def test_a_store_sees_the_last_value_of_a_slow_write_on_its_stream(pinned):
    """R002: copies are ordered after the kernels that wrote the pages, also on a stream that is not the default."""
    size = evolve(SIZE, NH=8, HS=128)
    engine = Engine.make("packed per token", size, None)
    stored = engine.stored(32)
    layers = on_device(engine)
    memory = layers[0]
    objects = buffers(stored.nbytes, pinned=pinned)
    with closing(TorchCopyEngine().open(layers, engine.paged, stored)) as transfer:
        for value in range(1, 31):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                torch.cuda._sleep(2_000_000)
                memory.fill_(value)
                transfer.store(TABLE, copies(objects)[:1])
            assert (np.frombuffer(objects[0], "i2") == value).all()


def test_a_load_is_seen_by_what_the_stream_runs_next():
    engine = Engine.make("packed per token", SIZE, None)
    stored = engine.stored(32)
    layers = on_device(engine)
    objects = buffers(stored.nbytes, pinned=True)
    with (
        closing(TorchCopyEngine().open(layers, engine.paged, stored)) as transfer,
        torch.cuda.stream(torch.cuda.Stream()),
    ):
        for value in range(1, 31):
            np.frombuffer(objects[0], "i2")[:] = value
            transfer.load(TABLE, copies(objects)[:1])
            block = layers[0].view(SIZE.L, SIZE.NB, -1)[:, TABLE[0]].clone()
            assert (block == value).all().item()
