"""The short form of ``benchmarks/restart.py``."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.restart import measure
from tests.waiting import NEVER

pytestmark = pytest.mark.slow


def test_a_killed_server_comes_back_with_everything() -> None:
    outcome = measure(argparse.Namespace(objects=3000))
    assert outcome.figures["evicted"] == 0
    # What takes seconds takes more of them where something else has the processors: those are for the long form.
    assert [bound.name for bound in outcome.bounds if bound.missed and not bound.name.startswith("seconds")] == []
    assert outcome.figures["serving_after_s"] < NEVER
