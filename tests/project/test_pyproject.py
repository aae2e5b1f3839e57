"""What the project file says agrees with the code."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from maru_core import discovery

ROOT = Path(__file__).parents[2]


@pytest.fixture
def project() -> dict[str, Any]:
    if sys.version_info < (3, 11):
        pytest.skip("tomllib comes with Python 3.11")
    import tomllib

    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_built_ins_are_entry_points_like_those_of_vendors(project: dict[str, Any]) -> None:
    entries = project["project"]["entry-points"][discovery.GROUP]
    assert {name: entries.get(name) for name in discovery.BUILT_INS} == dict(discovery.BUILT_INS)
    assert project["project"]["name"] == discovery.DISTRIBUTION


def test_every_package_is_in_the_wheel(project: dict[str, Any]) -> None:
    packages = {path.parent.name for path in ROOT.glob("maru_*/__init__.py")}
    assert set(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) == packages


def test_the_core_needs_neither_torch_nor_vllm(project: dict[str, Any]) -> None:
    needed = " ".join(project["project"]["dependencies"])
    assert "torch" not in needed
    assert "vllm" not in needed
