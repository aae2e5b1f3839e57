"""Offers the ``kernel`` engine without importing NumPy or torch: that happens when the engine is first used."""

from __future__ import annotations

from collections.abc import Sequence

from maru_core.contracts import EngineProvision, TransferEngine
from maru_core.plugin import hookimpl


def make_engine() -> TransferEngine:
    """Import the engine; it looks for its native library when it is asked."""
    from maru_transfer.kernel import KernelEngine

    return KernelEngine()


@hookimpl
def maru_transfer_engines() -> Sequence[EngineProvision]:
    """The fastest engine for CUDA devices; asked for by name until it has served a real engine on a GPU."""
    return [EngineProvision("kernel", make_engine, rank=-1, summary="copy engine and placement kernels, CUDA devices")]
