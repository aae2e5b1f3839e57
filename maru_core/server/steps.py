"""Long work in small steps.

An operation is a generator: it works on at most SLICE keys, yields so that others are served, and returns its results.
What it took before it yielded is always recorded in its session, so that a session that ends, or a request that is
cancelled, in the middle leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

#: What an operation yields (nothing) and returns (its results).
Steps = Generator[None, None, list[Any]]

#: Keys that are worked on before other requests get their turn: a millisecond or two.
SLICE = 512
#: The same for RESERVE, which writes a header for each and enters it in every table.
RESERVE_SLICE = 256
#: The same for DELETE, REPORT and RESET, which handle keys one by one.
DELETE_SLICE = 256
#: The same for RESERVE of objects whose lengths may all differ: room is made for each by itself.
MIXED_SLICE = 64
