"""Resets of the namespace: what could not be told to the server is told later, and until then nothing is shared."""

from __future__ import annotations

from collections.abc import Callable

from attrs import define, field

from maru_core import logs
from maru_core.client import MaruHandler
from maru_core.errors import MaruError

#: Seconds between two attempts, and how long one of them, which a step waits for, may take.
INTERVAL = 1.0
PATIENCE = 0.02
#: Seconds behind a reset of this engine's own in which stores that it overtook may still be refused.
OVERTAKES = 10.0


@define
class Resets:
    """After new weights, KV of the old ones must not be hit, also when the server was away when it was told to drop it.

    A server that comes back has kept everything. So a reset that failed is owed: no hits and no stores before it is
    made up for.
    """

    handler: MaruHandler
    clock: Callable[[], float]
    _due: float | None = field(default=None, init=False)
    _done: float | None = field(default=None, init=False)
    #: The weights epoch of which somebody was told that it is over.
    _told: int | None = field(default=None, init=False)

    def reset(self) -> bool:
        """Empty the namespace for everybody; False when the server could not be told yet."""
        try:
            self.handler.reset()
        except MaruError as error:
            self._due = self.clock() + INTERVAL
            logs.get_logger(__name__).error(
                "maru.reset_failed",
                reason=str(error),
                effect="no hits and no stores until the server was told",
                next="tried again every second that requests come in",
            )
            return False
        self._due, self._done = None, self.clock()
        return True

    def caught_up(self) -> bool:
        """Whether no reset is owed; tries to make up for one, now and then."""
        if self._due is None:
            return True
        if self.clock() < self._due or not self.handler.is_up:
            return False
        self._due = self.clock() + INTERVAL
        try:
            self.handler.reset(timeout=PATIENCE)
        except MaruError:
            return False
        self._due, self._done = None, self.clock()
        logs.get_logger(__name__).info("maru.reset_done", delayed=True)
        return True

    def store_refused(self) -> None:
        """The server refused a store. Once per weights epoch tell what it may be, unless our own reset explains it."""
        epoch = self.handler.weights_epoch
        if epoch == self._told or self._due is not None:
            return
        if self._done is not None and self.clock() < self._done + OVERTAKES:
            return
        self._told = epoch
        logs.get_logger(__name__).warning(
            "maru.store_refused",
            reason="the namespace was reset by another engine or by `maru admin reset`, which may mean new weights; or "
            "objects are larger than any pool can hold",
            effect="this engine gets no hits and stores nothing",
            remedy="once it has the weights of the others, reset it, too (/reset_prefix_cache?reset_external=true), or "
            "restart it",
            told="once per reset",
        )
