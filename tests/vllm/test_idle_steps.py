"""A step in which nothing is looked up, loaded or stored costs little: most steps of an engine that decodes are such.

What a few lines of Python cost there is not what they cost in a loop: the code has been out of the processor's caches
since the step before. So calls are counted, which are the same on every machine.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.vllm.fake_store import FakeStore
from tests.vllm.mini_engine import BLOCK, CHUNK, Engine, reference
from tests.vllm.test_connector import prompt

EngineOn = Callable[..., Engine]

BESIDE = {"maru_async_load": True, "maru_async_store": True}
OVERLAP = BESIDE | {"maru_overlap_load_with_compute": True, "maru_overlap_release_after_layers": 1}


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Calls of Maru's functions and of the fake server's session on this thread, by ``module:function``."""
    calls: Counter[str] = Counter()

    def look(frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call":
            module = str(frame.f_globals.get("__name__"))
            if module.startswith(("maru_", "tests.vllm.fake_store")):
                calls[f"{module}:{frame.f_code.co_name}"] += 1

    sys.setprofile(look)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def decoding(engine: Engine) -> None:
    """One request that has stored what is complete and decodes, in the middle of a block.

    A step that begins a block makes three calls more, to learn of it.
    """
    request = engine.add("a", prompt(CHUNK + 1), max_tokens=4 * CHUNK)
    side = engine.side._scheduler
    assert side is not None
    while not request.is_finished():
        engine.step()
        # The next step tells what has changed, which is done once.
        if engine.answers["a"] and request.num_computed_tokens % BLOCK == BLOCK // 2 and not side._stores.outstanding:
            engine.step()
            return
    raise AssertionError("the prompt's store does not end")


@pytest.mark.parametrize(
    ("extra", "most"), [({}, 71), (BESIDE, 76), (OVERLAP, 98)], ids=["within", "beside", "overlap"]
)
def test_an_idle_step_asks_nobody_wakes_nobody_and_makes_few_calls(
    engine_on: EngineOn, monkeypatch: pytest.MonkeyPatch, extra: dict[str, Any], most: int
) -> None:
    engine = engine_on(FakeStore(), extra=extra, threads=True)
    decoding(engine)
    woken: list[str] = []
    monkeypatch.setattr(threading.Condition, "notify", lambda *_: woken.append("notify"))
    monkeypatch.setattr(threading.Condition, "notify_all", lambda *_: woken.append("notify_all"))
    with counted() as calls:
        engine.step()
    monkeypatch.undo()
    assert not woken
    session = {name.partition(":")[2] for name in calls if name.startswith("tests.")}
    assert session <= {"is_up", "weights_epoch"}, "the server is asked, or told, something"
    assert calls.total() <= most, calls.most_common()
    engine.run()
    assert engine.answers["a"] == reference(prompt(CHUNK + 1), 4 * CHUNK)


def test_layers_are_not_waited_for_where_no_load_is_read_while_it_arrives(engine_on: EngineOn) -> None:
    engine = engine_on(FakeStore(), extra=BESIDE, threads=True)
    decoding(engine)
    with counted() as calls:
        engine.step()
    names = {name.partition(":")[2] for name in calls}
    assert "wait_for_layer_load" in names
    assert not names & {"wait_layer", "runs_layer_hooks", "begin_step", "end_step"}
