"""Installs that really run the build, each into a folder of its own."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("maru_core", "maru_backends", "maru_transfer", "maru_integrations", "maru_plugins_dax")
LIBRARY = "maru_backends/libmaru_host.so"
BUILD_INFO = "maru_backends/_build_info.json"
#: Made where there is an nvcc.
CUDA_LIBRARY = "maru_transfer/libmaru_cuda.so"
COPY_LIBRARY = "maru_transfer/libmaru_copy.so"
CUDA_BUILD_INFO = "maru_transfer/_build_info.json"
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
#: What a process sees of the native code.
LOOK = """
import json
from maru_backends import native
from maru_transfer import cuda_library, host_library
host, cuda, copy = native.load(), cuda_library.load(), host_library.load()
print(json.dumps({
    "file": native.__file__,
    "loaded": host is not None,
    "why_not": native.why_not(),
    "info": native.build_info(),
    "cuda": not isinstance(cuda, str),
    "copy": not isinstance(copy, str),
    "cuda_why_not": cuda if isinstance(cuda, str) else None,
}))
"""
#: Tools that a build may need beside a compiler.
TOOLS = ("cmake", "ninja", "make", "uname", "sh", "env", "cat", "rm")
#: Where CMake looks for an nvcc that no variable names.
NVCC_PLACES = ("/usr/local/cuda/bin", "/usr/local/bin")


def copy_tree(folder: Path) -> Path:
    """What makes the project, without what was built in this checkout."""
    ignore = shutil.ignore_patterns("__pycache__", "*.so", "_build_info.json")
    for name in (*PACKAGES, "csrc"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    for name in ("pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, folder)
    return folder


def environment(**changes: str | Path) -> dict[str, str]:
    """That of this process, without what the checkout under test has set, and with CUDA code for one architecture."""
    dropped = ("MARU_", "PYTEST_", "PYTHONPATH", "TORCH_CUDA_", "CUDA_HOME", "CUDA_PATH", "CUDACXX", "NVCC_")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
    return clean | {"MARU_CUDA_ARCHITECTURES": "9.0"} | {name: str(value) for name, value in changes.items()}


def run(command: list[Any], **options: Any) -> subprocess.CompletedProcess[str]:
    """A command that has to end well."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


def install(tree: Path, site: Path, **changes: str | Path) -> dict[str, Any]:
    """Install into ``site``, which has to go well whatever is there to build with; what a process then sees."""
    command = [*PIP, "install", "--no-deps", "--no-build-isolation", "--target", site, tree]
    run(command, env=environment(**changes))
    return look(site)


def with_index(*command: Any, **changes: str | Path) -> None:
    """pip with its build isolation, which needs a package index."""
    done = subprocess.run([*PIP, *command], capture_output=True, text=True, timeout=100, env=environment(**changes))
    if "No matching distribution found for" in done.stderr or "connection" in done.stderr:
        pytest.skip("no package index can be reached from here")
    assert done.returncode == 0, done.stderr


def look(site: Path) -> dict[str, Any]:
    """The native code as a process sees it that imports from ``site``, and both reports, which are the same."""
    done = run([sys.executable, "-c", LOOK], cwd=site.parent, env=environment(PYTHONPATH=site))
    seen: dict[str, Any] = json.loads(done.stdout)
    assert seen["file"] == str(site / "maru_backends/native.py")
    if seen["info"]:
        assert json.loads((site / CUDA_BUILD_INFO).read_text()) == seen["info"]
        for part, loaded, library in (
            ("host", "loaded", LIBRARY),
            ("copy", "copy", COPY_LIBRARY),
            ("cuda", "cuda", CUDA_LIBRARY),
        ):
            built = seen["info"][part]["built"]
            assert built == seen[loaded] == (site / library).exists()
            assert built == (seen["info"][part]["reason"] is None) == (seen["info"][part]["remedy"] is None)
            assert built == (seen["info"][part].get("bytes") is not None)
    return seen


def script(path: Path, text: str) -> Path:
    """An executable for sh."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def path_of(folder: Path, *tools: str) -> Path:
    """A folder for PATH with these tools only."""
    folder.mkdir()
    for tool in tools:
        found = shutil.which(tool)
        if found:
            (folder / tool).symlink_to(found)
    return folder


def hide_nvcc(folder: Path) -> str:
    """A PATH whose ``cmake`` finds no nvcc but one in the folder itself, which comes first, or in a variable."""
    hidden = {*NVCC_PLACES, *(place for place in os.get_exec_path() if os.access(f"{place}/nvcc", os.X_OK))}
    folder.mkdir()
    real = shutil.which("cmake")
    ignore = f"-DCMAKE_IGNORE_PATH='{';'.join(sorted(hidden))}'"
    script(folder / "cmake", f'case "$1" in -S) exec {real} "$@" {ignore} ;; *) exec {real} "$@" ;; esac')
    return f"{folder}:{os.environ['PATH']}"
