"""Scheduler side of the connector: its parts put together, and what vLLM's scheduler tells and asks each of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from maru_core.client import MaruHandler
from maru_core.namespace import Namespace
from maru_integrations.vllm.breaker import Breaker
from maru_integrations.vllm.loading import Loads
from maru_integrations.vllm.matching import Matcher
from maru_integrations.vllm.metadata import MaruWorkerMetadata, StoreOp
from maru_integrations.vllm.outcomes import Outcomes
from maru_integrations.vllm.parking import Parking
from maru_integrations.vllm.planning import SchedulerSettings, StorePlanner
from maru_integrations.vllm.preemptions import Preemptions
from maru_integrations.vllm.promises import Promises
from maru_integrations.vllm.quarantine import Quarantine
from maru_integrations.vllm.requests import LiveRequests
from maru_integrations.vllm.resets import Resets
from maru_integrations.vllm.shareline import ShareLine
from maru_integrations.vllm.stats import MaruStats, Report
from maru_integrations.vllm.storing import Stores
from maru_integrations.vllm.tables import Scheduled, Tables
from maru_integrations.vllm.worth import Worth


class MaruScheduler:
    """One per engine, on the engine core's main thread.

    A request is heard of (:meth:`arrived`), asks what it is promised (:meth:`match`) and gets its blocks
    (:meth:`after_alloc`): see :class:`.promises.Promises`. A step is planned (:meth:`plan_stores`): see
    :class:`.tables.Tables` and :class:`.planning.StorePlanner`. Its result comes back (:meth:`worker_output`): see
    :class:`.outcomes.Outcomes` and :class:`.quarantine.Quarantine`.

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
        self._stats = MaruStats()
        self._report = Report(self._stats)
        self._requests = LiveRequests(namespace.root, settings.chunk_tokens, settings.objects_per_chunk)
        self._states = states = self._requests.states
        self._breaker = Breaker(clock)
        self._line = ShareLine()
        self._loads = Loads()
        self._matcher = Matcher(
            handler,
            chunk_tokens=settings.chunk_tokens,
            block_size=settings.block_size,
            objects_per_chunk=settings.objects_per_chunk,
            lookup_timeout=settings.lookup_timeout,
            clock=clock,
            breaker=self._breaker,
            count=self._stats.count,
            line=self._line,
            loads=self._loads,
            load_timeout=settings.load_timeout,
            states=states,
        )
        self._resets = Resets(handler, clock)
        self._parking = Parking(settings.block_size, settings.block_budget, settings.window)
        self._stores = Stores(clock)
        self._worth = Worth(clock, settings.token_bytes) if settings.token_bytes else None
        self._quarantine = Quarantine(settings.block_size, states, self._loads)
        self._promises = Promises(
            settings,
            clock,
            self._requests,
            matcher=self._matcher,
            parking=self._parking,
            loads=self._loads,
            resets=self._resets,
            quarantine=self._quarantine,
            worth=self._worth,
            stats=self._stats,
        )
        self._preemptions = Preemptions(settings.names_all_preempted)
        self._tables = Tables(states, self._preemptions, self._loads, self._stores, self._promises, self._quarantine)
        self._planner = StorePlanner(settings, self._breaker, self._loads, self._stores, self._quarantine)
        self._outcomes = Outcomes(
            handler,
            settings.objects_per_chunk,
            states,
            matcher=self._matcher,
            parking=self._parking,
            loads=self._loads,
            stores=self._stores,
            resets=self._resets,
            worth=self._worth,
            stats=self._stats,
        )
        self._held: list[str] = []
        self._block_pool: Any = None
        # What else the workers are told with a step. Straight from the parts: most steps have nothing of it.
        self.take_loads = self._promises.take_loads
        self.take_preempted = self._tables.take_preempted
        self.take_undefined = self._quarantine.take_undefined
        self.take_cancelled = self._loads.take_cancelled

    def bind_block_pool(self, block_pool: Any) -> None:
        """vLLM's own prefix cache: what it has is not asked for, and what is bad must go from it."""
        self._block_pool = self._quarantine.block_pool = block_pool

    # -- a request -----------------------------------------------------------------------------------------------

    def arrived(self, request: Any) -> None:
        """vLLM will consider the request in one of the next steps."""
        if self._block_pool is not None:
            self._promises.arrived(request, self._block_pool)

    def match(self, request: Any, local: int) -> tuple[int | None, bool]:
        """Tokens beyond ``local`` that will be loaded, and whether the request is parked while they are."""
        return self._promises.match(request, local)

    def after_alloc(self, request: Any, blocks: Any, external: int) -> None:
        """vLLM gave the request blocks; ``external`` tokens of what was promised will be used."""
        self._promises.after_alloc(request, blocks, external)

    def fail_load(self, request: Any, blocks: Any, external: int) -> None:
        """:meth:`after_alloc` went wrong although vLLM counts on it."""
        self._promises.fail_load(request, blocks, external)

    def finished(self, request: Any) -> None:
        """The request is gone. A load that is under way keeps its lease until the workers have answered."""
        request_id = str(request.request_id)
        self._preemptions.ended(request)
        state = self._states.pop(request_id, None)
        self._promises.ended(request_id, state)
        if state is not None:
            self._loads.depart(request_id, state.blocks)
            self._quarantine.ended(state)

    def hold(self, request_id: str) -> bool:
        """Whether blocks of a request that has finished must be kept; if so, the workers report when no longer."""
        if not self._stores.is_outstanding(request_id):
            return False
        self._held.append(request_id)
        return True

    # -- a step --------------------------------------------------------------------------------------------------

    def plan_stores(self, output: Any) -> list[StoreOp]:
        """Follow the step's block tables and pick the chunks that are handed over for when it has run."""
        # First, because whatever goes wrong afterwards must not leave a table behind that lacks this step's blocks, nor
        # a store that goes on reading what was taken away.
        scheduled, loads_elsewhere = self._tables.follow(output)
        # With loads under way their ends are worth looking for.
        self._matcher.new_step(idle=not output.num_scheduled_tokens and not len(self._loads))
        self._promises.drop_old_questions()
        self._measure_step(scheduled)
        may_store = bool(scheduled) and not loads_elsewhere and self._resets.caught_up()
        ops = self._planner.plan_step(scheduled, may_store=may_store)
        if ops:
            self._stats.count("stores", len(ops))
        return ops

    def _measure_step(self, scheduled: Sequence[Scheduled]) -> None:
        if self._worth is None or not scheduled:
            return
        prompts = sum(count for state, computed, count in scheduled if computed < state.request.num_prompt_tokens)
        self._worth.step_began(prompts, sum(count for _, _, count in scheduled) - prompts)

    def take_held(self) -> list[str]:
        """Finished requests whose blocks vLLM keeps until the workers have reported them, since the last step."""
        held, self._held = self._held, []
        return held

    @property
    def weights_epoch(self) -> int:
        """The weights epoch that this engine has seen."""
        return self._handler.weights_epoch

    def worker_output(self, output: Any) -> None:
        """A step's results: end leases whose loads were answered, keep bad KV from spreading."""
        if self._worth is not None:
            self._worth.step_ended()
        answers = output.kv_connector_worker_meta
        if isinstance(answers, MaruWorkerMetadata):
            self._outcomes.take(answers)
        if output.invalid_block_ids:
            self._quarantine.add(set(output.invalid_block_ids))
        self._loads.forget_departed()

    # -- all of it -----------------------------------------------------------------------------------------------

    def take_stats(self) -> MaruStats | None:
        """What has been counted since this was last asked, and what is as it was not then; ``None``: nothing."""
        parking = self._parking
        waiting = parking.waiting + len(self._line.places)
        away = int(self._breaker.is_open or not self._handler.is_up)
        return self._report.take(
            (parking.admitted, parking.loading, waiting, self._stores.outstanding, away)  # as in stats.GAUGES
        )

    def reset(self) -> bool:
        """Empty this namespace for everybody; False when the server could not be told yet: see :class:`Resets`."""
        self._promises.reset()
        self._quarantine.reset()
        self._stores.forget_keys()
        return self._resets.reset()

    def close(self) -> None:
        """End the session."""
        self._handler.close()
