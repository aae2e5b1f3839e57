"""What a request that decodes notices of another one's hit: loaded inside a step, between steps, or not loaded at all.

SmolLM2-135M on the CPU engine. While one request decodes, another comes whose 3,080 tokens were seen before. An engine
with ``maru_async_load`` and one without take turns; the one whose turn it is not is stopped. In each, hits from Maru
alternate with hits in vLLM's own prefix cache, where nothing is loaded: what these cost the decoding request, the new
one's own computation costs. Exits with 1 when the longest gap between two tokens, over the steady gap just before,
is with ``maru_async_load`` not shorter than without, or over 1.25 times that of a hit that loads nothing.

Run in ``.venv``, which scripts/setup-env.sh makes: ``python benchmarks/decode_interference.py [--json FILE]``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.offline import PROMPT_TOKENS, maru_server, prepared_model, random_prompt, scratch
from benchmarks.online import Ask, OnlineEngine, Run, awake, cpu_engine, engines_in_turn, with_settings
from benchmarks.outcome import Bound, Outcome, main

#: Longest gap with an asynchronous load: over that with a synchronous one, and over that with nothing to load.
OF_SYNC, OF_NOTHING = 1.0, 1.25
#: All whole blocks of the prompt.
HIT_TOKENS = PROMPT_TOKENS - 8
#: Tokens of the decoding request's prompt, and how many it has when the other one comes, and when it ends.
SHORT, BEFORE, DECODED = 64, 24, 64
SYNC, ASYNC = "without maru_async_load", "with maru_async_load"
LOADED, NOT_LOADED = "hit from Maru", "nothing to load"


def gaps_of(run: Run) -> dict[str, Any]:
    """Milliseconds: the median gap before the other request came, and those from then until its first token."""
    decoding, hit = run.answers
    steady = statistics.median(decoding.gaps[2 : BEFORE - 1])
    during = decoding.gaps_between(hit.sent, hit.times[0])
    return {
        "steady": steady * 1e3,
        "during": [gap * 1e3 for gap in during],
        "longest": max(during) * 1e3,
        "stretch": max(during) / steady,
        "ttft": hit.ttft * 1e3,
    }


def trial(engine: OnlineEngine, prompt: list[int], seed: int, *, loads: bool) -> dict[str, Any]:
    """One hit beside one decoding request."""
    engine.forget()
    if not loads:
        engine.ask(prompt)
    decoding = random_prompt(10_000 + seed)[:SHORT]
    run = engine.run([Ask(decoding, DECODED), Ask(prompt, 1, after=(0, BEFORE))])
    cached = run.answers[1].cached
    if cached != HIT_TOKENS:
        raise SystemExit(f"{cached} tokens of the prompt came from a cache, {HIT_TOKENS} should have")
    return gaps_of(run)


def judge(found: Mapping[str, Mapping[str, list[dict[str, Any]]]]) -> Outcome:
    """The table and bounds."""
    table = [["", "steady ms", "longest gap ms", "over steady", "TTFT of the hit ms"]]
    stretches: dict[str, float] = {}
    for name, kinds in found.items():
        for kind, trials in kinds.items():
            steady, longest, stretch, ttft = (
                statistics.median(one[key] for one in trials) for key in ("steady", "longest", "stretch", "ttft")
            )
            stretches[f"{name}, {kind}"] = stretch
            table.append([f"{name}, {kind}", f"{steady:.1f}", f"{longest:.1f}", f"{stretch:.2f}", f"{ttft:.0f}"])
    sync, own, asynchronous = (
        stretches[f"{SYNC}, {LOADED}"],
        stretches[f"{ASYNC}, {NOT_LOADED}"],
        stretches[f"{ASYNC}, {LOADED}"],
    )
    return Outcome(
        table,
        {"trials": found, "stretch_medians": stretches},
        [
            Bound("longest gap, with / without maru_async_load", asynchronous / sync, OF_SYNC),
            Bound("longest gap, with maru_async_load / nothing to load", asynchronous / own, OF_NOTHING),
        ],
        [f"medians of hits of {HIT_TOKENS} tokens beside a request that decodes; gaps count over the steady one"],
    )


def measure(options: argparse.Namespace) -> Outcome:
    """Both engines in turn, both kinds of hits in turn."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {name: {LOADED: [], NOT_LOADED: []} for name in (SYNC, ASYNC)}
    with scratch() as folder, maru_server(folder, "512M") as transfer:
        model = prepared_model()
        arguments = {
            name: cpu_engine(model, with_settings(transfer, {"maru_async_load": name == ASYNC}), eager=options.eager)
            for name in found
        }
        with engines_in_turn(folder, arguments) as engines:
            prompt = random_prompt(1)
            for number in range(options.trials + 1):
                for name in sorted(engines, reverse=number % 2 == 1):
                    with awake(engines[name]) as engine:
                        if not number:
                            engine.ask(prompt)
                        for kind, trials in found[name].items():
                            figures = trial(engine, prompt, number, loads=kind == LOADED)
                            # The first of each touches memory and code for the first time.
                            if number:
                                trials.append(figures)
                                shown = ", ".join(f"{key} {figures[key]:.1f}" for key in ("steady", "longest", "ttft"))
                                print(f"{number}, {name}, {kind}, ms: {shown}", file=sys.stderr, flush=True)
    return judge(found)


def add_options(parser: argparse.ArgumentParser) -> None:
    """How long it takes."""
    parser.add_argument("--trials", type=int, default=12, help="hits of each kind and engine (default 12)")
    parser.add_argument("--eager", action="store_true", help="do not compile the model: starts sooner")


if __name__ == "__main__":
    sys.exit(main(__doc__, measure, add_options))
