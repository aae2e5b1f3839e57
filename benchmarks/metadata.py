"""How fast the metadata server is, next to a bare echo on the same machine in the same run.

``python benchmarks/metadata.py`` measures ``reserve``, ``commit`` and ``acquire`` of 64 keys by a ``MaruHandler`` at a
``maru serve`` process, so header writes and all of the client's work are included, alternating with an 8-byte
ROUTER/DEALER echo over ``ipc`` between two processes. Twice: into free memory, and into a full pool, where every
``reserve`` needs the room of what is evicted. Both servers run on one processor and the client on another one: where
the kernel puts them otherwise moves every figure by a fifth, and not the same way. It fails (exit 1) when a median in
the free pool is over twice the echo's.

``--compare POLICY`` measures the same calls in full pools of two servers, one that evicts by ``lru`` and one that
evicts by ``POLICY``, in turn on one processor; it fails when the three together take more than 1.15 times as long, by
their medians.

``--fairness`` measures how long another client's PROBE waits while one client sends batches of 100,000 keys and
requests over the limit; it fails when the server worked longer than 10 ms without a look at the others.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import random
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgpack
import zmq

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.outcome import Bound, Outcome, main  # noqa: E402
from maru_core.client import MaruHandler  # noqa: E402
from maru_core.config import MaruConfig  # noqa: E402
from maru_core.namespace import Namespace  # noqa: E402
from maru_core.pool_format import NO_KEY  # noqa: E402
from maru_core.protocol import PROTOCOL_VERSION, Code, Op  # noqa: E402
from maru_core.protocol.codec import column_u8, pack_u32, pack_u64, unpack_u32, unpack_u64  # noqa: E402
from maru_core.testing_server import RunningServer  # noqa: E402

BATCH = 64
CALLS = ("reserve", "commit", "acquire")
GRANULE = 4096
LIMIT = 2.0
#: Rounds after which the leases that were taken end.
RELEASE_EVERY = 64
LONGEST_TURN_MS = 10.0
#: How long a call may take with another eviction policy, in calls with ``lru``.
POLICY_LIMIT = 1.15


class ProtocolClient:
    """The least that a client has to do, without a limit on what it asks for: used where the server is to suffer."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVTIMEO, 60_000)
        self._socket.connect(url)
        self._request = self._epoch = self._session = 0
        self._pack = msgpack.Packer().pack
        self._call(Op.HELLO, PROTOCOL_VERSION, "client", [os.getpid(), "", "benchmark"], b"\x90", 0, [], learn=True)
        self._lock = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._call(Op.ATTACH, True, False)

    def _call(self, op: int, *arguments: Any, learn: bool = False) -> list[Any]:
        self._request += 1
        self._socket.send(self._pack([int(op), self._request, self._epoch, self._session, *arguments]))
        reply = msgpack.unpackb(self._socket.recv())
        if reply[0] != self._request or reply[2] != Code.OK:
            raise RuntimeError(f"{Op(op).name} failed: {reply}")
        if learn:
            self._epoch, self._session, self._path = reply[1], reply[3], reply[4]
        return reply[3:]

    def reserve(self, keys: Sequence[bytes]) -> Any:
        """Statuses, entries, generations."""
        count = len(keys)
        statuses, entries, generations = self._call(Op.RESERVE, 0, b"".join(keys), b"", GRANULE)
        return column_u8(statuses, count), unpack_u32(entries, count), unpack_u32(generations, count)

    def commit(self, grants: Any) -> Any:
        """Commit all that ``reserve`` returned."""
        (statuses,) = self._call(Op.COMMIT, pack_u32(grants[1]), pack_u32(grants[2]), b"")
        return column_u8(statuses, len(grants[1]))

    def acquire(self, keys: Sequence[bytes]) -> Any:
        """Lease, statuses, entries, generations, lengths."""
        count = len(keys)
        lease, statuses, entries, generations, lengths = self._call(Op.ACQUIRE, 0, b"".join(keys), True)
        return (
            lease,
            column_u8(statuses, count),
            unpack_u32(entries, count),
            unpack_u32(generations, count),
            unpack_u64(lengths, count),
        )

    def release(self, lease: Any) -> None:
        """Give back what ``acquire`` returned."""
        self._call(Op.RELEASE, pack_u64([lease[0]]))

    def probe(self, keys: Sequence[bytes]) -> Any:
        """Presence of each key."""
        return column_u8(self._call(Op.PROBE, 0, b"".join(keys))[0], len(keys))

    def stats(self) -> Any:
        """The server's figures."""
        return self._call(Op.STATS)[0]

    def send_oversize(self) -> None:
        """A million keys in one message, from a socket of its own: the server must refuse it."""
        with self._context.socket(zmq.DEALER) as rude:
            rude.setsockopt(zmq.LINGER, 200)
            rude.connect(self._url)
            rude.send(self._pack([int(Op.PROBE), 1, self._epoch, self._session, 0, bytes(32 * 1_000_000)]))

    def close(self) -> None:
        """End the session."""
        self._call(Op.BYE)
        self._context.destroy(0)
        os.close(self._lock)


@contextmanager
def maru_serve(folder: Path, granules: int, policy: str | None = None) -> Iterator[RunningServer]:
    """``maru serve`` on a pool of memory for ``granules`` objects; ends with the block.

    ``policy`` evicts, the server's default for ``None``.
    """
    size = granules * (GRANULE + 128) + (1 << 20)
    settings: dict[str, int | str] = {"pool_size": size, "chunk_size": GRANULE}
    server = RunningServer.start(folder, settings | ({"eviction_policy": policy} if policy else {}))
    try:
        yield server
    finally:
        server.end()


@contextmanager
def process(command: list[str]) -> Iterator[str]:
    """Run a server that prints its address; ends with the block."""
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT)
    try:
        assert child.stdout is not None
        yield child.stdout.readline().decode().strip()
    finally:
        child.terminate()
        child.communicate()


def serve_echo(url: str) -> None:
    """Send every message back, until terminated."""
    socket = zmq.Context.instance().socket(zmq.ROUTER)
    socket.bind(url)
    print(url, flush=True)
    while True:
        socket.send_multipart(socket.recv_multipart())


def timed(into: list[float], call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Run and note the time in microseconds."""
    begin = time.perf_counter()
    result = call(*arguments, **options)
    into.append((time.perf_counter() - begin) * 1e6)
    return result


def measure_operations(server: RunningServer, echo_url: str, rounds: int) -> dict[str, dict[str, float]]:
    """Medians in microseconds, for a pool that is free for ``rounds`` rounds and full afterwards."""
    context = zmq.Context()
    echo = context.socket(zmq.DEALER)
    echo.connect(echo_url)
    config = MaruConfig.from_mapping({"maru_server_url": server.url}, {})
    results: dict[str, dict[str, float]] = {}

    def bounce() -> None:
        echo.send(b"12345678")
        echo.recv()

    with MaruHandler.connect(config, Namespace.of({"purpose": "benchmark"})) as client:
        for phase in ("free", "full"):
            times: dict[str, list[float]] = {"echo": [], **{name: [] for name in CALLS}}
            rounds_of = Rounds(client, times)
            for number in range(rounds):
                timed(times["echo"], bounce)
                rounds_of.one(number == rounds - 1)
            results[phase] = {name: statistics.median(values) for name, values in times.items()}
        evicted = client.server_stats()["counters"]["evicted"]
    context.destroy(0)
    if evicted < rounds * BATCH // 2:
        raise RuntimeError(f"only {evicted} objects were evicted: the pool was not full, the measurement is void")
    return results


class Rounds:
    """Stores and finds 64 fresh keys a round, noting in ``times`` how long that takes by call."""

    def __init__(self, client: MaruHandler, times: dict[str, list[float]]) -> None:
        self._client = client
        self._times = times
        self._leases: list[Any] = []

    def one(self, last: bool = False) -> None:
        """A round; leases end after some of them, and after the ``last``."""
        client, times = self._client, self._times
        blob = secrets.token_bytes(32 * BATCH)
        keys = [blob[at : at + 32] for at in range(0, len(blob), 32)]
        grants = timed(times["reserve"], client.reserve, keys, GRANULE, NO_KEY)
        statuses = timed(times["commit"], client.commit, grants)
        lease = timed(times["acquire"], client.acquire, keys, leading=True)
        if any(grants.statuses) or any(statuses) or lease.leading != BATCH:
            raise RuntimeError("not every key was stored and found: the measurement is void")
        self._leases.append(lease)
        if last or len(self._leases) == RELEASE_EVERY:
            # Leases end in the background, which must not happen while something is timed.
            for lease in self._leases:
                client.release(lease)
            self._leases.clear()
            while client.server_stats()["pools"][0]["leased"]:
                time.sleep(0.001)


def bother(url: str) -> None:
    """The greedy client, a process of its own: batches of 100,000 keys, and requests over the limit, until told."""
    greedy = ProtocolClient(url)
    blob = random.Random(1).randbytes(32 * 100_000)
    many = [blob[at : at + 32] for at in range(0, len(blob), 32)]
    stop = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
    print("ready", flush=True)
    batches = 0
    while not stop.is_set():
        grants = greedy.reserve(many)
        greedy.commit(grants)
        greedy.probe(many)
        lease = greedy.acquire(many)
        if lease[0]:
            greedy.release(lease)
        greedy.send_oversize()
        batches += 1
    greedy.close()
    print(batches, flush=True)


def measure_fairness(url: str, seconds: float) -> dict[str, float]:
    """PROBE latencies of one client in milliseconds, alone and beside a client with very large batches."""
    polite = ProtocolClient(url)
    few = [secrets.token_bytes(32) for _ in range(BATCH)]
    results: dict[str, float] = {}

    def probe_for(span: float, name: str) -> None:
        times: list[float] = []
        until = time.monotonic() + span
        while time.monotonic() < until:
            timed(times, polite.probe, few)
            time.sleep(0.0005)
        times.sort()
        results[f"{name}_median_ms"] = times[len(times) // 2] / 1000
        results[f"{name}_p99_ms"] = times[int(len(times) * 0.99)] / 1000
        results[f"{name}_max_ms"] = times[-1] / 1000

    probe_for(seconds / 4, "alone")
    child = subprocess.Popen(
        [sys.executable, __file__, "--bother", url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    )
    try:
        assert child.stdout is not None
        child.stdout.readline()
        probe_for(seconds, "beside")
        finished = child.communicate(timeout=60)[0]
    finally:
        child.kill()
        child.wait()
    results["batches"] = int(finished)
    results["longest_turn_ms"] = polite.stats()["server"]["longest_turn_s"] * 1000
    polite.close()
    return results


def measure(options: argparse.Namespace) -> Outcome:
    """Operations, or fairness, in a folder of their own."""
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    try:
        if options.compare is not None:
            return run_comparison(folder, options.compare, options.rounds)
        return run_fairness(folder) if options.fairness else run_operations(folder, options.rounds)
    finally:
        shutil.rmtree(folder)


def run_operations(folder: Path, rounds: int) -> Outcome:
    """Table of operations, each beside the echo. Only the pool with free space is judged."""
    echo_url = f"ipc://{folder}/echo.sock"
    echo = [sys.executable, __file__, "--echo", echo_url]
    processors = sorted(os.sched_getaffinity(0))
    # What is started inherits its starter's processors.
    os.sched_setaffinity(0, processors[-1:])
    with maru_serve(folder, rounds * BATCH) as server, process(echo) as where:
        os.sched_setaffinity(0, processors[:1])
        results = measure_operations(server, where, rounds)
    os.sched_setaffinity(0, processors)
    table = [["pool, call", "µs", "x echo"]]
    bounds = []
    for phase, medians in results.items():
        for name, value in medians.items():
            ratio = value / medians["echo"]
            table.append([f"{phase}, {name}", f"{value:.1f}", f"{ratio:.2f}"])
            if name != "echo" and phase == "free":
                bounds.append(Bound(f"{name} / echo", ratio, LIMIT))
    note = f"{BATCH} keys per call, medians of {rounds}, client and header writes included"
    return Outcome(table, results, bounds, [note])


def run_comparison(folder: Path, policy: str, rounds: int) -> Outcome:
    """Table of operations in full pools, by policy."""
    processors = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, processors[-1:])
    names = ("lru", policy)
    times: list[dict[str, list[float]]] = [{name: [] for name in CALLS} for _ in names]
    with ExitStack() as stack:
        measured = []
        for at, name in enumerate(names):
            place = folder / str(at)
            place.mkdir(0o700)
            server = stack.enter_context(maru_serve(place, rounds * BATCH, name))
            config = MaruConfig.from_mapping({"maru_server_url": server.url}, {})
            namespace = Namespace.of({"purpose": "benchmark"})
            measured.append(stack.enter_context(MaruHandler.connect(config, namespace)))
        os.sched_setaffinity(0, processors[:1])
        everyone = [Rounds(client, into) for client, into in zip(measured, times, strict=True)]
        # Once through the pools, which are full then.
        for phase in range(2):
            for number in range(rounds):
                # Whoever comes second finds the processor's caches filled by the other.
                for rounds_of in everyone if number % 2 else everyone[::-1]:
                    rounds_of.one(number == rounds - 1)
            if not phase:
                for into in times:
                    for values in into.values():
                        values.clear()
        evicted = min(client.server_stats()["counters"]["evicted"] for client in measured)
    os.sched_setaffinity(0, processors)
    if evicted < rounds * BATCH // 2:
        raise RuntimeError(f"only {evicted} objects were evicted: the pools were not full, the measurement is void")
    medians = [{name: statistics.median(values) for name, values in into.items()} for into in times]
    for into in medians:
        into["all three"] = sum(into.values())
    table = [["full pool, call", "lru, µs", f"{policy}, µs", "ratio"]]
    for name in medians[0]:
        lru, ours = medians[0][name], medians[1][name]
        table.append([name, f"{lru:.1f}", f"{ours:.1f}", f"{ours / lru:.2f}"])
    ratio = medians[1]["all three"] / medians[0]["all three"]
    bounds = [Bound(f"all three, {policy} / lru", ratio, POLICY_LIMIT)]
    figures = dict(zip(names, medians, strict=True))
    return Outcome(table, figures, bounds, [f"{BATCH} keys per call, medians of {rounds}"])


def run_fairness(folder: Path) -> Outcome:
    """Table of latencies, and the longest time that the server did not look at others."""
    with maru_serve(folder, 120_000) as server:
        results = measure_fairness(server.url, 8.0)
    table = [["figure", "value"], *([name, f"{value:.2f}"] for name, value in results.items())]
    return Outcome(table, results, [Bound("longest_turn_ms", results["longest_turn_ms"], LONGEST_TURN_MS)])


def add_options(parser: argparse.ArgumentParser) -> None:
    """What to measure, and for how long."""
    parser.add_argument("--rounds", type=int, default=3000, help="rounds per phase, at least 2000 for a valid median")
    parser.add_argument("--compare", metavar="POLICY", help="measure full pools with this eviction policy and with lru")
    parser.add_argument("--fairness", action="store_true", help="measure fairness instead")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--echo"]:
        serve_echo(sys.argv[2])
    if sys.argv[1:2] == ["--bother"]:
        bother(sys.argv[2])
        sys.exit()
    sys.exit(main(__doc__, measure, add_options))
