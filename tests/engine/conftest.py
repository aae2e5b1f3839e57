"""Fixtures for tests on a real vLLM engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

TINY = """{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "intermediate_size": 256,
"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512,
"max_position_embeddings": 1024}"""


def engine_environment(**extra: str) -> dict[str, str]:
    """Variables for a vLLM process on the CPU. Cores are set, because vLLM else reserves some for a connector."""
    cores = sorted(os.sched_getaffinity(0))
    return {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}-{cores[-1]}",
        "VLLM_LOGGING_LEVEL": "WARNING",
        **extra,
    }


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("vllm")
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(TINY)
    return folder


@pytest.fixture(scope="module")
def run_python() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start ``python ARGUMENTS`` in a process group that ends with the test."""
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: str, **environ: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=REPOSITORY,
            env=engine_environment(**environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
        process.wait(10)


def result_of(output: str) -> Any:
    """The JSON object behind RESULT in a scenario's output; fails with the output's end when there is none."""
    import json

    for line in reversed(output.splitlines()):
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    raise AssertionError("no result; the output ends with:\n" + output[-4000:])
