"""Random transfers: an engine's sizes, a block table and the chunks that are moved."""

from __future__ import annotations

from typing import Any

from attrs import frozen
from hypothesis import strategies as st
from paged_forms import Engine, Size


@frozen(eq=False)
class Case:
    """``parts``: (chunk, first, last) in absolute tokens of the request."""

    size: Size
    chunk_tokens: int
    block_ids: list[int]
    parts: list[tuple[int, int, int]]

    def engine(self, name: str, seed: int | None) -> Engine:
        return Engine.make(name, self.size, seed)


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
