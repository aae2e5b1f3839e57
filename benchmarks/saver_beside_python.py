"""A store must take hardly longer than its bytes, and hardly any time of an engine's thread that runs Python beside it.

The real saver stores requests of 64 chunks, planned by the kernel engine's slicer, into a real server's pool, through a
copy that is a sleep without the interpreter's lock, as long as 2 GiB on a bus. Objects are small, so checksums are not
in it. The thread that hands stores over steps meanwhile as vLLM's does: ``empty steps``, ``decode`` steps, or it
``spins``, which is only for comparison (``beside_python.py`` says what each takes). ``in pieces``: a reservation, a
copy with two returns from native code and a commit for each eighth, as it was before a store was one call.
``layerwise``: 32 times as many objects.

Shown are what the saver adds to the copy until the blocks of a request are free, by how much the steps until then were
longer than those before, and the saver's own time of a processor. Exits with 1 when, beside decode or empty steps, the
saver adds more than 15 % to the bytes of a store, to one or to each of several in a row, or computes for more than 5 %
of the time that they take. Run: ``python benchmarks/saver_beside_python.py [--json FILE]``.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from attrs import frozen

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.beside_python import InParts, Whole, steps_of
from benchmarks.outcome import Bound, Outcome, main
from maru_core.client import MaruHandler
from maru_core.config import MaruConfig
from maru_core.geometry import ObjectLayout, PagedLayout, PlaneStrides
from maru_core.namespace import Namespace
from maru_core.testing_server import RunningServer
from maru_integrations.vllm.answers import Answers
from maru_integrations.vllm.copies import ChunkShape
from maru_integrations.vllm.metadata import StoreOp
from maru_integrations.vllm.moving import Link
from maru_integrations.vllm.saver import Saver, SaverSettings
from maru_integrations.vllm.streams import HostLane
from maru_transfer.cuda_library import STORE
from maru_transfer.slices import Limits, Slicer

LAYERS, BLOCK, CHUNK, CHUNKS, PIECES, ROW = 32, 16, 256, 64, 8, 4
BLOCKS = CHUNKS * CHUNK // BLOCK
#: One head of one element: what Python does depends on how many objects there are, not on their bytes.
PAGED = PagedLayout(
    tuple(PlaneStrides(plane * BLOCKS * BLOCK, BLOCK, 1, 1, 1) for plane in range(2)), LAYERS, BLOCKS, BLOCK, 1, 1, 2
)
NAMESPACE = Namespace.of({"purpose": "benchmark"})
BOUND, PROCESSOR = 0.15, 0.05


@frozen
class Format:
    """How chunks are stored: in so many objects each."""

    objects: int

    @property
    def stored(self) -> ObjectLayout:
        """One object."""
        return ObjectLayout(2, LAYERS // self.objects, CHUNK, 1, 2)

    @property
    def shape(self) -> ChunkShape:
        """As the saver is told."""
        return ChunkShape(BLOCK, CHUNK, self.stored.nbytes * self.objects, self.objects)

    def op(self, number: int) -> StoreOp:
        """A prompt that nobody has stored."""
        count = CHUNKS * self.objects
        keys = [number.to_bytes(16, "big") + index.to_bytes(16, "big") for index in range(count)]
        return StoreOp(
            f"r{number}", range(CHUNKS), keys, [bytes(32), *keys[:-1]], list(range(BLOCKS)), number, asynchronous=True
        )


FORMATS = {"": Format(1), "layerwise": Format(LAYERS)}


#: The transfer, and into how many pieces the saver cuts a store.
WAYS = {"in pieces": (InParts, PIECES), "whole": (Whole, 1)}


class Stopwatch(Answers):
    """Notes when the blocks of each store were free, and why objects were not stored."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []
        self.missing: list[str] = []
        self.ended = 0

    def store_ended(self, op: StoreOp, kept: int, reason: str = "") -> None:
        """One more."""
        super().store_ended(op, kept, reason)
        self.missing += [reason] * (len(op.keys) - kept)
        self.ended += 1

    def _has_read(self, op: StoreOp) -> None:
        if op.request_id in self._storing:
            self.times.append(time.perf_counter())
        super()._has_read(op)


def work(count: int) -> int:
    """Python that takes as much time of the processor whatever else runs."""
    value = 0
    for number in range(count):
        value ^= number
    return value


def calibrated() -> float:
    """Turns of :func:`work` in a second that nothing disturbs."""
    count = 20_000
    times = []
    for _ in range(50):
        start = time.perf_counter()
        work(count)
        times.append(time.perf_counter() - start)
    return count / min(times)


def seconds_of(step: Callable[[], None], going_on: Callable[[int], bool]) -> list[float]:
    """How long steps took, as long as ``going_on`` says so of their number."""
    took: list[float] = []
    while going_on(len(took)):
        start = time.perf_counter()
        step()
        took.append(time.perf_counter() - start)
    return took


@frozen
class Took:
    """Seconds: until the blocks of some stores were free, by which steps were longer, and of the saver's processor."""

    whole: float
    steps: float
    processor: float


def measure(
    session: MaruHandler, saver: Saver, answers: Stopwatch, ops: Sequence[StoreOp], step: Callable[[], None]
) -> Took:
    """Hand these stores over between two steps, and step until they are answered."""
    before = statistics.median(seconds_of(step, lambda done: done < 12))
    answers.times.clear()
    answers.ended = 0
    for op in ops:
        answers.store_queued(op)
    used = processor_of("maru-store")
    start = time.perf_counter()
    saver.submit(ops, 0)
    submitted = time.perf_counter() - start
    during = seconds_of(step, lambda _: answers.ended < len(ops))
    used = processor_of("maru-store") - used
    if answers.missing:
        why = ", ".join(sorted(set(answers.missing)))
        raise SystemExit(f"{len(answers.missing)} objects were not stored ({why}): figures of such stores mean nothing")
    answers.take_finished()
    answers.take_metadata()
    for op in ops:  # nothing is evicted while it is measured
        session.delete_keys(op.keys)
    return Took(answers.times[-1] - start, submitted + sum(during) - before * len(during), used)


def processor_of(name: str) -> float:
    """Seconds of a processor that the thread of this name has had; 0 when there is none."""
    idents = [thread.ident for thread in threading.enumerate() if thread.name == name and thread.ident is not None]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in idents)


@contextmanager
def handler() -> Iterator[MaruHandler]:
    """A client of a server of its own, with room for what is stored at a time."""
    with TemporaryDirectory() as folder:
        server = RunningServer.start(Path(folder), {"pool_size": "64M", "chunk_size": 4096})
        try:
            with MaruHandler.connect(MaruConfig.from_mapping({"maru_server_url": server.url}, {}), NAMESPACE) as made:
                yield made
        finally:
            server.end()


def run(options: argparse.Namespace) -> Outcome:
    """Every way beside every engine."""
    bare = options.copy_ms / 1e3
    numbers = itertools.count(1)
    ways = [(way, name, many) for name in FORMATS for way in WAYS for many in (1, ROW) if not name or many == 1]
    table = [["", *(f"{way}{name and ' ' + name}, {many}" for way, name, many in ways)]]
    figures: dict[str, Any] = {}
    bounds = []
    rate = calibrated()
    with handler() as session:
        for engine, step in steps_of(lambda busy: work(round(busy * rate))).items():
            lines = [[f"{engine}: {what}"] for what in ("added to the copy", "ms added to steps", "ms of a processor")]
            for way, name, many in ways:
                format_ = FORMATS[name]
                with saver_of(session, way, format_, bare) as (saver, answers):
                    # The first one starts the thread.
                    took = [
                        measure(session, saver, answers, [format_.op(next(numbers)) for _ in range(many)], step)
                        for _ in range(options.repeats + 1)
                    ][1:]
                added = statistics.median(one.whole for one in took) / (many * bare) - 1
                steps, processor = (statistics.median(column) / many for column in zip(*map(_costs, took), strict=True))
                lines[0].append(f"{added:.1%}")
                lines[1].append(f"{steps * 1e3:.2f}")
                lines[2].append(f"{processor * 1e3:.2f}")
                where = f"{engine}, {way}{name and ' ' + name}, {many} in a row"
                figures[where] = {"added": added, "steps_ms": steps * 1e3, "processor_ms": processor * 1e3}
                if way == "whole" and not name and engine != "spins":
                    bounds.append(Bound(f"{where}: added to the copy", added, BOUND))
                    bounds.append(Bound(f"{where}: the saver's share of a processor", processor / bare, PROCESSOR))
            table += lines
    return Outcome(table, figures, bounds, ["added to steps, and time of a processor: per store"])


@contextmanager
def saver_of(session: MaruHandler, way: str, format_: Format, bare: float) -> Iterator[tuple[Saver, Stopwatch]]:
    """A saver whose copies of a request take ``bare`` seconds."""
    kind, pieces = WAYS[way]
    slicer = Slicer(PAGED, format_.stored, Limits(format_.stored.nbytes, 1 << 40, -1))
    link = Link(session, kind(bare / CHUNKS / format_.objects, slicer, STORE), format_.stored)
    settings = SaverSettings(1 << 40, piece_bytes=CHUNKS * format_.shape.nbytes // pieces)
    answers = Stopwatch()
    saver = Saver(lambda: link, format_.shape, answers, HostLane(), settings)
    try:
        yield saver, answers
    finally:
        saver.close()


def _costs(took: Took) -> tuple[float, float]:
    return took.steps, took.processor


def add_options(parser: argparse.ArgumentParser) -> None:
    """How long it takes."""
    parser.add_argument("--repeats", type=int, default=15, help="runs per figure (default 15)")
    parser.add_argument("--copy-ms", type=float, default=40.0, help="a store's bytes on the bus (default 40)")


if __name__ == "__main__":
    sys.exit(main(__doc__, run, add_options))
