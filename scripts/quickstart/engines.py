"""Commands and environments of what the quickstart starts."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

#: Tokens per stored chunk and per block of vLLM's CPU engine.
CHUNK_TOKENS = 256
BLOCK_TOKENS = 128
MAX_MODEL_LEN = 4096
POOL_SIZE = "512M"
POOL_BYTES = 512 << 20
MODEL_NAME = "smollm2"


@dataclass(frozen=True)
class Place:
    """Where this run keeps things. All paths absolute."""

    root: Path
    python: str
    logs: Path
    #: Runtime folder of the Maru server, of this run alone.
    runtime: Path
    pools: Path
    cpus: str


def usable_cpus() -> str:
    """Every processor that we may use, as vLLM's binding wants them named."""
    return ",".join(map(str, sorted(os.sched_getaffinity(0))))


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def connector(place: Place) -> dict[str, object]:
    """vLLM's ``kv_transfer_config`` for an engine that shares the pool of this run."""
    return {
        "kv_connector": "MaruKVConnector",
        "kv_connector_module_path": "maru_integrations.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "maru_server_url": f"ipc://{place.runtime}/server.sock",
            "maru_runtime_dir": str(place.runtime),
            "maru_kv_chunk_tokens": CHUNK_TOKENS,
            # Two engines and the server may share two cores here, so give a lookup more time than on a real host.
            "maru_lookup_timeout": 5,
        },
    }


def engine_command(place: Place, model: str, port: int, transfer: Mapping[str, object] | None) -> list[str]:
    """An OpenAI-compatible server on the CPU; ``transfer`` is its only difference between with and without Maru."""
    command = [place.python, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--model", model, "--served-model-name", MODEL_NAME, "--max-model-len", str(MAX_MODEL_LEN)]
    command += ["--block-size", str(BLOCK_TOKENS), "--enable-prefix-caching", "--enable-prompt-tokens-details"]
    # Compiling the model would take minutes on a fresh machine and make a prompt no faster here.
    command += ["--enforce-eager"]
    if transfer is not None:
        command += ["--kv-transfer-config", json.dumps(transfer)]
    return command


def engine_environment(place: Place) -> dict[str, str]:
    """Equal for every engine: the same processors, 1 GiB of KV cache, no network."""
    return base_environment(place) | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": place.cpus,
        # For /reset_prefix_cache, with which an engine forgets what it computed itself.
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def base_environment(place: Place) -> dict[str, str]:
    """The caller's, less settings for other servers; this checkout's code."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MARU_", "VLLM_"))}
    paths = [str(place.root), *filter(None, [os.environ.get("PYTHONPATH")])]
    return kept | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


def server_command(place: Place) -> list[str]:
    """``maru serve`` on the private runtime folder."""
    where = ["--runtime-dir", str(place.runtime), "--pool-path", str(place.pools), "--pool-size", POOL_SIZE]
    return [place.python, "-m", "maru_core.cli", "serve", *where]


def status_command(place: Place) -> list[str]:
    """``maru status`` of that server."""
    return [place.python, "-m", "maru_core.cli", "status", "--runtime-dir", str(place.runtime), "--json"]
