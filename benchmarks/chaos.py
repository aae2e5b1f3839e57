"""Clients and servers that are killed, stopped and forked at any moment, on one small pool that is always full.

Processes store and read objects whose every eight bytes say whose they are, and check all of them on every read. Client
processes are killed and stopped for longer than every timer, some in the middle of a write; servers die inside
``reserve``, ``commit``, ``evict`` and ``release`` at a random instruction, and are started again; some of those that
follow die while they recover. After each batch of events the pool must add up, after each start what was readable
before must be found, and at the end nothing may be left reserved, leased or in quarantine.
With ``--mixed`` there are two pools, objects move between them, and servers die inside ``next_move`` and
``finish_move``, too. ``python benchmarks/chaos.py [--json FILE]`` takes five to ten minutes.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.outcome import Bound, Least, Outcome, main
from maru_core import logs
from tests.chaos.controller import Chaos, ChaosError, Scale, operations
from tests.chaos.tally import FATAL

CLIENT_KILLS = 200
CLIENT_STOPS = 50
KILLS_INSIDE = 10
HITS = 100_000


def measure(options: argparse.Namespace) -> Outcome:
    """Rounds until there are enough of everything."""
    folder = Path(tempfile.mkdtemp(prefix="chaos-", dir="/tmp"))
    begin = time.monotonic()
    share = options.scale
    rounds = 0
    scale = Scale(quota=3 << 20, upper=2 << 20 if options.mixed else None)
    with Chaos(folder, scale, options.seed, warm=not options.cold) as chaos:
        sums = dict.fromkeys((*FATAL, "hits"), 0)
        try:
            for operation in operations(scale):
                chaos.round(operation)
                rounds += 1
                print(
                    f"{time.monotonic() - begin:5.0f} s: round {rounds}, {chaos.events}, inside {chaos.kills_inside}, "
                    f"{len(chaos.problems)} problems",
                    file=sys.stderr,
                )
                enough = (
                    chaos.events["client kills"] >= CLIENT_KILLS * share
                    and chaos.events["client stops"] >= CLIENT_STOPS * share
                    and min(chaos.kills_inside.values()) >= KILLS_INSIDE * share
                    and chaos.hits() >= HITS * share
                )
                if enough or time.monotonic() - begin > options.limit:
                    break
            sums = chaos.finish()
        except ChaosError as error:
            chaos.problems.append(str(error))
    figures = {
        "seconds": time.monotonic() - begin,
        "seed": options.seed,
        "rounds": rounds,
        "events": chaos.events,
        "kills_inside": chaos.kills_inside,
        "counts": sums,
        "slowest_start_s": max(chaos.starts),
        "problems": chaos.problems,
    }
    table = [["what", "number"], ["seed", str(options.seed)]]
    table += [[name, str(number)] for name, number in chaos.events.items()]
    table += [[f"servers that died inside {name}", str(number)] for name, number in chaos.kills_inside.items()]
    table += [[f"clients counted: {name.replace('_', ' ')}", str(number)] for name, number in sums.items()]
    bounds: list[Bound] = [
        Least("client kills", chaos.events["client kills"], CLIENT_KILLS * share),
        Least("client stops beyond every timer", chaos.events["client stops"], CLIENT_STOPS * share),
        *(
            Least(f"server kills inside {name}", chaos.kills_inside[name], KILLS_INSIDE * share)
            for name in scale.operations
        ),
        Least("verified hits", sums["hits"], HITS * share),
        Bound("wrong bytes", sum(sums[name] for name in FATAL), 0),
        Bound("problems", len(chaos.problems), 0),
    ]
    notes = [f"problem: {problem}" for problem in chaos.problems]
    if chaos.problems or options.keep:
        notes.append(f"logs: {folder}")
        shutil.rmtree(folder / "pools", ignore_errors=True)
    else:
        shutil.rmtree(folder)
    return Outcome(table, figures, bounds, notes)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options beyond ``--json``."""
    parser.add_argument("--seed", type=int, default=time.time_ns() % (1 << 30), help="of everything random")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the full numbers [default: 1]")
    parser.add_argument("--limit", type=float, default=1500, metavar="SECONDS", help="give up after [default: 1500]")
    parser.add_argument("--cold", action="store_true", help="allow servers that come back empty")
    parser.add_argument("--mixed", action="store_true", help="two pools of different media, objects move in between")
    parser.add_argument("--keep", action="store_true", help="keep the logs even if all is well")


if __name__ == "__main__":
    logs.setup("error")
    sys.exit(main(__doc__, measure, add_options))
