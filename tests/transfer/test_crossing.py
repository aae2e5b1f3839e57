"""Bytes between host and device through patches of locked memory and small buffers, run on the host (R106, R107)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from itertools import groupby
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from maru_core.contracts import MemorySpan, UsesPinnedMemory
from maru_transfer import crossing
from maru_transfer.crossing import Crossing
from maru_transfer.device_copy import DeviceTransfer
from maru_transfer.host_copy import HostTransfer

PATCH = 37
HALF = 64


class Patches:
    """Patches of PATCH bytes of the address space, locked or not by turns that ``locked`` tells."""

    def __init__(self, locked: Callable[[int], bool]) -> None:
        self._locked = locked

    def spans(self, address: int, length: int) -> list[MemorySpan]:
        patches = groupby(range(address, address + length), lambda byte: byte // PATCH)
        found, offset = [], 0
        for patch, members in patches:
            count = sum(1 for _ in members)
            found.append(MemorySpan(offset, count, self._locked(patch)))
            offset += count
        return found


def crossing_over(pinned: Patches, threads: int = 1) -> Crossing:
    made = Crossing(torch.device("cpu"), half=HALF, threads=threads)
    made.pinned = pinned
    return made


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Address and length of every stretch of host memory that the device was to reach by itself."""
    seen: list[tuple[int, int]] = []
    tensor_over = crossing._tensor

    def note(array: Any) -> torch.Tensor:
        seen.append((array.ctypes.data, array.nbytes))
        return tensor_over(array)

    monkeypatch.setattr(crossing, "_tensor", note)
    return seen


LOCKED: dict[str, Callable[[int], bool]] = {
    "nothing locked": lambda patch: False,
    "all locked": lambda patch: True,
    "every third patch": lambda patch: patch % 3 == 0,
    "all but every fifth": lambda patch: patch % 5 > 0,
}


@pytest.mark.parametrize("name", LOCKED)
@pytest.mark.parametrize("readonly", [False, True])
@pytest.mark.parametrize("threads", [1, 3])
def test_bytes_are_right_and_only_locked_ones_are_reached_directly(
    name: str, readonly: bool, threads: int, direct: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crossing, "MIN_BYTES_PER_THREAD", 8)
    source = np.random.default_rng(1).integers(0, 256, 1500, np.uint8)
    stretches = [(0, 300), (300, 1), (400, 150), (1000, 500)]
    wanted = np.zeros_like(source)
    for offset, length in stretches:
        wanted[offset : offset + length] = source[offset : offset + length]
    pinned = Patches(LOCKED[name])
    with closing(crossing_over(pinned, threads)) as crossing_:
        device = torch.zeros(1500, dtype=torch.uint8)
        view = memoryview(source)
        crossing_.to_device(view.toreadonly() if readonly else view, device, stretches)
        np.testing.assert_array_equal(device.numpy(), wanted)
        back = np.zeros_like(source)
        crossing_.to_host(torch.from_numpy(source), memoryview(back), stretches)
        crossing_.finish()
        np.testing.assert_array_equal(back, wanted)
        assert len(crossing_._halves or ()) == (0 if name == "all locked" else 2)
        assert all(half.tensor.nbytes == HALF for half in crossing_._halves or ())
    assert bool(direct) == (name != "nothing locked")
    for address, length in direct:
        assert address // PATCH == (address + length - 1) // PATCH, "no copy crosses the edge of a registration"
        assert LOCKED[name](address // PATCH)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 300)), max_size=6),
    st.integers(0, 2**12 - 1),
    st.booleans(),
)
def test_any_stretches_over_any_patches(stretches: list[tuple[int, int]], mask: int, store_first: bool) -> None:
    source = np.random.default_rng(2).integers(1, 256, 700, np.uint8)
    pinned = Patches(lambda patch: bool(mask >> patch % 12 & 1))
    wanted = np.zeros_like(source)
    for offset, length in stretches:
        wanted[offset : offset + length] = source[offset : offset + length]
    with closing(crossing_over(pinned)) as crossing_:
        for store in (store_first, not store_first):
            if store:
                found = np.zeros_like(source)
                crossing_.to_host(torch.from_numpy(source), memoryview(found), stretches)
                crossing_.finish()
            else:
                device = torch.zeros(700, dtype=torch.uint8)
                crossing_.to_device(memoryview(source), device, stretches)
                found = device.numpy()
            np.testing.assert_array_equal(found, wanted)


def test_what_was_in_the_buffers_at_an_error_is_not_written_later() -> None:
    with closing(crossing_over(Patches(lambda patch: False))) as crossing_:
        lost = np.zeros(PATCH, np.uint8)
        inside = -lost.ctypes.data % PATCH % (PATCH - 1)
        crossing_.to_host(torch.full((PATCH,), 7, dtype=torch.uint8), memoryview(lost), [(inside, 1)])
        assert not lost.any()
        crossing_.forget()
        source, device = np.full(300, 9, np.uint8), torch.zeros(300, dtype=torch.uint8)
        crossing_.to_device(memoryview(source), device, [(0, 300)])
        crossing_.finish()
        assert not lost.any()
        assert (device == 9).all()


def test_an_engine_of_the_host_is_not_told() -> None:
    assert issubclass(DeviceTransfer, UsesPinnedMemory)
    assert not issubclass(HostTransfer, UsesPinnedMemory)
