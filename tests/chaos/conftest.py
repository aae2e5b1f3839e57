"""Fixtures for tests with many processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client.real import Folder


@pytest.fixture
def folder(maru_runtime_dir: Path) -> Iterator[Folder]:
    """A runtime folder in which ``auto`` starts a real server."""
    made = Folder(maru_runtime_dir)
    yield made
    made.end()
