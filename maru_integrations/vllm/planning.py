"""What goes to the workers: a request's promised chunks as a load, its complete chunks as a store. No I/O."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import define, frozen

from maru_core.errors import MaruError
from maru_integrations.vllm.breaker import Breaker
from maru_integrations.vllm.loading import Loads, Outstanding
from maru_integrations.vllm.metadata import ERROR, LoadOp, StoreOp, StoreResult
from maru_integrations.vllm.quarantine import Quarantine
from maru_integrations.vllm.requests import RequestState
from maru_integrations.vllm.storing import Stores


@frozen
class SchedulerSettings:
    """What the scheduler side needs to know of the engine and its settings. Sizes in tokens, times in seconds.

    ``parks``: hits are loaded between steps; ``block_budget`` and ``window`` bound how many at a time, ``load_timeout``
    each of them; ``overlap``: their requests may run before everything is there. ``stores_later``: stores run between
    steps. ``objects_per_chunk`` as in KeyChain. ``token_bytes``: stored bytes of one token; 0: hits are loaded whatever
    they cost. ``names_all_preempted`` as in compat.
    """

    chunk_tokens: int
    block_size: int
    loads: bool
    stores: bool
    parks: bool
    lookup_timeout: float
    objects_per_chunk: int = 1
    block_budget: int | None = None
    window: int = 0
    load_timeout: float = 0.0
    overlap: bool = False
    stores_later: bool = False
    token_bytes: int = 0
    names_all_preempted: bool = True


def plan_load(
    settings: SchedulerSettings, load_id: int, state: RequestState, table: list[int], external: int
) -> tuple[LoadOp, Outstanding]:
    """The load of ``external`` promised tokens into block table ``table``; raises MaruError without such a promise."""
    hit, request_id = state.hit, str(state.request.request_id)
    if hit is None or external > hit.tokens:
        raise MaruError(f"request {request_id}: vLLM takes {external} external tokens, none were promised")
    chunk_tokens, objects = settings.chunk_tokens, settings.objects_per_chunk
    first, last = hit.local, hit.local + external
    chunk, end_chunk = first // chunk_tokens, -(-last // chunk_tokens)
    low, high = (chunk - hit.first_chunk) * objects, (end_chunk - hit.first_chunk) * objects
    lease, overlap = hit.lease, settings.overlap and settings.parks
    op = LoadOp(
        load_id=load_id,
        request_id=request_id,
        parked=settings.parks,
        epoch=lease.epoch,
        chunk=chunk,
        first=first,
        last=last,
        blocks=table[chunk * chunk_tokens // settings.block_size : -(-last // settings.block_size)],
        entries=lease.entries[low:high].tolist(),
        generations=lease.generations[low:high].tolist(),
        lengths=lease.lengths[low:high].tolist(),
        keys=lease.keys[low:high],
        deadline=settings.load_timeout if settings.parks else 0.0,
        overlap=overlap,
    )
    return op, Outstanding(lease, request_id, hit.first_chunk, chunk, end_chunk, first, last, list(table), overlap)


def plan_failure(settings: SchedulerSettings, load_id: int, request_id: str, table: list[int]) -> LoadOp:
    """A load that no worker can do, so that all blocks of ``table`` are reported as failed."""
    return LoadOp(
        load_id=load_id,
        request_id=request_id,
        parked=settings.parks,
        epoch=0,
        chunk=0,
        first=0,
        last=len(table) * settings.block_size,
        blocks=table,
        entries=(),
        generations=(),
        lengths=(),
        keys=(),
    )


@define(eq=False)
class StorePlanner:
    """Picks the chunks that are handed over in a step. Each of a request once, in whatever steps they fill."""

    settings: SchedulerSettings
    breaker: Breaker
    loads: Loads
    stores: Stores
    quarantine: Quarantine

    def plan_step(self, scheduled: Iterable[tuple[RequestState, int, int]], *, may_store: bool) -> list[StoreOp]:
        """The stores of a step; taints who reads bad blocks in it.

        ``scheduled``: each request of the step with its tokens that were computed before and in this step.
        """
        ops: list[StoreOp] = []
        bad = self.quarantine.bad
        try:
            for state, computed, count in scheduled:
                end = computed + count
                index = bad.first_in(state.blocks, end) if bad.written else None
                if index is not None:
                    self.quarantine.taint(state, index)
                # A block fills on a step that allocates nothing, too.
                op = self.plan(state, end) if may_store else None
                if op is not None:
                    ops.append(op)
        except BaseException:
            # None of them reaches a worker, so none would ever be answered.
            for op in ops:
                self.stores.ended(StoreResult(op.store_id, 0, ERROR))
            raise
        return ops

    def plan(self, state: RequestState, end: int) -> StoreOp | None:
        """Chunks of the first ``end`` tokens, which will be computed when the step has run, that were not planned."""
        settings = self.settings
        if end // settings.chunk_tokens <= state.next_chunk:
            return None  # as in nearly every step that decodes
        if not settings.stores or state.chain is None or state.tainted or not self._is_time(state, end):
            return None
        chunk_tokens, block_size = settings.chunk_tokens, settings.block_size
        complete = min(end, state.request.num_tokens) // chunk_tokens
        if complete <= state.next_chunk:
            return None
        state.chain.extend(state.request.all_token_ids, complete * chunk_tokens)
        chunks = [
            chunk
            for chunk in range(state.next_chunk, complete)
            if chunk not in state.known and not self._is_on_its_way(state, chunk)
        ]
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
        later = settings.stores_later
        keys, parents = state.chain.objects(chunks)
        op = StoreOp(
            request_id=str(state.request.request_id),
            chunks=chunks,
            keys=keys,
            parents=parents,
            blocks=blocks,
            store_id=self.stores.number() if later else 0,
            asynchronous=later,
        )
        if later:
            self.stores.begin(op, [state.chain.keys[chunk] for chunk in chunks])
        return op

    def _is_time(self, state: RequestState, end: int) -> bool:
        """Whether chunks are handed over in this step; otherwise in a later one."""
        settings = self.settings
        if self.breaker.is_open:
            # A server that is late would be waited for by the step.
            return False
        if settings.stores_later and end < state.request.num_prompt_tokens:
            return False
        load = self.loads.of(str(state.request.request_id)) if settings.overlap else None
        # What is computed on layers that are still on their way is good only if they all come.
        return load is None or not load.overlap

    def _is_on_its_way(self, state: RequestState, chunk: int) -> bool:
        """Whether another request's store of the same chunk is under way; this one hears if that fails."""
        assert state.chain is not None
        key = state.chain.keys[chunk]
        if not self.stores.is_pending(key):
            return False
        self.stores.join(key, str(state.request.request_id), chunk)
        return True
