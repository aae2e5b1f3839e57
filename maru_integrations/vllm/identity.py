"""Who computed the KV: the facts that bind a namespace to one model, its weights and its geometry.

Two engines may share bytes only when all of this is equal. When in doubt a fact is included: a needless miss costs
time, a wrong hit costs the answer.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from maru_core.config import MaruConfig
from maru_core.namespace import OPERATOR_FACT, Namespace
from maru_integrations.vllm.compat import KVGeometry

#: Name and version of the byte layouts that :class:`maru_core.geometry.ObjectLayout` describes: an object per chunk,
#: and an object per chunk and layer.
CHUNKWISE = "chunkwise/1"
LAYERWISE = "layerwise/1"

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")
_SAMPLE = 64 * 1024
_SAMPLES = 16


def namespace_of(vllm_config: Any, geometry: KVGeometry, chunk_tokens: int, config: MaruConfig) -> Namespace:
    """The namespace of this engine; equal in its scheduler and in its workers."""
    model = vllm_config.model_config
    load = vllm_config.load_config
    return Namespace.of(
        {
            "format": LAYERWISE if config.use_layerwise else CHUNKWISE,
            OPERATOR_FACT: config.cache_namespace,
            "model": str(model.model),
            "revision": _text(model.revision),
            "weights": weights_fingerprint(str(model.model), str(load.load_format)),
            "commit": _text(getattr(model.hf_config, "_commit_hash", None)),
            "overrides": _text(sorted(_overrides(model).items())),
            "quantization": _text(model.quantization),
            "model_dtype": str(model.dtype).removeprefix("torch."),
            "kv_dtype": geometry.dtype,
            "cache_dtype": geometry.cache_dtype,
            "layers": len(geometry.layer_names),
            "planes": 2,
            "kv_heads": geometry.num_kv_heads,
            "head_size": geometry.head_size,
            "chunk_tokens": chunk_tokens,
            "tp_size": vllm_config.parallel_config.tensor_parallel_size,
            "pp_size": vllm_config.parallel_config.pipeline_parallel_size,
        }
    )


def weights_fingerprint(model: str, load_format: str) -> str:
    """Hex digest that changes when the weight files of a local model folder change; ``hub`` for a hub name.

    Reads names, sizes, modification times and evenly spread samples of each weight file, and the whole of
    ``config.json``: re-baked weights under the same path must not meet the old ones' KV, and hashing gigabytes at every
    start is no option. A hub name is bound by its revision and commit instead.
    """
    folder = Path(model)
    if not folder.exists():
        return "hub"
    digest = hashlib.blake2b(digest_size=16, person=b"maru-weights")
    digest.update(load_format.encode())
    files = [folder] if folder.is_file() else sorted(folder.iterdir())
    for file in files:
        if file.name == "config.json":
            digest.update(file.read_bytes())
        elif file.suffix in _WEIGHT_SUFFIXES:
            status = file.stat()
            digest.update(f"\0{file.name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
            with file.open("rb") as stream:
                for index in range(_SAMPLES):
                    stream.seek(max(0, status.st_size - _SAMPLE) * index // (_SAMPLES - 1))
                    digest.update(stream.read(_SAMPLE))
    return digest.hexdigest()


def _overrides(model: Any) -> dict[str, str]:
    """Settings that change what the same weights compute."""
    names = ("hf_overrides", "rope_scaling", "rope_theta", "override_attention_dtype")
    found = {name: getattr(model, name, None) for name in names}
    return {name: str(value) for name, value in found.items() if value}


def _text(value: Any) -> str:
    return "" if value is None else str(value)
