"""What a server that takes 2 s for each answer costs: those who decode nothing, those who ask it no more than allowed.

SmolLM2-135M on the CPU engine. While one request decodes, others come whose 520 tokens were stored before. One engine
has no connector; the other's way to its server is slow, so that it has to compute what it could have loaded: both
compute the same prompts while the same request decodes, which is checked. They take turns, and the one whose turn it is
not is stopped. Exits with 1 when the decoding request's time per token is over 5 % above that without a connector, when
the others wait for their first token longer than that by more than ``maru_lookup_timeout``, or when hits do not come
back within 2 s once the server is quick again, which is when its last late answer has arrived.

The table also shows what the time per token is made of: the median gap between two tokens, which is decoding alone, and
the sum of the three longest, in which the others' prompts are computed.

Run in ``.venv``, which scripts/setup-env.sh makes: ``python benchmarks/slow_server.py [--json FILE]``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.delayed import Delayed, delayed
from benchmarks.offline import CHUNK_TOKENS, maru_server, prepared_model, random_prompt, scratch
from benchmarks.online import (
    Ask,
    OnlineEngine,
    Run,
    add_engine_options,
    awake,
    cpu_engine,
    engines_in_turn,
    with_settings,
)
from benchmarks.outcome import Bound, Outcome, main

#: Time per token of others, with the slow server / without a connector; seconds until hits are back.
OTHERS, RESUMED = 1.05, 2.0
#: Seconds that an answer takes, and that a look-up may (``maru_lookup_timeout``, its default).
ANSWER, LOOKUP = 2.0, 0.5
#: Tokens: of the decoding request's prompt, of its answer, how many it has when each of the others comes, of theirs.
SHORT, DECODED, ARRIVALS, LONG = 64, 200, (20, 60, 100), 2 * CHUNK_TOKENS + 8
PLAIN, SLOW = "without", "with Maru, slow server"


def prompts() -> list[list[int]]:
    """Of those who come."""
    return [random_prompt(100 + number)[:LONG] for number in range(len(ARRIVALS))]


def requests(seed: int) -> list[Ask]:
    """One that decodes, and those who come meanwhile."""
    decoding = Ask(random_prompt(10_000 + seed)[:SHORT], DECODED)
    return [decoding, *(Ask(ids, 1, (0, count)) for ids, count in zip(prompts(), ARRIVALS, strict=True))]


def resumed(engine: OnlineEngine) -> float:
    """Seconds until all prompts hit again."""
    began = time.monotonic()
    while time.monotonic() - began < 10 * RESUMED:
        engine.forget()
        if all(engine.ask(ids).cached >= LONG - 8 for ids in prompts()):
            return time.monotonic() - began
        time.sleep(0.2)
    raise SystemExit(f"no hits {10 * RESUMED:g} s after the server was quick again")


def figures_of(run: Run) -> dict[str, Any]:
    """Milliseconds of the decoding request, see the module; seconds to the first token of the others.

    Raises SystemExit when what was measured is not what is compared.
    """
    decoding, *others = run.answers
    if any(other.cached for other in others):
        raise SystemExit(f"tokens cached: {[other.cached for other in others]}, where all had to be computed")
    if max(other.times[0] for other in others) > decoding.times[-1]:
        raise SystemExit("a prompt was computed after the other request had decoded its last token")
    gaps = sorted(decoding.gaps)
    return {
        "tpot_ms": decoding.tpot * 1e3,
        "median_gap_ms": statistics.median(gaps) * 1e3,
        "prompts_ms": sum(gaps[-len(others) :]) * 1e3,
        "ttft": [other.ttft for other in others],
        "cached": [other.cached for other in others],
    }


def slow_trial(engine: OnlineEngine, way: Delayed, number: int) -> dict[str, Any]:
    """Hits first, then the slow server, then how long until there are hits again."""
    resumed(engine)
    engine.forget()
    way.delay = ANSWER
    figures = figures_of(engine.run(requests(number)))
    way.delay = 0.0
    way.settle()
    return {**figures, "resumed": resumed(engine)}


def measure(options: argparse.Namespace) -> Outcome:
    """Pairs of trials."""
    found: dict[str, list[dict[str, Any]]] = {PLAIN: [], SLOW: []}
    with scratch() as folder, maru_server(folder, "512M") as transfer:
        late = folder / "late.sock"
        url = transfer["kv_connector_extra_config"]["maru_server_url"]
        with delayed(late, Path(url.removeprefix("ipc://"))) as way:
            model = prepared_model()
            slow = with_settings(transfer, {**options.settings, "maru_server_url": f"ipc://{late}"})
            arguments = {
                PLAIN: cpu_engine(model, None, eager=options.eager),
                SLOW: cpu_engine(model, slow, eager=options.eager),
            }
            with engines_in_turn(folder, arguments) as engines:
                for number in range(options.pairs + 1):
                    for name in sorted(engines, reverse=number % 2 == 1):
                        with awake(engines[name]) as engine:
                            if name == PLAIN:
                                engine.forget()
                                figures = figures_of(engine.run(requests(number)))
                            else:
                                figures = slow_trial(engine, way, number)
                        # The first pair touches memory and code for the first time.
                        if number:
                            found[name].append(figures)
                            print(f"pair {number}, {name}: {json.dumps(figures)}", file=sys.stderr, flush=True)
    return judge(found, options.pairs)


def judge(found: dict[str, list[dict[str, Any]]], pairs: int) -> Outcome:
    """The table and bounds."""
    table = [["", "time per token ms", "median gap ms", "3 longest gaps ms", "TTFT of others ms", "longest"]]
    for name, trials in found.items():
        waits = [ttft * 1e3 for one in trials for ttft in one["ttft"]]
        parts = [statistics.median(one[key] for one in trials) for key in ("tpot_ms", "median_gap_ms", "prompts_ms")]
        times = [statistics.median(waits), max(waits)]
        table.append([name, *(f"{part:.2f}" for part in parts[:2]), *(f"{time:.0f}" for time in (parts[2], *times))])
    ratio = statistics.median(
        slow["tpot_ms"] / plain["tpot_ms"] for plain, slow in zip(found[PLAIN], found[SLOW], strict=True)
    )
    longest = {name: max(ttft for one in trials for ttft in one["ttft"]) for name, trials in found.items()}
    back = max(one["resumed"] for one in found[SLOW])
    return Outcome(
        table,
        {"trials": found, "tpot_ratio": ratio, "longest_ttft": longest, "resumed": back},
        [
            Bound("time per token of others, slow server / without", ratio, OTHERS),
            Bound("longest TTFT, slow server less without, s", longest[SLOW] - longest[PLAIN], LOOKUP),
            Bound("until there are hits again, s", back, RESUMED),
        ],
        [
            f"{pairs} pairs: {DECODED} tokens decoded while {len(ARRIVALS)} requests of {LONG} tokens come; every "
            f"answer of the server takes {ANSWER:g} s"
        ],
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """How long it takes."""
    parser.add_argument("--pairs", type=int, default=8, help="pairs of trials (default 8)")
    add_engine_options(parser)


if __name__ == "__main__":
    sys.exit(main(__doc__, measure, add_options))
