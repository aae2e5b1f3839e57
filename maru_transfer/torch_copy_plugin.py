"""Offers the ``torch-copy`` engine without importing torch: that happens when the engine is first used."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from maru_core.config import MaruConfig
from maru_core.contracts import EngineProvision, Finding, TransferEngine
from maru_core.plugin import hookimpl
from maru_transfer import build_info


def make_engine() -> TransferEngine:
    """Import the engine, and torch with it."""
    from maru_transfer.torch_copy import TorchCopyEngine

    return TorchCopyEngine()


def diagnose(config: MaruConfig, folder: Path = Path(__file__).parent) -> Sequence[Finding]:
    """Whether copies in host memory are native, and how fast a GPU's driver, if any, gets hold of the pools."""
    from maru_transfer.pinning_findings import diagnose as pinning

    report = build_info.read(folder, "copy")
    if report.built:
        copies = Finding("ok", "host copies", "native")
    else:
        copies = Finding("note", "host copies", f"by NumPy, which takes longer: {report.reason}", report.remedy)
    return [copies, *pinning(config)]


@hookimpl
def maru_transfer_engines() -> Sequence[EngineProvision]:
    """The reference engine: correct on any device, hence the last choice of ``auto``."""
    summary = "plane by plane copies with torch, any device"
    return [EngineProvision("torch-copy", make_engine, rank=0, summary=summary, diagnose=diagnose)]
