"""How many keys and calls per second one server serves to 1, 4 and 8 client processes, next to plain pings.

``python benchmarks/throughput.py [--json FILE]`` runs client processes that all do the same at the same time: ``ping``;
``reserve`` and ``commit`` of 64 keys, into a pool that is full; ``acquire`` and ``release`` of 64; ``probe`` of 64. A
``ping`` does nothing, so it is what one server can answer at all with so many clients, on this machine, in this run.
The figure that is judged is calls per second as a share of the pings per second: a call with 64 keys must reach a
seventh. Server and clients share the processors that there are; the rounds of the operations alternate, so that
whatever else happens hits all alike.

``release`` is delivered by a background thread, many in one message; calls are counted as the client makes them.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.outcome import Least, Outcome, main  # noqa: E402
from maru_core import logs  # noqa: E402
from maru_core.client import MaruHandler  # noqa: E402
from maru_core.config import MaruConfig  # noqa: E402
from maru_core.namespace import Namespace  # noqa: E402
from maru_core.pool_format import NO_KEY  # noqa: E402
from maru_core.testing_server import RunningServer  # noqa: E402

BATCH = 64
GRANULE = 4096
CLIENTS = (1, 4, 8)
#: Least share of the pings per second that a call with a batch must reach.
SHARE = 0.15
#: Keys that exist and are looked up, per client.
KNOWN = 16 * BATCH

#: What one step of each measurement is in calls and in keys.
STEPS = {"ping": (1, 0), "reserve + commit": (2, BATCH), "acquire + release": (2, BATCH), "probe": (1, BATCH)}


def fresh_keys(chance: random.Random) -> list[bytes]:
    """A batch that nobody has stored."""
    blob = chance.randbytes(32 * BATCH)
    return [blob[at : at + 32] for at in range(0, len(blob), 32)]


def steps_of(handler: MaruHandler, chance: random.Random) -> tuple[Callable[[], None], dict[str, Callable[[], None]]]:
    """What goes before a measurement, and one step of each; a step that was something else raises RuntimeError."""
    known = [fresh_keys(chance) for _ in range(KNOWN // BATCH)]

    def prepare() -> None:
        """Store again what was evicted, for the next lookups."""
        for keys in known:
            grants = handler.reserve(keys, GRANULE, NO_KEY)
            handler.commit(grants)

    def store(keys: list[bytes]) -> None:
        grants = handler.reserve(keys, GRANULE, NO_KEY)
        if any(grants.statuses) or any(handler.commit(grants)):
            raise RuntimeError("not every key was stored: the measurement is void")

    def acquire() -> None:
        lease = handler.acquire(chance.choice(known), leading=True)
        if lease.leading != BATCH:
            raise RuntimeError("not every key was found: the measurement is void")
        handler.release(lease)

    def probe() -> None:
        if sum(handler.probe(chance.choice(known))) != BATCH:
            raise RuntimeError("not every key was found: the measurement is void")

    return prepare, {
        "ping": lambda: handler.ping() and None,
        "reserve + commit": lambda: store(fresh_keys(chance)),
        "acquire + release": acquire,
        "probe": probe,
    }


def serve_orders(url: str, number: int) -> None:
    """A client process: prepares for each line, and runs steps of that name as soon as it is told when to start."""
    config = MaruConfig.from_mapping({"maru_server_url": url}, {})
    with MaruHandler.connect(config, Namespace.of({"purpose": "throughput", "client": number})) as handler:
        prepare, steps = steps_of(handler, random.Random(number))
        print("ready", flush=True)
        for line in sys.stdin:
            step = steps[line.strip()]
            prepare()
            print("set", flush=True)
            start, end = map(float, sys.stdin.readline().split())
            time.sleep(max(0.0, start - time.monotonic()))
            count = 0
            while time.monotonic() < end:
                step()
                count += 1
            print(count, flush=True)


@contextmanager
def clients(url: str, count: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Client processes that wait for orders; ended with the block."""
    started: list[subprocess.Popen[str]] = []
    try:
        for number in range(count):
            command = [sys.executable, __file__, "--client", url, str(number)]
            started.append(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
            )
        for process in started:
            if answer_of(process) != "ready":
                raise RuntimeError("a client did not come up")
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def answer_of(process: subprocess.Popen[str]) -> str:
    """The next line of a client; raises RuntimeError when it has ended."""
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line:
        raise RuntimeError(f"a client ended with {process.wait()}")
    return line


def steps_per_second(processes: Sequence[subprocess.Popen[str]], name: str, seconds: float) -> float:
    """All of them at once, for so long."""
    for process in processes:
        print(name, file=process.stdin, flush=True)
    for process in processes:
        answer_of(process)
    start = time.monotonic() + 0.05
    for process in processes:
        print(start, start + seconds, file=process.stdin, flush=True)
    return sum(int(answer_of(process)) for process in processes) / seconds


def measure_clients(folder: Path, count: int, seconds: float, rounds: int) -> dict[str, float]:
    """Steps per second of each kind with ``count`` clients; the median of the rounds."""
    rates: dict[str, list[float]] = {name: [] for name in STEPS}
    server = RunningServer.start(folder, {"pool_size": "128M", "chunk_size": GRANULE})
    try:
        with clients(server.url, count) as processes:
            for number in range(rounds + 1):
                for name in STEPS:
                    rate = steps_per_second(processes, name, seconds if number else seconds / 4)
                    # The first round touches memory and code for the first time.
                    if number:
                        rates[name].append(rate)
    finally:
        server.end()
    return {name: statistics.median(values) for name, values in rates.items()}


def measure(options: argparse.Namespace) -> Outcome:
    """All numbers of clients, one table."""
    figures: dict[str, Any] = {}
    table = [["clients, calls", "calls/s", "keys/s", "share of ping"]]
    bounds = []
    for count in options.clients:
        folder = Path(tempfile.mkdtemp(prefix="throughput-", dir="/tmp"))
        try:
            rates = measure_clients(folder, count, options.seconds, options.rounds)
        finally:
            shutil.rmtree(folder)
        figures[str(count)] = {}
        for name, (calls, keys) in STEPS.items():
            share = rates[name] * calls / rates["ping"]
            figures[str(count)][name] = {
                "calls_per_s": rates[name] * calls,
                "keys_per_s": rates[name] * keys,
                "share_of_ping": share,
            }
            cells = [f"{rates[name] * calls:,.0f}", f"{rates[name] * keys:,.0f}" if keys else "", f"{share:.2f}"]
            table.append([f"{count}, {name}", *cells])
            if keys:
                bounds.append(Least(f"{name} with {count} clients, share of ping", share, SHARE))
    return Outcome(table, figures, bounds)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options beyond ``--json``."""
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement [default: 1]")
    parser.add_argument("--rounds", type=int, default=5, help="of all measurements [default: 5]")
    parser.add_argument("--clients", type=int, nargs="+", default=list(CLIENTS), help="numbers of client processes")


if __name__ == "__main__":
    logs.setup("error")
    if sys.argv[1:2] == ["--client"]:
        serve_orders(sys.argv[2], int(sys.argv[3]))
    else:
        sys.exit(main(__doc__, measure, add_options))
