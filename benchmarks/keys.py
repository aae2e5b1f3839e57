"""Cost of chunk keys: a first prompt, each further chunk, and what hashing from the start every time would cost.

Exits with 1 when a bound is missed. Run: ``python benchmarks/keys.py [--json FILE]``.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

from maru_core.keys import KeyChain

PROMPT_TOKENS = 8192
CHUNK_TOKENS = 256
REPEATS = 40
#: Upper bounds in milliseconds for what a scheduler step can spare.
BOUNDS_MS = {"prompt_ms": 0.5, "further_chunk_ms": 0.05}


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

    return {
        "prompt_ms": median_ms(prompt),
        "further_chunk_ms": median_ms(further),
        "rehash_per_further_chunk_ms": median_ms(again),
    }


def main() -> int:
    """Measure, print, compare with the bounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    figures = measure()
    missed = [name for name, bound in BOUNDS_MS.items() if figures[name] > bound]
    for name, figure in figures.items():
        bound = BOUNDS_MS.get(name)
        print(
            f"{name:32} {figure:9.4f}" + (f"  (at most {bound}{', MISSED' if name in missed else ''})" if bound else "")
        )
    if arguments.json:
        arguments.json.write_text(json.dumps({"figures": figures, "bounds": BOUNDS_MS, "missed": missed}, indent=2))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
