"""Rows flow into slices: everything once, in order, within limits, and layers are complete when it is said."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from attrs import evolve
from cases import Case, cases
from hypothesis import given, settings
from hypothesis import strategies as st
from layered_checks import FORMATS, stored_as
from paged_forms import Engine

from maru_core.geometry import ChunkCopy, ObjectLayout, PagedLayout, PlaneStrides
from maru_transfer import flow
from maru_transfer.cuda_library import LOAD, MOST_BLOCKS, MOST_SEGMENTS, Job
from maru_transfer.slices import Limits, Slicer

NEVER = 1 << 60
#: Where objects lie, far enough from each other for anything.
STEP = 1 << 32


def locked(address: int, length: int):
    return [(address, address + length, True)]


def bytes_of(job: Job, stored: ObjectLayout, paged: PagedLayout, which: list[tuple[tuple[int, int, int], int | None]]):
    """(object, offset in it, layer, plane, token of the request) of every token of a row that segments move."""
    token = stored.hidden * stored.element_size
    for s in job.segments:
        for row in range(int(s["rows"])):
            address = int(s["host"]) + row * int(s["pitch"])
            number, offset = address // STEP - 1, address % STEP
            plane, layer = divmod(int(s["row"]) + row * int(s["step"]), paged.num_layers)
            for index in range(int(s["tokens"])):
                yield number, offset + index * token, layer, plane, int(s["token"]) + index


@settings(max_examples=150, deadline=None)
@given(case=cases(), data=st.data(), form=st.sampled_from(FORMATS), by_layer=st.booleans())
def test_every_token_of_every_row_is_moved_once_to_where_it_belongs(case: Case, data, form: str, by_layer: bool):
    name = data.draw(st.sampled_from(["packed per head", "MLA"]))
    engine = Engine.make(name, case.size, None)
    paged, stored = engine.paged, stored_as(engine, case.chunk_tokens, form)
    token = stored.hidden * stored.element_size
    slot = data.draw(st.sampled_from([token, 300, 1000, 20_000]).filter(lambda slot: slot >= token))
    layers = [None] if form == "chunkwise" else list(range(paged.num_layers))
    which = data.draw(st.permutations([(part, layer) for part in case.parts for layer in layers]))
    copies = [ChunkCopy(*part, memoryview(bytearray(stored.nbytes)), layer) for part, layer in which]
    addresses = [STEP * (number + 1) for number in range(len(copies))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flow, "LEAST_SLICE", data.draw(st.sampled_from([1, 500, 1 << 20])))
        slicer = Slicer(paged, stored, Limits(slot, NEVER, -1))
        job = slicer.job(LOAD, case.block_ids, copies, addresses, locked, by_layer=by_layer)
    wanted = Counter(
        (
            number,
            ((plane * stored.num_layers + index) * case.chunk_tokens + position - part[0] * case.chunk_tokens) * token,
            layer if layer is not None else index,
            plane,
            position,
        )
        for number, (part, layer) in enumerate(which)
        for plane in range(stored.num_planes)
        for index in range(stored.num_layers)
        for position in range(part[1], part[2])
    )
    assert Counter(bytes_of(job, stored, paged, which)) == wanted
    check_slices(job, stored, slot, case.size.BS)
    if by_layer:
        check_layers(job, paged.num_layers)


def check_slices(job: Job, stored: ObjectLayout, slot: int, block_size: int) -> None:
    token = stored.hidden * stored.element_size
    numbers = job.segments["slice"].astype(int)
    assert numbers.tolist() == sorted(numbers.tolist())
    assert set(numbers.tolist()) == set(range(len(set(numbers.tolist()))))
    for number in set(numbers.tolist()):
        part = job.segments[numbers == number]
        ends = part["offset"].astype(int) + part["rows"].astype(int) * part["tokens"] * token
        assert (part["offset"] % 16 == 0).all()
        assert part["offset"][0] == 0
        assert (part["offset"][1:] >= ends[:-1]).all()
        assert ends[-1] <= slot
        assert len(part) <= MOST_SEGMENTS
        places = (part["token"] + part["tokens"] - 1) // block_size - part["token"] // block_size + 1
        assert places.sum() <= MOST_BLOCKS


def check_layers(job: Job, layers: int) -> None:
    """Complete is what no later slice moves; each layer as early as that."""
    if not len(job.segments):
        return
    layer = job.segments["row"] % layers
    assert (np.diff(layer.astype(int)) >= 0).all()
    for number in np.unique(job.segments["slice"]):
        here, later = job.segments["slice"] == number, job.segments["slice"] > number
        assert set(job.segments["layers"][here].tolist()) == {int(layer[later].min()) if later.any() else layers}


@settings(max_examples=100, deadline=None)
@given(
    widths=st.lists(st.integers(1, 40), min_size=1, max_size=60),
    rows=st.integers(1, 4),
    block_size=st.sampled_from([1, 3, 16]),
    slot=st.integers(64, 4000),
    layers=st.integers(0, 3),
)
def test_slices_stay_within_limits_however_shares_differ(widths, rows, block_size, slot, layers):
    count = len(widths)
    zeros = np.zeros(count, np.int64)
    layer = np.sort(np.arange(count) % (layers or 1))
    tokens = np.array(widths, np.int64)
    host = np.arange(1, count + 1, dtype=np.int64) * STEP
    shares = flow.Shares(host, np.cumsum(tokens) - tokens, tokens, layer, zeros, layer, rows, layers or 1, 1 << 20)
    segments = flow.Cutter(slot, 16, block_size, layers).cut(shares)
    job = Job(LOAD, segments, zeros, 0, zeros)
    check_slices(job, ObjectLayout(1, 1, 64, 16, 1), slot, block_size)
    moved = int((segments["rows"].astype(int) * segments["tokens"]).sum())
    assert moved == int(tokens.sum()) * rows


LLAMA = PagedLayout(tuple(PlaneStrides(p << 30, 16384, 1024, 128, 1) for p in range(2)), 32, 2048, 16, 8, 128, 2)
CHUNKWISE = ObjectLayout(2, 32, 256, 1024, 2)
LAYERWISE = evolve(CHUNKWISE, num_layers=1)


def job_of(stored: ObjectLayout, chunks: int, slot: int, *, by_layer: bool) -> Job:
    buffer = memoryview(np.empty(stored.nbytes, np.uint8))
    layers = [None] if stored is CHUNKWISE else list(range(32))
    copies = [ChunkCopy(c, c * 256, c * 256 + 256, buffer, layer) for c in range(chunks) for layer in layers]
    slicer = Slicer(LLAMA, stored, Limits(slot, NEVER, -1))
    addresses = [STEP + number * stored.nbytes for number in range(len(copies))]
    return slicer.job(LOAD, list(range(1, 1 + 16 * chunks)), copies, addresses, locked, by_layer=by_layer)


@pytest.mark.parametrize("stored", [CHUNKWISE, LAYERWISE], ids=FORMATS)
@pytest.mark.parametrize("by_layer", [False, True])
def test_a_long_request_is_few_slices_in_every_order(stored: ObjectLayout, by_layer: bool):
    """16,384 tokens: what a request costs a thread is what a slice costs, times this."""
    job = job_of(stored, 64, 32 << 20, by_layer=by_layer)
    assert int(job.segments["slice"][-1]) + 1 == 64
    job = job_of(stored, 64, 28 << 20, by_layer=by_layer)
    assert int(job.segments["slice"][-1]) + 1 in (74, 75)


def test_the_first_layer_does_not_wait_for_the_second():
    job = job_of(CHUNKWISE, 64, 28 << 20, by_layer=True)
    complete = [int(job.segments["layers"][job.segments["slice"] == number][0]) for number in range(5)]
    assert complete == [0, 0, 1, 1, 1]


def test_slices_of_layers_that_are_small_hold_several_but_no_more_than_is_worth_it():
    job = job_of(CHUNKWISE, 2, 32 << 20, by_layer=True)
    sizes = np.bincount(job.segments["slice"], (job.segments["rows"] * job.segments["tokens"] * 2048).astype(float))
    assert sizes.max() <= flow.LEAST_SLICE
    assert len(sizes) == 9
