"""Storing chunks from host memory must not get slower when torch is told to use more threads than there are cores.

Stores 12 chunks of 256 tokens of a 24-layer, 2-KV-head, 64-dim bf16 model from vLLM's CPU pages with torch set to 1, 8
and 128 threads; for comparison also by one strided torch copy per chunk and plane. Exits with 1 when the slowest
setting takes over 1.3 times the fastest. Run: ``python benchmarks/store_copy.py [--json FILE]``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.outcome import Bound, Outcome, main
from maru_core.geometry import ChunkCopy, ObjectLayout, PagedLayout, PlaneStrides
from maru_transfer.torch_copy import TorchCopyEngine

LAYERS, HEADS, DIM, BLOCK, BLOCKS = 24, 2, 64, 128, 64
CHUNKS, CHUNK_TOKENS = 12, 256
THREADS = (1, 8, 128)
REPEATS = 40
BOUND = 1.3


def make_pages() -> tuple[torch.Tensor, PagedLayout]:
    """Pages of all layers in one storage; per head of a block K as [DIM, BLOCK], then V as [BLOCK, DIM]."""
    pages = torch.zeros(LAYERS, BLOCKS, HEADS, BLOCK, 2 * DIM, dtype=torch.bfloat16)
    pages.view(torch.int16).random_(-(1 << 15), (1 << 15) - 1)
    head = 2 * BLOCK * DIM
    keys = PlaneStrides(0, HEADS * head, 1, head, BLOCK)
    values = PlaneStrides(BLOCK * DIM, HEADS * head, DIM, head, 1)
    return pages, PagedLayout((keys, values), LAYERS, BLOCKS, BLOCK, HEADS, DIM, 2)


def best_ms(times: list[float]) -> float:
    """The least disturbed of several runs, in milliseconds."""
    return min(times) * 1e3


def strided_store(pages: torch.Tensor, paged: PagedLayout, blocks: list[int], objects: torch.Tensor) -> None:
    """What a store without care for torch's threads looks like: one torch copy per page and plane."""
    for place, block in enumerate(blocks):
        chunk, offset = divmod(place * BLOCK, CHUNK_TOKENS)
        for number, plane in enumerate(paged.planes):
            source = pages.as_strided(
                (LAYERS, BLOCK, HEADS, DIM),
                (pages.stride(0), plane.token, plane.head, plane.dim),
                plane.offset + block * plane.block,
            )
            objects[chunk, number, :, offset : offset + BLOCK].copy_(source)


def measure(repeats: int) -> dict[str, dict[str, float]]:
    """Milliseconds per setting of torch's threads, for Maru's engine (store, load) and for the strided copy."""
    pages, paged = make_pages()
    stored = ObjectLayout(2, LAYERS, CHUNK_TOKENS, HEADS * DIM, 2)
    blocks = torch.randperm(BLOCKS - 1)[: CHUNKS * CHUNK_TOKENS // BLOCK].add(1).tolist()
    objects = torch.zeros(CHUNKS, 2, LAYERS, CHUNK_TOKENS, HEADS, DIM, dtype=torch.bfloat16)
    raw = objects.view(torch.int16).numpy()
    copies = [
        ChunkCopy(chunk, chunk * CHUNK_TOKENS, (chunk + 1) * CHUNK_TOKENS, memoryview(raw[chunk]).cast("B"))
        for chunk in range(CHUNKS)
    ]
    expected = torch.empty_like(objects)
    strided_store(pages, paged, blocks, expected)
    with closing(TorchCopyEngine().open(list(pages), paged, stored)) as transfer:
        ways: dict[str, Callable[[], None]] = {
            "store_ms": lambda: transfer.store(blocks, copies),
            "load_ms": lambda: transfer.load(blocks, copies),
            # Last: torch's waiting threads would disturb what comes after.
            "strided_torch_store_ms": lambda: strided_store(pages, paged, blocks, objects),
        }
        figures: dict[str, dict[str, float]] = {}
        for way, run in ways.items():
            times: dict[int, list[float]] = {threads: [] for threads in THREADS}
            for _ in range(repeats if way != "strided_torch_store_ms" else 2):
                for threads in THREADS:
                    torch.set_num_threads(threads)
                    start = time.perf_counter()
                    run()
                    times[threads].append(time.perf_counter() - start)
            figures[way] = {str(threads): best_ms(times[threads]) for threads in THREADS}
            if way == "store_ms" and not torch.equal(objects.view(torch.int16), expected.view(torch.int16)):
                raise SystemExit("the stored bytes are wrong; figures of a wrong copy mean nothing")
    return figures


def run(options: argparse.Namespace) -> Outcome:
    """Each way with each setting, and how far the settings are apart."""
    before = torch.get_num_threads()
    try:
        figures = measure(options.repeats)
    finally:
        torch.set_num_threads(before)
    ratios = {way: max(times.values()) / min(times.values()) for way, times in figures.items()}
    table = [["milliseconds", *(f"{threads} threads" for threads in THREADS), "slowest/fastest"]]
    for way, times in figures.items():
        table.append([way, *(f"{ms:.2f}" for ms in times.values()), f"{ratios[way]:.2f}"])
    bound = Bound("store_ms, slowest/fastest", ratios["store_ms"], BOUND)
    return Outcome(table, {"milliseconds": figures, "ratios": ratios}, [bound])


def add_options(parser: argparse.ArgumentParser) -> None:
    """How long it takes."""
    parser.add_argument("--repeats", type=int, default=REPEATS, help=f"runs per setting (default {REPEATS})")


if __name__ == "__main__":
    sys.exit(main(__doc__, run, add_options))
