"""Which share of prompt tokens a full pool serves, by order of eviction: replays traces through the real directory.

``--trace FILE`` (any number of times) takes two formats, gzipped or not, told apart by their first line:

- one request per line, ``{"timestamp": ms, "input_length": tokens, "hash_ids": [one per 512 tokens]}`` (Mooncake);
- one session per line, ``{"block_size": 64, "requests": [{"t": s, "in": tokens, "hash_ranges": [[first, count]]}]}``;
  sessions share nothing and start uniformly within four hours (seed 1).

Pools hold 1, 2, 5, 10 % of the distinct full 512-token blocks. A block is a hit when all earlier ones of its request
are. Next to the policy stand, from the same run, the least recently used order (deepest object first, as the directory
always does) and the exact optimum for someone who knows the future and need not store everything. The gap closed is
how far the policy gets from the first to the second.

The public traces are not part of this repository; see docs/eviction.md for where they are.
"""

from __future__ import annotations

import argparse
import gzip
import heapq
import json
import random
import sys
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from maru_core.contracts import PolicyFactory
from maru_core.keys import KEY_SIZE
from maru_core.pool_format import HEADER_SIZE, NO_KEY
from maru_core.protocol.messages import PoolDescriptor, Presence, ReserveStatus
from maru_core.server.arena import Arena
from maru_core.server.directory import Directory
from maru_core.server.eviction import least_recently_used
from maru_core.server.reuse import reuse_policy
from maru_core.server.sessions import SessionRegistry

sys.path.insert(0, str(Path(__file__).resolve().parent))

from outcome import Bound, Outcome, main

BLOCK = 512
SHARES = (1, 2, 5, 10)
POLICIES: dict[str, PolicyFactory] = {
    "lru": least_recently_used,
    "reuse": reuse_policy,
    # Without the guard: also where it loses.
    "reuse-unguarded": partial(reuse_policy, trusting=True),
}
#: Percent of the gap that are to be closed, and the pool sizes that count, by format.
GOALS = {"requests": (30.0, (1, 2, 5, 10)), "sessions": (40.0, (1, 2, 5))}
MOST_BELOW = 0.2
MOST_MICROSECONDS = 5.0
_READY = bytes([Presence.READY])


@dataclass(frozen=True)
class Trace:
    """Requests in order of time (seconds), each a chain of blocks, by number."""

    name: str
    form: str
    times: list[float]
    chains: list[array[int]]
    tokens: int
    blocks: int


def load(path: Path) -> Trace:
    """Read a trace of either format. Raises SystemExit that says what is wrong with the file."""
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt") as file:
            lines = [json.loads(line) for line in file if line.strip()]
        form = "sessions" if "requests" in lines[0] else "requests"
        requests = sorted((_sessions if form == "sessions" else _requests)(lines), key=lambda request: request[0])
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise SystemExit(f"{path} is not a trace in a known format: {type(error).__name__}: {error}") from error
    numbers: dict[Any, int] = {}
    chains = []
    for _, _, parts in requests:
        chain, parent = array("I"), -1
        for part in parts:
            parent = numbers.setdefault((parent, part), len(numbers))
            chain.append(parent)
        chains.append(chain)
    tokens = sum(request[1] for request in requests)
    return Trace(path.name.split(".")[0], form, [request[0] for request in requests], chains, tokens, len(numbers))


def _requests(lines: list[Any]) -> Iterator[tuple[float, int, list[Any]]]:
    for line in lines:
        length = line["input_length"]
        yield line["timestamp"] / 1000, length, line["hash_ids"][: length // BLOCK]


def _sessions(lines: list[Any]) -> Iterator[tuple[float, int, list[Any]]]:
    starts = random.Random(1)
    for number, session in enumerate(lines):
        start = starts.uniform(0, 4 * 3600)
        width = BLOCK // session["block_size"]
        for request in session["requests"]:
            ids = [at for first, many in request["hash_ranges"] for at in range(first, first + many)]
            full = range(0, len(ids) - width + 1, width)
            yield start + request["t"], request["in"], [(number, *ids[at : at + width]) for at in full]


def replay(trace: Trace, places: int, policy: PolicyFactory) -> float:
    """Prefix-hit tokens in percent, with a pool of ``places`` blocks and the clock of the trace."""
    now = 0.0
    descriptor = PoolDescriptor(0, "replay", "", b"", places, 1, 0, places, 0, 0)
    table = memoryview(bytearray(places * HEADER_SIZE))
    arena = Arena.of(0, descriptor, table, policy, lambda: now)
    directory = Directory([arena], lease_share=1.0)
    session_numbers = count(1)
    sessions = SessionRegistry(1, lambda: next(session_numbers))
    session = sessions.open(directory.namespaces.open(b"replay"), "client", "", 0.0)
    names = [number.to_bytes(KEY_SIZE, "big") for number in range(1, trace.blocks + 1)]
    hits = 0
    for lease, (now, chain) in enumerate(zip(trace.times, trace.chains, strict=True), 1):  # noqa: B007 - the clock
        if not chain:
            continue
        keys = [names[block] for block in chain]
        statuses = directory.acquire(session, lease, keys, True)[0]
        found = statuses.count(_READY)
        hits += found
        if found < len(keys):
            parent = keys[found - 1] if found else NO_KEY
            got, entries, generations = directory.reserve(session, keys[found:], (parent,), 1)
            new = got.count(ReserveStatus.NEW)
            directory.commit(session, entries[:new], generations[:new])
        directory.release(session, lease, len(keys))
    return 100.0 * BLOCK * hits / trace.tokens


def optimum(trace: Trace, places: int) -> float:
    """The same for someone who knows the future: keeps the blocks whose next use is nearest, heads before tails."""
    never = len(trace.chains)
    following = [array("I")] * never
    latest = array("I", [never]) * trace.blocks
    for at in range(never - 1, -1, -1):
        chain = trace.chains[at]
        following[at] = array("I", [latest[block] for block in chain])
        for block in chain:
            latest[block] = at
    use = [-1] * trace.blocks
    order: list[tuple[int, int, int]] = []
    held = hits = 0
    for chain, uses in zip(trace.chains, following, strict=True):
        leading = True
        for depth, (block, next_use) in enumerate(zip(chain, uses, strict=True)):
            if use[block] < 0:
                leading = False
                held += 1
            elif leading:
                hits += 1
            use[block] = next_use
            heapq.heappush(order, (-next_use, -depth, block))
        while held > places:
            next_use, _, block = heapq.heappop(order)
            if use[block] == -next_use:
                use[block] = -1
                held -= 1
        if len(order) > 4 * places + 100_000:
            # What was used since is in there twice; a block's depth is the same in every request.
            order = [item for item in order if use[item[2]] == -item[0]]
            heapq.heapify(order)
    return 100.0 * BLOCK * hits / trace.tokens


def decision_cost(policy: PolicyFactory, objects: int = 1_000_000, rounds: int = 2_000, batch: int = 64) -> float:
    """Microseconds per object for choosing it as a victim and taking its successor in, with ``objects`` held."""
    now = 0.0
    made = policy(0, objects + batch, lambda: now)()
    names = count(1)

    def store(entries: list[int], keys: list[bytes]) -> None:
        made.looked_up(keys, 0, ())
        made.worth_of(keys, None)
        made.stored(keys, entries, None)
        made.add(entries[::-1])

    spent = 0.0
    for at in range(objects // batch + rounds):
        now += 0.25
        keys = [next(names).to_bytes(KEY_SIZE, "big") for _ in range(batch)]
        begin = time.perf_counter()
        entries = list(range(at * batch, (at + 1) * batch))
        if at >= objects // batch:
            entries = made.pop(batch)
            while len(entries) < batch:
                entries += made.pop(batch - len(entries))
        store(entries, keys)
        if at >= objects // batch:
            spent += time.perf_counter() - begin
    return spent / rounds / batch * 1e6


def measure(options: argparse.Namespace) -> Outcome:
    """Replay every trace in every pool size."""
    paths = list(options.trace or [])
    if options.traces is not None:
        paths += sorted([*options.traces.glob("*.jsonl.gz"), *options.traces.glob("*.jsonl")])
    if not paths and not options.cost_only:
        raise SystemExit(
            "There is nothing to replay: the public traces are not part of this repository. Give a trace with "
            "--trace FILE, or a folder of them with --traces DIR; docs/eviction.md says where they are."
        )
    policy = POLICIES[options.policy]
    heads = [f"{share} %" for share in SHARES]
    table: list[list[str]] = [["", *heads, "mean"]]
    figures: dict[str, Any] = {"policy": options.policy}
    bounds: list[Bound] = []
    for path in paths:
        trace = load(path)
        goal, counted = GOALS[trace.form]
        rows = {name: [] for name in ("lru", options.policy, "optimum")}
        for share in SHARES:
            places = trace.blocks * share // 100
            rows["lru"].append(replay(trace, places, least_recently_used))
            rows["optimum"].append(optimum(trace, places))
            if options.policy != "lru":
                rows[options.policy].append(replay(trace, places, policy))
        closed = [
            100 * (ours - lru) / (best - lru) if best > lru else 100.0
            for ours, lru, best in zip(rows[options.policy], rows["lru"], rows["optimum"], strict=True)
        ]
        mean = sum(closed[SHARES.index(share)] for share in counted) / len(counted)
        for name, row in rows.items():
            table.append([f"{trace.name}: {name}", *[f"{figure:.2f}" for figure in row], ""])
        table.append(["gap closed, %", *[f"{figure:.1f}" for figure in closed], f"{mean:.1f}"])
        below = max(lru - ours for ours, lru in zip(rows[options.policy], rows["lru"], strict=True))
        figures[trace.name] = {"pools_percent": SHARES, **rows, "gap_closed": closed, "mean_gap_closed": mean}
        bounds.append(Bound(f"{trace.name}: percent of the gap left open, mean", 100 - mean, 100 - goal))
        bounds.append(Bound(f"{trace.name}: most points below lru", below, MOST_BELOW))
    if not options.no_cost:
        # The learned order is what costs.
        cost = decision_cost(POLICIES["reuse-unguarded"] if options.policy == "reuse" else policy)
        figures["microseconds_per_object"] = cost
        bounds.append(Bound("microseconds per object, a million held", cost, MOST_MICROSECONDS))
    notes = ["", "Prefix-hit tokens in percent, by pool size in percent of all distinct blocks."]
    return Outcome(table, figures, bounds, notes)


def options(parser: argparse.ArgumentParser) -> None:
    """Command-line options of this benchmark."""
    parser.add_argument("--trace", type=Path, action="append", metavar="FILE", help="a trace to replay")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="replay every trace in this folder")
    parser.add_argument("--policy", choices=sorted(POLICIES), default="reuse", help="compared with lru (reuse)")
    parser.add_argument("--no-cost", action="store_true", help="leave out the cost of a decision")
    parser.add_argument("--cost-only", action="store_true", help="measure nothing else")


if __name__ == "__main__":
    sys.exit(main(__doc__, measure, options))
