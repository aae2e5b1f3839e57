"""``MaruKVConnector``: what vLLM constructs and calls. Dispatches by role; every call is guarded.

Importing this module is cheap and touches no device: vLLM does it in its front-end process, too.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from maru_core import logs
from maru_core.config import MaruConfig
from maru_core.errors import MaruError
from maru_integrations.vllm import compat, setup
from maru_integrations.vllm.answers import Answers
from maru_integrations.vllm.engines import EngineChooser, NoEngine
from maru_integrations.vllm.guard import Guard
from maru_integrations.vllm.metadata import UNAVAILABLE, MaruConnectorMetadata, MaruHandshake, StoreOp
from maru_integrations.vllm.stats import MaruPromMetrics, MaruStats
from maru_integrations.vllm.turns import take_prompt_turns

if TYPE_CHECKING:
    import torch

    from maru_integrations.vllm.scheduler import MaruScheduler
    from maru_integrations.vllm.worker import MaruWorker


class MaruKVConnector(KVConnectorBase_V1, SupportsHMA):
    """Shares vLLM's KV cache through Maru.

    Settings come from ``kv_connector_extra_config`` (``docs/configuration.md``); an unknown or ill-typed one raises
    ConfigError here and so stops the start. Everything else that goes wrong is a miss. What Maru cannot serve exactly
    (``support.py``) gets zero hits and one warning. ``SupportsHMA`` is declared so that hybrid models start as they do
    without Maru; they get no hits so far.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._log = logs.get_logger(__name__)
        self._guard = Guard(role.name.lower())
        self._scheduler: MaruScheduler | None = None
        self._worker: MaruWorker | None = None
        self._answers = Answers()
        #: Parked requests that vLLM has noted as received since the last step was planned.
        self._received: set[str] = set()
        self._refused: str | None = None
        #: What this side changed in its process, until it has nothing to do any more.
        self._changes = ExitStack()
        #: Set by the first step: until then vLLM only starts, and nobody waits for an answer.
        self._at_work = threading.Event()
        self._asks_scheduler_for_stats = compat.asks_scheduler_for_stats()
        config, plugins = setup.read_config(vllm_config)
        plan = self._guard.run(
            "plan", lambda: "an internal error", setup.make_plan, vllm_config, kv_cache_config, config, plugins
        )
        if isinstance(plan, str):
            self._plan = None
            self._refuse(plan, tell=role == KVConnectorRole.SCHEDULER)
            return
        self._plan = plan
        self._changes.callback(take_prompt_turns())
        if role == KVConnectorRole.SCHEDULER:
            setup.warn_of_idle_knobs(config, parks=self._parks(config))
            if compat.set_recompute_policy(vllm_config):
                self._log.info("maru.policy", kv_load_failure_policy="recompute")
            self._scheduler = self._guard.run("start", lambda: None, self._start_scheduler, plan)

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache hands nothing off: a dropped store is a later miss."""
        return False

    def _refuse(self, reason: str, *, tell: bool) -> None:
        self._refused = reason
        self._scheduler = None
        self._changes.close()
        if tell:
            self._log.warning("maru.disabled", reason=reason, effect="no request of this engine gets hits or is stored")

    def _parks(self, config: MaruConfig) -> bool:
        return config.async_load or compat.parks_hits(self._vllm_config)

    # -- scheduler side ------------------------------------------------------------------------------------------

    def _start_scheduler(self, plan: setup.Plan) -> MaruScheduler | None:
        from maru_integrations.vllm.planning import SchedulerSettings
        from maru_integrations.vllm.scheduler import MaruScheduler

        transfer: Any = self._vllm_config.kv_transfer_config
        config = plan.config
        settings = SchedulerSettings(
            chunk_tokens=plan.chunk_tokens,
            block_size=plan.geometry.block_size,
            loads=transfer.is_kv_consumer,
            stores=transfer.is_kv_producer,
            parks=self._parks(config),
            lookup_timeout=config.lookup_timeout,
            objects_per_chunk=plan.objects_per_chunk,
            block_budget=compat.block_budget(self._vllm_config, self._kv_cache_config),
            window=config.load_admission_window,
            load_timeout=config.load_timeout,
            overlap=setup.overlaps(config),
            stores_later=config.async_store,
            token_bytes=plan.token_bytes if config.load_or_compute == "auto" else 0,
            names_all_preempted=compat.names_all_preempted(),
        )
        try:
            handler = setup.connect(plan, "scheduler")
        except MaruError as error:
            self._refuse(str(error), tell=True)
            return None
        return MaruScheduler(handler, plan.namespace, settings)

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """What the workers found out about the layout, before the first request."""
        for answer in metadata.values():
            if isinstance(answer, MaruHandshake) and answer.refused is not None and self._scheduler is not None:
                scheduler = self._scheduler
                self._refuse(answer.refused, tell=True)
                self._guard.run("shutdown", lambda: None, scheduler.close)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """The same, keyed by pipeline and tensor rank."""
        self.set_xfer_handshake_metadata(dict(enumerate(metadata.values())))

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """vLLM's own prefix cache."""
        if self._scheduler is not None:
            self._scheduler.bind_block_pool(gpu_block_pool)

    def on_new_request(self, request: Any) -> None:
        """The request has arrived."""
        if self._scheduler is not None:
            self._guard.run("arrived", lambda: None, self._scheduler.arrived, request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens beyond ``num_computed_tokens`` that will be loaded."""
        if self._scheduler is None:
            return 0, False
        return self._guard.run("match", lambda: (0, False), self._scheduler.match, request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request got its blocks."""
        scheduler = self._scheduler
        if scheduler is None:
            return
        self._guard.run(
            "after_alloc",
            lambda: scheduler.fail_load(request, blocks, num_external_tokens),
            scheduler.after_alloc,
            request,
            blocks,
            num_external_tokens,
        )

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """This step's loads and stores."""
        scheduler = self._scheduler
        if scheduler is None:
            return MaruConnectorMetadata()
        loads = scheduler.take_loads()
        stores: list[StoreOp] = self._guard.run("plan_stores", list, scheduler.plan_stores, scheduler_output)
        received, self._received = self._received, set()
        return MaruConnectorMetadata(
            scheduler.weights_epoch,
            loads,
            stores,
            held=scheduler.take_held(),
            preempted=scheduler.take_preempted(),
            cancelled_loads=scheduler.take_cancelled(),
            received=tuple(received),
            undefined=scheduler.take_undefined(),
            computing=len(scheduler_output.num_scheduled_tokens),
        )

    def update_connector_output(self, connector_output: Any) -> None:
        """The workers' answers."""
        if self._scheduler is not None:
            self._received.update(connector_output.finished_recving or ())
            self._guard.run("worker_output", lambda: None, self._scheduler.worker_output, connector_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """The request ended; True when a store may still read its blocks, which the workers then report."""
        scheduler = self._scheduler
        if scheduler is None:
            return False, None
        self._guard.run("finished", lambda: None, scheduler.finished, request)
        return self._guard.run("hold", lambda: False, scheduler.hold, str(request.request_id)), None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same, for engines with several KV groups."""
        return self.request_finished(request, [])

    def reset_cache(self) -> bool | None:
        """Empty this engine's namespace in every pool; False when that could not be done."""
        if self._scheduler is None:
            return True
        return self._guard.run("reset", lambda: False, self._scheduler.reset)

    # -- worker side ---------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Learn the layout, map the pool, connect."""
        if self._plan is None:
            return
        self._worker = self._guard.run("register", lambda: None, self._start_worker, self._plan, kv_caches)
        if self._worker is None and self._refused is None:
            self._refused = "the worker could not be set up"

    def _start_worker(self, plan: setup.Plan, kv_caches: dict[str, torch.Tensor]) -> MaruWorker | None:
        from maru_integrations.vllm.worker import MaruWorker

        try:
            paged, layers = setup.describe(plan, self._vllm_config, kv_caches)
        except MaruError as error:
            self._refuse(str(error), tell=False)
            return None
        chooser, at_work = EngineChooser(), self._at_work.is_set
        worker = MaruWorker(
            lambda: setup.open_link(plan, paged, layers, chooser, at_work),
            self._answers,
            setup.chunk_shape(plan, paged),
            layer_names=plan.geometry.layer_names,
            threads=setup.threads_of(plan, paged, layers[0].device, ahead=compat.schedules_ahead(self._vllm_config)),
            log_timing=plan.config.log_timing,
        )
        self._guard.run("connect", lambda: None, self._connect_worker, worker)
        return worker if self._refused is None else None

    def _connect_worker(self, worker: MaruWorker) -> None:
        try:
            worker.connect()
        except NoEngine as error:
            self._refuse(str(error), tell=False)
        except MaruError as error:
            # The scheduler side meets the same server and tells; what only the worker meets, its first step tells.
            self._log.info("maru.worker_not_connected", reason=str(error), next="tried again by the first request")

    def get_handshake_metadata(self) -> MaruHandshake | None:
        """Tells the scheduler side whether this worker can serve the layout."""
        return None if self._plan is None else MaruHandshake(self._refused)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Let go of blocks that vLLM gives to others in this step."""
        if self._worker is not None and isinstance(kv_connector_metadata, MaruConnectorMetadata):
            self._guard.run("preempt", lambda: None, self._worker.preempt, kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """A step begins."""
        super().bind_connector_metadata(connector_metadata)
        if not self._at_work.is_set():
            self._at_work.set()
        metadata = self._metadata()
        if metadata is not None and self._worker is not None:
            self._guard.run("begin", lambda: None, self._worker.begin, metadata, self._has_layer_hooks)

    def _has_layer_hooks(self) -> bool:
        """Whether the step need not wait for all layers now; it does where that cannot be found out."""
        return self._guard.run("layer_hooks", lambda: False, compat.runs_layer_hooks)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Do this step's loads, or hand them to the loader."""
        metadata = self._metadata()
        if metadata is None or not metadata.loads:
            return
        worker = self._worker
        for op in metadata.loads:
            if worker is None:
                self._answers.load_ended(op, 0, op.blocks, UNAVAILABLE)
            else:
                # Each alone: one that raises was not taken over, so it would never be answered.
                self._guard.run("load", partial(worker.fail_load, op), worker.load, op)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for this layer of requests that went on before all of it was loaded."""
        # Called dozens of times in each step, by code that has been idle for long.
        worker = self._worker
        if worker is not None and worker.waits_by_layer:
            self._guard.run("wait_layer", lambda: None, worker.wait_layer, layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Stores are done in one piece, in ``wait_for_save``."""

    def wait_for_save(self) -> None:
        """Do this step's stores, or hand them to the saver."""
        metadata = self._metadata()
        if metadata is None:
            return
        if self._worker is not None:
            self._guard.run("store", lambda: None, self._worker.store, metadata)
            return
        for op in metadata.stores:
            if op.asynchronous:
                self._answers.store_ended(op, 0, UNAVAILABLE)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Held requests that no store reads any more, and parked ones whose load has ended."""
        metadata = self._metadata()
        if metadata is not None and metadata.held:
            self._answers.hold(metadata.held)
        if self._worker is not None:
            self._guard.run("end", lambda: None, self._worker.end)
        sent, received = self._answers.take_finished()
        if received and self._worker is not None:
            self._guard.run("told", lambda: None, self._worker.told, received)
        return sent or None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that could not be filled."""
        return self._answers.take_failed_blocks()

    def build_connector_worker_meta(self) -> Any:
        """Answers for the scheduler side."""
        return self._answers.take_metadata()

    def _metadata(self) -> MaruConnectorMetadata | None:
        metadata = self._connector_metadata
        return metadata if isinstance(metadata, MaruConnectorMetadata) else None

    # -- both ----------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> MaruStats | None:
        """What this side has counted since it was last asked."""
        if self._scheduler is not None:
            return self._guard.run("stats", lambda: None, self._scheduler.take_stats)
        # Some versions ask the scheduler side only when a worker has said anything, even if it is nothing.
        return None if self._asks_scheduler_for_stats else MaruStats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> MaruStats | None:
        """What another process sent."""
        return MaruStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> MaruPromMetrics:
        """The figures for Prometheus."""
        return MaruPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def take_events(self) -> Iterable[Any]:
        """No events so far."""
        return ()

    def shutdown(self) -> None:
        """End this side's session."""
        for side in (self._scheduler, self._worker):
            if side is not None:
                self._guard.run("shutdown", lambda: None, side.close)
        self._scheduler = self._worker = None
        self._changes.close()
