"""DAX devices as sysfs describes them: sizes, alignments, modes, and what is said of those that cannot be used."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maru_backends import devdax
from maru_backends.checkup import check_cxl
from maru_backends.cxl import CxlBackend
from maru_backends.devdax import DEFAULT_ALIGN, DaxDevice, discover, find
from maru_core.config import MaruConfig
from maru_core.contracts import PoolWish
from maru_core.errors import BackendError
from tests.backends.fake_sysfs import FakeSysfs
from tests.budgets import examples

MIB = 1 << 20
#: Any character device that is there: the tree says what it is.
NODE = "/dev/null"
USUAL = {"size": "526385152", "align": "2097152", "numa_node": "0", "target_node": "2"}


@pytest.fixture
def sysfs(tmp_path: Path) -> FakeSysfs:
    return FakeSysfs(tmp_path / "sys")


def number_of(path: str = NODE) -> int:
    return os.stat(path).st_rdev


def only(sysfs: FakeSysfs) -> DaxDevice:
    (device,) = discover(sysfs.root)
    return device


def test_a_device_is_found_by_its_number_through_links(sysfs: FakeSysfs, tmp_path: Path) -> None:
    sysfs.add("dax0.0", USUAL, number=number_of())
    link = tmp_path / "memory"
    link.symlink_to(NODE)
    (tmp_path / "again").symlink_to(link)
    for path in (NODE, link, tmp_path / "again"):
        device = find(path, sysfs.root)
        assert device == DaxDevice("dax0.0", NODE, 526385152, 2 * MIB, True, "devdax", 0, 2)
    assert device.capacity == 526385152 == 251 * 2 * MIB
    assert device.problem is None
    assert device.doubts == []
    assert device.describe() == (
        "/dev/null: 502.0 MiB (526385152 bytes), align 2.0 MiB, mode devdax, node 0, target node 2"
    )


@pytest.mark.parametrize(
    ("size", "align", "capacity"),
    [
        ("0x1f600000", "0x200000", 0x1F600000),
        ("4194305", "2097152", 4194304),
        ("6291455", "2097152", 4194304),
        ("1073741824", "1073741824", 1 << 30),
        ("0010485760", "2097152", 10485760),
    ],
)
def test_numbers_are_decimal_or_hexadecimal_and_the_capacity_is_whole_alignments(
    sysfs: FakeSysfs, size: str, align: str, capacity: int
) -> None:
    sysfs.add("dax0.0", {"size": size, "align": align})
    assert only(sysfs).capacity == capacity


def test_an_alignment_that_the_device_does_not_tell_is_its_regions_or_assumed_and_said(sysfs: FakeSysfs) -> None:
    sysfs.add("dax0.0", {"size": str(4 << 30)}, region={"align": "1073741824"})
    sysfs.add("dax1.0", {"size": str(4 << 30)})
    sysfs.add("dax2.0", {"size": str(4 << 30), "align": "nonsense"}, region={"align": "0"})
    first, *others = discover(sysfs.root)
    assert (first.align, first.align_said) == (1 << 30, False)
    for device in others:
        assert (device.align, device.align_said) == (DEFAULT_ALIGN, False)
        assert any("does not tell the alignment" in doubt for doubt, _ in device.doubts)
        assert "align 2.0 MiB (assumed)" in device.describe()
    assert (others[0].numa_node, others[0].target_node) == (None, None)


def test_a_kernel_that_has_a_class_in_place_of_a_bus(sysfs: FakeSysfs) -> None:
    folder = sysfs.root / "devices/virtual/dax0.0"
    folder.mkdir(parents=True)
    (folder / "size").write_text("1073741824\n")
    (folder / "device/dax_region").mkdir(parents=True)
    (folder / "device/dax_region/align").write_text("4096\n")
    (sysfs.root / "class/dax").mkdir()
    (sysfs.root / "class/dax/dax0.0").symlink_to(folder)
    (folder / "subsystem").symlink_to(sysfs.root / "class/dax")
    device = only(sysfs)
    assert (device.mode, device.align, device.problem) == ("devdax", 4096, None)


@pytest.mark.parametrize(
    ("driver", "mode", "remedy"),
    [
        ("kmem", "system-ram", "`daxctl reconfigure-device --mode=devdax --force dax3.1`"),
        (None, "disabled", "`daxctl reconfigure-device --mode=devdax dax3.1`"),
        ("vendor_dax", "unknown", "`daxctl reconfigure-device --mode=devdax --force dax3.1`"),
    ],
)
def test_another_mode_is_a_problem_with_the_command_that_mends_it(
    sysfs: FakeSysfs, driver: str | None, mode: str, remedy: str
) -> None:
    sysfs.add("dax3.1", USUAL, driver=driver)
    device = only(sysfs)
    assert device.mode == mode
    assert device.problem is not None
    assert remedy in device.problem


def test_small_pages_and_small_devices_are_explained(sysfs: FakeSysfs) -> None:
    sysfs.add("dax0.0", {"size": str(250 * MIB), "align": "4096"})
    device = only(sysfs)
    assert device.problem is None
    pages, small = device.doubts
    assert "aligned to 4.0 KiB" in pages[0]
    assert "--align=2M" in pages[1]
    assert "250.0 MiB" in small[0]
    assert "--size=" in small[1]
    assert "250.0 MiB (262144000 bytes), align 4.0 KiB, mode devdax" in device.describe()


@pytest.mark.parametrize(("size", "remedy"), [(0, "daxctl create-device"), (MIB, "less than one alignment")])
def test_a_device_that_cannot_be_mapped_at_all_is_a_problem(sysfs: FakeSysfs, size: int, remedy: str) -> None:
    sysfs.add("dax0.0", {"size": str(size), "align": "2097152"})
    problem = only(sysfs).problem
    assert problem is not None
    assert remedy in problem


def test_devices_are_listed_by_number_and_others_are_not(sysfs: FakeSysfs) -> None:
    for name in ("dax10.0", "dax9.1", "dax9.0"):
        sysfs.add(name, USUAL)
    sysfs.add("pmem0", USUAL)
    assert [device.name for device in discover(sysfs.root)] == ["dax9.0", "dax9.1", "dax10.0"]
    assert discover(sysfs.root, Path("/there"))[0].path == "/there/dax9.0"


def test_a_host_without_any_is_an_empty_list(tmp_path: Path) -> None:
    assert discover(tmp_path) == []
    assert "no DAX device" in devdax.listed([])


def test_a_node_that_is_no_dax_device_is_named(sysfs: FakeSysfs) -> None:
    with pytest.raises(BackendError, match=rf"/dev/null is character device 1:3, of which {sysfs.root} says nothing"):
        find(NODE, sysfs.root)
    folder = sysfs.root / "devices/virtual/mem/null"
    folder.mkdir(parents=True)
    (folder / "size").write_text("1")
    (sysfs.root / "class/mem").mkdir()
    (folder / "subsystem").symlink_to(sysfs.root / "class/mem")
    sysfs.give_node(folder, number_of())
    with pytest.raises(BackendError, match=r"1:3 \(null\), which is not a DAX device"):
        find(NODE, sysfs.root)


def test_a_device_without_a_size_is_an_error(sysfs: FakeSysfs) -> None:
    sysfs.add("dax0.0", {"size": "much", "align": "2097152"}, number=number_of())
    with pytest.raises(BackendError, match="size is missing or no number"):
        find(NODE, sysfs.root)
    assert only(sysfs).problem is not None, "and the others are listed all the same"


def test_a_device_that_is_not_there_is_told_apart_from_one_without_a_node(sysfs: FakeSysfs, tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="No such file or directory; this kernel has no DAX device"):
        find(tmp_path / "dax0.0", sysfs.root)
    sysfs.add("dax0.0", USUAL)
    with pytest.raises(BackendError, match=r"although the kernel has dax0.0: is udev running.*--device /dev/dax0.0"):
        find(tmp_path / "dax0.0", sysfs.root)
    with pytest.raises(BackendError, match=r"(?s)No such file.*DAX devices of this host:\n  /dev/dax0.0: 502.0 MiB"):
        find(tmp_path / "dax1.0", sysfs.root)


@pytest.mark.parametrize(("inside", "named"), [(None, "namespace1.0"), ("namespace2.1\n", "namespace2.1")])
def test_a_block_device_is_refused_with_the_command_for_its_namespace(
    sysfs: FakeSysfs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, inside: str | None, named: str
) -> None:
    disk, namespace = sysfs.root / "devices/pmem0", sysfs.root / "devices/namespace1.0"
    disk.mkdir()
    namespace.mkdir()
    if inside is not None:
        (namespace / "namespace").write_text(inside)
    (disk / "device").symlink_to(namespace)
    number = os.makedev(259, 7)
    sysfs.give_node(disk, number, "block")
    path = tmp_path / "pmem0"
    path.touch()
    real = os.stat

    def block(name: str, **options: object) -> os.stat_result:
        found = real(name, **options)
        if name != str(path):
            return found
        # The device number is beyond the ten fields that a sequence can set.
        fake = type("Fake", (), {"st_mode": stat.S_IFBLK | 0o660, "st_rdev": number})
        return fake()  # type: ignore[return-value]

    monkeypatch.setattr(os, "stat", block)
    with pytest.raises(BackendError, match=rf"fsdax.*ndctl create-namespace --force --reconfig={named} --mode=devdax"):
        find(path, sysfs.root)


#: What a file of sysfs may say: rightly, nearly, or not at all.
CONTENT = st.one_of(
    st.binary(max_size=80),
    st.integers(-(1 << 70), 1 << 70).map(lambda number: str(number).encode()),
    st.sampled_from([b"", b"0", b"-1", b"4095", b"2097152", b"0x200000", b"1_000", b"9" * 5000, "\u0663".encode()]),
)


def is_answered(act: Callable[[], object]) -> bool:
    """Whether it ends well or with a BackendError."""
    answered = False
    with suppress(BackendError):
        act()
        answered = True
    return answered


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(60))
@given(
    files=st.dictionaries(st.sampled_from(["size", "align", "numa_node", "target_node"]), CONTENT),
    driver=st.sampled_from(["device_dax", "kmem", "other", None]),
)
def test_whatever_sysfs_says_is_a_device_or_an_error(files: dict[str, bytes], driver: str | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        sysfs = FakeSysfs(Path(folder) / "sys")
        at = sysfs.add("dax0.0", {}, driver=driver, number=number_of())
        for name, content in files.items():
            (at / name).write_bytes(content)
        device = only(sysfs)
        assert device.capacity % device.align == 0
        assert 0 <= device.capacity <= device.size < 1 << 63
        assert device.numa_node is None or device.numa_node >= 0
        assert device.describe()
        assert all(doubt for doubt, _ in device.doubts)
        usable = device.problem is None
        assert not usable or (device.capacity > 0 and device.align % 4096 == 0 and device.mode == "devdax")
        is_answered(lambda: find(NODE, sysfs.root))
        backend = CxlBackend(sysfs=sysfs.root, dev=Path(folder), flusher=lambda: "none")
        for path, there in ((None, False), (NODE, usable)):
            wish = PoolWish("cxl", None, path)
            assert is_answered(lambda wish=wish: backend.plan_pools(wish, lambda _: backend)) == there
        for config in (
            MaruConfig(),
            MaruConfig(storage_backend="cxl"),
            MaruConfig(storage_backend="cxl", pool_path=NODE),
        ):
            assert check_cxl(config, sysfs.root, Path(folder), Path(folder))


def test_an_alignment_of_no_whole_pages_is_a_problem(sysfs: FakeSysfs) -> None:
    sysfs.add("dax0.0", {**USUAL, "align": "4095"})
    assert "aligned to 4095 bytes, which are no whole pages" in str(only(sysfs).problem)
