"""Every single call of the driver fails once: nothing hangs, nothing leaks, it is told, and the next job is right.

On a driver that is a fake. Which call a test has failed is in its messages.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from attrs import evolve, frozen
from cases import Case
from fake_device import FakeDriver, aligned, compiler, registered
from layered_checks import copies_of, pages_after, stored_as
from paged_forms import Engine, Size
from test_kernel import TIGHT
from test_torch_copy import layers_of

from maru_core.brake import Brake
from maru_core.errors import TransferError
from maru_core.geometry import ChunkCopy
from maru_transfer.kernel import Tuning
from maru_transfer.layerwise import LayerwiseTransfer

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C compiler")

SIZE = Size(L=3, NB=9, BS=4, NH=2, HS=4)
CASE = Case(SIZE, 8, [6, 2, 3, 5, 1, 4], [(0, 0, 8), (1, 8, 16), (2, 16, 24)])
FORM = "planes-first NHD"
#: What is given back by these cannot be given back otherwise, and nobody is there to be told.
LETTING_GO = {"cuCtxPopCurrent", "cuEventDestroy", "cuStreamDestroy", "cuModuleUnload", "cuDevicePrimaryCtxRelease"}


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> FakeDriver:
    return FakeDriver.build(tmp_path_factory.mktemp("failures"))


@frozen(eq=False)
class Scene:
    """A transfer, its pages, objects, and what both hold when nothing fails."""

    driver: FakeDriver
    source: Engine
    target: Engine
    transfer: LayerwiseTransfer
    copies: list[ChunkCopy]
    locked: bool

    @classmethod
    def make(cls, driver: FakeDriver, form: str, tuning: Tuning, *, locked: bool) -> Scene:
        driver.hooks.fake_reset(1)
        source, target = CASE.engine(FORM, 3), CASE.engine(FORM, None)
        stored = stored_as(target, 8, form)

        def wrap(array: Any) -> memoryview:
            buffer = aligned(array.nbytes)
            buffer[:] = array.tobytes()
            return buffer

        copies = copies_of(source, CASE, form, wrap)
        transfer = driver.transfer(layers_of(target), target.paged, stored, tuning, LayerwiseTransfer)
        assert isinstance(transfer, LayerwiseTransfer)
        return cls(driver, source, target, transfer, copies, locked)

    def reset(self) -> None:
        self.driver.hooks.fake_reset(1)
        for copy in self.copies if self.locked else ():
            registered(self.driver, copy.buffer)

    def load(self) -> None:
        self.transfer.load(CASE.block_ids, self.copies)

    def prepared(self) -> None:
        load = self.transfer.prepare_load(CASE.block_ids, self.copies)
        try:
            assert load.run(Brake(), 1) == len(self.copies)
        finally:
            load.close()

    def by_layer(self) -> None:
        """One that is followed: by a stream, and by whoever asks how many layers have arrived."""
        try:
            load = self.transfer.begin_load(CASE.block_ids, self.copies)
            try:
                for layer in range(SIZE.L):
                    load.wait_layer(layer)
                    assert load.layers_done() <= SIZE.L
            finally:
                with suppress(TransferError):
                    load.finish()
            load.finish()
        finally:
            self.transfer._thread.settle()

    def store(self) -> None:
        """What was loaded, into objects that hold something else."""
        blank = [aligned(copy.buffer.nbytes) for copy in self.copies]
        for buffer in blank if self.locked else ():
            registered(self.driver, buffer)
        parts = zip(self.copies, blank, strict=True)
        self.transfer.store(CASE.block_ids, [ChunkCopy(c.chunk, c.first, c.last, b, c.layer) for c, b in parts])
        for copy, buffer in zip(self.copies, blank, strict=True):
            assert bytes(copy.buffer) == bytes(buffer)

    def is_loaded(self) -> None:
        wanted = pages_after(CASE, FORM, self.source, range(SIZE.L))
        np.testing.assert_array_equal(self.target.memory, wanted)


MOVES: dict[str, Callable[[Scene], None]] = {
    "load": Scene.load,
    "prepared": Scene.prepared,
    "by layer": Scene.by_layer,
    "store": Scene.store,
}
#: (tuning, whether the driver knows the objects)
WAYS: dict[str, tuple[Tuning, bool]] = {
    "staged": (evolve(TIGHT, slots=2, window=4, burst=2), True),
    "three lanes": (evolve(TIGHT, slot_bytes=512, fold=2), True),
    "bounced": (evolve(TIGHT, slots=2, window=4, burst=3), False),
    "direct": (evolve(TIGHT, direct_bytes=1), True),
    "mapped": (evolve(TIGHT, mapped_bytes=1 << 40), True),
    "scattered in part": (evolve(TIGHT, slot_bytes=512, slots=2, scattered=3, fold=0), True),
}


def held(driver: FakeDriver) -> tuple[int, int, int]:
    """Streams, events and contexts that somebody has."""
    return driver.hooks.fake_streams(), driver.hooks.fake_events(), driver.hooks.fake_retained()


def error_of(call: Callable[[], None]) -> str | None:
    try:
        call()
    except TransferError as error:
        return str(error)
    return None


@pytest.fixture(autouse=True)
def _slices_of_one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("maru_transfer.flow.LEAST_SLICE", 1)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["chunkwise", "layerwise"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("move", MOVES)
def test_a_call_that_fails_is_told_and_the_next_job_is_right(driver, move: str, way: str, form: str) -> None:
    before = held(driver)
    tuning, locked = WAYS[way]
    scene = Scene.make(driver, form, tuning, locked=locked)
    hooks, run = driver.hooks, MOVES[move]
    scene.reset()
    scene.load()  # a store has something to store, and locked memory is there that is needed
    for _ in range(2):
        scene.reset()
        run(scene)
    count, events = sum(driver.calls().values()), hooks.fake_events()
    told = 0
    for index in range(count):
        scene.reset()
        if move != "store":
            scene.target.memory[...] = Engine.make(FORM, SIZE, None).memory
        hooks.fake_fail_at(index)
        hooks.fake_lazy(1)  # nothing runs unless somebody waits for it
        error = error_of(lambda: run(scene))
        told += error is not None
        if error is None:
            hooks.fake_drain()
            scene.is_loaded()
        failed = (hooks.fake_failed_at() or b"").decode()
        hooks.fake_fail_at(-1)
        what = f"call {index}, {failed}"
        assert error is None or "CUDA_ERROR_FAKE" in error, f"{what}: {error}"
        # Nothing of it is under way.
        pages, objects = scene.target.memory.copy(), [bytes(copy.buffer) for copy in scene.copies]
        hooks.fake_drain()
        np.testing.assert_array_equal(scene.target.memory, pages, what)
        assert [bytes(copy.buffer) for copy in scene.copies] == objects, what
        # To change a mode back is a matter of letting go, and fails without a word.
        if failed not in LETTING_GO and not (failed == "cuThreadExchangeStreamCaptureMode" and error is None):
            assert hooks.fake_is_clean(), what
        hooks.fake_clean()
        assert hooks.fake_events() <= events, what
        assert driver.counts()["misuses"] == 0, what
        scene.reset()
        scene.load()
        hooks.fake_drain()
        scene.is_loaded()
        run(scene)
    assert told > count // 4
    scene.transfer.close()
    assert held(driver) == before


def test_what_cannot_be_opened_leaves_nothing(driver) -> None:
    hooks = driver.hooks
    target = CASE.engine(FORM, None)

    def open_() -> None:
        driver.transfer(layers_of(target), target.paged, target.stored(8), TIGHT, LayerwiseTransfer).close()

    hooks.fake_reset(1)
    before = held(driver)
    open_()
    assert held(driver) == before
    count, told = sum(driver.calls().values()), 0
    for index in range(count):
        hooks.fake_reset(1)
        before = held(driver)
        hooks.fake_fail_at(index)
        error = error_of(open_)
        told += error is not None
        failed = (hooks.fake_failed_at() or b"").decode()
        hooks.fake_fail_at(-1)
        # Closing without a context, or in a mode in which captures of others count, gives nothing back.
        if error is not None or failed not in LETTING_GO | {"cuCtxPushCurrent", "cuThreadExchangeStreamCaptureMode"}:
            assert held(driver) == before, f"call {index}, {failed}"
        hooks.fake_clean()
    assert told > count // 4
