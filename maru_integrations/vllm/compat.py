"""Every difference between the supported vLLM versions (0.22.1 to 0.33.0), and every reach into vLLM's inside.

Versions are told apart by what is there, not by version strings.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from attrs import frozen


@frozen
class KVGeometry:
    """One rank's KV as vLLM describes it. ``cache_dtype`` as in vLLM's ``--kv-cache-dtype``."""

    layer_names: tuple[str, ...]
    block_size: int
    num_blocks: int
    num_kv_heads: int
    head_size: int
    element_size: int
    dtype: str
    cache_dtype: str


def register_by_name(name: str, module: str) -> None:
    """Let vLLM find the connector by its name alone, too, unless it does already.

    A connector with a module path works without, but its figures do not when it is one of several: MultiConnector looks
    every one up by name to build them again in the front end, which ends when one is not found, and the engine with it.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with suppress(ValueError):  # registered
        KVConnectorFactory.register_connector(name, module, name)


def schedules_ahead(vllm_config: Any) -> bool:
    """Whether a step is planned and submitted before the results of the one before are there."""
    return bool(vllm_config.scheduler_config.async_scheduling)


def parks_hits(vllm_config: Any) -> bool:
    """Whether hits must be parked and loaded between steps.

    A failed *synchronous* load can be repaired only by an engine that processes one step at a time on the runner whose
    counters live on the host: with asynchronous scheduling or pipeline parallelism the next step has started on bad KV
    when the failure is reported, and the V2 runner keeps its own count of computed tokens.
    """
    return bool(
        schedules_ahead(vllm_config)
        or vllm_config.parallel_config.pipeline_parallel_size > 1
        or getattr(vllm_config, "use_v2_model_runner", False)
    )


def set_recompute_policy(vllm_config: Any) -> bool:
    """Make failed loads recompute instead of failing requests; True when this changed the setting.

    vLLM reads the policy after it has constructed its connectors, in all supported versions.
    """
    transfer = vllm_config.kv_transfer_config
    if transfer.kv_load_failure_policy == "recompute":
        return False
    transfer.kv_load_failure_policy = "recompute"
    return True


def block_budget(vllm_config: Any, kv_cache_config: Any) -> int | None:
    """Blocks that requests can have: all but the null block; ``None`` when neither configuration knows."""
    for known in (
        getattr(kv_cache_config, "num_blocks", None),
        getattr(vllm_config.cache_config, "num_gpu_blocks", None),
    ):
        if known:
            return max(1, int(known) - 1)
    return None


def asks_scheduler_for_stats() -> bool:
    """Whether vLLM takes the scheduler side's figures in steps in which no worker sent any: since 0.24."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    return hasattr(KVConnectorBase_V1, "has_pending_push_work")  # came with the same version


def evict_blocks(block_pool: Any, block_ids: Iterable[int]) -> None:
    """Drop blocks from vLLM's own prefix cache; those in use stay allocated."""
    block_pool.evict_blocks({block for block in block_ids if 0 < block < block_pool.num_gpu_blocks})


def own_prefix(block_pool: Any, request: Any, block_size: int) -> int:
    """Tokens of a request's longest prefix that vLLM's own cache holds now; for one KV group."""
    count = 0
    for block_hash in request.block_hashes:
        if not block_pool.get_cached_block(block_hash, [0]):
            break
        count += 1
    return count * block_size


def group_block_ids(blocks: Any) -> list[list[int]]:
    """Block ids per KV group of a ``KVCacheBlocks`` or of a scheduler output's tuple."""
    ids = blocks.get_block_ids() if hasattr(blocks, "get_block_ids") else blocks
    return [list(group) for group in ids]


def draft_tokens(scheduler_output: Any, request_id: str) -> int:
    """Speculated tokens among those scheduled for a request."""
    return len((scheduler_output.scheduled_spec_decode_tokens or {}).get(request_id, ()))


def resumed(cached: Any, index: int) -> bool:
    """Whether entry ``index`` of ``scheduled_cached_reqs`` comes back from preemption with a new block table."""
    return cached.req_ids[index] in cached.resumed_req_ids


def preempted(scheduler_output: Any) -> Sequence[str]:
    """Requests whose blocks were taken away in this step, as far as vLLM says so; see :func:`names_all_preempted`."""
    return tuple(getattr(scheduler_output, "preempted_req_ids", None) or ())


def names_all_preempted() -> bool:
    """Whether a step also names requests that ``reset_prefix_cache(reset_running_requests=True)`` preempted before it.

    Not up to 0.24: these lose their blocks to others without a word.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    return "reset_preempted_req_ids" in Scheduler._preempt_request.__code__.co_names


def times_preempted(request: Any) -> int:
    """How often the request has lost its blocks so far."""
    return int(request.num_preemptions)


def loads_within(scheduler_output: Any) -> bool:
    """Whether some load of this step, whoever's, is read by its forward pass; True where vLLM does not say."""
    return bool(getattr(scheduler_output, "has_sync_kv_loads", True))


def runs_layer_hooks() -> bool:
    """Whether the forward pass that is about to begin calls a hook before each layer. Asked while metadata is bound.

    Not when it replays one CUDA graph of the whole model, nor in a step without a forward pass. Where vLLM shows no
    forward context yet (its V2 runner before a full graph), the answer is no.
    """
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import get_forward_context, is_forward_context_available

    if not is_forward_context_available():
        return False
    context = get_forward_context()
    return context.attn_metadata is not None and context.cudagraph_runtime_mode != CUDAGraphMode.FULL


def element_size(dtype: Any) -> int:
    """Bytes of one element of a torch dtype."""
    import torch

    return torch.empty(0, dtype=dtype).element_size()


def kv_geometry(vllm_config: Any, kv_cache_config: Any) -> KVGeometry | str:
    """Describe the KV cache, or say why Maru cannot hold it (hybrid, sliding window, quantised, …)."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs

    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        return f"{len(groups)} KV cache groups (a hybrid or attention-free model)"
    spec = groups[0].kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        specs = list(spec.kv_cache_specs.values())
        if any(other != specs[0] for other in specs):
            return "layers of different KV width"
        spec = specs[0]
    if type(spec) is not FullAttentionSpec:
        return f"KV cache of type {type(spec).__name__}"
    if spec.sliding_window is not None or spec.attention_chunk_size is not None:
        return "sliding-window or chunked-local attention layers"
    if getattr(spec, "non_causal", False):
        return "non-causal attention, whose KV depends on later tokens"
    head_size_v = getattr(spec, "head_size_v", None)
    if head_size_v not in (None, spec.head_size):
        return f"value heads of {head_size_v} beside key heads of {spec.head_size}"
    cache_dtype = str(vllm_config.cache_config.cache_dtype)
    if cache_dtype not in ("auto", "bfloat16", "float16", "float32"):
        return f"a quantised KV cache ({cache_dtype})"
    return KVGeometry(
        layer_names=tuple(groups[0].layer_names),
        block_size=spec.block_size,
        num_blocks=kv_cache_config.num_blocks,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        element_size=element_size(spec.dtype),
        dtype=str(spec.dtype).removeprefix("torch."),
        cache_dtype=cache_dtype,
    )


def attention_backend(vllm_config: Any, layer_names: Sequence[str]) -> str:
    """Name of the attention backend of the layers, as vLLM spells it; raises KeyError when a layer is not known."""
    context = vllm_config.compilation_config.static_forward_context
    names = {context[name].get_attn_backend().get_name() for name in layer_names}
    return ",".join(sorted(names))
