"""The cxl backend on files that stand in for devices, and on a real device where there is one."""

from __future__ import annotations

import gc
import mmap
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import structlog
from attrs import evolve

from maru_backends import cxl, devdax, places
from maru_backends.cxl import CxlBackend
from maru_backends.cxl_pool import CxlPool
from maru_backends.devdax import DaxDevice
from maru_backends.locks import lock_alone, lock_shared
from maru_backends.origin import Host
from maru_backends.ownership import OwnerRecord, ended, pack_record, read_record
from maru_backends.places import Place, address_of, huge_pages_allowed
from maru_core.contracts import PoolPlan, PoolRequest, PoolWish, StorageBackend
from maru_core.errors import BackendError
from maru_core.pool_format import SUPERBLOCK_SIZE, unpack_superblock
from maru_core.testing_backend import BackendContract
from tests.backends.fake_sysfs import FakeSysfs

KIB, MIB = 1 << 10, 1 << 20
ALIGN = 2 * MIB
Start = Callable[..., subprocess.Popen[str]]


def quick(**changes: object) -> CxlBackend:
    """A backend that does not wait for anybody."""
    return CxlBackend(**{"patience": 0.05, "settle": 0.0, **changes})


def unused(name: str) -> StorageBackend:
    raise AssertionError(name)


class TestFolder(BackendContract):
    """A file in a folder, made for the pool."""

    @pytest.fixture
    def backend(self) -> StorageBackend:
        return quick()

    @pytest.fixture
    def ask(self, tmp_path: Path) -> PoolRequest:
        return PoolRequest(0, 16 * MIB, 8192, 0, str(tmp_path), "owner")


class TestFile(TestFolder):
    """A file with a size of its own."""

    one_place = True

    @pytest.fixture
    def ask(self, tmp_path: Path) -> PoolRequest:
        return PoolRequest(0, 16 * MIB, 8192, 0, str(sized(tmp_path / "device", 64 * MIB + 4097)), "owner")


class TestTmpfs(TestFile):
    """The same in memory."""

    @pytest.fixture
    def tmp_path(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="maru-test-", dir="/dev/shm") as folder:
            yield Path(folder)


@pytest.mark.device
class TestDevice(TestFolder):
    """A real device."""

    one_place = True
    finds_moved = True

    @pytest.fixture
    def ask(self) -> PoolRequest:
        return PoolRequest(0, 16 * MIB, 8192, 0, real_device(), "owner", take_over=True)


def real_device() -> str:
    path = os.environ.get("MARU_TEST_DAX")
    if not path:
        pytest.skip("MARU_TEST_DAX names no DAX device, such as /dev/dax0.0, that these tests may overwrite")
    return path


@pytest.fixture(params=["file", pytest.param("device", marks=pytest.mark.device)])
def ask(request: pytest.FixtureRequest, tmp_path: Path) -> PoolRequest:
    """A pool of 16 MiB in a place that stays: tests below hold for a file and for a real device."""
    if request.param == "device":
        path = real_device()
        # Whatever an earlier run left there.
        quick().create_pool(PoolRequest(0, 16 * MIB, 8192, 0, path, "owner", take_over=True)).destroy()
    else:
        path = str(sized(tmp_path / "device", 64 * MIB))
    return PoolRequest(0, 16 * MIB, 8192, 0, path, "owner")


def sized(path: Path, size: int) -> Path:
    path.touch(0o600)
    os.truncate(path, size)
    return path


def page_of(path: str) -> bytes:
    fd = os.open(path, os.O_RDWR)
    try:
        with mmap.mmap(fd, ALIGN) as mapping:
            return mapping[:SUPERBLOCK_SIZE]
    finally:
        os.close(fd)


def write_record(path: str, change: Callable[[OwnerRecord], OwnerRecord]) -> None:
    """As if somebody else had written it, who is not here any more."""
    record, sequence, _ = read_record(page_of(path))
    assert record is not None
    offset, packed = pack_record(change(record), sequence + 1)
    fd = os.open(path, os.O_RDWR)
    with mmap.mmap(fd, ALIGN) as mapping:
        mapping[offset : offset + len(packed)] = packed
    os.close(fd)


OWN = """
import structlog, sys
from maru_backends.cxl import CxlBackend
from maru_core.contracts import PoolRequest
structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
pool = CxlBackend(settle=0.0).create_pool(PoolRequest(0, 1 << 24, 8192, 0, sys.argv[1], sys.argv[2]))
print(pool.region.descriptor.identity.hex(), flush=True)
sys.stdin.read()
"""
MAP = """
import os, sys
from maru_backends.cxl import CxlBackend
from maru_core.protocol import PoolDescriptor
region = CxlBackend().map_region(PoolDescriptor.from_wire(eval(sys.argv[1])))
if sys.argv[2] == "fork":  # the parent ends, and its child has the mapping
    if os.fork():
        os._exit(0)
elif sys.argv[2] == "view":  # only a part of it is still shown
    view = region.buffer[:8]
    region.close()
print(os.getpid(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def start() -> Iterator[Start]:
    """``start(program, *arguments)``: a process that has written its first line."""
    started: list[subprocess.Popen[str]] = []

    def run(program: str, *arguments: str) -> subprocess.Popen[str]:
        environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        process = subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        process.line = process.stdout.readline().strip()  # type: ignore[attr-defined]
        assert process.line  # type: ignore[attr-defined]
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate(timeout=10)


@pytest.mark.slow
def test_a_second_owner_is_told_who_the_first_one_is(ask: PoolRequest, start: Start) -> None:
    first = start(OWN, ask.path, "first")
    for take_over in (False, True):
        with pytest.raises(BackendError) as caught:
            quick().create_pool(evolve(ask, take_over=take_over))
        for part in (ask.path, "in use by", f"process {first.pid} on host {os.uname().nodename!r}", "owner 'first'"):
            assert part in str(caught.value)
    first.kill()
    first.wait()
    pool = quick().create_pool(ask)
    record = read_record(bytes(pool.region.buffer[:SUPERBLOCK_SIZE]))[0]
    assert record is not None
    assert (record.pid, record.owner, record.state) == (os.getpid(), "owner", "used")
    pool.destroy()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["plain", "fork", "view"])
def test_no_pool_is_made_while_anybody_could_write_to_the_one_before(ask: PoolRequest, start: Start, way: str) -> None:
    """Killed servers and released devices alike: the memory of the next pool is the same."""
    owner = start(OWN, ask.path, "owner")
    identity = bytes.fromhex(owner.line)  # type: ignore[attr-defined]
    found = quick().map_region(evolve(_described(ask), identity=identity))
    client = start(MAP, repr(found.descriptor.to_wire()), way)
    found.close()
    del found
    owner.kill()
    owner.wait()
    before = page_of(ask.path)
    with pytest.raises(BackendError, match=r"engines still map the pool of process \d+.*same runtime folder, size"):
        quick().create_pool(evolve(ask, granule=4096))
    assert page_of(ask.path) == before
    with pytest.raises(BackendError, match="engines still map"):
        quick().create_pool(evolve(ask, take_over=True, owner="another"))
    again = quick().adopt_pool(ask)
    assert again is not None, "as it was before it goes on"
    assert again.region.descriptor.identity == identity
    again.destroy()
    with pytest.raises(BackendError, match="engines still map"):
        quick().create_pool(ask)
    waiting: list[object] = []
    thread = threading.Thread(target=lambda: waiting.append(quick(patience=20.0).create_pool(ask)))
    thread.start()
    os.kill(int(client.line), signal.SIGKILL)  # type: ignore[attr-defined]
    thread.join(30)
    (pool,) = waiting
    assert isinstance(pool, CxlPool)
    pool.destroy()


def _described(ask: PoolRequest) -> object:
    pool = quick()
    return pool._prepare(ask)[1]


@pytest.mark.slow
def test_clients_come_only_when_a_new_pool_is_whole(ask: PoolRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    old = quick().create_pool(ask)
    descriptor = old.region.descriptor
    old.destroy()
    seen: list[str] = []
    clear = CxlPool.invalidate

    def look(pool: CxlPool) -> None:
        clear(pool)
        for asked in (descriptor, pool.region.descriptor):
            with pytest.raises(BackendError, match=r"is making pool .* anew"):
                quick().map_region(asked)
            seen.append("refused")

    with monkeypatch.context() as patch:
        patch.setattr(CxlPool, "invalidate", look)
        new = quick().create_pool(ask)
    assert seen == ["refused"] * 2
    quick().map_region(new.region.descriptor).close()
    new.destroy()


@pytest.mark.slow
def test_devices_of_a_dead_process_get_a_moment(
    ask: PoolRequest, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    owner = start(OWN, ask.path, "owner")
    owner.kill()
    owner.wait()
    monkeypatch.setattr(cxl, "time", SimpleNamespace(sleep=slept.append))
    quick(settle=0.5).create_pool(ask).destroy()
    assert slept == [0.5]
    quick(settle=0.5).create_pool(ask).destroy()
    assert slept == [0.5], "it was released with nobody left"


@pytest.mark.slow
def test_what_is_left_is_kept_for_its_owner_and_what_is_destroyed_for_nobody(ask: PoolRequest) -> None:
    backend = quick()
    pool = backend.create_pool(ask)
    identity = pool.region.descriptor.identity
    assert backend.adopt_pool(ask) is None, "its owner lives"
    pool.leave()
    with pytest.raises(BackendError, match="left for the next server of its runtime folder"):
        backend.create_pool(evolve(ask, owner="another"))
    assert backend.adopt_pool(evolve(ask, owner="another")) is None
    again = backend.adopt_pool(ask)
    assert again is not None
    assert again.region.descriptor.identity == identity
    again.leave()
    other = backend.create_pool(evolve(ask, owner="another", take_over=True))
    assert backend.adopt_pool(ask) is None
    other.destroy()
    for owner in ("owner", "another"):
        assert backend.adopt_pool(evolve(ask, owner=owner)) is None
    record = read_record(page_of(ask.path))[0]
    assert record is not None
    assert (record.state, record.mapped, record.owner) == ("released", False, "another")


def test_a_new_pool_starts_empty_whatever_the_device_holds(ask: PoolRequest) -> None:
    backend = quick()
    pool = backend.create_pool(ask)
    d = pool.region.descriptor
    pool.region.buffer[d.table_offset : d.data_offset] = b"\xff" * (d.data_offset - d.table_offset)
    pool.destroy()
    again = backend.create_pool(ask)
    assert not any(again.region.buffer[d.table_offset : d.data_offset])
    again.destroy()


@pytest.mark.slow
def test_the_record_says_whether_somebody_still_mapped_it_when_it_was_released(ask: PoolRequest) -> None:
    backend = quick()
    pool = backend.create_pool(ask)
    client = backend.map_region(pool.region.descriptor)
    pool.destroy()
    record = read_record(page_of(ask.path))[0]
    assert record is not None
    assert (record.state, record.mapped) == ("released", True)
    client.close()
    del client
    gc.collect()
    backend.create_pool(ask).destroy()


def other_host() -> Host:
    return Host("there", b"j" * 16, b"c" * 16)


def test_what_belongs_to_another_host_is_taken_on_the_operators_word(ask: PoolRequest) -> None:
    there, here = quick(host=other_host), quick()
    pool = there.create_pool(ask)
    identity = pool.region.descriptor.identity
    pool.leave()  # as far as this host can see: the lock is free
    write_record(ask.path, lambda record: evolve(record, state="used"))
    assert here.adopt_pool(ask) is None
    with pytest.raises(BackendError, match=r"belongs to process \d+ on host 'there'.*no lock reaches.*--take-over"):
        here.create_pool(ask)
    assert unpack_superblock(page_of(ask.path)).identity == identity
    write_record(ask.path, lambda record: ended(record, mapped=False))
    here.create_pool(ask).leave()
    with pytest.raises(BackendError, match="no lock reaches"):
        there.create_pool(ask)
    there.create_pool(evolve(ask, take_over=True)).destroy()
    here.create_pool(ask).destroy()


def test_nobody_of_this_hosts_last_boot_is_left(ask: PoolRequest) -> None:
    now = Host.current()
    before = evolve(now, identity=b"i" * 16, boot=b"c" * 16)
    pool = quick(host=lambda: before).create_pool(ask)
    pool.leave()
    rebooted = quick(host=lambda: evolve(before, boot=now.boot))
    assert rebooted.adopt_pool(ask) is None, "what caches held is lost"
    rebooted.create_pool(evolve(ask, owner="another")).destroy()


def test_another_node_of_the_device_is_refused_as_locks_do_not_reach_it(ask: PoolRequest) -> None:
    """For a file: a copy, whose users cannot be seen either."""
    pool = quick().create_pool(ask)
    pool.leave()
    real = page_of(ask.path)
    node = ask.path + "-again"
    if Path(ask.path).is_file():
        shutil.copy2(ask.path, node)
    else:
        os.mknod(node, 0o600 | 0o020000, os.stat(ask.path).st_rdev)
    try:
        other = evolve(ask, path=node)
        assert quick().adopt_pool(other) is None
        with pytest.raises(BackendError, match="it has another node of the same device"):
            quick().create_pool(other)
        assert page_of(ask.path) == real
        quick().create_pool(evolve(other, take_over=True)).destroy()
    finally:
        os.unlink(node)


def test_a_pool_that_hosts_shared_is_not_made_anew_without_a_word(ask: PoolRequest) -> None:
    backend = quick(flusher=lambda: Flushes([]))
    shared = evolve(ask, shared_by_hosts=True)
    pool = backend.create_pool(shared)
    assert pool.region.descriptor.flush
    pool.leave()
    assert backend.adopt_pool(ask) is None, "its clients flush, new ones would not"
    again = backend.adopt_pool(shared)
    assert again is not None
    assert again.region.descriptor.flush
    again.destroy()
    for request in (ask, shared):
        with pytest.raises(BackendError, match="was shared with other hosts by process"):
            backend.create_pool(request)
    last = backend.create_pool(evolve(shared, take_over=True))
    last.nobody_left()
    last.destroy()
    backend.create_pool(ask).destroy()


def test_two_that_start_in_the_same_moment_without_a_common_lock_see_each_other(
    ask: PoolRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick().create_pool(ask).destroy()
    clear = CxlPool.invalidate

    def meanwhile(pool: CxlPool) -> None:
        clear(pool)
        write_record(ask.path, lambda record: evolve(record, host="there", pid=7, boot_id="00" * 16))

    with monkeypatch.context() as patch:
        patch.setattr(CxlPool, "invalidate", meanwhile)
        with pytest.raises(BackendError, match="in use by process 7 on host 'there'"):
            quick().create_pool(ask)
    record = read_record(page_of(ask.path))[0]
    assert record is not None
    assert (record.pid, record.state) == (7, "used"), "it is still the other one's"
    with monkeypatch.context() as patch:
        patch.setattr(Place, "allocate", lambda *arguments: write_record(ask.path, lambda r: evolve(r, pid=8)))
        with pytest.raises(BackendError, match="in use by process 8"):
            quick().create_pool(evolve(ask, take_over=True))
    quick().create_pool(evolve(ask, take_over=True)).destroy()


def test_a_start_that_fails_half_way_leaves_a_free_device_and_no_pool(
    ask: PoolRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = quick().create_pool(ask)
    descriptor = pool.region.descriptor
    pool.leave()
    with monkeypatch.context() as patch:
        patch.setattr("maru_backends.cxl._clear", lambda *arguments: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            quick().create_pool(ask)
    assert quick().adopt_pool(ask) is None
    with pytest.raises(BackendError, match="there is no pool"):
        quick().map_region(descriptor)
    record = read_record(page_of(ask.path))[0]
    assert record is not None
    assert record.state == "released"
    quick().create_pool(evolve(ask, owner="another")).destroy()


@pytest.mark.parametrize("extra", [-1, 0, 1, 4096, ALIGN - 1])
@pytest.mark.parametrize("wished", [-1, 0, 1])
def test_only_whole_alignments_are_mapped_and_nothing_is_read_or_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, extra: int, wished: int
) -> None:
    """Of a device, every call is seen: mappings from 0 in multiples of the alignment, and no other access."""
    real = sized(tmp_path / "memory", 64 * MIB)
    align = 4 * MIB
    device = DaxDevice("dax0.0", str(real), 64 * MIB + extra, align, True, "devdax", 0, 0)
    monkeypatch.setattr(Place, "_check", lambda place, status: None)  # the node is a file here
    monkeypatch.setattr(CxlBackend, "_find", lambda backend, path, name: Place.of_device(device))
    seen: list[tuple[int, int, int]] = []

    def observe(
        fd: int, length: int, flags: int = mmap.MAP_SHARED, prot: int = 3, access: int = 0, offset: int = 0
    ) -> mmap.mmap:
        seen.append((length, offset, flags))
        return mapped(fd, length, flags, prot, offset=offset)

    def forbidden(*arguments: object, **options: object) -> None:
        raise AssertionError(f"not on a device: {arguments}")

    mapped = mmap.mmap
    monkeypatch.setattr(mmap, "mmap", observe)
    for name in ("pread", "pwrite", "read", "write", "ftruncate", "truncate", "posix_fallocate", "lseek"):
        monkeypatch.setattr(os, name, forbidden)
    backend = quick()
    most = device.capacity
    (plan,) = backend.plan_pools(PoolWish("cxl", None, str(real)), unused)
    assert plan == PoolPlan("cxl", most, str(real))
    size = 32 * MIB + wished
    request = PoolRequest(0, size, 8192, 0, str(real), "owner")
    pool = backend.create_pool(request)
    expected = size // align * align
    assert pool.region.descriptor.size == len(pool.region.buffer) == expected
    backend.map_region(pool.region.descriptor).close()
    pool.leave()
    again = backend.adopt_pool(request)
    assert again is not None
    again.destroy()
    backend.create_pool(evolve(request, size=most)).destroy()
    assert len(seen) > 8
    for length, offset, flags in seen:
        assert length > 0
        assert (length % align, offset, flags) == (0, 0, mmap.MAP_SHARED)
        assert length <= most
    with pytest.raises(BackendError, match=rf"{most + align} bytes .*asked for, {most} bytes .*there"):
        backend.create_pool(evolve(request, size=most + align))


def test_a_device_that_does_not_map_is_described_and_not_only_einval(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = sized(tmp_path / "memory", 64 * MIB)
    device = DaxDevice("dax0.0", str(real), 250 * MIB, 4096, True, "devdax", 0, 0)

    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(BackendError) as caught:
        Place.of_device(device).map(0, 4096)
    for part in ("Invalid argument", "250.0 MiB", "align 4.0 KiB", "mode devdax", "--align=2M", "--size="):
        assert part in str(caught.value)
    with pytest.raises(BackendError, match="4097 bytes are not whole alignments of 4096"):
        Place.of_device(device).map(0, 4097)


def test_a_process_that_may_not_have_huge_pages_is_told_so_before_it_dies(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for state, allowed in ((1, True), (0, False)):
        root = tmp_path / str(state)
        (root / "proc/self").mkdir(parents=True)
        (root / "proc/self/status").write_text(f"Name:\tx\nTHP_enabled:\t{state}\nuntag_mask:\t0\n")
        assert huge_pages_allowed(root) is allowed
    assert huge_pages_allowed(tmp_path / "none")
    device = DaxDevice("dax0.0", "/dev/dax0.0", 64 * MIB, ALIGN, True, "devdax", 0, 0)
    monkeypatch.setattr(places, "huge_pages_allowed", lambda: False)
    with pytest.raises(BackendError, match="PR_SET_THP_DISABLE"):
        Place.of_device(device).map(0, ALIGN)


@pytest.mark.parametrize("driver", ["kmem", None])
def test_a_device_in_another_mode_is_never_opened(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, driver: str | None
) -> None:
    sysfs = FakeSysfs(tmp_path / "sys")
    number = os.stat("/dev/null").st_rdev
    sysfs.add("dax0.0", {"size": str(1 << 30), "align": str(ALIGN)}, driver=driver, number=number)

    def forbidden(*arguments: object, **options: object) -> int:
        raise AssertionError("opened")

    backend = quick(sysfs=sysfs.root)
    monkeypatch.setattr(Place, "open", forbidden)
    with pytest.raises(BackendError, match="daxctl reconfigure-device --mode=devdax"):
        backend.create_pool(PoolRequest(0, 16 * MIB, 8192, 0, "/dev/null", "owner"))
    with pytest.raises(BackendError, match="daxctl reconfigure-device --mode=devdax"):
        backend.plan_pools(PoolWish("cxl", None, "/dev/null"), unused)


def test_without_a_path_the_only_device_is_taken_and_no_choice_is_made_among_several(tmp_path: Path) -> None:
    sysfs = FakeSysfs(tmp_path / "sys")
    backend = quick(sysfs=sysfs.root)
    with pytest.raises(BackendError, match=r"no DAX device to make a pool of.*maru_cxl_pool_path.*no DAX device"):
        backend.plan_pools(PoolWish("cxl", None, None), unused)
    number = os.stat("/dev/null").st_rdev
    usual = {"size": str((1 << 30) + 5), "align": str(ALIGN)}
    sysfs.add("dax0.0", usual, number=number)
    sysfs.add("dax1.0", usual, driver="kmem")
    dev = tmp_path / "dev"
    dev.mkdir()
    (dev / "dax0.0").symlink_to("/dev/null")
    backend = quick(sysfs=sysfs.root, dev=dev)
    assert backend.plan_pools(PoolWish("cxl", None, None), unused) == [PoolPlan("cxl", 1 << 30, "/dev/null")]
    sysfs.add("dax2.0", usual)
    with pytest.raises(BackendError) as caught:
        backend.plan_pools(PoolWish("cxl", None, None), unused)
    for part in ("more than one", "--cxl-pool-path", "dax0.0: 1.0 GiB", "mode system-ram", "dax2.0"):
        assert part in str(caught.value)


def plan(size: int | None, *paths: Path) -> list[tuple[int, str]]:
    wish = PoolWish("cxl", size, ",".join(map(str, paths)))
    return [(made.size, Path(made.path or "").name) for made in quick().plan_pools(wish, unused)]


def test_a_wish_is_spread_over_devices_in_order(tmp_path: Path) -> None:
    a, b, c = (sized(tmp_path / name, size * MIB + 77) for name, size in (("a", 8), ("b", 4), ("c", 16)))
    assert plan(None, a, b, c) == [(8 * MIB, "a"), (4 * MIB, "b"), (16 * MIB, "c")]
    assert plan(None, c, a) == [(16 * MIB, "c"), (8 * MIB, "a")]
    assert plan(6 * MIB, a, b) == [(6 * MIB, "a")]
    assert plan(8 * MIB, a, b) == [(8 * MIB, "a")]
    assert plan(10 * MIB + 1, a, b, c) == [(8 * MIB, "a"), (2 * MIB, "b")]
    assert plan(28 * MIB + 99, a, b, c) == [(8 * MIB, "a"), (4 * MIB, "b"), (16 * MIB, "c")]
    with pytest.raises(BackendError, match=rf"{30 * MIB} bytes .*asked for, {28 * MIB} bytes .*there .*/a, .*/b, .*/c"):
        plan(30 * MIB, a, b, c)
    assert plan(12 * MIB, tmp_path / "new", tmp_path / "newer") == [(6 * MIB, "new"), (6 * MIB, "newer")]
    assert plan(12 * MIB, b, tmp_path / "new") == [(4 * MIB, "b"), (8 * MIB, "new")]
    with pytest.raises(BackendError, match=r"no size was given, and .*/new has none of its own"):
        plan(None, a, tmp_path / "new")
    (tmp_path / "link").symlink_to(a)
    os.link(a, tmp_path / "name")
    for other in ("link", "name"):
        with pytest.raises(BackendError, match=r"names .*/a.* twice"):
            plan(None, a, tmp_path / other)


def test_devices_that_a_size_leaves_unused_are_named(tmp_path: Path) -> None:
    a, b, c = (sized(tmp_path / name, 8 * MIB) for name in "abc")
    for size, unused_ones in ((None, []), (24 * MIB, []), (8 * MIB, [b, c]), (9 * MIB, [b, c]), (10 * MIB, [c])):
        with structlog.testing.capture_logs() as logs:
            plan(size, a, b, c)
        said = [entry for entry in logs if "unused" in entry["event"]]
        assert [entry["paths"] for entry in said] == ([list(map(str, unused_ones))] if unused_ones else [])
        assert all("maru_pool_size" in entry["remedy"] for entry in said)


def test_the_setting_that_was_used_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small, a = sized(tmp_path / "small", MIB), sized(tmp_path / "a", 8 * MIB)

    def wish(size: int | None, *paths: Path) -> PoolWish:
        return PoolWish("cxl", size, ",".join(map(str, paths)), size_setting="--cxl-pool-size")

    with pytest.raises(BackendError, match=r"lower --cxl-pool-size, or name more devices"):
        quick().plan_pools(wish(16 * MIB, a), unused)
    with pytest.raises(BackendError, match=r"set --cxl-pool-size"):
        quick().plan_pools(wish(None, tmp_path / "new"), unused)
    with pytest.raises(BackendError, match=r"small is shorter than 2097152 bytes"):
        quick().plan_pools(wish(None, small), unused)
    with pytest.raises(BackendError, match=r"0 bytes .*there .*/small"):
        quick().plan_pools(wish(2 * MIB, small), unused)
    (little,) = quick().plan_pools(wish(MIB, a), unused)
    assert little.size_setting == "--cxl-pool-size"
    ask = PoolRequest(0, little.size, 8192, 0, little.path, "owner", size_setting=little.size_setting)
    with pytest.raises(BackendError, match=r"whole alignments of 2097152 bytes; raise --cxl-pool-size"):
        quick().create_pool(ask)
    monkeypatch.setattr("maru_backends.places.filesystem_type", lambda device: "tmpfs")
    (new,) = quick().plan_pools(wish(4 * MIB, tmp_path / "new"), unused)
    ask = evolve(ask, size=new.size, path=new.path, size_setting=new.size_setting)
    tight = quick(memory=lambda: places.Available(MIB, "the test"))
    with pytest.raises(BackendError, match=r"\(the test\); lower --cxl-pool-size"):
        tight.create_pool(ask)


def test_nothing_is_said_where_there_is_nothing_to_take_over(tmp_path: Path) -> None:
    ask = PoolRequest(0, 4 * MIB, 8192, 0, str(tmp_path / "new"), "owner")

    def said() -> list[str]:
        with structlog.testing.capture_logs() as logs:
            assert quick().adopt_pool(ask) is None
        return [entry["event"] for entry in logs]

    assert said() == []
    sized(tmp_path / "new", 4 * MIB)
    assert said() == []
    quick().create_pool(ask).destroy()
    assert said() == []
    quick().create_pool(evolve(ask, owner="another")).leave()
    assert said() == ["pool not taken over"]


def test_pools_on_several_devices_are_one_each(tmp_path: Path) -> None:
    a, b = sized(tmp_path / "a", 8 * MIB), sized(tmp_path / "b", 4 * MIB)
    backend, base, pools = quick(), 0, []
    for number, made in enumerate(backend.plan_pools(PoolWish("cxl", 12 * MIB, f"{a},{b}"), unused)):
        pools.append(backend.create_pool(PoolRequest(number, made.size, 8192, base, made.path, "owner")))
        base += pools[-1].region.descriptor.entry_count
    assert [pool.region.descriptor.location for pool in pools] == [str(a), str(b)]
    assert backend.adopt_pool(PoolRequest(1, 8 * MIB, 8192, 0, str(a), "owner")) is None
    for pool in pools:
        pool.leave()
    assert backend.adopt_pool(PoolRequest(1, 8 * MIB, 8192, 0, str(a), "owner")) is None, "it was pool 0"


def test_a_file_stands_in_and_says_so_once(tmp_path: Path) -> None:
    backend = quick()
    with structlog.testing.capture_logs() as logs:
        for _ in range(2):
            backend.create_pool(PoolRequest(0, 5 * MIB, 8192, 0, str(tmp_path / "new"), "owner")).destroy()
    said = [entry for entry in logs if "stands in" in entry["event"]]
    assert [entry["path"] for entry in said] == [str(tmp_path / "new")]
    assert (tmp_path / "new").stat().st_size == 4 * MIB, "whole alignments, and it stays like a device"
    backend.create_pool(PoolRequest(0, 5 * MIB, 8192, 0, str(tmp_path), "owner")).destroy()
    assert [path.name for path in tmp_path.iterdir()] == ["new"], "one in a folder goes with its pool"


def test_what_is_somebody_elses_stays_as_it_is(tmp_path: Path) -> None:
    precious = tmp_path / "notes"
    precious.write_bytes(b"precious" * (1 << 20))
    precious.chmod(0o600)
    with pytest.raises(BackendError, match=r"notes is no file of Maru's, and what it holds would be lost"):
        quick().create_pool(PoolRequest(0, 4 * MIB, 8192, 0, str(precious), "owner", take_over=True))
    assert precious.read_bytes() == b"precious" * (1 << 20)
    shared = sized(tmp_path / "shared", 8 * MIB)
    shared.chmod(0o622)
    with pytest.raises(BackendError, match=r"mode 622.*nobody else may write to it"):
        quick().create_pool(PoolRequest(0, 4 * MIB, 8192, 0, str(shared), "owner"))
    os.mkfifo(tmp_path / "pipe")
    for path, reason in (("pipe", "neither a DAX device"), ("none/there", "No such file"), ("shared/x", "Not a dir")):
        with pytest.raises(BackendError, match=reason):
            quick().create_pool(PoolRequest(0, 4 * MIB, 8192, 0, str(tmp_path / path), "owner"))
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("path", ["/dev/dax99.7", "/dev/zero"])
def test_a_device_that_is_not_there_or_is_another_is_no_file_to_be_made(path: str, tmp_path: Path) -> None:
    with pytest.raises(BackendError, match=r"no DAX device|DAX devices of this host|says nothing|not a DAX device"):
        quick(sysfs=tmp_path).create_pool(PoolRequest(0, 4 * MIB, 8192, 0, path, "owner"))
    assert path == "/dev/zero" or not os.path.exists(path)


def test_too_little_room_for_a_file_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "filesystem_type", lambda device: "tmpfs")
    backend = quick(memory=lambda: places.Available(4 * MIB - 1, "the test"))
    with pytest.raises(BackendError, match=rf"{4 * MIB} bytes .*asked for, {4 * MIB - 1} bytes .*there \(the test\)"):
        backend.create_pool(PoolRequest(0, 4 * MIB, 8192, 0, str(tmp_path), "owner"))
    assert list(tmp_path.iterdir()) == []


def test_a_pool_is_found_where_this_host_has_its_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another host numbers devices in another order."""
    backend = quick()
    made = [
        backend.create_pool(PoolRequest(0, 4 * MIB, 8192, 0, str(sized(tmp_path / name, 8 * MIB)), "owner"))
        for name in "abc"
    ]
    known = [
        DaxDevice(name, str(tmp_path / name), 8 * MIB, ALIGN, True, mode, 0, 0)
        for name, mode in (("a", "devdax"), ("none", "devdax"), ("b", "devdax"), ("c", "system-ram"))
    ]
    monkeypatch.setattr(devdax, "discover", lambda *arguments: known)
    wanted = made[1].region.descriptor
    for location in (str(tmp_path / "a"), str(tmp_path / "elsewhere"), "/dev/dax0.0"):
        region = backend.map_region(evolve(wanted, location=location))
        assert unpack_superblock(region.buffer).identity == wanted.identity
        region.close()
    with pytest.raises(BackendError, match="made anew"):
        backend.map_region(evolve(made[2].region.descriptor, location=str(tmp_path / "a")))
    for pool in made:
        pool.destroy()


def test_a_pool_of_another_host_is_mapped_only_with_flushes(ask: PoolRequest) -> None:
    there = quick(host=other_host, flusher=lambda: Flushes([]))
    pool = there.create_pool(ask)
    with pytest.raises(BackendError, match=r"made by another host.*maru_visibility=hosts"):
        quick().map_region(pool.region.descriptor)
    pool.destroy()
    pool = there.create_pool(evolve(ask, shared_by_hosts=True, take_over=True))
    quick(flusher=lambda: Flushes([])).map_region(pool.region.descriptor).close()
    with pytest.raises(BackendError, match=r"needs caches to be flushed: not built.*maru_visibility=host\)"):
        quick(flusher=lambda: "not built").map_region(pool.region.descriptor)
    pool.destroy()
    with pytest.raises(BackendError, match="needs caches to be flushed: not built"):
        quick(flusher=lambda: "not built").create_pool(evolve(ask, shared_by_hosts=True, take_over=True))
    quick().create_pool(evolve(ask, take_over=True)).destroy()


class Flushes:
    """Notes what it was asked for."""

    def __init__(self, calls: list[tuple[str, int, int]]) -> None:
        self.calls = calls

    def writeback(self, address: int, length: int) -> None:
        self.calls.append(("writeback", address, length))

    def invalidate(self, address: int, length: int) -> None:
        self.calls.append(("invalidate", address, length))


def test_publish_writes_back_and_acquire_invalidates_exactly_these_bytes(ask: PoolRequest) -> None:
    calls: list[tuple[str, int, int]] = []
    backend = quick(flusher=lambda: Flushes(calls))
    pool = backend.create_pool(evolve(ask, shared_by_hosts=True))
    region = backend.map_region(pool.region.descriptor)
    base = address_of(region.buffer.obj)  # type: ignore[arg-type]
    calls.clear()
    region.publish(12345, 678)
    region.acquire(9000, 1)
    region.publish(5, 0)
    region.acquire(5, -1)
    assert calls == [("writeback", base + 12345, 678), ("invalidate", base + 9000, 1)]
    size = region.descriptor.size
    for offset, length in ((-1, 8), (size - 7, 8), (size, 1), (0, 1 << 60)):
        with pytest.raises(BackendError, match="outside of a pool"):
            region.publish(offset, length)
        with pytest.raises(BackendError, match="outside of a pool"):
            region.acquire(offset, length)
    region.close()
    for method in (region.publish, region.acquire):
        with pytest.raises(BackendError, match="closed"):
            method(0, 8)
    assert len(calls) == 2
    pool.destroy()
    quick().create_pool(evolve(ask, take_over=True)).destroy()


def test_what_dead_processes_left_in_caches_is_written_back_before_hosts_share_a_new_pool(ask: PoolRequest) -> None:
    calls: list[tuple[str, int, int]] = []
    backend = quick(flusher=lambda: Flushes(calls))
    backend.create_pool(ask).destroy()
    calls.clear()
    pool = backend.create_pool(evolve(ask, shared_by_hosts=True))
    base, size = address_of(pool.region.buffer.obj), pool.region.descriptor.size  # type: ignore[arg-type]
    assert calls.count(("writeback", base, size)) == 1
    assert calls.index(("writeback", base, size)) < len(calls) - 1, "the new superblock comes last"
    pool.destroy()
    calls.clear()
    pool = backend.create_pool(evolve(ask, take_over=True))
    assert not [call for call in calls if call[2] == size], "within a host caches are the same"
    pool.destroy()


def test_within_one_host_nothing_is_flushed_but_what_tells_whose_it_is(ask: PoolRequest) -> None:
    calls: list[tuple[str, int, int]] = []
    backend = quick(flusher=lambda: Flushes(calls))
    pool = backend.create_pool(ask)
    base = address_of(pool.region.buffer.obj)  # type: ignore[arg-type]
    assert ("writeback", base, SUPERBLOCK_SIZE) == calls[-1], "the superblock is last, and seen by other hosts"
    calls.clear()
    pool.region.publish(0, 4096)
    pool.region.acquire(0, 4096)
    assert calls == []
    pool.destroy()
    assert [name for name, _, _ in calls] == ["writeback", "writeback"]


@pytest.mark.slow
def test_the_shared_lock_of_a_mapping_outlives_its_descriptor(ask: PoolRequest) -> None:
    """What everything here rests on, also on a device."""
    quick().create_pool(ask).destroy()
    mine, other = os.open(ask.path, os.O_RDWR), os.open(ask.path, os.O_RDWR)
    assert lock_shared(mine)
    assert not lock_alone(other)
    mapping = mmap.mmap(mine, ALIGN)
    os.close(mine)
    assert not lock_alone(other)
    view = memoryview(mapping)[:4]
    del mapping
    gc.collect()
    assert not lock_alone(other)
    view.release()
    del view
    gc.collect()
    assert lock_alone(other)
    os.close(other)


def test_a_file_that_was_cut_still_says_whose_it_is(tmp_path: Path) -> None:
    """Its owner may make it anew; for anybody else it is as taken as before."""
    backend = quick()
    request = PoolRequest(0, 16 * MIB, 8192, 0, str(tmp_path), "owner")
    left = backend.create_pool(request)
    path = left.region.descriptor.location
    left.leave()
    os.truncate(path, MIB)
    assert backend.adopt_pool(request) is None
    again = backend.create_pool(request)
    assert os.stat(path).st_size == 16 * MIB
    again.destroy()
