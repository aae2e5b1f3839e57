"""What Maru can serve exactly, and the reasons for everything else: such a model or request gets no hits."""

from __future__ import annotations

from typing import Any

from maru_core.keys import cache_salt_field


def refused_engine(vllm_config: Any) -> str | None:
    """Why this engine's configuration gets no hits; ``None`` when it may. The KV cache itself is judged elsewhere."""
    parallel = vllm_config.parallel_config
    sizes = {
        "tensor parallel": parallel.tensor_parallel_size,
        "pipeline parallel": parallel.pipeline_parallel_size,
        "decode context parallel": getattr(parallel, "decode_context_parallel_size", 1),
        "prefill context parallel": getattr(parallel, "prefill_context_parallel_size", 1),
    }
    for name, size in sizes.items():
        if size > 1:
            return f"{name} size {size} (only single-rank engines so far)"
    runner = getattr(vllm_config.model_config, "runner_type", "generate")
    if runner != "generate":
        return f"runner type {runner!r}: only text generation has a KV cache that is a pure function of the prefix"
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method not in ("ngram", "ngram_gpu", "suffix"):
        return f"speculative decoding with a draft model ({speculative.method})"
    return None


def refused_request(request: Any) -> str | None:
    """Why the KV of this request cannot be identified fully; ``None`` when it can."""
    if request.lora_request is not None:
        return "LoRA"
    if getattr(request, "mm_features", None):
        return "multimodal input"
    if getattr(request, "prompt_embeds", None) is not None:
        return "prompt embeddings"
    if not request.prompt_token_ids:
        return "no prompt tokens"
    if getattr(request, "pooling_params", None) is not None:
        return "pooling request"
    return None


def reads_prefix_cache(request: Any) -> bool:
    """False for requests that need every prompt position computed, such as those that ask for prompt logprobs."""
    return not getattr(request, "skip_reading_prefix_cache", False)


def salt_of(request: Any) -> tuple[tuple[str, bytes], ...]:
    """The tagged extra fields of a request's chunk keys."""
    return cache_salt_field(getattr(request, "cache_salt", None))
