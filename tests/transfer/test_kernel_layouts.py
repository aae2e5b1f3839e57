"""F3: what the connector can describe and what the kernels can move are the same, for every layout and element size.

Layouts are not listed here but found: every order in which the axes of a known shape may lie in memory is shown to the
connector, under the name of every backend that it knows, and what it does not refuse the kernels have to move.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve, frozen
from fake_device import ROOT, FakeDriver, aligned, compiler

from maru_core.errors import LayoutError, TransferError
from maru_core.geometry import ChunkCopy, ObjectLayout, PagedLayout
from maru_integrations.vllm import layout as known
from maru_integrations.vllm.layout import describe_layout
from maru_transfer import kernel
from maru_transfer.abi import MOST_PLANES
from maru_transfer.kernel import KernelEngine, Tuning

L, B, N, H, D = 2, 6, 4, 2, 6
CHUNK = 8
TABLE = [2, 0, 1]
#: Of KV that vLLM can hold: fp8 and uint8, 16 bits, fp32, and twice that.
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: Every name that the connector accepts, beside that of the CPU, whose pages no kernel sees.
BACKENDS = known.PLANES_ONCE_FIRST | known.BLOCKS_FIRST | known.PACKED | known.LATENT


@frozen
class Shape:
    """What an engine shows of a layer, and the axes (block, token, head, element) of each plane in it."""

    axes: tuple[int, ...]
    heads: int
    dims: int

    def planes(self, layer: torch.Tensor) -> list[torch.Tensor]:
        if len(self.axes) == 5:
            return list(layer.unbind(0) if self.axes[0] == 2 else layer.unbind(1))
        if self.heads == 1:
            return [layer.reshape(B, N, 1, self.dims)]
        return [half.transpose(1, 2) for half in layer.split(self.dims, 3)]


SHAPES = {
    "planes first": Shape((2, B, N, H, D), H, D),
    "blocks first": Shape((B, 2, N, H, D), H, D),
    "packed": Shape((B, H, N, 2 * D), H, D),
    "latent": Shape((B, N, H * D), 1, H * D),
    "latent of one head": Shape((B, 1, N, H * D), 1, H * D),
}


def allocate(shape: Shape, order: tuple[int, ...], element: int) -> list[torch.Tensor]:
    """Layers full of different numbers, whose axes lie in memory in this ``order``."""
    size = math.prod(shape.axes)
    bits = np.random.default_rng(5).bytes(L * size * element)
    flat = torch.frombuffer(bytearray(bits), dtype=INTEGERS[element]).view(L, size)
    back = sorted(range(len(order)), key=order.__getitem__)
    return [layer.view([shape.axes[axis] for axis in order]).permute(back) for layer in flat]


def describe(shape: Shape, layers: list[torch.Tensor], backend: str, blocks: int) -> PagedLayout | None:
    """What the connector says of them when the engine manages them as so many ``blocks``."""
    caches = {f"model.layers.{number}.attn": layer for number, layer in enumerate(layers)}
    try:
        return describe_layout(
            caches,
            layer_order=list(caches),
            block_size=B * N // blocks,
            num_blocks=blocks,
            num_kv_heads=shape.heads,
            head_size=shape.dims,
            element_size=layers[0].element_size(),
            backend=backend,
        )[0]
    except LayoutError:
        return None


def described(element: int) -> Iterator[tuple[str, Shape, list[torch.Tensor], PagedLayout]]:
    """Backend, shape, layers and description of everything that the connector does not refuse."""
    for shape in SHAPES.values():
        for order in itertools.permutations(range(len(shape.axes))):
            layers = allocate(shape, order, element)
            for backend, blocks in itertools.product(sorted(BACKENDS), (B, B // 2)):
                paged = describe(shape, layers, backend, blocks)
                if paged is not None:
                    yield backend, shape, layers, paged


def as_stored(paged: PagedLayout) -> ObjectLayout:
    return ObjectLayout(len(paged.planes), L, CHUNK, paged.hidden, paged.element_size)


def test_every_backend_that_the_connector_knows_is_among_them() -> None:
    assert {backend for backend, *_ in described(2)} == BACKENDS


@pytest.mark.parametrize("element", INTEGERS)
def test_the_engine_refuses_none(element: int) -> None:
    engine = KernelEngine()
    refused = {engine.unsupported(paged, as_stored(paged), "cuda") for *_, paged in described(element)}
    assert refused == {None}


@pytest.mark.slow
@pytest.mark.skipif(compiler() is None, reason="needs a C compiler")
@pytest.mark.parametrize("way", ["staged", "mapped"])
@pytest.mark.parametrize("element", INTEGERS)
def test_the_kernels_move_every_one(tmp_path: Any, element: int, way: str) -> None:
    """Bytes, not only promises: stored, they are what the engine's own view shows, and loaded they are there again."""
    driver = FakeDriver.build(tmp_path)
    tuning = Tuning(slot_bytes=512, slots=2, direct_bytes=1 << 40, mapped_bytes=1 << 40 if way == "mapped" else 0)
    seen = set()
    for _, shape, layers, paged in described(element):
        if paged in seen:
            continue
        seen.add(paged)
        driver.hooks.fake_reset(len(seen))
        stored = as_stored(paged)
        wanted = torch.stack([torch.stack(shape.planes(layer)) for layer in layers], 1)
        wanted = wanted.reshape(stored.num_planes, L, paged.num_blocks, paged.block_size, -1)[:, :, TABLE]
        wanted = wanted.reshape(stored.num_planes, L, -1, stored.hidden)[:, :, :CHUNK]
        copies = [ChunkCopy(0, 0, CHUNK, aligned(stored.nbytes))]
        driver.hooks.fake_register(np.frombuffer(copies[0].buffer, np.uint8).ctypes.data, stored.nbytes)
        with closing(driver.transfer(layers, paged, stored, tuning)) as transfer:
            transfer.store(TABLE, copies)
            assert bytes(copies[0].buffer) == wanted.contiguous().numpy().tobytes(), paged
            before = [layer.clone() for layer in layers]
            for layer in layers:
                layer.view(INTEGERS[element]).zero_()
            transfer.load(TABLE, copies)
            driver.hooks.fake_drain()
        for layer, old in zip(layers, before, strict=True):
            for now, then in zip(shape.planes(layer), shape.planes(old), strict=True):
                now, then = (
                    plane.reshape(paged.num_blocks, paged.block_size, -1)[TABLE].flatten(0, 1)[:CHUNK]
                    for plane in (now, then)
                )
                assert torch.equal(now, then), paged
            layer.copy_(old)
        assert driver.counts()["misaligned"] == 0
    assert len(seen) > 100


@pytest.mark.slow
def test_the_engine_promises_what_the_native_code_takes(tmp_path: Any) -> None:
    """Element sizes and planes, on both sides of the interface."""
    header = (ROOT / "csrc/maru.h").read_text()
    (planes,) = re.findall(r"#define MARU_PLANES (\d+)", header)
    assert int(planes) == MOST_PLANES == kernel._MOST_PLANES
    if compiler() is None:
        return
    _, _, layers, paged = next(described(2))
    stored = as_stored(paged)
    taken = set()
    with closing(FakeDriver.build(tmp_path).device()) as device:
        for element in range(1, 20):
            sized = evolve(paged, element_size=element), evolve(stored, element_size=element)
            addresses = [aligned(1 << 12) for _ in layers]
            numbers = [np.frombuffer(memory, np.uint8).ctypes.data for memory in addresses]
            staging = aligned(1 << 12)
            try:
                device.bind(*sized, numbers, np.frombuffer(staging, np.uint8).ctypes.data, 512, 2).close()
                taken.add(element)
            except TransferError:
                assert KernelEngine().unsupported(*sized, "cuda") is not None
    assert taken == set(kernel._ELEMENT_SIZES) == set(INTEGERS)
