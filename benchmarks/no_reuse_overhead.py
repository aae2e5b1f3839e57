"""What the connector costs where nothing is ever asked twice: throughput, the slowest first tokens, single prompts.

SmolLM2-135M on the CPU engine, every prompt new, an engine with Maru and one without in turn; the one whose turn it is
not is stopped, and the order within a pair alternates. First windows of requests that arrive faster than they can be
served, at the same times for both engines of a pair: exits with 1 when the tokens per second with Maru are below 97 %
of those without (median of the pairs), or the 99th percentile of the time to the first token is over 105 %. Then single
prompts of 3,080 tokens (populating an empty cache): exits with 1 when the time to the first token with Maru is over
102 % (median of the pairs).

With ``--clients N`` requests do not arrive at given times but when one of so many clients has its answer. Then it is
chance which of them fall into the same step, and it decides more than Maru does: windows without it differ by a tenth.

Run in ``.venv``, which scripts/setup-env.sh makes: ``python benchmarks/no_reuse_overhead.py [--json FILE]``.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.offline import CHUNK_TOKENS, PROMPT_TOKENS, maru_server, prepared_model, random_prompt, scratch
from benchmarks.online import Ask, OnlineEngine, add_engine_options, awake, cpu_engine, engines_in_turn, with_settings
from benchmarks.outcome import Bound, Least, Outcome, main

THROUGHPUT, TAIL, POPULATE = 0.97, 1.05, 1.02
#: A request of a window: tokens of its prompt, new tokens. How many requests a window has.
LONG, DECODED, REQUESTS = 2 * CHUNK_TOKENS + 8, 16, 16
#: They come so many times as fast as the engine without Maru served those of this many clients first.
OVERLOAD, CLIENTS = 1.3, 4
PLAIN, MARU = "without", "with Maru"


def arrivals(seed: int, rate: float) -> list[float]:
    """Seconds from the first request of a window to each of them: at random, ``rate`` in a second on average."""
    rng = random.Random(seed)
    return [0.0, *itertools.accumulate(rng.expovariate(rate) for _ in range(REQUESTS - 1))]


def turns(engines: Mapping[str, OnlineEngine], number: int) -> Iterator[tuple[str, OnlineEngine]]:
    """Each of a pair, by name, awake while it has its turn; who begins alternates."""
    for name in sorted(engines, reverse=number % 2 == 1):
        with awake(engines[name]) as engine:
            yield name, engine


def new_prompt(name: str, number: int) -> list[int]:
    """A prompt that the engine of this name is asked only once."""
    return random_prompt(2 * number + (name == PLAIN))


def window(engine: OnlineEngine, name: str, number: int, at: Sequence[float], clients: int | None) -> dict[str, Any]:
    """Tokens per second of one window, and seconds to each first token."""
    prompts = [new_prompt(name, number * REQUESTS + index)[:LONG] for index in range(REQUESTS)]
    asked = [Ask(prompt, DECODED, at=when) for prompt, when in zip(prompts, at, strict=True)]
    run = engine.run(asked, clients)
    check_new(run.answers)
    return {
        "tokens_per_second": REQUESTS * (LONG + DECODED) / run.seconds,
        "ttft": [answer.ttft for answer in run.answers],
    }


def single(engine: OnlineEngine, name: str, number: int) -> float:
    """Seconds to the first token of a long prompt."""
    answer = engine.ask(new_prompt(name, 1_000_000 + number))
    check_new([answer])
    return answer.ttft


def check_new(answers: Any) -> None:
    """Figures of requests that were served from a cache mean nothing here."""
    if any(answer.cached for answer in answers):
        raise SystemExit("a prompt that nobody has asked was found in a cache")


def percentile(values: list[float], percent: int) -> float:
    """The smallest value that at least so many percent do not exceed."""
    return sorted(values)[max(0, -(-len(values) * percent // 100) - 1)]


def of_pairs(maru: Sequence[float], plain: Sequence[float]) -> float:
    """Median of what each pair's figure with Maru is to the one without: both of a pair met the same machine."""
    return statistics.median(one / other for one, other in zip(maru, plain, strict=True))


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
            # The first of each kind touch memory and code for the first time.
            first = {name: window(engine, name, 0, [0.0] * REQUESTS, CLIENTS) for name, engine in turns(engines, 0)}
            rate = OVERLOAD * first[PLAIN]["tokens_per_second"] / (LONG + DECODED)
            for number in range(1, options.pairs + 1):
                at = [0.0] * REQUESTS if options.clients else arrivals(number, rate)
                for name, engine in turns(engines, number):
                    windows[name].append(window(engine, name, number, at, options.clients))
                print(f"pair {number}", file=sys.stderr, flush=True)
            for number in range(options.prompts + 1):
                for name, engine in turns(engines, number):
                    seconds = single(engine, name, number)
                    if number:
                        singles[name].append(seconds)
                print(f"prompt {number}", file=sys.stderr, flush=True)
    how = f"{options.clients} clients" if options.clients else f"{rate:.2f} a second"
    return judge(windows, singles, how)


def judge(windows: dict[str, list[dict[str, Any]]], singles: dict[str, list[float]], how: str = "") -> Outcome:
    """The table and bounds; ``how`` the requests of the windows came."""
    tails = {name: percentile([t for one in found for t in one["ttft"]], 99) for name, found in windows.items()}
    table = [["", "tokens/s", "TTFT p99 ms", f"TTFT of {PROMPT_TOKENS} tokens ms"]]
    for name, found in windows.items():
        rate = statistics.median(one["tokens_per_second"] for one in found)
        table.append([name, f"{rate:.0f}", f"{tails[name] * 1e3:.0f}", f"{statistics.median(singles[name]) * 1e3:.0f}"])
    throughput = of_pairs(*([one["tokens_per_second"] for one in windows[name]] for name in (MARU, PLAIN)))
    populate = of_pairs(singles[MARU], singles[PLAIN])
    return Outcome(
        table,
        {"windows": windows, "singles": singles, "throughput": throughput, "tails": tails, "populate": populate},
        [
            Least("tokens per second, with Maru / without", throughput, THROUGHPUT),
            Bound("99th percentile of TTFT, with Maru / without", tails[MARU] / tails[PLAIN], TAIL),
            Bound("TTFT of a long prompt, with Maru / without", populate, POPULATE),
        ],
        [
            f"{len(windows[PLAIN])} pairs of windows of {REQUESTS} requests of {LONG} and {DECODED} tokens, {how}; "
            f"{len(singles[PLAIN])} pairs of single prompts"
        ],
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """How long it takes."""
    parser.add_argument("--pairs", type=int, default=16, help="pairs of windows (default 16)")
    parser.add_argument("--clients", type=int, help="each sends a request when it has its answer (default: see above)")
    parser.add_argument("--prompts", type=int, default=16, help="pairs of single long prompts (default 16)")
    add_engine_options(parser)


if __name__ == "__main__":
    sys.exit(main(__doc__, measure, add_options))
