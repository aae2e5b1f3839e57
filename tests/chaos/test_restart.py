"""The short form of ``benchmarks/restart.py``."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.restart import measure

pytestmark = pytest.mark.slow


def test_a_killed_server_comes_back_with_everything() -> None:
    outcome = measure(argparse.Namespace(objects=3000))
    assert [bound.name for bound in outcome.bounds if bound.missed] == []
    assert outcome.figures["evicted"] == 0
