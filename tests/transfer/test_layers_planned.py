"""Loads by layer that are planned first, on a fake driver: begun once, behind others, or never."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np
import pytest
from fake_device import FakeDriver, compiler
from layered_checks import FORMATS
from layered_scene import CASE, SIZE, Scene

from maru_core.errors import TransferError
from maru_core.geometry import ChunkCopy

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C compiler")


@pytest.fixture(scope="module")
def driver(tmp_path_factory) -> FakeDriver:
    return FakeDriver.build(tmp_path_factory.mktemp("planned"))


def release_all(copies: list[ChunkCopy]) -> None:
    for copy in copies:
        copy.buffer.release()  # raises as long as somebody holds it


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("way", ["bounced", "staged", "mapped"])
def test_a_load_is_planned_while_another_one_is_under_way_and_begins_behind_it(driver, way: str, form: str):
    """It writes nothing before it begins, and lets go of its buffers when it has finished."""
    with closing(Scene(driver, way, form)) as scene:
        first = scene.begin()
        load = scene.transfer.prepare_layers(CASE.block_ids, scene.copies)
        scene.let_end()
        first.finish()
        driver.hooks.fake_drain()
        scene.target.memory[...] = 0
        begun = load.begin()
        load.close()  # it is under way
        begun.finish()
        for layer in range(SIZE.L):
            assert scene.layer(scene.target.memory, layer) == scene.layer(scene.source.memory, layer)
        release_all(scene.copies)


def test_a_planned_load_that_is_not_begun_lets_go_and_writes_nothing(driver):
    with closing(Scene(driver, "staged", "chunkwise", held=False)) as scene:
        before = scene.target.memory.copy()
        load = scene.transfer.prepare_layers(CASE.block_ids, scene.copies)
        with pytest.raises(BufferError):
            scene.copies[0].buffer.release()
        load.close()
        load.close()
        release_all(scene.copies)
        with pytest.raises(TransferError, match="begun or closed before"):
            load.begin()
        np.testing.assert_array_equal(scene.target.memory, before)


def test_a_planned_load_begins_once(driver):
    with closing(Scene(driver, "staged", "chunkwise", held=False)) as scene:
        load = scene.transfer.prepare_layers(CASE.block_ids, scene.copies)
        begun = load.begin()
        with pytest.raises(TransferError, match="begun or closed before"):
            load.begin()
        begun.finish()


@pytest.mark.parametrize("why", ["the transfer is closed", "the driver fails", "no thread"])
def test_a_planned_load_that_cannot_begin_lets_go(driver, monkeypatch, why: str):
    with closing(Scene(driver, "staged", "chunkwise", held=False)) as scene:
        load = scene.transfer.prepare_layers(CASE.block_ids, scene.copies)
        if why == "the transfer is closed":
            scene.transfer.close()
        elif why == "the driver fails":
            driver.hooks.fake_fail(b"cuEventRecord", 0)
        else:

            def start(load: Any) -> None:
                raise TransferError("as the test wanted")

            monkeypatch.setattr(scene.transfer._thread, "start", start)
        with pytest.raises(TransferError, match=r"closed|as the test wanted"):
            load.begin()
        driver.hooks.fake_fail(b"", -1)
        release_all(scene.copies)


def test_a_load_without_sense_is_refused_when_it_is_planned(driver):
    with closing(Scene(driver, "staged", "chunkwise", held=False)) as scene:
        with pytest.raises(TransferError):
            scene.transfer.prepare_layers(CASE.block_ids[:1], scene.copies)
        release_all(scene.copies)
