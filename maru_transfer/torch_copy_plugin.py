"""Offers the ``torch-copy`` engine without importing torch: that happens when the engine is first used."""

from __future__ import annotations

from collections.abc import Sequence

from maru_core.contracts import EngineProvision, TransferEngine
from maru_core.plugin import hookimpl


def make_engine() -> TransferEngine:
    """Import the engine, and torch with it."""
    from maru_transfer.torch_copy import TorchCopyEngine

    return TorchCopyEngine()


@hookimpl
def maru_transfer_engines() -> Sequence[EngineProvision]:
    """The reference engine: correct on any device, hence the last choice of ``auto``."""
    return [EngineProvision("torch-copy", make_engine, rank=0, summary="plane by plane copies with torch, any device")]
