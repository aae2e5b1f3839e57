"""Serving on a GPU: Maru beside vLLM's OffloadingConnector and LMCache's server, on one machine, in alternation.

vLLM's asynchronous engine, Llama-3.1-8B's geometry with random weights, prompts of 16,389 tokens of which a cache can
hold 16,384, 32 new tokens, closed loops of 1, 4 and 8 clients. All engines are up at once and take turns: in each group
8 documents are sent for the first time, then again. Needs a GPU with 141 GB, vLLM with FlashAttention, and LMCache.
Run: ``python benchmarks/serve_gpu.py [--json FILE]``; ``--rehearse`` runs a tiny model on the CPU without peers.

Exits with 1 when a repeated request did not report all its tokens as cached, or in any of these: time to the first
token of repeated requests over 0.80, 0.70, 0.62 times the best peer's (medians at 1, 4 and 8 clients), its 95th
percentile at 4 clients over 200 ms, time per token above the best peer's, a gap between two tokens over 15 ms, tokens
per second below 1.1 times the best peer's, a first sending over 1.02 times that of an engine without a connector, an
object that differs from the pages it was stored from or loaded to, other answers than without a cache, a request of a
burst that is served before an earlier one.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpu_engines import H200, REHEARSAL, Scale, engine_arguments, lmcache_server, offloading, write_model
from benchmarks.offline import cache_folder, maru_server, scratch
from benchmarks.online import SETTINGS, Ask, OnlineEngine, Run, online_engine, with_settings
from benchmarks.outcome import Bound, Least, Outcome, main
from benchmarks.stages import told
from benchmarks.step_trace import timeline

MARU, OTHER, NONE, PEERS = "maru", "maru-b", "none", ("offload256", "lmcache-mp")
#: By clients: the median of TTFT over the best peer's.
TTFT = {1: 0.80, 4: 0.70, 8: 0.62}
TAIL_CLIENTS, TAIL, GAP, THROUGHPUT, POPULATE = 4, 0.200, 0.015, 1.1, 1.02
DOCUMENTS = 8
#: What docs/waiting.md says to turn on.
ON_GPU = {**SETTINGS, "maru_overlap_load_with_compute": True}


class Bench:
    """Engines by name, and what was measured: runs by (engine, clients, phase)."""

    def __init__(self, engines: Mapping[str, OnlineEngine], scale: Scale, options: argparse.Namespace) -> None:
        self._engines = engines
        self._scale = scale
        self._options = options
        self.runs: dict[tuple[str, int, str], list[Run]] = defaultdict(list)

    def documents(self, name: str, number: int, clients: int) -> list[list[int]]:
        """Those of a group: engines that share a pool have their own, others the same as Maru, to compare answers."""
        owner = MARU if name in (NONE, OTHER, *PEERS) else name
        draw = random.Random(f"{owner} {number} {clients}")
        words = range(5, int(self._scale.model["vocab_size"]))
        return [draw.choices(words, k=self._scale.tokens) for _ in range(DOCUMENTS)]

    def send(self, name: str, documents: Sequence[Sequence[int]], clients: int) -> Run:
        """All of them, and then a moment for stores that are still under way, and a step that reports them."""
        engine = self._engines[name]
        run = engine.run([Ask(ids, self._scale.new) for ids in documents], clients)
        time.sleep(self._options.settle)
        engine.ask(random.Random(time.monotonic_ns()).choices(range(5, 4000), k=40), 1)
        engine.forget()
        return run

    def trace(self, name: str, documents: Sequence[Sequence[int]], clients: int) -> None:
        """Once more, and where the time of these hits goes; only while engine and worker are one process."""
        engine = self._engines[name]
        engine.rpc("maru_watch")
        run = engine.run([Ask(ids, self._scale.new) for ids in documents], clients)
        say("\n  ".join([f"{name}, {clients} clients:", *told(run, engine.rpc("maru_watched"))]))
        engine.forget()

    def trace_steps(self, name: str, documents: Sequence[Sequence[int]], clients: int) -> None:
        """Once more, and what each step took; only while engine and worker are one process."""
        engine = self._engines[name]
        engine.rpc("maru_watch_steps")
        run = engine.run([Ask(ids, self._scale.new) for ids in documents], clients)
        say("\n  ".join([f"{name}, {clients} clients:", *timeline(engine.rpc("maru_watched_steps"), run.began)]))
        engine.forget()

    def empty(self) -> None:
        """Empty Maru's pool: whoever does not take part in a reset neither hits nor stores from then on."""
        for name, engine in self._engines.items():
            if name not in (NONE, *PEERS):
                engine.forget(connector=True)

    def warm_up(self, name: str) -> None:
        """Compile, touch memory, take both ways."""
        documents = self.documents(f"{name} warm-up", 0, 0)
        if name == NONE:
            self.send(name, documents[:2], 1)
            return
        for _ in range(2):
            self.send(name, documents[:2], 2)
        self.send(name, [ids[: self._scale.tokens // 8] for ids in documents], DOCUMENTS)

    def group(self, name: str, number: int, clients: int) -> None:
        """One engine's documents, for the first time and again."""
        documents = self.documents(name, number, clients)
        phases = ["cold"] if name == NONE else ["cold", *["warm"] * self._options.warm]
        for phase in phases[1:] if name == OTHER else phases:
            run = self.send(name, documents, clients)
            self.runs[name, clients, phase].append(run)
            one = figures_of([run], self._scale)
            say(
                f"round {number}, {name}, {clients} clients, {phase}: TTFT {one['ttft'] * 1e3:.1f} ms (95 % "
                f"{one['ttft_p95'] * 1e3:.1f}), per token {one['tpot'] * 1e3:.2f}, longest gap {one['gap'] * 1e3:.1f}, "
                f"{one['rate']:.0f} tokens/s, cached {sorted({answer.cached for answer in run.answers})}"
            )

        if self._options.trace and name not in (NONE, *PEERS):
            self.trace(name, documents, clients)
        if self._options.steps and name not in (NONE, *PEERS):
            self.trace_steps(name, documents, clients)

    def check_bytes(self, name: str) -> dict[str, int]:
        """Two documents stored and loaded while every object is compared."""
        engine = self._engines[name]
        engine.rpc("maru_watch_pages")
        documents = self.documents(f"{name} bytes", 0, 0)[:2]
        for _ in range(2):
            self.send(name, documents, 2)
            # Compared pages are free before what was stored from them is committed.
            time.sleep(self._options.settle)
        seen: dict[str, int] = engine.rpc("maru_seen_pages")
        say(f"{name}: {seen}")
        return seen


def say(text: str) -> None:
    """Progress."""
    print(f"[{time.monotonic():.0f}] {text}", file=sys.stderr, flush=True)


def figures_of(runs: Sequence[Run], scale: Scale) -> dict[str, float]:
    """What one engine did in one phase with so many clients. Seconds, tokens per second."""
    answers = [answer for run in runs for answer in run.answers]
    rate = statistics.median(len(run.answers) * (scale.tokens + scale.new) / run.seconds for run in runs)
    ttft = sorted(answer.ttft for answer in answers)
    return {
        "requests": len(answers),
        "ttft": statistics.median(ttft),
        "ttft_p95": ttft[max(0, -(-len(ttft) * 95 // 100) - 1)],
        "tpot": statistics.median(answer.tpot for answer in answers),
        "gap": max(gap for answer in answers for gap in answer.gaps),
        "rate": rate,
        "not_cached": sum(answer.cached != scale.hit for answer in answers),
    }


def differing(runs: Sequence[Run], alone: Run) -> int:
    """Requests of ``runs``, of the same documents, whose answers are not those of ``alone``."""
    pairs = [pair for run in runs for pair in zip(run.answers, alone.answers, strict=True)]
    return sum(list(one.tokens) != list(other.tokens) for one, other in pairs)


Key = tuple[str, int, str]


def judge(runs: Mapping[Key, Sequence[Run]], seen: Mapping[str, Mapping[str, int]], scale: Scale) -> Outcome:
    """The table, and bounds on what ran: without a peer nothing is compared with one."""
    found = {key: figures_of(part, scale) for key, part in sorted(runs.items(), key=lambda item: item[0][1:])}
    table = [["", "clients", "", "TTFT ms", "p95", "per token ms", "longest gap ms", "tokens/s", "not cached"]]
    shown = {"ttft": 1, "ttft_p95": 1, "tpot": 2, "gap": 1}
    for (name, clients, phase), one in found.items():
        times = [f"{one[key] * 1e3:.{digits}f}" for key, digits in shown.items()]
        table.append([name, str(clients), phase, *times, f"{one['rate']:.0f}", f"{one['not_cached']}"])
    bounds: list[Bound] = []
    for name, clients, phase in found:
        if phase == "warm" and name not in PEERS:
            bounds += [*absolute(found, runs, name, clients), *beside_peers(found, name, clients)]
            if name == MARU and (NONE, clients, "cold") in found:
                bounds += beside_none(found, runs, clients)
    for name, counts in seen.items():
        for kind, least in (("stored", 1), ("loaded", counts["stored"])):
            bounds.append(Least(f"{name}: objects {kind} and compared", counts[kind], least))
            bounds.append(Bound(f"{name}: objects {kind} that differ from pages", counts[f"{kind}_wrong"], 0))
    figures = {
        "phases": [{"engine": name, "clients": c, "phase": phase, **one} for (name, c, phase), one in found.items()],
        "objects": seen,
        "ttft": [
            {"engine": name, "clients": c, "phase": phase, "runs": [[a.ttft for a in run.answers] for run in part]}
            for (name, c, phase), part in runs.items()
        ],
    }
    return Outcome(table, figures, bounds)


def overtaken(runs: Sequence[Run], clients: int) -> int:
    """Requests of the first burst, all sent at once, whose first token came well before that of one sent earlier."""
    firsts = [[answer.times[0] for answer in run.answers[:clients]] for run in runs]
    return sum(first < max(times[:index], default=0.0) - GAP for times in firsts for index, first in enumerate(times))


def absolute(
    found: Mapping[Key, Mapping[str, float]], runs: Mapping[Key, Sequence[Run]], name: str, clients: int
) -> list[Bound]:
    """What repeated requests have to reach by themselves."""
    ours, where = found[name, clients, "warm"], f"{name}, {clients} clients"
    bounds = [
        Bound(f"{where}: repeated requests that were not cached", ours["not_cached"], 0),
        Bound(f"{where}: longest gap between tokens, s", ours["gap"], GAP),
        Bound(f"{where}: requests that overtook an earlier one", overtaken(runs[name, clients, "warm"], clients), 0),
    ]
    if clients == TAIL_CLIENTS:
        bounds.append(Bound(f"{where}: 95th percentile of TTFT, s", ours["ttft_p95"], TAIL))
    return bounds


def beside_peers(found: Mapping[Key, Mapping[str, float]], name: str, clients: int) -> list[Bound]:
    """Against the best of the peers that ran, figure by figure."""
    ours, where = found[name, clients, "warm"], f"{name}, {clients} clients"
    peers = [found[peer, clients, "warm"] for peer in PEERS if (peer, clients, "warm") in found]
    if not peers or clients not in TTFT:
        return []
    return [
        Bound(f"{where}: TTFT / best peer", ours["ttft"] / min(one["ttft"] for one in peers), TTFT[clients]),
        Bound(f"{where}: time per token / best peer", ours["tpot"] / min(one["tpot"] for one in peers), 1.0),
        Least(f"{where}: tokens/s / best peer", ours["rate"] / max(one["rate"] for one in peers), THROUGHPUT),
    ]


def beside_none(
    found: Mapping[Key, Mapping[str, float]], runs: Mapping[Key, Sequence[Run]], clients: int
) -> list[Bound]:
    """Against the engine without a connector, which got the same documents."""
    where = f"{MARU}, {clients} clients"
    ratio = found[MARU, clients, "cold"]["ttft"] / found[NONE, clients, "cold"]["ttft"]
    bounds = [Bound(f"{where}: first sending / without", ratio, POPULATE)]
    alone = runs[NONE, clients, "cold"]
    for name, phase in ((MARU, "cold"), (MARU, "warm"), (OTHER, "warm")):
        ours = runs.get((name, clients, phase), ())
        each = len(ours) // len(alone)
        other = sum(differing(ours[n * each : (n + 1) * each], one) for n, one in enumerate(alone))
        if ours:
            bounds.append(Bound(f"{name}, {clients} clients, {phase}: answers other than without", other, 0))
    return bounds


def start(stack: ExitStack, folder: Path, scale: Scale, options: argparse.Namespace) -> dict[str, OnlineEngine]:
    """All engines, side by side unless told otherwise."""
    transfers: dict[str, Any] = {}
    if any(name not in (NONE, *PEERS) for name in options.engines):
        own = stack.enter_context(maru_server(folder, options.pool or scale.pool))
        for name in options.engines:
            if name not in (NONE, *PEERS):
                transfers[name] = with_settings(own, {**options.settings, **options.variant.get(name, {})})
    if PEERS[0] in options.engines:
        transfers[PEERS[0]] = offloading(scale)
    if PEERS[1] in options.engines:
        transfers[PEERS[1]] = stack.enter_context(lmcache_server(scale, folder))
    model = write_model(scale.model, folder)
    environment = {
        "PYTHONHASHSEED": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "LMCACHE_TRACK_USAGE": "false",
        **scale.environment,
    }

    def one(name: str) -> OnlineEngine:
        arguments = engine_arguments(scale, model, transfers.get(name), 1 if name == NONE else max(options.clients))
        # Who compiles at the same time must not write the same files.
        own = {"VLLM_CACHE_ROOT": str(cache_folder() / f"vllm-{name}")}
        return stack.enter_context(online_engine(name, options.logs or folder, arguments, environment | own))

    if options.one_by_one:
        return {name: one(name) for name in options.engines}
    with ThreadPoolExecutor(len(options.engines)) as pool:
        return dict(zip(options.engines, pool.map(one, options.engines), strict=True))


def measure(options: argparse.Namespace) -> Outcome:
    """Groups in turn."""
    scale = REHEARSAL if options.rehearse else H200
    if options.capture_sizes:
        compiled = {"compilation_config": {"cudagraph_capture_sizes": options.capture_sizes}}
        scale = replace(scale, arguments={**scale.arguments, **compiled})
    unknown = [name for name in options.engines if name not in (MARU, OTHER, NONE, *PEERS, *options.variant)]
    if unknown:
        raise SystemExit(f"engines {unknown} are unknown; define them with --variant")
    seen: dict[str, dict[str, int]] = {}
    began = time.monotonic()
    with ExitStack() as stack:
        folder = stack.enter_context(scratch())
        bench = Bench(start(stack, folder, scale, options), scale, options)
        for name in options.engines:
            bench.warm_up(name)
        groups = [(number, clients) for number in range(options.rounds) for clients in options.clients]
        for number, clients in groups:
            if time.monotonic() - began > options.seconds:
                say("no time for more")
                break
            turn = number % len(options.engines)
            order = [*options.engines[turn:], *options.engines[:turn]]
            if OTHER in order:
                # What it loads, Maru has stored.
                order = [*(name for name in order if name != OTHER), OTHER]
            # So that nothing is evicted: whose pages go first is not what is measured here.
            bench.empty()
            for name in order:
                if name != NONE or clients == 1:
                    bench.group(name, number, clients)
        for name in options.engines:
            if name not in (NONE, OTHER, *PEERS) and options.bytes:
                seen[name] = bench.check_bytes(name)
    return judge(bench.runs, seen, scale)


def add_options(parser: argparse.ArgumentParser) -> None:
    """What to compare and how long it takes."""
    names = [MARU, *PEERS, NONE]
    parser.add_argument("--engines", type=_names, default=names, help=f"default {','.join(names)}")
    more = f"another engine with Maru, with these settings besides; as {OTHER} it loads what {MARU} stored"
    parser.add_argument("--variant", type=_variant, action="append", default=[], metavar="NAME=JSON", help=more)
    parser.add_argument("--settings", type=json.loads, default=ON_GPU, metavar="JSON", help="of Maru")
    parser.add_argument("--clients", type=_numbers, default=[1, 4, 8], help="default 1,4,8")
    parser.add_argument("--rounds", type=int, default=2, help="groups of each kind (default 2)")
    parser.add_argument("--warm", type=int, default=2, help="how often documents are sent again (default 2)")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin no group after so many, start included"
    )
    parser.add_argument("--settle", type=float, default=1.0, help="seconds after each sending (default 1)")
    parser.add_argument("--pool", help="size of Maru's pool (default 40G)")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep the engines' logs there")
    parser.add_argument("--no-bytes", dest="bytes", action="store_false", help="do not compare objects with pages")
    parser.add_argument("--trace", action="store_true", help="once per group, show where the time of Maru's hits goes")
    parser.add_argument("--steps", action="store_true", help="likewise, what each step takes processor and device")
    more = "batches for which graphs are captured (default 1,2,4,8, as the peers were measured); vLLM's own go to 512"
    parser.add_argument("--capture-sizes", type=_numbers, metavar="TOKENS", help=more)
    parser.add_argument("--one-by-one", action="store_true", help="start engines one after the other")
    parser.add_argument("--rehearse", action="store_true", help="a tiny model, without a GPU")


def _names(text: str) -> list[str]:
    return text.split(",")


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _variant(text: str) -> tuple[str, dict[str, Any]]:
    name, _, settings = text.partition("=")
    return name, json.loads(settings or "{}")


def prepared(options: argparse.Namespace) -> Outcome:
    """Options as they are used, then :func:`measure`."""
    options.variant = dict(options.variant)
    return measure(options)


if __name__ == "__main__":
    sys.exit(main(__doc__, prepared, add_options))
