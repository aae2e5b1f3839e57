"""Loads by layer on a fake driver: cases, ways, and a load whose end the test decides about."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from attrs import evolve
from cases import Case
from fake_device import FakeDriver, FakeMemory, aligned, registered
from layered_checks import copies_of, stored_as
from paged_forms import Engine, Size
from test_kernel import TIGHT
from test_torch_copy import layers_of

from maru_core.contracts import LayeredLoad
from maru_core.errors import TransferError
from maru_transfer.kernel import Tuning
from maru_transfer.layerwise import LayerwiseTransfer

SIZE = Size(L=4, NB=9, BS=4, NH=2, HS=4)
CASE = Case(SIZE, 8, [6, 2, 3, 5, 1, 4], [(0, 0, 8), (1, 8, 16), (2, 17, 23)])
#: Chunks as long as each other, of which slices of 512 bytes hold rows of two, or of what is left.
EVEN = evolve(CASE, parts=[(0, 0, 8), (1, 8, 16), (2, 16, 24)])
SOON = 10.0

#: (tuning, pieces in which buffers are registered; 0: not at all)
WAYS: dict[str, tuple[Tuning, int]] = {
    "bounced": (evolve(TIGHT, slots=2, window=6, burst=4), 0),
    "staged": (evolve(TIGHT, slots=2, window=8, burst=6), 1),
    "staged, all at once": (evolve(TIGHT, window=64), 1),
    "staged in batches": (evolve(TIGHT, slot_bytes=1 << 14, window=64, fold=0), 1),
    "folded across registrations": (evolve(TIGHT, slot_bytes=1 << 14, fold=2), 5),
    "direct": (evolve(TIGHT, direct_bytes=1), 1),
    "mapped": (evolve(TIGHT, mapped_bytes=1 << 40), 1),
    "one slice": (evolve(TIGHT, slot_bytes=1 << 20, slots=1, window=1), 1),
    "scattered": (evolve(TIGHT, slot_bytes=512, scattered=1, scattered_grid=1), 5),
    "scattered, two lanes": (evolve(TIGHT, slot_bytes=512, slots=2, window=8, burst=6, scattered=1), 1),
    "scattered in part": (evolve(TIGHT, slot_bytes=512, window=64, scattered=3, fold=0), 1),
    "scattered in part, two lanes": (evolve(TIGHT, slot_bytes=512, slots=2, scattered=2, fold=0), 1),
}


def wrap(driver: FakeDriver, pieces: int, *, writable: bool = False) -> Callable[[Any], memoryview]:
    def wrapped(array: Any) -> memoryview:
        buffer = aligned(array.nbytes)
        buffer[:] = array.tobytes()
        if pieces:
            registered(driver, buffer, pieces)
        return buffer if writable else buffer.toreadonly()

    return wrapped


def opener(driver: FakeDriver, way: str, memory: FakeMemory | None = None) -> Callable[..., Any]:
    def open_(layers, paged, stored) -> LayerwiseTransfer:
        transfer = driver.transfer(layers, paged, stored, WAYS[way][0], LayerwiseTransfer, memory)
        assert isinstance(transfer, LayerwiseTransfer)
        return transfer

    return open_


class Scene:
    """A layered load of a case whose end is held back until :meth:`let_end`, and a stream that others compute on."""

    def __init__(
        self,
        driver: FakeDriver,
        way: str,
        form: str,
        seed: int = 1,
        *,
        held: bool = True,
    ) -> None:
        driver.hooks.fake_reset(seed)
        self.driver = driver
        self.memory = FakeMemory(driver)
        # Kernels reach host memory where accesses are of 16 bytes.
        self.name = "planes-first NHD" if WAYS[way][0].scattered else "packed per head"
        self.case = EVEN if WAYS[way][0].scattered else CASE
        self.source, self.target = CASE.engine(self.name, 3), CASE.engine(self.name, None)
        self.transfer = opener(driver, way, self.memory)(
            layers_of(self.target), self.target.paged, stored_as(self.target, 8, form)
        )
        self.copies = copies_of(self.source, self.case, form, wrap(driver, WAYS[way][1]), shuffle=seed)
        self.stream = driver.stream()
        self._end = threading.Event()
        # Without that much has run before anybody has come to wait for it.
        driver.hooks.fake_lazy(int(held and seed % 4 > 0))
        if held:
            wait = self.transfer._pages.wait
            self.transfer._pages.wait = lambda: (self._end.wait(SOON), wait())[1]

    def begin(self) -> LayeredLoad:
        return self.transfer.begin_load(CASE.block_ids, self.copies)

    def let_end(self) -> None:
        self._end.set()

    def on_stream(self, call: Callable[[], Any]) -> Any:
        """Another thread, whose current stream is ``stream``."""
        found: list[Any] = []

        def run() -> None:
            self.memory.streams[threading.get_ident()] = self.stream
            try:
                found.append(call())
            except TransferError as error:
                found.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join(SOON)
        assert not thread.is_alive(), "it blocks"
        return found[0]

    def snapshot(self) -> Any:
        """What the stream will see of the pages."""
        copy = np.zeros_like(self.target.memory)
        memory = self.target.memory
        self.driver.hooks.fake_copy(self.stream, copy.ctypes.data, memory.ctypes.data, memory.nbytes)
        return copy

    def layer(self, memory: Any, layer: int) -> list[bytes]:
        """What pages hold of a layer, where the case has tokens."""
        engine = Engine(self.target.form, SIZE, memory)
        return [engine.naive_object(CASE.block_ids, *part, 8)[:, layer].tobytes() for part in self.case.parts]

    def close(self) -> None:
        self.let_end()
        self.transfer.close()
        self.driver.hooks.fake_drain()
        self.driver.hooks.fake_close_stream(self.stream)
