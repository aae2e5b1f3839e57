"""The comparison of objects with pages finds every byte that is not where it belongs, in both known layouts."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from benchmarks.pages import tokens_of, wrong  # noqa: E402
from maru_core.geometry import ChunkCopy  # noqa: E402

LAYERS, BLOCKS, BLOCK, HEADS, DIM, CHUNK = 3, 6, 4, 2, 5, 8
TABLE = [4, 1, 5, 2]


def value(layer: int, plane: int, token: int, head: int, dim: int) -> float:
    return ((layer * 2 + plane) * 100 + token) * HEADS * DIM + head * DIM + dim


def pages(form: str) -> list[Any]:
    """Layers whose block ``TABLE[n]`` holds tokens ``n * BLOCK`` and on."""
    shape = (2, BLOCKS, BLOCK, HEADS, DIM) if form == "flash" else (BLOCKS, HEADS, BLOCK, 2 * DIM)
    layers = [torch.full(shape, -1.0) for _ in range(LAYERS)]
    for number, layer in enumerate(layers):
        for token in range(len(TABLE) * BLOCK):
            block, place = TABLE[token // BLOCK], token % BLOCK
            for plane in range(2):
                for head in range(HEADS):
                    for dim in range(DIM):
                        found = value(number, plane, token, head, dim)
                        if form == "flash":
                            layer[plane, block, place, head, dim] = found
                        else:
                            inner = dim * BLOCK + place if plane == 0 else BLOCK * DIM + place * DIM + dim
                            layer[block, head].view(-1)[inner] = found
    return layers


def stored(chunk: int, only: int | None = None) -> bytearray:
    layers = range(LAYERS) if only is None else [only]
    flat = [
        value(layer, plane, token, head, dim)
        for plane in range(2)
        for layer in layers
        for token in range(chunk * CHUNK, (chunk + 1) * CHUNK)
        for head in range(HEADS)
        for dim in range(DIM)
    ]
    return bytearray(torch.tensor(flat, dtype=torch.float32).numpy().tobytes())


@pytest.mark.parametrize("form", ["flash", "cpu"])
@pytest.mark.parametrize(("first", "last"), [(8, 16), (10, 16), (8, 13), (9, 11)])
@pytest.mark.parametrize("only", [None, 1])
def test_any_moved_byte_that_differs_is_found_and_no_other(form: str, first: int, last: int, only: int | None) -> None:
    layers, buffer = pages(form), stored(1, only)
    more = {} if only is None else {"layer": only}
    copy = ChunkCopy(1, first, last, memoryview(buffer), **more)
    assert not wrong(layers, TABLE, copy, BLOCK)
    for place in range(0, len(buffer), 4 * HEADS * DIM):
        token = CHUNK + place // (4 * HEADS * DIM) % CHUNK
        buffer[place + 3] ^= 1
        assert wrong(layers, TABLE, copy, BLOCK) == (first <= token < last), token
        buffer[place + 3] ^= 1


def test_swapped_planes_layers_and_blocks_are_found() -> None:
    layers, buffer = pages("flash"), stored(0)
    copy = ChunkCopy(0, 0, CHUNK, memoryview(buffer))
    assert not wrong(layers, TABLE, copy, BLOCK)
    assert wrong([layers[1], layers[0], layers[2]], TABLE, copy, BLOCK)
    assert wrong([layer.flip(0) for layer in layers], TABLE, copy, BLOCK)
    assert wrong(layers, [TABLE[1], TABLE[0]], copy, BLOCK)


def test_unknown_pages_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(1, 2, 3\)"):
        tokens_of(torch.zeros(1, 2, 3), 0)
