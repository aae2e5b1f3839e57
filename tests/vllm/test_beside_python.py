"""The benchmarks of loader and saver beside a thread that runs Python, in a short form."""

from __future__ import annotations

import argparse
import threading

import pytest

pytest.importorskip("vllm")

from benchmarks import loader_beside_python as loader
from benchmarks import saver_beside_python as saver


@pytest.mark.slow
def test_the_saver_is_measured_in_every_way_beside_every_engine() -> None:
    """All is stored, and what is judged is what was measured."""
    outcome = saver.run(argparse.Namespace(repeats=1, copy_ms=5.0))
    assert len(outcome.figures) == 3 * 6
    assert {len(line) for line in outcome.table} == {7}
    assert all(found["processor_ms"] > 0 for found in outcome.figures.values())
    assert all(found["added"] > 0 for found in outcome.figures.values())
    judged = [bound.figure for bound in outcome.bounds]
    wanted = [found for name, found in outcome.figures.items() if "whole," in name and "spins" not in name]
    assert judged[::2] == [found["added"] for found in wanted]
    assert judged[1::2] == pytest.approx([found["processor_ms"] / 5 for found in wanted])


@pytest.mark.slow
def test_the_loader_is_measured_in_every_way_beside_every_engine() -> None:
    outcome = loader.run(argparse.Namespace(repeats=1, copy_ms=5.0))
    assert len(outcome.figures) == 3 * (8 + 2)
    assert {len(line) for line in outcome.table} == {9}
    assert all(added > 0 for added in outcome.figures.values())
    ways = [(engine, way) for engine in ("empty steps", "decode") for way in ("whole", "by layer")]
    wanted = [outcome.figures[f"{engine}, {way}, {many}"] for engine, way in ways for many in (1, 4)]
    assert [bound.figure for bound in outcome.bounds] == wanted


def test_time_of_a_thread_is_its_own() -> None:
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait, name="sleeps", daemon=True)
    thread.start()
    before = saver.processor_of("sleeps")
    saver.work(300_000)
    assert saver.processor_of("sleeps") - before < 0.002
    ended.set()
    thread.join()
    assert saver.processor_of("nobody") == 0
