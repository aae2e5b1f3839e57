"""Which requests the pool is asked for when they arrive, before vLLM considers them. No I/O, no clock."""

from __future__ import annotations

from attrs import define, field, frozen


@frozen
class _Waiting:
    """A request that has arrived. ``blocks`` that it will need at least, 0 when the pool was not asked for it."""

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
    _waiting: dict[str, _Waiting] = field(factory=dict, init=False)
    _asked: int = field(default=0, init=False)

    @property
    def blocks(self) -> int:
        """Blocks of all who were asked for."""
        return sum(waiting.blocks for waiting in self._waiting.values())

    @property
    def may_ask(self) -> bool:
        """Whether the pool may be asked for the next one to arrive."""
        return len(self._waiting) == self._asked < self.most and self.blocks < self.most_blocks

    def add(self, request_id: str, blocks: int, now: float) -> None:
        """The newest request; ``blocks`` is 0 when the pool was not asked for it, whatever it needs."""
        self._waiting[request_id] = _Waiting(now, blocks)
        self._asked += blocks > 0

    def leave(self, request_id: str) -> None:
        """The request's turn has come, or it is gone. Idempotent."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None and waiting.blocks:
            self._asked -= 1

    def take_old(self, now: float) -> list[str]:
        """Who has waited for too long, each once: what was asked for them counts no more."""
        old = []
        for request_id, waiting in self._waiting.items():
            if now - waiting.since < self.seconds:
                break
            old.append(request_id)
        for request_id in old:
            self.leave(request_id)
        return old
