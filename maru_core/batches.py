"""Many objects of a request as few values: what a transfer is asked for, without an object of Python for each of them.

An object per copy and one per buffer take a thread longer than planning does, and thousands of them wake the garbage
collector. So the usual request is said in columns. Whoever does not know them sees ordinary sequences.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import overload

from attrs import define, field, frozen

from maru_core.geometry import ChunkCopy


@frozen(eq=False)
class Rooms(Sequence[memoryview]):
    """Buffers of ``nbytes`` bytes each, all in one ``buffer`` of bytes, which they keep in place.

    The i-th begins ``origin + entries[i] * granule`` bytes behind its beginning.
    """

    buffer: memoryview
    entries: Sequence[int]
    origin: int
    granule: int
    nbytes: int

    def __len__(self) -> int:
        return len(self.entries)

    @overload
    def __getitem__(self, index: int) -> memoryview: ...
    @overload
    def __getitem__(self, index: slice) -> Rooms: ...

    def __getitem__(self, index: int | slice) -> memoryview | Rooms:
        if isinstance(index, slice):
            return Rooms(self.buffer, self.entries[index], self.origin, self.granule, self.nbytes)
        return self._at(self.entries[index])

    def __iter__(self) -> Iterator[memoryview]:
        return map(self._at, self.entries)

    def _at(self, entry: int) -> memoryview:
        first = self.origin + entry * self.granule
        return self.buffer[first : first + self.nbytes]


@define(eq=False)
class ChunkCopies(Sequence[ChunkCopy]):
    """Copies of the objects ``numbers`` of a request, counted from its first: so many ``objects`` make a chunk.

    One object for each chunk, or one for each layer of a chunk, from layer 0 on. ``buffers``: one for each of
    ``numbers``. Only tokens in ``[first, last)`` of the request are moved. As a sequence it holds a
    :class:`ChunkCopy` for each, which are made when the first of them is asked for.
    """

    numbers: Sequence[int]
    objects: int
    chunk_tokens: int
    buffers: Sequence[memoryview]
    first: int = 0
    last: int = sys.maxsize
    _made: list[ChunkCopy] | None = field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        if len(self.numbers) != len(self.buffers):
            raise ValueError(f"{len(self.buffers)} buffers for {len(self.numbers)} objects; give one for each")

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, index: int) -> ChunkCopy: ...
    @overload
    def __getitem__(self, index: slice) -> list[ChunkCopy]: ...

    def __getitem__(self, index: int | slice) -> ChunkCopy | list[ChunkCopy]:
        return self._all()[index]

    def __iter__(self) -> Iterator[ChunkCopy]:
        return iter(self._all())

    def whole_chunks(self) -> range | None:
        """The chunks that are moved when these are consecutive ones, each with all objects and tokens, in order."""
        numbers, objects, size = self.numbers, self.objects, self.chunk_tokens
        if not isinstance(numbers, range) or numbers.step != 1 or numbers.start % objects or numbers.stop % objects:
            return None
        chunks = range(numbers.start // objects, numbers.stop // objects)
        fits = 0 <= chunks.start < chunks.stop and self.first <= chunks.start * size and chunks.stop * size <= self.last
        return chunks if fits else None

    def _all(self) -> list[ChunkCopy]:
        made = self._made
        if made is None:
            made = self._made = [
                self._copy(number, buffer) for number, buffer in zip(self.numbers, self.buffers, strict=True)
            ]
        return made

    def _copy(self, number: int, buffer: memoryview) -> ChunkCopy:
        chunk, layer = divmod(number, self.objects)
        size = self.chunk_tokens
        first, last = max(self.first, chunk * size), min(self.last, (chunk + 1) * size)
        return ChunkCopy(chunk, first, last, buffer, layer if self.objects > 1 else None)
