"""Loads and stores of the CPU engine's pages by torch-copy against a plain memcpy of the same bytes, 2 threads each.

Pages as vLLM 0.32 lays them out on the CPU (per head of a block K as ``[head_size, tokens]``, then V as
``[tokens, head_size]``), and K‖V packed per token, in the NHD and the HND order. Blocks of 128 tokens in random order,
chunks of 256, bf16, SmolLM2-135M's geometry (30 layers, 3 KV heads of 64) and Llama-3.1-8B's (32, 8, 128).

Every run moves memory that was last touched several last-level caches ago, right behind a run of memcpy over other such
memory; the share is the median of many such pairs. A pair during which somebody else had one of the cores is left out
and repeated. Exits with 1 when a load or store falls below 70 % of memcpy. For comparison, not judged: whole pages,
copied as they are.
Run: ``python benchmarks/cpu_copy.py [--json FILE]``.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.outcome import Least, Outcome, main
from maru_core.contracts import Transfer
from maru_core.geometry import ChunkCopy, ObjectLayout, PagedLayout, PlaneStrides
from maru_transfer.torch_copy import TorchCopyEngine

BLOCK, CHUNK, ELEMENT = 128, 256, 2
THREADS = 2
SHARE = 0.7
#: Requests that take turns, so that what one moves is no longer in a cache when it is its turn again.
SETS = 3

#: Of the time of all threads, what they must have spent on a core for a run to count as undisturbed.
BUSY = 0.85
#: Pairs of runs that are tried for each one that is wanted, and how many must be left.
TRIES, LEAST = 12, 5

#: Layers, KV heads, head size, and chunks of one request.
MODELS = {"SmolLM2-135M": (30, 3, 64, 16), "Llama-3.1-8B": (32, 8, 128, 4)}
VERBATIM = "whole pages"


def planes_of(layout: str, heads: int, dim: int) -> tuple[PlaneStrides, ...]:
    """Strides of K and V, in pages of ``2 * heads * BLOCK * dim`` elements."""
    page, head = 2 * heads * BLOCK * dim, 2 * BLOCK * dim
    if layout == "CPU pages":
        return PlaneStrides(0, page, 1, head, BLOCK), PlaneStrides(BLOCK * dim, page, dim, head, 1)
    token = 2 * dim if layout == "packed, HND" else 2 * dim * heads
    step = head if layout == "packed, HND" else 2 * dim
    return PlaneStrides(0, page, token, step, 1), PlaneStrides(dim, page, token, step, 1)


LAYOUTS = ("CPU pages", "packed, NHD", "packed, HND", VERBATIM)


class Memory:
    """Pages and objects of one model: as many bytes of each, all in use."""

    def __init__(self, model: str, chunks: int | None = None) -> None:
        self.layers, self.heads, self.dim, self.chunks = MODELS[model]
        self.chunks = chunks or self.chunks
        self.blocks = SETS * self.chunks * CHUNK // BLOCK
        page = 2 * self.heads * BLOCK * self.dim
        self.pages = torch.empty(self.layers, self.blocks, page, dtype=torch.int16)
        self.pages.random_(-(1 << 15), (1 << 15) - 1)
        self.nbytes = self.pages.nbytes // SETS
        # As a pool is: shared memory, in small pages.
        self.objects = memoryview(mmap.mmap(-1, self.pages.nbytes))
        order = np.random.default_rng(1).permutation(self.blocks).tolist()
        self.tables = [order[number::SETS] for number in range(SETS)]

    def engine(self, layout: str) -> tuple[Transfer, list[list[ChunkCopy]]]:
        """torch-copy on the pages, and the copies of each request."""
        if layout == VERBATIM:
            # One plane in which a token is a row of a page: then a page is contiguous on both sides.
            heads, dim = 1, 2 * self.heads * self.dim
            planes: tuple[PlaneStrides, ...] = (PlaneStrides(0, BLOCK * dim, dim, dim, 1),)
        else:
            heads, dim = self.heads, self.dim
            planes = planes_of(layout, heads, dim)
        paged = PagedLayout(planes, self.layers, self.blocks, BLOCK, heads, dim, ELEMENT)
        stored = ObjectLayout(len(planes), self.layers, CHUNK, heads * dim, ELEMENT)
        copies = [
            [
                ChunkCopy(chunk, chunk * CHUNK, (chunk + 1) * CHUNK, self.objects[at : at + stored.nbytes])
                for chunk, at in enumerate(range(start, start + self.nbytes, stored.nbytes))
            ]
            for start in range(0, SETS * self.nbytes, self.nbytes)
        ]
        return TorchCopyEngine(threads=THREADS).open(list(self.pages), paged, stored), copies

    def check(self, layout: str, transfer: Transfer, copies: list[ChunkCopy]) -> None:
        """Stops unless the first request is stored and loaded right: figures of a wrong copy mean nothing."""
        table = torch.tensor(self.tables[0])
        kept = self.pages[:, table]
        transfer.store(self.tables[0], copies)
        stored = np.frombuffer(self.objects[: self.nbytes], np.int16)
        right = layout == VERBATIM or np.array_equal(stored, self._naive(layout, kept))
        self.pages[:, table] = 0
        transfer.load(self.tables[0], copies)
        if not right or not torch.equal(self.pages[:, table], kept):
            raise SystemExit(f"{layout}: wrong bytes (stored right: {right})")

    def _naive(self, layout: str, pages: torch.Tensor) -> np.ndarray:
        """Objects of one request by plain indices: chunk, plane, layer, token, head, element."""
        heads, dim = self.heads, self.dim
        if layout == "packed, NHD":
            kv = pages.view(self.layers, -1, BLOCK, heads, 2, dim).permute(4, 0, 1, 2, 3, 5)
        elif layout == "packed, HND":
            kv = pages.view(self.layers, -1, heads, BLOCK, 2, dim).permute(4, 0, 1, 3, 2, 5)
        else:
            halves = pages.view(self.layers, -1, heads, 2, BLOCK * dim)
            keys = halves[:, :, :, 0].unflatten(3, (dim, BLOCK)).permute(0, 1, 4, 2, 3)
            values = halves[:, :, :, 1].unflatten(3, (BLOCK, dim)).permute(0, 1, 3, 2, 4)
            kv = torch.stack([keys, values])
        tokens = kv.flatten(2, 3).unflatten(2, (self.chunks, CHUNK))
        return tokens.permute(2, 0, 1, 3, 4, 5).contiguous().flatten().numpy()


class Memcpy:
    """The same memory from one side to the other by ``memcpy``, with two threads that take half of it each."""

    def __init__(self, memory: Memory) -> None:
        self._pages = memory.pages.data_ptr()
        self._objects = ctypes.addressof(ctypes.c_char.from_buffer(memory.objects))
        self._nbytes = memory.nbytes
        self._pool = ThreadPoolExecutor(THREADS - 1)

    def run(self, direction: str, number: int) -> None:
        """Move as many bytes as a request has."""
        ends = self._objects, self._pages
        target, source = ends if direction == "store" else ends[::-1]
        share = self._nbytes // THREADS
        at = number * self._nbytes
        rest = [
            self._pool.submit(ctypes.memmove, target + at + share * part, source + at + share * part, share)
            for part in range(1, THREADS)
        ]
        ctypes.memmove(target + at, source + at, share)
        for part in rest:
            part.result()

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown()


def timed(run: Callable[[], None]) -> tuple[float, bool]:
    """Seconds, and whether the threads had their cores to themselves."""
    start, before = time.perf_counter(), time.process_time()
    run()
    seconds, busy = time.perf_counter() - start, time.process_time() - before
    return seconds, busy >= BUSY * THREADS * seconds


def pairs(ours: Callable[[int], None], plain: Callable[[int], None], wanted: int) -> tuple[list[float], list[float]]:
    """Seconds of ours and of memcpy, by turns, of undisturbed pairs; of all when there are too few of these."""
    found, every = [], []
    for turn in range(wanted * TRIES):
        first, second = turn * 2 % SETS, (turn * 2 + 1) % SETS
        there, alone = timed(partial(plain, first))
        here, as_well = timed(partial(ours, second))
        every.append((here, there))
        if alone and as_well:
            found.append((here, there))
            if len(found) == wanted:
                break
    kept = found if len(found) >= LEAST else every
    return [here for here, _ in kept], [there for _, there in kept]


def shares(memory: Memory, repeats: int) -> Iterator[tuple[str, str, list[float], list[float]]]:
    """For each layout and direction, seconds of the engine's and of memcpy's runs."""
    with closing(Memcpy(memory)) as memcpy:
        for direction in ("load", "store"):
            memcpy.run(direction, 0)
        for layout in LAYOUTS:
            transfer, copies = memory.engine(layout)
            with closing(transfer):
                memory.check(layout, transfer, copies[0])
                for direction in ("load", "store"):
                    move = getattr(transfer, direction)

                    def ours(number: int, move: Any = move, copies: Any = copies) -> None:
                        move(memory.tables[number], copies[number])

                    yield layout, direction, *pairs(ours, partial(memcpy.run, direction), repeats)


def run(options: argparse.Namespace) -> Outcome:
    """Every model, layout and direction."""
    table = [["", "GB/s", "memcpy GB/s", "share", "pairs"]]
    figures: dict[str, dict[str, float]] = {}
    bounds = []
    notes = []
    for model in options.models:
        memory = Memory(model, options.chunks)
        for layout, direction, ours, plain in shares(memory, options.repeats):
            name = f"{model}, {layout}, {direction}"
            share = statistics.median(there / here for here, there in zip(ours, plain, strict=True))
            speeds = [memory.nbytes / statistics.median(times) / 1e9 for times in (ours, plain)]
            figures[name] = {"gb_per_s": speeds[0], "memcpy_gb_per_s": speeds[1], "share": share, "pairs": len(ours)}
            table.append([name, *(f"{speed:.2f}" for speed in speeds), f"{share:.2f}", str(len(ours))])
            if len(ours) > options.repeats:
                notes.append(f"{name}: fewer than {LEAST} pairs were undisturbed; the figure is of all of them")
            if layout != VERBATIM:
                bounds.append(Least(name, share, SHARE))
    return Outcome(table, figures, bounds, notes)


def add_options(parser: argparse.ArgumentParser) -> None:
    """How long it takes."""
    parser.add_argument("--repeats", type=int, default=15, help="undisturbed pairs of runs (default 15)")
    parser.add_argument("--chunks", type=int, help="chunks per request (default by model, about 100 MB)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="which models' geometry")


if __name__ == "__main__":
    sys.exit(main(__doc__, run, add_options))
