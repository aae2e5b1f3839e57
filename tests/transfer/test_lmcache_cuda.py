"""F2: LMCache's CUDA extension and ours in one process, imported in either order; both work, and store the same bytes.

Only on a GPU host: ``MARU_TEST_LMCACHE=.../lmcache/c_ops.*.so pytest tests/transfer/test_lmcache_cuda.py``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from maru_transfer.kernel import KernelEngine

VARIABLE = "MARU_TEST_LMCACHE"
PROGRAM = Path(__file__).with_name("two_extensions.py")


@pytest.fixture
def library() -> str:
    file = os.environ.get(VARIABLE)
    if file is None:
        pytest.skip(f"{VARIABLE} does not name LMCache's c_ops library")
    reason = KernelEngine().import_error()
    if reason is not None:
        pytest.skip(reason)
    assert Path(file).is_file(), f"{VARIABLE} is {file}, which is no file"
    return file


@pytest.mark.parametrize("order", [("ours", "theirs"), ("theirs", "ours")], ids=lambda order: f"{order[0]} first")
def test_both_work_in_one_process(library: str, order: tuple[str, str]) -> None:
    path = os.pathsep.join(filter(None, [str(PROGRAM.parents[2]), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, PROGRAM, *order, library],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{order[0]} before {order[1]}: 4 stores" in done.stdout
