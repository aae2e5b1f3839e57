"""Requests to replay for :mod:`evict`: read from trace files, mixed, or made up.

Two formats, gzipped or not, are told apart by their first line:

- one request per line, ``{"timestamp": ms, "input_length": tokens, "hash_ids": [one per 512 tokens]}`` (Mooncake);
- one session per line, ``{"block_size": 64, "requests": [{"t": s, "in": tokens, "hash_ranges": [[first, count]]}]}``;
  sessions share nothing and start uniformly within four hours (seed 1).
"""

from __future__ import annotations

import gzip
import json
import random
from array import array
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BLOCK = 512

#: When, tokens, and the full blocks of the prompt.
Prompt = tuple[float, int, Sequence[Hashable]]


@dataclass(frozen=True)
class Trace:
    """Requests in order of time (seconds), each a chain of blocks, by number."""

    name: str
    form: str
    times: list[float]
    chains: list[array[int]]
    tokens: int
    blocks: int


def trace_of(name: str, form: str, prompts: Iterable[Prompt]) -> Trace:
    """Number the blocks: two are the same when they and all before them are."""
    ordered = sorted(prompts, key=lambda prompt: prompt[0])
    numbers: dict[tuple[int, Hashable], int] = {}
    chains = []
    for _, _, parts in ordered:
        chain, parent = array("I"), -1
        for part in parts:
            parent = numbers.setdefault((parent, part), len(numbers))
            chain.append(parent)
        chains.append(chain)
    return Trace(name, form, [now for now, _, _ in ordered], chains, sum(p[1] for p in ordered), len(numbers))


def load(path: Path) -> Trace:
    """Read a trace of either format. Raises SystemExit that says what is wrong with the file."""
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt") as file:
            lines = [json.loads(line) for line in file if line.strip()]
        form = "sessions" if "requests" in lines[0] else "requests"
        prompts = sorted((_sessions if form == "sessions" else _requests)(lines), key=lambda prompt: prompt[0])
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise SystemExit(f"{path} is not a trace in a known format: {type(error).__name__}: {error}") from error
    return trace_of(path.name.split(".")[0], form, prompts)


def made_up(name: str, requests: Iterable[tuple[float, list[Hashable]]]) -> Trace:
    """A load of :mod:`loads`: every part of a prompt is a full block."""
    return trace_of(name, "made up", [(now, BLOCK * len(parts), parts) for now, parts in requests])


def followed(first: Trace, second: Trace) -> Trace:
    """``second`` begins a second after ``first`` has ended; they share nothing."""
    return _joined(f"{first.name}, then {second.name}", first, second, first.times[-1] + 1.0 - second.times[0])


def beside(first: Trace, second: Trace) -> Trace:
    """Both begin at once; they share nothing."""
    return _joined(f"{first.name} beside {second.name}", first, second, first.times[0] - second.times[0])


def _joined(name: str, first: Trace, second: Trace, later: float) -> Trace:
    moved = [array("I", [block + first.blocks for block in chain]) for chain in second.chains]
    requests = [*zip(first.times, first.chains, strict=True)]
    requests += [(now + later, chain) for now, chain in zip(second.times, moved, strict=True)]
    requests.sort(key=lambda request: request[0])
    times, chains = [now for now, _ in requests], [chain for _, chain in requests]
    return Trace(name, "mixed", times, chains, first.tokens + second.tokens, first.blocks + second.blocks)


def _requests(lines: list[Any]) -> Iterator[Prompt]:
    for line in lines:
        length = line["input_length"]
        yield line["timestamp"] / 1000, length, line["hash_ids"][: length // BLOCK]


def _sessions(lines: list[Any]) -> Iterator[Prompt]:
    starts = random.Random(1)
    for number, session in enumerate(lines):
        start = starts.uniform(0, 4 * 3600)
        width = BLOCK // session["block_size"]
        for request in session["requests"]:
            ids = [at for first, many in request["hash_ranges"] for at in range(first, first + many)]
            full = range(0, len(ids) - width + 1, width)
            yield start + request["t"], request["in"], [(number, *ids[at : at + width]) for at in full]
