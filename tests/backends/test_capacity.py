"""How much memory there is, read from trees that look like ``/proc`` and ``/sys``."""

import os
from pathlib import Path

import pytest

from maru_backends.capacity import NO_LIMIT, available_memory, filesystem_type, free_huge_pages, free_space

MIB = 1 << 20


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


HOST = {"proc/meminfo": "MemTotal:  999999 kB\nMemFree:  1 kB\nMemAvailable:    8192 kB\n"}


def test_the_host_alone(tmp_path: Path) -> None:
    available = available_memory(tree(tmp_path, HOST))
    assert (available.size, available.source) == (8 * MIB, "MemAvailable of the host")


def test_nothing_readable_does_not_limit(tmp_path: Path) -> None:
    assert available_memory(tmp_path) == NO_LIMIT


def v2(group: str, limit: str, usage: int, inactive: int = 0) -> dict[str, str]:
    folder = f"sys/fs/cgroup{group}"
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.current": f"{usage}\n",
        f"{folder}/memory.stat": f"anon 5\ninactive_file {inactive}\nactive_file 7\n",
    }


def test_the_tightest_of_all_levels_counts(tmp_path: Path) -> None:
    files = {
        **HOST,
        "proc/self/cgroup": "0::/pod/box\n",
        **v2("/pod", str(6 * MIB), 4 * MIB, inactive=MIB),
        **v2("/pod/box", "max", 4 * MIB),
    }
    available = available_memory(tree(tmp_path, files))
    assert available.size == 3 * MIB
    assert available.source == f"memory.max {6 * MIB} of {tmp_path}/sys/fs/cgroup/pod"


def test_a_container_that_does_not_see_its_own_path(tmp_path: Path) -> None:
    files = {**HOST, "proc/self/cgroup": "0::/../../elsewhere\n", **v2("", str(2 * MIB), MIB)}
    assert available_memory(tree(tmp_path, files)).size == MIB


def test_over_the_limit_is_nothing_left(tmp_path: Path) -> None:
    files = {**HOST, "proc/self/cgroup": "0::/\n", **v2("", str(MIB), 2 * MIB)}
    assert available_memory(tree(tmp_path, files)).size == 0


@pytest.mark.parametrize(("limit", "left"), [(4 * MIB, 3 * MIB), (9223372036854771712, 8 * MIB)])
def test_version_1(tmp_path: Path, limit: int, left: int) -> None:
    folder = "sys/fs/cgroup/memory/box"
    files = {
        **HOST,
        "proc/self/cgroup": "5:devices:/\n4:cpu,memory:/box\n0::/\n",
        f"{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"{folder}/memory.usage_in_bytes": f"{2 * MIB}\n",
        f"{folder}/memory.stat": f"inactive_file 1\ntotal_inactive_file {MIB}\n",
    }
    assert available_memory(tree(tmp_path, files)).size == left


def test_the_type_of_a_file_system_is_found_by_device(tmp_path: Path) -> None:
    files = {
        "proc/self/mountinfo": "22 1 0:5 / / rw shared:1 master:2 - overlay overlay rw\n"
        "23 22 259:1048575 / /disk rw - ext4 /dev/x rw\n24 22 0:21 / /dev/shm rw,nosuid - tmpfs shm rw\n25 x\n"
    }
    root = tree(tmp_path, files)
    assert filesystem_type(os.makedev(0, 21), root) == "tmpfs"
    assert filesystem_type(os.makedev(0, 5), root) == "overlay"
    assert filesystem_type(os.makedev(259, 1048575), root) == "ext4"
    assert filesystem_type(99, root) == ""
    assert filesystem_type(99, tmp_path / "none") == ""


def test_huge_pages_that_are_promised_are_not_free(tmp_path: Path) -> None:
    folder = "sys/kernel/mm/hugepages/hugepages-2048kB"
    root = tree(tmp_path, {f"{folder}/free_hugepages": "5\n", f"{folder}/resv_hugepages": "2\n"})
    assert free_huge_pages(2 * MIB, root).size == 6 * MIB
    assert free_huge_pages(1 << 30, root) == NO_LIMIT


def test_free_space_of_a_real_folder(tmp_path: Path) -> None:
    with (tmp_path / "x").open("wb") as file:
        (available,) = free_space(file.fileno(), "here")
    assert 0 < available.size < 1 << 60
    assert available.source == "free space of here"
