"""Random transfers: an engine's sizes, a block table and the chunks that are moved."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from attrs import evolve, frozen
from hypothesis import strategies as st
from paged_forms import Engine, Size

from maru_core.geometry import ChunkCopy, ObjectLayout


@frozen(eq=False)
class Case:
    """``parts``: (chunk, first, last) in absolute tokens of the request. ``layers``: layerwise, that of each part."""

    size: Size
    chunk_tokens: int
    block_ids: list[int]
    parts: list[tuple[int, int, int]]
    layers: list[int] | None = None

    def engine(self, name: str, seed: int | None) -> Engine:
        return Engine.make(name, self.size, seed)

    def stored(self, engine: Engine) -> ObjectLayout:
        return engine.stored(self.chunk_tokens, layerwise=self.layers is not None)

    def copies(self, buffers: Iterable[memoryview]) -> list[ChunkCopy]:
        triples = zip(self.parts, buffers, self._layers, strict=True)
        return [ChunkCopy(*part, buffer, layer) for part, buffer, layer in triples]

    def objects(self, engine: Engine) -> list[Any]:
        """What each part's object must hold."""
        return [
            engine.naive_object(self.block_ids, *part, self.chunk_tokens, layer)
            for part, layer in zip(self.parts, self._layers, strict=True)
        ]

    def write(self, engine: Engine, objects: list[Any]) -> None:
        """Put objects into the pages."""
        for part, layer, array in zip(self.parts, self._layers, objects, strict=True):
            engine.naive_write(self.block_ids, *part, array, layer)

    @property
    def _layers(self) -> Sequence[int | None]:
        return [None] * len(self.parts) if self.layers is None else self.layers


@st.composite
def cases(draw: Any) -> Case:
    """Prompts of one to four chunks, give or take a token; whole chunks and parts that align with nothing."""
    chunk_tokens = draw(st.sampled_from([1, 4, 6, 8]))
    block_size = draw(st.sampled_from([1, 2, 3, 4, 8]))
    tokens = max(1, draw(st.integers(1, 4)) * chunk_tokens + draw(st.integers(-1, 1)))
    blocks = -(-tokens // block_size)
    spare = draw(st.integers(1, 3))
    size = Size(
        draw(st.integers(1, 3)),
        blocks + spare,
        block_size,
        draw(st.integers(1, 3)),
        draw(st.sampled_from([1, 2, 4])),
        draw(st.sampled_from([1, 2, 4, 8])),
    )
    ids = list(range(blocks + spare))
    # Neighbours in order are common in a fresh engine and the only case that coalesces; both matter.
    ids = ids[spare:] if draw(st.booleans()) else draw(st.permutations(ids))[:blocks]
    parts = []
    for chunk in draw(st.lists(st.sampled_from(range(-(-tokens // chunk_tokens))), min_size=1, unique=True)):
        low, high = chunk * chunk_tokens, min(tokens, (chunk + 1) * chunk_tokens)
        whole = draw(st.booleans())
        first = low if whole else draw(st.integers(low, high))
        parts.append((chunk, first, high if whole else draw(st.integers(first, high))))
    return Case(size, chunk_tokens, ids, parts)


@st.composite
def layerwise_cases(draw: Any) -> Case:
    """The same by layer: some layers of each chunk, in any order, chunks mixed."""
    case = draw(cases())
    pairs = [(part, layer) for part in case.parts for layer in range(case.size.L)]
    pairs = draw(st.lists(st.sampled_from(pairs), min_size=1, unique=True))
    return evolve(case, parts=[part for part, _ in pairs], layers=[layer for _, layer in pairs])


def any_cases() -> st.SearchStrategy[Case]:
    """Of either storage format."""
    return cases() | layerwise_cases()
