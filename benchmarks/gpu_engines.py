"""Engines for :mod:`serve_gpu`: the geometry, the connectors that are compared, and the processes that they need."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Random weights do: bytes and times do not depend on them.
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
#: For a rehearsal without a GPU.
SMALL = {
    **LLAMA_8B,
    "vocab_size": 4096,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GIB = 1 << 30
_STARTING = 90.0


@dataclass(frozen=True)
class Scale:
    """How large everything is. ``tokens``: of a prompt; ``hit``: those of them that a cache can hold.

    ``memory``: arguments that say how much memory the KV cache gets, for so many tokens.
    """

    model: Mapping[str, Any]
    tokens: int
    hit: int
    new: int
    pool: str
    peer_gib: float
    arguments: Mapping[str, Any]
    environment: Mapping[str, str]

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of the KV of so many tokens, of 16 bits each."""
        model = self.model
        return tokens * 2 * int(model["num_hidden_layers"] * model["num_key_value_heads"] * model["head_dim"]) * 2


H200 = Scale(
    LLAMA_8B,
    16_389,
    16_384,
    32,
    "40G",
    24.0,
    {
        "max_model_len": 20_480,
        "max_num_batched_tokens": 8192,
        # The share is only what must be free at the start: how much is used is said in bytes.
        "gpu_memory_utilization": 0.1,
        "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8]},
    },
    {},
)
REHEARSAL = Scale(
    SMALL,
    1_029,
    1_024,
    8,
    "128M",
    0.1,
    {"max_model_len": 2048, "max_num_batched_tokens": 512, "enforce_eager": True, "block_size": 32},
    {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0))))},
)


def write_model(model: Mapping[str, Any], folder: Path) -> Path:
    """A model's folder with nothing but its configuration."""
    target = folder / "model"
    target.mkdir()
    (target / "config.json").write_text(json.dumps(dict(model)))
    return target


def engine_arguments(scale: Scale, model: Path, transfer: Mapping[str, Any] | None, at_once: int) -> dict[str, Any]:
    """Arguments of vLLM's engine whose KV cache holds ``at_once`` requests."""
    arguments = {
        "model": str(model),
        "load_format": "dummy",
        "generation_config": "vllm",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "enable_prefix_caching": False,
        "worker_extension_cls": "benchmarks.watched.Watched",
        "kv_transfer_config": transfer,
        **scale.arguments,
    }
    if "gpu_memory_utilization" in scale.arguments:
        # One more block of 64 tokens for each: blocks are taken before the last tokens are known.
        arguments["kv_cache_memory_bytes"] = scale.kv_bytes((at_once + 1) * (scale.tokens + scale.new + 64))
    return arguments


def offloading(scale: Scale) -> dict[str, Any]:
    """vLLM's own connector to the host's memory, with blocks of 256 tokens."""
    extra = {"cpu_bytes_to_use": int(scale.peer_gib * GIB), "block_size": 256}
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


@contextmanager
def lmcache_server(scale: Scale, folder: Path) -> Iterator[dict[str, Any]]:
    """LMCache's server in a process; yields the ``kv_transfer_config`` of engines that use it."""
    port, http = free_port(), free_port()
    command = [sys.executable, "-c", "from lmcache.cli.main import main; main()", "server"]
    command += ["--l1-size-gb", str(int(scale.peer_gib)), "--no-l1-use-lazy", "--eviction-policy", "LRU"]
    command += ["--port", str(port), "--http-host", "127.0.0.1", "--http-port", str(http), "--disable-observability"]
    log = folder / "lmcache.log"
    with log.open("w") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=sink, start_new_session=True)
    try:
        wait_for_port(port, process, log)
        yield {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"lmcache.mp.host": "tcp://localhost", "lmcache.mp.port": port},
        }
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_port() -> int:
    """One on the loopback that nobody listens at."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def wait_for_port(port: int, process: subprocess.Popen[Any], log: Path) -> None:
    """Until somebody listens; raises RuntimeError with the log's end when the process ends or takes too long."""
    deadline = time.monotonic() + _STARTING
    while True:
        with socket.socket() as trial:
            if trial.connect_ex(("127.0.0.1", port)) == 0:
                return
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"nobody listens at port {port}:\n{log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.2)
