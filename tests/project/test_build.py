"""Installs that really run the build: the native code is made where it can be, and its absence never fails one."""

from __future__ import annotations

import json
import shutil
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.project.building import (
    BUILD_INFO,
    COPY_LIBRARY,
    CUDA_BUILD_INFO,
    CUDA_LIBRARY,
    LIBRARY,
    LOOK,
    PACKAGES,
    PIP,
    TOOLS,
    copy_tree,
    environment,
    install,
    look,
    path_of,
    run,
    script,
    with_index,
)

pytestmark = pytest.mark.build

#: For tests in which nvcc plays no part: it is not run.
NO_NVCC = {"CUDACXX": "/bin/false"}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return copy_tree(tmp_path / "tree")


def test_a_wheel_has_what_was_built_and_what_it_had_before(tree: Path, tmp_path: Path) -> None:
    run([*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, tree], env=environment(**NO_NVCC))
    (wheel,) = tmp_path.glob("*.whl")
    assert "-py3-none-linux_" in wheel.name
    with zipfile.ZipFile(wheel) as packed:
        names = set(packed.namelist())
        entry_points = packed.read("maru_kv-0.1.0.dist-info/entry_points.txt").decode()
        packed.extractall(tmp_path / "site")
    modules = {str(path.relative_to(tree)) for package in PACKAGES for path in (tree / package).rglob("*.py")}
    packed_files = {name for name in names if not name.startswith("maru_kv-")}
    assert modules | {LIBRARY, COPY_LIBRARY, BUILD_INFO, CUDA_BUILD_INFO} == packed_files
    assert "maru_kv-0.1.0.dist-info/licenses/LICENSE" in names
    assert "maru = maru_core.cli:main" in entry_points
    assert "cpu = maru_backends.cpu" in entry_points
    seen = look(tmp_path / "site")
    assert (seen["loaded"], seen["why_not"], seen["cuda"]) == (True, None, False)
    assert "/bin/false cannot be used: its --list-gpu-arch failed (1)" in seen["info"]["cuda"]["reason"]


def test_what_was_built_in_the_tree_is_not_packed(tree: Path, tmp_path: Path) -> None:
    (tree / LIBRARY).write_text("of another time")
    (tree / CUDA_LIBRARY).write_text("of another time")
    (tree / BUILD_INFO).write_text('{"host": {"built": true}}')
    seen = install(tree, tmp_path / "site", MARU_SKIP_KV_OPS="1")
    assert not (tmp_path / "site" / LIBRARY).exists()
    assert not (tmp_path / "site" / CUDA_LIBRARY).exists()
    assert seen["info"]["host"]["built"] is False


def test_it_is_skipped_on_purpose(tree: Path, tmp_path: Path) -> None:
    seen = install(tree, tmp_path / "site", MARU_SKIP_KV_OPS="1")
    assert (seen["loaded"], seen["cuda"]) == (False, False)
    for reason in (seen["why_not"], seen["cuda_why_not"]):
        assert "MARU_SKIP_KV_OPS was set when Maru was installed; unset it and install Maru again" in reason
    assert (tmp_path / "site/maru_kv-0.1.0.dist-info/entry_points.txt").exists()


@pytest.mark.parametrize("tools", [("nvcc", *TOOLS), ()], ids=["cmake and nvcc", "nothing"])
def test_no_compiler(tree: Path, tmp_path: Path, tools: tuple[str, ...]) -> None:
    seen = install(tree, tmp_path / "site", PATH=path_of(tmp_path / "bin", *tools), CC="")
    assert (seen["loaded"], seen["cuda"]) == (False, False)
    for reason in (seen["why_not"], seen["cuda_why_not"]):
        assert "no C compiler was found (CC, or cc, gcc, clang in PATH); install one" in reason


def test_a_compiler_but_no_cmake(tree: Path, tmp_path: Path) -> None:
    seen = install(tree, tmp_path / "site", PATH=path_of(tmp_path / "bin", "cc", "nvcc"))
    for reason in (seen["why_not"], seen["cuda_why_not"]):
        assert "CMake was not found; install it (pip install cmake ninja)" in reason


def test_a_cmake_that_fails(tree: Path, tmp_path: Path) -> None:
    path = path_of(tmp_path / "bin", "cc", "nvcc")
    script(path / "cmake", "echo 'cmake: error: cannot open libssl' >&2; exit 127")
    seen = install(tree, tmp_path / "site", PATH=path)
    for reason in (seen["why_not"], seen["cuda_why_not"]):
        assert "cmake -S failed with 127: cmake: error: cannot open libssl" in reason


def test_a_compiler_that_fails_always(tree: Path, tmp_path: Path) -> None:
    # In an encoding of its own.
    compiler = script(tmp_path / "broken-cc", r"printf '\300 broken-cc: licence expired\n' >&2; exit 3")
    seen = install(tree, tmp_path / "site", CC=compiler)
    assert (seen["loaded"], seen["cuda"]) == (False, False)
    for reason in (seen["why_not"], seen["cuda_why_not"]):
        assert "broken-cc does not work (3): \N{REPLACEMENT CHARACTER} broken-cc: licence expired; set CC to" in reason


def test_a_compiler_that_is_not_there(tree: Path, tmp_path: Path) -> None:
    seen = install(tree, tmp_path / "site", CC=f"{tmp_path}/nowhere -m64")
    for reason in (seen["why_not"], seen["cuda_why_not"]):
        assert f"CC is '{tmp_path}/nowhere -m64', which is no program; unset it, or set it to a C compiler" in reason


def test_a_compiler_that_fails_at_our_code(tree: Path, tmp_path: Path) -> None:
    (tree / "csrc/host.c").write_text('#include "maru.h"\n#error not on this machine\n')
    seen = install(tree, tmp_path / "site", **NO_NVCC)
    assert seen["loaded"] is False
    assert "not on this machine" in seen["why_not"]
    assert "set CC to another C compiler" in seen["why_not"]


def test_an_editable_install_builds_in_the_tree_and_leaves_pythonpath_first(tree: Path, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    run([sys.executable, "-m", "venv", "--without-pip", venv])
    python = venv / "bin/python"
    with_index("--python", python, "install", "--no-deps", "--editable", tree, **NO_NVCC)
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
