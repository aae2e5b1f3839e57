"""A load must take hardly longer than its bytes although an engine's thread runs Python beside the loader's.

The real loader loads requests of 64 objects of 32 MiB, planned by the kernel engine's slicer, through a copy that is a
sleep without the interpreter's lock. Beside it a thread does what an engine core does: ``empty steps`` while requests
are parked, ``decode`` steps, or it ``spins``, which is only for comparison (``beside_python.py`` says what each takes).
``in parts``: the same with a call per 256 MiB and with two returns from native code in each, as it was before loads
were one call. ``by layer``: its layers arrive one after another, as with ``maru_overlap_load_with_compute``, and it is
planned while the one before is copied; ``by layer, planned late``: in its turn, as of an engine that has ``begin_load``
only. Exits with 1 when the loader adds more than 15 % beside empty or decode steps, to a load that is one call or goes
by layer, to one by itself or to each of several that wait in a row.
Run: ``python benchmarks/loader_beside_python.py [--json FILE]``.
"""

from __future__ import annotations

import argparse
import mmap
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

from attrs import frozen

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.beside_python import ByLayer, InParts, PlannedByLayer, Whole, steps_of
from benchmarks.outcome import Bound, Outcome, main
from maru_core.batches import Rooms
from maru_core.geometry import ObjectLayout, PagedLayout, PlaneStrides
from maru_integrations.vllm.answers import Answers
from maru_integrations.vllm.copies import ChunkShape
from maru_integrations.vllm.loader import Loader
from maru_integrations.vllm.metadata import LoadOp
from maru_integrations.vllm.moving import Link
from maru_integrations.vllm.releasing import LoaderSettings
from maru_integrations.vllm.streams import HostLane
from maru_transfer.cuda_library import LOAD
from maru_transfer.slices import Limits, Slicer

LAYERS, HEADS, DIM, BLOCK, CHUNK = 32, 8, 128, 16, 256
OBJECTS, ROW = 64, 4
STORED = ObjectLayout(2, LAYERS, CHUNK, HEADS * DIM, 2)
BLOCKS = OBJECTS * CHUNK // BLOCK
STRIDE = BLOCK * HEADS * DIM
PAGED = PagedLayout(
    tuple(PlaneStrides(plane * BLOCKS * STRIDE, STRIDE, HEADS * DIM, DIM, 1) for plane in range(2)),
    LAYERS,
    BLOCKS,
    BLOCK,
    HEADS,
    DIM,
    2,
)
SHAPE = ChunkShape(BLOCK, CHUNK, STORED.nbytes)
BOUND = 0.15


@frozen
class Objects:
    """What a session tells of objects, all of them good."""

    pool: memoryview
    keys: Sequence[bytes]

    def adopt(self, epoch: int, entries: Any, generations: Any, lengths: Any, keys: Sequence[bytes]) -> Objects:
        """Those that are asked for."""
        return Objects(self.pool, keys)

    def views(self) -> Rooms:
        """Bytes of each."""
        places = [int.from_bytes(key, "little") for key in self.keys]
        return Rooms(self.pool, places, 0, STORED.nbytes, STORED.nbytes)

    def reading(self) -> AbstractContextManager[None]:
        """Nobody wants to know."""
        return nullcontext()

    def check(self, indices: Iterable[int] | None = None) -> list[bool]:
        """They are."""
        return [bytes(self.keys[index]) == self.keys[index] for index in indices or range(len(self.keys))]

    verify = check


def op(number: int) -> LoadOp:
    """A request whose prefix is all of the pool."""
    keys = [index.to_bytes(32, "little") for index in range(OBJECTS)]
    columns: dict[str, Any] = {"entries": range(OBJECTS), "generations": [1] * OBJECTS, "keys": keys}
    return LoadOp(
        load_id=number,
        request_id=f"r{number}",
        parked=True,
        epoch=1,
        chunk=0,
        first=0,
        last=OBJECTS * CHUNK,
        overlap=True,
        blocks=list(range(BLOCKS)),
        lengths=[STORED.nbytes] * OBJECTS,
        **columns,
    )


def compute(seconds: float) -> None:
    """Python for so long."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


@contextmanager
def engine(step: Callable[[], None]) -> Iterator[None]:
    """A thread that steps."""
    ended = threading.Event()

    def run() -> None:
        while not ended.is_set():
            step()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def measure(transfer: InParts, handler: Any, many: int) -> float:
    """Seconds from handing over ``many`` loads until the last one is answered."""
    answers = Answers()
    link = Link(handler, transfer, STORED)
    settings = LoaderSettings(release_after=LAYERS // 4 * isinstance(transfer, ByLayer), num_layers=LAYERS)
    loader = Loader(lambda: link, SHAPE, answers, HostLane(), settings, lambda: None)
    try:
        loader.submit([op(0)])
        wait(answers, 1)
        start = time.perf_counter()
        loader.submit([op(number) for number in range(many)])
        wait(answers, many)
        return time.perf_counter() - start
    finally:
        loader.close()


def wait(answers: Answers, loads: int) -> None:
    """Looks as often as an engine's steps do."""
    while loads:
        time.sleep(0.001)
        answers.take_finished()
        message = answers.take_metadata()
        if message is not None:
            assert all(result.good == OBJECTS for result in message.loads)
            loads -= len(message.loads)


def idle_ms(transfer: ByLayer, repeats: int) -> float:
    """Median, in milliseconds, from the last byte of a load to the first of the next, in the rows measured last."""
    length = 1 + ROW  # each is behind a load by itself
    rows = [transfer.loads[-length * back :][1:length] for back in range(1, repeats + 1)]
    gaps = [after.begun - before.ended for row in rows for before, after in pairwise(row)]
    return statistics.median(gaps) * 1e3


def run(options: argparse.Namespace) -> Outcome:
    """Both ways beside each engine."""
    bare = options.copy_ms / 1e3
    pool = memoryview(mmap.mmap(-1, OBJECTS * STORED.nbytes))
    slicer = Slicer(PAGED, STORED, Limits(32 << 20, 2 << 20, 4 << 20))
    per_object = bare / OBJECTS
    ways: dict[str, InParts] = {
        "in parts": InParts(per_object, slicer, LOAD),
        "whole": Whole(per_object, slicer, LOAD),
        "by layer, planned late": ByLayer(per_object, slicer, LOAD, LAYERS),
        "by layer": PlannedByLayer(per_object, slicer, LOAD, LAYERS),
    }
    table = [["added to the copy", *(f"{way}, {many}" for way in ways for many in ("one", f"{ROW} in a row"))]]
    figures: dict[str, Any] = {}
    bounds, notes = [], []
    for name, step in steps_of(compute).items():
        line = []
        for way, transfer in ways.items():
            for many in (1, ROW):
                with engine(step):
                    took = [measure(transfer, Objects(pool, ()), many) for _ in range(options.repeats)]
                added = statistics.median(took) / (many * bare) - 1
                figures[f"{name}, {way}, {many}"] = added
                line.append(f"{added:.1%}")
                if way in ("whole", "by layer") and name != "spins":
                    bounds.append(Bound(f"added beside {name}, {way}, {many} in a row", added, BOUND))
        table.append([name, *line])
        late, ahead = (
            idle_ms(transfer, options.repeats) for transfer in ways.values() if isinstance(transfer, ByLayer)
        )
        figures[f"{name}, bus idle, planned late"], figures[f"{name}, bus idle"] = late, ahead
        notes.append(f"beside {name} the bus idles for {ahead:.2f} ms between loads by layer, {late:.2f} planned late")
    for transfer in ways.values():
        transfer.close()
    return Outcome(table, figures, bounds, notes)


def add_options(parser: argparse.ArgumentParser) -> None:
    """How long it takes."""
    parser.add_argument("--repeats", type=int, default=15, help="runs per figure (default 15)")
    parser.add_argument("--copy-ms", type=float, default=40.0, help="a load's bytes on the bus (default 40)")


if __name__ == "__main__":
    sys.exit(main(__doc__, run, add_options))
