"""What the connector costs where there is nothing to reuse: time to the first token of new prompts, with and without.

SmolLM2-135M on the CPU engine, 3,080 tokens, every prompt new. Two engines take turns, so that whatever else the
machine does hits both alike, and the one whose turn it is not is stopped: it would poll. The order within a pair
alternates. Exits with 1 when the median with the connector is over 3 % above the one without.

Run in ``.venv``, which scripts/setup-env.sh makes: ``python benchmarks/cold_overhead.py [--json FILE]``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.offline import (
    PROMPT_TOKENS,
    OfflineEngine,
    maru_server,
    offline_engine,
    prepared_model,
    random_prompt,
    scratch,
)
from benchmarks.outcome import Bound, Outcome, main

LIMIT = 1.03


def ask(engine: OfflineEngine, seed: int) -> float:
    """Milliseconds for a new prompt."""
    engine.resume()
    timing = engine.ask(random_prompt(seed))
    engine.pause()
    if timing.cached:
        raise SystemExit(f"prompt {seed} should be new, but {timing.cached} tokens came from a cache")
    return timing.seconds * 1e3


def measure(options: argparse.Namespace) -> Outcome:
    """Pairs of prompts until there are enough."""
    model = prepared_model()
    times: dict[str, list[float]] = {"without": [], "with Maru": []}
    with (
        scratch() as folder,
        # 12 chunks of 5.6 MiB per prompt: room for all, so that nothing is evicted.
        maru_server(folder, f"{128 * (options.pairs + 2)}M") as transfer,
        offline_engine(model, "without", folder, eager=options.eager) as without,
        offline_engine(model, "with-maru", folder, transfer, eager=options.eager) as connected,
    ):
        engines = {"without": without, "with Maru": connected}
        for number in range(options.pairs + 1):
            for name in sorted(engines, reverse=number % 2 == 1):
                figure = ask(engines[name], 2 * number + (name == "without"))
                # The first pair touches memory and code for the first time.
                if number:
                    times[name].append(figure)
            if number:
                pair = ", ".join(f"{name} {figures[-1]:.0f} ms" for name, figures in times.items())
                print(f"pair {number}: {pair}", file=sys.stderr, flush=True)
    ratios = [one / other for one, other in zip(times["with Maru"], times["without"], strict=True)]
    table = [["engine", "median ms", "min", "max"]]
    for name, figures in times.items():
        table.append([name, *(f"{end(figures):.0f}" for end in (statistics.median, min, max))])
    overhead = statistics.median(times["with Maru"]) / statistics.median(times["without"])
    return Outcome(
        table,
        {"ttft_ms": times, "pair_ratios": ratios, "pair_ratio_median": statistics.median(ratios)},
        [Bound("cold TTFT with Maru / without", overhead, LIMIT)],
        [
            f"{options.pairs} alternating pairs of new prompts of {PROMPT_TOKENS} tokens, one new token",
            f"median of the pairs' ratios {statistics.median(ratios):.4f}, slowest with Maru / slowest without "
            f"{max(times['with Maru']) / max(times['without']):.3f}",
        ],
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """How long it takes."""
    parser.add_argument("--pairs", type=int, default=24, help="pairs of prompts (default 24)")
    parser.add_argument("--eager", action="store_true", help="do not compile the model: starts sooner")


if __name__ == "__main__":
    sys.exit(main(__doc__, measure, add_options))
