"""A server that gets nonsense by the hundred thousand, and a client that works beside it.

``python benchmarks/fuzz.py [--json FILE]`` starts ``maru serve`` and, in processes of their own, senders of random and
mutated messages (types, lengths, nesting, frame counts, HTTP), one that connects by the thousand and speaks below
ZeroMQ, and an honest client that looks up 64 keys again and again and checks what it reads. Afterwards the server must
live, must have met no error of its own, and have its memory back; the honest client's 99th percentile is bounded. Then
decoder, checks and handlers are fuzzed in this process, guided by coverage.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.outcome import Bound, Least, Outcome, main  # noqa: E402
from maru_core import logs  # noqa: E402
from maru_core.client import MaruHandler  # noqa: E402
from maru_core.config import MaruConfig  # noqa: E402
from maru_core.namespace import Namespace  # noqa: E402
from tests.fuzz.guided import CORPUS, Fault, Guided, load, save  # noqa: E402

MESSAGES = 100_000
CONNECTIONS = 5_000
P99_MS = 10.0
GROWTH_MB = 8.0
CONVERSATIONS = 20_000
#: Messages per second of each sender, connections per second, lookups per second.
TALKERS, TALK_RATE, BURROW_RATE, WORK_RATE = 2, 800.0, 80.0, 400.0
#: What each does of its rate at least, and how many seconds longer it may take for that.
SHARE, STARVED = 0.25, 40.0
#: Seconds after which the server forgets sessions that never attached; of itself it waits a minute.
PATIENCE = 1.0


@contextmanager
def serving(folder: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server with a small pool; ended with the block."""
    url = f"ipc://{folder}/server.sock"
    (folder / "pools").mkdir()
    command = [sys.executable, "-m", "tests.chaos.server", "--kill-in", "reserve", "--told", str(folder / "told")]
    command += ["--seed", "0", "--patience", str(PATIENCE), "--", "serve", "--runtime-dir", str(folder), "--url", url]
    command += ["--pool-path", str(folder / "pools"), "--pool-size", "16M", "--granule", "4096", "--idle-exit", "60"]
    with (folder / "server.log").open("wb") as log:
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "MARU_PLUGINS": "none"}
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, env=environ)
    try:
        deadline = time.monotonic() + STARVED
        while not (folder / "server.json").exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((folder / "server.log").read_text())
            time.sleep(0.02)
        yield url, process
    finally:
        process.kill()
        process.wait()


def crowd(url: str, seconds: float, seed: int, kinds: Sequence[tuple[str, float]]) -> list[dict[str, Any]]:
    """Run programs of :mod:`tests.fuzz.attackers` side by side; what each of them did.

    They run for that long, and on a machine that is busy with other work until each has done its share, or for
    ``STARVED`` seconds: a program that never had a processor would show nothing about the server.
    """
    started: list[subprocess.Popen[str]] = []
    try:
        for number, (kind, rate) in enumerate(kinds):
            command = [sys.executable, "-m", "tests.fuzz.attackers", kind, url]
            command += [str(seed + number), str(rate), str(int(rate * seconds * SHARE))]
            environ = {**os.environ, "PYTHONPATH": str(ROOT)}
            started.append(
                subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environ
                )
            )
        time.sleep(seconds)
        deadline = time.monotonic() + STARVED
        for process in started:
            select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
        return [json.loads(process.communicate(timeout=30)[0].splitlines()[-1]) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()


def memory(process: subprocess.Popen[bytes]) -> float:
    """MB of the server's own memory: not the pool, which is shared."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) / 1024


def descriptors(process: subprocess.Popen[bytes]) -> int:
    """Open files of the server."""
    return len(os.listdir(f"/proc/{process.pid}/fd"))


def attack(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Warm up, take the baseline, attack, wait, and look again."""
    attackers = [("talk", TALK_RATE)] * TALKERS + [("burrow", BURROW_RATE)]
    with serving(folder) as (url, process):
        alone = crowd(url, max(2.0, options.seconds / 20), options.seed, [("work", WORK_RATE)])[0]
        # What every session and every kind of message needs once is not what a leak is.
        crowd(url, max(2.0, options.seconds / 10), options.seed + 100, attackers)
        time.sleep(PATIENCE + 2)
        before = memory(process), descriptors(process)
        *reports, beside = crowd(url, options.seconds, options.seed + 200, [*attackers, ("work", WORK_RATE)])
        peak = memory(process)
        time.sleep(PATIENCE + 2)
        alive = process.poll() is None
        after = (memory(process), descriptors(process)) if alive else before
        stats: dict[str, Any] = {}
        if alive:
            config = MaruConfig(server_url=url)
            with MaruHandler.connect(config, Namespace.of({"purpose": "fuzz"})) as handler:
                stats = handler.server_stats()
    (pool,) = stats["pools"] if alive else [{}]
    return {
        "messages": sum(report.get("messages", 0) for report in reports),
        "replies": sum(report.get("replies", 0) for report in reports),
        "connections": sum(report.get("connections", 0) for report in reports),
        "alive": alive,
        "memory_mb": {"before": before[0], "peak": peak, "after": after[0]},
        "descriptors": {"before": before[1], "after": after[1]},
        "counters": stats.get("counters", {"internal_errors": 1}),
        "pool": pool,
        "alone": alone,
        "beside": beside,
        "longest_turn_ms": stats["server"]["longest_turn_s"] * 1e3 if alive else 0.0,
    }


def explore(options: argparse.Namespace) -> dict[str, Any]:
    """The coverage-guided run; starts from the conversations that are kept with the tests."""
    guided = Guided(random.Random(options.seed))
    fault = ""
    begin = time.monotonic()
    try:
        for conversation in load() if CORPUS.exists() else ():
            guided.attempt(conversation)
        known = len(guided.seen)
        guided.run(options.conversations)
    except Fault as error:
        fault = f"{error}"
        known = len(guided.seen)
        (Path(tempfile.gettempdir()) / "maru-fuzz-fault").write_text(repr(error.args))
    if options.keep_corpus:
        save(guided.distil())
    return {
        "conversations": guided.tried,
        "messages": guided.messages,
        "steps": len(guided.seen),
        "new_steps": len(guided.seen) - known,
        "seconds": time.monotonic() - begin,
        "fault": fault,
    }


def measure(options: argparse.Namespace) -> Outcome:
    """Both kinds of fuzzing."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir="/tmp"))
    try:
        found = attack(options, folder)
        log = (folder / "server.log").read_text()
    finally:
        shutil.rmtree(folder)
    guided = explore(options)
    mb, beside = found["memory_mb"], found["beside"]
    share = options.seconds / SECONDS
    table = [
        ["what", "figure"],
        ["messages", str(found["messages"])],
        ["connections below ZeroMQ", str(found["connections"])],
        [
            "server's memory before, peak, after, MB",
            " ".join(f"{mb[name]:.1f}" for name in ("before", "peak", "after")),
        ],
        ["server's open files before, after", "{before} {after}".format(**found["descriptors"])],
        ["longest turn of the server, ms", f"{found['longest_turn_ms']:.1f}"],
        ["honest client alone: median, p99, ms", "{median_ms:.2f} {p99_ms:.2f}".format(**found["alone"])],
        ["honest client beside: median, p99, ms", "{median_ms:.2f} {p99_ms:.2f}".format(**beside)],
        ["objects that it read and checked", str(beside["read"])],
        ["seed", str(options.seed)],
        ["guided conversations, messages", f"{guided['conversations']} {guided['messages']}"],
        ["steps from line to line that they reached", str(guided["steps"])],
    ]
    bounds: list[Bound] = [
        Least("messages", found["messages"], MESSAGES * share),
        Least("connections", found["connections"], CONNECTIONS * share),
        Bound("servers that ended", not found["alive"], 0),
        Bound("internal errors", found["counters"]["internal_errors"], 0),
        Bound("memory growth, MB", mb["after"] - mb["before"], GROWTH_MB),
        Bound("open files more than before", found["descriptors"]["after"] - found["descriptors"]["before"], 4),
        Bound("honest client's p99, ms", beside["p99_ms"], P99_MS),
        Bound("honest client's failed calls and wrong objects", beside["failed"] + beside["wrong"], 0),
        Bound("faults found by guided fuzzing", bool(guided["fault"]), 0),
    ]
    notes = [f"guided fuzzing: {guided['fault']}"] if guided["fault"] else []
    if not found["alive"] or found["counters"]["internal_errors"]:
        notes.append(log[-4000:])
    return Outcome(table, {"attack": found, "guided": guided, "seed": options.seed}, bounds, notes)


#: Long enough for so many messages at these rates, and for a slow start.
SECONDS = 75.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options beyond ``--json``."""
    parser.add_argument("--seed", type=int, default=time.time_ns() % (1 << 30), help="of everything random")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"of the attack [default: {SECONDS:g}]")
    parser.add_argument("--conversations", type=int, default=CONVERSATIONS, help="of the guided run")
    parser.add_argument("--keep-corpus", action="store_true", help=f"for the tests, in {CORPUS.name}")


if __name__ == "__main__":
    logs.setup("error")
    sys.exit(main(__doc__, measure, add_options))
