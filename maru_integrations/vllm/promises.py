"""What vLLM is promised for a request that it considers: asked when it arrives, promised at its turn, then loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import define, field

from maru_core import logs
from maru_integrations.vllm import compat, support
from maru_integrations.vllm.ahead import Ahead
from maru_integrations.vllm.loading import Loads
from maru_integrations.vllm.matching import Matcher
from maru_integrations.vllm.metadata import LoadOp
from maru_integrations.vllm.parking import Parking
from maru_integrations.vllm.planning import SchedulerSettings, plan_failure, plan_load
from maru_integrations.vllm.quarantine import Quarantine
from maru_integrations.vllm.requests import LiveRequests, RequestState
from maru_integrations.vllm.resets import Resets
from maru_integrations.vllm.stats import MaruStats
from maru_integrations.vllm.worth import Worth

#: Tokens of requests that are asked for before their turn: making their keys takes about two milliseconds.
ASKED_AHEAD = 1 << 17


@define(eq=False)
class Promises:
    """A request from its arrival until it has the blocks to run with.

    Invariants: a request has its share of blocks, where it needs one, before anything is promised; every promise that
    vLLM takes becomes one load, if only one that fails.
    """

    settings: SchedulerSettings
    clock: Callable[[], float]
    requests: LiveRequests
    matcher: Matcher
    parking: Parking
    loads: Loads
    resets: Resets
    quarantine: Quarantine
    worth: Worth | None
    stats: MaruStats
    _ahead: Ahead = field(init=False)
    _planned: list[LoadOp] = field(factory=list, init=False)
    _log: logs.Log = field(factory=lambda: logs.get_logger(__name__), init=False)

    def __attrs_post_init__(self) -> None:
        self._ahead = Ahead(ASKED_AHEAD // self.settings.block_size)

    # -- before its turn -----------------------------------------------------------------------------------------

    def arrived(self, request: Any, block_pool: Any) -> None:
        """vLLM will consider the request in one of the next steps: ask the pool now, so that it has an answer then.

        ``block_pool``: vLLM's own prefix cache, whose part of the prompt is not asked for.
        """
        if not self.settings.loads or not support.reads_prefix_cache(request):
            return
        state, tokens = self.requests.of(request), request.num_tokens
        blocks = -(-tokens // self.settings.block_size)
        asked: bool | None = False
        # Who will wait for blocks asks nothing.
        if self._ahead.may_ask and (not self.settings.parks or self.parking.has_room(blocks, self._ahead.blocks)):
            local = compat.own_prefix(block_pool, request, self.settings.block_size)
            asked = self.resets.caught_up() and self.matcher.ask(state, tokens, local)
        if asked is not None and state.chain is not None:
            self._ahead.add(str(request.request_id), blocks if asked else 0, self.clock())

    def drop_old_questions(self) -> None:
        """Whose turn has not come for long is asked for at its turn."""
        for request_id in self._ahead.take_old(self.clock()):
            state = self.requests.states.get(request_id)
            if state is not None:
                self.matcher.drop(state)

    # -- its turn ------------------------------------------------------------------------------------------------

    def match(self, request: Any, local: int) -> tuple[int | None, bool]:
        """Tokens beyond ``local`` that will be loaded, and whether the request is parked while they are."""
        state = self.requests.of(request)
        state.expected = local
        if not self.settings.loads:
            return 0, False
        request_id, parks = str(request.request_id), self.settings.parks
        self._ahead.leave(request_id)
        if state.blocks:
            # vLLM asks only for requests without blocks: those of a load that failed altogether may be others' by now.
            self.quarantine.blocks_lost(state)
            state.blocks = []
        if parks and not self.parking.admit(request_id, request.num_tokens):
            # Whether or not it would hit: if it went on and found too few blocks, it would keep those from running
            # that have the blocks.
            self.matcher.drop(state)
            return None, False
        if not support.reads_prefix_cache(request):
            return 0, False
        tokens = self.matcher.match(state, request.num_tokens, local) if self.resets.caught_up() else 0
        waits = tokens is None and self.matcher.waits(state)
        if (tokens or waits) and not self._is_worth_it(state, tokens or request.num_tokens - local):
            tokens = 0
        if not tokens:
            # Who waits for others to give back what they were promised must not keep them from loading it.
            if (waits or tokens == 0) and self.loads.of(request_id) is None:
                self.parking.end_load(request_id)
            return tokens, False
        if not parks:
            return tokens, False
        if not self.parking.begin_load(request_id):
            return None, False
        assert state.hit is not None
        state.hit.promised = True
        return tokens, True

    def _is_worth_it(self, state: RequestState, tokens: int) -> bool:
        """``tokens``: those of its hit, or while it waits for one the most that it can have."""
        if self.worth is None or (state.hit is not None and state.hit.promised):
            return True
        reason = self.worth.reason_to_compute(tokens, self.loads.tokens_ahead)
        if reason is None:
            return True
        self.stats.count("loads_skipped", reason=reason)
        self._log.debug("maru.load_skipped", request=state.request.request_id, tokens=tokens, reason=reason)
        self.matcher.drop(state)
        state.asked = True  # it is asked again only when it starts over
        return False

    # -- its blocks ----------------------------------------------------------------------------------------------

    def after_alloc(self, request: Any, blocks: Any, external: int) -> None:
        """vLLM gave the request blocks; ``external`` tokens of what was promised will be used."""
        state = self.requests.of(request)
        request_id = str(request.request_id)
        if not external or not self.settings.parks:
            self.parking.leave(request_id)
        if not external:
            if self.loads.of(request_id) is None:
                self.parking.end_load(request_id)
            self.matcher.drop(state)
            return
        state.expected += external
        self._planned.append(self._plan_load(state, compat.group_block_ids(blocks)[0], external))

    def _plan_load(self, state: RequestState, table: list[int], external: int) -> LoadOp:
        op, load = plan_load(self.settings, self.loads.number(), state, table, external)
        state.hit, state.blocks = None, table
        state.known = range(load.chunk, load.end_chunk)
        self.quarantine.bad.overwrite(table, load.first, load.last)
        self.loads.begin(op.load_id, load)
        return op

    def fail_load(self, request: Any, blocks: Any, external: int) -> None:
        """Planning the load went wrong although vLLM counts on it: have a worker report it as failed.

        As after any failed load the request keeps its share until it runs.
        """
        if not external:
            return
        request_id = str(request.request_id)
        state = self.requests.states.get(request_id)
        if state is not None:
            state.failed = True
        self.parking.end_load(request_id)
        table = compat.group_block_ids(blocks)[0]
        self._planned.append(plan_failure(self.settings, self.loads.number(), request_id, table))

    def take_loads(self) -> list[LoadOp]:
        """Loads planned since this was last asked."""
        loads, self._planned = self._planned, []
        return loads

    # -- its end -------------------------------------------------------------------------------------------------

    def ended(self, request_id: str, state: RequestState | None) -> None:
        """The request is gone. A load that is under way keeps its place in the window until it is answered."""
        self._ahead.leave(request_id)
        self.withdraw(request_id, state, loading=self.loads.of(request_id) is not None)

    def withdraw(self, request_id: str, state: RequestState | None, *, loading: bool = False) -> None:
        """The request has nothing and is promised nothing. ``loading``: a load of it goes on."""
        self.parking.leave(request_id)
        if not loading:
            self.parking.end_load(request_id)
        if state is not None:
            self.matcher.drop(state)

    def reset(self) -> None:
        """What was asked and promised and not taken is void: all ask again."""
        for state in self.requests.states.values():
            self.matcher.drop(state)
            state.asked = False
