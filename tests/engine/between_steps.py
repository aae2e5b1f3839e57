"""Scenarios on one real engine with loads and stores between its steps; see :mod:`tests.engine.tiny`."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.engine.tiny import Tiny


def prompt(length: int, seed: int) -> list[int]:
    from tests.engine import tiny

    return tiny.prompt(length, seed)


def hit(tiny: Tiny, prompts: list[list[int]]) -> dict[str, Any]:
    """All prompts at once; how many were released early, and whether their pages hold what was stored."""
    worker = tiny.worker._worker
    answers, link, shape = worker._answers, worker._link, worker._shape
    early: list[str] = []
    differing: list[str] = []

    def released(tell: Callable[[Any], None]) -> Any:
        def run(op: Any) -> None:
            early.append(op.request_id)
            tell(op)

        return run

    def ended(tell: Callable[..., None]) -> Any:
        def run(op: Any, good: int, failed: Any, reason: str = "") -> None:
            if not failed:
                from maru_integrations.vllm.copies import load_copies

                chunks = len(op.keys) // shape.objects
                buffers = [bytearray(link.stored.nbytes) for _ in op.keys]
                copies = load_copies(op, shape, range(chunks), [memoryview(buffer) for buffer in buffers])
                link.transfer.store(op.blocks, copies)
                located = link.handler.adopt(op.epoch, op.entries, op.generations, op.lengths, op.keys)
                if op.last % shape.chunk_tokens == 0 and any(
                    bytes(located.view(index)) != bytes(buffer) for index, buffer in enumerate(buffers)
                ):
                    differing.append(op.request_id)
            tell(op, good, failed, reason)

        return run

    tiny.forget()
    before = tiny.hits
    with tiny.patched(answers, "load_released", released), tiny.patched(answers, "load_ended", ended):
        outputs = [list(item.outputs[0].token_ids) for item in tiny.ask(*prompts)]
    return {
        "answers": outputs,
        "early": len(early),
        "differing": differing,
        "hits": tiny.hits - before,
    }


def close(first: bytes, second: bytes) -> bool:
    """Equal but for the order in which sums were taken."""
    from tests.engine import tiny

    return tiny._close(first, second)


def threads(tiny: Tiny) -> dict[str, Any]:
    """Stores after the prompt, loads between steps with and without overlap: same answers, same bytes."""
    prompts = [prompt(300, 300 + seed) for seed in range(4)]
    out: dict[str, Any] = {}
    out["cold"] = tiny.learn(*prompts)
    out["stored"] = [tiny.stored(ids, 4) for ids in prompts]
    later = [tiny.objects(ids) for ids in prompts]
    with tiny.settings(overlap=False):
        out["parked"] = hit(tiny, prompts)
    out["overlapped"] = hit(tiny, prompts)
    tiny.quiet()
    tiny.forget()
    tiny.side.reset_cache()
    with tiny.settings(stores_later=False, loads=False):
        again = [tiny.answer(ids) for ids in prompts]
    out["again"] = again
    out["same_bytes"] = later == [tiny.objects(ids) for ids in prompts]
    out["leased"] = tiny.leased()
    out["free"] = tiny.free_blocks()
    return out


def failures(tiny: Tiny) -> dict[str, Any]:
    """Objects that are not what was granted, seen before and after a request was released."""
    from maru_core.client import Located

    prompts = [prompt(300, 320 + seed) for seed in range(2)]
    cold = tiny.learn(*prompts)
    present = [tiny.stored(ids, 4) for ids in prompts]
    out: dict[str, Any] = {"cold": cold, "stored": present}

    def bad(check: Any) -> Any:
        return lambda located: [False] * len(located.entries)

    counts = [tiny.failed_loads]
    with tiny.always_loading(), tiny.torn(), tiny.patched(Located, "check", bad):
        out["before"] = tiny.warm(*prompts)["answers"]
    counts.append(tiny.failed_loads)
    tiny.side.reset_cache()
    tiny.forget()
    tiny.learn(*prompts)
    out["stored_again"] = [tiny.stored(ids, 4) for ids in prompts]
    longer = [ids + prompt(100, 330) for ids in prompts]
    with tiny.always_loading(), tiny.torn(), tiny.patched(Located, "verify", bad):
        out["after"] = tiny.warm(*longer)["answers"]
    counts.append(tiny.failed_loads)
    out["failed"] = [counts[1] - counts[0], counts[2] - counts[1]]
    behind = [tiny.objects(ids) for ids in longer]
    tiny.side.reset_cache()
    tiny.forget()
    out["expected"] = tiny.learn(*longer)
    right = [tiny.objects(ids) for ids in longer]
    out["behind"] = [
        len(objects) >= 4 and all(map(close, objects, expected))
        for objects, expected in zip(behind, right, strict=True)
    ]
    out["leased"] = tiny.leased()
    out["free"] = tiny.free_blocks()
    return out


def torn_block(tiny: Tiny) -> dict[str, Any]:
    """A load of a single block, behind seven that vLLM has itself, fails and leaves garbage in it."""
    from maru_core.client import Located

    ids = prompt(300, 350)
    (cold,) = tiny.learn(ids)
    tiny.forget()
    with tiny.settings(loads=False):
        tiny.answer(ids[:230], tokens=1)
    tiny.quiet()
    counts = tiny.failed_loads, tiny.hits
    with (
        tiny.always_loading(),
        tiny.torn(),
        tiny.patched(Located, "check", lambda check: lambda located: [False] * len(located.entries)),
    ):
        answer = tiny.answer(ids)
        tiny.quiet()
    return {
        "cold": cold,
        "answer": answer,
        "failed": tiny.failed_loads - counts[0],
        "tokens": tiny.hits - counts[1],
        "leased": tiny.leased(),
        "free": tiny.free_blocks(),
    }


def stalled_store(tiny: Tiny) -> dict[str, Any]:
    """A request finishes, its store is held up, and others write to every block that is free meanwhile."""
    ids = prompt(300, 360)
    tiny.learn(ids)
    expected = tiny.objects(ids)
    tiny.forget()
    tiny.side.reset_cache()
    gate = threading.Event()

    def gated(reserve: Any) -> Any:
        def run(*arguments: Any, **named: Any) -> Any:
            assert gate.wait(60)
            return reserve(*arguments, **named)

        return run

    with tiny.patched(tiny.worker._worker._link.handler, "reserve", gated):
        tiny.answer(ids)
        held = 39 - tiny.free_blocks()
        with tiny.settings(stores=False):
            for seed in (361, 362):
                tiny.answer(prompt(890, seed))
        gate.set()
        stored = tiny.stored(ids, 4)
    tiny.quiet()
    return {
        "held": held,
        "stored": stored,
        "same_bytes": tiny.objects(ids) == expected,
        "leased": tiny.leased(),
        "free": tiny.free_blocks(),
    }


def killed(tiny: Tiny) -> dict[str, Any]:
    """The server is killed while requests are parked: they are answered, and hits come back by themselves."""
    prompts = [prompt(300, 340 + seed) for seed in range(3)]
    cold = tiny.learn(*prompts)
    present = [tiny.stored(ids, 4) for ids in prompts]
    server = tiny.handler._link.live.server_pid
    transfer = tiny.worker._worker._link.transfer
    gate = threading.Event()

    def gated(move: Any) -> Any:
        def run(*arguments: Any) -> Any:
            assert gate.wait(20)
            return move(*arguments)

        return run

    def kill() -> None:
        time.sleep(0.2)  # until the first load waits at the gate
        os.kill(server, signal.SIGKILL)
        time.sleep(0.2)
        gate.set()

    tiny.forget()
    killer = threading.Thread(target=kill)
    killer.start()
    with tiny.patched(transfer, "load", gated), tiny.patched(transfer, "begin_load", gated):
        start = time.monotonic()
        answers = [list(item.outputs[0].token_ids) for item in tiny.ask(*prompts)]
        seconds = time.monotonic() - start
    killer.join()
    tiny.quiet()
    deadline = time.monotonic() + 60  # a server starts, which takes its time where others keep the processors busy
    before = tiny.hits
    while tiny.hits == before and time.monotonic() < deadline:
        tiny.forget()
        tiny.answer(prompts[0])
        tiny.quiet()
        time.sleep(0.2)
    return {
        "cold": cold,
        "stored": present,
        "answers": answers,
        "seconds": seconds,
        "hits_again": tiny.hits - before,
        "leased": tiny.leased(),
        "free": tiny.free_blocks(),
    }
