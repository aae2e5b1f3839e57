"""All extensions of vLLM's worker that serving benchmarks use, as one class."""

from __future__ import annotations

from benchmarks.hit_trace import HitTrace
from benchmarks.pages import Pages
from benchmarks.step_trace import StepTrace


class Watched(Pages, HitTrace, StepTrace):
    """``worker_extension_cls="benchmarks.watched.Watched"``. vLLM wants no name twice that its worker has."""
