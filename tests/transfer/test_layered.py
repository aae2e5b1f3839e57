"""Loads layer by layer on the host: bytes, order, errors, and who waits for what."""

from __future__ import annotations

import gc
import mmap
import os
import threading
import time
from contextlib import closing, suppress
from typing import Any

import numpy as np
import pytest
from cases import Case, cases
from hypothesis import given, settings
from hypothesis import strategies as st
from layered_checks import FORMATS, check_layered_load, copies_of, pages_after, stored_as
from paged_forms import FORMS, Engine, Size
from test_torch_copy import buffers_for, layers_of, one_thread, over_patches, three_threads

from maru_core.contracts import LayeredLoad, LoadsByLayer
from maru_core.errors import TransferError
from maru_core.geometry import ChunkCopy
from maru_transfer import host_copy
from maru_transfer.device_copy import DeviceTransfer
from maru_transfer.layered import Arrival, LoadThread, SteppedLoad
from tests.waiting import eventually

SIZE = Size(L=4, NB=9, BS=4, NH=2, HS=4)
CASE = Case(SIZE, 8, [6, 2, 3, 5, 1, 4], [(0, 0, 8), (1, 8, 16), (2, 17, 23)])
WAYS = [one_thread, three_threads, DeviceTransfer, over_patches]
#: Seconds after which a thread that should not block counts as blocked.
SOON = 10.0


@pytest.fixture(scope="module", autouse=True)
def _threads_share_small_copies():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_copy, "MIN_BYTES_PER_THREAD", 1)
        yield


def wrap(array: Any) -> memoryview:
    return buffers_for([array])[0].toreadonly()


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("how", WAYS, ids=lambda how: how.__name__)
@settings(max_examples=8, deadline=None)
@given(case=cases(), shuffle=st.integers(0, 100))
def test_a_layered_load_writes_exactly_the_slots_that_were_asked_for(how, name, form, case: Case, shuffle: int):
    check_layered_load(how, layers_of, wrap, name, case, form, shuffle)


class Gate:
    """Stands in for one layer's copy: waits until the test lets that layer through."""

    def __init__(self, layers: int) -> None:
        self.begun = [threading.Event() for _ in range(layers)]
        self.open = [threading.Event() for _ in range(layers)]

    def around(self, move: Any) -> Any:
        def wrapped(layer: int, *arguments: Any) -> Any:
            self.begun[layer].set()
            assert self.open[layer].wait(SOON), f"nobody let layer {layer} through"
            return move(layer, *arguments)

        return wrapped

    def release(self) -> None:
        for event in self.open:
            event.set()


@pytest.fixture
def gated(monkeypatch):
    """(how, form) -> transfer, target engine, copies, gate."""
    made = []

    def make(how: Any = one_thread, form: str = "chunkwise") -> tuple[Any, Engine, Engine, list[ChunkCopy], Gate]:
        source, target = CASE.engine("packed per head", 3), CASE.engine("packed per head", None)
        transfer = how(layers_of(target), target.paged, stored_as(target, 8, form))
        gate = Gate(SIZE.L)
        monkeypatch.setattr(transfer, "_load_layer", gate.around(transfer._load_layer))
        made.append((transfer, gate))
        return transfer, source, target, copies_of(source, CASE, form, wrap, shuffle=1), gate

    yield make
    for transfer, gate in made:
        gate.release()
        transfer.close()


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("how", WAYS, ids=lambda how: how.__name__)
def test_layers_arrive_in_order_and_whoever_waits_for_one_sees_it_in_full_and_no_other(gated, how, form):
    transfer, source, target, copies, gate = gated(how, form)
    load: LayeredLoad = transfer.begin_load(CASE.block_ids, copies)
    assert isinstance(transfer, LoadsByLayer)
    for layer in range(SIZE.L):
        assert gate.begun[layer].wait(SOON)
        assert load.layers_done() == layer
        gate.open[layer].set()
        waiter = Waiter(load, layer)
        waiter.join()
        assert waiter.error is None
        assert load.layers_done() == layer + 1
        np.testing.assert_array_equal(target.memory, pages_after(CASE, "packed per head", source, range(layer + 1)))
    load.finish()


class Waiter(threading.Thread):
    """Another thread that waits for a layer, or with ``None`` for the end."""

    def __init__(self, load: LayeredLoad, layer: int | None) -> None:
        super().__init__()
        self.load, self.layer = load, layer
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self.load.finish() if self.layer is None else self.load.wait_layer(self.layer)
        except TransferError as error:
            self.error = error

    def join(self, timeout: float | None = SOON) -> None:
        super().join(timeout)
        assert not self.is_alive(), "it still waits"


def test_waiting_before_the_layer_is_there_blocks_until_it_is(gated):
    transfer, _, _, copies, gate = gated()
    load = transfer.begin_load(CASE.block_ids, copies)
    waiters = [Waiter(load, layer) for layer in (2, 1, 1, None)]
    gate.open[0].set()
    assert gate.begun[1].wait(SOON)
    load.wait_layer(0)
    time.sleep(0.02)
    assert all(waiter.is_alive() for waiter in waiters)
    gate.open[1].set()
    waiters[1].join()
    waiters[2].join()
    assert waiters[0].is_alive()
    gate.release()
    for waiter in waiters:
        waiter.join()
        assert waiter.error is None


def test_cancelling_ends_it_before_the_next_layer_and_tells_everybody(gated):
    transfer, source, target, copies, gate = gated()
    load = transfer.begin_load(CASE.block_ids, copies)
    gate.open[0].set()
    assert gate.begun[1].wait(SOON)
    waiter = Waiter(load, 3)
    load.cancel()
    gate.open[1].set()
    waiter.join()
    assert "cancelled before layer 2" in str(waiter.error)
    for call in (load.finish, load.layers_done, lambda: load.wait_layer(0)):
        with pytest.raises(TransferError, match="cancelled before layer 2"):
            call()
    np.testing.assert_array_equal(target.memory, pages_after(CASE, "packed per head", source, [0, 1]))
    gate.release()
    transfer.load(CASE.block_ids, copies)
    np.testing.assert_array_equal(target.memory, pages_after(CASE, "packed per head", source, range(SIZE.L)))


def test_cancelling_when_all_has_arrived_changes_nothing(gated):
    transfer, _, _, copies, gate = gated()
    gate.release()
    load = transfer.begin_load(CASE.block_ids, copies)
    load.finish()
    load.cancel()
    load.finish()
    assert load.layers_done() == SIZE.L


def test_loads_run_one_after_another_and_other_calls_wait_for_all(gated):
    transfer, _, _, copies, gate = gated()
    first = transfer.begin_load(CASE.block_ids, copies)
    second = transfer.begin_load(CASE.block_ids, copies)
    stored = [memoryview(bytearray(copy.buffer.nbytes)) for copy in copies]
    outs = [ChunkCopy(c.chunk, c.first, c.last, b) for c, b in zip(copies, stored, strict=True)]
    storing = threading.Thread(target=transfer.store, args=(CASE.block_ids, outs))
    storing.start()
    assert gate.begun[0].wait(SOON)
    time.sleep(0.02)
    assert (first.layers_done(), second.layers_done(), storing.is_alive()) == (0, 0, True)
    gate.release()
    storing.join(SOON)
    assert (first.layers_done(), second.layers_done(), storing.is_alive()) == (SIZE.L, SIZE.L, False)
    for copy, out in zip(copies, stored, strict=True):
        first_byte = (copy.first - copy.chunk * 8) * 16
        assert bytes(out)[first_byte : first_byte + 16] == bytes(copy.buffer)[first_byte : first_byte + 16]


def test_closing_cancels_what_runs_and_what_waits_and_ends_the_thread():
    before = set(threading.enumerate())
    source, target = CASE.engine("packed per head", 3), CASE.engine("packed per head", None)
    transfer = three_threads(layers_of(target), target.paged, target.stored(8))
    copies = copies_of(source, CASE, "chunkwise", wrap)
    gate = Gate(SIZE.L)
    transfer._load_layer = gate.around(transfer._load_layer)
    first, second = (transfer.begin_load(CASE.block_ids, copies) for _ in range(2))
    assert gate.begun[0].wait(SOON)
    closer = threading.Thread(target=transfer.close)
    closer.start()
    eventually(lambda: first._cancelled and second._cancelled)
    gate.release()
    closer.join(SOON)
    assert not closer.is_alive()
    for load, layer in ((first, 1), (second, 0)):
        with pytest.raises(TransferError, match=f"cancelled before layer {layer} of 4"):
            load.finish()
    assert set(threading.enumerate()) == before
    with pytest.raises(TransferError, match="closed"):
        transfer.begin_load(CASE.block_ids, copies)


@pytest.mark.parametrize("how", WAYS, ids=lambda how: how.__name__)
def test_a_failure_in_the_middle_is_told_by_every_call_and_the_next_load_works(how, monkeypatch):
    source, target = CASE.engine("packed per head", 3), CASE.engine("packed per head", None)
    copies = copies_of(source, CASE, "layerwise", wrap)
    with closing(how(layers_of(target), target.paged, stored_as(target, 8, "layerwise"))) as transfer:
        right = transfer._load_layer

        def wrong(layer: int, *arguments: Any) -> Arrival:
            if layer == 2:
                raise MemoryError("as the test wanted")
            return right(layer, *arguments)

        monkeypatch.setattr(transfer, "_load_layer", wrong)
        load = transfer.begin_load(CASE.block_ids, copies)
        for call in (load.finish, load.layers_done, lambda: load.wait_layer(3), lambda: load.wait_layer(0)):
            waiter = Waiter(load, None)
            waiter.join()
            with pytest.raises(TransferError, match="as the test wanted"):
                call()
        np.testing.assert_array_equal(target.memory, pages_after(CASE, "packed per head", source, range(2)))
        monkeypatch.setattr(transfer, "_load_layer", right)
        transfer.begin_load(CASE.block_ids, copies).finish()
    np.testing.assert_array_equal(target.memory, pages_after(CASE, "packed per head", source, range(SIZE.L)))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("how", WAYS, ids=lambda how: how.__name__)
def test_slots_that_hold_their_bytes_keep_them_while_they_are_loaded_once_more(how, form):
    """Somebody may be reading layers that had arrived before a load failed."""
    source, target = CASE.engine("packed per head", 3), CASE.engine("packed per head", None)
    copies, seen, over = copies_of(source, CASE, form, wrap), [], threading.Event()
    with closing(how(layers_of(target), target.paged, stored_as(target, 8, form))) as transfer:
        transfer.begin_load(CASE.block_ids, copies).finish()
        want = target.memory.copy()

        def read() -> None:
            while not over.is_set():
                seen.append(bool((target.memory == want).all()))

        reader = threading.Thread(target=read)
        reader.start()
        try:
            while len(seen) < 300:
                transfer.load(CASE.block_ids, copies)
        finally:
            over.set()
            reader.join()
    assert all(seen)


@pytest.mark.parametrize("how", WAYS, ids=lambda how: how.__name__)
def test_what_makes_no_sense_is_refused_before_anything_begins(how):
    target = CASE.engine("packed per head", None)
    with closing(how(layers_of(target), target.paged, target.stored(8))) as transfer:
        copy = ChunkCopy(0, 0, 8, memoryview(bytes(target.stored(8).nbytes)))
        with pytest.raises(TransferError, match="block 9"):
            transfer.begin_load([1, 9], [copy])
        load = transfer.begin_load([1, 2], [copy])
        for layer in (-1, SIZE.L):
            with pytest.raises(TransferError, match=f"layer {layer} is none of the 4"):
                load.wait_layer(layer)
        load.finish()
        transfer.begin_load([], []).finish()


def test_a_layer_of_which_there_is_no_object_arrives_with_the_one_before():
    source, target = CASE.engine("packed per head", 3), CASE.engine("packed per head", None)
    copies = [copy for copy in copies_of(source, CASE, "layerwise", wrap) if copy.layer in (0, 2)]
    with closing(one_thread(layers_of(target), target.paged, stored_as(target, 8, "layerwise"))) as transfer:
        load = transfer.begin_load(CASE.block_ids, copies)
        load.wait_layer(3)
        load.finish()
    np.testing.assert_array_equal(target.memory, pages_after(CASE, "packed per head", source, [0, 2]))


def test_a_forked_child_is_told_instead_of_waiting_for_a_thread_that_it_has_not(gated):
    transfer, _, _, copies, gate = gated()
    load = transfer.begin_load(CASE.block_ids, copies)
    assert gate.begun[0].wait(SOON)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        said = 0
        for call in (
            load.finish,
            load.layers_done,
            lambda: load.wait_layer(0),
            lambda: transfer.begin_load(CASE.block_ids, copies),
        ):
            try:
                call()
            except TransferError as error:
                said += "forked" in str(error)
        transfer._layers.close()
        os.write(write, bytes([said]))
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as answer:
        assert answer.read() == b"\x04"
    os.waitpid(child, 0)


class Late:
    """An arrival that others decide about."""

    def __init__(self) -> None:
        self.there = False
        self.ordered = 0

    def query(self) -> bool:
        return self.there

    def order(self) -> None:
        self.ordered += 1


def test_submitted_layers_can_be_ordered_behind_but_are_not_done_before_their_bytes_are():
    arrivals = [Late(), Late(), Late()]
    settled = threading.Event()
    load = SteppedLoad(3, arrivals.__getitem__, lambda: bool(settled.wait(SOON)))
    thread = LoadThread()
    thread.start(load)
    for layer in range(3):
        load.wait_layer(layer)
    assert load.layers_done() == 0
    arrivals[1].there = True
    assert load.layers_done() == 0
    arrivals[0].there = True
    assert load.layers_done() == 2
    assert [one.ordered for one in arrivals] == [1, 1, 1]
    settled.set()
    load.finish()
    assert load.layers_done() == 3
    load.wait_layer(0)
    assert arrivals[0].ordered == 1, "what has arrived needs no order on the device"
    thread.close()


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("how", WAYS, ids=lambda how: how.__name__)
@pytest.mark.parametrize("left", ["ended", "cancelled"])
def test_a_load_that_is_over_keeps_no_buffer(how, form, left):
    """A pool stays mapped as long as anything shows its bytes: the transfer and the load may live on."""
    maps: list[mmap.mmap] = []

    def in_pool(array: Any) -> memoryview:
        maps.append(mmap.mmap(-1, array.nbytes))
        maps[-1][:] = array.tobytes()
        return memoryview(maps[-1])

    source, target = CASE.engine("packed per head", 3), CASE.engine("packed per head", None)
    with closing(how(layers_of(target), target.paged, stored_as(target, 8, form))) as transfer:
        load = transfer.begin_load(CASE.block_ids, copies_of(source, CASE, form, in_pool))
        if left == "cancelled":
            load.cancel()
        with suppress(TransferError):
            load.finish()
        if left == "cancelled":
            del load
            gc.collect()  # an error knows where it was raised
        for pool in maps:
            pool.close()
    assert maps
