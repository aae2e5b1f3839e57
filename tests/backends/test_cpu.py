"""The cpu backend: files that are private, allocated in full, and never in the way of a later start."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from attrs import evolve

from maru_backends import cpu
from maru_backends.capacity import NO_LIMIT, Available
from maru_backends.cpu import CpuBackend
from maru_core.contracts import PoolRequest, StorageBackend
from maru_core.errors import BackendError
from maru_core.pool_format import SUPERBLOCK_SIZE, plan_pool, unpack_superblock
from maru_core.protocol import PoolDescriptor
from maru_core.testing_backend import BackendContract
from tests.waiting import NEVER

MIB = 1 << 20


def ask_in(folder: Path, **changes: object) -> PoolRequest:
    return evolve(PoolRequest(0, 2 * MIB, 8192, 0, str(folder), "owner"), **changes)


class TestCpu(BackendContract):
    @pytest.fixture
    def backend(self) -> StorageBackend:
        return CpuBackend()

    @pytest.fixture
    def ask(self, tmp_path: Path) -> PoolRequest:
        return ask_in(tmp_path)


def test_the_default_place_is_shared_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cpu.DEFAULT_PATH == "/dev/shm"
    monkeypatch.setattr(cpu, "DEFAULT_PATH", str(tmp_path))
    pool = CpuBackend().create_pool(evolve(ask_in(tmp_path), path=None))
    assert pool.region.descriptor.location == str(tmp_path / "maru-owner" / "pool-0")
    pool.destroy()
    assert list(tmp_path.iterdir()) == []


def test_file_and_folder_are_private_allocated_and_locked(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        pool = CpuBackend().create_pool(ask_in(tmp_path))
    finally:
        os.umask(previous)
    path = Path(pool.region.descriptor.location)
    status = path.stat()
    assert (status.st_mode & 0o7777, path.parent.stat().st_mode & 0o7777) == (0o600, 0o700)
    assert status.st_blocks * 512 >= status.st_size == pool.region.descriptor.size
    with path.open("rb") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    pool.destroy()
    assert not path.parent.exists()


def mapped(path: str) -> bool:
    return path in Path("/proc/self/maps").read_text()


def test_the_kernel_unmaps_when_the_last_view_goes(tmp_path: Path) -> None:
    backend = CpuBackend()
    pool = backend.create_pool(ask_in(tmp_path))
    other = tmp_path / "same-pool"
    os.link(pool.region.descriptor.location, other)  # a name of its own in the list of mappings
    region = backend.map_region(evolve(pool.region.descriptor, location=str(other)))
    view = region.buffer[:16]
    region.close()
    assert mapped(str(other))
    del view
    assert not mapped(str(other))
    pool.destroy()


def resident(path: str) -> int:
    """Bytes of the mapping of ``path`` that are in this process's page tables."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.endswith(path))
    return next(int(line.split()[1]) * 1024 for line in lines[start:] if line.startswith("Rss:"))


def test_populated_pages_are_in_the_page_tables(tmp_path: Path) -> None:
    probe = mmap.mmap(-1, mmap.PAGESIZE)
    try:
        probe.madvise(23)
    except OSError:
        pytest.skip("this kernel cannot populate: Linux 5.14 is needed")
    backend = CpuBackend()
    pool = backend.create_pool(ask_in(tmp_path, size=16 * MIB))
    other = tmp_path / "same-pool"
    os.link(pool.region.descriptor.location, other)
    region = backend.map_region(evolve(pool.region.descriptor, location=str(other)))
    before = resident(str(other))
    region.populate(5 * MIB + 1, 6 * MIB)
    assert 6 * MIB <= resident(str(other)) - before <= 7 * MIB
    region.populate(0, 16 * MIB)
    assert resident(str(other)) == 16 * MIB
    region.close()
    pool.destroy()


def test_a_size_between_pages_is_rounded_down(tmp_path: Path) -> None:
    pool = CpuBackend().create_pool(ask_in(tmp_path, size=2 * MIB + 4097))
    assert pool.region.descriptor.size == 2 * MIB + 4096
    pool.destroy()


@pytest.mark.parametrize("owner", ["", "..", "../x", "a/b", ".hidden", "x" * 129, "a\0b"])
def test_an_owner_is_a_file_name(tmp_path: Path, owner: str) -> None:
    with pytest.raises(BackendError, match="is not a file name"):
        CpuBackend().create_pool(ask_in(tmp_path, owner=owner))
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_is_no_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match=r"cannot use maru_pool_path .*/nowhere: No such file"):
        CpuBackend().create_pool(ask_in(tmp_path / "nowhere"))
    (tmp_path / "file").touch()
    with pytest.raises(BackendError, match="Not a directory"):
        CpuBackend().create_pool(ask_in(tmp_path / "file"))


@pytest.mark.parametrize("missing", [1, 0])
def test_too_little_memory_is_refused_with_both_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: int
) -> None:
    monkeypatch.setattr(cpu, "filesystem_type", lambda device: "tmpfs")
    backend = CpuBackend(lambda: Available(2 * MIB - missing, "memory.max 7 of the test"))
    if not missing:
        backend.create_pool(ask_in(tmp_path)).destroy()
        return
    with pytest.raises(BackendError) as caught:
        backend.create_pool(ask_in(tmp_path))
    for part in (str(2 * MIB), "2.0 MiB", str(2 * MIB - missing), "memory.max 7 of the test", "maru_pool_size"):
        assert part in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_free_huge_pages_count_and_free_memory_does_not_on_hugetlbfs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "filesystem_type", lambda device: "hugetlbfs")
    monkeypatch.setattr(cpu, "free_huge_pages", lambda page: Available(MIB, "free huge pages"))
    with pytest.raises(BackendError, match="free huge pages"):
        CpuBackend(lambda: NO_LIMIT).create_pool(ask_in(tmp_path))
    monkeypatch.setattr(cpu, "free_huge_pages", lambda page: Available(2 * MIB, "free huge pages"))
    CpuBackend(lambda: Available(0, "all of it is set apart")).create_pool(ask_in(tmp_path)).destroy()


def test_a_disk_is_not_limited_by_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "filesystem_type", lambda device: "ext4")
    CpuBackend(lambda: Available(0, "none")).create_pool(ask_in(tmp_path)).destroy()


def test_a_file_system_that_fills_up_meanwhile_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(BackendError, match=rf"No space left on device: .*{2 * MIB} bytes .* bytes .*there"):
        CpuBackend().create_pool(ask_in(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_pool_that_is_removed_while_it_is_made_is_no_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allocate = os.posix_fallocate

    def and_remove(fd: int, offset: int, length: int) -> None:
        allocate(fd, offset, length)
        (tmp_path / "maru-owner" / "pool-0").unlink()

    monkeypatch.setattr(os, "posix_fallocate", and_remove)
    with pytest.raises(BackendError, match="start again"):
        CpuBackend().create_pool(ask_in(tmp_path))


def test_a_folder_that_others_could_write_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "maru-owner"
    folder.mkdir()
    folder.chmod(0o770)
    (folder / "keep").touch()
    with pytest.raises(BackendError, match=r"maru-owner belongs to uid \d+ with mode 770.*remove it"):
        CpuBackend().create_pool(ask_in(tmp_path))


def test_links_are_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    target.mkdir(mode=0o700)
    (target / "pool-9").write_bytes(b"precious")
    root = tmp_path / "root"
    root.mkdir()
    (root / "maru-owner").symlink_to(target)
    with pytest.raises(BackendError, match="maru-owner"):
        CpuBackend().create_pool(ask_in(root))
    (root / "maru-owner").unlink()
    (root / "maru-owner").mkdir(mode=0o700)
    (root / "maru-owner" / "pool-0").symlink_to(target / "pool-9")
    with pytest.raises(BackendError):
        CpuBackend().create_pool(ask_in(root))
    assert (target / "pool-9").read_bytes() == b"precious"


@pytest.mark.parametrize("change", [-4096, 4096])
def test_a_file_of_another_size_is_refused_before_it_is_mapped(tmp_path: Path, change: int) -> None:
    backend = CpuBackend()
    pool = backend.create_pool(ask_in(tmp_path))
    size = pool.region.descriptor.size
    os.truncate(pool.region.descriptor.location, size + change)
    with pytest.raises(BackendError, match=f"has {size + change} bytes, the server says {size}"):
        backend.map_region(pool.region.descriptor)
    pool.destroy()


def test_a_pipe_in_place_of_a_pool_is_not_waited_for(tmp_path: Path) -> None:
    backend = CpuBackend()
    pool = backend.create_pool(ask_in(tmp_path))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BackendError, match="not a plain file"):
        backend.map_region(evolve(pool.region.descriptor, location=str(tmp_path / "pipe")))
    pool.destroy()


HOLD = """
import sys
from maru_backends.cpu import CpuBackend
from maru_core.contracts import PoolRequest
pool = CpuBackend().create_pool(PoolRequest(0, 1 << 21, 8192, 0, sys.argv[1], sys.argv[2]))
print("ready", flush=True)
sys.stdin.read()
"""


def hold(folder: Path, owner: str) -> subprocess.Popen[str]:
    """A process that owns a pool until it is killed."""
    command = [sys.executable, "-c", HOLD, str(folder), owner]
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    # Behind what the backend logs.
    assert "ready\n" in (line for line in process.stdout)
    return process


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=10)


@pytest.mark.slow
def test_pools_of_dead_owners_go_and_those_of_live_ones_stay(tmp_path: Path) -> None:
    dead, orphan, neighbour = (hold(tmp_path, owner) for owner in ("owner", "gone", "neighbour"))
    try:
        with pytest.raises(BackendError, match="in use"):
            CpuBackend().create_pool(ask_in(tmp_path))
        kill(dead)
        kill(orphan)
        before = (tmp_path / "maru-neighbour" / "pool-0").stat().st_ino
        for _ in range(2):
            pool = CpuBackend().create_pool(ask_in(tmp_path))
            assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("pool-*")) == [
                "maru-neighbour/pool-0",
                "maru-owner/pool-0",
            ]
            pool.destroy()
        assert (tmp_path / "maru-neighbour" / "pool-0").stat().st_ino == before
    finally:
        for process in (dead, orphan, neighbour):
            kill(process)


def test_a_pool_that_an_engine_uses_waits_for_its_server(tmp_path: Path) -> None:
    """Another server does not take it for an orphan; once the engine is gone, too, it does."""
    backend = CpuBackend()
    process = hold(tmp_path, "gone")
    try:
        (block,) = (tmp_path / "maru-gone").iterdir()
        with block.open("rb") as file:
            identity = unpack_superblock(file.read(4096)).identity
        ask = ask_in(tmp_path, owner="gone")
        client = backend.map_region(_descriptor(ask, block, identity))
    finally:
        kill(process)
    backend.create_pool(ask_in(tmp_path)).destroy()
    assert block.exists()
    pool = backend.adopt_pool(ask)
    assert pool is not None
    assert pool.region.descriptor.identity == identity
    pool.leave()
    block.with_name("pool-0.kept").unlink()  # as if it had been killed
    client.close()
    backend.create_pool(ask_in(tmp_path)).destroy()
    assert not block.exists()


def test_a_pool_that_was_left_on_purpose_is_no_orphan(tmp_path: Path) -> None:
    backend = CpuBackend()
    pool = backend.create_pool(ask_in(tmp_path, owner="gone"))
    pool.leave()
    backend.create_pool(ask_in(tmp_path)).destroy()
    again = backend.adopt_pool(ask_in(tmp_path, owner="gone"))
    assert again is not None
    assert sorted(path.name for path in (tmp_path / "maru-gone").iterdir()) == ["pool-0"]
    again.leave()
    backend.create_pool(ask_in(tmp_path, owner="gone")).destroy()
    assert list(tmp_path.iterdir()) == [], "a new pool of this owner takes its place, and nothing is left of either"


def test_a_copy_is_not_taken_for_the_pool_that_engines_have_mapped(tmp_path: Path) -> None:
    backend = CpuBackend()
    pool = backend.create_pool(ask_in(tmp_path))
    path = Path(pool.region.descriptor.location)
    pool.leave()
    shutil.copy2(path, tmp_path / "copy")
    os.replace(tmp_path / "copy", path)
    assert backend.adopt_pool(ask_in(tmp_path)) is None


def _descriptor(ask: PoolRequest, path: Path, identity: bytes) -> PoolDescriptor:
    count, data_offset = plan_pool(ask.size, ask.granule)
    return PoolDescriptor(0, "cpu", str(path), identity, ask.size, ask.granule, 0, count, SUPERBLOCK_SIZE, data_offset)


def test_only_what_is_certainly_ours_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = CpuBackend()
    pool = backend.create_pool(ask_in(tmp_path))
    path = Path(pool.region.descriptor.location)
    assert backend.adopt_pool(ask_in(tmp_path)) is None, "its owner lives"
    pool.leave()
    path.chmod(0o644)
    assert backend.adopt_pool(ask_in(tmp_path)) is None, "others could have written it"
    path.chmod(0o600)
    for boot in (b"another boot....", bytes(16)):
        with monkeypatch.context() as patch:
            patch.setattr("maru_backends.cpu.boot_id", lambda boot=boot: boot)
            assert backend.adopt_pool(ask_in(tmp_path)) is None
    with path.open("r+b") as file:
        file.seek(20)
        file.write(b"!")
    assert backend.adopt_pool(ask_in(tmp_path)) is None, "the superblock is damaged"
    path.unlink()
    path.symlink_to("/dev/zero")
    assert backend.adopt_pool(ask_in(tmp_path)) is None


def test_a_file_of_another_host_is_not_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system may show it, but not what its engines store now."""
    backend = CpuBackend()
    pool = backend.create_pool(ask_in(tmp_path))
    for boot, refused in ((b"another host....", True), (bytes(16), False)):
        monkeypatch.setattr("maru_backends.cpu.boot_id", lambda boot=boot: boot)
        if refused:
            with pytest.raises(BackendError, match="memory of another host"):
                backend.map_region(pool.region.descriptor)
        else:
            backend.map_region(pool.region.descriptor).close()
    pool.destroy()


def test_late_writes_of_an_old_client_do_not_reach_the_new_pool(tmp_path: Path) -> None:
    backend = CpuBackend()
    process = hold(tmp_path, "owner")
    path = tmp_path / "maru-owner" / "pool-0"
    with path.open("r+b") as old:
        kill(process)
        pool = backend.create_pool(ask_in(tmp_path))
        old.seek(pool.region.descriptor.data_offset)
        old.write(b"late")
    start = pool.region.descriptor.data_offset
    assert bytes(pool.region.buffer[start : start + 4]) == bytes(4)
    pool.destroy()


def test_destroy_leaves_a_file_that_took_its_place(tmp_path: Path) -> None:
    pool = CpuBackend().create_pool(ask_in(tmp_path))
    path = Path(pool.region.descriptor.location)
    path.unlink()
    path.write_bytes(b"another")
    pool.destroy()
    assert path.read_bytes() == b"another"


def test_servers_that_start_together_do_not_count_the_same_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "filesystem_type", lambda device: "tmpfs")
    allocate = os.posix_fallocate

    def slow(fd: int, offset: int, length: int) -> None:
        time.sleep(0.1)
        allocate(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", slow)

    def memory() -> Available:
        return Available(5 * MIB - sum(path.stat().st_size for path in tmp_path.rglob("pool-*")), "the test")

    results: list[object] = []

    def start(owner: str) -> None:
        try:
            results.append(CpuBackend(memory).create_pool(ask_in(tmp_path, owner=owner)))
        except BackendError as error:
            results.append(error)

    threads = [threading.Thread(target=start, args=(f"owner{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(NEVER)
    pools = [result for result in results if isinstance(result, cpu.CpuPool)]
    assert (len(results), len(pools)) == (4, 2)
    for pool in pools:
        pool.destroy()


def test_a_place_that_stays_locked_only_costs_the_protection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_TURN_TIMEOUT", 0.1)
    fd = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        CpuBackend().create_pool(ask_in(tmp_path)).destroy()
    finally:
        os.close(fd)


def test_what_only_looks_like_a_pool_by_name_stays(tmp_path: Path) -> None:
    """A user's own folder and file may have such names; neither an empty folder nor a foreign file is swept away."""
    empty, mine = tmp_path / "maru-cache", tmp_path / "maru-notes"
    empty.mkdir()
    mine.mkdir()
    (mine / "pool-list").write_text("addresses of swimming pools")
    CpuBackend().create_pool(ask_in(tmp_path, owner="owner")).destroy()
    assert empty.is_dir()
    assert (mine / "pool-list").read_text() == "addresses of swimming pools"
