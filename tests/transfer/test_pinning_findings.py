"""What decides how fast pools are registered, on hosts made of files."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from maru_core.config import MaruConfig
from maru_core.contracts import Finding
from maru_core.host import PluginHost
from maru_transfer.cuda_driver import NO_DRIVER, DriverError
from maru_transfer.pinning_findings import pinning_findings

GIB = 1 << 30


def host(root: Path, folder: Path, kind: str, options: str, shmem: str = "always advise [never] deny force") -> Path:
    device = os.stat(folder).st_dev
    (root / "proc/self").mkdir(parents=True)
    line = f"30 1 {os.major(device)}:{os.minor(device)} / {folder} rw,nosuid shared:9 - {kind} none {options}\n"
    (root / "proc/self/mountinfo").write_text("29 1 0:1 / / rw - ext4 /dev/vda rw\n" + line)
    (root / "proc/self/status").write_text("CapEff:\t0000000000000000\n")
    (root / "sys/kernel/mm/transparent_hugepage").mkdir(parents=True)
    (root / "sys/kernel/mm/transparent_hugepage/shmem_enabled").write_text(shmem + "\n")
    return root


def findings(folder: Path, root: Path, answer: tuple[int, int] | DriverError = (13000, 2)) -> list[Finding]:
    def version() -> tuple[int, int]:
        if isinstance(answer, DriverError):
            raise answer
        return answer

    return pinning_findings(str(folder), 4 * GIB, root=root, version=version)


@pytest.fixture
def pools(tmp_path: Path) -> Path:
    (tmp_path / "pools").mkdir()
    return tmp_path / "pools"


@pytest.mark.parametrize(
    ("kind", "options", "shmem", "level", "text", "remedy"),
    [
        ("tmpfs", "rw,size=9g,huge=always", "[never] deny", "ok", "huge=always", ""),
        ("tmpfs", "rw,huge=within_size", "[never] deny", "ok", "huge=within_size", ""),
        ("tmpfs", "rw", "never deny [force]", "ok", "force", ""),
        ("tmpfs", "rw,huge=always", "never [deny]", "warning", "deny", "shmem_enabled"),
        ("tmpfs", "rw", "[never] deny", "note", "small pages", "remount,huge=always"),
        ("tmpfs", "rw,huge=advise", "[never] deny", "note", "huge=advise", "remount,huge=always"),
        ("ext4", "rw", "[never] deny", "note", "ext4", ""),
    ],
)
def test_pages_of_the_pool(
    tmp_path: Path, pools: Path, kind: str, options: str, shmem: str, level: str, text: str, remedy: str
) -> None:
    finding = findings(pools, host(tmp_path / "root", pools, kind, options, shmem))[2]
    assert finding.level == level
    assert text in finding.text
    assert remedy in finding.remedy
    assert bool(remedy) == bool(finding.remedy)
    assert str(pools) in finding.subject


@pytest.mark.parametrize(("free", "level"), [("2000000", "ok"), ("3", "warning"), (None, "ok")])
def test_huge_pages_of_a_hugetlbfs(tmp_path: Path, pools: Path, free: str | None, level: str) -> None:
    root = host(tmp_path / "root", pools, "hugetlbfs", "rw,pagesize=2M")
    page = os.statvfs(pools).f_bsize
    if free is not None:
        folder = root / f"sys/kernel/mm/hugepages/hugepages-{page // 1024}kB"
        folder.mkdir(parents=True)
        (folder / "free_hugepages").write_text(free)
    finding = findings(pools, root)[2]
    assert finding.level == level
    assert (f"vm.nr_hugepages={4 * GIB // page}" in finding.remedy) == (level == "warning")


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    finding = findings(tmp_path / "nowhere", tmp_path)[2]
    assert finding.level == "warning"
    assert "maru_pool_path" in finding.remedy


@pytest.mark.parametrize(
    ("answer", "level", "text"),
    [
        ((13000, 2), "ok", "CUDA 13.0, 2 devices"),
        ((12080, 0), "warning", "no device"),
        (DriverError(NO_DRIVER, "libcuda.so.1 cannot be used"), "note", "libcuda.so.1"),
        (DriverError(999, "cuInit failed (999)"), "warning", "999"),
    ],
)
def test_the_driver(tmp_path: Path, pools: Path, answer: tuple[int, int] | DriverError, level: str, text: str) -> None:
    finding = findings(pools, host(tmp_path / "root", pools, "tmpfs", "rw"), answer)[0]
    assert finding.level == level
    assert text in finding.text


@pytest.mark.parametrize(
    ("limit", "capable", "level"),
    [(8 << 20, False, "note"), (8 << 20, True, "ok"), (-1, False, "ok"), (5 * GIB, False, "ok")],
)
def test_the_limit_on_locked_memory(
    tmp_path: Path, pools: Path, monkeypatch: pytest.MonkeyPatch, limit: int, capable: bool, level: str
) -> None:
    root = host(tmp_path / "root", pools, "tmpfs", "rw")
    (root / "proc/self/status").write_text(f"CapEff:\t{(1 << 14) * capable:016x}\n")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    finding = findings(pools, root)[1]
    assert finding.level == level
    assert ("ulimit -l unlimited" in finding.text) == (level == "note")


def test_the_doctor_asks_about_the_pools_that_are_configured(tmp_path: Path) -> None:
    provision = PluginHost.with_plugins({}, built_ins=True).engines()["torch-copy"]
    assert provision.diagnose is not None
    copies, driver, pages = [
        finding
        for finding in provision.diagnose(MaruConfig(pool_path=str(tmp_path), pool_size="2M"))
        if finding.subject != "locked memory"
    ]
    assert copies.subject == "host copies"
    assert driver.subject == "GPU driver"
    assert pages.subject == f"pages of {tmp_path}"
    assert "locked memory" not in {f.subject for f in provision.diagnose(MaruConfig(storage_backend="cxl"))}
