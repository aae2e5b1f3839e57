"""A forked child has none of the driver's threads: it is refused, and what it closes stays open for its parent."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_device import FakeDriver, FakeMemory, aligned, compiler
from paged_forms import Engine, Size
from test_torch_copy import layers_of

from maru_core.errors import TransferError
from maru_core.geometry import ChunkCopy
from maru_transfer.cuda_library import LOAD, Job, Submission
from maru_transfer.kernel import KernelTransfer, Tuning

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C compiler")

TUNING = Tuning(slot_bytes=256, slots=2, window=2, burst=1, grid=1, mapped_bytes=0)
SIZE = Size(L=2, NB=5, BS=4, NH=2, HS=4)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> FakeDriver:
    return FakeDriver.build(tmp_path_factory.mktemp("fork"))


@pytest.fixture
def pages(driver: FakeDriver) -> Iterator[tuple[Engine, KernelTransfer]]:
    driver.hooks.fake_reset(1)
    engine = Engine.make("packed per head", SIZE, 3)
    transfer = driver.transfer(layers_of(engine), engine.paged, engine.stored(8), TUNING)
    yield engine, transfer
    transfer.close()
    assert driver.hooks.fake_streams() == 0


def in_child(what: Callable[[], Any]) -> Any:
    """What it returns in a forked child; an error there is one here."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        answer: Any = None
        try:
            answer = what()
        except BaseException as error:  # noqa: BLE001 - told to the parent
            answer = repr(error)
        os.write(write, json.dumps(answer).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as reader:
        answer = json.loads(reader.read())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return answer


def refusals(*calls: Callable[[], Any]) -> list[str]:
    said = []
    for call in calls:
        try:
            call()
            said.append("went through")
        except TransferError as error:
            said.append(str(error))
    return said


@pytest.mark.slow
def test_a_child_is_refused_whatever_it_calls(driver: FakeDriver, pages: tuple[Engine, KernelTransfer]) -> None:
    engine, transfer = pages
    stored = engine.stored(8)
    copies = [ChunkCopy(0, 0, 8, aligned(stored.nbytes))]
    device, bound = transfer._device, transfer._pages
    job = transfer._plan(LOAD, [1, 2], copies)[1]
    assert isinstance(job, Job)
    said = in_child(
        lambda: refusals(
            lambda: transfer.load([1, 2], copies),
            lambda: transfer.store([1, 2], copies),
            lambda: device.host_range(4096),
            lambda: device.bind(engine.paged, stored, [4096, 8192], 4096, 256, 2),
            lambda: bound.submit(job, Submission(1), 0),
            bound.wait,
            bound.times,
            lambda: bound.set_bounce(4096),
            driver.device,
        )
    )
    assert len(said) == 9
    assert all("was forked from" in text and "'spawn'" in text for text in said), said
    transfer.store([1, 2], copies)
    assert bytes(copies[0].buffer) == engine.naive_object([1, 2], 0, 0, 8, 8).tobytes()


def test_a_child_closes_nothing(driver: FakeDriver, pages: tuple[Engine, KernelTransfer]) -> None:
    engine, transfer = pages

    def close() -> int:
        transfer.close()
        transfer.close()
        return int(driver.hooks.fake_streams())  # of the child's copy of the fake driver

    assert in_child(close) == TUNING.slots
    copies = [ChunkCopy(0, 0, 8, aligned(engine.stored(8).nbytes))]
    transfer.store([1, 2], copies)
    assert bytes(copies[0].buffer) == engine.naive_object([1, 2], 0, 0, 8, 8).tobytes()


@pytest.mark.slow
def test_a_child_that_opens_its_own_may_use_it(tmp_path: Any) -> None:
    engine = Engine.make("packed per head", SIZE, 3)
    stored = engine.stored(8)

    def work() -> bool:
        fresh = FakeDriver.build(tmp_path)
        transfer = KernelTransfer(fresh.device(), FakeMemory(fresh), layers_of(engine), engine.paged, stored, TUNING)
        copy = ChunkCopy(0, 0, 8, aligned(stored.nbytes))
        transfer.store([1, 2], [copy])
        transfer.close()
        return bytes(copy.buffer) == engine.naive_object([1, 2], 0, 0, 8, 8).tobytes()

    assert in_child(work) is True
