"""Slices are pure arithmetic: what was asked for is covered once, within limits, and travels as it is meant to."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from attrs import evolve
from cases import Case, cases
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_forms import FORMS, Engine, Size

from maru_core.errors import TransferError
from maru_core.geometry import ChunkCopy, ObjectLayout, PagedLayout, PlaneStrides
from maru_transfer.cuda_library import (
    BOUNCED,
    DIRECT,
    LOAD,
    MAPPED,
    MOST_BLOCKS,
    MOST_SEGMENTS,
    STAGED,
    STORE,
    Job,
)
from maru_transfer.flow import ALIGNMENT
from maru_transfer.plan import plan_pieces
from maru_transfer.slices import Limits, Slicer

NEVER = 1 << 60
#: Where objects lie, far enough from each other for anything.
STEP = 1 << 32


def locked(address: int, length: int):
    return [(address, address + length, True)]


def job_of(case: Case, name: str, limits: Limits, spans=locked) -> tuple[Slicer, Job]:
    engine = case.engine(name, None)
    stored = engine.stored(case.chunk_tokens)
    copies = [ChunkCopy(*part, memoryview(bytearray(stored.nbytes))) for part in case.parts]
    slicer = Slicer(engine.paged, stored, limits)
    addresses = [STEP * (number + 1) for number in range(len(copies))]
    return slicer, slicer.job(STORE, case.block_ids, copies, addresses, spans)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=60, deadline=None)
@given(case=cases(), slot=st.integers(0, 600), way=st.sampled_from(["staged", "direct", "mapped"]))
def test_segments_cover_every_byte_once_and_slices_stay_within_limits(name: str, case: Case, slot: int, way: str):
    engine = case.engine(name, None)
    stored = engine.stored(case.chunk_tokens)
    token = stored.hidden * stored.element_size
    limits = Limits(max(slot, token), 1 if way == "direct" else NEVER, NEVER if way == "mapped" else -1)
    _, job = job_of(case, name, limits)
    touched: dict[int, int] = {}
    for s in job.segments:
        for row in range(s["rows"]):
            start = int(s["host"]) + row * stored.chunk_tokens * token
            for byte in range(int(s["tokens"]) * token):
                touched[start + byte] = touched.get(start + byte, 0) + 1
        number = int(s["host"]) // STEP - 1
        inside = int(s["host"]) % STEP
        row, rest = divmod(inside, stored.chunk_tokens * token)
        assert (row, rest % token) == (s["row"], 0)
        assert rest // token + case.parts[number][0] * stored.chunk_tokens == s["token"]
    wanted = {
        STEP * (number + 1) + (row * stored.chunk_tokens + position - chunk * stored.chunk_tokens) * token + byte
        for number, (chunk, first, last) in enumerate(case.parts)
        for row in range(stored.num_planes * stored.num_layers)
        for position in range(first, last)
        for byte in range(token)
    }
    assert touched == dict.fromkeys(wanted, 1)
    for slice_ in np.unique(job.segments["slice"]):
        part = job.segments[job.segments["slice"] == slice_]
        assert len(set(part["way"].tolist())) == 1
        assert len(part) <= MOST_SEGMENTS
        ends = part["offset"].astype(int) + part["rows"].astype(int) * part["tokens"] * token
        assert (part["offset"] % 16 == 0).all()
        assert (part["offset"][1:] >= ends[:-1]).all()
        assert ends[-1] <= limits.slot
        places = (part["token"] + part["tokens"] - 1) // engine.size.BS - part["token"] // engine.size.BS + 1
        assert places.sum() <= MOST_BLOCKS
    assert (np.diff(job.segments["slice"].astype(int)) >= 0).all()
    for place, block in enumerate(job.blocks.tolist()):
        assert case.block_ids[job.first_place + place] == block


LLAMA = PagedLayout(tuple(PlaneStrides(p << 30, 16384, 1024, 128, 1) for p in range(2)), 32, 2048, 16, 8, 128, 2)
STORED = ObjectLayout(2, 32, 256, 1024, 2)
BUFFER = memoryview(np.empty(STORED.nbytes, np.uint8))
IN_A_ROW = list(range(1, 1025))


def ways(
    limits: Limits, table, parts=((0, 0, 256), (1, 256, 512)), spans=locked, paged=LLAMA, address=STEP
) -> list[int]:
    copies = [ChunkCopy(*part, BUFFER) for part in parts]
    addresses = [address * (number + 1) for number in range(len(copies))]
    job = Slicer(paged, STORED, limits).job(LOAD, table, copies, addresses, spans)
    return sorted(set(job.segments["way"].tolist()))


@pytest.mark.parametrize(("threshold", "way"), [(512 << 10, DIRECT), ((512 << 10) + 1, STAGED)])
def test_runs_go_straight_from_the_threshold_on(threshold, way):
    assert ways(Limits(8 << 20, threshold, -1), IN_A_ROW) == [way]


def test_the_average_run_counts():
    pairs = [block for first in range(1, 1024, 2) for block in (first + 1, first)]
    assert ways(Limits(8 << 20, 32 << 10, -1), pairs) == [DIRECT]
    assert ways(Limits(8 << 20, (32 << 10) + 1, -1), pairs) == [STAGED]
    pairs = [block for first in range(1, 1024, 4) for block in (first + 2, first + 3, first, first + 1)]
    assert ways(Limits(8 << 20, 64 << 10, -1), pairs) == [DIRECT]


def test_pages_with_gaps_are_never_copied_straight():
    apart = tuple(evolve(plane, token=2048, block=32768) for plane in LLAMA.planes)
    assert ways(Limits(8 << 20, 1, -1), IN_A_ROW, paged=evolve(LLAMA, planes=apart, num_blocks=1025)) == [STAGED]


def test_blocks_with_gaps_between_them_are_runs_of_their_own():
    apart = tuple(evolve(plane, block=32768) for plane in LLAMA.planes)
    paged = evolve(LLAMA, planes=apart, num_blocks=1025)
    assert ways(Limits(8 << 20, 32 << 10, -1), IN_A_ROW, paged=paged) == [DIRECT]
    assert ways(Limits(8 << 20, (32 << 10) + 1, -1), IN_A_ROW, paged=paged) == [STAGED]


def test_requests_up_to_the_threshold_need_no_copy_engine():
    part = ((0, 3, 7),)
    size = 4 * 2048 * 64
    assert ways(Limits(8 << 20, NEVER, size), IN_A_ROW, part) == [MAPPED]
    assert ways(Limits(8 << 20, NEVER, size - 1), IN_A_ROW, part) == [STAGED]
    assert ways(Limits(8 << 20, NEVER, size), IN_A_ROW, part, address=STEP + ALIGNMENT // 2) == [STAGED]


def test_memory_that_is_locked_in_part_is_bounced():
    def half(address: int, length: int):
        return [(address, address + length // 2, True), (address + length // 2, address + length, False)]

    assert ways(Limits(8 << 20, 1, NEVER), IN_A_ROW, spans=half) == [BOUNCED]


def test_where_registrations_meet_is_told():
    edges = [STEP + 4096, 3 * STEP + 4096]

    def three(address: int, length: int):
        points = [address, *(edge for edge in edges if address < edge < address + length), address + length]
        return [(first, last, True) for first, last in itertools.pairwise(points)]

    def with_a_gap(address: int, length: int):
        found = three(address, length)
        return found if length == STORED.nbytes else [*found[:-1], (*found[-1][:2], False)]

    copies = [ChunkCopy(0, 0, 256, BUFFER), ChunkCopy(1, 256, 512, BUFFER)]
    slicer = Slicer(LLAMA, STORED, Limits(8 << 20, NEVER, -1))
    job = slicer.job(STORE, IN_A_ROW, copies, [3 * STEP, STEP], three)
    assert job.cuts.tolist() == edges
    # Where something in between is not locked, it is not known whether objects are of one registration.
    job = slicer.job(STORE, IN_A_ROW, copies, [3 * STEP, STEP], with_a_gap)
    assert job.cuts.tolist() == [STEP, edges[0], 3 * STEP, edges[1]]
    assert set(job.segments["way"].tolist()) == {STAGED}


def test_slices_are_filled_across_the_edges_of_objects():
    copies = [ChunkCopy(chunk, chunk * 256, chunk * 256 + 256, BUFFER) for chunk in range(2)]
    job = Slicer(LLAMA, STORED, Limits(20 << 20, NEVER, -1)).job(STORE, IN_A_ROW, copies, [STEP, 2 * STEP], locked)
    assert [(int(s["slice"]), int(s["row"]), int(s["rows"])) for s in job.segments] == [
        (0, 0, 40),
        (1, 40, 24),
        (1, 0, 16),
        (2, 16, 40),
        (3, 56, 8),
    ]


def test_small_objects_share_slices():
    paged, stored = evolve(LLAMA, num_layers=1), evolve(STORED, num_layers=1)
    buffer = memoryview(np.empty(stored.nbytes, np.uint8))
    copies = [ChunkCopy(chunk, chunk * 256, chunk * 256 + 256, buffer) for chunk in range(20)]
    job = Slicer(paged, stored, Limits(8 << 20, NEVER, -1)).job(LOAD, IN_A_ROW, copies, [STEP] * 20, locked)
    assert np.bincount(job.segments["slice"]).tolist() == [8, 8, 4]


def test_a_slice_that_holds_no_token_is_refused():
    with pytest.raises(TransferError, match="holds no token of 2048 bytes"):
        Slicer(LLAMA, STORED, Limits(2047, 1, 1))


@settings(max_examples=300, deadline=None)
@given(case=cases(), data=st.data(), direction=st.sampled_from([LOAD, STORE]))
def test_what_is_refused_is_what_the_plan_refuses(case: Case, data, direction: int):
    """One change of a sound request: both refuse it in the same words, or neither does."""
    size: Size = case.size
    engine = Engine.make("packed per head", size, None)
    stored = engine.stored(case.chunk_tokens)
    table, parts = list(case.block_ids), list(case.parts)
    layer = data.draw(st.sampled_from([None, None, None, 0, 1]))
    if data.draw(st.booleans()):
        index = data.draw(st.sampled_from(range(len(table))))
        table[index] = data.draw(st.integers(-2, size.NB + 1))
    else:
        index = data.draw(st.sampled_from(range(len(parts))))
        part = list(parts[index])
        part[data.draw(st.integers(0, 2))] += data.draw(st.integers(-3, 3))
        parts[index] = tuple(part)
    copies = [ChunkCopy(*part, memoryview(bytearray(stored.nbytes)), layer) for part in parts]
    refusals = []
    for attempt in (
        lambda: plan_pieces(engine.paged, stored, table, copies, reads_pages=direction == STORE),
        lambda: Slicer(engine.paged, stored, Limits(1 << 20, NEVER, -1)).job(
            direction, table, copies, [STEP] * len(copies), locked
        ),
    ):
        try:
            attempt()
            refusals.append("")
        except TransferError as error:
            refusals.append(str(error))
    assert refusals[0] == refusals[1]
