"""Where the time of a hit goes, from what :mod:`hit_trace` noted in an engine and when its client sent and received."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from benchmarks.online import Run
from benchmarks.outcome import align

#: What is noted of a request, in this order when all goes well; those with a star only when it is loaded.
STAGES = (
    "arrived",
    "asked",
    "answered",
    "queued*",
    "begun*",
    "copying*",
    "copied*",
    "proven*",
    "told*",
    "noticed*",
    "scheduled",
    "computed",
)


def milliseconds(seconds: Sequence[float]) -> str:
    """Median and 95th percentile."""
    ordered = sorted(seconds)
    return f"{statistics.median(ordered) * 1e3:.1f} / {ordered[-(-len(ordered) * 95 // 100) - 1] * 1e3:.1f}"


def told(run: Run, watched: Mapping[str, Any]) -> list[str]:
    """Both tables, as lines."""
    # In an engine of several processes only the worker's is watched: no step, no question.
    asked = statistics.mean(watched["asked"].values() or [0])
    return [
        *align([["from - to", "ms, median / 95 %"], *stages(run, watched)]),
        f"asked {asked:.1f} times, {len(watched['steps'])} steps",
        *align([["hook", "calls/step", "us", "longest us", "us/step"], *costs(watched)]),
    ]


def stages(run: Run, watched: Mapping[str, Any]) -> list[list[str]]:
    """Milliseconds from each stage to the next, over requests: median and 95 %."""
    names = ["sent", *(stage.rstrip("*") for stage in STAGES), "received"]
    by_number = {int(name.split("-")[1]): times for name, times in watched["stages"].items() if "-" in name}
    if len(by_number) != len(run.answers):
        return [[f"{len(by_number)} of {len(run.answers)} requests were seen", ""]]
    gaps: dict[tuple[str, str], list[float]] = {}
    for answer, number in zip(run.answers, _numbers(run, by_number), strict=True):
        times = {**by_number[number], "sent": run.began + answer.sent, "received": run.began + answer.times[0]}
        seen = [name for name in names if name in times]
        for before, after in pairwise(seen):
            gaps.setdefault((before, after), []).append(times[after] - times[before])
    order = sorted(gaps, key=lambda pair: (names.index(pair[0]), names.index(pair[1])))
    return [[f"{before} - {after}", milliseconds(gaps[before, after])] for before, after in order]


def _numbers(run: Run, by_number: Mapping[int, Any]) -> list[int]:
    """Requests are numbered as they are sent."""
    order = sorted(range(len(run.answers)), key=lambda index: run.answers[index].sent)
    found = [0] * len(order)
    for number, index in zip(sorted(by_number), order, strict=True):
        found[index] = number
    return found


def costs(watched: Mapping[str, Any]) -> list[list[str]]:
    """Microseconds of vLLM's thread per hook."""
    steps = max(1, len(watched["steps"]))
    lines = []
    for name, (calls, seconds, longest) in watched["costs"].items():
        each, most, per_step = (f"{value * 1e6:.1f}" for value in (seconds / calls, longest, seconds / steps))
        lines.append([name, f"{calls / steps:.2f}", each, most, per_step])
    total = sum(seconds for _, seconds, _ in watched["costs"].values())
    lines.append(["all", "", "", "", f"{total / steps * 1e6:.1f}"])
    return lines
