"""Inside an engine of vLLM in one process: what each step takes the processor and the device, and where loads are.

Mixed into vLLM's worker by :mod:`watched`. Times are seconds by ``time.perf_counter``, which all processes of a machine
share. On a device, events are recorded on the engine's stream, which costs a few microseconds each.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from attrs import define, field

from benchmarks.hit_trace import Watch
from benchmarks.outcome import align


@define
class Step:
    """One call of the model runner. ``received``: loads that it hears of; ``reads``: those that still arrive."""

    requests: int
    tokens: int
    received: int = 0
    reads: int = 0
    #: Seconds in hooks before layers.
    waited: float = 0.0
    #: When it was ``entered``, ``bound``, ``submitted`` and ``settled``: on the processor, and events of the device.
    times: dict[str, float] = field(factory=dict)
    events: dict[str, Any] = field(factory=dict)


class Steps:
    """Watches until :meth:`end`."""

    def __init__(self) -> None:
        import torch

        self._torch: Any = torch if torch.cuda.is_available() else None
        self._watch = Watch()
        self._step = Step(0, 0)
        self._steps: list[Step] = []
        #: (when, what, request)
        self._loads: list[tuple[float, str, str]] = []
        self._base, self._base_event = time.perf_counter(), self._event()

    def begin(self) -> None:
        """Fails where a name is gone."""
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        from maru_integrations.vllm.answers import Answers
        from maru_integrations.vllm.connector import MaruKVConnector
        from maru_integrations.vllm.releasing import Releases
        from maru_integrations.vllm.worker import MaruWorker

        around = self._watch.around
        around(GPUModelRunner, "execute_model", lambda *_: self._steps.append(self._step), self._entered)
        around(MaruWorker, "begin", self._bound)
        around(MaruKVConnector, "start_load_kv", _nothing, lambda *_: self._mark("bound"))
        around(MaruKVConnector, "wait_for_layer_load", self._waited)
        around(MaruKVConnector, "wait_for_save", lambda *_: self._mark("settled"), lambda *_: self._mark("submitted"))
        around(Releases, "follow", _nothing, lambda _s, underway, *_: self._note("begun", underway.job.op))
        around(Releases, "arrived", lambda _b, _r, _s, underway: self._note("arrived", underway.job.op))
        around(Answers, "load_released", lambda _b, _r, _s, op: self._note("released", op))
        around(Answers, "load_ended", lambda _b, _r, _s, op, *_: self._note("ended", op))

    def end(self) -> dict[str, Any]:
        """Put everything back, and tell what was noted."""
        self._watch.end()
        if self._torch is not None:
            self._torch.cuda.synchronize()
        return {"steps": [self._told(step) for step in self._steps], "loads": self._loads}

    def _event(self) -> Any:
        if self._torch is None:
            return None
        event = self._torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _mark(self, name: str) -> None:
        self._step.times[name] = time.perf_counter()
        if self._torch is not None:
            self._step.events[name] = self._event()

    def _entered(self, _runner: Any, planned: Any, *_: Any) -> None:
        self._step = Step(len(planned.num_scheduled_tokens), planned.total_num_scheduled_tokens)
        self._mark("entered")

    def _bound(self, _begin: float, _result: Any, worker: Any, metadata: Any, *_: Any) -> None:
        self._step.received, self._step.reads = len(metadata.received), len(worker._read_early)

    def _waited(self, begin: float, *_: Any) -> None:
        self._step.waited += time.perf_counter() - begin

    def _note(self, what: str, op: Any) -> None:
        self._loads.append((time.perf_counter(), what, op.request_id))

    def _told(self, step: Step) -> dict[str, Any]:
        device = {name: self._base_event.elapsed_time(event) / 1e3 for name, event in step.events.items()}
        return {
            "requests": step.requests,
            "tokens": step.tokens,
            "received": step.received,
            "reads": step.reads,
            "waited": step.waited,
            "cpu": step.times,
            "device": {name: self._base + seconds for name, seconds in device.items()},
        }


def _nothing(*_: Any) -> None:
    """Only what comes before the call counts."""


class StepTrace:
    """Mixed into vLLM's worker, hence the names."""

    def maru_watch_steps(self) -> None:
        """From now on note everything."""
        self._maru_steps = Steps()
        self._maru_steps.begin()

    def maru_watched_steps(self) -> dict[str, Any]:
        """Stop, and tell what was noted."""
        return self._maru_steps.end()


HEAD = ("", "requests", "tokens", "hears of", "reads", "prepares", "submits", "waits for layers", "settles")
HEAD += ("on the device", "prepares", "computes")


def timeline(watched: Mapping[str, Any], began: float) -> list[str]:
    """Steps, and what became of loads, in the order of time, as lines. Milliseconds; points in time since ``began``.

    ``hears of``: loads that vLLM takes note of; ``reads``: those that still arrive. A step prepares until our hook
    before the forward pass, submits until the one after it, and settles until the loads that it read have ended.
    """
    head, *steps = align([HEAD, *(_row(step, began) for step in watched["steps"])])
    order = [step["cpu"]["entered"] for step in watched["steps"]]
    told = [*zip(order, steps, strict=True)]
    for when, what, request in watched["loads"]:
        told.append((when, f"{(when - began) * 1e3:.1f}    load {what}: {request}"))
    return [head, *(text for _, text in sorted(told, key=lambda pair: pair[0]))]


def _row(step: Mapping[str, Any], began: float) -> list[str]:
    cpu, device = step["cpu"], step["device"]
    return [
        _span(began, cpu.get("entered")),
        *(str(step[name]) for name in ("requests", "tokens", "received", "reads")),
        _span(cpu.get("entered"), cpu.get("bound")),
        _span(cpu.get("bound"), cpu.get("submitted")),
        f"{step['waited'] * 1e3:.1f}",
        _span(cpu.get("submitted"), cpu.get("settled")),
        _span(began, device.get("entered")),
        _span(device.get("entered"), device.get("bound")),
        _span(device.get("bound"), device.get("submitted")),
    ]


def _span(begin: float | None, end: float | None) -> str:
    return "-" if begin is None or end is None else f"{(end - begin) * 1e3:.1f}"
