"""What the build's report becomes: a reason and a remedy, whatever the file holds; and what ``maru doctor`` shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from maru_core.config import MaruConfig
from maru_transfer import build_info, cuda_library, kernel_plugin
from maru_transfer.build_info import BUILD_INFO, INSTALL, NOT_BUILT

BUILT = {
    "built": True,
    "reason": None,
    "remedy": None,
    "toolkit": "12.4.131",
    "architectures": "8.0 9.0",
    "ptx": "9.0",
    "bytes": 1,
}


def write(folder: Path, part: object) -> None:
    (folder / BUILD_INFO).write_text(json.dumps({"cuda": part}))


@pytest.mark.parametrize(
    "text", [None, "", "{", "[]", '"cuda"', '{"cuda": null}', '{"cuda": []}', '{"host": {}}', "{}"]
)
def test_a_report_that_cannot_be_read_is_none(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / BUILD_INFO).write_text(text)
    report = build_info.read(tmp_path, "cuda")
    assert (report.built, report.why_not()) == (False, f"{NOT_BUILT}; {INSTALL}")
    assert str(cuda_library.load(tmp_path / "libmaru_cuda.so")).endswith(report.why_not())


def test_reason_and_remedy_reach_whoever_asks_for_the_library(tmp_path: Path) -> None:
    write(tmp_path, {"built": False, "reason": "no nvcc", "remedy": "get one"})
    assert str(cuda_library.load(tmp_path / "libmaru_cuda.so")).endswith("does not exist: no nvcc; get one")
    write(tmp_path, {"built": False})
    assert build_info.read(tmp_path, "cuda").why_not() == f"the build does not say why; {INSTALL}"
    write(tmp_path, BUILT)
    assert "removed since; install Maru again" in str(cuda_library.load(tmp_path / "libmaru_cuda.so"))


def findings(folder: Path) -> list[tuple[str, str, str]]:
    found = kernel_plugin.diagnose(MaruConfig(), folder)
    assert {finding.subject for finding in found} == {"CUDA code"}
    return [(finding.level, finding.text, finding.remedy) for finding in found]


def test_the_doctor_shows_what_was_built(tmp_path: Path) -> None:
    write(tmp_path, BUILT)
    ((level, text, remedy),) = findings(tmp_path)
    assert (level, remedy) == ("ok", "")
    assert "nvcc 12.4.131 for compute capability 8.0 9.0" in text
    write(tmp_path, BUILT | {"unknown_architectures": "10.0 12.0", "ignored": "CUDA_HOME=/x"})
    (_, (level, text, remedy), (_, ignored, _)) = findings(tmp_path)
    assert (level, "does not know 10.0 12.0" in text, "newer CUDA toolkit" in remedy) == ("note", True, True)
    assert "CUDA_HOME=/x" in ignored


@pytest.mark.parametrize(("devices", "level"), [(0, "note"), (1, "warning")])
def test_what_is_missing_is_a_warning_where_there_is_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: int, level: str
) -> None:
    monkeypatch.setattr(kernel_plugin, "driver_version", lambda: (13000, devices))
    write(tmp_path, {"built": False, "reason": "no nvcc", "remedy": "get one"})
    assert findings(tmp_path) == [(level, "no nvcc", "get one")]


def test_a_part_of_a_report_is_only_text(tmp_path: Path) -> None:
    strange: Any = {"built": 1, "reason": ["a"], "remedy": {"b": 1}}
    write(tmp_path, strange)
    report = build_info.read(tmp_path, "cuda")
    assert (report.built, report.reason, report.remedy) == (False, "['a']", "{'b': 1}")
