"""What the scheduler side remembers of one request. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import define, field

from maru_core.client import Lease
from maru_core.keys import KeyChain
from maru_integrations.vllm.questions import Question
from maru_integrations.vllm.waits import Wait


@define
class Lookup:
    """A question to the server that has not been answered: chunks from ``first_chunk`` on, for as long as ``wait``.

    ``polled``: how many of its slices have been waited for.
    """

    pending: Question
    first_chunk: int
    wait: Wait
    polled: int = 0


@define
class Hit:
    """A promise: the server leased ``chunks`` whole chunks of this request's prefix from ``first_chunk`` on.

    ``local`` and ``tokens`` are what was last answered to vLLM: tokens ``[local, local + tokens)`` come from Maru.
    """

    lease: Lease
    first_chunk: int
    chunks: int
    local: int = 0
    tokens: int = 0
    promised: bool = False


@define
class RequestState:
    """One live request.

    ``chain`` is ``None`` when its KV cannot be identified. ``blocks``: its block table, as of the last load or
    step of it. ``next_chunk``: first chunk that has not been handed to a worker for storing in this life; ``known``:
    chunks that came out of the pool in this life. ``asked``: the pool was asked and had nothing, until the request
    starts over; ``passed_over``: it was not asked, because the server counts as away. ``failed``: a load failed; the
    same hit answered again would livelock, so it gets none. ``tainted``: some of its KV is older than a reset or was
    computed on a failed load, so nothing is stored until it starts over; ``outdated``: it is older than a reset.
    """

    request: Any
    chain: KeyChain | None
    blocks: list[int] = field(factory=list)
    next_chunk: int = 0
    known: range = range(0)
    lookup: Lookup | None = None
    hit: Hit | None = None
    asked: bool = False
    passed_over: bool = False
    failed: bool = False
    #: Tokens that vLLM's own cache and Maru have for it, when it is next scheduled as a new one.
    expected: int = 0
    tainted: bool = False
    outdated: bool = False

    @property
    def has_kv(self) -> bool:
        """Whether something was computed or loaded for it in this life."""
        return bool(self.blocks or self.known) or self.failed

    def outdate(self) -> None:
        """Some of its KV is older than a reset."""
        self.tainted = self.outdated = True

    def start_over(self) -> None:
        """Forget what depends on blocks: they were taken away (preemption)."""
        self.blocks = []
        self.next_chunk = 0
        self.known = range(0)
        self.asked = False
        self.tainted = False
        self.outdated = False


@define
class BadBlocks:
    """Blocks whose load failed, and those computed on them, until a forward pass has written all their slots again.

    Invariant: nothing that was computed on a block in here is ever stored. ``written`` counts, per block, the slots
    from its first that have been recomputed.
    """

    block_size: int
    written: dict[int, int] = field(factory=dict)

    def add(self, blocks: set[int]) -> None:
        """These blocks hold undefined KV from now on."""
        self.written.update(dict.fromkeys(blocks, 0))

    def spread(self, blocks: Sequence[int]) -> None:
        """These come behind a bad one in a table. What has been written again of one that was bad before counts."""
        for block in blocks:
            self.written.setdefault(block, 0)

    def overwrite(self, blocks: list[int], first: int, last: int) -> None:
        """Slots of tokens ``[first, last)`` of a request with table ``blocks`` get written in this step."""
        if not self.written:
            return
        for index in range(first // self.block_size, -(-last // self.block_size)):
            block = blocks[index] if index < len(blocks) else 0
            done = self.written.get(block)
            start = max(0, first - index * self.block_size)
            if done is None or start > done:
                continue
            done = max(done, min(self.block_size, last - index * self.block_size))
            if done >= self.block_size:
                del self.written[block]
            else:
                self.written[block] = done

    def first_in(self, blocks: list[int], tokens: int | None = None) -> int | None:
        """Index of the first bad block of a table, among its first ``tokens`` tokens; ``None`` when all are good.

        A block that is half written again is good for a request that attends to that half only.
        """
        if not self.written:
            return None
        end = len(blocks) * self.block_size if tokens is None else tokens
        for index, block in enumerate(blocks):
            needed = min(self.block_size, end - index * self.block_size)
            if needed <= 0:
                break
            if self.written.get(block, needed) < needed:
                return index
        return None
