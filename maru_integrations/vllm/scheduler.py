"""Scheduler side of the connector: match, plan loads and stores, keep promises."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from attrs import frozen

from maru_core import logs
from maru_core.client import Lease, MaruHandler
from maru_core.errors import MaruError
from maru_core.keys import KeyChain
from maru_core.namespace import Namespace
from maru_integrations.vllm import compat, support
from maru_integrations.vllm.matching import Matcher
from maru_integrations.vllm.metadata import LoadOp, MaruWorkerMetadata, StoreOp
from maru_integrations.vllm.requests import BadBlocks, RequestState


@frozen(eq=False)
class Outstanding:
    """A load that workers were told to do and have not answered: the lease that covers it, and where it goes.

    Objects are those of chunks ``[chunk, end_chunk)``; the lease starts at ``lease_chunk``.
    """

    lease: Lease
    request_id: str
    lease_chunk: int
    chunk: int
    end_chunk: int
    blocks: list[int]


@frozen
class SchedulerSettings:
    """What the scheduler side needs to know of the engine. Sizes in tokens."""

    chunk_tokens: int
    block_size: int
    loads: bool
    stores: bool
    parks: bool
    lookup_timeout: float


class MaruScheduler:
    """One per engine, on the engine core's main thread; no method blocks for longer than a millisecond.

    Invariants: a lease taken for a hit is released exactly once, after every use of it has ended; every load that vLLM
    was promised reaches the workers, who answer it with success or failure; nothing computed on a failed load, or
    before a reset, is stored.
    """

    def __init__(
        self,
        handler: MaruHandler,
        namespace: Namespace,
        settings: SchedulerSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._handler = handler
        self._root = namespace.root
        self._settings = settings
        self._log = logs.get_logger(__name__)
        self._matcher = Matcher(
            handler,
            chunk_tokens=settings.chunk_tokens,
            block_size=settings.block_size,
            lookup_timeout=settings.lookup_timeout,
            clock=clock,
        )
        self._states: dict[str, RequestState] = {}
        self._outstanding: dict[int, Outstanding] = {}
        self._departed: list[list[int]] = []
        self._loads: list[LoadOp] = []
        self._load_ids = 0
        self._parked: str | None = None
        self._idle = False
        self._bad = BadBlocks(settings.block_size)
        self._block_pool: Any = None
        self._told: set[str] = set()

    def bind_block_pool(self, block_pool: Any) -> None:
        """vLLM's own prefix cache, from which failed blocks must go."""
        self._block_pool = block_pool

    # -- matching ------------------------------------------------------------------------------------------------

    def match(self, request: Any, local: int) -> tuple[int | None, bool]:
        """Tokens beyond ``local`` that will be loaded, and whether the request is parked while they are."""
        if not self._settings.loads or not support.reads_prefix_cache(request):
            return 0, False
        state = self._state(request)
        tokens = self._matcher.match(state, request.num_tokens, local, idle=self._idle)
        if not tokens:
            return tokens, False
        if not self._settings.parks:
            return tokens, False
        if self._parked not in (None, request.request_id):
            return None, False
        return tokens, True

    def after_alloc(self, request: Any, blocks: Any, external: int) -> None:
        """vLLM gave the request blocks; ``external`` tokens of what was promised will be used."""
        state = self._state(request)
        if self._parked == request.request_id and not external:
            self._parked = None
        if not external:
            self._matcher.drop(state)
            return
        self._loads.append(self._plan_load(state, compat.group_block_ids(blocks)[0], external))
        if self._settings.parks:
            self._parked = request.request_id

    def _plan_load(self, state: RequestState, table: list[int], external: int) -> LoadOp:
        hit = state.hit
        request_id = str(state.request.request_id)
        self._load_ids += 1
        if hit is None or external > hit.tokens:
            raise MaruError(f"request {request_id}: vLLM takes {external} external tokens, none were promised")
        chunk_tokens, block_size = self._settings.chunk_tokens, self._settings.block_size
        first, last = hit.local, hit.local + external
        chunk, end_chunk = first // chunk_tokens, -(-last // chunk_tokens)
        low, high = chunk - hit.first_chunk, end_chunk - hit.first_chunk
        lease = hit.lease
        state.hit = None
        state.known = range(chunk, end_chunk)
        self._bad.overwrite(table, first, last)
        self._outstanding[self._load_ids] = Outstanding(
            lease, request_id, hit.first_chunk, chunk, end_chunk, list(table)
        )
        return LoadOp(
            load_id=self._load_ids,
            request_id=request_id,
            parked=self._settings.parks,
            epoch=lease.epoch,
            chunk=chunk,
            first=first,
            last=last,
            blocks=table[chunk * chunk_tokens // block_size : -(-last // block_size)],
            entries=lease.entries[low:high].tolist(),
            generations=lease.generations[low:high].tolist(),
            lengths=lease.lengths[low:high].tolist(),
            keys=lease.keys[low:high],
        )

    def fail_load(self, request: Any, blocks: Any, external: int) -> None:
        """Planning the load went wrong although vLLM counts on it: have a worker report it as failed."""
        if not external:
            return
        request_id = str(request.request_id)
        state = self._states.get(request_id)
        if state is not None:
            state.failed = True
        table = compat.group_block_ids(blocks)[0]
        self._load_ids += 1
        self._loads.append(
            LoadOp(
                load_id=self._load_ids,
                request_id=request_id,
                parked=self._settings.parks,
                epoch=0,
                chunk=0,
                first=0,
                last=len(table) * self._settings.block_size,
                blocks=table,
                entries=(),
                generations=(),
                lengths=(),
                keys=(),
            )
        )

    # -- one step ------------------------------------------------------------------------------------------------

    def take_loads(self) -> list[LoadOp]:
        """Loads planned since the last step."""
        loads, self._loads = self._loads, []
        return loads

    @property
    def weights_epoch(self) -> int:
        """The weights epoch that this engine has seen."""
        return self._handler.weights_epoch

    def plan_stores(self, output: Any) -> list[StoreOp]:
        """Follow the step's block tables and pick the chunks that will be complete when it has run."""
        self._idle = not output.num_scheduled_tokens
        for request_id in compat.preempted(output):
            state = self._states.get(request_id)
            if state is not None:
                self._matcher.drop(state)
                state.start_over()
        scheduled: list[tuple[RequestState, int, int]] = []
        for new in output.scheduled_new_reqs:
            state = self._states.get(new.req_id)
            if state is not None:
                state.blocks = compat.group_block_ids(new.block_ids)[0]
                scheduled.append((state, new.num_computed_tokens, self._scheduled(output, new.req_id)))
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            state = self._states.get(request_id)
            if state is None:
                continue
            fresh = cached.new_block_ids[index]
            ids = compat.group_block_ids(fresh)[0] if fresh is not None else []
            state.blocks = ids if compat.resumed(cached, index) else state.blocks + ids
            scheduled.append((state, cached.num_computed_tokens[index], self._scheduled(output, request_id)))
        for state, computed, count in scheduled:
            self._bad.overwrite(state.blocks, computed, computed + count)
        return [op for item in scheduled if (op := self._plan_store(*item)) is not None]

    def _scheduled(self, output: Any, request_id: str) -> int:
        return int(output.num_scheduled_tokens.get(request_id, 0)) - compat.draft_tokens(output, request_id)

    def _plan_store(self, state: RequestState, computed: int, count: int) -> StoreOp | None:
        """Chunks that this step completes. A block fills on a step that allocates nothing, too."""
        chunk_tokens, block_size = self._settings.chunk_tokens, self._settings.block_size
        end = computed + count
        bad = self._bad.first_in(state.blocks, end)
        if bad is not None:
            state.tainted = True
            self._forget_cached(state.blocks[bad:])
        if not self._settings.stores or state.chain is None or state.tainted:
            return None
        complete = min(end, state.request.num_tokens) // chunk_tokens
        if complete <= state.next_chunk:
            return None
        state.chain.extend(state.request.all_token_ids, complete * chunk_tokens)
        chunks = [chunk for chunk in range(state.next_chunk, complete) if chunk not in state.known]
        state.next_chunk = complete
        if not chunks:
            return None
        per_chunk = chunk_tokens // block_size
        blocks: list[int] = []
        for chunk in chunks:
            blocks += state.blocks[chunk * per_chunk : (chunk + 1) * per_chunk]
        if len(blocks) != len(chunks) * per_chunk:
            raise MaruError(
                f"request {state.request.request_id}: {len(state.blocks)} blocks known, "
                f"{complete * per_chunk} needed for {complete} chunks"
            )
        return StoreOp(
            request_id=str(state.request.request_id),
            chunks=chunks,
            keys=[state.chain.keys[chunk] for chunk in chunks],
            parents=[state.chain.parent(chunk) for chunk in chunks],
            blocks=blocks,
        )

    # -- answers -------------------------------------------------------------------------------------------------

    def worker_output(self, output: Any) -> None:
        """A step's results: end leases whose loads were answered, keep bad KV from spreading."""
        answers = output.kv_connector_worker_meta
        if isinstance(answers, MaruWorkerMetadata):
            for result in answers.loads:
                self._load_ended(result.load_id, result.good)
            for request_id, chunk in answers.unsaved.items():
                state = self._states.get(request_id)
                if state is not None:
                    state.next_chunk = min(state.next_chunk, chunk)
        if output.invalid_block_ids:
            self._quarantine(set(output.invalid_block_ids))
        if not self._outstanding:
            self._departed = []

    def _load_ended(self, load_id: int, good: int) -> None:
        done = self._outstanding.pop(load_id, None)
        if done is None:
            return
        self._handler.release(done.lease)
        if good < done.end_chunk - done.chunk:
            index = done.chunk - done.lease_chunk + good
            lease = done.lease
            self._matcher.remember_bad(lease.keys[index], lease.entries[index], lease.generations[index])
            state = self._states.get(done.request_id)
            if state is not None:
                state.failed = True
                state.known = range(done.chunk, done.chunk + good)
                state.next_chunk = min(state.next_chunk, done.chunk + good)
            else:
                self._departed.append(done.blocks)
            self._log.warning("maru.load_failed", request=done.request_id, chunk=done.chunk + good)

    def _quarantine(self, failed: set[int]) -> None:
        """Failed blocks, and all that was computed on them, leave vLLM's prefix cache and are not stored.

        vLLM itself looks at running and parked requests only, so an aborted one would leave its blocks behind.
        """
        self._bad.add(failed)
        for blocks in [*(state.blocks for state in self._states.values()), *self._departed]:
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
        state = self._states.pop(request.request_id, None)
        if state is None:
            return
        self._matcher.drop(state)
        if self._outstanding:
            self._departed.append(state.blocks)
        if self._parked == request.request_id:
            self._parked = None

    def reset(self) -> bool:
        """Empty this namespace for everybody; False when the server could not be told."""
        for state in self._states.values():
            self._matcher.drop(state)
            state.asked = False
            state.tainted = True
        try:
            self._handler.reset()
        except MaruError as error:
            self._log.error("maru.reset_failed", reason=str(error))
            return False
        return True

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
                chain = KeyChain(self._root, self._settings.chunk_tokens, support.salt_of(request))
            state = self._states[request.request_id] = RequestState(request, chain)
        return state
