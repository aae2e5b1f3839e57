"""Which instruction set vLLM's CPU attention uses, because that decides how it packs a page."""

from __future__ import annotations

import importlib
import inspect
from typing import Any


def cpu_attention_isa(dtype: Any, block_size: int, head_size: int, cache_dtype: str | None) -> str | None:
    """The name that vLLM's CPU backend will pick for these facts; ``None`` when it cannot be learned.

    ``block_size`` is that of the layer's KV cache spec, ``cache_dtype`` the engine's setting (``"auto"``, ``"fp8"`` …).
    """
    try:
        choose = importlib.import_module("vllm.v1.attention.backends.cpu_attn")._get_attn_isa
    except (ImportError, AttributeError):
        return None
    facts = (dtype, block_size, head_size, cache_dtype)
    accepted = len(inspect.signature(choose).parameters)
    try:
        isa = choose(*facts[:accepted])
    except NotImplementedError:  # vLLM has no kernel for these facts and will say so itself
        return None
    return str(isa)
