"""The reference engine against the naive reader: on host memory, and its device path run on the host."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from cases import Case, any_cases
from hypothesis import given, settings
from native_copy import native_library
from paged_forms import FORMS, Engine, Size
from test_crossing import Patches

from maru_core.contracts import Transfer, TransferEngine
from maru_core.errors import TransferError
from maru_core.geometry import ChunkCopy
from maru_transfer import host_copy, host_views
from maru_transfer.device_copy import DeviceTransfer
from maru_transfer.host_copy import HostTransfer
from maru_transfer.torch_copy import TorchCopyEngine
from maru_transfer.torch_copy_plugin import maru_transfer_engines
from tests.waiting import NEVER

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SIZE = Size(L=3, NB=7, BS=4, NH=2, HS=4)

Open = Callable[..., Transfer]


def one_thread(*arguments: Any) -> Transfer:
    return HostTransfer(*arguments, threads=1)


def three_threads(*arguments: Any) -> Transfer:
    return HostTransfer(*arguments, threads=3)


class Unable(ThreadPoolExecutor):
    """Of a process that gets no more threads."""

    def submit(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("can't start new thread")


def no_helpers(*arguments: Any) -> Transfer:
    transfer = HostTransfer(*arguments, threads=3)
    transfer._pool = Unable(2)
    return transfer


def native(*arguments: Any) -> Transfer:
    return HostTransfer(*arguments, threads=1, library=native_library())


def native_threads(*arguments: Any) -> Transfer:
    return HostTransfer(*arguments, threads=3, library=native_library())


def over_patches(*arguments: Any) -> Transfer:
    """The device path over memory that is locked in patches, through buffers of some bytes."""
    transfer = DeviceTransfer(*arguments)
    transfer._crossing._half = 40
    transfer.use_pinned(Patches(lambda patch: patch % 3 == 1))
    return transfer


@pytest.fixture(scope="module", autouse=True)
def _threads_share_small_copies():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_copy, "MIN_BYTES_PER_THREAD", 1)
        yield


WAYS = [one_thread, three_threads, no_helpers, native, native_threads, DeviceTransfer, over_patches]


@pytest.fixture(params=WAYS, ids=lambda open_: open_.__name__)
def open_(request) -> Open:
    return request.param


def layers_of(engine: Engine) -> list[torch.Tensor]:
    """One tensor per layer, all over the engine's one array."""
    flat = torch.from_numpy(
        engine.memory.reshape(-1).view(f"i{engine.size.element}" if engine.size.element > 1 else "u1")
    )
    return [flat[engine.form.layer(engine.size) * layer :] for layer in range(engine.size.L)]


def buffers_for(arrays: list[Any], fill: int = 0xAB) -> list[memoryview]:
    """Objects as bytes, in memory that starts at no aligned address (pools promise none to a plain buffer)."""
    buffers = []
    for array in arrays:
        raw = bytearray(array.nbytes + 1)
        view = memoryview(raw)[1:]
        view[:] = array.tobytes()
        buffers.append(view)
    return buffers


Wrap = Callable[[list[Any]], list[memoryview]]


def check_store(open_: Open, name: str, case: Case, wrap: Wrap = buffers_for) -> None:
    engine = case.engine(name, 3)
    expected = case.objects(engine)
    buffers = wrap([np.full_like(array, 0xAB) for array in expected])
    before = engine.memory.copy()
    with closing(open_(layers_of(engine), engine.paged, case.stored(engine))) as transfer:
        transfer.store(case.block_ids, case.copies(buffers))
    for buffer, array in zip(buffers, expected, strict=True):
        assert bytes(buffer) == array.tobytes()
    np.testing.assert_array_equal(engine.memory, before)


def check_load(open_: Open, name: str, case: Case, wrap: Wrap = buffers_for) -> None:
    arrays = case.objects(case.engine(name, 3))
    buffers = [buffer.toreadonly() for buffer in wrap(arrays)]
    target, expected = case.engine(name, None), case.engine(name, None)
    case.write(expected, arrays)
    with closing(open_(layers_of(target), target.paged, case.stored(target))) as transfer:
        transfer.load(case.block_ids, case.copies(buffers))
    np.testing.assert_array_equal(target.memory, expected.memory)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("how", WAYS, ids=lambda how: how.__name__)
@settings(max_examples=15, deadline=None)
@given(case=any_cases())
def test_stored_objects_hold_what_the_naive_reader_reads(how: Open, name: str, case: Case):
    check_store(how, name, case)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("how", WAYS, ids=lambda how: how.__name__)
@settings(max_examples=15, deadline=None)
@given(case=any_cases())
def test_loading_writes_exactly_the_slots_that_were_asked_for(how: Open, name: str, case: Case):
    check_load(how, name, case)


@pytest.mark.parametrize("name", FORMS)
def test_many_threads_share_one_transfer_without_a_gap(open_, name):
    parts = [(0, 0, 8), (1, 8, 16), (2, 17, 23)]
    whole = Case(SIZE, 8, [6, 2, 3, 5, 1, 4], parts)
    by_layer = evolve(whole, parts=parts * 3, layers=[1, 0, 2, 0, 2, 1, 2, 1, 0])
    for case in (whole, by_layer):
        check_store(open_, name, case)
        check_load(open_, name, case)


@pytest.mark.parametrize("name", FORMS)
def test_chunks_of_requests_that_share_a_block_are_stored_together(open_, name):
    check_store(open_, name, Case(SIZE, 8, [6, 2, 6, 3], [(0, 0, 8), (1, 8, 16)]))
    by_layer = [(0, 0, 8), (1, 8, 16)] * 3
    check_store(open_, name, Case(SIZE, 8, [6, 2, 6, 3], by_layer, [0, 0, 1, 1, 2, 2]))


@pytest.mark.parametrize("name", sorted(FORMS.keys() - {"MLA"}))
def test_an_object_stored_by_one_layout_loads_into_every_other(open_, name):
    """Bytes do not depend on the engine that wrote them: HND and NHD, unlike block sizes, packed and apart."""
    source = Engine.make(name, SIZE, 5)
    stored = source.stored(8)
    buffer = memoryview(bytearray(stored.nbytes))
    with closing(open_(layers_of(source), source.paged, stored)) as transfer:
        transfer.store([5, 3], [ChunkCopy(0, 0, 8, buffer)])
    wanted = source.naive_object([5, 3], 0, 0, 8, 8)
    for other in FORMS.keys() - {"MLA"}:
        target = Engine.make(other, evolve(SIZE, BS=3), None)
        with closing(open_(layers_of(target), target.paged, stored)) as transfer:
            transfer.load([2, 6, 4], [ChunkCopy(0, 0, 8, buffer)])
        np.testing.assert_array_equal(target.naive_object([2, 6, 4], 0, 0, 8, 8), wanted)


def apart(layers: list[torch.Tensor]) -> list[torch.Tensor]:
    """A storage per layer."""
    return [layer.clone() for layer in layers]


def two_share(layers: list[torch.Tensor]) -> list[torch.Tensor]:
    """The last two layers in one storage, the first in another."""
    return [layers[0].clone(), *torch.cat(layers[1:]).split(len(layers[0]))]


def unevenly(layers: list[torch.Tensor]) -> list[torch.Tensor]:
    """One storage, but the distance between layers differs."""
    gap = torch.zeros(24, dtype=layers[0].dtype)
    parts = torch.cat([gap, layers[0], layers[1], gap, layers[2]]).split(
        [24, *map(len, layers[:2]), 24, len(layers[2])]
    )
    return [parts[1], parts[2], parts[4]]


def at_growing_offsets(layers: list[torch.Tensor]) -> list[torch.Tensor]:
    """A storage per layer, in which the layers lie as if it were one storage."""
    return [torch.cat([*layers[:index], layer])[index * len(layer) :] for index, layer in enumerate(layers)]


@pytest.mark.parametrize("place", [apart, two_share, unevenly, at_growing_offsets])
def test_layers_may_lie_in_any_storages(open_, place):
    engine = Engine.make("CPU pages", SIZE, 5)
    layers = place([layer[: engine.form.layer(SIZE)] for layer in layers_of(engine)])
    stored = engine.stored(8)
    buffer = memoryview(bytearray(stored.nbytes))
    with closing(open_(layers, engine.paged, stored)) as transfer:
        transfer.store([5, 3], [ChunkCopy(0, 0, 8, buffer)])
        assert bytes(buffer) == engine.naive_object([5, 3], 0, 0, 8, 8).tobytes()
        for layer in layers:
            layer.zero_()
        transfer.load([2, 6], [ChunkCopy(0, 0, 8, buffer)])
        transfer.store([2, 6], [ChunkCopy(0, 0, 8, again := memoryview(bytearray(stored.nbytes)))])
    assert again == buffer
    one = engine.stored(8, layerwise=True)
    parts = [memoryview(bytearray(one.nbytes)) for _ in layers]
    with closing(open_(layers, engine.paged, one)) as transfer:
        transfer.store([2, 6], [ChunkCopy(0, 0, 8, part, layer) for layer, part in enumerate(parts)])
    whole = np.frombuffer(buffer, np.uint8).reshape(2, 3, -1)
    for layer, part in enumerate(parts):
        assert bytes(part) == whole[:, layer].tobytes()


def test_layers_are_taken_in_the_order_given_whatever_their_address(open_):
    engine = Engine.make("packed per head", SIZE, 5)
    stored = engine.stored(8)
    buffer = memoryview(bytearray(stored.nbytes))
    with closing(open_(layers_of(engine)[::-1], engine.paged, stored)) as transfer:
        transfer.store([5, 3], [ChunkCopy(0, 0, 8, buffer)])
    wanted = engine.naive_object([5, 3], 0, 0, 8, 8)[:, ::-1]
    assert bytes(buffer) == wanted.tobytes()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float32])
def test_bytes_survive_whatever_numbers_they_are(open_, dtype):
    """NaNs with payloads, negative zeros and the like: a copy never looks at values."""
    size = evolve(SIZE, element=dtype.itemsize)
    engine = Engine.make("CPU pages", size, 5)
    stored = engine.stored(8)
    layers = [layer.view(dtype) for layer in layers_of(engine)]
    buffer = memoryview(bytearray(stored.nbytes))
    with closing(open_(layers, engine.paged, stored)) as transfer:
        transfer.store([5, 3], [ChunkCopy(0, 0, 8, buffer)])
    assert bytes(buffer) == engine.naive_object([5, 3], 0, 0, 8, 8).tobytes()


def opened(open_, engine=None, layers=None, **changes):
    engine = engine or Engine.make("packed per head", SIZE, 5)
    return open_(layers or layers_of(engine), evolve(engine.paged, **changes), engine.stored(8))


def test_a_read_only_buffer_is_not_stored_into(open_):
    with closing(opened(open_)) as transfer, pytest.raises(TransferError, match="read-only"):
        transfer.store([1, 2], [ChunkCopy(0, 0, 8, memoryview(bytes(2 * 3 * 8 * 8 * 2)))])


def test_a_bad_copy_moves_nothing_at_all(open_):
    engine = Engine.make("packed per head", SIZE, None)
    stored = engine.stored(8)
    good, bad = (memoryview(bytearray(stored.nbytes)) for _ in range(2))
    with closing(opened(open_, engine)) as transfer, pytest.raises(TransferError, match="block 9"):
        transfer.load([1, 2, 3, 9], [ChunkCopy(0, 0, 8, good), ChunkCopy(1, 8, 16, bad)])
    assert (engine.memory == 0xEE).all()


def test_a_closed_transfer_says_so_and_closes_twice(open_):
    transfer = opened(open_)
    transfer.close()
    transfer.close()
    with pytest.raises(TransferError, match="closed"):
        transfer.store([1, 2], [ChunkCopy(0, 0, 8, memoryview(bytearray(2 * 3 * 8 * 8 * 2)))])


def test_closing_ends_the_copying_threads():
    before = set(threading.enumerate())
    engine = Engine.make("packed per head", SIZE, 5)
    stored = engine.stored(8)
    with closing(three_threads(layers_of(engine), engine.paged, stored)) as transfer:
        transfer.store([1, 2], [ChunkCopy(0, 0, 8, memoryview(bytearray(stored.nbytes)))])
        assert set(threading.enumerate()) - before
    assert not set(threading.enumerate()) - before


class SlowMove:
    """Stands in for a copy: takes its time on the copying threads, and may fail on one kind of thread."""

    def __init__(self, fails_on_caller: bool | None) -> None:
        self.fails_on_caller = fails_on_caller
        self.running = 0
        self.shared = threading.Event()
        self.lock = threading.Lock()

    def __call__(self, target, source) -> None:
        caller = threading.current_thread() is threading.main_thread()
        with self.lock:
            self.running += 1
        if caller:
            assert self.shared.wait(NEVER), "no copying thread took its share"
        else:
            self.shared.set()
            time.sleep(0.05)
        with self.lock:
            self.running -= 1
        if caller is self.fails_on_caller:
            raise MemoryError(f"failed with caller={caller}")


@pytest.mark.parametrize("fails_on_caller", [None, True, False])
def test_no_thread_copies_after_the_call_returned_or_failed(monkeypatch, fails_on_caller):
    move = SlowMove(fails_on_caller)
    monkeypatch.setattr(host_views, "_move", move)
    engine = Engine.make("packed per head", SIZE, 5)
    stored = engine.stored(8)
    copies = [ChunkCopy(c, c * 8, c * 8 + 8, memoryview(bytearray(stored.nbytes))) for c in range(3)]
    outcome = nullcontext() if fails_on_caller is None else pytest.raises(MemoryError, match=f"={fails_on_caller}")
    with closing(three_threads(layers_of(engine), engine.paged, stored)) as transfer:
        with outcome:
            transfer.store([6, 2, 3, 5, 1, 4], copies)
        assert move.running == 0


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_pinned_caller_does_not_pin_the_copying_threads():
    """OpenMP pins the engine's main thread to one core; the copying threads use the others, not that one."""
    everywhere = os.sched_getaffinity(0)
    release = threading.Event()
    roaming = threading.Thread(target=release.wait)
    roaming.start()
    try:
        os.sched_setaffinity(0, {min(everywhere)})
        assert host_copy.process_cores() == everywhere
        seen = []
        engine = Engine.make("packed per head", SIZE, 5)
        with closing(three_threads(layers_of(engine), engine.paged, engine.stored(8))) as transfer:
            pool, threads = transfer._copiers()
            assert threads == 3
            seen.append(pool.submit(os.sched_getaffinity, 0).result())
        assert seen == [everywhere - {min(everywhere)}]
        assert os.sched_getaffinity(0) == {min(everywhere)}
    finally:
        os.sched_setaffinity(0, everywhere)
        release.set()
        roaming.join()


def test_a_tensor_that_is_too_small_for_its_layout_is_refused(open_):
    with pytest.raises(TransferError, match=r"layer 2 .* reaches to"):
        opened(open_, num_blocks=SIZE.NB + 1)


def test_a_tensor_of_other_elements_is_refused(open_):
    engine = Engine.make("packed per head", SIZE, 5)
    with pytest.raises(TransferError, match="elements of 1 bytes"):
        opened(open_, engine, [layer.view(torch.uint8) for layer in layers_of(engine)])


def test_torch_is_not_told_to_use_other_threads(open_):
    before = torch.get_num_threads()
    check_store(open_, "CPU pages", Case(SIZE, 8, [5, 3], [(0, 0, 8)]))
    assert torch.get_num_threads() == before


class TestEngine:
    def test_it_is_what_its_contract_says(self):
        engine: TransferEngine = TorchCopyEngine()
        assert engine.name == "torch-copy"
        assert engine.is_available()
        assert engine.import_error() is None

    def test_it_opens_the_host_path_for_host_memory(self):
        engine = Engine.make("packed per head", SIZE, 5)
        with closing(TorchCopyEngine().open(layers_of(engine), engine.paged, engine.stored(8))) as transfer:
            assert isinstance(transfer, HostTransfer)

    def test_a_missing_module_is_named_with_the_remedy(self, monkeypatch):
        monkeypatch.setitem(__import__("sys").modules, "torch", None)
        engine = TorchCopyEngine()
        assert not engine.is_available()
        assert "torch cannot be imported" in engine.import_error()
        assert "pip install torch" in engine.import_error()
        with pytest.raises(TransferError, match="torch cannot be imported"):
            engine.open([], Engine.make("MLA", SIZE, 5).paged, Engine.make("MLA", SIZE, 5).stored(8))

    def test_what_it_cannot_move_is_said_before_and_refused_on_opening(self):
        engine = Engine.make("packed per head", SIZE, 5)
        other = evolve(engine.stored(8), num_planes=1)
        assert "planes" in TorchCopyEngine().unsupported(engine.paged, other, "cpu")
        with pytest.raises(TransferError, match="planes"):
            TorchCopyEngine().open(layers_of(engine), engine.paged, other)
        odd = evolve(engine.paged, element_size=3), evolve(engine.stored(8), element_size=3)
        assert "3 bytes" in TorchCopyEngine().unsupported(*odd, "cpu")

    def test_a_layer_too_few_is_refused(self):
        engine = Engine.make("packed per head", SIZE, 5)
        with pytest.raises(TransferError, match="2 layers were given, the layout has 3"):
            TorchCopyEngine().open(layers_of(engine)[:2], engine.paged, engine.stored(8))

    def test_its_plugin_offers_it(self):
        (provision,) = maru_transfer_engines()
        assert (provision.name, provision.rank) == ("torch-copy", 0)
        assert provision.factory().name == provision.name
