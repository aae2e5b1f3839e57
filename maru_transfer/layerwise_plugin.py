"""Offers the ``layerwise`` engine without importing NumPy or torch: that happens when the engine is first used."""

from __future__ import annotations

from collections.abc import Sequence

from maru_core.contracts import EngineProvision, TransferEngine
from maru_core.plugin import hookimpl


def make_engine() -> TransferEngine:
    """Import the engine; it looks for its native library when it is asked."""
    from maru_transfer.layerwise import LayerwiseEngine

    return LayerwiseEngine()


@hookimpl
def maru_transfer_engines() -> Sequence[EngineProvision]:
    """The engine for CUDA devices, before ``kernel``: it does the same, and its loads may overlap with layers."""
    summary = "as kernel, with an event behind each layer of a load, CUDA devices"
    return [EngineProvision("layerwise", make_engine, rank=20, summary=summary)]
