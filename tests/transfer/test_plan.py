"""Copy plans, replayed byte by byte against a reader that knows nothing of them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
from attrs import evolve
from cases import Case, any_cases
from hypothesis import given, settings
from paged_forms import FORMS, Engine, Size

from maru_core.errors import TransferError
from maru_core.geometry import ChunkCopy, ObjectLayout, PlaneStrides
from maru_transfer.plan import Piece, extent, mismatch, plan_pieces

SIZE = Size(L=2, NB=5, BS=4, NH=3, HS=2)


def pieces_for(case: Case, engine: Engine) -> list[Piece]:
    stored = case.stored(engine)
    copies = case.copies(memoryview(bytearray(stored.nbytes)) for _ in case.parts)
    return plan_pieces(engine.paged, stored, case.block_ids, copies)


def elements_of(engine: Engine, stored: ObjectLayout, piece: Piece) -> Iterator[tuple[int, int, int]]:
    """Layer of each element of a piece, and where it lies: behind the layer's first one, and behind the object's."""
    paged = engine.paged
    layers = range(paged.num_layers) if piece.layer is None else [piece.layer]
    for number, plane in enumerate(paged.planes):
        for row, layer in enumerate(layers):
            for index, head, dim in product(range(piece.count), range(paged.num_heads), range(paged.head_size)):
                there = plane.offset + piece.block * plane.block + (piece.slot + index) * plane.token
                token = (number * stored.num_layers + row) * stored.chunk_tokens + piece.token + index
                here = (token * paged.num_heads + head) * paged.head_size + dim
                yield layer, there + head * plane.head + dim * plane.dim, here


def replay(engine: Engine, case: Case, objects: list[np.ndarray], *, store: bool) -> None:
    """Execute pieces in the dumbest way, and see that no element of pages or objects is touched twice."""
    pages = engine.memory.reshape(-1)
    touched_pages: set[int] = set()
    touched_objects: set[tuple[int, int]] = set()
    for piece in pieces_for(case, engine):
        host = objects[piece.copy].reshape(-1)
        for layer, place, here in elements_of(engine, case.stored(engine), piece):
            there = layer * engine.form.layer(engine.size) + place
            assert there not in touched_pages
            assert (piece.copy, here) not in touched_objects
            touched_pages.add(there)
            touched_objects.add((piece.copy, here))
            if store:
                host[here] = pages[there]
            else:
                pages[there] = host[here]


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=40, deadline=None)
@given(case=any_cases())
def test_replaying_a_plan_stores_what_the_naive_reader_reads(case: Case, name: str):
    engine = case.engine(name, 7)
    expected = case.objects(engine)
    objects = [np.full_like(array, 0xAB) for array in expected]
    replay(engine, case, objects, store=True)
    for got, wanted in zip(objects, expected, strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=40, deadline=None)
@given(case=any_cases())
def test_replaying_a_plan_loads_exactly_the_slots_that_were_asked_for(case: Case, name: str):
    objects = case.objects(case.engine(name, 7))
    target, expected = case.engine(name, None), case.engine(name, None)
    case.write(expected, objects)
    replay(target, case, objects, store=False)
    np.testing.assert_array_equal(target.memory, expected.memory)


@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=40, deadline=None)
@given(case=any_cases())
def test_no_piece_reaches_past_the_extent_of_a_layer(case: Case, name: str):
    engine = case.engine(name, None)
    end = extent(engine.paged)
    assert engine.layer_bytes(case.size.L - 1) + end * case.size.element == engine.memory.nbytes
    for piece in pieces_for(case, engine):
        assert all(0 <= place < end for _, place, _ in elements_of(engine, case.stored(engine), piece))


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("planes-first NHD", 1),  # two neighbouring blocks are one stretch
        ("MLA", 1),
        ("packed per token", 1),
        ("blocks-first NHD", 2),
        ("planes-first HND", 2),
        ("packed per head", 2),
    ],
)
def test_pieces_are_as_few_as_the_layout_allows(name: str, count: int):
    engine = Engine.make(name, SIZE, None)
    assert len(pieces_for(Case(SIZE, 8, [2, 3], [(0, 0, 8)]), engine)) == count


def test_blocks_that_only_look_like_neighbours_are_not_joined():
    engine = Engine.make("planes-first NHD", SIZE, None)
    buffer = memoryview(bytearray(engine.stored(8).nbytes))
    pieces = plan_pieces(engine.paged, engine.stored(8), [3, 2], [ChunkCopy(0, 0, 8, buffer)])
    assert [(piece.block, piece.count) for piece in pieces] == [(3, 4), (2, 4)]


def test_any_number_of_neighbouring_blocks_is_one_piece():
    engine = Engine.make("planes-first NHD", SIZE, None)
    buffer = memoryview(bytearray(engine.stored(12).nbytes))
    pieces = plan_pieces(engine.paged, engine.stored(12), [2, 3, 4], [ChunkCopy(0, 1, 11, buffer)])
    assert [(piece.block, piece.slot, piece.token, piece.count) for piece in pieces] == [(2, 1, 1, 10)]


def test_two_copies_that_continue_each_other_stay_apart():
    engine = Engine.make("planes-first NHD", SIZE, None)
    stored = engine.stored(4)
    copies = [ChunkCopy(c, c * 4, c * 4 + 4, memoryview(bytearray(stored.nbytes))) for c in range(2)]
    assert [piece.copy for piece in plan_pieces(engine.paged, stored, [2, 3], copies)] == [0, 1]


def plan_one(block_ids, chunk=0, first=0, last=8, nbytes=None, engine=None, buffer=None):
    engine = engine or Engine.make("packed per head", SIZE, None)
    stored = engine.stored(8)
    buffer = buffer if buffer is not None else memoryview(bytearray(stored.nbytes if nbytes is None else nbytes))
    return plan_pieces(engine.paged, stored, block_ids, [ChunkCopy(chunk, first, last, buffer)])


@pytest.mark.parametrize(
    ("arguments", "culprit"),
    [
        ({"block_ids": [1, 5]}, "block 5 at place 1 .* not one of 5"),
        ({"block_ids": [-1, 1]}, "block -1 at place 0"),
        ({"block_ids": [1]}, r"tokens \[0, 8\).* holds 1 blocks of 4"),
        ({"block_ids": [1, 1]}, "block 1 stands at places 0 and 1"),
        ({"block_ids": [1, 2], "last": 9}, r"tokens \[0, 9\), but chunk 0 holds \[0, 8\)"),
        ({"block_ids": [1, 2, 3, 4], "chunk": 1, "first": 7}, r"tokens \[7, 8\), but chunk 1 holds \[8, 16\)"),
        ({"block_ids": [1, 2], "first": 5, "last": 4}, r"tokens \[5, 4\)"),
        ({"block_ids": [1, 2], "first": -1}, r"tokens \[-1, 8\)"),
        ({"block_ids": [1, 2], "chunk": -1, "first": -8, "last": 0}, "chunk -1"),
        ({"block_ids": [1, 2], "nbytes": 10}, "a buffer of 10 bytes, an object is 384"),
        ({"block_ids": [1, 2], "nbytes": 385}, "a buffer of 385 bytes"),
        ({"block_ids": [1, 2], "buffer": memoryview(bytearray(768))[::2]}, "384 contiguous"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(arguments, culprit):
    with pytest.raises(TransferError, match=culprit):
        plan_one(**arguments)


def test_a_block_that_is_read_may_stand_at_several_places():
    engine = Engine.make("packed per head", SIZE, None)
    stored = engine.stored(8)
    copies = [ChunkCopy(c, c * 8, c * 8 + 8, memoryview(bytearray(stored.nbytes))) for c in range(2)]
    pieces = plan_pieces(engine.paged, stored, [1, 4, 1, 3], copies, reads_pages=True)
    assert [(piece.copy, piece.block) for piece in pieces] == [(0, 1), (0, 4), (1, 1), (1, 3)]


def test_a_released_buffer_is_refused():
    buffer = memoryview(bytearray(384))
    buffer.release()
    with pytest.raises(TransferError, match="was released"):
        plan_one([1, 2], buffer=buffer)


def test_parts_of_one_chunk_may_come_as_two_copies():
    engine = Engine.make("packed per head", SIZE, None)
    buffer = memoryview(bytearray(384))
    copies = [ChunkCopy(0, 0, 3, buffer), ChunkCopy(0, 3, 8, buffer)]
    pieces = plan_pieces(engine.paged, engine.stored(8), [1, 2], copies)
    assert [(piece.block, piece.slot, piece.token, piece.count) for piece in pieces] == [
        (1, 0, 0, 3),
        (1, 3, 3, 1),
        (2, 0, 4, 4),
    ]


@pytest.mark.parametrize("name", FORMS)
def test_the_layers_of_a_chunk_hold_together_what_a_whole_object_does(name):
    """Layer by layer in a shuffled order: bytes go by the layer that is named, never by the place of a copy."""
    engine = Engine.make(name, SIZE, 7)
    case = Case(SIZE, 8, [2, 3, 1, 4], [(1, 8, 16), (0, 0, 8), (1, 8, 16), (0, 0, 8)], [0, 1, 1, 0])
    pieces = [np.zeros_like(array) for array in case.objects(engine)]
    replay(engine, case, pieces, store=True)
    for chunk, places in ((0, (3, 1)), (1, (0, 2))):
        whole = engine.naive_object([2, 3, 1, 4], chunk, chunk * 8, chunk * 8 + 8, 8)
        np.testing.assert_array_equal(np.concatenate([pieces[place] for place in places], 1), whole)


@pytest.mark.parametrize(
    ("layerwise", "layer", "culprit"),
    [
        (True, None, r"copy 0 \(chunk 0\) names no layer, but an object holds one of 2"),
        (True, 2, "names layer 2, but there are 2"),
        (True, -1, "names layer -1, but there are 2"),
        (False, 0, "names layer 0, but an object holds all 2"),
    ],
)
def test_a_copy_names_the_layer_that_its_object_holds_and_no_other(layerwise, layer, culprit):
    engine = Engine.make("packed per head", SIZE, None)
    stored = engine.stored(8, layerwise=layerwise)
    with pytest.raises(TransferError, match=culprit):
        plan_pieces(engine.paged, stored, [1, 2], [ChunkCopy(0, 0, 8, memoryview(bytearray(stored.nbytes)), layer)])


@pytest.mark.parametrize("layers", [None, [0]])
def test_a_model_of_one_layer_is_the_same_in_both_formats(layers: list[int] | None):
    size = evolve(SIZE, L=1)
    case = Case(size, 8, [1, 2], [(0, 0, 8)], layers)
    engine = case.engine("packed per head", 7)
    (expected,) = Case(size, 8, [1, 2], [(0, 0, 8)]).objects(engine)
    found = np.zeros_like(expected)
    replay(engine, case, [found], store=True)
    np.testing.assert_array_equal(found, expected)


def test_an_empty_part_needs_no_blocks():
    assert plan_one([], first=4, last=4) == []


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"num_planes": 1}, "planes"),
        ({"num_layers": 3}, "2 layers, the stored objects have 3"),
        ({"num_layers": 0}, "2 layers, the stored objects have 0"),
        ({"hidden": 7}, "elements per token"),
        ({"element_size": 4}, "bytes per element"),
        ({"chunk_tokens": 0}, "not positive"),
    ],
)
def test_objects_of_another_shape_are_a_mismatch(change, shown):
    engine = Engine.make("CPU pages", SIZE, None)
    assert shown in (mismatch(engine.paged, evolve(engine.stored(8), **change)) or "")


def test_negative_strides_are_a_mismatch():
    engine = Engine.make("MLA", SIZE, None)
    paged = evolve(engine.paged, planes=(PlaneStrides(0, -1, 1, 1, 1),))
    assert "negative" in (mismatch(paged, engine.stored(8)) or "")


def test_every_form_matches_its_objects():
    for name in FORMS:
        engine = Engine.make(name, SIZE, None)
        assert mismatch(engine.paged, engine.stored(8)) is None
        assert mismatch(engine.paged, engine.stored(8, layerwise=True)) is None


def test_planning_imports_no_torch():
    program = "import sys, maru_transfer.plan; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, env={"PYTHONPATH": ":".join(filter(None, sys.path))})


def test_an_object_layout_counts_its_bytes():
    assert ObjectLayout(2, 3, 4, 5, 2).nbytes == 2 * 3 * 4 * 5 * 2
