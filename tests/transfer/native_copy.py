"""The native copy, compiled for these tests: a checkout may have none, or one of before."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from maru_transfer import host_library

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "csrc").glob("host_*.c"))


def compile_copy(target: Path, *sources: Path, flags: Sequence[str] = ()) -> Path:
    """Compile ``sources``, by default the library's, without a warning."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("there is no C compiler here")
    strict = ["-std=c11", "-O2", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fPIC", "-shared", "-fvisibility=hidden"]
    command = [compiler, *strict, *flags, "-o", target, *(sources or SOURCES)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target


@cache
def native_library(*, portable: bool = False) -> host_library.HostLibrary:
    """The same library for a whole run; the file may go once it is loaded.

    ``portable``: with what any processor has, whatever this one has.
    """
    flags = ["-DMARU_PORTABLE"] if portable else []
    with tempfile.TemporaryDirectory() as folder:
        library = host_library.load(compile_copy(Path(folder, host_library.LIBRARY), flags=flags))
    assert isinstance(library, host_library.HostLibrary), library
    return library
