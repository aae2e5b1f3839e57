"""Requests of whole chunks, as nearly all are: cut into slices once, and from then on copied from a template.

Two such requests of one transfer differ in where their objects and their blocks lie, and in nothing else. Planning is
on the way to the first token and holds the interpreter's lock against an engine's own thread, so what does not differ
is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from attrs import field, frozen

from maru_core.geometry import ObjectLayout, PagedLayout
from maru_transfer.cuda_library import SEGMENT, Array

#: Segments of all templates that are kept, 9 MB, and objects of the largest one.
_MOST_SEGMENTS, _MOST_OBJECTS = 1 << 17, 1 << 17
#: Objects of a template are this far from each other, so that a segment's address tells which one it is of.
_APART = 1 << 40

#: Segments of the first chunks of a request, by how many these are, whether in order of layers, and where each lies.
Cut = Callable[[int, bool, Array], Array]


@frozen(eq=False)
class Template:
    """Segments of chunks 0, 1, ...; the i-th is of object ``owners[i]`` and begins ``inside[i]`` bytes in it.

    ``raw``: the segments' bytes, which are copied faster than their fields.
    """

    raw: bytes
    owners: Array
    inside: Array

    @classmethod
    def of(cls, segments: Array) -> Template:
        """From segments of objects that lie at multiples of _APART, from 0 on."""
        owners, inside = np.divmod(segments["host"].astype(np.int64), _APART)
        return cls(segments.tobytes(), owners, inside)

    def first(self, objects: int) -> Template:
        """Those of the first objects, when they are in order of objects."""
        count = int(self.owners.searchsorted(objects))
        if count == len(self.owners):
            return self
        return Template(self.raw[: count * SEGMENT.itemsize], self.owners[:count], self.inside[:count])

    def at(self, addresses: Array, token: int) -> Array:
        """Segments of objects that lie there, of chunks from the request's ``token`` on."""
        segments: Array = np.frombuffer(bytearray(self.raw), SEGMENT)
        segments["host"] = addresses[self.owners] + self.inside
        if token:
            segments["token"] += token
        return segments


@frozen
class Templates:
    """Those of one transfer. ``cut`` makes what they are made from. Any thread."""

    cut: Cut
    #: Of each chunk.
    objects: int
    _kept: dict[tuple[int, bool], Template] = field(factory=dict, init=False)

    def get(self, chunks: int, *, by_layer: bool) -> Template | None:
        """The template of so many chunks; ``None`` when they are too many."""
        # In order of objects the first segments of many chunks are those of fewer.
        size = chunks if by_layer else 1 << (chunks - 1).bit_length()
        if size * self.objects > _MOST_OBJECTS:
            return None
        found = self._kept.pop((size, by_layer), None)
        if found is None:
            addresses = np.arange(size * self.objects, dtype=np.int64) * _APART
            found = Template.of(self.cut(size, by_layer, addresses))
        self._keep((size, by_layer), found)
        return found if by_layer else found.first(chunks * self.objects)

    def _keep(self, which: tuple[int, bool], template: Template) -> None:
        """As the last that was used; those that were not for longest go."""
        self._kept[which] = template
        room = _MOST_SEGMENTS
        for other, kept in reversed(list(self._kept.items())):
            room -= len(kept.owners)
            if room < 0:
                self._kept.pop(other, None)


def blocks_of(
    paged: PagedLayout, stored: ObjectLayout, block_ids: Sequence[int], chunks: range
) -> tuple[int, Array] | None:
    """The place of the first block of whole chunks, and all of their blocks, int32.

    ``None`` when a chunk ends within a block, or they are not all there, each once: others say what is wrong.
    """
    per_chunk, rest = divmod(stored.chunk_tokens, paged.block_size)
    first, last = chunks.start * per_chunk, chunks.stop * per_chunk
    if rest or last > len(block_ids):
        return None
    blocks = np.fromiter(block_ids[first:last], np.int32, last - first)
    ascending = np.sort(blocks)
    if ascending[0] < 0 or ascending[-1] >= paged.num_blocks or (ascending[1:] == ascending[:-1]).any():
        return None
    return first, blocks
