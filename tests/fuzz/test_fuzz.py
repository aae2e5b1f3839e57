"""The short form of ``benchmarks/fuzz.py``, and that it sees what it is for."""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import pytest

from benchmarks.fuzz import attack
from maru_core.server.directory import Directory
from maru_core.server.handlers import Handlers
from tests.fuzz.guided import EPOCH, SESSION, Fault, Guided, converse, load
from tests.fuzz.messages import Speaker


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_server_survives_nonsense_and_serves_others(maru_runtime_dir: Path) -> None:
    found = attack(argparse.Namespace(seconds=4.0, seed=8), maru_runtime_dir)
    assert found["alive"]
    assert found["messages"] > 1000
    assert found["connections"] > 50
    assert found["counters"]["internal_errors"] == 0
    assert found["counters"]["bad_requests"] > 300
    assert found["counters"]["stored"] > 0
    assert found["memory_mb"]["after"] - found["memory_mb"]["before"] < 8
    assert found["descriptors"]["after"] - found["descriptors"]["before"] <= 4
    assert found["beside"]["failed"] == found["beside"]["wrong"] == 0
    assert found["beside"]["read"] > 10


@pytest.mark.slow
def test_the_conversations_that_are_kept_are_answered_well() -> None:
    guided = Guided(random.Random(1))
    for conversation in load():
        guided.attempt(conversation)
    assert len(guided.seen) > 1000, "steps from line to line of the server's code"
    guided.run(300)


def _forget_pages(directory: Directory, *arguments: object) -> bytes:
    directory.arenas[0].used += 1
    return b""


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        (lambda *_: 1 / 0, "INTERNAL"),
        (_forget_pages, "does not add up"),
    ],
)
def test_faults_are_found(monkeypatch: pytest.MonkeyPatch, fault: object, what: str) -> None:
    monkeypatch.setattr(Directory, "delete", fault)
    guided = Guided(random.Random(2), corpus=load())
    with pytest.raises(Fault, match=what):
        guided.run(2000)


def test_what_escapes_from_the_handlers_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handlers, "settle", lambda handlers: 1 / 0)
    with pytest.raises(Fault, match="ZeroDivisionError"):
        Guided(random.Random(2)).run(1)


def test_well_formed_messages_are_well_formed() -> None:
    speaker = Speaker(random.Random(3), EPOCH, SESSION)
    assert len({len(speaker.good()) for _ in range(200)}) > 3
    converse([speaker.bad() for _ in range(50)])
