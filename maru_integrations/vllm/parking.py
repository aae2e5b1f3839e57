"""Which requests may be parked on a load, in which order. No I/O, no clock.

A parked request holds the blocks that its load fills and can neither run nor be preempted, so requests that are parked
together must fit into the cache together, each with all the blocks that it needs to run. Otherwise none of them ever
gets its last one, and the engine stands still.
"""

from __future__ import annotations

from attrs import define, field


@define
class Parking:
    """Shares of the block budget and of the window of loads in flight, both first come, first served.

    A request takes its share before anything is asked for it and keeps it until it has the blocks to run with
    (:meth:`leave`). ``budget``: blocks that requests can have at all; ``None``: not known, and then there is none.
    ``window``: loads in flight at a time; 0: any number.

    Invariants: shares together exceed the budget only when a single request does; nobody is admitted before a request
    that came earlier and still waits.
    """

    block_size: int
    budget: int | None = None
    window: int = 0
    #: Blocks of each request that was admitted.
    _shares: dict[str, int] = field(factory=dict, init=False)
    #: Who waits for a share, in the order of their first question.
    _line: dict[str, None] = field(factory=dict, init=False)
    #: Requests whose load was promised or is under way.
    _loading: set[str] = field(factory=set, init=False)
    #: Who waits for a place in the window, in that order.
    _turns: dict[str, None] = field(factory=dict, init=False)

    def admit(self, request_id: str, num_tokens: int) -> bool:
        """Whether the request has its share now; if not, ask again. The first of all is never refused."""
        if request_id in self._shares:
            return True
        blocks = -(-num_tokens // self.block_size)
        if next(iter(self._line), request_id) != request_id or not self._fits(blocks):
            self._line.setdefault(request_id)
            return False
        self._line.pop(request_id, None)
        self._shares[request_id] = blocks
        return True

    def has_room(self, blocks: int, others: int) -> bool:
        """Whether a newcomer that needs ``blocks`` would be admitted, with others that need ``others`` before it."""
        return not self._line and self._fits(blocks, others)

    def _fits(self, blocks: int, others: int = 0) -> bool:
        if self.budget is None or not (self._shares or others):
            return True
        return sum(self._shares.values()) + others + blocks <= self.budget

    def begin_load(self, request_id: str) -> bool:
        """Whether the request's load may start; if not, ask again. Idempotent."""
        if request_id in self._loading:
            return True
        full = self.window and len(self._loading) >= self.window
        if full or next(iter(self._turns), request_id) != request_id:
            self._turns.setdefault(request_id)
            return False
        self._turns.pop(request_id, None)
        self._loading.add(request_id)
        return True

    def end_load(self, request_id: str) -> None:
        """The load has ended, or there will be none. Idempotent."""
        self._loading.discard(request_id)
        self._turns.pop(request_id, None)

    def leave(self, request_id: str) -> None:
        """The request has the blocks that it needs, or is gone. Idempotent."""
        self._shares.pop(request_id, None)
        self._line.pop(request_id, None)

    @property
    def blocks(self) -> int:
        """Blocks of all shares."""
        return sum(self._shares.values())

    @property
    def admitted(self) -> int:
        """Requests with a share."""
        return len(self._shares)

    @property
    def loading(self) -> int:
        """Requests in the window."""
        return len(self._loading)

    @property
    def waiting(self) -> int:
        """Requests that were told to ask again, for a share or for a place in the window."""
        return len(self._line) + len(self._turns)

    @property
    def is_empty(self) -> bool:
        """Whether nobody has or wants anything."""
        return not (self._shares or self._line or self._loading or self._turns)
