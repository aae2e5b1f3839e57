"""The environment is made once and shared by all tests of this folder."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vendor.installed import ROOT, Installed


@pytest.fixture(scope="session")
def installed() -> Iterator[Installed]:
    """Maru and the vendor's example, installed from their sources."""
    folder = Path(tempfile.mkdtemp(prefix="maru-vendor-", dir="/tmp"))
    try:
        sources = folder / "sources"
        skip = shutil.ignore_patterns("__pycache__", ".*", "build", "dist", "*.egg-info")
        # A copy, because building may leave files in the tree.
        for path in ("maru_core", "maru_backends", "maru_transfer", "maru_integrations", "maru_plugins_dax", "csrc"):
            if (ROOT / path).is_dir():
                shutil.copytree(ROOT / path, sources / path, ignore=skip)
        for path in ROOT.iterdir():
            if path.is_file() and not path.name.startswith("."):
                shutil.copy(path, sources)
        shutil.copytree(ROOT / "examples/vendor-plugin", folder / "vendor", ignore=skip)
        environment = Installed(folder / "venv")
        environment.install(sources, folder / "vendor")
        yield environment
    finally:
        shutil.rmtree(folder, ignore_errors=True)
