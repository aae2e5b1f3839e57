"""Requests, blocks and steps as vLLM shows them to the scheduler side, and a hand on its settings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from attrs import evolve


def request(name: str) -> Any:
    tokens = list(range(200))
    return SimpleNamespace(
        request_id=name,
        lora_request=None,
        prompt_token_ids=tokens,
        all_token_ids=tokens,
        num_tokens=200,
        num_prompt_tokens=200,
        pooling_params=None,
    )


def output(**scheduled: tuple[list[int], int, int]) -> Any:
    """A scheduler output with new requests only: blocks, computed tokens, scheduled tokens."""
    return SimpleNamespace(
        preempted_req_ids=None,
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, block_ids=(blocks,), num_computed_tokens=computed)
            for name, (blocks, computed, _) in scheduled.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set()
        ),
        num_scheduled_tokens={name: count for name, (_, _, count) in scheduled.items()},
        scheduled_spec_decode_tokens={},
        has_sync_kv_loads=False,
    )


def later(**scheduled: tuple[list[int], int, int]) -> Any:
    """A step of requests that ran before: blocks that are new, computed tokens, scheduled tokens."""
    step = output()
    cached = step.scheduled_cached_reqs
    cached.req_ids = list(scheduled)
    cached.new_block_ids = [(blocks,) for blocks, _, _ in scheduled.values()]
    cached.num_computed_tokens = [computed for _, computed, _ in scheduled.values()]
    step.num_scheduled_tokens = {name: count for name, (_, _, count) in scheduled.items()}
    return step


class Pool:
    """vLLM's own prefix cache: which blocks have been dropped from it."""

    num_gpu_blocks = 100

    def __init__(self) -> None:
        self.evicted: set[int] = set()

    def evict_blocks(self, blocks: set[int]) -> None:
        self.evicted |= blocks


def change_settings(side: Any, **changes: Any) -> None:
    """Other settings of a scheduler side than those it was made with."""
    for part in (side._promises, side._planner):
        part.settings = evolve(part.settings, **changes)
