"""Offers the ``kernel`` engine without importing NumPy or torch: that happens when the engine is first used."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from maru_core.config import MaruConfig
from maru_core.contracts import EngineProvision, Finding, TransferEngine
from maru_core.plugin import hookimpl
from maru_transfer import build_info
from maru_transfer.cuda_driver import DriverError, driver_version


def make_engine() -> TransferEngine:
    """Import the engine; it looks for its native library when it is asked."""
    from maru_transfer.kernel import KernelEngine

    return KernelEngine()


def diagnose(config: MaruConfig, folder: Path = Path(__file__).parent) -> Sequence[Finding]:
    """What the build said of the CUDA code in ``folder``."""
    report = build_info.read(folder, "cuda")
    if not report.built:
        return [Finding("warning" if _has_device() else "note", "CUDA code", report.reason, report.remedy)]
    text = (
        f"built by nvcc {report.toolkit} for compute capability {report.architectures}, and for newer devices by way of"
        f" {report.ptx}"
    )
    found = [Finding("ok", "CUDA code", text)]
    if report.unknown_architectures:
        missing = f"nvcc {report.toolkit} does not know {report.unknown_architectures}: there the driver translates"
        found.append(Finding("note", "CUDA code", missing, "install Maru again with a newer CUDA toolkit"))
    if report.ignored:
        text = f"the build ignored {report.ignored}, where there is no nvcc"
        found.append(Finding("note", "CUDA code", text))
    return found


def _has_device() -> bool:
    try:
        return driver_version()[1] > 0
    except DriverError:
        return False


@hookimpl
def maru_transfer_engines() -> Sequence[EngineProvision]:
    """The engine for CUDA devices without loads by layer: taken where ``layerwise`` is excluded."""
    summary = "copy engine and placement kernels, CUDA devices"
    return [EngineProvision("kernel", make_engine, rank=10, summary=summary, diagnose=diagnose)]
