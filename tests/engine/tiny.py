"""One real vLLM engine, in this process, on a tiny random model: scenarios that need a hand inside the engine.

Run by ``test_tiny_engine.py`` as ``python -m tests.engine.tiny MODEL RUNTIME_DIR [OPTIONS [SETTINGS SCENARIO…]]``;
prints one JSON object. OPTIONS is a JSON object of arguments for vLLM's ``LLM``, such as ``{"dtype": "bfloat16"}`` on a
GPU, SETTINGS one of Maru's. In-process
(``uni`` executor, no engine-core process), so that a scenario can change the step size, look into pages, and abort
between the dispatch of a step and its result.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from tests.vllm.steps import change_settings

BLOCK = 32
CHUNK = 64
VOCAB = 512


def prompt(length: int, seed: int) -> list[int]:
    """Token ids that no other seed shares a chunk with."""
    return [(seed * 7919 + index * 31 + index * index % 17) % VOCAB for index in range(length)]


class Tiny:
    """The engine, and shortcuts into it."""

    def __init__(self, model: str, connector: dict[str, Any], options: dict[str, Any]) -> None:
        from vllm import LLM

        settings: dict[str, Any] = {
            "load_format": "auto" if list(Path(model).glob("*.safetensors")) else "dummy",
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 1024,
            "block_size": BLOCK,
            "num_gpu_blocks_override": 40,
            "max_num_batched_tokens": 512,
            "max_num_seqs": 8,
            # Not "uni": vLLM 0.22 makes a process of its own of that on the CPU.
            "distributed_executor_backend": "benchmarks.one_process.OneProcess",
            "disable_log_stats": False,
            "kv_transfer_config": {
                "kv_connector": "MaruKVConnector",
                "kv_connector_module_path": "maru_integrations.vllm",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"maru_kv_chunk_tokens": CHUNK, **connector},
            },
        }
        self.llm = LLM(model=model, **{**settings, **options})
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        #: Tokens that vLLM took from Maru. Its own figure lacks, up to some version, those of steps without an answer.
        self.hits = 0
        allocated = self.side.update_state_after_alloc

        def counted(request: Any, blocks: Any, external: int) -> None:
            self.hits += external
            allocated(request, blocks, external)

        self.side.update_state_after_alloc = counted
        #: Loads that failed, for the same reason.
        self.failed_loads = 0
        side = self.side._scheduler
        if side is not None:
            count = side._stats.count

            def noted(name: str, amount: float = 1, reason: str = "") -> None:
                self.failed_loads += name == "loads_failed"
                count(name, amount, reason)

            side._stats.count = noted

    def close(self) -> None:
        """End the engine, so that this process can start another one."""
        from vllm.distributed import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        del self.llm, self.core, self.scheduler
        cleanup_dist_env_and_memory()

    @property
    def side(self) -> Any:
        return self.scheduler.connector

    @property
    def worker(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()

    @property
    def handler(self) -> Any:
        return self.side._scheduler._handler

    def ask(self, *prompts: list[int], tokens: int = 8) -> list[Any]:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        return self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)

    def answer(self, ids: list[int], tokens: int = 8) -> list[int]:
        return list(self.ask(ids, tokens=tokens)[0].outputs[0].token_ids)

    def learn(self, *prompts: list[int]) -> list[list[int]]:
        """Answers of prompts asked one by one, all of whose whole chunks can be found afterwards.

        One by one, because what the saver is too slow for is dropped.
        """
        answers = []
        for ids in prompts:
            answers.append(self.answer(ids))
            self.quiet()
            self.stored(ids, len(ids) // CHUNK)
        return answers

    def warm(self, *prompts: list[int]) -> dict[str, Any]:
        """Answers of prompts asked together without vLLM's own prefix cache, and how many tokens of each were cached.

        ``skipped``: hits that were left out because computing was expected to be quicker.
        """
        self.forget()
        skipped = self.metric("vllm:maru_loads_skipped")
        requests = self.ask(*prompts)
        self.quiet()
        return {
            "answers": [list(request.outputs[0].token_ids) for request in requests],
            "cached": [request.num_cached_tokens for request in requests],
            "skipped": self.metric("vllm:maru_loads_skipped") - skipped,
        }

    def quiet(self, seconds: float = 30) -> None:
        """Step until nothing is under way."""
        deadline = time.monotonic() + seconds
        while self.scheduler.has_requests() and time.monotonic() < deadline:
            self.llm.llm_engine.step()
            time.sleep(0.001)
        assert not len(self.side._scheduler._loads)

    def stored(self, ids: list[int], chunks: int, seconds: float = 30) -> float:
        """Chunks that are there once the saver has had time to write them."""
        deadline = time.monotonic() + seconds
        objects = self.side._plan.objects_per_chunk
        while self.present(ids) < chunks * objects and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.present(ids) / objects

    def forget(self) -> None:
        """Empty vLLM's own prefix cache, not Maru's."""
        self.quiet()
        assert self.llm.reset_prefix_cache()

    def metric(self, name: str) -> float:
        return float(sum(item.value for item in self.llm.get_metrics() if item.name == name))

    def free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def keys(self, ids: list[int]) -> list[bytes]:
        from maru_core.keys import KeyChain

        plan = self.side._plan
        chain = KeyChain(plan.namespace.root, CHUNK, objects_per_chunk=plan.objects_per_chunk)
        chunks = len(ids) // CHUNK
        chain.extend(ids, chunks * CHUNK)
        return chain.object_keys(0, chunks)

    def present(self, ids: list[int]) -> int:
        return sum(status == 1 for status in self.handler.probe(self.keys(ids)))

    def layers(self, ids: list[int]) -> list[list[str]]:
        """A digest of each layer of each stored chunk, K then V, whatever the format."""
        import numpy

        count = len(self.side._plan.geometry.layer_names)
        objects = self.objects(ids)
        if self.side._plan.objects_per_chunk == 1:
            planes = [numpy.frombuffer(data, numpy.uint8).reshape(2, count, -1) for data in objects]
            objects = [plane[:, layer].tobytes() for plane in planes for layer in range(count)]
        digests = [hashlib.blake2b(data).hexdigest() for data in objects]
        return [digests[first : first + count] for first in range(0, len(digests), count)]

    def leased(self) -> int:
        """Bytes under lease once what is on its way back has had a second to arrive."""
        deadline = time.monotonic() + 1
        while (held := sum(pool["leased"] for pool in self.pools())) and time.monotonic() < deadline:
            time.sleep(0.02)
        return held

    def pools(self) -> list[dict[str, Any]]:
        """What the server says of its pools."""
        return list(self.handler.server_stats()["pools"])

    def objects(self, ids: list[int]) -> list[bytes]:
        """Bytes of the stored chunks, read under a lease."""
        lease = self.handler.acquire(self.keys(ids), leading=True)
        found = [
            bytes(self.handler.view(lease.epoch, lease.entries[index], lease.lengths[index]))
            for index in range(lease.leading)
        ]
        self.handler.release(lease)
        return found

    def always_loading(self) -> AbstractContextManager[None]:
        """Load every hit, even if computing it is expected to be quicker."""
        return self.patched(
            type(self.side._scheduler._promises), "_is_worth_it", lambda judge: lambda promises, state, tokens: True
        )

    @contextmanager
    def settings(self, **changes: Any) -> Iterator[None]:
        """Other settings of the scheduler side, for a while."""
        side = self.side._scheduler
        former = {name: getattr(side._promises.settings, name) for name in changes}
        change_settings(side, **changes)
        try:
            yield
        finally:
            change_settings(side, **former)

    def torn(self) -> AbstractContextManager[None]:
        """Pages that a load did not fill hold garbage, as they do after a copy that was stopped in the middle."""
        worker = self.worker._worker
        link, shape = worker._link, worker._shape

        def tear(tell: Callable[..., None]) -> Any:
            def run(op: Any, good: int, failed: Any, reason: str = "") -> None:
                from maru_integrations.vllm.copies import chunks_of, load_copies

                if failed:
                    chunks = range(good // shape.objects, chunks_of(op, shape))
                    garbage = memoryview(bytearray(b"\x3f" * link.stored.nbytes))
                    many = [garbage] * len(shape.objects_of(chunks))
                    link.transfer.load(op.blocks, load_copies(op, shape, chunks, many))
                tell(op, good, failed, reason)

            return run

        return self.patched(worker._answers, "load_ended", tear)

    @contextmanager
    def patched(self, owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
        original = getattr(owner, name)
        setattr(owner, name, make(original))
        try:
            yield
        finally:
            setattr(owner, name, original)


def step_sizes(tiny: Tiny) -> dict[str, Any]:
    """The same prompt, prefilled in steps of several sizes: the same objects, each time from an empty store."""
    ids, out = prompt(330, 1), {}
    for size in (512, 200, 100, 64, 33):
        tiny.scheduler.max_num_scheduled_tokens = size
        tiny.forget()
        tiny.side.reset_cache()
        (answer,) = tiny.learn(ids)
        present = tiny.present(ids) / tiny.side._plan.objects_per_chunk
        out[size] = {"answer": answer, "present": present, "warm": tiny.warm(ids)}
    tiny.scheduler.max_num_scheduled_tokens = 512
    return out


def full_prompts(tiny: Tiny) -> dict[str, Any]:
    """Prompts that are whole chunks: one block is left to compute, and the answers are the same."""
    out = {}
    for length in (64, 128, 512):
        ids = prompt(length, length)
        (cold,) = tiny.learn(ids)
        out[length] = {"cold": cold, "warm": tiny.warm(ids)}
    return out


def preemption(tiny: Tiny, tokens: int = 150) -> dict[str, Any]:
    """More requests than the cache can hold: vLLM preempts, and the resumed ones hit."""
    prompts = [prompt(200, 100 + seed) for seed in range(8)]
    before = tiny.metric("vllm:num_preemptions")
    resumed: list[int] = []

    def noting(match: Any) -> Any:
        def run(request: Any, local: int) -> Any:
            answer = match(request, local)
            if request.num_preemptions and answer[0]:
                resumed.append(answer[0])
            return answer

        return run

    with tiny.patched(tiny.side._scheduler, "match", noting):
        together = [list(item.outputs[0].token_ids) for item in tiny.ask(*prompts, tokens=tokens)]
    preemptions = tiny.metric("vllm:num_preemptions") - before
    tiny.forget()
    tiny.side.reset_cache()
    alone = [tiny.answer(ids, tokens=tokens) for ids in prompts]
    tiny.quiet()
    return {
        "preemptions": preemptions,
        "resumed_with": resumed,
        "same": [first == second for first, second in zip(together, alone, strict=True)],
        "leased": tiny.leased(),
        "free": tiny.free_blocks(),
    }


def failed_load(tiny: Tiny) -> dict[str, Any]:
    """The bytes turn out to be another object's: recomputed, and nothing computed on them is stored."""
    ids = prompt(300, 50)
    cold = tiny.answer(ids)
    good = tiny.objects(ids)
    longer = ids + prompt(100, 51)
    tiny.forget()
    expected = tiny.answer(longer)
    expected_objects = tiny.objects(longer)
    tiny.forget()
    tiny.side.reset_cache()
    tiny.answer(ids)
    tiny.forget()
    from maru_core.client import Located

    garbage: list[Any] = []

    def failing(verify: Any) -> Any:
        def run(located: Any) -> list[bool]:
            verify(located)
            for index in range(len(located.entries)):
                garbage.append((located.view(index), bytes(located.view(index))))
            return [False] * len(located.entries)

        return run

    def poisoned_copy(load: Any) -> Any:
        def run(blocks: Any, copies: Any) -> None:
            saved = [(copy.buffer, bytes(copy.buffer)) for copy in copies]
            for buffer, data in saved:
                buffer[:] = b"\x3f" * len(data)
            load(blocks, copies)
            for buffer, data in saved:
                buffer[:] = data

        return run

    transfer = tiny.worker._worker._link.transfer
    with tiny.patched(Located, "check", failing), tiny.patched(transfer, "load", poisoned_copy):
        answer = tiny.answer(longer)
    stored = tiny.objects(longer)
    return {
        "cold": cold,
        "expected": expected,
        "answer": answer,
        "tried": len(garbage),
        "objects": len(stored),
        "close": [_close(first, second) for first, second in zip(stored, expected_objects, strict=True)],
        "prefix_same": [first == second for first, second in zip(stored, good, strict=False)],
        "leased": tiny.leased(),
    }


def aborted_load(tiny: Tiny) -> dict[str, Any]:
    """The abort arrives while the loading step runs, and that load fails: nothing of it is left in vLLM's cache."""
    ids = prompt(300, 60)
    (cold,) = tiny.learn(ids)
    tiny.forget()
    free = tiny.free_blocks()
    from maru_core.client import Located

    running: list[str] = []

    def aborting(start: Any) -> Any:
        def run(context: Any, **extra: Any) -> None:
            start(context, **extra)
            metadata = tiny.worker._metadata()
            if metadata is not None and metadata.loads:
                running.append(metadata.loads[0].request_id)
                tiny.core.aborts_queue.put_nowait([metadata.loads[0].request_id])

        return run

    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    with (
        tiny.always_loading(),
        tiny.patched(tiny.worker, "start_load_kv", aborting),
        tiny.patched(Located, "check", lambda check: lambda located: [False] * len(located.entries)),
        tiny.patched(
            tiny.worker._worker._link.transfer,
            "load",
            lambda load: lambda blocks, copies: [copy.buffer[:0] for copy in copies],
        ),
    ):
        tiny.llm.llm_engine.add_request("victim", {"prompt_token_ids": ids}, params)
        for _ in range(200):
            tiny.llm.llm_engine.step()
            if running:
                break
        tiny.llm.llm_engine.abort_request(["victim"])
        tiny.llm.llm_engine.step()
        tiny.quiet()
    tiny.forget()
    after = tiny.free_blocks()
    # Without Maru's help now: what is in vLLM's own prefix cache must be right.
    with tiny.patched(tiny.side._scheduler, "match", lambda match: lambda request, local: (0, False)):
        answer = tiny.answer(ids)
    return {
        "aborted": running,
        "cold": cold,
        "answer": answer,
        "free": [free, after],
        "leased": tiny.leased(),
        "states": len(tiny.side._scheduler._states),
    }


def parked(tiny: Tiny) -> dict[str, Any]:
    """Hits that are parked and loaded between steps, as under asynchronous scheduling; with and without failure."""
    from maru_core.client import Located

    with tiny.settings(parks=True):
        prompts = [prompt(300, 70 + seed) for seed in range(3)]
        cold = tiny.learn(*prompts)
        warm = tiny.warm(*prompts)
        with tiny.torn(), tiny.patched(Located, "check", lambda check: lambda located: [False] * len(located.entries)):
            failed = tiny.warm(*prompts)
    return {
        "cold": cold,
        "warm": warm,
        "failed": failed,
        "leased": tiny.leased(),
        "parked": tiny.side._scheduler._parking.admitted,
    }


def reset(tiny: Tiny) -> dict[str, Any]:
    """vLLM's reset with the connector flag empties Maru's namespace."""
    ids = prompt(300, 80)
    tiny.learn(ids)
    before = tiny.present(ids) / tiny.side._plan.objects_per_chunk
    done = tiny.llm.llm_engine.reset_prefix_cache(reset_connector=True)
    return {"before": before, "done": done, "present": tiny.present(ids), "warm": tiny.warm(ids)}


def tiers(tiny: Tiny) -> dict[str, Any]:
    """More than the first pool holds: what was used least is in the second one, and everything is found again."""
    prompts = [prompt(300, 200 + seed) for seed in range(10)]

    def in_turn(what: Callable[[list[int]], Any]) -> list[Any]:
        """One after the other: what is read at a time is a share of the pools, and these are small."""
        return [(what(ids), tiny.leased())[0] for ids in prompts]

    cold = in_turn(tiny.answer)
    stored = in_turn(tiny.objects)
    deadline = time.monotonic() + 5
    while any(pool["moving"] for pool in tiny.pools()) and time.monotonic() < deadline:
        time.sleep(0.02)
    moved = in_turn(tiny.objects)
    tiny.forget()
    before = tiny.hits
    warm = in_turn(tiny.answer)
    return {
        "cold": cold,
        "warm": warm,
        "hits": tiny.hits - before,
        "same": stored == moved,
        "found": [len(objects) for objects in moved],
        "pools": tiny.pools(),
        "leased": tiny.leased(),
    }


def one_prompt(tiny: Tiny) -> dict[str, Any]:
    """What this engine answers to a prompt, what it found in the pool before, and what lies there afterwards."""
    ids = prompt(300, 90)
    answer = tiny.answer(ids)
    return {
        "answer": answer,
        "hits": tiny.hits,
        "objects": len(tiny.objects(ids)),
        "layers": tiny.layers(ids),
        "leased": tiny.leased(),
    }


def figures(tiny: Tiny) -> dict[str, Any]:
    """A cold prompt and the same one warm, and what vLLM's metrics say of it."""
    ids = prompt(300, 91)
    (cold,) = tiny.learn(ids)
    warm = tiny.warm(ids)
    tiny.answer(ids)  # figures of a step are told with the next one
    tiny.quiet()
    names = {item.name for item in tiny.llm.get_metrics() if item.name.startswith("vllm:maru_")}
    return {
        "cold": cold,
        "warm": warm,
        "metrics": {name.removeprefix("vllm:maru_"): tiny.metric(name) for name in sorted(names)},
        "leased": tiny.leased(),
        "free": tiny.free_blocks(),
    }


def worth(tiny: Tiny) -> dict[str, Any]:
    """The same hit over a link that is much slower, then much quicker than computing."""
    judge = tiny.side._scheduler._worth
    ids = prompt(300, 92)
    (cold,) = tiny.learn(ids)
    out = {"cold": cold}
    for name, rate in (("slow", 1.0), ("quick", 1e12)):
        judge.prefill.rate = 1e4
        with (
            tiny.patched(judge.link, "rate", lambda _, rate=rate: rate),
            tiny.patched(judge.link, "_measured", lambda _: float("inf")),
            tiny.patched(judge.prefill, "_measured", lambda _: float("inf")),
        ):
            out[name] = tiny.warm(ids)
    return out


def _close(first: bytes, second: bytes) -> bool:
    import numpy

    pair = [numpy.frombuffer(data, dtype=numpy.float32) for data in (first, second)]
    return bool(numpy.allclose(*pair, rtol=1e-3, atol=1e-4))


SCENARIOS = (step_sizes, full_prompts, preemption, failed_load, aborted_load, parked, reset)


def run(tiny: Tiny, scenarios: Iterable[Callable[[Tiny], dict[str, Any]]]) -> dict[str, Any]:
    """Run the scenarios; what one raises is its result, so that the others still count."""
    results: dict[str, Any] = {}
    for scenario in scenarios:
        try:
            tiny.forget()
            results[scenario.__name__] = scenario(tiny)
        except Exception:  # noqa: BLE001 - reported as the scenario's result
            results[scenario.__name__] = {"error": traceback.format_exc()}
    results["caught"] = {**tiny.side._guard.caught, **tiny.worker._guard.caught}
    return results


def common(runtime: str) -> dict[str, Any]:
    """Settings of Maru for every engine here: a small pool, and a server of its own that ends with it."""
    return {"maru_pool_size": "64M", "maru_runtime_dir": runtime, "maru_idle_exit": 2, "maru_lookup_timeout": 10}


def main() -> None:
    """Run every scenario, or those that are named."""
    from tests.engine import between_steps

    model, runtime, options, settings, *names = [*sys.argv[1:], "{}", "{}"][: max(4, len(sys.argv) - 1)]
    tiny = Tiny(model, {**common(runtime), **json.loads(settings)}, json.loads(options))
    chosen = [globals().get(name) or getattr(between_steps, name) for name in names] or SCENARIOS
    print("RESULT " + json.dumps(run(tiny, chosen)))


if __name__ == "__main__":
    main()
