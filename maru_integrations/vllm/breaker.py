"""Whether a server that has been too slow or silent is asked at all. No I/O, the clock is given."""

from __future__ import annotations

from collections.abc import Callable

from attrs import define, field


@define
class Breaker:
    """Open after one failure; then one probe each ``interval`` seconds, until one is answered in time.

    While it is open nobody waits for the server. A probe is nobody's: whoever happens to be asked sends it and does
    not wait for it.
    """

    clock: Callable[[], float]
    #: Seconds between two probes.
    interval: float = 1.0
    _probe_due: float | None = field(default=None, init=False)
    #: How often it has opened.
    opened: int = field(default=0, init=False)

    @property
    def is_open(self) -> bool:
        """Whether the server counts as away."""
        return self._probe_due is not None

    def failed(self) -> None:
        """The server has not answered in time, or not sensibly."""
        if self._probe_due is None:
            self.opened += 1
            self._probe_due = self.clock() + self.interval

    def answered(self) -> None:
        """The server has answered in time."""
        self._probe_due = None

    def take_probe(self) -> bool:
        """Whether the caller is to send a probe now; the next one is due an interval later."""
        if self._probe_due is None or self.clock() < self._probe_due:
            return False
        self._probe_due = self.clock() + self.interval
        return True
