"""Waiting until a deadline for what is looked for once per step. No I/O, no clock."""

from __future__ import annotations

from attrs import define


@define
class Wait:
    """One wait, from ``looked`` (when it began, then the newest look) to ``deadline``; both in seconds of one clock.

    A step that begins just before the deadline would look again long after it. So the wait is over at the last look
    before the deadline: when the next one would come too late, if it takes as long as the longest step between two
    looks so far.

    Invariants: while no step is longer than one that was waited for before, nobody waits past the deadline; nothing is
    given up in less than half its time, nor before it was looked for once after a step.
    """

    deadline: float
    looked: float
    _step: float = 0.0

    def is_over(self, now: float) -> bool:
        """Look, at ``now``: whether there is no time left to look again."""
        self._step = max(self._step, now - self.looked)
        self.looked = now
        return now + self._step >= self.deadline
