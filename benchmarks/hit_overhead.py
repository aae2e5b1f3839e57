"""What our path adds to a hit besides bytes, in an engine whose threads all share one interpreter lock, as on a GPU.

vLLM's CPU engine with core and worker in one process, a tiny model, prompts of 16,389 tokens of which 16,384 are
cached, 32 new tokens, 8 documents in closed loops of 1, 4 and 8 clients. Hits from Maru, of hardly any bytes, take
turns with hits of the same prompts in vLLM's own prefix cache. ``on a bus``: each load sleeps 40 ms in one call
without the lock, as long as the copy of 2 GiB takes; ``ideal``: a bus that serves requests as they come, without a
gap, and then a hit in vLLM's own cache with one client. ``bus used``: from the first request until the last load has
ended. ``--trace`` shows where the time of a hit goes and what each hook costs vLLM's thread.
``--overlap``: loads go layer by layer on that bus instead, and hits that are released as soon as they may take turns
with those of ``maru_overlap_spare_decodes``.

Exits with 1 when a hit with one client takes over twice as long as in vLLM's own cache, when the mean on the bus is
over 1.3 times the ideal one, or when 8 clients use less than 0.8 of the bus; with ``--overlap`` when sparing decodes
leaves steps with several clients over half of the time that they wait for loads, or makes TTFT a fifth longer.
Run in ``.venv``, which scripts/setup-env.sh makes: ``python benchmarks/hit_overhead.py [--json FILE]``.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpu_engines import SMALL, write_model
from benchmarks.offline import maru_server, scratch
from benchmarks.online import SETTINGS, Ask, OnlineEngine, Run, cpu_environment, online_engine, with_settings
from benchmarks.outcome import Bound, Least, Outcome, main
from benchmarks.stages import milliseconds, told

TOKENS, HIT, NEW, DOCUMENTS = 16_389, 16_384, 32, 8
#: Of the model: one load by layer is to be of many.
LAYERS, OVERLAP_LAYERS = 2, 8
#: The smallest that the CPU takes.
BLOCK = 32
#: Of the objects of a hit.
CHUNK = 256
OWN, MARU, BUS = "vLLM's own cache", "Maru", "Maru on a bus"
NOTE = f"hits of {HIT} tokens, {NEW} new ones"
AT_ONCE, SPARED = "released at once", "decodes spared"
#: Added to a hit with one client, over a hit in vLLM's own cache; mean TTFT over the ideal one, by clients.
ADDED, OVER_IDEAL, USED = 1.0, {1: 1.3, 4: 1.3, 8: 1.3}, 0.8
#: With decodes spared over without: what steps wait for loads with several clients, and the mean TTFT.
WAITS, LATER = 0.5, 1.2


@dataclass
class Found:
    """What one kind of runs showed, by clients. ``used``: shares of the bus; ``ideal``: TTFTs with an ideal bus.

    ``gap``: the longest between two tokens, of each run. ``waited``: by steps for loads, per hit, of each run.
    """

    ttft: dict[int, list[float]] = field(default_factory=dict)
    tpot: dict[int, list[float]] = field(default_factory=dict)
    ideal: dict[int, list[float]] = field(default_factory=dict)
    used: dict[int, list[float]] = field(default_factory=dict)
    gap: dict[int, list[float]] = field(default_factory=dict)
    waited: dict[int, list[float]] = field(default_factory=dict)


def ideal(sent: Sequence[float], load: float, step: float) -> list[float]:
    """TTFTs, in the order of ``sent``, when loads follow each other on the bus as requests come. All in seconds."""
    free, found = 0.0, [0.0] * len(sent)
    for index in sorted(range(len(sent)), key=sent.__getitem__):
        free = max(free, sent[index]) + load
        found[index] = free + step - sent[index]
    return found


def used(run: Run, log: Sequence[Sequence[float]]) -> float:
    """Share of the time from the first request until the last load ended in which one was on the bus."""
    first = run.began + min(answer.sent for answer in run.answers)
    return sum(end - begin for begin, end in log) / (max(end for _, end in log) - first)


def documents(vocabulary: int) -> list[list[int]]:
    """Prompts that share nothing."""
    draw = random.Random(6)
    return [draw.choices(range(5, vocabulary), k=TOKENS) for _ in range(DOCUMENTS)]


class Bench:
    """One engine and its documents."""

    def __init__(self, engine: OnlineEngine, prompts: Sequence[Sequence[int]], options: argparse.Namespace) -> None:
        self._engine = engine
        self._asks = [Ask(prompt, NEW) for prompt in prompts]
        self._options = options

    def send(self, clients: int, *, forget: bool) -> Run:
        """All of them: from Maru after vLLM has forgotten them, else from its own cache."""
        if forget:
            self._engine.forget()
        run = self._engine.run(self._asks, clients)
        wrong = [answer.cached for answer in run.answers if answer.cached != HIT]
        if wrong:
            raise SystemExit(f"{len(wrong)} of {len(run.answers)} requests had {wrong} tokens cached and not {HIT}")
        return run

    def store(self) -> None:
        """First sending, one after the other; then once from Maru, so that everything was touched."""
        self._engine.run(self._asks, 1)
        time.sleep(1.0)
        self.send(max(self._options.clients), forget=True)

    def both(self, repeats: int) -> dict[str, Found]:
        """Hits from Maru and in vLLM's own cache, in turn."""
        found = {OWN: Found(), MARU: Found()}
        for _ in range(repeats):
            for clients in self._options.clients:
                for name, one in found.items():
                    _add(one, clients, self.send(clients, forget=name == MARU))
        return found

    def on_bus(self, repeats: int, load: float, step: float) -> Found:
        """Hits from Maru whose loads take ``load`` seconds."""
        found = Found()
        self.pace(load)
        for _ in range(repeats):
            for clients in self._options.clients:
                self._engine.rpc("maru_bus")
                run = self.send(clients, forget=True)
                _add(found, clients, run)
                found.ideal.setdefault(clients, []).extend(ideal([one.sent for one in run.answers], load, step))
                found.used.setdefault(clients, []).append(used(run, self._engine.rpc("maru_bus")))
        self.pace(0.0)
        return found

    def spared(self, repeats: int, load: float) -> dict[str, Found]:
        """Hits from Maru whose loads take ``load`` seconds, released in both ways in turn."""
        found = {AT_ONCE: Found(), SPARED: Found()}
        self.pace(load)
        for number in range(repeats):
            for clients in self._options.clients:
                for name in sorted(found, reverse=number % 2 == 1):
                    self._engine.rpc("maru_spare", name == SPARED)
                    _add(found[name], clients, self.send(clients, forget=True))
                    waited = self._engine.rpc("maru_waited") / DOCUMENTS
                    found[name].waited.setdefault(clients, []).append(waited)
        self.pace(0.0)
        return found

    def pace(self, load: float) -> None:
        """How many seconds of the bus a hit takes; 0: none but its copy's own."""
        self._engine.rpc("maru_pace", load * 1e3 / (HIT // CHUNK * self._options.objects))

    def traced(self, clients: int, *, forget: bool) -> tuple[Run, dict[str, Any]]:
        """One run that is watched."""
        if forget:
            self._engine.forget()
        self._engine.rpc("maru_watch")
        run = self.send(clients, forget=False)
        return run, self._engine.rpc("maru_watched")


def _add(found: Found, clients: int, run: Run) -> None:
    found.ttft.setdefault(clients, []).extend(answer.ttft for answer in run.answers)
    found.tpot.setdefault(clients, []).extend(answer.tpot for answer in run.answers)
    found.gap.setdefault(clients, []).append(max(gap for answer in run.answers for gap in answer.gaps))


def judge(plain: Mapping[str, Found], bus: Found) -> Outcome:
    """The table and bounds."""
    own, maru = plain[OWN], plain[MARU]
    table = [["TTFT ms, median / 95 %", "own cache", "Maru", "added", "on a bus", "ideal", "over it", "bus used"]]
    bounds: list[Bound] = []
    for clients in own.ttft:
        added = statistics.median(maru.ttft[clients]) - statistics.median(own.ttft[clients])
        # Of all together: with 4 clients some wait for a burst and some for nobody, and a median may be of either.
        over = sum(bus.ttft[clients]) / sum(bus.ideal[clients])
        share = statistics.median(bus.used[clients])
        table.append(
            [
                f"{clients} clients",
                milliseconds(own.ttft[clients]),
                milliseconds(maru.ttft[clients]),
                f"{added * 1e3:.1f}",
                milliseconds(bus.ttft[clients]),
                milliseconds(bus.ideal[clients]),
                f"{over:.2f}",
                f"{share:.2f}",
            ]
        )
        if clients == 1:
            share_added = added / statistics.median(own.ttft[1])
            bounds.append(Bound("1 client: added / a hit in vLLM's own cache", share_added, ADDED))
        bounds.append(Bound(f"{clients} clients on a bus: TTFT / ideal", over, OVER_IDEAL[clients]))
        if clients == DOCUMENTS:
            bounds.append(Least(f"{clients} clients: share of the bus that is used", share, USED))
    return Outcome(table, _figures({**plain, BUS: bus}), bounds, [NOTE])


def judge_spared(found: Mapping[str, Found]) -> Outcome:
    """The table and bounds of ``--overlap``."""
    table = [["", "clients", "TTFT ms, median / 95 %", "per token ms", "longest gap ms", "steps waited ms a hit"]]
    bounds: list[Bound] = []
    at_once, spared = found[AT_ONCE], found[SPARED]
    for clients in spared.ttft:
        for name, one in found.items():
            figures = (one.tpot[clients], one.gap[clients], one.waited[clients])
            medians = (f"{statistics.median(values) * 1e3:.2f}" for values in figures)
            table.append([name, str(clients), milliseconds(one.ttft[clients]), *medians])
        later = statistics.mean(spared.ttft[clients]) / statistics.mean(at_once.ttft[clients])
        bounds.append(Bound(f"{clients} clients: TTFT, {SPARED} / {AT_ONCE}", later, LATER))
        if clients > 1:
            waits = statistics.median(spared.waited[clients]) / statistics.median(at_once.waited[clients])
            bounds.append(Bound(f"{clients} clients: steps' waits for loads, {SPARED} / {AT_ONCE}", waits, WAITS))
    return Outcome(table, _figures(found), bounds, [NOTE, "longest gap and waits: medians of runs"])


def _figures(found: Mapping[str, Found]) -> dict[str, Any]:
    return {
        name: {kind: {str(clients): values for clients, values in part.items()} for kind, part in vars(one).items()}
        for name, one in found.items()
    }


@contextmanager
def engine_of(options: argparse.Namespace) -> Iterator[tuple[OnlineEngine, int]]:
    """The engine and its vocabulary."""
    model = {**SMALL, "num_hidden_layers": options.layers, "num_attention_heads": 2, "num_key_value_heads": 1}
    with scratch() as folder, maru_server(folder, options.pool) as transfer:
        arguments = {
            "model": str(write_model(model, folder)),
            "load_format": "dummy",
            "generation_config": "vllm",
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",
            "max_model_len": 20_480,
            "max_num_batched_tokens": 8192,
            "block_size": BLOCK,
            "enable_prefix_caching": True,
            "enforce_eager": True,
            "distributed_executor_backend": "benchmarks.one_process.OneProcess",
            "worker_extension_cls": "benchmarks.hit_trace.HitTrace",
            "kv_transfer_config": with_settings(transfer, options.settings),
        }
        environment = {**cpu_environment(), "OMP_NUM_THREADS": "1"}
        with online_engine("hit-overhead", options.logs or folder, arguments, environment) as engine:
            yield engine, int(model["vocab_size"])


def measure(options: argparse.Namespace) -> Outcome:
    """Everything, on one engine."""
    options.layers = options.layers or (OVERLAP_LAYERS if options.overlap else LAYERS)
    if options.overlap:
        options.settings = {**options.settings, "maru_overlap_load_with_compute": True}
    options.objects = options.layers if options.settings.get("maru_use_layerwise") else 1
    with engine_of(options) as (engine, vocabulary):
        bench = Bench(engine, documents(vocabulary), options)
        bench.store()
        if options.overlap:
            return judge_spared(bench.spared(options.repeats, options.load_ms / 1e3))
        plain = bench.both(options.repeats)
        step = statistics.median(plain[OWN].ttft[min(options.clients)])
        bus = bench.on_bus(options.repeats, options.load_ms / 1e3, step)
        if options.trace:
            show(bench, options)
    return judge(plain, bus)


def show(bench: Bench, options: argparse.Namespace) -> None:
    """Where the time goes, to people."""
    for clients in options.clients:
        for name in (OWN, MARU, BUS):
            bench.pace(options.load_ms / 1e3 if name == BUS else 0.0)
            print(f"\n{clients} clients, {name}")
            print("\n".join(f"  {line}" for line in told(*bench.traced(clients, forget=name != OWN))))


def add_options(parser: argparse.ArgumentParser) -> None:
    """How long it takes."""
    parser.add_argument("--repeats", type=int, default=3, help="times that all documents are sent (default 3)")
    parser.add_argument("--clients", type=_numbers_of, default=[1, 4, 8], help="default 1,4,8")
    parser.add_argument("--layers", type=int, help=f"of the model (default {LAYERS}, with --overlap {OVERLAP_LAYERS})")
    parser.add_argument("--overlap", action="store_true", help="compare ways to release loads by layer")
    parser.add_argument("--pool", default="1G", help="size of Maru's pool (default 1G)")
    parser.add_argument("--load-ms", type=float, default=40.0, help="a load on the bus (default 40)")
    parser.add_argument("--settings", type=json.loads, default=SETTINGS, metavar="JSON", help="of Maru")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep the engine's log there")
    parser.add_argument("--trace", action="store_true", help="show where the time goes")


def _numbers_of(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main(__doc__, measure, add_options))
