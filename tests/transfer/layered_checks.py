"""What every engine that loads by layer must do, in both storage formats, against the naive reader."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

import numpy as np
from attrs import evolve
from cases import Case
from paged_forms import Engine

from maru_core.geometry import ChunkCopy, ObjectLayout

#: Chunkwise objects hold every layer of a chunk, layerwise ones one each.
FORMATS = ("chunkwise", "layerwise")


def stored_as(engine: Engine, chunk_tokens: int, form: str) -> ObjectLayout:
    stored = engine.stored(chunk_tokens)
    return stored if form == "chunkwise" else evolve(stored, num_layers=1)


def objects_of(engine: Engine, case: Case, form: str, *, empty: bool = False) -> Iterator[tuple[Any, int | None, Any]]:
    """(part, layer, array) of every object of a case: what the naive reader reads, or what is in no object (0xAB)."""
    for part in case.parts:
        whole = engine.naive_object(case.block_ids, *part, case.chunk_tokens)
        if empty:
            whole = np.full_like(whole, 0xAB)
        if form == "chunkwise":
            yield part, None, whole
        else:
            for layer in range(engine.size.L):
                yield part, layer, np.ascontiguousarray(whole[:, layer : layer + 1])


def copies_of(
    engine: Engine, case: Case, form: str, wrap: Callable[[Any], memoryview], *, shuffle: int | None = None
) -> list[ChunkCopy]:
    """``wrap`` makes a buffer of an array. ``shuffle``: a seed for the order of objects, which is anybody's."""
    copies = [ChunkCopy(*part, wrap(array), layer) for part, layer, array in objects_of(engine, case, form)]
    if shuffle is not None:
        copies = [copies[number] for number in np.random.default_rng(shuffle).permutation(len(copies))]
    return copies


def pages_after(case: Case, name: str, source: Engine, layers: Sequence[int]) -> Any:
    """What pages hold that were all 0xEE when some layers of the case have been loaded into them."""
    target = case.engine(name, None)
    for part in case.parts:
        whole = source.naive_object(case.block_ids, *part, case.chunk_tokens)
        before = target.naive_object(case.block_ids, *part, case.chunk_tokens)
        for layer in range(case.size.L):
            if layer not in layers:
                whole[:, layer] = before[:, layer]
        target.naive_write(case.block_ids, *part, whole)
    return target.memory


def check_layered_load(
    open_: Callable[..., Any],
    layers_of: Callable[[Engine], Any],
    wrap: Callable[[Any], memoryview],
    name: str,
    case: Case,
    form: str,
    shuffle: int | None = None,
) -> None:
    """All layers arrive, exactly the slots that were asked for are written, and the count of layers gets there."""
    source, target = case.engine(name, 3), case.engine(name, None)
    copies = copies_of(source, case, form, wrap, shuffle=shuffle)
    with closing(open_(layers_of(target), target.paged, stored_as(target, case.chunk_tokens, form))) as transfer:
        load = transfer.begin_load(case.block_ids, copies)
        done = load.layers_done()
        load.wait_layer(case.size.L - 1)
        assert done <= load.layers_done() <= case.size.L
        load.finish()
        found = target.memory.copy()
        load.finish()
        assert load.layers_done() == case.size.L
    np.testing.assert_array_equal(found, pages_after(case, name, source, range(case.size.L)))
    np.testing.assert_array_equal(target.memory, found)
