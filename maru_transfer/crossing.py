"""Moves contiguous bytes between host memory and a device, by itself where the memory is locked, else in small steps.

A copy between a device and memory that the driver does not know makes the driver stage it, blocking the caller and, on
some drivers, everybody else. Here such bytes go through two small locked buffers in turn, so that the device copies one
while the host fills or empties the other.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch
from attrs import define

from maru_core import logs
from maru_core.contracts import MemorySpan, PinnedMemory
from maru_core.processors import spare
from maru_transfer.helpers import share

#: Bytes of each of the two buffers.
HALF = 8 << 20
#: One thread copies slower than a bus.
MAX_THREADS = 4
#: Less than this is copied by one thread.
MIN_BYTES_PER_THREAD = 1 << 20

Array = np.ndarray[Any, Any]


@define(eq=False)
class _Half:
    """One of the two buffers; ``event`` tells when the device is done with it, ``waiting`` where its bytes belong."""

    tensor: torch.Tensor
    array: Array
    event: torch.cuda.Event | None
    waiting: Array | None = None


class Crossing:
    """Copies on the calling thread's current stream of ``device``; used by one thread at a time.

    Without ``pinned`` torch is asked about each stretch. On a device other than CUDA nothing is asynchronous and every
    stretch counts as locked unless ``pinned`` says otherwise.
    """

    def __init__(self, device: torch.device, *, half: int = HALF, threads: int | None = None) -> None:
        """``half``: bytes of each buffer. ``threads`` copy on the host; ``None``: a quarter of the cores, up to 4."""
        self.pinned: PinnedMemory | None = None
        self._device = device
        self._cuda = device.type == "cuda"
        self._half = half
        self._halves: list[_Half] | None = None
        self._turn = 0
        self._threads = threads or spare(MAX_THREADS)
        self._pool: ThreadPoolExecutor | None = None

    def to_device(self, host: memoryview, device: torch.Tensor, stretches: Sequence[tuple[int, int]]) -> None:
        """Start to copy stretches (offset, length) of ``host`` to the same offsets of ``device``, a flat byte tensor.

        ``host`` may be reused when the stream has run what was queued.
        """
        for part, where, locked in self._parts(host, stretches):
            if locked:
                device[where].copy_(_tensor(part), non_blocking=self._cuda)
            else:
                self._fill(part, device[where])

    def to_host(self, device: torch.Tensor, host: memoryview, stretches: Sequence[tuple[int, int]]) -> None:
        """Start to copy the other way; :meth:`finish` ends it. ``device`` may be reused by the stream at once."""
        for part, where, locked in self._parts(host, stretches):
            if locked:
                _tensor(part).copy_(device[where], non_blocking=self._cuda)
            else:
                self._empty(device[where], part)

    def finish(self) -> None:
        """Bring what :meth:`to_host` left in the buffers to where it belongs."""
        for _ in self._halves or ():
            self._settle(self._next())

    def forget(self) -> None:
        """Drop what is in the buffers, after an error; the stream must have run what was queued."""
        for half in self._halves or ():
            half.waiting = None

    def close(self) -> None:
        """Give the buffers back and end the copying threads."""
        self._halves = None
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _parts(self, host: memoryview, stretches: Sequence[tuple[int, int]]) -> Iterator[tuple[Array, slice, bool]]:
        """The bytes of stretches that lie within one registration or in none, where they lie, and which it is."""
        array = np.frombuffer(host, np.uint8)
        for offset, length in stretches:
            for span in self._spans(array, offset, length):
                where = slice(offset + span.offset, offset + span.offset + span.length)
                yield array[where], where, span.pinned

    def _spans(self, array: Array, offset: int, length: int) -> Sequence[MemorySpan]:
        if self.pinned is not None:
            return self.pinned.spans(array.ctypes.data + offset, length)
        known = not self._cuda or _tensor(array[offset : offset + length]).is_pinned()
        return [MemorySpan(0, length, known)]

    def _fill(self, source: Array, target: torch.Tensor) -> None:
        for first in range(0, len(source), self._half):
            part = source[first : first + self._half]
            half = self._settle(self._next())
            self._copy(half.array[: len(part)], part)
            target[first : first + len(part)].copy_(half.tensor[: len(part)], non_blocking=self._cuda)
            if half.event is not None:
                half.event.record()

    def _empty(self, source: torch.Tensor, target: Array) -> None:
        for first in range(0, len(target), self._half):
            part = target[first : first + self._half]
            half = self._settle(self._next())
            half.tensor[: len(part)].copy_(source[first : first + len(part)], non_blocking=self._cuda)
            if half.event is not None:
                half.event.record()
            half.waiting = part

    def _next(self) -> _Half:
        if self._halves is None:
            self._halves = [self._new_half() for _ in range(2)]
        self._turn ^= 1
        return self._halves[self._turn]

    def _settle(self, half: _Half) -> _Half:
        """Wait until the device is done with a buffer, and empty it."""
        if half.event is not None:
            half.event.synchronize()
        if half.waiting is not None:
            self._copy(half.waiting, half.array[: len(half.waiting)])
            half.waiting = None
        return half

    def _copy(self, target: Array, source: Array) -> None:
        """Within host memory, on several threads when it is worth it."""
        threads = min(self._threads, len(source) // MIN_BYTES_PER_THREAD)
        if threads < 2:
            target[:] = source
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads - 1, "maru-bounce")
        step = -(-len(source) // threads)
        shares = [
            share(self._pool, partial(np.copyto, target[first : first + step], source[first : first + step]))
            for first in range(step, len(source), step)
        ]
        target[:step] = source[:step]
        for helper in shares:
            helper.result()

    def _new_half(self) -> _Half:
        if not self._cuda:
            tensor = torch.empty(self._half, dtype=torch.uint8)
            return _Half(tensor, tensor.numpy(), None)
        try:
            tensor = torch.empty(self._half, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            # The driver then stages the copies once more: slower, and as correct.
            logs.get_logger(__name__).warning("maru.no_locked_buffer", bytes=self._half, reason=str(error))
            tensor = torch.empty(self._half, dtype=torch.uint8)
        return _Half(tensor, tensor.numpy(), torch.cuda.Event())  # type: ignore[no-untyped-call]


def _tensor(array: Array) -> torch.Tensor:
    """A tensor over an array that may be read-only, for which torch has no type; only loads read such a one."""
    if array.flags.writeable:
        return torch.from_numpy(array)
    return torch.frombuffer((ctypes.c_uint8 * array.nbytes).from_address(array.ctypes.data), dtype=torch.uint8)
