"""Figures of the hints of one process, for ``maru_hint_stats``."""

from __future__ import annotations

import threading
from typing import Final

Value = int | float | str


class Figures:
    """Sums and texts by name. Thread-safe."""

    def __init__(self, *names: str) -> None:
        """``names``: counters that are there from the start, at 0."""
        self._lock: Final = threading.Lock()
        self._values: Final[dict[str, Value]] = dict.fromkeys(("reads", "read_bytes", "read_ms", *names), 0)

    def add(self, name: str, amount: int | float = 1) -> None:
        """Count."""
        with self._lock:
            value = self._values.get(name, 0)
            self._values[name] = amount if isinstance(value, str) else value + amount

    def add_read(self, size: int, ms: float) -> None:
        """Count a read; on the hot path, so all of it at once."""
        values = self._values
        with self._lock:
            values["reads"] += 1  # type: ignore[operator]
            values["read_bytes"] += size  # type: ignore[operator]
            values["read_ms"] += ms  # type: ignore[operator]

    def put(self, name: str, value: Value) -> None:
        """Set."""
        with self._lock:
            self._values[name] = value

    def all(self) -> dict[str, Value]:
        """Everything, under names that start with the plugin's."""
        with self._lock:
            return {
                f"dax.{name}": round(value, 3) if isinstance(value, float) else value
                for name, value in sorted(self._values.items())
            }
