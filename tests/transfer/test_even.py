"""What is copied from a template is what would have been cut, whichever requests came before."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_forms import Engine, Size

from maru_core.batches import ChunkCopies, Rooms
from maru_core.errors import TransferError
from maru_core.geometry import ObjectLayout, PagedLayout, PlaneStrides
from maru_transfer import even, flow
from maru_transfer.cuda_library import LOAD, STORE, Job
from maru_transfer.slices import Limits, Slicer

NEVER = 1 << 60
BUFFER = memoryview(bytearray(1 << 22))


def spans_of(edges: list[int]) -> Any:
    def spans(address: int, length: int) -> list[tuple[int, int, bool]]:
        points = [address, *(edge for edge in edges if address < edge < address + length), address + length]
        return [(first, last, True) for first, last in itertools.pairwise(points)]

    return spans


def same(left: Job, right: Job) -> None:
    assert left.segments.dtype == right.segments.dtype
    np.testing.assert_array_equal(left.segments, right.segments)
    np.testing.assert_array_equal(left.blocks, right.blocks)
    assert left.blocks.dtype == right.blocks.dtype
    assert left.cuts.tolist() == right.cuts.tolist()
    assert left.cuts.dtype == right.cuts.dtype
    assert (left.direction, left.first_place) == (right.direction, right.first_place)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), layerwise=st.booleans(), slot=st.integers(100, 3000), kept=st.sampled_from([1, 200, 1 << 17]))
def test_a_template_gives_what_is_cut(data: st.DataObject, layerwise: bool, slot: int, kept: int) -> None:
    per_chunk = data.draw(st.integers(1, 3))
    size = Size(data.draw(st.integers(1, 4)), 40, data.draw(st.sampled_from([1, 2, 4])), 1, 4)
    engine = Engine.make("packed per head", size, None)
    stored: ObjectLayout = engine.stored(per_chunk * size.BS, layerwise=layerwise)
    slicer = Slicer(engine.paged, stored, Limits(slot, NEVER, -1))
    objects = size.L if layerwise else 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flow, "LEAST_SLICE", data.draw(st.sampled_from([1, 500, 1 << 20])))
        patch.setattr(even, "_MOST_SEGMENTS", kept)
        for _ in range(data.draw(st.integers(1, 5))):
            start = data.draw(st.integers(0, 2))
            chunks = range(start, start + data.draw(st.integers(1, 9)))
            table = data.draw(st.permutations(range(40)))[: chunks.stop * per_chunk]
            numbers = range(chunks.start * objects, chunks.stop * objects)
            entries = data.draw(st.lists(st.integers(0, 99), min_size=len(numbers), max_size=len(numbers)))
            rooms = Rooms(BUFFER, entries, 0, stored.nbytes, stored.nbytes)
            low, high = chunks.start * stored.chunk_tokens, chunks.stop * stored.chunk_tokens
            first = data.draw(st.integers(low - 2, low + 1))
            last = data.draw(st.integers(max(first, high - 1), high + 2))
            copies = ChunkCopies(numbers, objects, stored.chunk_tokens, rooms, first, last)
            addresses = [4096 + entry * stored.nbytes for entry in entries]
            edges = data.draw(st.lists(st.integers(4000, 4096 + 100 * stored.nbytes), unique=True, max_size=3))
            way = data.draw(st.sampled_from([LOAD, STORE])), table
            spans, by_layer = spans_of(sorted(edges)), data.draw(st.booleans())
            found = slicer.job(*way, copies, addresses, spans, by_layer=by_layer)
            same(found, slicer.job(*way, list(copies), addresses, spans, by_layer=by_layer))
            assert (found.owners is not None) == (first <= low and last >= high), "the template was used"
            if found.owners is None:
                continue
            begins = np.array(addresses)[found.owners]
            host = found.segments["host"].astype(np.int64)
            assert ((begins <= host) & (host < begins + stored.nbytes)).all()
            assert (np.diff(found.owners) >= 0).all() or by_layer
            found.segments["host"] = 0  # nobody else's


LLAMA = PagedLayout(tuple(PlaneStrides(p << 30, 16384, 1024, 128, 1) for p in range(2)), 32, 2048, 16, 8, 128, 2)
CHUNKWISE = ObjectLayout(2, 32, 256, 1024, 2)
POOL = memoryview(np.empty(4 * CHUNKWISE.nbytes, np.uint8))
TABLE = list(range(1, 65))
ROOMS = Rooms(POOL, range(4), 0, CHUNKWISE.nbytes, CHUNKWISE.nbytes)
USUAL = ChunkCopies(range(4), 1, 256, ROOMS)
LIMITS = Limits(32 << 20, NEVER, -1)


@pytest.mark.parametrize(
    ("limits", "copies", "paged"),
    [
        (evolve(LIMITS, direct=512 << 10), USUAL, LLAMA),
        (evolve(LIMITS, mapped=4 * CHUNKWISE.nbytes), USUAL, LLAMA),
        (LIMITS, ChunkCopies(range(4), 1, 256, ROOMS, first=1), LLAMA),
        (LIMITS, ChunkCopies(range(4), 1, 256, ROOMS, last=1023), LLAMA),
        (LIMITS, ChunkCopies([0, 1, 2, 3], 1, 256, ROOMS), LLAMA),
        (LIMITS, ChunkCopies(range(4), 1, 256, list(ROOMS)), LLAMA),
        (LIMITS, USUAL, evolve(LLAMA, block_size=96)),
    ],
)
def test_other_requests_are_cut_as_ever(limits: Limits, copies: ChunkCopies, paged: PagedLayout) -> None:
    slicer = Slicer(paged, CHUNKWISE, limits)
    addresses = [(4 + number) << 30 for number in range(4)]
    found = slicer.job(LOAD, TABLE, copies, addresses, spans_of([]))
    assert found.owners is None
    same(found, slicer.job(LOAD, TABLE, list(copies), addresses, spans_of([])))


def test_memory_that_is_not_locked_is_told_apart() -> None:
    def half(address: int, length: int) -> list[tuple[int, int, bool]]:
        return [(address, address + length // 2, True), (address + length // 2, address + length, False)]

    slicer = Slicer(LLAMA, CHUNKWISE, LIMITS)
    addresses = [(4 + number) << 30 for number in range(4)]
    found = slicer.job(LOAD, TABLE, USUAL, addresses, half)
    assert found.owners is None
    same(found, slicer.job(LOAD, TABLE, list(USUAL), addresses, half))


@settings(max_examples=200, deadline=None)
@given(place=st.integers(0, 63), block=st.sampled_from([-1, 0, 63, 2048, 1 << 40, 1 << 70]), short=st.booleans())
def test_what_is_wrong_with_a_table_is_told_in_the_same_words(place: int, block: int, short: bool) -> None:
    table = [*TABLE[:place], block, *TABLE[place + 1 :]][: 63 if short else 64]
    slicer = Slicer(LLAMA, CHUNKWISE, LIMITS)
    refusals = []
    for copies in (USUAL, list(USUAL)):
        try:
            slicer.job(LOAD, table, copies, [(4 + number) << 30 for number in range(4)], spans_of([]))
            refusals.append("")
        except TransferError as error:
            refusals.append(str(error))
    assert refusals[0] == refusals[1]
    assert refusals[0] or not (short or block not in (0, place + 1))


@pytest.mark.parametrize(
    ("copies", "culprit"),
    [
        (ChunkCopies(range(4), 1, 256, Rooms(POOL, range(4), 0, 64, 128)), "buffer of 128 bytes"),
        (ChunkCopies(range(4), 2, 256, ROOMS), "names layer 0"),
        (ChunkCopies(range(4), 1, 512, ROOMS), r"tokens \[0, 512\)"),
    ],
)
def test_what_another_transfer_moves_is_refused(copies: ChunkCopies, culprit: str) -> None:
    with pytest.raises(TransferError, match=culprit):
        Slicer(LLAMA, CHUNKWISE, LIMITS).job(LOAD, TABLE, copies, [1 << 30] * 4, spans_of([]))
