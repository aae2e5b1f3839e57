"""Scheduler side of the connector: match, plan loads and stores, keep promises."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from maru_core import logs
from maru_core.client import MaruHandler
from maru_core.keys import KeyChain
from maru_core.namespace import Namespace
from maru_integrations.vllm import compat, support
from maru_integrations.vllm.ahead import Ahead
from maru_integrations.vllm.breaker import Breaker
from maru_integrations.vllm.loading import Loads
from maru_integrations.vllm.matching import Matcher
from maru_integrations.vllm.metadata import ERROR, LoadOp, LoadResult, MaruWorkerMetadata, StoreOp, StoreResult
from maru_integrations.vllm.parking import Parking
from maru_integrations.vllm.planning import SchedulerSettings, StorePlanner, plan_failure, plan_load
from maru_integrations.vllm.preemptions import Preemptions
from maru_integrations.vllm.requests import BadBlocks, RequestState
from maru_integrations.vllm.resets import Resets
from maru_integrations.vllm.stats import MaruStats
from maru_integrations.vllm.storing import Stores
from maru_integrations.vllm.worth import Worth

#: Tokens of requests that are asked for before their turn: making their keys takes about two milliseconds.
ASKED_AHEAD = 1 << 17
#: What :meth:`MaruScheduler.take_stats` tells as it is now; see stats.GAUGES.
_GAUGES = ("parked", "loading", "waiting", "storing", "server_away")


class MaruScheduler:
    """One per engine, on the engine core's main thread.

    Waits for the server as :data:`.matching.POLL`, :data:`.matching.IDLE_POLL` and :data:`.resets.PATIENCE` say: for a
    millisecond per step while there is anything else to do.

    Invariants: a lease taken for a hit is released exactly once, after every use of it has ended; every load that vLLM
    was promised reaches the workers, who answer it with success or failure; nothing computed on a failed load, or
    before a reset, is stored; the blocks that a store reads are kept until it has read them.
    """

    def __init__(
        self,
        handler: MaruHandler,
        namespace: Namespace,
        settings: SchedulerSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._handler = handler
        self._clock = clock
        self._root = namespace.root
        self._settings = settings
        self._log = logs.get_logger(__name__)
        self._stats = MaruStats()
        #: What was told last, in the order of _GAUGES.
        self._gauges: tuple[int, ...] | None = None
        self._breaker = Breaker(clock)
        self._matcher = Matcher(
            handler,
            chunk_tokens=settings.chunk_tokens,
            block_size=settings.block_size,
            objects_per_chunk=settings.objects_per_chunk,
            lookup_timeout=settings.lookup_timeout,
            clock=clock,
            breaker=self._breaker,
            count=self._stats.count,
        )
        self._resets = Resets(handler, clock)
        self._ahead = Ahead(ASKED_AHEAD // settings.block_size)
        self._parking = Parking(settings.block_size, settings.block_budget, settings.window)
        self._loads = Loads()
        self._stores = Stores(clock)
        self._preemptions = Preemptions(settings.names_all_preempted)
        self._planner = StorePlanner(self._breaker, self._loads, self._stores)
        self._worth = Worth(clock, settings.token_bytes) if settings.token_bytes else None
        self._states: dict[str, RequestState] = {}
        self._load_ops: list[LoadOp] = []
        self._held: list[str] = []
        self._preempted: list[str] = []
        self._undefined: list[int] = []
        self._bad = BadBlocks(settings.block_size)
        self._has_outdated = False
        #: Another connector, beside this one, loads what this step reads. It may fail, which is told after the step.
        self._loads_elsewhere = False
        self._block_pool: Any = None
        self._told: set[str] = set()

    def bind_block_pool(self, block_pool: Any) -> None:
        """vLLM's own prefix cache, from which failed blocks must go."""
        self._block_pool = block_pool

    # -- matching ------------------------------------------------------------------------------------------------

    def arrived(self, request: Any) -> None:
        """vLLM will consider the request in one of the next steps: ask the pool now, so that it has an answer then."""
        if not self._settings.loads or self._block_pool is None or not support.reads_prefix_cache(request):
            return
        state, tokens = self._state(request), request.num_tokens
        blocks = -(-tokens // self._settings.block_size)
        asked: bool | None = False
        # Who will wait for blocks asks nothing.
        if self._ahead.may_ask and (not self._settings.parks or self._parking.has_room(blocks, self._ahead.blocks)):
            local = compat.own_prefix(self._block_pool, request, self._settings.block_size)
            asked = self._resets.caught_up() and self._matcher.ask(state, tokens, local)
        if asked is not None and state.chain is not None:
            self._ahead.add(str(request.request_id), blocks if asked else 0, self._clock())

    def match(self, request: Any, local: int) -> tuple[int | None, bool]:
        """Tokens beyond ``local`` that will be loaded, and whether the request is parked while they are."""
        state = self._state(request)
        state.expected = local
        if not self._settings.loads:
            return 0, False
        request_id, parks = str(request.request_id), self._settings.parks
        self._ahead.leave(request_id)
        self._has_no_blocks(request_id)
        if parks and not self._parking.admit(request_id, request.num_tokens):
            # Whether or not it would hit: if it went on and found too few blocks, it would keep those from running
            # that have the blocks.
            self._forget_question(request_id)
            return None, False
        if not support.reads_prefix_cache(request):
            return 0, False
        tokens = self._matcher.match(state, request.num_tokens, local) if self._resets.caught_up() else 0
        if tokens and not self._is_worth_it(state):
            tokens = 0
        if not tokens:
            if tokens == 0 and self._loads.of(request_id) is None:
                self._parking.end_load(request_id)
            return tokens, False
        if not parks:
            return tokens, False
        if not self._parking.begin_load(request_id):
            return None, False
        assert state.hit is not None
        state.hit.promised = True
        return tokens, True

    def _has_no_blocks(self, request_id: str) -> None:
        """vLLM asks only for requests without blocks: those of a load that failed altogether may be others' by now."""
        state = self._states.get(request_id)
        if state is not None and state.blocks:
            self._has_lost_blocks(state)
            state.blocks = []

    def _has_lost_blocks(self, state: RequestState) -> None:
        """vLLM's prefix cache may keep what they hold."""
        if state.outdated:
            self._forget_cached(state.blocks)
        if len(self._loads):
            # One that the request has read may turn out to have failed: with asynchronous scheduling that is told of
            # when the next step was planned.
            self._loads.remember(state.blocks)

    def _forget_question(self, request_id: str) -> None:
        """What was asked for this request is let go of: it will wait."""
        state = self._states.get(request_id)
        if state is not None:
            self._matcher.drop(state)

    def _is_worth_it(self, state: RequestState) -> bool:
        hit = state.hit
        if self._worth is None or hit is None or hit.promised:
            return True
        reason = self._worth.reason_to_compute(hit.tokens, self._loads.tokens_ahead)
        if reason is None:
            return True
        self._stats.count("loads_skipped", reason=reason)
        self._log.debug("maru.load_skipped", request=state.request.request_id, tokens=hit.tokens, reason=reason)
        self._matcher.drop(state)  # it was asked, and is asked again only when it starts over
        return False

    def after_alloc(self, request: Any, blocks: Any, external: int) -> None:
        """vLLM gave the request blocks; ``external`` tokens of what was promised will be used."""
        state = self._state(request)
        request_id = str(request.request_id)
        if not external or not self._settings.parks:
            self._parking.leave(request_id)
        if not external:
            if self._loads.of(request_id) is None:
                self._parking.end_load(request_id)
            self._matcher.drop(state)
            return
        state.expected += external
        self._load_ops.append(self._plan_load(state, compat.group_block_ids(blocks)[0], external))

    def _plan_load(self, state: RequestState, table: list[int], external: int) -> LoadOp:
        op, load = plan_load(self._settings, self._loads.number(), state, table, external)
        state.hit, state.blocks = None, table
        state.known = range(load.chunk, load.end_chunk)
        self._bad.overwrite(table, load.first, load.last)
        self._loads.begin(op.load_id, load)
        return op

    def fail_load(self, request: Any, blocks: Any, external: int) -> None:
        """Planning the load went wrong although vLLM counts on it: have a worker report it as failed.

        As after any failed load the request keeps its share until it runs.
        """
        if not external:
            return
        request_id = str(request.request_id)
        state = self._states.get(request_id)
        if state is not None:
            state.failed = True
        self._parking.end_load(request_id)
        table = compat.group_block_ids(blocks)[0]
        self._load_ops.append(plan_failure(self._settings, self._loads.number(), request_id, table))

    # -- one step ------------------------------------------------------------------------------------------------

    def take_loads(self) -> list[LoadOp]:
        """Loads planned since the last step."""
        loads, self._load_ops = self._load_ops, []
        return loads

    def take_held(self) -> list[str]:
        """Finished requests whose blocks vLLM keeps until the workers have reported them, since the last step."""
        held, self._held = self._held, []
        return held

    def take_preempted(self) -> list[str]:
        """Requests that lose blocks in this step which stores may read or loads write to."""
        preempted, self._preempted = self._preempted, []
        return preempted

    def take_undefined(self) -> list[int]:
        """Blocks that requests of this step read although their loads failed, for the workers to report again."""
        undefined, self._undefined = self._undefined, []
        return undefined

    def take_cancelled(self) -> list[int]:
        """Loads that nobody waits for any more, since the last step."""
        return self._loads.take_cancelled()

    @property
    def weights_epoch(self) -> int:
        """The weights epoch that this engine has seen."""
        return self._handler.weights_epoch

    def plan_stores(self, output: Any) -> list[StoreOp]:
        """Follow the step's block tables and pick the chunks that are handed over for when it has run."""
        # First, because whatever goes wrong afterwards must not leave a table behind that lacks this step's blocks, nor
        # a store that goes on reading what was taken away.
        scheduled = self._follow(output)
        # With loads under way their ends are worth looking for.
        self._matcher.new_step(idle=not output.num_scheduled_tokens and not len(self._loads))
        for request_id in self._ahead.take_old(self._clock()):
            self._forget_question(request_id)
        self._measure_step(scheduled)
        ops: list[StoreOp] = []
        try:
            for item in scheduled:
                op = self._plan_store(*item)
                if op is not None:
                    ops.append(op)
        except BaseException:
            # None of them reaches a worker, so none would ever be answered.
            for op in ops:
                self._stores.ended(StoreResult(op.store_id, 0, ERROR))
            raise
        if ops:
            self._stats.count("stores", len(ops))
        return ops

    def _follow(self, output: Any) -> list[tuple[RequestState, int, int]]:
        """Take over what the step does to block tables; who is scheduled, with computed and scheduled tokens."""
        preempted = self._preemptions.take(output, self._states)
        if preempted:
            self._take_away(preempted)
        planned, elsewhere = self._loads.step_planned(), False
        scheduled: list[tuple[RequestState, int, int]] = []
        for new in output.scheduled_new_reqs:
            state = self._states.get(new.req_id)
            if state is not None:
                state.blocks = compat.group_block_ids(new.block_ids)[0]
                scheduled.append((state, new.num_computed_tokens, self._scheduled(output, new.req_id)))
                elsewhere = elsewhere or new.num_computed_tokens > state.expected
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            state = self._states.get(request_id)
            if state is None:
                continue
            fresh = cached.new_block_ids[index]
            if fresh is not None:
                ids, resumed = compat.group_block_ids(fresh)[0], compat.resumed(cached, index)
                state.blocks = ids if resumed else state.blocks + ids
                elsewhere = elsewhere or (resumed and cached.num_computed_tokens[index] > state.expected)
            scheduled.append((state, cached.num_computed_tokens[index], self._scheduled(output, request_id)))
        for state, computed, count in scheduled:
            self._bad.overwrite(state.blocks, computed, computed + count)
        self._loads_elsewhere = elsewhere and compat.loads_within(output)
        if self._has_outdated:
            parked = [
                (self._states[load.request_id], load.first) for load in planned if load.request_id in self._states
            ]
            self._outdate_sharers([*parked, *((state, computed) for state, computed, _ in scheduled)])
        return scheduled

    def _outdate_sharers(self, having: Sequence[tuple[RequestState, int]]) -> None:
        """Who has blocks of an outdated request is outdated, too: vLLM's cache got them after the reset.

        ``having``: requests and their tokens that are there before the step.
        """
        old = {block for state in self._states.values() if state.outdated for block in state.blocks}
        self._has_outdated = bool(old)
        for state, tokens in having:
            if not old.isdisjoint(state.blocks[: -(-tokens // self._settings.block_size)]):
                state.outdate()
                old.update(state.blocks)

    def _take_away(self, preempted: Sequence[str]) -> None:
        """These requests have lost their blocks. One of them may have been given new ones in the same step."""
        stopped = [*self._stores.detach(preempted), *self._loads.disown(preempted)]
        self._preempted += dict.fromkeys(stopped)  # each once
        for request_id in preempted:
            state = self._states.get(request_id)
            if state is not None:
                self._has_lost_blocks(state)
            if self._loads.of(request_id) is not None and state is not None:
                known = state.known
                state.start_over()
                state.known = known
                continue
            self._parking.leave(request_id)
            self._parking.end_load(request_id)
            if state is not None:
                self._matcher.drop(state)
                state.start_over()

    def _measure_step(self, scheduled: list[tuple[RequestState, int, int]]) -> None:
        if self._worth is None or not scheduled:
            return
        prompts = sum(count for state, computed, count in scheduled if computed < state.request.num_prompt_tokens)
        self._worth.step_began(prompts, sum(count for _, _, count in scheduled) - prompts)

    def _scheduled(self, output: Any, request_id: str) -> int:
        return int(output.num_scheduled_tokens.get(request_id, 0)) - compat.draft_tokens(output, request_id)

    def _plan_store(self, state: RequestState, computed: int, count: int) -> StoreOp | None:
        """Chunks that this step completes. A block fills on a step that allocates nothing, too."""
        end = computed + count
        bad = self._bad.first_in(state.blocks, end)
        if bad is not None:
            state.tainted = True
            self._forget_cached(state.blocks[bad:])
            # vLLM takes note of failed blocks of running and of parked requests. This one was neither when its load
            # failed: it was released early and had no room to run. In every step that reads one, for of requests that
            # share a block vLLM takes back the first alone.
            self._undefined.append(state.blocks[bad])
        if self._loads_elsewhere or not self._resets.caught_up():
            return None
        return self._planner.plan(self._settings, state, end)

    # -- answers -------------------------------------------------------------------------------------------------

    def worker_output(self, output: Any) -> None:
        """A step's results: end leases whose loads were answered, keep bad KV from spreading."""
        if self._worth is not None:
            self._worth.step_ended()
        answers = output.kv_connector_worker_meta
        if isinstance(answers, MaruWorkerMetadata):
            self._take_answers(answers)
        if output.invalid_block_ids:
            self._quarantine(set(output.invalid_block_ids))
        self._loads.forget_departed()

    def _take_answers(self, answers: MaruWorkerMetadata) -> None:
        for result in answers.loads:
            self._load_ended(result)
        for request_id, chunk in answers.unsaved.items():
            self._plan_again(request_id, chunk)
        for stored in answers.stored:
            for request_id, chunk in self._stores.ended(stored):
                self._plan_again(request_id, chunk)
        if answers.load_bytes:
            self._stats.count("load_bytes", answers.load_bytes)
            if self._worth is not None:
                self._worth.link.measure(answers.load_bytes, answers.load_seconds)
        for reason, count in answers.dropped.items():
            self._stats.count("dropped", count, reason)

    def _plan_again(self, request_id: str, chunk: int) -> None:
        state = self._states.get(request_id)
        if state is not None:
            state.next_chunk = min(state.next_chunk, chunk)

    def _load_ended(self, result: LoadResult) -> None:
        done = self._loads.end(result.load_id)
        if done is None:
            return
        self._handler.release(done.lease)
        if done.disowned:
            return
        self._parking.end_load(done.request_id)
        objects = self._settings.objects_per_chunk
        if result.good >= (done.end_chunk - done.chunk) * objects:
            self._stats.count("loads")
            return
        self._stats.count("loads_failed", reason=result.reason)
        if not result.reason:
            index = (done.chunk - done.lease_chunk) * objects + result.good
            lease = done.lease
            self._matcher.remember_bad(lease.keys[index], lease.entries[index], lease.generations[index])
        good = result.good // objects  # a chunk counts with all of its objects only
        # Its share is kept until it has the blocks to run, also when vLLM takes its blocks back. It cannot be preempted
        # before, and vLLM 0.22.1 asks a more important one first, which would be parked on the blocks that this one
        # needs; later versions go on reserving all of its blocks, and let nobody else load into those. Whoever had got
        # its share meanwhile would wait for vLLM, and this one for the share.
        state = self._states.get(done.request_id)
        if state is None:
            self._loads.remember(done.blocks)
            return
        state.failed = True
        state.known = range(done.chunk, done.chunk + good)
        state.next_chunk = min(state.next_chunk, done.chunk + good)
        self._log.warning(
            "maru.load_failed", request=done.request_id, chunk=done.chunk + good, reason=result.reason or "bad object"
        )

    def _quarantine(self, failed: set[int]) -> None:
        """Failed blocks, and all that was computed on them, leave vLLM's prefix cache and are not stored.

        vLLM itself looks at running and parked requests only, so an aborted one would leave its blocks behind. And who
        shares such blocks is not taken back by vLLM: it counts on the first that has them to write them again, which
        may go before it does.
        """
        self._bad.add(failed)
        for state in self._states.values():
            index = self._bad.first_in(state.blocks)
            if index is not None:
                self._bad.spread(state.blocks[index:])
                self._forget_cached(state.blocks[index:])
        for blocks in self._loads.departed():  # of which others may have been given some since
            index = self._bad.first_in(blocks)
            if index is not None:
                self._forget_cached(blocks[index:])
        self._forget_cached(failed)

    def _forget_cached(self, blocks: Iterable[int]) -> None:
        if self._block_pool is not None:
            compat.evict_blocks(self._block_pool, blocks)

    # -- ends ----------------------------------------------------------------------------------------------------

    def finished(self, request: Any) -> None:
        """The request is gone. A load that is under way keeps its lease until the workers have answered."""
        request_id = str(request.request_id)
        self._ahead.leave(request_id)
        self._parking.leave(request_id)
        self._preemptions.ended(request)
        state = self._states.pop(request_id, None)
        if self._loads.of(request_id) is None:
            self._parking.end_load(request_id)
        if state is not None:
            self._matcher.drop(state)
            self._loads.depart(request_id, state.blocks)
            if state.outdated:
                self._forget_cached(state.blocks)

    def hold(self, request_id: str) -> bool:
        """Whether blocks of a request that has finished must be kept; if so, the workers report when no longer."""
        if not self._stores.is_outstanding(request_id):
            return False
        self._held.append(request_id)
        return True

    def take_stats(self) -> MaruStats | None:
        """What has been counted since this was last asked, and what is as it was not then; ``None``: nothing."""
        parking = self._parking
        away = int(self._breaker.is_open or not self._handler.is_up)
        values = (parking.admitted, parking.loading, parking.waiting, self._stores.outstanding, away)
        if values == self._gauges and self._stats.is_empty():
            return None
        before, self._gauges = self._gauges, values
        changed = {
            name: value
            for number, (name, value) in enumerate(zip(_GAUGES, values, strict=True))
            if before is None or before[number] != value
        }
        stats = MaruStats({"counters": self._stats.data["counters"], "gauges": changed})
        self._stats.reset()
        return stats

    def reset(self) -> bool:
        """Empty this namespace for everybody; False when the server could not be told yet: see :class:`Resets`."""
        for request_id, state in self._states.items():
            self._matcher.drop(state)
            state.asked = False
            if state.has_kv or self._loads.of(request_id) is not None:
                state.outdate()
                self._has_outdated = True
        if self._block_pool is not None:
            # vLLM keeps all of it when any request has blocks.
            self._forget_cached(range(self._block_pool.num_gpu_blocks))
        self._stores.forget_keys()
        return self._resets.reset()

    def close(self) -> None:
        """End the session."""
        self._handler.close()

    def _state(self, request: Any) -> RequestState:
        state = self._states.get(request.request_id)
        if state is None:
            reason = support.refused_request(request)
            if reason is not None and reason not in self._told:
                self._told.add(reason)
                self._log.warning("maru.request_not_cached", reason=reason)
            chain = None
            if reason is None:
                settings = self._settings
                salt = support.salt_of(request)
                chain = KeyChain(self._root, settings.chunk_tokens, salt, settings.objects_per_chunk)
            state = self._states[request.request_id] = RequestState(request, chain)
        return state
