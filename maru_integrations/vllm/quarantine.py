"""KV that nobody may use again: bad blocks, what was computed on them, and what is older than a reset. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attrs import define, field

from maru_integrations.vllm import compat
from maru_integrations.vllm.loading import Loads
from maru_integrations.vllm.requests import RequestState


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


@define(eq=False)
class Quarantine:
    """Keeps such KV out of vLLM's own prefix cache, and taints requests that have it, so that it is not stored.

    Bad blocks are those whose load failed. ``states``: all live requests.
    """

    block_size: int
    states: Mapping[str, RequestState]
    loads: Loads
    #: vLLM's own prefix cache, once it is known.
    block_pool: Any = None
    bad: BadBlocks = field(init=False)
    #: Whether some request may have KV that is older than a reset.
    has_outdated: bool = field(default=False, init=False)
    _undefined: list[int] = field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        self.bad = BadBlocks(self.block_size)

    def add(self, failed: set[int]) -> None:
        """These blocks are bad from now on, and with them all that was computed on them.

        vLLM itself looks at running and parked requests only, so an aborted one would leave its blocks behind. And who
        shares such blocks is not taken back by vLLM: it counts on the first that has them to write them again, which
        may go before it does.
        """
        self.bad.add(failed)
        known = 0
        while known < len(self.bad.written):  # what one request makes bad another may have been given
            known = len(self.bad.written)
            for state in self.states.values():
                index = self.bad.first_in(state.blocks)
                if index is not None:
                    self.bad.spread(state.blocks[index:])
                    self._forget_cached(state.blocks[index:])
        for blocks in self.loads.departed():  # of which others may have been given some since
            index = self.bad.first_in(blocks)
            if index is not None:
                self._forget_cached(blocks[index:])
        self._forget_cached(failed)

    def taint(self, state: RequestState, index: int) -> None:
        """In this step the request reads a bad block, the one at ``index`` of its table."""
        state.tainted = True
        self._forget_cached(state.blocks[index:])
        # vLLM takes note of failed blocks of running and of parked requests. This one was neither when its load failed:
        # it was released early and had no room to run. In every step that reads one, for of requests that share a block
        # vLLM takes back the first alone.
        self._undefined.append(state.blocks[index])

    def take_undefined(self) -> list[int]:
        """Bad blocks that requests of this step read, for the workers to report again."""
        undefined, self._undefined = self._undefined, []
        return undefined

    def blocks_lost(self, state: RequestState) -> None:
        """The request has lost its blocks, and vLLM's prefix cache may keep what they hold."""
        self.ended(state)
        if len(self.loads):
            # One that the request has read may turn out to have failed: with asynchronous scheduling that is told of
            # when the next step was planned.
            self.loads.remember(state.blocks)

    def ended(self, state: RequestState) -> None:
        """The request is gone; :class:`Loads` knows of what it read."""
        if state.outdated:
            self._forget_cached(state.blocks)

    def reset(self) -> None:
        """All KV that there is now is outdated. vLLM keeps all of its cache when any request has blocks."""
        for request_id, state in self.states.items():
            if state.has_kv or self.loads.of(request_id) is not None:
                state.outdate()
                self.has_outdated = True
        if self.block_pool is not None:
            self._forget_cached(range(self.block_pool.num_gpu_blocks))

    def outdate_sharers(self, having: Sequence[tuple[RequestState, int]]) -> None:
        """Who has blocks of an outdated request is outdated, too: vLLM's cache got them after the reset.

        ``having``: requests and their tokens that are there before the step.
        """
        old = {block for state in self.states.values() if state.outdated for block in state.blocks}
        self.has_outdated = bool(old)
        for state, tokens in having:
            if not old.isdisjoint(state.blocks[: -(-tokens // self.block_size)]):
                state.outdate()
                old.update(state.blocks)

    def _forget_cached(self, blocks: Iterable[int]) -> None:
        if self.block_pool is not None:
            compat.evict_blocks(self.block_pool, blocks)
