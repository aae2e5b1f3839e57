"""A vLLM engine that serves many requests at once, in a process of its own, and says when each token came.

Run as a program it is that process: arguments of vLLM's engine as one JSON argument, then a JSON request per line on
its input and a JSON reply per line on its output, as in :mod:`offline`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.engine_process import EngineProcess  # noqa: E402
from benchmarks.offline import BLOCK_TOKENS, cache_folder, end_engine  # noqa: E402

#: Settings of Maru with which nothing waits for it.
SETTINGS: Final = {"maru_async_load": True, "maru_async_store": True}
#: How long, in seconds, the engine may take to let go of its prefix cache: stores under way hold blocks.
FORGET = 10.0


@dataclass(frozen=True)
class Ask:
    """A request for exactly ``tokens`` new tokens.

    ``after``: not before that request has that many tokens. ``at``: nor before so many seconds since the run began.
    """

    prompt: Sequence[int]
    tokens: int = 1
    after: tuple[int, int] | None = None
    at: float = 0.0


@dataclass(frozen=True)
class Answer:
    """When the request was sent and when each token came, in seconds since the run began; ``cached`` in tokens."""

    sent: float
    times: Sequence[float]
    tokens: Sequence[int]
    cached: int

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.times[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        """Seconds from each token to the next."""
        return [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]

    @property
    def tpot(self) -> float:
        """Mean seconds per token after the first."""
        return (self.times[-1] - self.times[0]) / max(1, len(self.times) - 1)

    def gaps_between(self, begin: float, end: float) -> list[float]:
        """Those gaps that overlap with ``[begin, end]``."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return [later - earlier for earlier, later in pairs if later > begin and earlier < end]


@dataclass(frozen=True)
class Run:
    """Answers in the order of the requests, and seconds from the first sending to the last token.

    ``began``: by ``time.perf_counter``, which all processes of a machine share.
    """

    answers: Sequence[Answer]
    seconds: float
    began: float = 0.0


class OnlineEngine(EngineProcess):
    """Talks to the process."""

    def run(self, requests: Sequence[Ask], clients: int | None = None) -> Run:
        """Send all, in order, at most ``clients`` at a time, and wait for the last token."""
        asked = [asdict(one) | {"prompt": list(one.prompt)} for one in requests]
        reply = self._call({"run": asked, "clients": clients or len(asked)})
        return Run([Answer(**one) for one in reply["answers"]], reply["seconds"], reply["began"])

    def ask(self, prompt: Sequence[int], tokens: int = 1) -> Answer:
        """One request, alone."""
        return self.run([Ask(prompt, tokens)]).answers[0]

    def forget(self, *, connector: bool = False) -> None:
        """Empty the engine's own prefix cache, and the connector's only if asked."""
        self._call({"forget": connector})

    def rpc(self, method: str, *arguments: Any) -> Any:
        """What a method of the worker's extension returns, see ``worker_extension_cls``; of the first worker."""
        return self._call({"rpc": method, "arguments": arguments})["result"]

    def wait_until_ready(self) -> float:
        """Until the engine has started; how many seconds it took."""
        return float(self._read()["ready"])


def cpu_engine(model: Path, transfer: Mapping[str, Any] | None, *, eager: bool = False) -> dict[str, Any]:
    """Arguments of an engine on the CPU, as :mod:`offline` starts them."""
    return {
        "model": str(model),
        "skip_tokenizer_init": True,
        "max_model_len": 4096,
        "block_size": BLOCK_TOKENS,
        "enable_prefix_caching": True,
        "enforce_eager": eager,
        # Where it is on, vLLM cannot repair loads that fail inside a step, so that there would be none to compare with.
        "async_scheduling": False,
        "kv_transfer_config": transfer,
    }


def with_settings(transfer: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """A ``kv_transfer_config`` with more of Maru's settings."""
    extra = {**transfer["kv_connector_extra_config"], **settings}
    return {**transfer, "kv_connector_extra_config": extra}


def cpu_environment() -> dict[str, str]:
    """Variables of an engine on the CPU: all processors for every engine, as vLLM uses fewer with a connector."""
    return {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        "VLLM_CACHE_ROOT": str(cache_folder() / "vllm"),
    }


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """How the engines are set up."""
    parser.add_argument("--eager", action="store_true", help="do not compile the model: starts sooner")
    shown = json.dumps(SETTINGS)
    parser.add_argument(
        "--settings", type=json.loads, default=SETTINGS, metavar="JSON", help=f"of Maru (default {shown})"
    )


@contextmanager
def online_engine(
    name: str, folder: Path, arguments: Mapping[str, Any], environment: Mapping[str, str]
) -> Iterator[OnlineEngine]:
    """Start one with ``arguments`` of vLLM's engine; ends with the block. Its log goes to ``folder``.

    ``environment`` is added to this process's, of which no variable of Maru or vLLM is passed on.
    """
    log = folder / f"{name}.log"
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("MARU_", "VLLM_"))}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    fixed = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
    with log.open("w") as sink:
        process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(dict(arguments))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=sink,
            text=True,
            env=inherited | fixed | dict(environment),
            start_new_session=True,
        )
    engine = OnlineEngine(process, log)
    try:
        seconds = engine.wait_until_ready()
        print(f"{name}: the engine runs after {seconds:.0f} s", file=sys.stderr, flush=True)
        yield engine
    finally:
        engine.resume()
        end_engine(process)


@contextmanager
def engines_in_turn(folder: Path, arguments: Mapping[str, Mapping[str, Any]]) -> Iterator[dict[str, OnlineEngine]]:
    """Engines on the CPU by name, all stopped: who uses one resumes and pauses it. Ended with the block."""
    with ExitStack() as stack:
        engines = {}
        for number, (name, given) in enumerate(arguments.items()):
            engine = stack.enter_context(online_engine(f"engine-{number}", folder, given, cpu_environment()))
            engine.pause()
            engines[name] = engine
        yield engines


@contextmanager
def awake(engine: OnlineEngine) -> Iterator[OnlineEngine]:
    """One of these, which runs for as long as the block."""
    engine.resume()
    try:
        yield engine
    finally:
        engine.pause()


class Server:
    """The process's side: one asynchronous engine of vLLM."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        given = dict(arguments)
        transfer = given.pop("kv_transfer_config", None)
        if transfer is not None:
            given["kv_transfer_config"] = KVTransferConfig(**transfer)
        self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**given))
        self._asked = 0

    async def run(self, requests: Sequence[Mapping[str, Any]], clients: int) -> dict[str, Any]:
        """Serve ``requests`` by ``clients`` that each send the next one when they are done."""
        began = time.perf_counter()
        answers: list[dict[str, Any]] = [{"sent": 0.0, "times": [], "tokens": [], "cached": 0} for _ in requests]
        came = asyncio.Condition()
        waiting = iter(range(len(requests)))

        async def reached(other: int, count: int) -> None:
            async with came:
                await came.wait_for(lambda: len(answers[other]["times"]) >= count)

        async def client() -> None:
            for index in waiting:
                request, answer = requests[index], answers[index]
                if request["after"] is not None:
                    await reached(*request["after"])
                await asyncio.sleep(request["at"] - (time.perf_counter() - began))
                answer["sent"] = time.perf_counter() - began
                async for token, cached in self._tokens(request):
                    answer["times"].append(time.perf_counter() - began)
                    answer["tokens"].append(token)
                    answer["cached"] = cached
                    async with came:
                        came.notify_all()

        await asyncio.gather(*(client() for _ in range(clients)))
        return {"answers": answers, "seconds": time.perf_counter() - began, "began": began}

    async def _tokens(self, request: Mapping[str, Any]) -> AsyncIterator[tuple[int, int]]:
        """Each token and how many of the prompt's came from a cache."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._asked += 1
        count = request["tokens"]
        params = SamplingParams(
            temperature=0,
            max_tokens=count,
            min_tokens=count,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        cached = 0
        prompt = {"prompt_token_ids": request["prompt"]}
        async for output in self._engine.generate(prompt, params, request_id=f"request-{self._asked}"):
            cached = output.num_cached_tokens or cached
            for token in output.outputs[0].token_ids if output.outputs else ():
                yield token, cached

    async def forget(self, *, connector: bool) -> dict[str, Any]:
        """Empty the engine's prefix cache."""
        deadline = time.monotonic() + FORGET
        while not await self._engine.reset_prefix_cache(reset_connector=connector):
            if time.monotonic() > deadline:
                raise RuntimeError(f"vLLM did not reset its prefix cache within {FORGET:g} s")
            await asyncio.sleep(0.05)
        return {"forgotten": True}

    async def rpc(self, method: str, arguments: Sequence[Any]) -> dict[str, Any]:
        """Call a method of the worker's extension."""
        return {"result": (await self._engine.collective_rpc(method, args=tuple(arguments)))[0]}

    def close(self) -> None:
        """End the engine."""
        self._engine.shutdown()


async def serve(arguments: Mapping[str, Any]) -> None:
    """The process: one call after the other."""
    replies = os.fdopen(os.dup(1), "w")
    # Whatever else is printed is log.
    os.dup2(2, 1)
    began = time.monotonic()
    server = Server(arguments)
    loop = asyncio.get_running_loop()
    try:
        print(json.dumps({"ready": time.monotonic() - began}), file=replies, flush=True)
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            request = json.loads(line)
            if "run" in request:
                reply = await server.run(request["run"], request["clients"])
            elif "rpc" in request:
                reply = await server.rpc(request["rpc"], request["arguments"])
            else:
                reply = await server.forget(connector=request["forget"])
            print(json.dumps(reply), file=replies, flush=True)
    finally:
        server.close()


if __name__ == "__main__":
    asyncio.run(serve(json.loads(sys.argv[1])))
