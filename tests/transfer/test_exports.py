"""Addresses of a request's buffers by one native call, and that their memory stays for as long as they are exported."""

from __future__ import annotations

import gc
import mmap
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from fake_device import FakeDriver, compiler, registered
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paged_forms import Engine, Size

from maru_core.batches import ChunkCopies, Rooms
from maru_core.errors import TransferError
from maru_core.geometry import ChunkCopy
from maru_transfer.cuda_library import LOAD, STORE
from maru_transfer.exports import VIEW, BufferCalls, Exports
from maru_transfer.kernel import Tuning

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C compiler")

BYTES = 1 << 16


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> FakeDriver:
    return FakeDriver.build(tmp_path_factory.mktemp("exports"))


@pytest.fixture
def calls(driver: FakeDriver) -> BufferCalls:
    return driver.native.buffers


@pytest.fixture
def memory() -> Iterator[mmap.mmap]:
    made = mmap.mmap(-1, BYTES)
    yield made
    made.close()  # fails if an export of a test is left


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=st.lists(st.tuples(st.integers(0, BYTES), st.integers(0, BYTES), st.booleans()), max_size=40))
def test_they_are_what_numpy_says_of_each(calls: BufferCalls, memory: mmap.mmap, parts: list[Any]) -> None:
    with memoryview(memory) as whole:
        buffers = [whole[min(a, b) : max(a, b)] for a, b, _ in parts]
        buffers = [part.toreadonly() if fixed else part for part, (_, _, fixed) in zip(buffers, parts, strict=True)]
        exports = Exports(calls, buffers)
        start = np.frombuffer(whole, np.uint8).ctypes.data
        assert exports.addresses.tolist() == [start + min(a, b) for a, b, _ in parts]
        assert exports.readonly == any(fixed for _, _, fixed in parts)
        exports.release()
        for part in buffers:
            part.release()


def test_memory_stays_until_they_are_released_and_no_longer(calls: BufferCalls, memory: mmap.mmap) -> None:
    whole = memoryview(memory)
    parts = [whole[:10], whole[5:20]]
    exports = Exports(calls, parts)
    for part in parts:
        with pytest.raises(BufferError, match="exported"):
            part.release()
    exports.release()
    exports.release()
    for part in (*parts, whole):
        part.release()


@pytest.mark.parametrize("readonly", [False, True])
def test_rooms_are_where_their_buffer_is_and_keep_it(calls: BufferCalls, memory: mmap.mmap, readonly: bool) -> None:
    whole = memoryview(memory)
    start = np.frombuffer(whole, np.uint8).ctypes.data
    buffer = whole.toreadonly() if readonly else whole
    exports = Exports(calls, Rooms(buffer, [4, 0, 63], 1024, 1024 - 16, 64))
    assert exports.addresses.tolist() == [start + 1024 + entry * 1008 for entry in (4, 0, 63)]
    assert exports.addresses.dtype == np.int64
    assert exports.readonly == readonly
    with pytest.raises(BufferError):
        memory.close()
    exports.release()
    exports.release()
    buffer.release()
    whole.release()


@pytest.mark.parametrize("entries", [[0, 63], [-2, 0]])
def test_rooms_never_leave_their_buffer(calls: BufferCalls, memory: mmap.mmap, entries: list[int]) -> None:
    with memoryview(memory) as whole:
        Exports(calls, Rooms(whole, [0, 62], 1024, 1024, 1024)).release()
        with pytest.raises(ValueError, match="leave their buffer"):
            Exports(calls, Rooms(whole, entries, 1024, 1024, 1024))


def test_those_that_nobody_keeps_are_released(calls: BufferCalls, memory: mmap.mmap) -> None:
    part = memoryview(memory)
    Exports(calls, [part])
    gc.collect()
    part.release()


@pytest.mark.parametrize("wrong", ["released", "gaps", "none"])
def test_one_that_cannot_be_used_lets_go_of_those_before(calls: BufferCalls, memory: mmap.mmap, wrong: str) -> None:
    whole = memoryview(memory)
    good, released = whole[:8], whole[8:16]
    released.release()
    bad: dict[str, Any] = {"released": released, "gaps": whole[::2], "none": None}
    with pytest.raises((BufferError, TypeError, ValueError)):
        Exports(calls, [good, good, bad[wrong], good])
    bad["gaps"].release()
    for part in (good, whole):
        part.release()


def test_nothing_is_kept_behind(calls: BufferCalls) -> None:
    owner = bytearray(100)
    part = memoryview(owner)
    before = sys.getrefcount(part), sys.getrefcount(owner)
    for _ in range(50):
        Exports(calls, [part] * 20).release()
    assert (sys.getrefcount(part), sys.getrefcount(owner)) == before


def test_a_view_is_as_large_as_the_interpreters() -> None:
    assert VIEW.itemsize == 80


SIZE = Size(L=2, NB=2050, BS=1, NH=1, HS=8)


def many(driver: FakeDriver, count: int) -> tuple[Any, list[int], Sequence[ChunkCopy], bytearray]:
    engine = Engine.make("MLA", SIZE, 1)
    stored = engine.stored(1)
    raw = bytearray(stored.nbytes * count)
    registered(driver, memoryview(raw))
    view = memoryview(raw)
    copies = ChunkCopies(range(count), 1, 1, Rooms(view, range(count), 0, stored.nbytes, stored.nbytes))
    import torch

    flat = torch.from_numpy(engine.memory.reshape(-1).view("u1"))
    layers = [flat.view(torch.int16)[engine.form.layer(SIZE) * layer :] for layer in range(SIZE.L)]
    transfer = driver.transfer(layers, engine.paged, stored, Tuning(slot_bytes=1 << 20, direct_bytes=1 << 40))
    return transfer, list(range(count)), copies, raw


@pytest.mark.parametrize("columns", [False, True], ids=["one by one", "columns"])
def test_thousands_of_objects_are_planned_without_the_garbage_collector(driver: FakeDriver, columns: bool) -> None:
    """It would look at everything that an engine has, again and again, if an object was made per copy."""
    driver.hooks.fake_reset(1)
    transfer, table, copies, _ = many(driver, 2048)
    copies = copies if columns else list(copies)
    runs: list[str] = []
    gc.collect()
    gc.callbacks.append(lambda phase, info: runs.append(phase))
    try:
        for direction in (LOAD, STORE):
            exports, _ = transfer._plan(direction, table, copies)
            exports.release()
    finally:
        gc.callbacks.pop()
    transfer.close()
    assert runs == []


def test_a_refused_request_keeps_no_buffer(driver: FakeDriver) -> None:
    driver.hooks.fake_reset(1)
    transfer, table, copies, raw = many(driver, 3)
    copies = list(copies)
    for move in (transfer.load, transfer.store):
        for wrong in (table[:-1], [*table[:-1], 10**6], [-1, *table[1:]]):
            with pytest.raises(TransferError):
                move(wrong, copies)
    with pytest.raises(TransferError):
        transfer.load([table[0], table[0], *table[2:]], copies)
    transfer.store(table, copies)
    for copy in copies:
        copy.buffer.release()
    transfer.close()
    del copies
    gc.collect()
    raw.clear()  # BufferError if something is exported
