"""Which share of prompt tokens a full pool serves, by order of eviction: replays requests through the real directory.

``--trace FILE`` (any number of times) and ``--traces DIR`` replay traces, see :mod:`traces` for the formats; with
``--mixed`` also each two of them, one after the other and both at once. ``--synthetic`` replays the made-up loads of
:mod:`loads`.

Pools hold a few percent of the distinct full 512-token blocks (``--shares``). A block is a hit when all earlier ones of
its request are. Next to the policy stands, from the same run, the least recently used order (deepest object first, as
the directory always does), and for traces the exact optimum for someone who knows the future and need not store
everything. The gap closed is how far the policy gets from the first to the second.

It fails (exit 1) when the policy is more than 0.2 points below least recently used anywhere, or when choosing a victim
and taking in its successor takes more than 5 µs. How much of the gap was to be closed is printed, too: that goal is
missed, and docs/eviction.md says what was tried. How long requests wait for the directory is judged by ``metadata.py
--compare``.

The public traces are not part of this repository; docs/eviction.md says where they are.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import random
import statistics
import sys
import time
from array import array
from collections.abc import Callable, Iterable
from functools import partial
from itertools import combinations, count
from pathlib import Path
from typing import Any

from maru_core.config import MaruConfig
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

from loads import LOADS
from outcome import Bound, Outcome, align, main
from traces import BLOCK, Trace, beside, followed, load, made_up

SHARES = (1, 2, 5, 10)
MADE_UP_SHARES = (2, 5, 10, 25, 60, 90)
POLICIES: dict[str, PolicyFactory] = {
    "lru": least_recently_used,
    "reuse": reuse_policy,
    # Without the guard: also where it loses.
    "reuse-unguarded": partial(reuse_policy, trusting=True),
}
#: Percent of the gap that were to be closed, and the pool sizes that count, by format.
GOALS = {"requests": (30.0, (1, 2, 5, 10)), "sessions": (40.0, (1, 2, 5))}
MOST_BELOW = 0.2
MOST_MICROSECONDS = 5.0
BATCH = 64
_READY = bytes([Presence.READY])


def opened(places: int, policy: PolicyFactory, clock: Callable[[], float]) -> tuple[Directory, Any]:
    """A directory of one pool of ``places`` granules, and a session."""
    descriptor = PoolDescriptor(0, "replay", "", b"", places, 1, 0, places, 0, 0)
    table = memoryview(bytearray(places * HEADER_SIZE))
    directory = Directory([Arena.of(0, descriptor, table, policy, clock)], lease_share=1.0)
    numbers = count(1)
    sessions = SessionRegistry(1, lambda: next(numbers))
    return directory, sessions.open(directory.namespaces.open(b"replay"), "client", "", 0.0)


def replay(trace: Trace, places: int, policy: PolicyFactory) -> float:
    """Prefix-hit tokens in percent, with a pool of ``places`` blocks and the clock of the trace."""
    now = 0.0
    directory, session = opened(places, policy, lambda: now)
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
    """Processor microseconds per object for choosing a victim and taking its successor in, with ``objects`` held."""
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
        begin = time.thread_time()
        entries = list(range(at * batch, (at + 1) * batch))
        if at >= objects // batch:
            entries = made.pop(batch)
            while len(entries) < batch:
                entries += made.pop(batch - len(entries))
        store(entries, keys)
        if at >= objects // batch:
            spent += time.thread_time() - begin
    return spent / rounds / batch * 1e6


class Turns:
    """Stores and finds batches of fresh keys in a directory whose pool is full, and notes how long that takes.

    ``waiting`` and ``whole``: processor microseconds per object until the answers are there, and with what is done
    after them.
    """

    def __init__(self, policy: PolicyFactory, places: int = 100_000) -> None:
        self._now = 0.0
        self._directory, self._session = opened(places, policy, lambda: self._now)
        self._lease = 0
        self.waiting: list[float] = []
        self.whole: list[float] = []
        for _ in range(places // BATCH + 100):
            self.one()
        self.waiting.clear()
        self.whole.clear()

    def one(self) -> None:
        """RESERVE, COMMIT and ACQUIRE, after each what no reply waits for, and at last the lease ends."""
        directory, session = self._directory, self._session
        self._now += 0.05
        self._lease += 1
        blob = random.randbytes(KEY_SIZE * BATCH)
        keys = [blob[at : at + KEY_SIZE] for at in range(0, len(blob), KEY_SIZE)]
        begin = time.thread_time()
        _, entries, generations = directory.reserve(session, keys, (NO_KEY,), 1, blob)
        reserved = time.thread_time()
        directory.settle()
        settled = time.thread_time()
        directory.commit(session, entries, generations)
        committed = time.thread_time()
        directory.settle()
        ready = time.thread_time()
        directory.acquire(session, self._lease, keys, True, blob)
        acquired = time.thread_time()
        directory.settle()
        directory.release(session, self._lease, BATCH)
        for _ in range(2 * BATCH):
            if not directory.is_short():
                break
            directory.make_ahead()
        done = time.thread_time()
        self.waiting.append((reserved - begin + committed - settled + acquired - ready) / BATCH * 1e6)
        self.whole.append((done - begin) / BATCH * 1e6)


def costs(name: str) -> tuple[list[list[str]], dict[str, Any], list[Bound]]:
    """Table, figures and bounds of what the policy ``name`` costs."""
    # The learned order is what costs.
    names = ("lru", "reuse-unguarded" if name == "reuse" else name)
    decisions = [decision_cost(POLICIES[each]) for each in names]
    turns = [Turns(POLICIES[each]) for each in names]
    gc.collect()
    for at in range(2000):
        for each in turns if at % 2 else turns[::-1]:
            each.one()
    waiting = [statistics.median(each.waiting) for each in turns]
    whole = [statistics.median(each.whole) for each in turns]
    table = [["processor µs per object", "lru", names[1], "ratio"]]
    rows = {"a decision, a million held": decisions, "until the answers": waiting, "in all": whole}
    for row, (lru, ours) in rows.items():
        table.append([row, f"{lru:.2f}", f"{ours:.2f}", f"{ours / lru:.2f}"])
    # How long requests wait is judged end to end, by metadata.py --compare.
    bounds = [Bound("microseconds per object, a million held", decisions[1], MOST_MICROSECONDS)]
    return table, {row: dict(zip(names, figures, strict=True)) for row, figures in rows.items()}, bounds


def compared(trace: Trace, name: str, shares: Iterable[int], best: bool) -> dict[str, Any]:
    """Percent of tokens that are served, by order and size of the pool; ``best``: also by the optimum."""
    rows: dict[str, Any] = {"pools_percent": list(shares), "lru": [], name: []}
    for share in rows["pools_percent"]:
        places = max(8, trace.blocks * share // 100)
        rows["lru"].append(replay(trace, places, least_recently_used))
        if name != "lru":
            rows[name].append(replay(trace, places, POLICIES[name]))
        if best:
            rows.setdefault("optimum", []).append(optimum(trace, places))
    rows["below"] = max(lru - ours for ours, lru in zip(rows[name], rows["lru"], strict=True))
    return rows


def gap_closed(trace: Trace, rows: dict[str, Any], name: str) -> tuple[list[float], list[str]]:
    """Percent of the gap that are closed by size of the pool, and what to say about the goal."""
    closed = [
        100 * (ours - lru) / (best - lru) if best > lru else 100.0
        for ours, lru, best in zip(rows[name], rows["lru"], rows["optimum"], strict=True)
    ]
    goal, counted = GOALS.get(trace.form, (0.0, ()))
    part = [figure for share, figure in zip(rows["pools_percent"], closed, strict=True) if share in counted]
    if not part or len(part) < len(counted):
        return closed, []
    mean = sum(part) / len(part)
    sizes = ", ".join(map(str, counted))
    verdict = "reached" if mean >= goal else "missed (not judged)"
    return closed, [f"{trace.name}: {mean:.1f} % of the gap closed (mean of {sizes} %), goal {goal:g} %: {verdict}"]


def measure(options: argparse.Namespace) -> Outcome:
    """Replay everything in every pool size."""
    paths = list(options.trace or [])
    if options.traces is not None:
        paths += sorted([*options.traces.glob("*.jsonl.gz"), *options.traces.glob("*.jsonl")])
    if not paths and not options.cost_only and options.synthetic is None:
        raise SystemExit(
            "There is nothing to replay: the public traces are not part of this repository. Give a trace with "
            "--trace FILE, or a folder of them with --traces DIR; docs/eviction.md says where they are. "
            "--synthetic replays made-up loads."
        )
    name = options.policy
    figures: dict[str, Any] = {"policy": name}
    bounds: list[Bound] = []
    table: list[list[str]] = []
    notes: list[str] = []
    read = [] if options.cost_only else [load(path) for path in paths]
    mixed = [mix(*two) for two in combinations(read, 2) for mix in (followed, beside)] if options.mixed else []
    shares = options.shares or (MADE_UP_SHARES if options.synthetic is not None and not read else SHARES)
    if not options.cost_only:
        table.append(["", *[f"{share} %" for share in shares]])
    for trace in [*read, *mixed]:
        rows = compared(trace, name, shares, trace.form in GOALS)
        for row in dict.fromkeys(("lru", name, "optimum")):
            if row in rows:
                table.append([f"{trace.name}: {row}", *[f"{figure:.2f}" for figure in rows[row]]])
        if "optimum" in rows:
            rows["gap_closed"], goals = gap_closed(trace, rows, name)
            table.append(["gap closed, %", *[f"{figure:.1f}" for figure in rows["gap_closed"]]])
            notes += goals
        figures[trace.name] = rows
        bounds.append(Bound(f"{trace.name}: most points below lru", rows["below"], MOST_BELOW))
    wanted = None if options.cost_only else options.synthetic
    for title, make in LOADS.items():
        if wanted is None or wanted not in title:
            continue
        rows = compared(made_up(title, make()), name, shares, False)
        cells = [f"{lru:.2f} {ours - lru:+.2f}" for lru, ours in zip(rows["lru"], rows[name], strict=True)]
        table.append([title, *cells])
        figures[title] = rows
        bounds.append(Bound(f"{title}: most points below lru", rows["below"], MOST_BELOW))
    if table:
        notes.insert(0, "Prefix-hit tokens in percent, by pool size in percent of all distinct blocks.")
        if wanted is not None:
            notes.insert(1, f"Made-up loads: lru, and how much more {name} serves.")
    if not options.no_cost:
        cost_table, figures["microseconds_per_object"], more = costs(name)
        bounds += more
        table, notes = (table, [*notes, "", *align(cost_table)]) if table else (cost_table, notes)
    return Outcome(table, figures, bounds, notes)


def percents(text: str) -> tuple[int, ...]:
    """``1,2,5``."""
    return tuple(int(part) for part in text.split(","))


def options(parser: argparse.ArgumentParser) -> None:
    """Command-line options of this benchmark."""
    default = MaruConfig().eviction_policy
    parser.add_argument("--trace", type=Path, action="append", metavar="FILE", help="a trace to replay")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="replay every trace in this folder")
    parser.add_argument("--mixed", action="store_true", help="also each two traces one after the other, and at once")
    parser.add_argument(
        "--synthetic", nargs="?", const="", metavar="TEXT", help="made-up loads, too: all, or those named like TEXT"
    )
    parser.add_argument("--shares", type=percents, metavar="PERCENTS", help="pool sizes [default: 1,2,5,10]")
    parser.add_argument(
        "--policy", choices=sorted(POLICIES), default=default, help=f"compared with lru [default: {default}]"
    )
    parser.add_argument("--no-cost", action="store_true", help="leave out what it costs")
    parser.add_argument("--cost-only", action="store_true", help="measure nothing else")


if __name__ == "__main__":
    sys.exit(main(__doc__, measure, options))
