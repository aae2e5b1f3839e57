"""Loads and stores of a long prompt by our engines against what the bus and the device's memory can do.

Llama-3.1-8B's geometry (32 layers, 8 KV heads of 128, 16-bit, blocks of 16), 16,384 tokens, 2 GiB, chunks of 256, with
blocks in random order and in a row. Both sides are measured in one run: page-locked copies, copies within the device,
and, with ``--lmcache FILE``, the transfer function of LMCache's extension (its ``c_ops`` library). Needs a CUDA device
and the native library. Run: ``python benchmarks/gpu_copy.py [--lmcache FILE] [--json FILE]``.

Then the same with the engine ``layerwise``, layer by layer, from objects that hold every layer and from objects that
hold one (gpu_layers.py).

"Issue" is what a thread spends to submit a request to the driver; "plan" what it spends before in Python, and "CPU" all
of its processor time, waking up from waits included.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import evolve, fields

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import gpu_layers
from benchmarks.outcome import Bound, Least, Outcome, main
from maru_core.batches import ChunkCopies, Rooms
from maru_core.geometry import ObjectLayout, PagedLayout, PlaneStrides
from maru_transfer.cuda_library import LOAD, MAPPED, STORE
from maru_transfer.kernel import KernelEngine, KernelTransfer, Tuning
from maru_transfer.slices import Limits, Slicer
from maru_transfer.torch_copy import TorchCopyEngine

LAYERS, HEADS, DIM, BLOCK, TOKENS, CHUNK = 32, 8, 128, 16, 16384, 256
BLOCKS = TOKENS // BLOCK + 8
STORED = ObjectLayout(2, LAYERS, CHUNK, HEADS * DIM, 2)
CHUNKS = TOKENS // CHUNK
BYTES = CHUNKS * STORED.nbytes
REPEATS = 15

#: Share of a page-locked copy, share of a copy within the device, milliseconds of issuing.
OF_BUS, OF_DEVICE, ISSUE_MS = 0.92, 0.70, 1.0


PAGE = BLOCK * HEADS * DIM
#: (strides of K and V: offset, block, token, head, element; elements of a layer)
LAYOUTS: dict[str, tuple[PlaneStrides, ...]] = {
    "planes apart, NHD": tuple(PlaneStrides(*(p * BLOCKS * PAGE, PAGE, HEADS * DIM, DIM, 1)) for p in range(2)),
    "blocks first, NHD": tuple(PlaneStrides(*(p * PAGE, 2 * PAGE, HEADS * DIM, DIM, 1)) for p in range(2)),
    "planes apart, HND": tuple(PlaneStrides(*(p * BLOCKS * PAGE, PAGE, DIM, BLOCK * DIM, 1)) for p in range(2)),
    "packed, NHD": tuple(PlaneStrides(*(p * DIM, 2 * PAGE, 2 * HEADS * DIM, 2 * DIM, 1)) for p in range(2)),
    "packed, HND": tuple(PlaneStrides(*(p * DIM, 2 * PAGE, 2 * DIM, 2 * BLOCK * DIM, 1)) for p in range(2)),
}


class Bench:
    """Pages on the device, objects in page-locked memory, and the ways to move between them."""

    def __init__(self) -> None:
        self.pages = torch.empty(LAYERS, 2 * BLOCKS * PAGE, dtype=torch.int16, device="cuda")
        for layer in self.pages:
            layer.random_(-(1 << 15), (1 << 15) - 1)
        self.host = torch.empty(BYTES, dtype=torch.uint8, pin_memory=True)
        self.host.view(torch.int16).random_(-(1 << 15), (1 << 15) - 1)
        raw = memoryview(self.host.numpy())
        order = np.random.default_rng(1).permutation(BLOCKS - 1)[: TOKENS // BLOCK] + 1
        self.tables = {"scattered": order.tolist(), "in a row": list(range(4, 4 + TOKENS // BLOCK))}
        rooms = Rooms(raw, range(CHUNKS), 0, STORED.nbytes, STORED.nbytes)
        self.copies = ChunkCopies(range(CHUNKS), 1, CHUNK, rooms)

    def paged(self, layout: str) -> PagedLayout:
        """The pages as a layout."""
        return PagedLayout(LAYOUTS[layout], LAYERS, BLOCKS, BLOCK, HEADS, DIM, 2)

    @contextmanager
    def transfer(
        self, layout: str, tuning: Tuning, kind: type[KernelEngine] = KernelEngine, stored: ObjectLayout = STORED
    ) -> Iterator[KernelTransfer]:
        """The engine, open on the pages."""
        with closing(kind(tuning).open(list(self.pages), self.paged(layout), stored)) as transfer:
            assert isinstance(transfer, KernelTransfer)
            yield transfer

    def move(self, transfer: Any, direction: int, table: str) -> None:
        """The whole request, to its end on the device."""
        call = transfer.load if direction == LOAD else transfer.store
        call(self.tables[table], self.copies)
        torch.cuda.synchronize()

    def check(self, layout: str, table: str, tuning: Tuning) -> None:
        """Stops unless bytes are those of torch-copy: figures of a wrong copy mean nothing."""
        paged = self.paged(layout)
        with closing(TorchCopyEngine().open(list(self.pages), paged, STORED)) as reference:
            reference.store(self.tables[table], self.copies)
        wanted = self.host.to("cuda")
        self.host.zero_()
        with self.transfer(layout, tuning) as transfer:
            self.move(transfer, STORE, table)
            stored = torch.equal(self.host.to("cuda"), wanted)
            kept = self.pages.clone()
            blocks = torch.tensor(self.tables[table], device="cuda")
            self.pages.zero_()
            self.move(transfer, LOAD, table)
        with closing(TorchCopyEngine().open(list(self.pages), paged, STORED)) as reference:
            self.host.zero_()
            reference.store(self.tables[table], self.copies)
        loaded = torch.equal(self.host.to("cuda"), wanted)
        self.pages.copy_(kept)
        del blocks, wanted, kept
        if not (stored and loaded):
            raise SystemExit(f"{layout}, {table}: wrong bytes (stored right: {stored}, loaded right: {loaded})")


def by_events(run: Callable[[], Any], repeats: int, warm: int = 2) -> float:
    """Median seconds on the device."""
    times = []
    for number in range(warm + repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        if number >= warm:
            times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def by_clock(run: Callable[[], Any], repeats: int, warm: int = 2) -> float:
    """Median seconds that pass until the device has done it."""
    passed = []
    for number in range(warm + repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        if number >= warm:
            passed.append(time.perf_counter() - began)
    return statistics.median(passed)


def costs(bench: Bench, transfer: KernelTransfer, direction: int, table: str, repeats: int) -> dict[str, float]:
    """Median seconds of a thread: to plan, to issue, and all of its processor time."""
    found: dict[str, list[float]] = {"plan": [], "issue": [], "cpu": []}
    for _ in range(repeats):
        torch.cuda.synchronize()
        busy, began = time.thread_time(), time.perf_counter()
        held, job = transfer._plan(direction, bench.tables[table], bench.copies)
        found["plan"].append(time.perf_counter() - began)
        try:
            transfer._submit(job)
        finally:
            transfer._pages.wait()
            held.release()
        found["cpu"].append(time.thread_time() - busy)
        found["issue"].append(transfer._pages.times()[0])
    return {name: statistics.median(values) for name, values in found.items()}


def ceilings(bench: Bench, repeats: int) -> dict[str, float]:
    """Bytes per second of page-locked copies, and within the device (bytes counted once)."""
    part = 256 << 20
    device = torch.empty(part, dtype=torch.uint8, device="cuda")
    other = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    more = torch.empty_like(other)
    turn = iter(range(1 << 30))

    def host() -> torch.Tensor:
        first = next(turn) * part % BYTES
        return bench.host[first : first + part]

    return {
        "host to device": part / by_events(lambda: device.copy_(host(), non_blocking=True), repeats),
        "device to host": part / by_events(lambda: host().copy_(device, non_blocking=True), repeats),
        "within the device": (1 << 30) / by_events(lambda: other.copy_(more), repeats),
    }


def placement(bench: Bench, layout: str, tuning: Tuning, repeats: int) -> dict[str, float]:
    """Bytes per second of the kernels alone: objects are in the device's memory, too."""
    objects = torch.empty(BYTES, dtype=torch.uint8, device="cuda")
    addresses = [objects.data_ptr() + n * STORED.nbytes for n in range(CHUNKS)]
    # So many objects in one launch that launching does not count.
    limits = Limits(24 * STORED.nbytes, 1 << 60, 1 << 60)
    slicer = Slicer(bench.paged(layout), STORED, limits)
    rates = {}
    with bench.transfer(layout, tuning) as transfer:
        for name, direction in (("load", LOAD), ("store", STORE)):
            job = slicer.job(
                direction, bench.tables["scattered"], bench.copies, addresses, lambda a, n: [(a, a + n, True)]
            )
            assert (job.segments["way"] == MAPPED).all()

            def run(job: Any = job) -> None:
                try:
                    transfer._submit(job)
                finally:
                    transfer._pages.wait()

            rates[name] = BYTES / by_events(run, repeats)
    return rates


def lmcache(bench: Bench, library: Path, repeats: int) -> dict[str, float]:
    """Seconds of LMCache's transfer function for the same request, chunk by chunk, the faster of its two ways."""
    spec = importlib.util.spec_from_file_location("c_ops", library)
    assert spec is not None
    assert spec.loader is not None
    ops = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(ops)
    pointers = torch.tensor([layer.data_ptr() for layer in bench.pages], dtype=torch.int64, device="cuda")
    blocks = torch.tensor(bench.tables["scattered"], device="cuda")
    slots = (blocks[:, None] * BLOCK + torch.arange(BLOCK, device="cuda")).flatten()
    objects = bench.host.view(torch.bfloat16).view(CHUNKS, 2, LAYERS, CHUNK, HEADS * DIM)
    staging = torch.empty(2, LAYERS, CHUNK, HEADS * DIM, dtype=torch.bfloat16, device="cuda")
    kind = ops.GPUKVFormat.NL_X_TWO_NB_BS_NH_HS
    to_device, to_host = ops.TransferDirection.H2D, ops.TransferDirection.D2H

    def step(tensor: torch.Tensor, number: int, direction: Any) -> None:
        part = slots[number * CHUNK : (number + 1) * CHUNK]
        device = torch.device("cuda:0")
        ops.multi_layer_kv_transfer(
            tensor, pointers, part, device, BLOCKS * BLOCK, direction, kind, block_size=BLOCK, head_size=DIM
        )

    def load(*, staged: bool) -> None:
        for number in range(CHUNKS):
            if staged:
                staging.copy_(objects[number], non_blocking=True)
            step(staging if staged else objects[number], number, to_device)

    def store(*, staged: bool) -> None:
        for number in range(CHUNKS):
            step(staging if staged else objects[number], number, to_host)
            if staged:
                objects[number].copy_(staging, non_blocking=True)

    with bench.transfer("planes apart, NHD", Tuning()) as transfer:
        bench.move(transfer, STORE, "scattered")
    wanted = bench.host.to("cuda")
    bench.host.zero_()
    store(staged=True)
    torch.cuda.synchronize()
    if not torch.equal(wanted, bench.host.to("cuda")):
        raise SystemExit("LMCache's function stores other bytes: the comparison is not set up right")
    ways = [partial(call, staged=staged) for call in (load, store) for staged in (False, True)]
    seconds = [by_clock(way, repeats) for way in ways]
    return {"load": min(seconds[:2]), "store": min(seconds[2:])}


def run(options: argparse.Namespace) -> Outcome:
    """Every figure of the engine beside its ceiling."""
    repeats = options.repeats
    bench, tuning = Bench(), tuned(options)
    best = ceilings(bench, repeats)
    table = [["", "GB/s", "of the ceiling", "plan ms", "issue ms", "CPU ms"]]
    table += [[f"copies {name}", f"{rate / 1e9:.1f}", "", "", "", ""] for name, rate in best.items()]
    bounds: list[Bound] = []
    figures: dict[str, Any] = {"ceilings": best, "moves": {}, "placement": {}}
    for layout in LAYOUTS:
        for order in bench.tables:
            bench.check(layout, order, tuning)
    for layout in ("planes apart, NHD", "packed, NHD", "packed, HND"):
        for order in bench.tables:
            with bench.transfer(layout, tuning) as transfer:
                for direction, name, ceiling in ((LOAD, "load", "host to device"), (STORE, "store", "device to host")):
                    seconds = by_clock(partial(bench.move, transfer, direction, order), repeats)
                    cost = costs(bench, transfer, direction, order, repeats)
                    share = BYTES / seconds / best[ceiling]
                    what = f"{name}, {layout}, {order}"
                    shown = [f"{cost[key] * 1e3:.2f}" for key in ("plan", "issue", "cpu")]
                    table.append([what, f"{BYTES / seconds / 1e9:.1f}", f"{share:.3f}", *shown])
                    figures["moves"][what] = {"seconds": seconds, "share": share, **cost}
                    bounds.append(Least(f"{what}: share of a locked copy", share, OF_BUS))
                    bounds.append(Bound(f"{what}: milliseconds to issue", cost["issue"] * 1e3, ISSUE_MS))
    for layout in LAYOUTS:
        for name, rate in placement(bench, layout, evolve(tuning, grid=0, slots=4), repeats).items():
            share = rate / best["within the device"]
            table.append([f"placement, {name}, {layout}", f"{rate / 1e9:.0f}", f"{share:.3f}", "", "", ""])
            figures["placement"][f"{name}, {layout}"] = {"bytes_per_second": rate, "share": share}
            bounds.append(Least(f"placement, {name}, {layout}: share of a copy within the device", share, OF_DEVICE))
    by_layer = gpu_layers.measure(bench, tuning, best, repeats)
    table += by_layer.table
    bounds += by_layer.bounds
    figures["by layer"] = by_layer.figures
    if options.lmcache:
        theirs = lmcache(bench, options.lmcache, repeats)
        figures["lmcache"] = theirs
        for name, seconds in theirs.items():
            ours = figures["moves"][f"{name}, planes apart, NHD, scattered"]["seconds"]
            table.append([f"LMCache, {name}", f"{BYTES / seconds / 1e9:.1f}", "", "", "", ""])
            bounds.append(Bound(f"{name}: our time over LMCache's", ours / seconds, 1.0))
    return Outcome(table, figures, bounds)


def add_tuning(parser: argparse.ArgumentParser) -> None:
    """Other settings of the engine than its own."""
    parser.add_argument(
        "--tune",
        action="append",
        default=[],
        metavar="NAME=NUMBER",
        help="a setting of maru_transfer.kernel.Tuning, such as slot_bytes=16777216; may be repeated",
    )


def tuned(options: argparse.Namespace) -> Tuning:
    """The engine's settings, with those that were given. Ends the run when one is unknown."""
    changes = {}
    for text in options.tune:
        name, _, value = text.partition("=")
        if name not in {field.name for field in fields(Tuning)} or not value.isdecimal():
            raise SystemExit(f"--tune {text}: a name of {[field.name for field in fields(Tuning)]}, '=' and a number")
        changes[name] = int(value)
    return evolve(Tuning(), **changes)


def add_options(parser: argparse.ArgumentParser) -> None:
    """How long it takes, with which settings, and whom else to measure."""
    add_tuning(parser)
    parser.add_argument("--repeats", type=int, default=REPEATS, help=f"runs per figure (default {REPEATS})")
    parser.add_argument("--lmcache", type=Path, metavar="FILE", help="LMCache's c_ops extension library")


if __name__ == "__main__":
    sys.exit(main(__doc__, run, add_options))
