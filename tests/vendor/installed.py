"""A fresh environment with Maru and plugins installed by pip, and processes that run in it."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from textwrap import dedent
from typing import Any

ROOT = Path(__file__).parents[2]


def wheel(folder: Path, distribution: str, entries: Mapping[str, str], modules: Mapping[str, str]) -> Path:
    """A wheel of these modules (name: source) and entry points, which pip installs as it does any other."""
    name = distribution.replace("-", "_")
    info = f"{name}-1.0.dist-info"
    files = {f"{module}.py": dedent(source) for module, source in modules.items()}
    lines = "".join(f"{entry} = {value}\n" for entry, value in entries.items())
    files |= {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[maru.plugins]\n{lines}",
    }
    record = io.StringIO()
    writer = csv.writer(record, lineterminator="\n")
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        writer.writerow([path, f"sha256={digest}", len(text.encode())])
    writer.writerow([f"{info}/RECORD", "", ""])
    made = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(made, "w") as archive:
        for path, text in (files | {f"{info}/RECORD": record.getvalue()}).items():
            archive.writestr(path, text)
    return made


class Installed:
    """A virtual environment in a folder. What Maru depends on is taken from the running one, Maru itself is not."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        venv.create(folder, with_pip=False, symlinks=True)
        self.python = folder / "bin" / "python"
        (self._site() / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def _site(self) -> Path:
        return Path(sysconfig.get_path("purelib", vars={"base": str(self.folder), "platbase": str(self.folder)}))

    def install(self, *what: Path, target: Path | None = None) -> None:
        """Install source trees or wheels with pip; ``target``: into this folder instead."""
        command = [sys.executable, "-m", "pip", "--python", str(self.python), "install", "--quiet", "--no-deps"]
        if all(_can_build_here(path) for path in what):
            command += ["--no-build-isolation", "--no-index"]
        if target is not None:
            command += ["--target", str(target)]
        run = subprocess.run([*command, *map(str, what)], env=self.environ(), capture_output=True, text=True)
        assert run.returncode == 0, run.stdout + run.stderr

    def environ(self, **extra: str) -> dict[str, str]:
        """Variables of a process in it: nothing of ours, of pytest's, or of where this repository is."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("MARU_", "PYTEST_", "PYTHON", "COV_"))}
        return {**kept, "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}", **extra}

    def run(
        self, command: Sequence[str | Path], *, cwd: Path | None = None, timeout: float = 60, **extra: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a program of it, in a folder where nothing can be imported by accident."""
        program = [str(self.folder / "bin" / command[0]), *map(str, command[1:])]
        return subprocess.run(
            program,
            cwd=cwd or self.folder,
            env=self.environ(**extra),
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def plugins(self, **extra: str) -> list[dict[str, Any]]:
        """``maru plugins --json``."""
        run = self.run(["maru", "plugins", "--json"], **extra)
        assert run.returncode == 0, run.stderr
        listed: list[dict[str, Any]] = json.loads(run.stdout)
        return listed


def _can_build_here(path: Path) -> bool:
    """Whether the running environment has what builds a source tree, so that no index is needed."""
    if path.is_file():
        return True
    text = (path / "pyproject.toml").read_text()
    (requires,) = [line for line in text.splitlines() if line.startswith("requires = ")]
    for requirement in json.loads(requires.removeprefix("requires = ")):
        name = requirement.split(">=")[0].split("==")[0].split("[")[0].strip()
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            return False
    return True
