"""What the hints decide from what they are shown: switches, media, placement, coverage."""

from __future__ import annotations

import itertools
import mmap
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from maru_plugins_dax.coverage import BLOCK, Coverage
from maru_plugins_dax.medium import Medium, medium_of, medium_on
from maru_plugins_dax.memory import MADV_POPULATE_READ, MADV_WILLNEED, PAGE, Kernel
from maru_plugins_dax.placement import Placement, Topology, judge, node_of_device, parse_list
from maru_plugins_dax.switches import Switches

# -- switches --


def test_switches_come_from_their_own_variables() -> None:
    assert Switches.from_environ({}, cpus=2) == Switches()
    assert [Switches.from_environ({}, cpus=cpus).threads for cpus in (1, 7, 8, 16, 64)] == [1, 1, 2, 4, 4]
    environ = {
        "MARU_DAX_POPULATE": "off",
        "MARU_DAX_HUGE_PAGES": "1",
        "MARU_DAX_NUMA": "FALSE",
        "MARU_DAX_READ_AHEAD": "All",
        "MARU_DAX_THREADS": "7",
    }
    assert Switches.from_environ(environ) == Switches(False, True, False, "all", 7)


@pytest.mark.parametrize(
    ("name", "value"),
    [("POPULATE", "maybe"), ("READ_AHEAD", "yes"), ("THREADS", "0"), ("THREADS", "65"), ("THREADS", "-1")],
)
def test_a_value_that_cannot_be_is_told_and_left(name: str, value: str) -> None:
    with capture_logs() as logs:
        assert Switches.from_environ({f"MARU_DAX_{name}": value}, cpus=1) == Switches()
    assert [(log["variable"], log["value"]) for log in logs] == [(f"MARU_DAX_{name}", value)]


# -- media --

MOUNTS = """\
22 1 254:1 / / rw,relatime - ext4 /dev/vda rw,discard
30 22 0:25 / /dev/shm rw,nosuid - tmpfs tmpfs rw,size=8g
31 22 0:26 / /mnt/with\\040space rw shared:9 - tmpfs none rw,size=1g,huge=advise
32 22 0:27 / /mnt/huge rw - hugetlbfs none rw,pagesize=2M
33 22 0:28 / /mnt/always rw - tmpfs none rw,huge=always
broken line
""".splitlines()


@pytest.mark.parametrize(
    ("device", "medium"),
    [
        ("254:1", Medium("disk")),
        ("0:25", Medium("memory")),
        ("0:26", Medium("memory", huge=True)),
        ("0:27", Medium("memory")),
        ("0:28", Medium("memory")),
        ("9:9", Medium("disk")),
    ],
)
def test_a_file_is_made_of_what_its_file_system_is_made_of(device: str, medium: Medium) -> None:
    assert medium_on(device, MOUNTS) == medium


def test_real_places() -> None:
    assert medium_of("/dev/null") == Medium("device", device=(1, 3))
    assert [medium_of(location).kind for location in ("fake:x/0", "/no/such", "/tmp", "x\0y")] == ["unknown"] * 4
    path = Path(f"/dev/shm/maru-test-medium-{os.getpid()}")
    path.touch()
    try:
        assert medium_of(str(path)).kind == "memory"
    finally:
        path.unlink()


# -- placement --


def sysfs(root: Path, nodes: dict[int, tuple[str, str]]) -> Path:
    """``nodes``: by number, CPUs and distances as the kernel writes them."""
    for number, (cpus, distances) in nodes.items():
        folder = root / f"devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus + "\n")
        (folder / "distance").write_text(distances + "\n")
    return root


#: Two sockets, and a memory expander behind the second one.
EXPANDER = {0: ("0-3", "10 21 31"), 1: ("4-7", "21 10 20"), 2: ("", "31 20 10")}


@pytest.mark.parametrize(
    ("nodes", "cpus", "far", "wanted"),
    [
        ([0] * 8, {0, 1}, 0.0, None),
        ([1] * 8, {0, 1}, 1.0, "1"),
        ([1] * 8, {3, 4}, 0.0, None),
        ([0] * 6 + [1] * 2, {2}, 0.25, "1"),
        ([2] * 4, {5}, 0.0, None),
        ([2] * 4, {0}, 1.0, "1"),
        ([0, 1, 2, -2], {0}, 2 / 3, "1"),
        ([-2, -14], {0}, 0.0, None),
        ([], {0}, 0.0, None),
    ],
)
def test_memory_is_far_when_no_cpu_of_ours_is_nearest(
    tmp_path: Path, nodes: list[int], cpus: set[int], far: float, wanted: str | None
) -> None:
    placement = judge(nodes, cpus, Topology.read(sysfs(tmp_path, EXPANDER)))
    assert placement.far == pytest.approx(far)
    assert (f"--cpunodebind={wanted}`" in placement.remedy) if wanted else placement.remedy == ""
    assert sum(placement.nodes.values()) == sum(node >= 0 for node in nodes)


def test_one_node_is_never_far(tmp_path: Path) -> None:
    assert judge([0, 0], {0}, Topology.read(sysfs(tmp_path, {0: ("0-1", "10")}))) == Placement({0: 2})
    assert judge([0, 1], {0}, Topology.read(tmp_path / "none")) == Placement({0: 1, 1: 1})


def test_damaged_sysfs_is_passed_over(tmp_path: Path) -> None:
    root = sysfs(tmp_path, {0: ("0-1", "10"), 1: ("many", "x")})
    assert judge([0], {0}, Topology.read(root)).far == 0.0


@given(st.sets(st.integers(0, 300)))
def test_lists_of_cpus_are_read_as_the_kernel_writes_them(cpus: set[int]) -> None:
    parts: list[str] = []
    for cpu in sorted(cpus):
        if parts and cpu - 1 in cpus:
            parts[-1] = f"{parts[-1].split('-')[0]}-{cpu}"
        else:
            parts.append(str(cpu))
    assert parse_list(",".join(parts) + "\n") == cpus


def test_the_node_of_a_device(tmp_path: Path) -> None:
    folder = tmp_path / "dev/char/251:3"
    (folder / "device").mkdir(parents=True)
    assert node_of_device((251, 3), tmp_path) == -1
    (folder / "device/numa_node").write_text("0\n")
    assert node_of_device((251, 3), tmp_path) == 0
    (folder / "numa_node").write_text("-1\n")
    assert node_of_device((251, 3), tmp_path) == 0
    (folder / "target_node").write_text("4\n")
    assert node_of_device((251, 3), tmp_path) == 4


# -- coverage --


#: Where parts begin and end, just beside that, and anywhere.
PLACES = st.one_of(
    st.integers(0, 41).map(lambda block: block * BLOCK),
    st.integers(0, 41).map(lambda block: block * BLOCK + 1),
    st.integers(0, 41 * BLOCK),
)
LENGTHS = st.one_of(st.integers(0, 5).map(lambda blocks: blocks * BLOCK), st.integers(0, 5 * BLOCK))


@given(
    st.one_of(st.integers(10, 40).map(lambda blocks: blocks * BLOCK - 1), st.integers(1, 40 * BLOCK)),
    st.lists(st.tuples(PLACES, LENGTHS), max_size=6),
    st.sets(st.integers(0, 50)),
)
def test_what_is_missing_is_what_the_extents_touch_and_nobody_covered(
    size: int, extents: list[tuple[int, int]], covered: set[int]
) -> None:
    coverage = Coverage(size)
    blocks = -(-size // BLOCK)
    done = {block for block in covered if block < blocks}
    for block in [*done, *done]:
        coverage.cover(block)
    touched = {block for o, n in extents for block in range(o // BLOCK, -(-(o + n) // BLOCK)) if n and block < blocks}
    found = list(coverage.missing(sorted(extents)))
    assert found == sorted(found, reverse=True)
    assert set(found) <= touched - done
    ordered = sorted(extents)
    if all(a + n <= b for (a, n), (b, _) in itertools.pairwise(ordered)):
        assert set(found) == touched - done, "extents that do not overlap, as hosts announce them"
    for block in range(blocks):
        coverage.cover(block)
    assert coverage.complete


# -- the kernel --


def test_advice_populates_what_it_is_about_and_nothing_else() -> None:
    kernel = Kernel.load()
    memory = mmap.mmap(-1, 64 * PAGE)
    view = memoryview(memory)
    offsets = [page * PAGE for page in range(64)]
    assert all(node < 0 for node in kernel.nodes(view, offsets))
    assert kernel.advise(view, 8 * PAGE + 5, 10, MADV_POPULATE_READ) == 0
    there = [page for page, node in enumerate(kernel.nodes(view, offsets)) if node >= 0]
    assert there == [8]
    assert kernel.advise(view, 20 * PAGE - 5, 10, MADV_POPULATE_READ) == 0
    assert [page for page, node in enumerate(kernel.nodes(view, offsets)) if node >= 0] == [8, 19, 20]
    assert kernel.advise(view, 62 * PAGE, 1 << 40, MADV_POPULATE_READ) == 0
    assert [page for page, node in enumerate(kernel.nodes(view, offsets)) if node >= 0] == [8, 19, 20, 62, 63]


def test_what_the_kernel_refuses_is_a_number() -> None:
    kernel = Kernel.load()
    view = memoryview(mmap.mmap(-1, PAGE))
    assert kernel.advise(view, 0, PAGE, 9999) != 0
    assert kernel.advise(view, 0, 0, 9999) == kernel.advise(view, 1 << 40, 5, MADV_WILLNEED) == 0
    assert kernel.nodes(view, []) == []
