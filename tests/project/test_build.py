"""Installs that really run the build: the native code is made where it can be, and its absence never fails one."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.build

ROOT = Path(__file__).parents[2]
PACKAGES = ("maru_core", "maru_backends", "maru_transfer", "maru_integrations", "maru_plugins_dax")
LIBRARY = "maru_backends/libmaru_host.so"
BUILD_INFO = "maru_backends/_build_info.json"
#: Made where there is an nvcc.
CUDA_LIBRARY = "maru_transfer/libmaru_cuda.so"
CUDA_BUILD_INFO = "maru_transfer/_build_info.json"
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
#: What a process sees of the native code.
LOOK = """
import json
from maru_backends import native
host = native.load()
print(json.dumps({
    "file": native.__file__,
    "loaded": host is not None,
    "why_not": native.why_not(),
    "info": native.build_info(),
}))
"""
#: Tools that a build may need beside a compiler.
TOOLS = ("cmake", "ninja", "make", "uname", "sh", "env", "cat", "rm")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what makes the project, without what was built in this checkout."""
    tree = tmp_path / "tree"
    ignore = shutil.ignore_patterns("__pycache__", "*.so", "_build_info.json")
    for name in (*PACKAGES, "csrc"):
        shutil.copytree(ROOT / name, tree / name, ignore=ignore)
    for name in ("pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, tree)
    return tree


def environment(**changes: str | Path) -> dict[str, str]:
    """That of this process, without what the checkout under test has set."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MARU_", "PYTEST_")) and k != "PYTHONPATH"}
    return clean | {name: str(value) for name, value in changes.items()}


def run(command: list[Any], **options: Any) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


def install(tree: Path, site: Path, *options: str, **changes: str | Path) -> None:
    run([*PIP, "install", "--no-deps", "--target", site, *options, tree], env=environment(**changes))


def with_index(*command: Any, **changes: str | Path) -> None:
    """pip with its build isolation, which needs a package index."""
    done = subprocess.run([*PIP, *command], capture_output=True, text=True, timeout=100, env=environment(**changes))
    if "No matching distribution found for" in done.stderr or "connection" in done.stderr:
        pytest.skip("no package index can be reached from here")
    assert done.returncode == 0, done.stderr


def look(site: Path) -> dict[str, Any]:
    """The native code as a process sees it that imports from ``site``."""
    done = run([sys.executable, "-c", LOOK], cwd=site.parent, env=environment(PYTHONPATH=site))
    seen: dict[str, Any] = json.loads(done.stdout)
    assert seen["file"] == str(site / "maru_backends/native.py")
    return seen


def path_without_compiler(folder: Path) -> Path:
    folder.mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        if found:
            (folder / tool).symlink_to(found)
    return folder


def test_a_plain_install_builds_it_and_packs_what_it_did_before(tree: Path, tmp_path: Path) -> None:
    run([*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, tree], env=environment())
    (wheel,) = tmp_path.glob("*.whl")
    assert "-py3-none-linux_" in wheel.name
    with zipfile.ZipFile(wheel) as packed:
        names = set(packed.namelist())
        entry_points = packed.read("maru_kv-0.1.0.dist-info/entry_points.txt").decode()
        packed.extractall(tmp_path / "site")
    modules = {str(path.relative_to(tree)) for package in PACKAGES for path in (tree / package).rglob("*.py")}
    cuda = {CUDA_LIBRARY} if shutil.which("nvcc") else set()
    packed_files = {name for name in names if not name.startswith("maru_kv-")}
    assert modules | {LIBRARY, BUILD_INFO, CUDA_BUILD_INFO} | cuda == packed_files
    assert "maru_kv-0.1.0.dist-info/licenses/LICENSE" in names
    assert "maru = maru_core.cli:main" in entry_points
    assert "cpu = maru_backends.cpu" in entry_points
    seen = look(tmp_path / "site")
    assert (seen["loaded"], seen["why_not"]) == (True, None)
    assert seen["info"]["host"] == {"built": True, "reason": None}


def test_what_was_built_in_the_tree_is_not_packed(tree: Path, tmp_path: Path) -> None:
    (tree / LIBRARY).write_text("of another time")
    (tree / BUILD_INFO).write_text('{"host": {"built": true}}')
    install(tree, tmp_path / "site", "--no-build-isolation", MARU_SKIP_KV_OPS="1")
    assert not (tmp_path / "site" / LIBRARY).exists()
    assert look(tmp_path / "site")["info"]["host"]["built"] is False


def test_it_is_skipped_on_purpose(tree: Path, tmp_path: Path) -> None:
    install(tree, tmp_path / "site", "--no-build-isolation", MARU_SKIP_KV_OPS="1")
    seen = look(tmp_path / "site")
    assert seen["loaded"] is False
    assert "MARU_SKIP_KV_OPS was set" in seen["why_not"]
    assert "install again" in seen["why_not"]
    assert (tmp_path / "site/maru_kv-0.1.0.dist-info/entry_points.txt").exists()


@pytest.mark.parametrize("tools", [True, False], ids=["cmake", "nothing"])
def test_no_compiler(tree: Path, tmp_path: Path, tools: bool) -> None:
    path = path_without_compiler(tmp_path / "bin") if tools else tmp_path / "nowhere"
    install(tree, tmp_path / "site", "--no-build-isolation", PATH=path, CC="")
    seen = look(tmp_path / "site")
    assert seen["loaded"] is False
    assert "no C compiler was found" in seen["why_not"]


def test_a_compiler_but_no_cmake(tree: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "cc").symlink_to(shutil.which("cc") or "/usr/bin/cc")
    install(tree, tmp_path / "site", "--no-build-isolation", PATH=folder)
    assert "CMake was not found; install it" in look(tmp_path / "site")["why_not"]


def test_a_compiler_that_fails_always(tree: Path, tmp_path: Path) -> None:
    compiler = script(tmp_path / "broken-cc", "echo 'broken-cc: licence expired' >&2; exit 3")
    install(tree, tmp_path / "site", "--no-build-isolation", CC=compiler)
    seen = look(tmp_path / "site")
    assert seen["loaded"] is False
    assert "broken-cc does not work (3): broken-cc: licence expired" in seen["why_not"]


def test_a_compiler_that_fails_at_our_code(tree: Path, tmp_path: Path) -> None:
    (tree / "csrc/host.c").write_text('#include "maru.h"\n#error not on this machine\n')
    install(tree, tmp_path / "site", "--no-build-isolation")
    seen = look(tmp_path / "site")
    assert seen["loaded"] is False
    assert "not on this machine" in seen["why_not"]
    assert seen["info"]["host"]["built"] is False


def test_build_isolation(tree: Path, tmp_path: Path) -> None:
    with_index("install", "--no-deps", "--target", tmp_path / "site", tree)
    assert look(tmp_path / "site")["loaded"] is True


def test_an_editable_install_builds_in_the_tree_and_leaves_pythonpath_first(tree: Path, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    run([sys.executable, "-m", "venv", "--without-pip", venv])
    python = venv / "bin/python"
    with_index("--python", python, "install", "--no-deps", "--editable", tree)
    assert look(tree)["loaded"] is True
    (site,) = venv.glob("lib/python*/site-packages")
    assert list(site.glob("*.py")) == []  # no import hook
    # Another checkout in PYTHONPATH counts, though nothing was built there.
    other = tmp_path / "other"
    shutil.copytree(tree, other, ignore=shutil.ignore_patterns("*.so", "_build_info.json"))
    # Its dependencies are in this environment; appended, so that no .pth file of ours is read.
    code = f"import sys; sys.path.append({sysconfig.get_path('purelib')!r})\n{LOOK}"
    for extra, expected in (({}, tree), ({"PYTHONPATH": other}, other)):
        done = run([python, "-c", code], cwd=tmp_path, env=environment(**extra))
        seen = json.loads(done.stdout)
        assert seen["file"] == str(expected / "maru_backends/native.py")
        assert seen["loaded"] is (expected == tree)
    assert "nothing was built in this checkout" in seen["why_not"]
    # One that is built again without leaves nothing of before.
    with_index("--python", python, "install", "--no-deps", "--editable", tree, MARU_SKIP_KV_OPS="1")
    assert "MARU_SKIP_KV_OPS was set" in look(tree)["why_not"]
    assert not (tree / LIBRARY).exists()
    assert list((tree / "maru_backends").glob(".maru-build-*")) == []


def test_the_source_distribution_has_all_that_a_build_needs(tree: Path, tmp_path: Path) -> None:
    code = "import sys, hatchling.build as backend; backend.build_sdist(sys.argv[1])"
    run([sys.executable, "-c", code, tmp_path], cwd=tree, env=environment())
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as packed:
        names = {Path(name).relative_to("maru_kv-0.1.0") for name in packed.getnames()}
    for name in ("CMakeLists.txt", "csrc/host.c", "csrc/maru.h", "csrc/build.py", "LICENSE", "maru_core/config.py"):
        assert Path(name) in names
    assert Path(LIBRARY) not in names
    install(sdist, tmp_path / "site", "--no-build-isolation")
    assert look(tmp_path / "site")["loaded"] is True


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path
