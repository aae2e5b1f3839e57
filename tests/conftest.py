"""What every test has: how long properties search, and the interpreter's interval as it was.

Properties search ``quick`` unless told otherwise, ``--hypothesis-profile=full`` in scripts/test.sh.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.budgets import register

register()


@pytest.fixture(autouse=True)
def connectors_leave_no_interval() -> Iterator[None]:
    """A connector that nobody shuts down keeps the turns of its process short."""
    interval = sys.getswitchinterval()
    yield
    sys.setswitchinterval(interval)
