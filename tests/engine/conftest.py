"""Fixtures for tests on a real vLLM engine."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from scripts.quickstart.processes import session_members
from scripts.quickstart.segments import mapped_segments, remove_segments

REPOSITORY = Path(__file__).resolve().parents[2]

TINY = """{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "intermediate_size": 256,
"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512,
"max_position_embeddings": 1024}"""


#: An engine in one process. A tiny model is computed by one thread: where other programs keep the processors busy, two
#: would wait for each other at every layer.
IN_PROCESS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}


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
    write_weights(folder)
    return folder


def write_weights(folder: Path) -> None:
    """Random weights for TINY, so large that an answer depends on the KV of what came before.

    With the small ones that vLLM makes up itself it hardly does, and wrong KV would go unnoticed.
    """
    import numpy
    from safetensors.numpy import save_file

    size: dict[str, tuple[int, ...]] = {"model.embed_tokens": (512, 128), "lm_head": (512, 128), "model.norm": (128,)}
    for layer in range(3):
        name = f"model.layers.{layer}"
        size |= {f"{name}.{norm}_layernorm": (128,) for norm in ("input", "post_attention")}
        size |= {f"{name}.self_attn.{part}_proj": (128, 128) for part in "qo"}
        size |= {f"{name}.self_attn.{part}_proj": (64, 128) for part in "kv"}
        size |= {f"{name}.mlp.{part}_proj": (256, 128) for part in ("gate", "up")}
        size |= {f"{name}.mlp.down_proj": (128, 256)}
    random = numpy.random.default_rng(1)
    weights = {
        f"{name}.weight": numpy.ones(shape, numpy.float32)
        if len(shape) == 1
        else random.normal(0, 0.2, shape).astype(numpy.float32)
        for name, shape in size.items()
    }
    save_file(weights, folder / "model.safetensors")


def spawn(*arguments: str, **environ: str) -> subprocess.Popen[str]:
    """``python ARGUMENTS`` in a session of its own, so that :func:`end` reaches what it starts."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=REPOSITORY,
        env=engine_environment(**environ),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def end(process: subprocess.Popen[str], reader: threading.Thread | None = None) -> None:
    """Kill the process and all of its session, remove the shared memory that they leave, and close the pipes."""
    members = session_members(process.pid)
    segments = mapped_segments(members)
    for pid in (process.pid, *members):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait(10)
    remove_segments(segments)
    if reader is not None:
        reader.join(10)
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        with suppress(BrokenPipeError):
            stream.close()


class Served:
    """An engine that runs :mod:`tests.engine.served`; ``ask`` waits for its answer."""

    def __init__(self, model: Path, connector: dict[str, Any] | None) -> None:
        self.process = spawn("-m", "tests.engine.served", str(model), json.dumps(connector))
        self._lines: queue.Queue[str] = queue.Queue()
        self._tail: list[str] = []
        self._notes: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("RESULT "):
                self._lines.put(line.removeprefix("RESULT "))
            else:
                self._tail = [*self._tail[-60:], line]
                if "maru" in line:
                    self._notes.append(line)
        self._lines.put("")

    @property
    def notes(self) -> str:
        """What the engine has said about Maru so far."""
        return "\n" + "".join(self._notes)

    def result(self, within: float = 300) -> Any:
        """The next answer; fails with the engine's last lines when it ended instead."""
        line = self._lines.get(timeout=within)
        assert line, "the engine ended:\n" + "".join(self._tail)
        return json.loads(line)

    def send(self, *prompts: list[int], tokens: int = 12, forget: bool = False) -> None:
        """Ask without waiting. ``forget``: empty vLLM's own prefix cache first."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompts": prompts, "tokens": tokens, "forget": forget}) + "\n")
        self.process.stdin.flush()

    def ask(self, *prompts: list[int], tokens: int = 12, forget: bool = False) -> Any:
        """Ask and wait."""
        self.send(*prompts, tokens=tokens, forget=forget)
        return self.result()

    def close(self) -> None:
        """End the engine, at once."""
        end(self.process, self._reader)


@pytest.fixture(scope="module")
def serve() -> Iterator[Callable[..., Served]]:
    """``serve(model, connector)`` starts an engine that ends with the module's tests."""
    started: list[Served] = []

    def start(model: Path, connector: dict[str, Any] | None) -> Served:
        started.append(Served(model, connector))
        return started[-1]

    yield start
    for engine in started:
        engine.close()


def result_of(output: str) -> Any:
    """The JSON object behind RESULT in a scenario's output; fails with the output's end when there is none."""
    for line in reversed(output.splitlines()):
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    raise AssertionError("no result; the output ends with:\n" + output[-4000:])
