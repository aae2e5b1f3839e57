"""Which requests the pool is asked for when they arrive, before vLLM considers them. No I/O, no clock."""

from __future__ import annotations

from attrs import define, field, frozen


@frozen
class _Asked:
    """A request that the pool was asked for. ``blocks`` that it will need at least."""

    since: float
    blocks: int


@define
class Ahead:
    """Requests that have arrived and whose turn has not come, and for which of them the pool was asked.

    vLLM hears of a step's arrivals together, then goes through them one by one. Asked in turn, each waits for an answer
    of its own, and those that find no time left lose a step; asked on arrival, all wait for the same moment.

    Not for a long line: what is leased is kept from eviction, an early answer grows old, and making the keys of more
    than the next step can take would hold it up. Invariants: at most ``most`` requests are asked for, none once they
    have ``most_blocks`` together, each for ``seconds`` at most; nobody is asked for behind one who was not.
    """

    most_blocks: int
    most: int = 16
    seconds: float = 1.0
    #: Everybody whose turn has not come.
    _line: set[str] = field(factory=set, init=False)
    #: Those of them who were asked for and are not old, in the order of their arrival.
    _asked: dict[str, _Asked] = field(factory=dict, init=False)

    @property
    def blocks(self) -> int:
        """Blocks of all who were asked for."""
        return sum(asked.blocks for asked in self._asked.values())

    @property
    def may_ask(self) -> bool:
        """Whether the pool may be asked for the next one to arrive."""
        return len(self._line) == len(self._asked) < self.most and self.blocks < self.most_blocks

    def add(self, request_id: str, blocks: int, now: float) -> None:
        """The newest request; ``blocks`` is 0 when the pool was not asked for it, whatever it needs."""
        self._line.add(request_id)
        if blocks:
            self._asked[request_id] = _Asked(now, blocks)

    def leave(self, request_id: str) -> None:
        """The request's turn has come, or it is gone. Idempotent."""
        self._line.discard(request_id)
        self._asked.pop(request_id, None)

    def take_old(self, now: float) -> list[str]:
        """Whose answer has become too old, each once: from now on they were not asked for, and stay in line."""
        old = []
        for request_id, asked in self._asked.items():
            if now - asked.since < self.seconds:
                break
            old.append(request_id)
        for request_id in old:
            del self._asked[request_id]
        return old
