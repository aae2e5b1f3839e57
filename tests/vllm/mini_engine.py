"""vLLM's real scheduler and both sides of our connector, around a model whose KV can be checked.

The "model" writes, for every token, KV that depends on all tokens up to it, and before it computes it reads what it
attends to. What it reads wrong poisons what it writes and what it samples, exactly as a real model would, so a test
can demand: no poison in an answer, none in the store, none left in a block that can be reused.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from attrs import define, field
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from maru_core.geometry import ObjectLayout, PagedLayout, PlaneStrides
from maru_integrations.vllm import compat, setup
from maru_integrations.vllm.answers import Answers
from maru_integrations.vllm.connector import MaruKVConnector
from maru_integrations.vllm.copies import ChunkShape
from maru_integrations.vllm.moving import Link
from maru_integrations.vllm.worker import MaruWorker, Threads
from maru_transfer.torch_copy import TorchCopyEngine
from tests.vllm.fake_store import FakeHandler, FakeStore
from tests.waiting import NEVER

BLOCK = 16
CHUNK = 32
LAYERS, HEADS, SIZE = 2, 2, 4
VOCAB = 1000
POISON = 999
#: No model writes this.
GARBAGE = -1
#: Up to 0.30 vLLM calls ``wait_for_save`` in steps with a forward pass only.
SAVES_IN_EMPTY_STEPS = "wait_for_save" not in signature(KVConnectorModelRunnerMixin._get_kv_connector_output).parameters


def chain(tokens: Sequence[int]) -> list[int]:
    """For each position a number that depends on all tokens up to it."""
    value, out = 1469598103934665603, []
    for token in tokens:
        value = ((value ^ (token + 1)) * 1099511628211) % (1 << 61)
        out.append(value)
    return out


def kv_of(value: int) -> torch.Tensor:
    """KV of one token, ``[2, layers, hidden]`` int16."""
    count = 2 * LAYERS * HEADS * SIZE
    return ((torch.arange(count) * 31 + value % 30011) % 32000).to(torch.int16).view(2, LAYERS, HEADS * SIZE)


def kv_of_all(values: Sequence[int]) -> torch.Tensor:
    """:func:`kv_of` for several tokens, ``[tokens, 2, layers, hidden]``."""
    count = 2 * LAYERS * HEADS * SIZE
    seeds = torch.tensor([value % 30011 for value in values], dtype=torch.int64)
    return ((torch.arange(count) * 31 + seeds[:, None]) % 32000).to(torch.int16).view(-1, 2, LAYERS, HEADS * SIZE)


def sample(value: int) -> int:
    """The token that follows a position; never POISON."""
    return value % POISON


def reference(prompt: Sequence[int], count: int) -> list[int]:
    """What a correct engine answers."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(sample(chain(tokens)[-1]))
    return tokens[len(prompt) :]


def write_model(folder: Path) -> str:
    """A model folder that vLLM's configuration accepts."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HEADS * SIZE * 2,
        "intermediate_size": 32,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS * 2,
        "num_key_value_heads": HEADS,
        "vocab_size": VOCAB,
        "max_position_embeddings": 4096,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@define
class Engine:
    """One engine: ``step()`` does what EngineCore does in one iteration."""

    scheduler: Scheduler
    side: MaruKVConnector
    worker: MaruKVConnector
    store: FakeStore
    caches: list[torch.Tensor]
    hasher: Any
    answers: dict[str, list[int]] = field(factory=dict)
    poisoned: set[str] = field(factory=set)
    tables: dict[str, list[int]] = field(factory=dict)
    #: Runs between the worker's results and the scheduler's look at them, as vLLM's abort queue does.
    between: Callable[[], None] | None = None
    preemptions: int = 0
    #: Finished requests whose blocks vLLM keeps for us.
    held: set[str] = field(factory=set)
    #: External tokens that vLLM took, by request.
    external: dict[str, int] = field(factory=dict)
    #: Whether each layer's hook is called, as it is not where vLLM replays one graph of the whole model.
    hooks: bool = True
    #: A step is planned and run before vLLM sees the results of the one before.
    ahead: bool = False
    unseen: tuple[Any, ModelRunnerOutput] | None = None
    #: With that, tokens of running requests as the worker knows them.
    texts: dict[str, list[int]] = field(factory=dict)
    names: list[str] = field(factory=list)
    #: The worker has threads of its own.
    threads: bool = False

    def add(self, name: str, prompt: Sequence[int], max_tokens: int = 3, **fields: Any) -> Request:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = Request(
            request_id=name,
            prompt_token_ids=list(prompt),
            sampling_params=params,
            pooling_params=None,
            block_hasher=self.hasher,
            **fields,
        )
        self.answers[name] = []
        self.scheduler.add_request(request)
        return request

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self) -> Any:
        output = self.scheduler.schedule()
        self.preemptions += len(output.preempted_req_ids or ())
        metadata = output.kv_connector_metadata
        worker = self.worker
        worker.handle_preemptions(metadata)
        hooks = self.hooks and bool(output.num_scheduled_tokens)
        runs_layer_hooks, compat.runs_layer_hooks = compat.runs_layer_hooks, lambda: hooks
        try:
            worker.bind_connector_metadata(metadata)
        finally:
            compat.runs_layer_hooks = runs_layer_hooks
        if not output.num_scheduled_tokens:
            time.sleep(0.001)  # as EngineCore does
        # Up to 0.28 vLLM starts loads before the forward pass whatever they are.
        sync = getattr(output, "has_sync_kv_loads", True)
        if sync:
            worker.start_load_kv(None)
        tokens = self._forward(output, hooks)
        if not sync:
            worker.start_load_kv(None)
        if output.num_scheduled_tokens or SAVES_IN_EMPTY_STEPS:
            worker.wait_for_save()
        sent, received = worker.get_finished(output.finished_req_ids)
        connector_output = KVConnectorOutput(
            finished_sending=sent,
            finished_recving=received,
            invalid_block_ids=worker.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )
        worker.clear_connector_metadata()
        ids = list(output.num_scheduled_tokens)
        if self.between is not None:
            self.between()
            self.between = None
        reply = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={name: index for index, name in enumerate(ids)},
            sampled_token_ids=[tokens[name] for name in ids],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
            kv_connector_output=connector_output,
        )
        if self.ahead:
            seen, self.unseen = self.unseen, (output, reply)
        else:
            seen = (output, reply)
        if seen is not None:
            for per_client in self.scheduler.update_from_output(*seen).values():
                for item in per_client.outputs:
                    self.answers[item.request_id] += item.new_token_ids
        return output

    def run(self, limit: int = 400) -> None:
        """Step until every request has finished and nothing of it is kept any more.

        In ``limit`` steps, and more only while threads that are late may have something to do with it.
        """
        steps, deadline = 0, time.monotonic() + (NEVER if self.threads else 0.0)
        while self.scheduler.has_unfinished_requests():
            late = steps >= limit and time.monotonic() > deadline
            assert not late, f"the engine stands still: {self.scheduler.get_request_counts()} after {steps} steps"
            self.step()
            steps += 1
        self.settle()

    def settle(self, seconds: float = NEVER) -> None:
        """Steps without requests: blocks that are kept for loads and stores come back, and stores end, in time."""
        deadline = time.monotonic() + seconds
        sides = [side._scheduler for side in ours_of(self.scheduler.connector) if side._scheduler is not None]
        while time.monotonic() < deadline and (
            self.scheduler.requests or any(side._stores.outstanding for side in sides)
        ):
            self.step()
        self.step()
        assert not self.scheduler.requests, f"still kept: {sorted(self.scheduler.requests)}"
        self.step()  # the step that tells workers what finished

    def free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def read(self, blocks: Sequence[int], position: int) -> torch.Tensor:
        """KV of one slot, ``[2, layers, hidden]``."""
        block, slot = blocks[position // BLOCK], position % BLOCK
        return torch.stack([cache[:, block, slot].reshape(2, -1) for cache in self.caches], dim=1)

    def _forward(self, output: Any, hooks: bool) -> dict[str, list[int]]:
        for new in output.scheduled_new_reqs:
            self.tables[new.req_id] = list(new.block_ids[0])
        cached = output.scheduled_cached_reqs
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        for index, name in enumerate(cached.req_ids):
            fresh = cached.new_block_ids[index]
            ids = list(fresh[0]) if fresh is not None else []
            self.tables[name] = ids if name in cached.resumed_req_ids else self.tables[name] + ids
            starts[name] = cached.num_computed_tokens[index]
        for name in [*(new.req_id for new in output.scheduled_new_reqs), *cached.resumed_req_ids]:
            self.texts[name] = list(self.scheduler.requests[name].all_token_ids)
        # A layer's KV of a step is written before any of its attention reads.
        work = []
        for name, count in output.num_scheduled_tokens.items():
            tokens = list(self.texts[name] if self.ahead else self.scheduler.requests[name].all_token_ids)
            values = chain(tokens)
            work.append((name, tokens, values, kv_of_all(values), starts[name], starts[name] + count))
        bad = set()
        for layer, hook in enumerate(self.names):
            if hooks:
                self.worker.wait_for_layer_load(hook)
            for name, _, _, want, first, last in work:
                self._slots(name, first, last, layer, want[first:last])
            for name, _, _, want, first, _ in work:
                if not torch.equal(self._slots(name, 0, first, layer), want[:first, :, layer]):
                    bad.add(name)
        self.poisoned |= bad
        sampled: dict[str, list[int]] = {}
        for name, tokens, values, _, first, last in work:
            if name in bad:
                wrong = kv_of_all([value + 17 for value in values[first:last]])
                for layer in range(len(self.caches)):
                    self._slots(name, first, last, layer, wrong)
            sampled[name] = []
            if last == len(tokens):
                sampled[name] = [POISON if name in bad else sample(values[last - 1])]
                self.texts[name] += sampled[name]
        return sampled

    def _slots(self, name: str, first: int, last: int, layer: int, kv: torch.Tensor | None = None) -> torch.Tensor:
        """One layer's KV of a request's tokens ``[first, last)``, ``[tokens, 2, hidden]``, written first if given."""
        positions = range(first, last)
        blocks = torch.tensor([self.tables[name][position // BLOCK] for position in positions], dtype=torch.int64)
        slots = torch.tensor([position % BLOCK for position in positions], dtype=torch.int64)
        assert not len(blocks) or int(blocks.min()) > 0, "block 0 is vLLM's null block"
        cache = self.caches[layer]
        if kv is not None:
            cache[:, blocks, slots] = kv[:, :, layer].transpose(0, 1).reshape(2, -1, HEADS, SIZE)
        return cache[:, blocks, slots].reshape(2, -1, HEADS * SIZE).transpose(0, 1)

    def close(self) -> None:
        """End the worker's threads."""
        self.worker.shutdown()


def make_engine(
    store: FakeStore,
    model: str,
    *,
    num_blocks: int = 64,
    budget: int = 64,
    max_seqs: int = 8,
    kv_role: str = "kv_both",
    extra: dict[str, Any] | None = None,
    prefix_caching: bool = True,
    handler: Callable[[FakeStore], Any] = FakeHandler,
    ahead: bool = False,
    policy: str = "fcfs",
    share: int = 0,
    threads: bool | Threads = False,
    transfer: Callable[..., Any] | None = None,
    beside: Sequence[Mapping[str, Any]] = (),
) -> Engine:
    """An engine on ``store``; ``extra`` goes into the connector's settings.

    Without ``threads`` everything is done within the steps, whatever the settings say; with them the worker has those
    that the settings ask for, or those given, and the engine has to be closed. ``ahead``: asynchronous scheduling.
    ``share``: tokens of a step's budget that one request gets at most while there are others; 0: all.
    ``transfer(caches, paged, stored)`` makes what moves bytes. ``beside``: what differs from Maru's connector in those
    that vLLM has beside it, through its MultiConnector; ``{}`` is Maru's once more, on the same store.
    """
    ours: dict[str, Any] = {
        "kv_connector": "MaruKVConnector",
        "kv_connector_module_path": "maru_integrations.vllm",
        "kv_role": kv_role,
        "kv_connector_extra_config": {"maru_kv_chunk_tokens": CHUNK, **(extra or {})},
    }
    several = {
        "kv_connector": "MultiConnector",
        "kv_role": kv_role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [ours, *({**ours, **other} for other in beside)]},
    }
    cache = CacheConfig(
        block_size=BLOCK,
        gpu_memory_utilization=0.5,
        cache_dtype="auto",
        enable_prefix_caching=prefix_caching,
    )
    cache.num_gpu_blocks = num_blocks
    config = VllmConfig(
        model_config=ModelConfig(model=model, skip_tokenizer_init=True, dtype="float16", seed=0),
        cache_config=cache,
        device_config=DeviceConfig("cpu"),
        scheduler_config=SchedulerConfig(
            max_num_seqs=max_seqs,
            max_num_batched_tokens=budget,
            max_model_len=2048,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=ahead,
            policy=policy,
            long_prefill_token_threshold=share,
        ),
        kv_transfer_config=KVTransferConfig(**(several if beside else ours)),
    )
    config.scheduler_config.async_scheduling = ahead  # vLLM switches it off for the CPU
    names = [f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS)]
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=SIZE, dtype=torch.float16)
    kv_cache = KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(names, spec)]
    )
    connect = setup.connect
    setup.connect = lambda plan, role: handler(store)  # type: ignore[assignment]
    try:
        scheduler = (AsyncScheduler if ahead else Scheduler)(
            vllm_config=config,
            kv_cache_config=kv_cache,
            block_size=BLOCK,
            log_stats=True,
            structured_output_manager=StructuredOutputManager(config),
        )
    finally:
        setup.connect = connect
    hash_fn = get_hash_fn_by_name(cache.prefix_caching_hash_algo)
    init_none_hash(hash_fn)
    sides = ours_of(scheduler.connector)
    worker: Any = type(scheduler.connector)(config, KVConnectorRole.WORKER, kv_cache)
    caches = [torch.zeros((2, num_blocks, BLOCK, HEADS, SIZE), dtype=torch.int16) for _ in range(LAYERS)]
    shape = caches[0].stride()
    planes = tuple(PlaneStrides(plane * shape[0], shape[1], shape[2], shape[3], shape[4]) for plane in range(2))
    paged = PagedLayout(planes, LAYERS, num_blocks, BLOCK, HEADS, SIZE, 2)
    plan = sides[0]._plan
    assert plan is not None
    stored = ObjectLayout(2, LAYERS // plan.objects_per_chunk, CHUNK, HEADS * SIZE, 2)

    def opened() -> Any:
        return (transfer or TorchCopyEngine().open)(caches, paged, stored)

    for side, mine in zip(sides, ours_of(worker), strict=True):
        mine._worker = MaruWorker(
            lambda: Link(handler(store), opened(), stored, opened()),
            mine._answers,
            ChunkShape(BLOCK, CHUNK, stored.nbytes * plan.objects_per_chunk, plan.objects_per_chunk),
            layer_names=names,
            threads=setup.threads_of(plan, paged, caches[0].device, ahead=ahead)
            if threads is True
            else threads or None,
        )
        side.set_xfer_handshake_metadata({0: mine.get_handshake_metadata()})
    engine = Engine(
        scheduler,
        sides[0],
        worker,
        store,
        caches,
        get_request_block_hasher(BLOCK, hash_fn),
        names=names,
        ahead=ahead,
        threads=bool(threads),
    )
    watch(engine)
    tear(engine)
    return engine


def ours_of(connector: Any) -> list[MaruKVConnector]:
    """Maru's connectors among those that vLLM has."""
    found = getattr(connector, "_connectors", [connector])
    return [each for each in found if isinstance(each, MaruKVConnector)]


def tear(engine: Engine) -> None:
    """Pages that a load did not fill hold garbage, as they do after a copy that was stopped in the middle."""
    for worker in ours_of(engine.worker):
        tear_loads(engine, worker._answers)


def tear_loads(engine: Engine, answers: Answers) -> None:
    """Those that ``answers`` tells of."""
    tell = answers.load_ended

    def told(op: Any, good: int, failed: Sequence[int], reason: str = "") -> None:
        for cache in engine.caches:
            cache[:, list(failed)] = GARBAGE
        tell(op, good, failed, reason)

    answers.load_ended = told  # type: ignore[method-assign]


def watch(engine: Engine) -> None:
    """Check every answer that can kill EngineCore (``reference``, section 10) where it is given."""
    worker, scheduler = engine.worker, engine.scheduler
    side: Any = scheduler.connector
    match, after_alloc, build = (
        side.get_num_new_matched_tokens,
        side.update_state_after_alloc,
        side.build_connector_meta,
    )
    results, errors = worker.get_finished, worker.get_block_ids_with_load_errors
    finished = side.request_finished_all_groups

    def checked_match(request: Request, local: int) -> tuple[int | None, bool]:
        answer = match(request, local)
        assert type(answer) is tuple
        count, parked = answer
        assert type(parked) is bool
        if count is not None:
            assert type(count) is int
            assert count >= 0
            assert count > 0 or not parked
            assert count % BLOCK == 0
            assert local + count < request.num_tokens or not count
        return answer

    def checked_alloc(request: Request, blocks: Any, external: int) -> None:
        engine.external[request.request_id] = engine.external.get(request.request_id, 0) + external
        assert after_alloc(request, blocks, external) is None

    def checked_build(output: Any) -> Any:
        metadata = build(output)
        assert metadata is not None
        return metadata

    def checked_results(finished_ids: set[str]) -> Any:
        answer = results(finished_ids)
        sent, received = answer
        for name in sent or ():
            assert name in engine.held, "reported as sent, but vLLM does not wait for that"
            engine.held.remove(name)
        for name in received or ():
            status = scheduler.requests[name].status  # a KeyError here is an id that vLLM does not know any more
            assert status == RequestStatus.WAITING_FOR_REMOTE_KVS or RequestStatus.is_finished(status)
        return answer

    def checked_errors() -> set[int]:
        answer = errors()
        assert type(answer) is set
        assert all(0 < block < engine.caches[0].shape[1] for block in answer)
        return answer

    def checked_finished(request: Request, blocks: tuple[list[int], ...]) -> tuple[bool, Any]:
        answer = finished(request, blocks)
        held, parameters = answer
        assert type(held) is bool
        assert parameters is None or not isinstance(side, MaruKVConnector)
        if held:
            assert request.request_id not in engine.held
            engine.held.add(request.request_id)
        return answer

    side.get_num_new_matched_tokens = checked_match  # type: ignore[method-assign]
    side.update_state_after_alloc = checked_alloc  # type: ignore[method-assign]
    side.build_connector_meta = checked_build  # type: ignore[method-assign]
    side.request_finished_all_groups = checked_finished  # type: ignore[method-assign]
    worker.get_finished = checked_results  # type: ignore[method-assign]
    worker.get_block_ids_with_load_errors = checked_errors  # type: ignore[method-assign]


def check_store(store: FakeStore, prompts: Sequence[Sequence[int]], root_of: Callable[[Sequence[int]], Any]) -> int:
    """Compare every stored object with what the model would have written; returns how many chunks are whole."""
    count = 0
    for tokens in prompts:
        keys = root_of(tokens)
        values = chain(tokens)
        objects = len(keys) // max(1, len(tokens) // CHUNK)
        there = [key for key in keys if key in store.objects and store.objects[key].ready]
        for key in there:
            index, layer = divmod(keys.index(key), objects)
            want = torch.stack([kv_of(value) for value in values[index * CHUNK : (index + 1) * CHUNK]], dim=2)
            want = want[:, layer : layer + 1] if objects > 1 else want
            held = bytes(store.objects[key].data)
            assert held == want.contiguous().numpy().tobytes(), f"chunk {index}, object {layer} holds wrong bytes"
        count += sum(set(keys[first : first + objects]) <= set(there) for first in range(0, len(keys), max(1, objects)))
    return count
