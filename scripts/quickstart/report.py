"""What the run found: rows, checks, and how both are shown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

#: Most that a warm request on B may take of A's cold one, until its first token.
WARM_LIMIT = 0.12


@dataclass(frozen=True)
class Row:
    """One request. ``ttft_s`` in seconds; tokens of the prompt by where they came from."""

    request: str
    engine: str
    prompt_tokens: int
    maru_tokens: int
    own_cache_tokens: int
    ttft_s: float
    answer: str


@dataclass(frozen=True)
class Check:
    """Something that must hold, with the figures that show whether it does."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True)
class Reuse:
    """Tokens of one request of B that did not have to be computed, counted by everybody who knows."""

    request: str
    expected: int
    vllm_metric: int
    server_chunks: int
    usage_cached: int


def check_reuse(reuse: Reuse, chunk_tokens: int) -> Check:
    """The engine's metric, the server's counter and the reply's usage must all say what was expected."""
    counts = (reuse.vllm_metric, reuse.server_chunks * chunk_tokens, reuse.usage_cached)
    return Check(
        f"reuse of {reuse.request}",
        all(count == reuse.expected for count in counts),
        f"expected {reuse.expected} tokens; vLLM's external hits {counts[0]}, Maru's server {reuse.server_chunks} "
        f"chunks of {chunk_tokens} = {counts[1]}, the reply's cached tokens {counts[2]}",
    )


def check_answer(row: Row, computed: str, own_cache: str) -> Check:
    """B's answer must be that of the engine without Maru, which computed the whole prompt."""
    detail = f"{row.answer!r}"
    if row.answer != computed:
        detail += f", but without Maru {computed!r}"
        same = "the same" if row.answer == own_cache else "another"
        detail += f"; vLLM's own prefix cache leads to {same} answer ({own_cache!r})"
    return Check(f"answer to {row.request}", row.answer == computed, detail)


def check_speed(warm: Row, cold: Row) -> Check:
    """B's first token must come much sooner than A's."""
    share = warm.ttft_s / cold.ttft_s
    return Check(
        f"TTFT of {warm.request}",
        share <= WARM_LIMIT,
        f"{warm.ttft_s * 1e3:.0f} ms is {share:.1%} of A's cold {cold.ttft_s * 1e3:.0f} ms; "
        f"at most {WARM_LIMIT:.0%} may be",
    )


def table(rows: Sequence[Row], cold: Row) -> Iterable[str]:
    """Lines for people; speed-up is against ``cold``."""
    cells = [["request", "engine", "tokens", "from Maru", "own cache", "TTFT", "speed-up", "answer"]]
    for row in rows:
        numbers = [str(row.prompt_tokens), str(row.maru_tokens), str(row.own_cache_tokens)]
        speed_up = f"{cold.ttft_s / row.ttft_s:.1f}x"
        answer = row.answer.strip().replace("\n", " ")
        cells.append([row.request, row.engine, *numbers, f"{row.ttft_s * 1e3:.0f} ms", speed_up, answer])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        aligned = [
            cell.ljust(width) if index in (0, 1, 7) else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        yield "  ".join(aligned).rstrip()


def as_json(rows: Sequence[Row], checks: Sequence[Check], cold: Row, about: Mapping[str, Any]) -> dict[str, Any]:
    """The same for programs."""
    return {
        "passed": all(check.passed for check in checks),
        "rows": [asdict(row) | {"speed_up": cold.ttft_s / row.ttft_s} for row in rows],
        "checks": [asdict(check) for check in checks],
        "about": dict(about),
    }
