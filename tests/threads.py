"""A process that gets no more threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch


@contextmanager
def no_more_threads() -> Iterator[None]:
    """As long as this lasts, none can be started."""
    with patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread")):
        yield
