"""Requests in columns are ordinary sequences of what they stand for, and say rightly when they are whole chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maru_core.batches import ChunkCopies, Rooms

BUFFER = memoryview(bytearray(range(250)) * 4)


@given(entries=st.lists(st.integers(0, 40), max_size=20), origin=st.integers(0, 50), part=st.slices(20))
def test_rooms_are_parts_of_their_buffer(entries: list[int], origin: int, part: slice) -> None:
    rooms = Rooms(BUFFER, entries, origin, 20, 30)
    expected = [bytes(BUFFER[origin + 20 * entry :][:30]) for entry in entries]
    assert [bytes(room) for room in rooms] == expected
    assert [bytes(rooms[index]) for index in range(len(rooms))] == expected
    assert [bytes(room) for room in rooms[part]] == expected[part]
    assert not any(room.readonly for room in rooms)


@st.composite
def numbers(draw: Any) -> Sequence[int]:
    first = draw(st.integers(0, 8))
    some = range(first, first + draw(st.integers(0, 12)), draw(st.sampled_from([1, 1, 1, 2])))
    return draw(st.sampled_from([some, list(some), list(reversed(some))]))


@given(numbers=numbers(), objects=st.integers(1, 4), size=st.integers(1, 4), first=st.integers(0, 12), data=st.data())
def test_copies_are_one_for_each_object(
    numbers: Sequence[int], objects: int, size: int, first: int, data: st.DataObject
) -> None:
    last = data.draw(st.integers(first, first + 60))
    buffers = [memoryview(bytes([number])) for number in numbers]
    copies = ChunkCopies(numbers, objects, size, buffers, first, last)
    assert len(copies) == len(numbers)
    found = [(copy.chunk, copy.layer, range(copy.first, copy.last), copy.buffer) for copy in copies]
    chunks = [number // objects for number in numbers]
    assert [(chunk, layer, buffer) for chunk, layer, _, buffer in found] == [
        (number // objects, number % objects if objects > 1 else None, buffer)
        for number, buffer in zip(numbers, buffers, strict=True)
    ]
    tokens = [[t for t in range(chunk * size, chunk * size + size) if first <= t < last] for chunk in chunks]
    assert [list(moved) for _, _, moved, _ in found] == tokens
    assert all(copies[index] is copy for index, copy in enumerate(copies))
    assert copies[1:3] == list(copies)[1:3]

    pairs = [(number // objects, number % objects) for number in numbers]
    whole = copies.whole_chunks()
    everything = [(chunk, layer) for chunk in whole or () for layer in range(objects)]
    if whole is not None:
        assert pairs == everything
        assert all(len(part) == size for part in tokens)
    elif isinstance(numbers, range) and numbers.step == 1 and pairs:
        low, high = min(chunks), max(chunks) + 1
        complete = [(chunk, layer) for chunk in range(low, high) for layer in range(objects)]
        assert pairs != complete or not all(len(part) == size for part in tokens)


def test_a_buffer_for_each_object() -> None:
    with pytest.raises(ValueError, match="2 buffers for 3 objects"):
        ChunkCopies(range(3), 1, 4, [BUFFER, BUFFER])
