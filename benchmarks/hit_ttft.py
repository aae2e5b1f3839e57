"""Time to the first token of a prompt that was seen before: Maru, vLLM's own cache, vLLM's ExampleConnector.

SmolLM2-135M on the CPU engine, 3,080 tokens = 12 chunks of 256 and 8 that every hit leaves to compute. One engine at a
time. Where a connector is measured, the engine's own prefix cache is emptied before each request. Exits with 1 when a
hit from Maru takes over 1.35 times a hit in vLLM's own cache, or longer than one from ExampleConnector on tmpfs.

Run in ``.venv``, which scripts/setup-env.sh makes: ``python benchmarks/hit_ttft.py [--json FILE]``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.offline import (
    PROMPT_TOKENS,
    Timing,
    maru_server,
    offline_engine,
    prepared_model,
    random_prompt,
    scratch,
)
from benchmarks.outcome import Bound, Outcome, main

#: A hit from Maru over a hit in vLLM's own cache.
LIMIT = 1.35
#: All whole blocks of the prompt.
HIT_TOKENS = PROMPT_TOKENS - 8


def measure_engine(
    model: Path, name: str, folder: Path, transfer: Mapping[str, Any] | None, options: argparse.Namespace
) -> tuple[list[Timing], list[Timing]]:
    """Cold and warm timings of one engine."""
    cold: list[Timing] = []
    warm: list[Timing] = []
    with offline_engine(model, name, folder, transfer, eager=options.eager) as engine:
        engine.ask(random_prompt(0)[:100])
        for seed in range(1, options.cold + 1):
            prompt = random_prompt(seed)
            cold.append(engine.ask(prompt))
        # One warm request that does not count: the first touches pages for the first time.
        for number in range(options.warm + 1):
            if transfer is not None:
                engine.forget()
            timing = engine.ask(prompt)
            if number:
                warm.append(timing)
    check(name, cold, warm)
    return cold, warm


def check(name: str, cold: list[Timing], warm: list[Timing]) -> None:
    """Figures of requests that were not what they should be mean nothing."""
    if any(timing.cached for timing in cold):
        raise SystemExit(f"{name}: a cold prompt was found in a cache: {cold}")
    wrong = [timing for timing in warm if timing.cached != HIT_TOKENS or timing.token != cold[-1].token]
    if wrong:
        raise SystemExit(
            f"{name}: {len(wrong)} of {len(warm)} warm requests did not hit {HIT_TOKENS} tokens and answer "
            f"{cold[-1].token}: {wrong[0]}"
        )


def measure(options: argparse.Namespace) -> Outcome:
    """All engines, one after the other."""
    model = prepared_model()
    timings: dict[str, tuple[list[Timing], list[Timing]]] = {}
    with ExitStack() as stack:
        folder = stack.enter_context(scratch())
        shared = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-example-", dir="/dev/shm"))
        with maru_server(folder, "2G") as transfer:
            timings["Maru"] = measure_engine(model, "maru", folder, transfer, options)
        timings["vLLM's own prefix cache"] = measure_engine(model, "own-cache", folder, None, options)
        example = {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": shared},
        }
        timings["ExampleConnector on tmpfs"] = measure_engine(model, "example", folder, example, options)
    table = [["engine", "cold ms", "hit ms", "hit min", "hit max", "cold / hit"]]
    figures: dict[str, Any] = {}
    for name, (cold, warm) in timings.items():
        cold_ms, warm_ms = ([timing.seconds * 1e3 for timing in part] for part in (cold, warm))
        middle_cold, middle = statistics.median(cold_ms), statistics.median(warm_ms)
        figures[name] = {"cold_ms": cold_ms, "hit_ms": warm_ms, "cold_median_ms": middle_cold, "hit_median_ms": middle}
        ends = [f"{end(warm_ms):.1f}" for end in (min, max)]
        table.append([name, f"{middle_cold:.0f}", f"{middle:.1f}", *ends, f"{middle_cold / middle:.0f}x"])
    maru, own, other = (figures[name]["hit_median_ms"] for name in timings)
    return Outcome(
        table,
        figures,
        [
            Bound("a hit from Maru / a hit in vLLM's own cache", maru / own, LIMIT),
            Bound("a hit from Maru / a hit from ExampleConnector", maru / other, 1.0),
        ],
        [f"medians of {options.cold} cold and {options.warm} warm requests of {PROMPT_TOKENS} tokens, one new token"],
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """How long it takes."""
    parser.add_argument("--cold", type=int, default=3, help="cold prompts per engine (default 3)")
    parser.add_argument("--warm", type=int, default=15, help="warm requests per engine (default 15)")
    parser.add_argument("--eager", action="store_true", help="do not compile the model: starts sooner")


if __name__ == "__main__":
    sys.exit(main(__doc__, measure, add_options))
