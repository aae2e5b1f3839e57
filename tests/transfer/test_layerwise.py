"""The layerwise engine against the naive reader, on a fake driver that runs everything as late as it may."""

from __future__ import annotations

import os
import threading
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from cases import Case, cases
from fake_device import ROOT, FakeDriver, aligned, compiler, registered
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layered_checks import FORMATS, check_layered_load, copies_of, objects_of, pages_after, stored_as
from layered_scene import CASE, EVEN, SIZE, SOON, WAYS, Scene, opener, wrap
from paged_forms import FORMS, Engine
from test_kernel import TIGHT
from test_torch_copy import layers_of

from maru_core.contracts import LoadsByLayer
from maru_core.errors import TransferError
from maru_core.geometry import ChunkCopy
from maru_transfer import cuda_library
from maru_transfer.layerwise import LayerwiseEngine, LayerwiseTransfer
from maru_transfer.layerwise_plugin import maru_transfer_engines

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C compiler")


@pytest.fixture(scope="module")
def driver(tmp_path_factory) -> FakeDriver:
    return FakeDriver.build(tmp_path_factory.mktemp("layerwise"))


@pytest.fixture(autouse=True)
def _slices_of_one_layer(monkeypatch):
    """As with the sizes of real models; how small layers share slices is for tests of the plan."""
    monkeypatch.setattr("maru_transfer.flow.LEAST_SLICE", 1)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases(), seed=st.integers(0, 1000))
def test_bytes_are_those_that_the_naive_reader_reads(driver, way: str, name: str, form: str, case: Case, seed: int):
    """Whole loads, layered loads and stores, objects in any order."""
    driver.hooks.fake_reset(seed)
    pieces = WAYS[way][1]
    check_layered_load(opener(driver, way), layers_of, wrap(driver, pieces), name, case, form, seed)
    driver.hooks.fake_reset(seed)  # what is registered ends with the buffers
    source, target = case.engine(name, 3), case.engine(name, None)
    stored = stored_as(source, case.chunk_tokens, form)
    copies = copies_of(source, case, form, wrap(driver, pieces), shuffle=seed)
    with closing(opener(driver, way)(layers_of(target), target.paged, stored)) as transfer:
        transfer.load(case.block_ids, copies)
    np.testing.assert_array_equal(target.memory, pages_after(case, name, source, range(case.size.L)))
    driver.hooks.fake_reset(seed)
    make = wrap(driver, pieces, writable=True)
    out = [ChunkCopy(*part, make(array), layer) for part, layer, array in objects_of(source, case, form, empty=True)]
    with closing(opener(driver, way)(layers_of(source), source.paged, stored)) as transfer:
        transfer.store(case.block_ids, out)
    for copy, (_, _, array) in zip(out, objects_of(source, case, form), strict=True):
        assert bytes(copy.buffer) == array.tobytes()
    assert driver.counts()["misaligned"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10_000), order=st.permutations(range(SIZE.L)))
def test_who_waits_for_a_layer_reads_it_and_nobody_waits_for_more(driver, way: str, form: str, seed: int, order):
    """A stream reads each layer right behind the call, in any order, before and while later layers arrive."""
    with closing(Scene(driver, way, form, seed)) as scene:
        load = scene.begin()
        seen = {}
        for layer in order:
            assert scene.on_stream(lambda layer=layer: load.wait_layer(layer)) is None
            seen[layer] = scene.snapshot()
        scene.let_end()
        load.finish()
        driver.hooks.fake_drain()
        for layer, memory in seen.items():
            assert scene.layer(memory, layer) == scene.layer(scene.source.memory, layer), layer


@pytest.mark.parametrize("form", FORMATS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10_000))
def test_pages_are_written_after_what_the_callers_stream_had_to_do_with_them(driver, form: str, seed: int):
    with closing(Scene(driver, "staged in batches", form, seed)) as scene:
        memory = scene.target.memory
        before = np.zeros_like(memory)
        driver.hooks.fake_fill(0, memory.ctypes.data, memory.nbytes, 0x77)
        driver.hooks.fake_copy(0, before.ctypes.data, memory.ctypes.data, memory.nbytes)
        load = scene.begin()
        scene.let_end()
        load.finish()
        driver.hooks.fake_drain()
        assert set(before.tobytes()) == {0x77}
        for layer in range(SIZE.L):
            assert scene.layer(memory, layer) == scene.layer(scene.source.memory, layer)


@pytest.mark.parametrize("form", FORMATS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10_000))
def test_layers_that_count_as_done_are_there(driver, form: str, seed: int):
    with closing(Scene(driver, "staged in batches", form, seed)) as scene:
        load = scene.begin()
        load.wait_layer(SIZE.L - 1)
        done = -1
        driver.hooks.fake_lazy(0)
        while done < SIZE.L:
            found = load.layers_done()
            assert found >= done
            done = found
            for layer in range(done):
                assert scene.layer(scene.target.memory, layer) == scene.layer(scene.source.memory, layer)
        assert driver.counts()["waits"] == 0, "it has blocked"
        scene.let_end()
        load.finish()
        assert load.layers_done() == SIZE.L


def test_waiting_blocks_until_the_layer_is_submitted_and_no_longer(driver):
    """Also before the loader's thread has come to the load at all."""
    scene = Scene(driver, "staged in batches", "chunkwise")
    gate = threading.Event()
    submit = scene.transfer._pages.submit
    scene.transfer._pages.submit = lambda *arguments: (gate.wait(SOON), submit(*arguments))[1]
    try:
        load = scene.begin()
        answers: list[Any] = []
        thread = threading.Thread(target=lambda: answers.append(load.wait_layer(2)))
        thread.start()
        thread.join(0.05)
        assert thread.is_alive(), "nothing was submitted"
        assert load.layers_done() == 0
        gate.set()
        thread.join(SOON)
        assert answers == [None]
        # The end is still held back: nobody has waited for bytes.
        assert driver.counts()["waits"] == 0
        scene.let_end()
        load.finish()
        load.wait_layer(3)
        assert load.layers_done() == SIZE.L
    finally:
        scene.close()


def test_the_window_bounds_what_is_under_way_and_layers_follow_it(driver):
    with closing(Scene(driver, "staged", "chunkwise", held=False)) as scene:
        assert isinstance(scene.transfer, LoadsByLayer)
        loads = [scene.begin() for _ in range(3)]
        for load in reversed(loads):
            load.finish()
            assert load.layers_done() == SIZE.L
        assert driver.counts()["most_under_way"] <= 9 * TIGHT.slot_bytes


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    ("call", "after"),
    [
        ("cuLaunchKernel", 0),
        ("cuLaunchKernel", 5),
        ("cuEventRecord", 9),
        ("cuStreamWaitEvent", 7),
        ("cuEventSynchronize", 0),
    ],
)
def test_a_failure_in_the_middle_is_told_and_leaves_nothing_under_way(driver, form, call, after):
    scene = Scene(driver, "staged", form, held=False)
    try:
        driver.hooks.fake_fail(call.encode(), after)
        load = scene.begin()
        error = scene.on_stream(lambda: load.wait_layer(SIZE.L - 1))
        if call != "cuEventSynchronize":
            assert "as the test wanted" in str(error)
        for again in (load.finish, load.finish, load.layers_done, lambda: load.wait_layer(0)):
            with pytest.raises(TransferError, match="as the test wanted"):
                again()
        held = scene.target.memory.copy()
        driver.hooks.fake_drain()
        np.testing.assert_array_equal(scene.target.memory, held)
        driver.hooks.fake_fail(b"", -1)
        scene.begin().finish()
        np.testing.assert_array_equal(scene.target.memory, pages_after(CASE, scene.name, scene.source, range(SIZE.L)))
    finally:
        driver.hooks.fake_fail(b"", -1)
        scene.close()


def test_a_load_that_cannot_begin_leaves_no_events(driver):
    with closing(Scene(driver, "staged", "chunkwise", held=False)) as scene:
        driver.hooks.fake_fail(b"cuEventRecord", 0)
        with pytest.raises(TransferError, match="EventRecord failed: CUDA_ERROR_FAKE"):
            scene.begin()
        scene.begin().finish()


def test_cancelling_between_slices_stops_what_waits(driver):
    scene = Scene(driver, "staged", "chunkwise", held=False)
    submit = scene.transfer._pages.submit
    try:
        load: Any = None
        begun = threading.Event()

        def cancelled(*arguments: Any) -> None:
            begun.wait(SOON)
            load.cancel()
            submit(*arguments)

        scene.transfer._pages.submit = cancelled
        load = scene.begin()
        begun.set()
        for call in (lambda: load.wait_layer(3), load.finish, load.layers_done):
            assert "the load was cancelled before layer 0 of 4" in str(scene.on_stream(call))
        load.cancel()
        assert (scene.target.memory == Engine.make(scene.name, SIZE, None).memory).all()
        scene.transfer._pages.submit = submit
        scene.transfer.load(CASE.block_ids, scene.copies)
        np.testing.assert_array_equal(scene.target.memory, pages_after(CASE, scene.name, scene.source, range(SIZE.L)))
    finally:
        scene.close()


def test_closing_cancels_and_gives_everything_back(driver):
    before = set(threading.enumerate())
    scene = Scene(driver, "staged", "chunkwise", held=False)
    gate = threading.Event()
    submit = scene.transfer._pages.submit
    scene.transfer._pages.submit = lambda *arguments: (gate.wait(SOON), submit(*arguments))[1]
    first, second = scene.begin(), scene.begin()
    closer = threading.Thread(target=scene.transfer.close)
    closer.start()
    closer.join(0.05)
    assert closer.is_alive()
    gate.set()
    closer.join(SOON)
    for load in (first, second):
        with pytest.raises(TransferError, match="cancelled before layer 0"):
            load.finish()
    with pytest.raises(TransferError, match="closed"):
        scene.begin()
    assert (scene.transfer.staging_bytes, scene.transfer.locked_bytes) == (0, 0)
    scene.close()
    assert driver.hooks.fake_streams() == 0
    assert set(threading.enumerate()) == before


def test_a_forked_child_is_told(driver):
    with closing(Scene(driver, "staged in batches", "chunkwise")) as scene:
        load = scene.begin()
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            said = 0
            for call in (load.finish, load.layers_done, load.cancel, lambda: load.wait_layer(0)):
                try:
                    call()
                except TransferError as error:
                    said += "forked" in str(error)
            os.write(write, bytes([said]))
            os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as answer:
            assert answer.read() == b"\x04"
        os.waitpid(child, 0)


def test_what_makes_no_sense_is_refused_before_anything_begins(driver):
    with closing(Scene(driver, "staged", "layerwise", held=False)) as scene:
        buffer = aligned(stored_as(scene.source, 8, "layerwise").nbytes)
        for layer, culprit in ((None, "names no layer"), (SIZE.L, "names layer 4"), (-1, "names layer -1")):
            with pytest.raises(TransferError, match=culprit):
                scene.transfer.begin_load([1, 2], [ChunkCopy(0, 0, 8, buffer, layer)])
        load = scene.transfer.begin_load([], [])
        load.wait_layer(0)
        with pytest.raises(TransferError, match="layer 4 is none of the 4"):
            load.wait_layer(4)
        load.finish()
        some = [copy for copy in scene.copies if copy.layer in (0, 2)]
        load = scene.transfer.begin_load(CASE.block_ids, some)
        load.wait_layer(3)
        load.finish()
        np.testing.assert_array_equal(scene.target.memory, pages_after(CASE, scene.name, scene.source, [0, 2]))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("gap", [False, True])
def test_objects_in_a_row_are_one_copy_unless_registrations_meet(driver, form: str, gap: bool):
    check_folding(driver, form, gap=gap)


def check_folding(driver: FakeDriver, form: str, *, gap: bool) -> None:
    """Chunks that follow each other, registered two by two; with a gap, two of them are not registered."""
    case = Case(SIZE, 4, [6, 2, 3, 5, 1, 4], [(chunk, 4 * chunk, 4 * chunk + 4) for chunk in range(6)])
    source, target = case.engine("packed per head", 3), case.engine("packed per head", None)
    driver.hooks.fake_reset(1)
    objects = list(objects_of(source, case, form))
    nbytes = objects[0][2].nbytes
    whole = aligned(nbytes * len(objects))
    whole[:] = b"".join(array.tobytes() for _, _, array in objects)
    buffers = [whole[first : first + nbytes] for first in range(0, len(whole), nbytes)]
    for first in range(0, len(whole), len(whole) // 3):
        if first or not gap:
            registered(driver, whole[first : first + len(whole) // 3])
    copies = [ChunkCopy(*part, b, layer) for (part, layer, _), b in zip(objects, buffers, strict=True)]
    tuning = evolve(TIGHT, slot_bytes=1 << 14, fold=2)
    stored = stored_as(target, 4, form)
    with closing(driver.transfer(layers_of(target), target.paged, stored, tuning, LayerwiseTransfer)) as transfer:
        transfer.begin_load(case.block_ids, copies).finish()
        folded = driver.counts()["folded"]
        transfer.load(case.block_ids, copies)
    # In doubt about one registration, none of two objects are folded, and one has no rows apart if it holds a layer.
    assert folded > 0 or (gap and form == "layerwise")
    np.testing.assert_array_equal(target.memory, pages_after(case, "packed per head", source, range(SIZE.L)))


@pytest.mark.parametrize("form", FORMATS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10_000))
def test_objects_may_lie_anywhere_in_a_pool(driver, form: str, seed: int):
    check_places(driver, form, seed)


def check_places(driver: FakeDriver, form: str, seed: int) -> None:
    """Some follow each other, some lie at one distance, some neither; and registrations meet anywhere between."""
    random = np.random.default_rng(seed)
    size = evolve(SIZE, NB=33)
    parts = [(chunk, chunk * 8, chunk * 8 + 8) for chunk in range(16)]
    case = Case(size, 8, random.permutation(33)[:32].tolist(), parts)
    source, target = case.engine("planes-first NHD", 3), case.engine("planes-first NHD", None)
    objects = list(objects_of(source, case, form))
    nbytes, count = objects[0][2].nbytes, len(objects)
    places = random.choice([1, 1, 1, 2, 3], count).cumsum()
    if seed % 3:
        some = random.permutation(count)[: count // 4]
        places[some] = places[np.sort(some)]
    driver.hooks.fake_reset(seed)
    pool = registered(driver, aligned(nbytes * int(places.max() + 1)), int(random.integers(1, 4)))
    buffers = [pool[place * nbytes : (place + 1) * nbytes] for place in places.tolist()]
    copies = [ChunkCopy(*part, b, layer) for (part, layer, _), b in zip(objects, buffers, strict=True)]
    fold, scattered = int(random.integers(0, 5)), int(random.choice([0, 9]))
    tuning = evolve(TIGHT, slot_bytes=1 << 14, window=8, fold=fold, scattered=scattered)
    stored = stored_as(target, 8, form)
    for engine in (source, target):
        with closing(driver.transfer(layers_of(engine), engine.paged, stored, tuning, LayerwiseTransfer)) as transfer:
            if engine is source:
                transfer.store(case.block_ids, copies)
            else:
                transfer.begin_load(case.block_ids, copies).finish()
        for buffer, (_, _, array) in zip(buffers, objects, strict=True):
            assert bytes(buffer) == array.tobytes()
    np.testing.assert_array_equal(target.memory, pages_after(case, "planes-first NHD", source, range(SIZE.L)))


@pytest.mark.parametrize(
    ("way", "form"), [("scattered in part", "chunkwise"), ("scattered in part, two lanes", "layerwise")]
)
def test_slices_that_are_copied_and_slices_that_are_not_are_of_one_load(driver, way: str, form: str):
    """Else the tests of order would not show that they get along."""
    with closing(Scene(driver, way, form, held=False)) as scene:
        scene.begin().finish()
        assert 0 < driver.counts()["bytes"] < 3 * scene.source.stored(8).nbytes
        np.testing.assert_array_equal(scene.target.memory, pages_after(EVEN, scene.name, scene.source, range(SIZE.L)))


@pytest.mark.parametrize("form", FORMATS)
def test_layers_of_one_slice_share_an_event_and_loads_use_events_again(driver, form: str):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("maru_transfer.flow.LEAST_SLICE", 1 << 20)
        check_events(driver, form)


def check_events(driver: FakeDriver, form: str) -> None:
    source, target = EVEN.engine("packed per head", 3), EVEN.engine("packed per head", None)
    driver.hooks.fake_reset(1)
    copies = copies_of(source, EVEN, form, wrap(driver, 1))
    before = driver.hooks.fake_events()
    stored, tuning = stored_as(target, 8, form), evolve(TIGHT, slot_bytes=1 << 14)
    with closing(driver.transfer(layers_of(target), target.paged, stored, tuning, LayerwiseTransfer)) as transfer:
        bound = driver.hooks.fake_events()
        for _ in range(3):
            load = transfer.begin_load(EVEN.block_ids, copies)
            for layer in range(SIZE.L):
                load.wait_layer(layer)
            load.finish()
            assert load.layers_done() == SIZE.L
            transfer._thread.settle()
            # Where pages may be touched; behind the first layer, alone in its slice, and behind all others.
            assert driver.hooks.fake_events() - bound == 3
    np.testing.assert_array_equal(target.memory, pages_after(EVEN, "packed per head", source, range(SIZE.L)))
    assert driver.hooks.fake_events() == before
    assert driver.counts()["misuses"] == 0


@pytest.mark.parametrize("form", FORMATS)
def test_what_orders_slices_is_no_more_than_needed(driver, form: str):
    """Each event costs a thread a microsecond, thousands of times a second."""
    case = Case(SIZE, 8, [6, 2, 3, 5], [(0, 0, 8), (1, 8, 16)])
    source, target = case.engine("packed per head", 3), case.engine("packed per head", None)
    driver.hooks.fake_reset(1)
    copies = copies_of(source, case, form, wrap(driver, 1))
    with closing(opener(driver, "staged")(layers_of(target), target.paged, stored_as(target, 8, form))) as transfer:
        transfer.begin_load(case.block_ids, copies).finish()
    slices, layers, lanes = 2 * SIZE.L, SIZE.L, 2
    counts = driver.counts()
    assert counts["launches"] == slices
    # Where pages may be touched; the end of every copy, for the next one; and of every layer the end of the slice
    # before its last, the wait for that, and the layer's own event.
    assert counts["events"] == 1 + lanes + slices + (slices - 1) + 3 * layers


def test_the_binding_is_of_the_header_that_is_here():
    header = (ROOT / "csrc" / "maru.h").read_text()
    assert f"#define MARU_CUDA_ABI_VERSION {cuda_library.ABI_VERSION}\n" in header
    assert cuda_library.SEGMENT.itemsize == 56
    place = (ROOT / "csrc" / "place.h").read_text()
    assert f"#define MARU_PLACE_SEGMENTS {cuda_library.MOST_SEGMENTS}\n" in place
    assert f"#define MARU_PLACE_BLOCKS {cuda_library.MOST_BLOCKS}\n" in place


def test_its_plugin_offers_it():
    (provision,) = maru_transfer_engines()
    assert (provision.name, provision.rank) == ("layerwise", 20)
    engine = provision.factory()
    assert isinstance(engine, LayerwiseEngine)
    assert engine.name == provision.name
