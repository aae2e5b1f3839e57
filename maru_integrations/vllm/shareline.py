"""Who waits for this engine to give back what it may lease, in which order, and who asks when. No I/O, no clock."""

from __future__ import annotations

from attrs import define, field

from maru_integrations.vllm.waits import Wait

#: Seconds in which the server has heard of what was given back: another thread tells it, on a connection of its own.
SETTLES = 0.05
#: Seconds from an answer in vain to the next question: the first one is soon, because of that. Each is twice as long as
#: the one before, until something is given back.
SOON = 0.002
LATER = 0.1


@define
class Place:
    """Since when somebody waits."""

    since: float
    wait: Wait


@define
class ShareLine:
    """Requests whose keys are in the pool while this session leases its share of it, first come, first served.

    Invariants: the first of the line asks and nobody else, but for a last time; after an answer in vain not before
    something was given back or :data:`SOON` has passed. Who waits holds no lease, so two that had a part each cannot
    wait for each other, and what is given back is for the first.
    """

    #: Who waits, the first first.
    places: dict[str, Place] = field(factory=dict, init=False)
    _again: float = field(default=float("-inf"), init=False)
    _gap: float = field(default=SOON, init=False)
    _settled: float = field(default=float("-inf"), init=False)

    def join(self, request_id: str, now: float) -> bool:
        """Wait, at the end of the line; whether the request did not wait there before."""
        if request_id in self.places:
            return False
        self.places[request_id] = Place(now, Wait(now, now))
        return True

    def leave(self, request_id: str) -> None:
        """The request has what it wants, does without or is gone. Idempotent."""
        if self.is_first(request_id):
            self.ask_soon()
        self.places.pop(request_id, None)

    def refuse(self, now: float) -> None:
        """What is left of the share was not enough."""
        self._again = now + self._gap
        self._gap = min(2 * self._gap, LATER)

    def gave_back(self, now: float) -> None:
        """There is more than at the last answer, or there will be when the server hears of it."""
        self.ask_soon()
        self._settled = now + SETTLES

    def is_settled(self, now: float) -> bool:
        """Whether an answer tells of all that was given back."""
        return now >= self._settled

    def ask_soon(self) -> None:
        """The next answer may be another one."""
        self._again, self._gap = float("-inf"), SOON

    def is_first(self, request_id: str) -> bool:
        """Whether nobody waits before this request, which need not wait itself."""
        return next(iter(self.places), request_id) == request_id

    def may_ask(self, request_id: str, now: float) -> bool:
        """Whether this is the one to ask, and the time for it."""
        return self.is_first(request_id) and now >= self._again

    def is_over(self, request_id: str, now: float, seconds: float) -> bool:
        """Look, at ``now``: whether the request has no time left to look again of ``seconds`` since it joined."""
        place = self.places[request_id]
        place.wait.deadline = place.since + seconds
        return place.wait.is_over(now)
