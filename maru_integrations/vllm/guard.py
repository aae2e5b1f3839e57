"""Nothing that goes wrong inside Maru may reach vLLM: an exception in a connector hook kills the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from maru_core import logs
from maru_core.errors import MaruError
from maru_core.foreign import show

T = TypeVar("T")


class Guard:
    """Runs hook bodies, turns what they raise into a fallback, and says so once per hook and kind of error."""

    def __init__(self, role: str) -> None:
        self._log = logs.get_logger(__name__).bind(role=role)
        self._told: set[tuple[str, str]] = set()
        #: Number of caught errors, by hook.
        self.caught: dict[str, int] = {}

    def run(self, hook: str, fallback: Callable[[], T], body: Callable[..., T], *args: Any) -> T:
        """``body(*args)``, or ``fallback()`` when it raises an Exception."""
        try:
            return body(*args)
        except Exception as error:  # noqa: BLE001 - the boundary to the engine
            self.caught[hook] = self.caught.get(hook, 0) + 1
            kind = (hook, type(error).__name__)
            if kind not in self._told:
                self._told.add(kind)
                if isinstance(error, MaruError):  # says all there is to say
                    self._log.warning("maru.hook_failed", hook=hook, error=str(error))
                else:
                    self._log.error("maru.hook_failed", hook=hook, error=show(error), exc_info=True)
            return fallback()
