"""For benchmarks of what moves KV beside a thread that runs Python: an engine's steps, and copies that are sleeps."""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from attrs import define, field, frozen

from maru_core.brake import Brake
from maru_core.contracts import LayeredLoad, PreparedLayeredLoad
from maru_core.geometry import ChunkCopy
from maru_transfer.layered import LoadThread
from maru_transfer.layerwise import FollowedLoad
from maru_transfer.prepared import Once
from maru_transfer.slices import Slicer

_usleep = ctypes.CDLL(None).usleep
_getppid = ctypes.CDLL(None).getppid


def sleep_outside(seconds: float) -> None:
    """Sleep in one native call, without the interpreter's lock, as a thread does that waits for a bus."""
    _usleep(round(seconds * 1e6))


def steps_of(python: Callable[[float], object]) -> dict[str, Callable[[], None]]:
    """What a thread does again and again, by name; ``python`` runs Python for so many seconds.

    ``empty steps``: Python, then a sleep of a millisecond, as vLLM 0.22.1 and 0.32 do while requests are parked.
    ``decode``: Python, then a wait for the device. ``spins`` never lets go, which is only for comparison.
    """

    def step(busy: float, asleep: float) -> None:
        python(busy)
        if asleep:
            time.sleep(asleep)

    return {
        "empty steps": partial(step, 0.0005, 0.001),
        "decode": partial(step, 0.0025, 0.003),
        "spins": partial(step, 0.001, 0.0),
    }


@define
class InParts:
    """A transfer, planned as the kernel engine's, whose copies are sleeps in proportion to their bytes.

    Each call returns from native code twice, as when one submits and the next one waits. ``direction``: which way.
    """

    seconds_per_object: float
    slicer: Slicer
    direction: int

    def load(self, block_ids: Sequence[int], copies: Sequence[ChunkCopy]) -> None:
        """Plan and sleep."""
        self.plan(block_ids, copies)
        sleep_outside(1e-6)
        sleep_outside(len(copies) * self.seconds_per_object)

    store = load

    def close(self) -> None:
        """Nothing is held."""

    def plan(self, block_ids: Sequence[int], copies: Sequence[ChunkCopy]) -> None:
        """What planning takes, for objects that follow each other in memory that the driver knows."""
        places = [self.slicer.stored.nbytes * number for number in range(len(copies))]
        self.slicer.job(self.direction, block_ids, copies, places, lambda at, length: [(at, at + length, True)])


@define
class Whole(InParts):
    """Implements PreparesLoads and PreparesStores, too: all in one call."""

    def prepare_load(self, block_ids: Sequence[int], copies: Sequence[ChunkCopy]) -> Prepared:
        """Planned now."""
        self.plan(block_ids, copies)
        return Prepared(len(copies), self.seconds_per_object)

    prepare_store = prepare_load


@frozen
class Prepared:
    """Implements PreparedCopies; nobody pulls the brake here."""

    count: int
    seconds_per_object: float

    def run(self, brake: Brake, least: int) -> int:
        """One call."""
        sleep_outside(self.count * self.seconds_per_object)
        return self.count

    def close(self) -> None:
        """Nothing is held."""


@define
class ByLayer(InParts):
    """Implements LoadsByLayer, too: layers arrive one after another, as the layerwise engine's, on a thread of it."""

    layers: int
    thread: LoadThread = field(factory=LoadThread)
    #: In the order in which they were begun.
    loads: list[Arriving] = field(factory=list)

    def begin_load(self, block_ids: Sequence[int], copies: Sequence[ChunkCopy]) -> LayeredLoad:
        """Plan and begin."""
        self.plan(block_ids, copies)
        return self._begin(len(copies))

    def close(self) -> None:
        """End the thread."""
        self.thread.close()

    def _begin(self, copies: int) -> LayeredLoad:
        _getppid()
        arriving: Any = Arriving(self.layers, copies * self.seconds_per_object)
        self.loads.append(arriving)
        load = FollowedLoad(arriving, self.layers, arriving.cross, lambda: 0)
        self.thread.start(load)
        return load


@define
class PlannedByLayer(ByLayer):
    """Implements PreparesLayeredLoads, too."""

    def prepare_layers(self, block_ids: Sequence[int], copies: Sequence[ChunkCopy]) -> PreparedLayeredLoad:
        """Planned now."""
        self.plan(block_ids, copies)
        return Once(lambda: self._begin(len(copies)))


@define
class Arriving:
    """Stands in for maru_transfer.cuda_library.CudaLayers: each call gives up the interpreter's lock, as those do."""

    layers: int
    seconds: float
    begun: float = math.inf
    ended: float = 0.0

    def cross(self) -> None:
        """Submit, and wait for the end: the bus goes on between the two."""
        self.begun = time.perf_counter()
        sleep_outside(0.9 * self.seconds)
        left = self.begun + self.seconds - time.perf_counter()
        if left > 0:
            sleep_outside(left)
        self.ended = self.begun + self.seconds

    def done(self) -> int:
        """By the clock."""
        _getppid()
        share = max(0.0, time.perf_counter() - self.begun) / self.seconds
        return min(self.layers, int(share * self.layers))

    def cancel(self) -> None:
        """What is a sleep goes on to its end."""

    def close(self) -> None:
        """Nothing is held."""
        _getppid()
