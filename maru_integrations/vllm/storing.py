"""Asynchronous stores that were handed over and have not been answered. No I/O, the clock is given.

One store per key, whoever computes it; a request keeps its blocks while one of its stores may read them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from attrs import define, field

from maru_integrations.vllm.metadata import LOAD_FAILED, PREEMPTED, StoreOp, StoreResult

#: Reasons that say nothing against another attempt, from blocks that are good.
_AGAIN = frozenset({LOAD_FAILED, PREEMPTED})


#: A store that has no answer for so long keeps nobody else from storing the same chunks, in seconds.
PATIENCE = 60.0


@define
class _Pending:
    op: StoreOp
    keys: Sequence[bytes]
    began: float
    #: Whether the store may read blocks that its request owns.
    attached: bool = True
    #: Requests that have the same chunk and did not store it, by key: request and chunk.
    others: list[tuple[str, int]] = field(factory=list)


@define
class Stores:
    """Every asynchronous store from its hand-over to its one answer. Keys are those of chunks.

    Invariants: a key belongs to one store at a time, to none after that one's answer, and never for ever; a request is
    outstanding exactly while a store reads from its blocks.
    """

    clock: Callable[[], float]
    _pending: dict[int, _Pending] = field(factory=dict, init=False)
    #: The store of each key on its way.
    _owners: dict[bytes, int] = field(factory=dict, init=False)
    _by_request: dict[str, set[int]] = field(factory=dict, init=False)
    _ids: int = field(default=0, init=False)

    def number(self) -> int:
        """A new store's id."""
        self._ids += 1
        return self._ids

    def is_pending(self, key: bytes) -> bool:
        """Whether the chunk of this key is on its way."""
        owner = self._owners.get(key)
        return owner is not None and self.clock() - self._pending[owner].began < PATIENCE

    def join(self, key: bytes, request_id: str, chunk: int) -> None:
        """The request has the same chunk; it is told by :meth:`ended` if the store of it does not come to its end."""
        self._pending[self._owners[key]].others.append((request_id, chunk))

    def begin(self, op: StoreOp, keys: Sequence[bytes]) -> None:
        """Hand the store over; ``keys`` of its chunks."""
        self._pending[op.store_id] = _Pending(op, keys, self.clock())
        self._owners.update(dict.fromkeys(keys, op.store_id))
        self._by_request.setdefault(op.request_id, set()).add(op.store_id)

    def ended(self, result: StoreResult) -> list[tuple[str, int]]:
        """Take the answer; the requests that may store again, and from which chunk on. An unknown one is ignored."""
        pending = self._pending.pop(result.store_id, None)
        if pending is None:
            return []
        op = pending.op
        for key in pending.keys:
            if self._owners.get(key) == result.store_id:
                del self._owners[key]
        if pending.attached:
            self._forget(op)
        if result.reason not in _AGAIN:
            return []
        mine = [(op.request_id, op.chunks[0])] if pending.attached else []
        return mine + pending.others

    def forget_keys(self) -> None:
        """What is on its way belongs to a time that is over: the same keys may be stored again."""
        self._owners.clear()
        for pending in self._pending.values():
            pending.others.clear()

    def is_outstanding(self, request_id: str) -> bool:
        """Whether a store may still read blocks of this request."""
        return request_id in self._by_request

    def detach(self, request_ids: Iterable[str]) -> Sequence[str]:
        """These lose their blocks now; those whose stores have to be stopped before. They stay to be answered."""
        stopped = []
        for request_id in request_ids:
            ids = self._by_request.pop(request_id, None)
            if ids is None:
                continue
            stopped.append(request_id)
            for store_id in ids:
                self._pending[store_id].attached = False
        return stopped

    @property
    def outstanding(self) -> int:
        """Stores without an answer."""
        return len(self._pending)

    def _forget(self, op: StoreOp) -> None:
        ids = self._by_request[op.request_id]
        ids.discard(op.store_id)
        if not ids:
            del self._by_request[op.request_id]
