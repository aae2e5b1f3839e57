"""Pools in huge pages: on a tmpfs that has them, and on a hugetlbfs. Each is mounted where no other process sees it.

Needs root; huge pages of a hugetlbfs are not set apart here: ``sysctl vm.nr_hugepages=24`` beforehand.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

MIB = 1 << 20
HUGE = 2 * MIB
FREE = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")

PROGRAM = """
import json, os, sys
from structlog.testing import capture_logs
from maru_backends.cpu import CpuBackend
from maru_core.contracts import PoolRequest
from maru_core.errors import BackendError

folder, size = sys.argv[1], int(sys.argv[2])

def request(size):
    return PoolRequest(pool=0, size=size, granule=1 << 16, entry_base=0, path=folder, owner="test")

backend = CpuBackend()
with capture_logs() as logs:
    pool = backend.create_pool(request(size))
(made,) = [entry for entry in logs if entry["event"] == "pool made"]
descriptor = pool.region.descriptor
region = backend.map_region(descriptor)
region.populate(0, descriptor.size)
region.buffer[descriptor.data_offset :][:4] = b"maru"
lines = open("/proc/self/smaps").read().splitlines()
at = [number for number, line in enumerate(lines) if line.endswith(descriptor.location)]
pages = {}
for start in at:
    for line in lines[start + 1 : start + 25]:
        name, _, value = line.partition(":")
        if name in ("ShmemPmdMapped", "KernelPageSize", "Shared_Hugetlb", "Private_Hugetlb"):
            pages[name] = max(pages.get(name, 0), int(value.split()[0]) * 1024)
region.close()
pool.leave()
again = CpuBackend().adopt_pool(request(size))
adopted = again is not None and bytes(again.region.buffer[descriptor.data_offset :][:4]) == b"maru"
again.destroy()
left = os.listdir(folder)
try:
    CpuBackend().create_pool(request(1 << 40))
    refusal = ""
except BackendError as error:
    refusal = str(error)
print(json.dumps({"size": descriptor.size, "page_size": made["page_size"], "pages": pages, "adopted": adopted,
                  "left": left, "refusal": refusal}))
"""


def in_private_mount(kind: str, options: str, folder: Path, size: int) -> dict[str, Any]:
    """Run PROGRAM over a pool in a file system of this kind; skips, with the reason, where none can be mounted."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount")
    script = (
        f'mount -t {kind} -o {options} none {folder} || exit 77; exec {sys.executable} -c "$PROGRAM" {folder} {size}'
    )
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script],
        env={**os.environ, "PROGRAM": PROGRAM, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"cannot mount a {kind} here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.slow
def test_a_tmpfs_with_huge_pages(tmp_path: Path) -> None:
    found = in_private_mount("tmpfs", "huge=always,size=64M", tmp_path, 24 * MIB + 5 * 4096 + 1)
    assert found["size"] == 24 * MIB + 5 * 4096
    assert found["adopted"]
    assert found["left"] == []
    assert "free space" in found["refusal"]
    if not found["pages"]["ShmemPmdMapped"]:
        pytest.skip(f"this kernel gives a tmpfs no huge pages: {found}")
    assert found["page_size"] == HUGE


@pytest.mark.slow
def test_small_pages_are_told_as_such(tmp_path: Path) -> None:
    found = in_private_mount("tmpfs", "huge=never,size=64M", tmp_path, 24 * MIB)
    assert found["page_size"] == 4096
    assert found["pages"]["ShmemPmdMapped"] == 0


def test_a_hugetlbfs(tmp_path: Path) -> None:
    if not FREE.exists() or int(FREE.read_text()) < 12:
        pytest.skip("12 free huge pages of 2 MiB are needed: sysctl vm.nr_hugepages=24")
    found = in_private_mount("hugetlbfs", "pagesize=2M", tmp_path, 20 * MIB + 4096)
    assert found["size"] == 20 * MIB, "whole huge pages"
    assert found["page_size"] == HUGE
    assert found["pages"]["KernelPageSize"] == HUGE
    assert found["adopted"]
    assert found["left"] == []
    assert "free huge pages" in found["refusal"]
