"""Installs that run the build of the CUDA code, with every toolkit that there may be: the install succeeds each time.

A toolkit of another version is a script that answers like one and lets the real nvcc work, or writes an image of its
own making where it does not matter what is in it.
"""

from __future__ import annotations

import os
import shutil
import struct
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.project.building import (
    CUDA_LIBRARY,
    LIBRARY,
    PIP,
    TOOLS,
    copy_tree,
    environment,
    hide_nvcc,
    install,
    look,
    path_of,
    run,
    script,
    with_index,
)

pytestmark = pytest.mark.build

NVCC = shutil.which("nvcc")
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="there is no nvcc in PATH")
ALL = (80, 86, 89, 90, 100, 120)
NEWEST = 75, *ALL
#: Writes what nvcc was asked to write, with something in it.
PRETEND = 'while [ $# -gt 0 ]; do [ "$1" = -o ] && echo image >"$2"; shift; done'


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return copy_tree(tmp_path / "tree")


def toolkit(folder: Path, version: str = "12.4.131", known: tuple[int, ...] = NEWEST, work: str = PRETEND) -> Path:
    """An nvcc that says it is ``version``, knows these architectures, and does ``work`` when it has to compile."""
    folder.mkdir(parents=True, exist_ok=True)
    release = ".".join(version.split(".")[:2])
    names = " ".join(f"compute_{number}" for number in known)
    return script(
        folder / "nvcc",
        'case "$1" in\n'
        f"--version) echo 'Cuda compilation tools, release {release}, V{version}' ;;\n"
        f"--list-gpu-arch) printf '%s\\n' {names} ;;\n"
        f"*) {work} ;;\n"
        "esac",
    )


def report(seen: dict[str, Any]) -> dict[str, Any]:
    """What the build said of the CUDA code; that of the host was built whatever became of this."""
    assert seen["loaded"] is True, seen["why_not"]
    part: dict[str, Any] = seen["info"]["cuda"]
    assert part["built"] is seen["cuda"]
    if not part["built"]:
        assert part["reason"] in seen["cuda_why_not"]
        assert part["remedy"] in seen["cuda_why_not"]
        assert "install Maru again" in part["remedy"]
    return part


def images(library: Path) -> Iterator[tuple[str, int]]:
    """Kind and architecture of each image in a library that has one fatbin."""
    data = library.read_bytes()
    start = data.index(struct.pack("<IH", 0xBA55ED50, 1))
    header, size = struct.unpack_from("<HQ", data, start + 6)
    at, end = start + header, start + header + size
    while at < end:
        kind, _, header, size = struct.unpack_from("<HHIQ", data, at)
        yield {1: "ptx", 2: "machine code"}[kind], struct.unpack_from("<I", data, at + 28)[0]
        at += header + size


@needs_nvcc
def test_the_plain_install_has_code_for_every_architecture(tree: Path, tmp_path: Path) -> None:
    """Neither a GPU nor a list of architectures, and no build isolation: what README says, with pip as it is."""
    site = tmp_path / "site"
    seen = install(tree, site, MARU_CUDA_ARCHITECTURES="", CUDA_VISIBLE_DEVICES="")
    part = report(seen)
    known = run([NVCC, "--list-gpu-arch"]).stdout.split()
    built = [number for number in ALL if f"compute_{number}" in known]
    wanted = [*(("machine code", number) for number in built), ("ptx", built[-1])]
    assert sorted(images(site / CUDA_LIBRARY)) == sorted(wanted)
    assert part["architectures"] == " ".join(f"{number // 10}.{number % 10}" for number in built)
    assert part["ptx"] == part["architectures"].split()[-1]
    assert part["bytes"] < 400_000
    assert part["toolkit"] in run([NVCC, "--version"]).stdout


def test_a_source_distribution_makes_a_wheel_with_it(tree: Path, tmp_path: Path) -> None:
    code = "import sys, hatchling.build as backend; backend.build_sdist(sys.argv[1])"
    run([sys.executable, "-c", code, tmp_path], cwd=tree, env=environment())
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as packed:
        names = {Path(name).relative_to("maru_kv-0.1.0") for name in packed.getnames()}
    needed = {path.relative_to(tree) for path in (tree / "csrc").iterdir()}
    assert {Path("CMakeLists.txt"), Path("LICENSE"), Path("maru_core/config.py")} | needed <= names
    assert not {Path(LIBRARY), Path(CUDA_LIBRARY)} & names
    run([*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, sdist], env=environment())
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        assert LIBRARY in packed.namelist()
        assert (CUDA_LIBRARY in packed.namelist()) is (NVCC is not None)
        packed.extractall(tmp_path / "site")
    assert report(look(tmp_path / "site"))["built"] is (NVCC is not None)


def test_build_isolation(tree: Path, tmp_path: Path) -> None:
    with_index("install", "--no-deps", "--target", tmp_path / "site", tree)
    part = report(look(tmp_path / "site"))
    assert part["built"] is (NVCC is not None)


def test_build_isolation_fetches_cmake_where_there_is_none(tree: Path, tmp_path: Path) -> None:
    tools = ("cc", "gcc", "as", "ld", "ar", *(tool for tool in TOOLS if tool not in ("cmake", "ninja", "make")))
    path = path_of(tmp_path / "bin", *tools)
    pretend = toolkit(tmp_path / "toolkit")
    with_index("install", "--no-deps", "--target", tmp_path / "site", tree, PATH=path, CUDACXX=pretend)
    assert report(look(tmp_path / "site"))["built"] is True


def test_no_nvcc(tree: Path, tmp_path: Path) -> None:
    part = report(install(tree, tmp_path / "site", PATH=hide_nvcc(tmp_path / "bin")))
    assert part["reason"] == "nvcc was not found in CUDACXX, CUDA_HOME, CUDA_PATH, PATH or /usr/local/cuda"
    assert "install a CUDA toolkit (11.8 or newer) or set CUDA_HOME" in part["remedy"]


@needs_nvcc
def test_a_toolkit_of_another_major_version_that_knows_fewer_devices(tree: Path, tmp_path: Path) -> None:
    """12.4 knows neither 10.0 nor 12.0: the rest is built, and newer devices get the newest PTX there is."""
    real = f'exec {NVCC} "$@"'
    pretend = toolkit(tmp_path / "toolkit", "12.4.131", (80, 86, 89, 90), real)
    site = tmp_path / "site"
    part = report(install(tree, site, MARU_CUDA_ARCHITECTURES="9.0 10.0 12.0", CUDACXX=pretend))
    assert (part["built"], part["toolkit"], part["unknown_architectures"]) == (True, "12.4.131", "10.0 12.0")
    assert (part["architectures"], part["ptx"]) == ("9.0", "9.0")
    assert sorted(images(site / CUDA_LIBRARY)) == [("machine code", 90), ("ptx", 90)]


def test_the_oldest_toolkit_that_will_do(tree: Path, tmp_path: Path) -> None:
    pretend = toolkit(tmp_path / "toolkit", "11.8.89", (50, 70, 80, 86, 87, 89, 90))
    part = report(install(tree, tmp_path / "site", MARU_CUDA_ARCHITECTURES="", CUDACXX=pretend))
    assert (part["architectures"], part["unknown_architectures"]) == ("8.0 8.6 8.9 9.0", "10.0 12.0")


def test_a_toolkit_that_knows_no_device_of_ours(tree: Path, tmp_path: Path) -> None:
    pretend = toolkit(tmp_path / "toolkit", "11.0.3", (35, 50, 60, 70))
    part = report(install(tree, tmp_path / "site", MARU_CUDA_ARCHITECTURES="", CUDACXX=pretend))
    assert "it knows none of the architectures 8.0 8.6 8.9 9.0 10.0 12.0" in part["reason"]
    assert "set CUDACXX to the nvcc of another toolkit" in part["remedy"]


@pytest.mark.parametrize(
    "said",
    [
        "host_config.h:143:2: error: #error -- unsupported GNU version! gcc versions later than 11 are not supported!",
        "nvcc fatal   : Unsupported gpu architecture 'compute_90'",
    ],
)
def test_a_toolkit_that_fails_at_our_code(tree: Path, tmp_path: Path, said: str) -> None:
    """Of another major version, and too old for this compiler, as it happens."""
    pretend = toolkit(tmp_path / "toolkit", "11.8.89", work=f'echo "{said}" >&2; exit 1')
    part = report(install(tree, tmp_path / "site", CUDACXX=pretend))
    assert part["reason"].startswith("cmake --build failed")
    assert said in part["reason"]
    assert "NVCC_CCBIN" in part["remedy"]
    assert part["toolkit"] == "11.8.89"


@pytest.mark.parametrize("variable", ["CUDACXX", "CUDA_HOME", "CUDA_PATH"])
@pytest.mark.parametrize("found", [True, False], ids=["one in PATH", "none in PATH"])
def test_a_variable_that_names_no_toolkit(tree: Path, tmp_path: Path, variable: str, found: bool) -> None:
    nonsense = tmp_path / "non sense"
    path = hide_nvcc(tmp_path / "bin")
    if found:
        toolkit(tmp_path / "bin")
    part = report(install(tree, tmp_path / "site", **{variable: nonsense}, PATH=path))
    assert (part["built"], part["ignored"]) == (found, f"{variable}={nonsense}")


def test_variables_count_in_their_order(tree: Path, tmp_path: Path) -> None:
    """CUDACXX, CUDA_HOME, CUDA_PATH, PATH."""
    versions = {"cxx": "12.1.1", "home/bin": "12.2.2", "path/bin": "12.3.3", "bin": "12.4.4"}
    found = hide_nvcc(tmp_path / "bin")
    for folder, version in versions.items():
        toolkit(tmp_path / folder, version)
    variables = {"CUDACXX": tmp_path / "cxx/nvcc", "CUDA_HOME": tmp_path / "home", "CUDA_PATH": tmp_path / "path"}
    for version in versions.values():
        out = tmp_path / version
        changes = {"MARU_CUDA_ARCHITECTURES": "9.0", **variables}
        run(
            [found.split(os.pathsep)[0] + "/cmake", "-S", tree, "-B", out],
            env=environment(PATH=found, **changes),
        )
        assert f"toolkit={version}" in (out / "parts/cuda.facts").read_text().splitlines()
        if variables:
            del variables[next(iter(variables))]
