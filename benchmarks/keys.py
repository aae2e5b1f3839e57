"""Cost of chunk keys: a first prompt, each further chunk, its layers, and what hashing from the start would cost.

Exits with 1 when a bound is missed. Run: ``python benchmarks/keys.py [--json FILE]``.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.outcome import Bound, Outcome, main
from maru_core.keys import KeyChain

PROMPT_TOKENS = 8192
CHUNK_TOKENS = 256
REPEATS = 40
#: Upper bounds in milliseconds for what a scheduler step can spare.
BOUNDS_MS = {"prompt_ms": 0.5, "further_chunk_ms": 0.05, "layers_ms": 0.5}
#: Layers of a model whose prompt has an object per chunk and layer.
LAYERS = 32


class ReadOnlyList:
    """A list behind one more Python call per slice, as vLLM hands out token ids."""

    def __init__(self, items: list[int]) -> None:
        self._items = items

    def __getitem__(self, item: slice) -> list[int]:
        return self._items[item]


def median_ms(measure: Callable[[], float]) -> float:
    """Median of ``REPEATS`` measurements, which return seconds."""
    return sorted(measure() for _ in range(REPEATS))[REPEATS // 2] * 1e3


def measure() -> dict[str, float]:
    """All figures, in milliseconds."""
    rng = random.Random(1)
    chunks = 16
    tokens = ReadOnlyList([rng.randrange(150_000) for _ in range(PROMPT_TOKENS + chunks * CHUNK_TOKENS)])
    root = bytes(32)
    ends = range(PROMPT_TOKENS + CHUNK_TOKENS, PROMPT_TOKENS + chunks * CHUNK_TOKENS + 1, CHUNK_TOKENS)

    def prompt() -> float:
        start = time.perf_counter()
        KeyChain(root, CHUNK_TOKENS).extend(tokens, PROMPT_TOKENS)
        return time.perf_counter() - start

    def further() -> float:
        chain = KeyChain(root, CHUNK_TOKENS)
        chain.extend(tokens, PROMPT_TOKENS)
        start = time.perf_counter()
        for end in ends:
            chain.extend(tokens, end)
        return (time.perf_counter() - start) / chunks

    def again() -> float:
        start = time.perf_counter()
        for end in ends:
            KeyChain(root, CHUNK_TOKENS).extend(tokens, end)
        return (time.perf_counter() - start) / chunks

    def layers() -> float:
        chain = KeyChain(root, CHUNK_TOKENS, objects_per_chunk=LAYERS)
        chain.extend(tokens, PROMPT_TOKENS)
        start = time.perf_counter()
        chain.object_keys(0, PROMPT_TOKENS // CHUNK_TOKENS)
        return time.perf_counter() - start

    return {
        "prompt_ms": median_ms(prompt),
        "further_chunk_ms": median_ms(further),
        "layers_ms": median_ms(layers),
        "rehash_per_further_chunk_ms": median_ms(again),
    }


def run(options: argparse.Namespace) -> Outcome:
    """Figures beside their bounds."""
    figures = measure()
    bounds = [Bound(name, figures[name], limit) for name, limit in BOUNDS_MS.items()]
    return Outcome([["figure", "ms"], *([name, f"{value:.4f}"] for name, value in figures.items())], figures, bounds)


if __name__ == "__main__":
    sys.exit(main(__doc__, run))
