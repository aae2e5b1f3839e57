"""What else runs on a GPU while bulk loads and stores do: matrix products, and another stream's small copies.

Beside endless moves of 16,384 tokens (2 GiB, geometry of gpu_copy.py) by the engines ``kernel`` and ``layerwise``, in
every way that they have: how much slower a stream of products of 8192 x 8192 gets (at most 3 %), and how much later a
copy of 16 KiB to the device, such as a step's inputs, arrives (at most 1 ms). Both sides alternate in one run. Needs a
CUDA device and the native library. Run: ``python benchmarks/gpu_interference.py [--json FILE]``.

A copy is timed by the device, from when its stream reaches it. One whose submission took over 0.2 ms is not counted
there, because the host then held it up; what the caller saw, from before the call until the copy was done, is shown
for all of them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attrs import evolve

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpu_copy import BYTES, STORED, Bench, add_tuning, tuned
from benchmarks.gpu_layers import requests
from benchmarks.outcome import Bound, Outcome, main
from maru_core.config import PluginSettings
from maru_core.contracts import LoadsByLayer, Transfer, TransferEngine
from maru_core.geometry import ChunkCopy, ObjectLayout
from maru_core.host import PluginHost
from maru_transfer.kernel import KernelEngine

LAYOUT = "planes apart, NHD"
ENGINES = ("kernel", "layerwise")
#: Share by which products may be slower, milliseconds by which a copy may be later.
SLOWDOWN, DELAY_MS = 0.03, 1.0
#: Seconds of submitting a copy from which on the figure is the host's, not the device's.
INTERRUPTED = 0.0002
SMALL = 16 << 10


class Endless:
    """Runs ``move`` again and again on a thread and a stream of its own while it is let."""

    def __init__(self, move: Callable[[], None]) -> None:
        self._move = move
        self._go, self._idle, self._end = threading.Event(), threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        #: Finished moves, and seconds in which they were let.
        self.moves = 0
        self.seconds = 0.0

    def _run(self) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                while True:
                    if not self._go.is_set():
                        self._idle.set()
                        self._go.wait()
                        self._idle.clear()
                    if self._end.is_set():
                        return
                    began = time.perf_counter()
                    self._move()
                    self.seconds += time.perf_counter() - began
                    self.moves += 1
        except BaseException as error:  # noqa: BLE001 - told by whoever waits for it
            self._error = error
        finally:
            self._idle.set()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Moves are under way for as long as the block takes."""
        before = self.moves
        self._idle.clear()
        self._go.set()
        try:
            while self.moves == before and self._error is None:
                time.sleep(0.001)
            yield
        finally:
            self._go.clear()
            self._idle.wait()
        if self._error is not None:
            raise RuntimeError("the endless move ended") from self._error

    def close(self) -> None:
        """End the thread."""
        self._end.set()
        self._go.set()
        self._thread.join()

    def start(self) -> Endless:
        """Start the thread."""
        self._thread.start()
        return self

    @property
    def rate(self) -> float:
        """Bytes per second while it was let."""
        return self.moves * BYTES / self.seconds if self.seconds else 0.0


@contextmanager
def endless(move: Callable[[], None]) -> Iterator[Endless]:
    """One, started; ended with the block."""
    found = Endless(move).start()
    try:
        yield found
    finally:
        found.close()


class Products:
    """A stream of matrix products."""

    def __init__(self, size: int = 8192) -> None:
        self._a, self._b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        self._out = torch.empty_like(self._a)
        self._stream = torch.cuda.Stream()

    def seconds(self, count: int) -> float:
        """Seconds on the device for ``count`` of them, all submitted at once."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self._stream):
            begin.record()
            for _ in range(count):
                torch.mm(self._a, self._b, out=self._out)
            end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


@dataclass
class Copies:
    """Milliseconds of small copies: on the device, as the caller saw them, and how many the host held up."""

    device: list[float] = field(default_factory=list)
    caller: list[float] = field(default_factory=list)
    held_up: int = 0

    def figures(self) -> dict[str, float]:
        """Quantiles."""
        return {
            "samples": len(self.caller),
            "held_up": self.held_up,
            **{f"device_{name}": quantile(self.device, share) for name, share in QUANTILES.items()},
            **{f"caller_{name}": quantile(self.caller, share) for name, share in QUANTILES.items()},
        }


QUANTILES = {"median": 0.5, "p99": 0.99, "worst": 1.0}


def quantile(values: list[float], share: float) -> float:
    """The smallest value that at least ``share`` of all do not exceed; NaN of none."""
    if not values:
        return float("nan")
    return sorted(values)[max(0, -(-round(len(values) * share * 1e6) // 1_000_000) - 1)]


class SmallCopies:
    """Copies of 16 KiB to the device, in turn on several streams, because the driver puts streams into few queues."""

    def __init__(self) -> None:
        self._source = torch.ones(SMALL, dtype=torch.uint8, pin_memory=True)
        self._target = torch.empty(SMALL, dtype=torch.uint8, device="cuda")
        self._streams = [torch.cuda.Stream() for _ in range(16)]

    def sample(self, seconds: float, found: Copies) -> None:
        """Add what is measured for so long."""
        until = time.perf_counter() + seconds
        turn = 0
        while time.perf_counter() < until:
            turn += 1
            with torch.cuda.stream(self._streams[turn % len(self._streams)]):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                called = time.perf_counter()
                begin.record()
                self._target.copy_(self._source, non_blocking=True)
                end.record()
                submitted = time.perf_counter()
            end.synchronize()
            found.caller.append((time.perf_counter() - called) * 1e3)
            if submitted - called > INTERRUPTED:
                found.held_up += 1
            else:
                found.device.append(begin.elapsed_time(end))
            time.sleep(0.0005)


def slowdown(moves: Endless, products: Products, pairs: int, count: int) -> dict[str, Any]:
    """Products alone and beside ``moves``, in turn; the share by which the median pair is slower."""
    alone, beside = [], []
    for number in range(pairs + 1):
        before = products.seconds(count)
        with moves.running():
            with_it = products.seconds(count)
        # The first pair warms up.
        if number:
            alone.append(before / count)
            beside.append(with_it / count)
    ratios = [one / other for one, other in zip(beside, alone, strict=True)]
    return {"alone": alone, "beside": beside, "slowdown": statistics.median(ratios) - 1}


def lateness(moves: Endless, copies: SmallCopies, seconds: float) -> dict[str, Any]:
    """Copies alone and beside ``moves``."""
    idle, busy = Copies(), Copies()
    copies.sample(0.1, Copies())
    for _ in range(2):
        copies.sample(seconds / 4, idle)
        with moves.running():
            copies.sample(seconds / 2, busy)
    late = quantile(busy.device, 1.0) - quantile(idle.device, 0.5)
    return {"idle": idle.figures(), "busy": busy.figures(), "late": late}


@contextmanager
def ways(bench: Bench, engine: TransferEngine, order: str) -> Iterator[dict[str, Callable[[], None]]]:
    """Every way in which the engine moves the request, by name: objects of all layers and of one."""
    table, paged = bench.tables[order], bench.paged(LAYOUT)
    with ExitStack() as stack:

        def opened(stored: ObjectLayout) -> Transfer:
            return stack.enter_context(closing(engine.open(list(bench.pages), paged, stored)))

        whole = opened(STORED)
        found: dict[str, Callable[[], None]] = {
            "load": lambda: whole.load(table, bench.copies),
            "store": lambda: whole.store(table, bench.copies),
        }
        if isinstance(whole, LoadsByLayer):
            parts, each = opened(evolve(STORED, num_layers=1)), {name: r[1] for name, r in requests(bench).items()}
            assert isinstance(parts, LoadsByLayer)
            for where in ("", ", objects scattered"):
                chunks, layers = each[f"chunkwise{where}"], each[f"layerwise{where}"]
                found |= {
                    f"load by layer{where}": partial(by_layer, whole, table, chunks),
                    f"load by layer, an object each{where}": partial(by_layer, parts, table, layers),
                    f"store, an object for each layer{where}": partial(parts.store, table, layers),
                }
        yield found


def by_layer(transfer: LoadsByLayer, table: Sequence[int], copies: Sequence[ChunkCopy]) -> None:
    """A load whose layers nobody waits for."""
    transfer.begin_load(table, copies).finish()


def alone(what: str, busy: Mapping[str, float], idle: Mapping[str, float]) -> str:
    """What the table does not say."""
    return (
        f"{what}: {busy['samples']} copies, {busy['held_up']} held up by the host; alone they took "
        f"{idle['device_median']:.3f} ms on the device (worst {idle['device_worst']:.3f}), the caller saw "
        f"{idle['caller_median']:.3f} (worst {idle['caller_worst']:.3f})"
    )


def measure(options: argparse.Namespace) -> Outcome:
    """Every way, with blocks in random order and in a row."""
    bench, products, copies = Bench(), Products(), SmallCopies()
    table = [["beside", "GB/s", "products slower by", "copy late by ms", "device p99", "caller p99", "caller worst"]]
    figures: dict[str, Any] = {}
    bounds: list[Bound] = []
    notes: list[str] = []
    host = PluginHost.discover(PluginSettings(allowed=()))
    for engine in (host.engine(name) for name in ENGINES if name in host.engines()):
        if isinstance(engine, KernelEngine):
            engine = evolve(engine, tuning=tuned(options))
        for order in bench.tables:
            with ways(bench, engine, order) as moving:
                for name, move in moving.items():
                    what = f"{engine.name}: {name}, {order}"
                    with endless(move) as moves:
                        slower = slowdown(moves, products, options.pairs, options.products)
                        late = lateness(moves, copies, options.seconds)
                        rate = moves.rate
                    busy = late["busy"]
                    shown = [f"{busy[key]:.3f}" for key in ("device_p99", "caller_p99", "caller_worst")]
                    gap = f"{slower['slowdown']:.2%}"
                    table.append([what, f"{rate / 1e9:.1f}", gap, f"{late['late']:.3f}", *shown])
                    notes.append(alone(what, busy, late["idle"]))
                    figures[what] = {"bytes_per_second": rate, "products": slower, "copies": late}
                    bounds.append(Bound(f"{what}: products slower by", slower["slowdown"], SLOWDOWN))
                    bounds.append(Bound(f"{what}: copy later by, ms", late["late"], DELAY_MS))
    return Outcome(table, figures, bounds, notes)


def add_options(parser: argparse.ArgumentParser) -> None:
    """How long it takes."""
    add_tuning(parser)
    parser.add_argument("--pairs", type=int, default=5, help="windows of products alone and beside (default 5)")
    parser.add_argument("--products", type=int, default=150, help="products in a window (default 150, about 0.2 s)")
    parser.add_argument("--seconds", type=float, default=2.0, help="of sampling copies, per way (default 2)")


if __name__ == "__main__":
    sys.exit(main(__doc__, measure, add_options))
