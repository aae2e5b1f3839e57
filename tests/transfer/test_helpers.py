"""Copies in a process that gets no more threads are made all the same, once, and over when the call returns."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("torch")

import numpy as np
import torch

from maru_transfer.crossing import MIN_BYTES_PER_THREAD, Crossing
from maru_transfer.helpers import share
from maru_transfer.layered import Arrived, LoadThread, SteppedLoad
from tests.threads import no_more_threads

SOON = 10.0


def test_what_no_thread_took_is_done_here_and_never_again() -> None:
    done: list[int] = []
    with ThreadPoolExecutor(2) as pool:
        with no_more_threads():
            assert share(pool, lambda: done.append(1)).done()
            assert done == [1]
            assert isinstance(share(pool, lambda: 1 // 0).exception(), ZeroDivisionError)
        share(pool, lambda: done.append(2)).result(SOON)
    assert done == [1, 2], "the pool had queued the first, too"


def test_what_a_thread_that_is_there_took_is_not_done_here() -> None:
    """One of two threads runs; the second cannot be started, and the first takes what was meant for it."""
    began, go, who = threading.Event(), threading.Event(), []

    class Pool(ThreadPoolExecutor):
        def submit(self, *args: Any, **kwargs: Any) -> Any:
            super().submit(*args, **kwargs)
            assert began.wait(SOON)
            raise RuntimeError("can't start new thread")

    def work() -> None:
        who.append(threading.current_thread())
        began.set()
        go.wait(SOON)

    with Pool(1) as pool:
        future = share(pool, work)
        assert not future.done(), "whoever waits for it waits for the thread"
        go.set()
        future.result(SOON)
    assert len(who) == 1
    assert who[0] is not threading.current_thread()


def test_a_load_by_layer_without_a_thread_is_made_at_once() -> None:
    moved: list[int] = []

    def move(layer: int) -> Arrived:
        moved.append(layer)
        return Arrived()

    thread = LoadThread()
    with no_more_threads():
        load = SteppedLoad(2, move)
        thread.start(load)
        assert load.layers_done() == 2
        load.finish()
    again = SteppedLoad(2, move)
    thread.start(again)
    again.finish()
    thread.settle()
    thread.close()
    assert moved == [0, 1, 0, 1], "each once, and close() does not wait for what never ran"


def test_a_copy_on_the_host_without_helpers_is_whole() -> None:
    size = 4 * MIN_BYTES_PER_THREAD
    crossing = Crossing(torch.device("cpu"), half=size, threads=4)
    source = np.random.default_rng(1).integers(0, 255, size, np.uint8)
    target = torch.zeros(size, dtype=torch.uint8)
    with no_more_threads():
        crossing.pinned = Unpinned()
        crossing.to_device(memoryview(source), target, [(0, size)])
    assert np.array_equal(target.numpy(), source)
    crossing.close()


class Unpinned:
    """Memory that the device does not know."""

    def spans(self, address: int, length: int) -> Any:
        from maru_core.contracts import MemorySpan

        return [MemorySpan(0, length, False)]
