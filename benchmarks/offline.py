"""A vLLM engine in a process of its own, which answers one prompt at a time and says how long it took.

Run as a program it is that process: options as one JSON argument, then a JSON request per line on its input and a JSON
reply per line on its output. An engine prints a lot, so its output proper goes where the starter says.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.engine_process import EngineProcess  # noqa: E402
from scripts.quickstart.processes import session_members  # noqa: E402
from scripts.quickstart.segments import mapped_segments, remove_segments  # noqa: E402

CHUNK_TOKENS = 256
BLOCK_TOKENS = 128
#: 12 chunks, and 8 tokens that are always left to compute.
PROMPT_TOKENS = 12 * CHUNK_TOKENS + 8


@dataclass(frozen=True)
class Timing:
    """One prompt with one new token. ``seconds`` from call to answer; ``cached`` in tokens."""

    seconds: float
    cached: int
    token: int


class OfflineEngine(EngineProcess):
    """Talks to the process."""

    def ask(self, prompt: Sequence[int]) -> Timing:
        """Compute one token after ``prompt``."""
        reply = self._call({"prompt": list(prompt)})
        return Timing(reply["seconds"], reply["cached"], reply["token"])

    def forget(self) -> None:
        """Empty the engine's own prefix cache; a connector's stays."""
        self._call({"forget": True})

    def wait_until_ready(self) -> None:
        """Until the engine has started."""
        self._read()


@contextmanager
def offline_engine(
    model: Path, name: str, folder: Path, transfer: Mapping[str, Any] | None = None, *, eager: bool = False
) -> Iterator[OfflineEngine]:
    """Start one, with ``transfer`` as its ``kv_transfer_config``; ends with the block. Its log goes to ``folder``."""
    log = folder / f"{name}.log"
    arguments = json.dumps({"model": str(model), "transfer": transfer, "eager": eager})
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MARU_", "VLLM_"))}
    environment |= {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # Unless told, vLLM uses fewer processors with a connector than without, which would fake differences.
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        "VLLM_CACHE_ROOT": str(cache_folder() / "vllm"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    with log.open("w") as sink:
        process = subprocess.Popen(
            [sys.executable, __file__, arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=sink,
            text=True,
            env=environment,
            start_new_session=True,
        )
    engine = OfflineEngine(process, log)
    try:
        engine.wait_until_ready()
        print(f"{name}: the engine runs", file=sys.stderr, flush=True)
        yield engine
    finally:
        engine.resume()
        end_engine(process)


def end_engine(process: subprocess.Popen[str]) -> None:
    """The end of its input is the end of the process; what it leaves of its session is ended and removed."""
    segments = mapped_segments(session_members(process.pid))
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(30)
    while pids := session_members(process.pid):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.poll()
        time.sleep(0.01)
    process.wait()
    remove_segments(segments)


@contextmanager
def maru_server(folder: Path, pool_size: str) -> Iterator[dict[str, Any]]:
    """A private server; yields the ``kv_transfer_config`` of engines that use it. Ends with the block."""
    runtime = folder / "maru"
    runtime.mkdir(mode=0o700)
    command = [sys.executable, "-m", "maru_core.cli", "serve", "--runtime-dir", str(runtime), "--pool-size", pool_size]
    log = folder / "maru-serve.log"
    with log.open("w") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=sink, cwd=ROOT)
    try:
        while not (runtime / "server.json").exists():
            if process.poll() is not None:
                raise RuntimeError(f"maru serve ended with exit code {process.returncode}:\n{log.read_text()}")
            time.sleep(0.05)
        yield {
            "kv_connector": "MaruKVConnector",
            "kv_connector_module_path": "maru_integrations.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "maru_server_url": f"ipc://{runtime}/server.sock",
                "maru_runtime_dir": str(runtime),
                "maru_kv_chunk_tokens": CHUNK_TOKENS,
            },
        }
    finally:
        process.terminate()
        process.wait(30)


def cache_folder() -> Path:
    """Where compiled models and the like are kept between runs."""
    return Path(os.environ.get("MARU_CACHE") or ROOT / ".cache").absolute()


def prepared_model() -> Path:
    """The model's folder; made the first time."""
    command = [sys.executable, str(ROOT / "scripts/prepare_model.py")]
    return Path(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip())


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder for sockets and logs with a short path, gone with the block."""
    with tempfile.TemporaryDirectory(prefix="maru-bench-", dir="/tmp") as folder:
        yield Path(folder)


def random_prompt(seed: int) -> list[int]:
    """Tokens that no other seed shares a chunk with."""
    rng = random.Random(seed)
    return [rng.randrange(1000, 40_000) for _ in range(PROMPT_TOKENS)]


def serve(options: Mapping[str, Any]) -> None:
    """The process: one engine, one request after the other."""
    replies = os.fdopen(os.dup(1), "w")
    # Whatever else is printed is log.
    os.dup2(2, 1)
    from vllm import LLM, SamplingParams

    more = {} if options["transfer"] is None else {"kv_transfer_config": options["transfer"]}
    llm = LLM(
        model=options["model"],
        max_model_len=4096,
        block_size=BLOCK_TOKENS,
        enable_prefix_caching=True,
        enforce_eager=options["eager"],
        **more,
    )
    one_token = SamplingParams(temperature=0, max_tokens=1)

    def reply(**values: Any) -> None:
        print(json.dumps(values), file=replies, flush=True)

    reply(ready=True)
    for line in sys.stdin:
        request = json.loads(line)
        if request.get("forget"):
            if not llm.reset_prefix_cache():
                raise RuntimeError("vLLM did not reset its prefix cache")
            reply(forgotten=True)
            continue
        start = time.perf_counter()
        (output,) = llm.generate({"prompt_token_ids": request["prompt"]}, one_token, use_tqdm=False)
        seconds = time.perf_counter() - start
        reply(seconds=seconds, cached=output.num_cached_tokens or 0, token=output.outputs[0].token_ids[0])


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
