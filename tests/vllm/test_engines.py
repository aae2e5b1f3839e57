"""What a worker says of its choice of transfer engine: one line, and one warning if a better one is missing (D7)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from attrs import define, evolve
from structlog.testing import capture_logs

from maru_core.config import MaruConfig
from maru_core.contracts import EngineProvision, TransferEngine
from maru_core.errors import ConfigError
from maru_core.geometry import ObjectLayout, PagedLayout, PlaneStrides
from maru_core.host import PluginHost
from maru_core.plugin import hookimpl
from maru_integrations.vllm.engines import EngineChooser, NoEngine
from maru_transfer import kernel_plugin, layerwise_plugin, torch_copy_plugin
from maru_transfer.kernel import KernelEngine
from maru_transfer.layerwise import LayerwiseEngine
from maru_transfer.selection import Pages
from maru_transfer.torch_copy import TorchCopyEngine

PLANES = tuple(PlaneStrides(plane * 512, 64, 16, 8, 1) for plane in range(2))
PAGES = Pages(PagedLayout(PLANES, 2, 8, 4, 2, 8, 2), ObjectLayout(2, 2, 8, 16, 2), "cuda")


@define
class Offering:
    """The real engines, the kernels preferred; their library is at ``engine.library``."""

    engine: TransferEngine

    @hookimpl
    def maru_transfer_engines(self) -> list[EngineProvision]:
        return [
            EngineProvision("kernel", lambda: self.engine, rank=10),
            EngineProvision("torch-copy", TorchCopyEngine, rank=0),
        ]


@pytest.fixture
def host(tmp_path: Any) -> PluginHost:
    """One whose install left the kernels out."""
    report = {"built": False, "reason": "nvcc was not found", "remedy": "install a toolkit"}
    (tmp_path / "_build_info.json").write_text(json.dumps({"cuda": report}))
    return PluginHost.with_plugins({"both": Offering(KernelEngine(library=tmp_path / "libmaru_cuda.so"))})


@define
class Shipped:
    """The engines as their plugins offer them, but for where those of the GPU look for their library."""

    made: dict[str, TransferEngine]

    @hookimpl
    def maru_transfer_engines(self) -> list[EngineProvision]:
        plugins = (torch_copy_plugin, kernel_plugin, layerwise_plugin)
        offered = [provision for plugin in plugins for provision in plugin.maru_transfer_engines()]
        return [evolve(each, factory=lambda name=each.name: self.made[name]) for each in offered]


def shipped(library: Path) -> PluginHost:
    engines = (TorchCopyEngine(), KernelEngine(library=library), LayerwiseEngine(library=library))
    return PluginHost.with_plugins({"shipped": Shipped({engine.name: engine for engine in engines})})


def entries(logs: list[Any], event: str) -> list[Any]:
    return [entry for entry in logs if entry["event"] == event]


def test_missing_kernels_are_one_warning_with_reason_and_remedy(host: PluginHost) -> None:
    chooser = EngineChooser()
    with capture_logs() as logs:
        engines = {chooser.choose(host, MaruConfig(), PAGES).name for _ in range(3)}
    assert engines == {"torch-copy"}
    assert [entry["log_level"] for entry in logs] == ["info", "warning"]
    told, warning = logs
    assert (told["event"], told["chosen"], told["asked"]) == ("maru.transfer_engine", "torch-copy", "auto")
    assert warning["event"] == "maru.better_engine_missed"
    assert "nvcc was not found; install a toolkit" in warning["missed"]["kernel"]
    assert "maru_transfer_exclude=kernel" in warning["otherwise"]
    assert warning["missed"] == told["passed_over"]


def test_a_gpu_host_without_kernels_has_one_warning_for_both_engines_that_need_them(tmp_path: Path) -> None:
    with capture_logs() as logs:
        engine = EngineChooser().choose(shipped(tmp_path / "libmaru_cuda.so"), MaruConfig(), PAGES)
    assert engine.name == "torch-copy"
    (warning,) = (entry for entry in logs if entry["log_level"] == "warning")
    assert warning["event"] == "maru.better_engine_missed"
    assert list(warning["missed"]) == ["layerwise", "kernel"]
    assert "maru_transfer_exclude=layerwise,kernel" in warning["otherwise"]


@pytest.mark.parametrize(
    ("excluded", "best"), [((), "layerwise"), (("layerwise",), "kernel"), (("layerwise", "kernel"), "torch-copy")]
)
def test_auto_takes_the_engines_of_the_gpu_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, excluded: tuple[str, ...], best: str
) -> None:
    monkeypatch.setattr(KernelEngine, "import_error", lambda self: None)
    with capture_logs() as logs:
        chosen = EngineChooser().choose(shipped(tmp_path / "any.so"), MaruConfig(transfer_exclude=excluded), PAGES)
    assert chosen.name == best
    assert [entry["log_level"] for entry in logs] == ["info"]
    on_cpu = EngineChooser().choose(shipped(tmp_path / "any.so"), MaruConfig(), evolve(PAGES, device="cpu"))
    assert on_cpu.name == "torch-copy"


@pytest.mark.parametrize(
    ("config", "device"),
    [
        (MaruConfig(transfer_exclude="kernel"), "cuda"),
        (MaruConfig(transfer_engine="torch-copy"), "cuda"),
        (MaruConfig(), "cpu"),
    ],
)
def test_nobody_is_warned_who_did_not_want_them(host: PluginHost, config: MaruConfig, device: str) -> None:
    with capture_logs() as logs:
        engine = EngineChooser().choose(host, config, evolve(PAGES, device=device))
    assert engine.name == "torch-copy"
    assert [entry["log_level"] for entry in logs] == ["info"]
    assert logs[0]["passed_over"].keys() == {"kernel"}


def test_what_is_forced_or_all_excluded_is_refused_with_the_reason(host: PluginHost) -> None:
    with pytest.raises(NoEngine, match=r"maru_transfer_engine=kernel: .*nvcc was not found"):
        EngineChooser().choose(host, MaruConfig(transfer_engine="kernel"), PAGES)
    with pytest.raises(NoEngine, match="take a name out of maru_transfer_exclude"):
        EngineChooser().choose(host, MaruConfig(transfer_exclude=["kernel", "torch-copy"]), PAGES)
    with pytest.raises(ConfigError, match="maru_transfer_engine asks for 'kernel', which maru_transfer_exclude"):
        MaruConfig(transfer_engine="kernel", transfer_exclude="torch-copy,kernel")


def test_a_misspelt_exclusion_is_told_with_the_known_names(host: PluginHost) -> None:
    config = MaruConfig.from_mapping({}, {"MARU_TRANSFER_EXCLUDE": "kernels"})
    with capture_logs() as logs:
        EngineChooser().choose(host, config, PAGES)
    (warning,) = entries(logs, "maru.unknown_engine")
    assert (warning["unknown"], warning["known"]) == (["kernels"], ["kernel", "torch-copy"])


def test_it_speaks_again_when_the_answer_is_another(host: PluginHost) -> None:
    chooser = EngineChooser()
    with capture_logs() as logs:
        for config in (MaruConfig(), MaruConfig(transfer_exclude="kernel"), MaruConfig(transfer_exclude="kernel")):
            chooser.choose(host, config, PAGES)
    assert len(entries(logs, "maru.transfer_engine")) == 2
