"""The plugin ``torch-copy``: offers the reference transfer engine without importing torch."""

from __future__ import annotations

from collections.abc import Sequence

from maru_core.contracts import EngineProvision, TransferEngine
from maru_core.plugin import hookimpl


def _engine() -> TransferEngine:
    from maru_transfer.torch_copy import TorchCopyEngine

    return TorchCopyEngine()


@hookimpl
def maru_transfer_engines() -> Sequence[EngineProvision]:
    """Rank 0: everything that is made for a device goes first."""
    return [EngineProvision("torch-copy", _engine, rank=0, summary="strided copies, any layout and device")]
