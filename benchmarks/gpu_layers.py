"""What gpu_copy.py measures of the engine ``layerwise``: loads layer by layer, and both storage formats.

The same pages and the same 2 GiB of page-locked memory, seen as objects that hold every layer of a chunk, and as
objects that hold one. Layer by layer, "GB/s" is until the last layer has arrived, and the first layer's time is from
the call until a stream that waits for it goes on. Where objects are scattered, each of their pieces is a copy of its
own. What a thread takes to submit so many has no bound here: kernels that reach host memory themselves, measured
beside, take less of it, and slow what else computes (gpu_interference.py --tune scattered=8).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from attrs import evolve, frozen

from benchmarks.outcome import Bound, Least
from maru_core.batches import ChunkCopies, Rooms
from maru_core.geometry import ChunkCopy, ObjectLayout
from maru_transfer.cuda_library import LOAD, STORE
from maru_transfer.kernel import Tuning
from maru_transfer.layerwise import LayerwiseEngine

LAYOUTS = ("planes apart, NHD", "packed, HND")
#: Share of a page-locked copy, milliseconds of issuing, share of a load's time until its first layer.
OF_BUS, ISSUE_MS, FIRST = 0.85, 1.0, 0.1
ISSUE = "milliseconds to issue"
#: Copies of a slice from which on kernels are tried beside the copy engine.
_MANY = 8


@frozen
class Rows:
    """What is added to gpu_copy's table, bounds and figures."""

    table: list[list[str]]
    bounds: list[Bound]
    figures: dict[str, Any]


def requests(bench: Any) -> dict[str, tuple[ObjectLayout, ChunkCopies]]:
    """The whole request in each format, objects in a row, and in both at random places."""
    whole: ObjectLayout = layout_of(bench)
    single = evolve(whole, num_layers=1)
    raw = memoryview(bench.host.numpy())
    chunks, layers, tokens = len(bench.copies), whole.num_layers, whole.chunk_tokens

    def at(places: Sequence[int], stored: ObjectLayout) -> ChunkCopies:
        rooms = Rooms(raw, places, 0, stored.nbytes, stored.nbytes)
        return ChunkCopies(range(len(places)), layers // stored.num_layers, tokens, rooms)

    mixed = np.random.default_rng(2).permutation(chunks).tolist()
    count = chunks * layers
    return {
        "chunkwise": (whole, bench.copies),
        "chunkwise, objects scattered": (whole, at(mixed, whole)),
        "layerwise": (single, at(range(count), single)),
        "layerwise, objects scattered": (single, at(np.random.default_rng(3).permutation(count).tolist(), single)),
    }


def layout_of(bench: Any) -> ObjectLayout:
    """The layout of the bench's objects."""
    paged = bench.paged(LAYOUTS[0])
    tokens = bench.copies[0].last - bench.copies[0].first
    return ObjectLayout(len(paged.planes), paged.num_layers, tokens, paged.hidden, paged.element_size)


class Layered:
    """One request, open in the engine."""

    def __init__(self, transfer: Any, table: list[int], copies: Sequence[ChunkCopy]) -> None:
        self._transfer, self._table, self._copies = transfer, table, copies
        self._stream = torch.cuda.Stream()

    def load(self) -> None:
        """All layers, to their end."""
        self._transfer.begin_load(self._table, self._copies).finish()

    def store(self) -> None:
        """The whole request."""
        self._transfer.store(self._table, self._copies)

    def first(self) -> float:
        """Seconds until a stream that waits for layer 0 goes on."""
        event = torch.cuda.Event()
        torch.cuda.synchronize()
        began = time.perf_counter()
        load = self._transfer.begin_load(self._table, self._copies)
        with torch.cuda.stream(self._stream):
            load.wait_layer(0)
            event.record()
        event.synchronize()
        passed = time.perf_counter() - began
        load.finish()
        return passed

    def costs(self, direction: int) -> tuple[float, float]:
        """Seconds of a thread: to plan, and to issue."""
        torch.cuda.synchronize()
        began = time.perf_counter()
        by_layer = direction == LOAD
        held, job = self._transfer._plan(direction, self._table, self._copies, by_layer=by_layer)
        planned = time.perf_counter() - began
        pages, how = self._transfer._pages, self._transfer._how
        stream = torch.cuda.current_stream().cuda_stream
        with ExitStack() as stack:
            layers = None
            if by_layer:
                layers = self._transfer._device.follow(self._transfer._num_layers, stream)
                stack.callback(layers.close)
            stack.callback(pages.wait)
            pages.submit(job, how, stream, layers)
        held.release()
        return planned, pages.times()[0]


def clock(run: Callable[[], Any], repeats: int, warm: int = 2) -> float:
    """Median seconds until the device has done it."""
    passed = []
    for _ in range(warm + repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        passed.append(time.perf_counter() - began)
    return statistics.median(passed[warm:])


def check(
    bench: Any, layout: str, tuning: Tuning, name: str, stored: ObjectLayout, copies: Sequence[ChunkCopy]
) -> None:
    """Stops unless what was stored comes back layer by layer: figures of a wrong copy mean nothing."""
    table = bench.tables["scattered"]
    kept = bench.pages.clone()
    blocks = torch.tensor(table, device="cuda")
    with bench.transfer(layout, tuning, LayerwiseEngine, stored) as transfer:
        bench.host.zero_()
        transfer.store(table, copies)
        bench.pages.zero_()
        torch.cuda.synchronize()
        transfer.begin_load(table, copies).finish()
        again = bench.host.clone()
        bench.host.zero_()
        transfer.store(table, copies)
    right = torch.equal(again, bench.host) and int(again.view(torch.int64).ne(0).sum()) > again.numel() // 16
    bench.pages.copy_(kept)
    torch.cuda.synchronize()
    del blocks, kept, again
    if not right:
        raise SystemExit(f"by layer, {layout}, {name}: other bytes came back")


def measure(bench: Any, tuning: Tuning, best: dict[str, float], repeats: int) -> Rows:
    """Loads layer by layer and stores, in both formats, for two layouts; blocks are scattered."""
    rows = Rows([], [], {})
    for layout in LAYOUTS:
        for name, (stored, copies) in requests(bench).items():
            scattered = "scattered" in name
            if layout != LAYOUTS[0] and scattered:
                continue
            found = [measure_one(bench, layout, tuning, name, stored, copies, best, repeats)]
            if scattered:
                # What a thread takes to submit so many copies is shown, and preferred to kernels on the bus.
                found[0] = evolve(found[0], bounds=[bound for bound in found[0].bounds if ISSUE not in bound.name])
            if scattered and not tuning.scattered:
                kernels, by_kernels = evolve(tuning, scattered=_MANY), f"{name}, by kernels"
                beside = measure_one(bench, layout, kernels, by_kernels, stored, copies, best, repeats)
                # What it is compared with has no bounds.
                found.append(evolve(beside, bounds=[]))
            for one in found:
                rows.table.extend(one.table)
                rows.bounds.extend(one.bounds)
                rows.figures.update(one.figures)
    return rows


def measure_one(
    bench: Any,
    layout: str,
    tuning: Tuning,
    name: str,
    stored: ObjectLayout,
    copies: Sequence[ChunkCopy],
    best: dict[str, float],
    repeats: int,
) -> Rows:
    """A load layer by layer and a store of one request."""
    rows = Rows([], [], {})
    table = bench.tables["scattered"]
    check(bench, layout, tuning, name, stored, copies)
    nbytes = stored.nbytes * len(copies)
    with bench.transfer(layout, tuning, LayerwiseEngine, stored) as transfer:
        layered = Layered(transfer, table, copies)
        for direction, kind, run, ceiling in (
            (LOAD, "load by layer", layered.load, "host to device"),
            (STORE, "store", layered.store, "device to host"),
        ):
            what = f"{kind}, {name}, {layout}"
            seconds = clock(run, repeats)
            share = nbytes / seconds / best[ceiling]
            costs = [layered.costs(direction) for _ in range(repeats)]
            plan, issue = (statistics.median(column) for column in zip(*costs, strict=True))
            shown = [f"{plan * 1e3:.2f}", f"{issue * 1e3:.2f}", ""]
            rows.table.append([what, f"{nbytes / seconds / 1e9:.1f}", f"{share:.3f}", *shown])
            rows.figures[what] = {"seconds": seconds, "share": share, "plan": plan, "issue": issue}
            rows.bounds.append(Least(f"{what}: share of a locked copy", share, OF_BUS))
            rows.bounds.append(Bound(f"{what}: {ISSUE}", issue * 1e3, ISSUE_MS))
            if direction == LOAD:
                first = statistics.median(layered.first() for _ in range(repeats))
                rows.table.append([f"  first layer after {first * 1e3:.2f} ms", "", "", "", "", ""])
                rows.figures[what]["first"] = first
                part = first / seconds
                rows.bounds.append(Bound(f"{what}: share of its time until the first layer", part, FIRST))
    return rows
