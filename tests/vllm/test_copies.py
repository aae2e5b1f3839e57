"""From orders to copies: every token of every object exactly once, and in its own place."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from maru_integrations.vllm.copies import ChunkShape, chunks_of, load_copies
from maru_integrations.vllm.metadata import LoadOp

BLOCK = 4


@given(
    per_chunk=st.integers(1, 4),
    objects=st.integers(1, 5),
    first=st.integers(0, 60),
    length=st.integers(1, 60),
    cut=st.tuples(st.integers(0, 20), st.integers(0, 20)),
)
def test_copies_are_the_tokens_of_the_load_object_by_object(
    per_chunk: int, objects: int, first: int, length: int, cut: tuple[int, int]
) -> None:
    size = per_chunk * BLOCK
    shape = ChunkShape(BLOCK, size, 64, objects)
    chunk, last = first // size, first + length
    op = LoadOp(1, "r", True, 1, chunk, first, last, (), (), (), (), ())
    chunks = range(chunks_of(op, shape))[slice(*sorted(cut))]
    buffers = [memoryview(bytes([number])) for number in range(len(chunks) * objects)]
    copies = load_copies(op, shape, chunks, buffers)
    assert [copy.buffer for copy in copies] == buffers, "in order, each object once"
    expected = [
        (chunk + place, None if objects == 1 else layer, token)
        for place in chunks
        for layer in range(objects)
        for token in range(max(first, (chunk + place) * size), min(last, (chunk + place + 1) * size))
    ]
    found = [
        (chunk + copy.chunk, copy.layer, chunk * size + token)
        for copy in copies
        for token in range(copy.first, copy.last)
    ]
    assert found == expected
