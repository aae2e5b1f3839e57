"""Puts the parts together at engine start: configuration, what is supported, namespace, session, transfer engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from attrs import frozen

from maru_core import logs
from maru_core.client import MaruHandler
from maru_core.config import MaruConfig, PluginSettings
from maru_core.contracts import PoolRegistrar, Transfer, UsesPinnedMemory
from maru_core.geometry import ObjectLayout, PagedLayout
from maru_core.host import PluginHost
from maru_core.namespace import Namespace
from maru_core.pools import granule_for
from maru_integrations.vllm import compat, support
from maru_integrations.vllm.compat import KVGeometry
from maru_integrations.vllm.copies import ChunkShape
from maru_integrations.vllm.cpu_isa import cpu_attention_isa
from maru_integrations.vllm.engines import EngineChooser
from maru_integrations.vllm.identity import namespace_of
from maru_integrations.vllm.layout import describe_layout
from maru_integrations.vllm.moving import Link, close_all
from maru_integrations.vllm.releasing import LoaderSettings
from maru_integrations.vllm.saver import SaverSettings
from maru_integrations.vllm.streams import lane_for
from maru_integrations.vllm.worker import Threads
from maru_transfer.cuda_driver import CudaDriver
from maru_transfer.held import held
from maru_transfer.pinning import PinnedPools
from maru_transfer.selection import Pages


@frozen
class Plan:
    """What this engine stores and under which namespace; the same in its scheduler and its workers."""

    config: MaruConfig
    plugins: PluginSettings
    geometry: KVGeometry
    chunk_tokens: int
    namespace: Namespace
    stored: ObjectLayout

    @property
    def objects_per_chunk(self) -> int:
        """1, or in the layerwise format the number of layers."""
        return len(self.geometry.layer_names) if self.config.use_layerwise else 1

    @property
    def granule(self) -> int:
        """Allocation granule for a server that this engine starts, in bytes."""
        return self.config.chunk_size or granule_for(self.stored.nbytes)

    @property
    def token_bytes(self) -> int:
        """Stored bytes of one token, all layers together."""
        geometry = self.geometry
        width = geometry.num_kv_heads * geometry.head_size * geometry.element_size
        return 2 * len(geometry.layer_names) * width


def read_config(vllm_config: Any) -> tuple[MaruConfig, PluginSettings]:
    """Settings of this process; raises ConfigError, which is meant to stop the start."""
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config or {}
    return MaruConfig.from_mapping(extra, os.environ), PluginSettings.from_environ(os.environ)


def warn_of_idle_knobs(config: MaruConfig, *, parks: bool) -> None:
    """One warning for each setting that does nothing: its prerequisite is off.

    ``parks``: hits are loaded between steps, because it was asked for or because the engine needs it.
    """
    idle = {}
    if config.overlap_load_with_compute and not config.async_load:
        idle["overlap_load_with_compute"] = "it needs maru_async_load"
    if "maru_overlap_release_after_layers" in config.sources and not overlaps(config):
        idle["overlap_release_after_layers"] = "it needs maru_overlap_load_with_compute and maru_async_load"
    if "maru_overlap_spare_decodes" in config.sources and not overlaps(config):
        idle["overlap_spare_decodes"] = "it needs maru_overlap_load_with_compute and maru_async_load"
    if config.load_admission_window and not parks:
        idle["load_admission_window"] = "it needs maru_async_load"
    for name, reason in idle.items():
        logs.get_logger(__name__).warning("maru.setting_without_effect", setting=f"maru_{name}", reason=reason)


def overlaps(config: MaruConfig) -> bool:
    """Whether requests may be released before their loads have ended."""
    return config.overlap_load_with_compute and config.async_load


def make_plan(vllm_config: Any, kv_cache_config: Any, config: MaruConfig, plugins: PluginSettings) -> Plan | str:
    """What to do for this engine, or why it gets no hits."""
    refused = support.refused_engine(vllm_config)
    if refused is not None:
        return refused
    geometry = compat.kv_geometry(vllm_config, kv_cache_config)
    if isinstance(geometry, str):
        return geometry
    chunk_tokens = aligned_chunk(config.kv_chunk_tokens, geometry.block_size)
    stored = ObjectLayout(
        num_planes=2,
        num_layers=1 if config.use_layerwise else len(geometry.layer_names),
        chunk_tokens=chunk_tokens,
        hidden=geometry.num_kv_heads * geometry.head_size,
        element_size=geometry.element_size,
    )
    namespace = namespace_of(vllm_config, geometry, chunk_tokens, config)
    return Plan(config, plugins, geometry, chunk_tokens, namespace, stored)


def aligned_chunk(chunk_tokens: int, block_size: int) -> int:
    """``chunk_tokens`` rounded up to whole blocks, with a warning when that changes it."""
    aligned = -(-chunk_tokens // block_size) * block_size
    if aligned != chunk_tokens:
        logs.get_logger(__name__).warning(
            "maru.chunk_aligned", maru_kv_chunk_tokens=chunk_tokens, block_size=block_size, used=aligned
        )
    return aligned


def connect(
    plan: Plan, role: str, device: str = "cpu", registrar: PoolRegistrar | None = None, engine: str = ""
) -> MaruHandler:
    """A session for this process, whose KV is on ``device`` and moved by the transfer engine ``engine``.

    Without a server the handler is down and keeps trying.
    """
    host = PluginHost.discover(plan.plugins)
    return MaruHandler.connect(
        plan.config,
        plan.namespace,
        role=role,
        name=plan.config.instance_id or plan.config.engine_id or "",
        host=host,
        pool_granule=plan.granule,
        dma=device != "cpu",
        registrar=registrar,
        transfer_engine=engine,
        # One process of an engine says it.
        object_bytes=plan.stored.nbytes if role == "worker" else None,
    )


def pinned_pools(config: MaruConfig, device: Any, at_work: Callable[[], bool]) -> PinnedPools | None:
    """What registers pools with the driver of ``device``; ``None`` when it is none, or that is switched off.

    ``at_work``: whether the engine has started and requests may wait for it; asked by another thread.
    """
    if device.type != "cuda" or not config.pin_pools:
        return None
    number = device.index or 0
    return PinnedPools(lambda: CudaDriver(number), busy=at_work)


def describe(plan: Plan, vllm_config: Any, caches: Mapping[str, Any]) -> tuple[PagedLayout, list[Any]]:
    """The paged layout of the registered tensors, and those in true layer order; raises LayoutError."""
    geometry = plan.geometry
    backend = compat.attention_backend(vllm_config, geometry.layer_names)
    isa = None
    if backend.startswith("CPU"):
        dtype = next(iter(caches.values())).dtype
        isa = cpu_attention_isa(dtype, geometry.block_size, geometry.head_size, geometry.cache_dtype)
    return describe_layout(
        caches,
        layer_order=geometry.layer_names,
        block_size=geometry.block_size,
        num_blocks=geometry.num_blocks,
        num_kv_heads=geometry.num_kv_heads,
        head_size=geometry.head_size,
        element_size=geometry.element_size,
        backend=backend,
        isa=isa,
    )


def chunk_shape(plan: Plan, paged: PagedLayout) -> ChunkShape:
    """How a worker's blocks, chunks and objects go together."""
    objects = paged.num_layers // plan.stored.num_layers
    return ChunkShape(plan.geometry.block_size, plan.chunk_tokens, plan.stored.nbytes * objects, objects)


def threads_of(plan: Plan, paged: PagedLayout, device: Any, *, ahead: bool) -> Threads:
    """Which threads a worker has beside vLLM's own. ``ahead``: see :class:`Threads`."""
    config = plan.config
    loads = stores = None
    if config.async_load:
        early = config.overlap_release_after_layers if config.overlap_load_with_compute else 0
        loads = LoaderSettings(
            release_after=early,
            spares_decodes=config.overlap_spare_decodes,
            num_layers=paged.num_layers,
            log_timing=config.log_timing,
        )
    if config.async_store:
        page = len(paged.planes) * paged.num_layers * paged.block_size * paged.hidden * paged.element_size
        # What waits to be stored keeps its blocks from others.
        limit = paged.num_blocks * page // 4
        stores = SaverSettings(limit, timeout=config.store_timeout, log_timing=config.log_timing)
    return Threads(lambda: lane_for(device), loads, stores, ahead)


def open_link(
    plan: Plan, paged: PagedLayout, layers: list[Any], chooser: EngineChooser, at_work: Callable[[], bool]
) -> Link:
    """Choose a transfer engine, bind it to the tensors, and connect; raises MaruError.

    A transfer is used by one thread at a time: with threads beside vLLM's own there are two, one for loads and one for
    stores, each with its own staging memory. ``at_work``: see :func:`pinned_pools`.
    """
    host = PluginHost.discover(plan.plugins)
    device = layers[0].device
    engine = chooser.choose(host, plan.config, Pages(paged, plan.stored, device.type))
    pools = pinned_pools(plan.config, device, at_work)
    opened: list[Transfer] = []
    try:
        for _ in range(2 if plan.config.async_load or plan.config.async_store else 1):
            transfer = engine.open(layers, paged, plan.stored)
            opened.append(transfer)
            if pools is not None:
                if isinstance(transfer, UsesPinnedMemory):
                    transfer.use_pinned(pools)
                opened[-1] = held(transfer, pools)
        if len(opened) > 1:
            staging = sum(getattr(transfer, "staging_bytes", 0) for transfer in opened)
            logs.get_logger(__name__).info("maru.transfers", count=len(opened), staging_bytes=staging)
        handler = connect(plan, "worker", device.type, pools, engine.name)
        return Link(handler, opened[0], plan.stored, opened[1] if len(opened) > 1 else None, engine.name)
    except BaseException:
        close_all(opened)
        raise
