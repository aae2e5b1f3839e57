"""What the connector costs where nothing is ever asked twice: throughput, the slowest first tokens, single prompts.

SmolLM2-135M on the CPU engine, every prompt new, an engine with Maru and one without in turn; the one whose turn it is
not is stopped, and the order within a pair alternates. First windows of requests by several clients at once: exits with
1 when the tokens per second with Maru are below 97 % of those without (median of the pairs), or the 99th percentile of
the time to the first token is over 105 %. Then single prompts of 3,080 tokens (populating an empty cache): exits with 1
when the time to the first token with Maru is over 102 %.

Run in ``.venv``, which scripts/setup-env.sh makes: ``python benchmarks/no_reuse_overhead.py [--json FILE]``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.offline import CHUNK_TOKENS, PROMPT_TOKENS, maru_server, prepared_model, random_prompt, scratch
from benchmarks.online import Ask, OnlineEngine, add_engine_options, awake, cpu_engine, engines_in_turn, with_settings
from benchmarks.outcome import Bound, Least, Outcome, main

THROUGHPUT, TAIL, POPULATE = 0.97, 1.05, 1.02
#: A request of a window: tokens of its prompt, new tokens. How many requests a window has, from how many clients.
LONG, DECODED, REQUESTS, CLIENTS = 2 * CHUNK_TOKENS + 8, 16, 16, 4
PLAIN, MARU = "without", "with Maru"


def window(engine: OnlineEngine, seed: int) -> dict[str, Any]:
    """Tokens per second of one window, and seconds to each first token."""
    asked = [Ask(random_prompt(seed * 1000 + number)[:LONG], DECODED) for number in range(REQUESTS)]
    run = engine.run(asked, CLIENTS)
    check_new(run.answers)
    return {
        "tokens_per_second": REQUESTS * (LONG + DECODED) / run.seconds,
        "ttft": [answer.ttft for answer in run.answers],
    }


def single(engine: OnlineEngine, seed: int) -> float:
    """Seconds to the first token of a long prompt."""
    answer = engine.ask(random_prompt(1_000_000 + seed))
    check_new([answer])
    return answer.ttft


def check_new(answers: Any) -> None:
    """Figures of requests that were served from a cache mean nothing here."""
    if any(answer.cached for answer in answers):
        raise SystemExit("a prompt that nobody has asked was found in a cache")


def percentile(values: list[float], percent: int) -> float:
    """The smallest value that at least so many percent do not exceed."""
    return sorted(values)[max(0, -(-len(values) * percent // 100) - 1)]


def measure(options: argparse.Namespace) -> Outcome:
    """Windows, then single prompts."""
    windows: dict[str, list[dict[str, Any]]] = {PLAIN: [], MARU: []}
    singles: dict[str, list[float]] = {PLAIN: [], MARU: []}
    # Room for all, so that nothing is evicted: 12 chunks of 5.6 MiB for a long prompt, 2 for one of a window.
    room = (options.pairs + 1) * REQUESTS * 12 + (options.prompts + 1) * 70 + 64
    with scratch() as folder, maru_server(folder, f"{room}M") as transfer:
        model = prepared_model()
        arguments = {
            PLAIN: cpu_engine(model, None, eager=options.eager),
            MARU: cpu_engine(model, with_settings(transfer, options.settings), eager=options.eager),
        }
        with engines_in_turn(folder, arguments) as engines:
            for number in range(options.pairs + options.prompts + 2):
                long = number > options.pairs
                for name in sorted(engines, reverse=number % 2 == 1):
                    with awake(engines[name]) as engine:
                        seed = 2 * number + (name == PLAIN)
                        found: Any = single(engine, seed) if long else window(engine, seed)
                    # The first pair of each kind touches memory and code for the first time.
                    if number in (0, options.pairs + 1):
                        continue
                    (singles if long else windows)[name].append(found)
                print(f"pair {number}", file=sys.stderr, flush=True)
    return judge(windows, singles)


def judge(windows: dict[str, list[dict[str, Any]]], singles: dict[str, list[float]]) -> Outcome:
    """The table and bounds."""
    tails = {name: percentile([t for one in found for t in one["ttft"]], 99) for name, found in windows.items()}
    table = [["", "tokens/s", "TTFT p99 ms", f"TTFT of {PROMPT_TOKENS} tokens ms"]]
    for name, found in windows.items():
        rate = statistics.median(one["tokens_per_second"] for one in found)
        table.append([name, f"{rate:.0f}", f"{tails[name] * 1e3:.0f}", f"{statistics.median(singles[name]) * 1e3:.0f}"])
    throughput = statistics.median(
        one["tokens_per_second"] / other["tokens_per_second"]
        for one, other in zip(windows[MARU], windows[PLAIN], strict=True)
    )
    populate = statistics.median(singles[MARU]) / statistics.median(singles[PLAIN])
    return Outcome(
        table,
        {"windows": windows, "singles": singles, "throughput": throughput, "tails": tails, "populate": populate},
        [
            Least("tokens per second, with Maru / without", throughput, THROUGHPUT),
            Bound("99th percentile of TTFT, with Maru / without", tails[MARU] / tails[PLAIN], TAIL),
            Bound("TTFT of a long prompt, with Maru / without", populate, POPULATE),
        ],
        [
            f"{len(windows[PLAIN])} pairs of windows of {REQUESTS} requests of {LONG} and {DECODED} tokens from "
            f"{CLIENTS} clients, {len(singles[PLAIN])} pairs of single prompts"
        ],
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """How long it takes."""
    parser.add_argument("--pairs", type=int, default=12, help="pairs of windows (default 12)")
    parser.add_argument("--prompts", type=int, default=16, help="pairs of single long prompts (default 16)")
    add_engine_options(parser)


if __name__ == "__main__":
    sys.exit(main(__doc__, measure, add_options))
