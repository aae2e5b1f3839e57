"""What the project file says agrees with the code."""

from __future__ import annotations

import os
import re
import subprocess
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
    # Nothing of ours but what is written as an outsider would: it would be gone with MARU_PLUGINS=none, for one.
    ours = {name: value for name, value in entries.items() if not value.startswith("maru_plugins_")}
    assert ours == dict(discovery.BUILT_INS)
    assert project["project"]["name"] == discovery.DISTRIBUTION


def test_every_package_is_in_the_wheel(project: dict[str, Any]) -> None:
    packages = {path.parent.name for path in ROOT.glob("maru_*/__init__.py")}
    assert set(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) == packages


def test_the_core_needs_neither_torch_nor_vllm(project: dict[str, Any]) -> None:
    needed = " ".join(project["project"]["dependencies"])
    assert "torch" not in needed
    assert "vllm" not in needed


def test_news_fragments_have_a_kind_that_towncrier_knows(project: dict[str, Any]) -> None:
    kinds = "|".join(kind["directory"] for kind in project["tool"]["towncrier"]["type"])
    names = [path.name for path in (ROOT / "newsfragments").iterdir() if path.name not in ("README.md", ".gitignore")]
    assert [name for name in names if not re.fullmatch(rf"\+?[\w-]+\.({kinds})(\.\d+)?\.md", name)] == []


@pytest.mark.parametrize(
    "script", ["scripts/setup-env.sh", "scripts/quickstart.sh", "scripts/test.sh", "scripts/test-vllm.sh", ".ci/run"]
)
def test_scripts_are_valid_and_executable(script: str) -> None:
    assert os.access(ROOT / script, os.X_OK)
    subprocess.run(["bash", "-n", ROOT / script], check=True)


def test_continuous_integration_runs_the_tests_and_an_unknown_option_is_refused() -> None:
    run = subprocess.run([ROOT / ".ci/run", "--no-such"], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (2, "usage: scripts/test.sh [--fast]\n")
