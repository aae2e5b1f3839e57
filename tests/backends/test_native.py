"""The native helpers themselves, and what is said when there are none."""

from __future__ import annotations

import ctypes
import json
import mmap
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maru_backends import native
from maru_core.errors import BackendError
from tests.budgets import examples

ROOT = Path(__file__).parents[2]
SIZE = 1 << 20


def compiled(source: Path | str, target: Path, *options: str) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("there is no C compiler here")
    command = [compiler, "-std=c11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-o"]
    text = [source] if isinstance(source, Path) else ["-xc", "-"]
    done = subprocess.run(
        [*command, target, *options, *text],
        input=None if isinstance(source, Path) else source,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled for this run: a checkout may have none, or one of before."""
    folder = tmp_path_factory.mktemp("native")
    return compiled(ROOT / "csrc/host.c", folder / native.LIBRARY, "-Wpedantic", "-fvisibility=hidden")


@pytest.fixture(scope="module")
def host(library: Path) -> native.NativeHost:
    found = native.load(library)
    assert found is not None, native.why_not(library)
    return found


class Memory:
    """Shared memory with an address."""

    def __init__(self, size: int = SIZE) -> None:
        self.map = mmap.mmap(-1, size)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))


@pytest.fixture(scope="module")
def memory() -> Memory:
    return Memory()


def test_it_says_what_it_uses(host: native.NativeHost) -> None:
    features = host.features
    assert features.writeback in ("clwb", "clflushopt", "clflush", "dc cvac")
    assert features.invalidate in ("clflushopt", "clflush", "dc civac")
    assert features.line_bytes in (32, 64, 128)
    flags = Path("/proc/cpuinfo").read_text().split()
    for better in ("clwb", "clflushopt"):
        if better in flags:
            assert features.writeback == better
            break
    if "clflushopt" in flags:
        assert features.invalidate == "clflushopt"


def available(host: native.NativeHost) -> list[str]:
    flags = Path("/proc/cpuinfo").read_text().split()
    some = [name for name in ("clflush", "clflushopt", "clwb") if name in flags]
    return some or ["dc cvac", "dc civac"]


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(0, SIZE), st.integers(0, 5000), st.integers(0, 255), st.data())
def test_bytes_stay_as_they_are(
    host: native.NativeHost, memory: Memory, start: int, length: int, fill: int, data: st.DataObject
) -> None:
    """Whatever the range, also one that begins or ends within a line, and that of no byte at the very end."""
    length = min(length, SIZE - start)
    memory.map[start : start + length] = bytes([fill]) * length
    before = bytes(memory.map)
    which = data.draw(st.sampled_from(["writeback", "invalidate", *available(host)]))
    if which in ("writeback", "invalidate"):
        getattr(host, which)(memory.address + start, length)
    else:
        host.flush_with(which, memory.address + start, length)
    assert memory.map[:] == before


@pytest.mark.parametrize("name", ["writeback", "invalidate"])
def test_what_is_no_range_is_refused(host: native.NativeHost, name: str) -> None:
    flush: Callable[[int, int], None] = getattr(host, name)
    with pytest.raises(BackendError, match="NULL"):
        flush(0, 10)
    with pytest.raises(BackendError, match="NULL"):
        flush(0, 0)
    with pytest.raises(BackendError, match="leaves the address space"):
        flush((1 << 64) - 64, 65)
    for address, length in ((-1, 1), (1 << 64, 1), (4096, -1), (4096, 1 << 64)):
        with pytest.raises(BackendError):
            flush(address, length)


def test_an_instruction_of_another_processor_is_refused(host: native.NativeHost, memory: Memory) -> None:
    foreign = "dc cvac" if "clflush" in available(host) else "clwb"
    with pytest.raises(BackendError, match="no instruction"):
        host.flush_with(foreign, memory.address, 64)
    with pytest.raises(BackendError, match="not known"):
        host.flush_with("none", memory.address, 64)
    host.fence()


def test_many_threads_at_once(host: native.NativeHost) -> None:
    """Each writes lines of its own while all flush everything; nothing gets lost."""
    memory = Memory(1 << 16)
    wrong: list[int] = []

    def work(number: int) -> None:
        chance = random.Random(number)
        for round_ in range(200):
            at = (chance.randrange(128) * 8 + number) * 64
            data = bytes([number + 1, round_ % 256]) * 32
            memory.map[at : at + 64] = data
            (host.writeback if chance.random() < 0.5 else host.invalidate)(memory.address, 1 << 16)
            if memory.map[at : at + 64] != data:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_interpreter_runs_on_meanwhile(host: native.NativeHost) -> None:
    memory = Memory(64 << 20)
    memory.map[:] = bytes(64 << 20)
    done = threading.Event()

    def flush() -> None:
        for _ in range(20):
            host.invalidate(memory.address, 64 << 20)
        done.set()

    steps = 0
    thread = threading.Thread(target=flush)
    thread.start()
    while not done.is_set():
        time.sleep(0)
        steps += 1
    thread.join()
    assert steps > 20  # with the lock held there would be one turn per call


def chain(memory: Memory, lines: int) -> None:
    """One round over all lines, in random order."""
    order = list(range(1, lines))
    random.Random(1).shuffle(order)
    at = 0
    for following in [*order, 0]:
        memory.map[at * 64 : at * 64 + 8] = following.to_bytes(8, "little")
        at = following


def test_invalidated_lines_come_from_memory_and_cached_ones_do_not(host: native.NativeHost, tmp_path: Path) -> None:
    """By the time of dependent loads: several times as long after an invalidation. The best of several rounds."""
    chase = ctypes.CDLL(str(compiled(ROOT / "tests/backends/chase.c", tmp_path / "chase.so"))).chase
    chase.restype, chase.argtypes = ctypes.c_double, (ctypes.c_void_p, ctypes.c_size_t)
    lines = 2048  # 128 KiB: in the second-level cache of anything
    memory = Memory(lines * 64)
    chain(memory, lines)
    cached, invalidated = [], []
    for _ in range(15):
        chase(memory.address, lines)
        cached.append(chase(memory.address, lines))
        host.invalidate(memory.address, lines * 64)
        invalidated.append(chase(memory.address, lines))
    assert min(cached) > 0
    assert min(invalidated) > 3 * min(cached), (min(cached) / lines, min(invalidated) / lines)


def test_write_back_of_dirty_lines_takes_time(host: native.NativeHost) -> None:
    """More than the calls alone, and less than a millisecond per MiB would be."""
    memory = Memory(8 << 20)
    times = []
    for round_ in range(5):
        memory.map[:] = bytes([round_]) * (8 << 20)
        start = time.perf_counter()
        host.writeback(memory.address, 8 << 20)
        times.append(time.perf_counter() - start)
    start = time.perf_counter()
    for _ in range(5):
        host.writeback(memory.address, 0)
    nothing = (time.perf_counter() - start) / 5
    assert min(times) > 3 * nothing
    assert min(times) < 1.0


# -- without it --------------------------------------------------------------------------------------------------------


def test_where_there_is_none_the_reason_is_told(tmp_path: Path) -> None:
    path = tmp_path / native.LIBRARY
    assert native.load(path) is None
    assert "nothing was built in this checkout" in str(native.why_not(path))
    assert "pip install" in str(native.why_not(path))


def test_the_reason_of_the_build_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "__file__", str(tmp_path / "native.py"))
    assert native.build_info() == {}
    (tmp_path / native.BUILD_INFO).write_text("{")
    assert native.build_info() == {}
    (tmp_path / native.BUILD_INFO).write_text(json.dumps({"host": {"built": False, "reason": "no compiler"}}))
    assert native.load() is None
    assert native.why_not() == "the native helpers were not built: no compiler"


def test_a_library_that_is_none_or_another_one_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "text.so"
    text.write_text("no library")
    folder = tmp_path / "folder.so"
    folder.mkdir()
    other = compiled("unsigned maru_abi_version(void) { return 99; }", tmp_path / "other.so")
    older = compiled("unsigned maru_abi_version(void) { return 1; }", tmp_path / "older.so")
    foreign = compiled("int f(void) { return 1; }", tmp_path / "foreign.so")
    for path, reason in (
        (text, "cannot be used"),
        (folder, "cannot be used"),
        (other, "has version 99 of the interface, this Maru needs 1"),
        (older, "maru_writeback"),
        (foreign, "maru_abi_version"),
    ):
        assert native.load(path) is None
        assert reason in str(native.why_not(path))
        assert "install Maru again" in str(native.why_not(path))


def test_header_and_binding_agree() -> None:
    header = (ROOT / "csrc/maru.h").read_text()
    assert f"#define MARU_ABI_VERSION {native.ABI_VERSION}\n" in header
    for number, name in enumerate(native.INSTRUCTIONS):
        assert f"MARU_{name.upper().replace(' ', '_')} = {number}," in header
