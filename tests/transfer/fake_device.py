"""The native CUDA code on a driver that is a fake: pages on a "device" that is memory of the host.

Both are compiled by the C compiler that is there; the kernels' arithmetic is the same header, run on the host.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import threading
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import field, frozen

from maru_transfer.cuda_library import CudaDevice, CudaLibrary, load
from maru_transfer.kernel import KernelTransfer, Tuning

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
#: What fake_counts fills, in this order.
COUNTS = (
    "copies",
    "launches",
    "batches",
    "waits",
    "bytes",
    "most_under_way",
    "misaligned",
    "folded",
    "events",
    "misuses",
    "most_blocks",
    "most_copying",
    "most_reaching",
    "copying_and_reaching",
)


def compiler() -> str | None:
    return shutil.which("cc") or shutil.which("gcc")


def compile_library(target: Path, *options: str, sources: Sequence[Path]) -> Path:
    """A shared library; warnings are errors."""
    command = [compiler() or "cc", "-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    command += ["-fvisibility=hidden", *options, *map(str, sources), "-o", str(target), "-ldl"]
    subprocess.run(command, check=True)
    return target


def compile_native(folder: Path, sources: Path = ROOT / "csrc") -> Path:
    """libmaru_cuda without kernels for a GPU: the fake driver has its own."""
    image = folder / "no.fatbin"
    image.write_bytes(b"none")
    target = folder / f"libmaru_cuda_{len(list(folder.iterdir()))}.so"
    options = (f'-DMARU_FATBIN="{image}"', f"-I{sources}")
    return compile_library(target, *options, sources=[*sorted(sources.glob("cuda_*.c")), sources / "buffers.c"])


@frozen(eq=False)
class FakeDriver:
    """``seed`` decides the order in which things run."""

    path: Path
    native: CudaLibrary
    hooks: ctypes.CDLL

    @classmethod
    def build(
        cls, folder: Path, *, batch: int = 13, native: Path | None = None, sources: Path = ROOT / "csrc"
    ) -> FakeDriver:
        target = folder / f"libfake_{batch}.so"
        path = compile_library(target, f"-I{sources}", f"-DBATCH={batch}", sources=[HERE / "fake_cuda.c"])
        hooks = ctypes.CDLL(str(path))
        word = ctypes.c_uint64
        hooks.fake_reset.argtypes = (word,)
        hooks.fake_register.argtypes = (word, word)
        hooks.fake_fill.argtypes = (word, word, word, ctypes.c_int)
        hooks.fake_copy.argtypes = (word, word, word, word)
        hooks.fake_fail.argtypes = (ctypes.c_char_p, ctypes.c_int)
        hooks.fake_fail_at.argtypes = (ctypes.c_int,)
        hooks.fake_failed_at.restype = ctypes.c_char_p
        hooks.fake_open_stream.restype = word
        hooks.fake_close_stream.argtypes = (word,)
        hooks.fake_calls.argtypes, hooks.fake_calls.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_char_p
        library = load(native or compile_native(folder))
        assert isinstance(library, CudaLibrary), library
        return cls(path, library, hooks)

    @classmethod
    def with_mistake(cls, folder: Path, name: str, right: str, wrong: str) -> FakeDriver:
        """The same for native code whose file ``name`` has ``wrong`` in place of ``right``, which stands there once."""
        sources = folder / "csrc"
        shutil.copytree(ROOT / "csrc", sources)
        text = (sources / name).read_text()
        assert text.count(right) == 1, f"{name} has changed; say anew what this mistake is"
        (sources / name).write_text(text.replace(right, wrong))
        return cls.build(folder, native=compile_native(folder, sources), sources=sources)

    def device(self) -> CudaDevice:
        return CudaDevice(self.native, 0, str(self.path))

    def transfer(
        self,
        layers: Sequence[torch.Tensor],
        paged: Any,
        stored: Any,
        tuning: Tuning,
        kind: type[KernelTransfer] = KernelTransfer,
        memory: FakeMemory | None = None,
    ) -> KernelTransfer:
        device = self.device()
        try:
            return kind(device, memory or FakeMemory(self), layers, paged, stored, tuning)
        except BaseException:
            device.close()
            raise

    def stream(self) -> int:
        """A stream of an engine; ended by ``hooks.fake_close_stream``."""
        stream = self.hooks.fake_open_stream()
        assert stream
        return int(stream)

    def counts(self) -> dict[str, int]:
        found = (ctypes.c_uint64 * len(COUNTS))()
        self.hooks.fake_counts(found)
        return dict(zip(COUNTS, found, strict=True))

    def calls(self) -> dict[str, int]:
        """How often each function of the driver was called since it was reset."""
        found, count, number = {}, ctypes.c_uint64(), 0
        while name := self.hooks.fake_calls(number, ctypes.byref(count)):
            found[name.decode()] = count.value
            number += 1
        return found


@frozen(eq=False)
class FakeMemory:
    """Implements maru_transfer.memory.Memory."""

    driver: FakeDriver
    #: The current stream of threads, by their id; that of others is the default stream.
    streams: dict[int, int] = field(factory=dict)

    def on_device(self, nbytes: int) -> tuple[Any, int]:
        raw = np.full(nbytes + 256, 0xDD, np.uint8)
        return raw, -(-raw.ctypes.data // 256) * 256

    def locked(self, nbytes: int) -> tuple[Any, int]:
        raw, address = self.on_device(nbytes)
        self.driver.hooks.fake_register(address, nbytes)
        return raw, address

    def stream(self) -> int:
        return self.streams.get(threading.get_ident(), 0)


def registered(driver: FakeDriver, buffer: memoryview, pieces: int = 1) -> memoryview:
    """Registers a buffer, or pieces of it one by one."""
    address, size = np.frombuffer(buffer, np.uint8).ctypes.data, buffer.nbytes
    edges = [size * number // pieces for number in range(pieces + 1)]
    for first, last in pairwise(edges):
        if first < last:
            driver.hooks.fake_register(address + first, last - first)
    return buffer


def aligned(nbytes: int, fill: int = 0xAB) -> memoryview:
    """A buffer at an address that kernels take."""
    raw = np.full(nbytes + 256, fill, np.uint8)
    first = -raw.ctypes.data % 256
    return memoryview(raw[first : first + nbytes])
