"""From the scheduler side's orders to copies between objects and blocks. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attrs import frozen

from maru_core.geometry import ChunkCopy
from maru_integrations.vllm.metadata import LoadOp, StoreOp


@frozen
class ChunkShape:
    """Sizes of a block and a chunk in tokens, and how many objects make a chunk: one, or one per layer.

    ``nbytes``: all objects of a chunk together.
    """

    block_size: int
    chunk_tokens: int
    nbytes: int
    objects: int = 1

    @property
    def blocks(self) -> int:
        """Blocks of a chunk."""
        return self.chunk_tokens // self.block_size

    def objects_of(self, chunks: range) -> range:
        """The objects of chunks that are counted from the same first one."""
        return range(chunks.start * self.objects, chunks.stop * self.objects)

    def layer(self, index: int) -> int | None:
        """The one layer that object ``index`` of a request's holds; ``None`` when an object holds them all."""
        return index % self.objects if self.objects > 1 else None


def chunks_of(op: LoadOp, shape: ChunkShape) -> int:
    """How many chunks a load touches."""
    return -(-op.last // shape.chunk_tokens) - op.chunk


def problem_of(op: LoadOp, shape: ChunkShape) -> str | None:
    """Why an order cannot be carried out: whoever read on would take one object for its neighbour."""
    chunks = chunks_of(op, shape)
    wanted = chunks * shape.objects
    for name, column in (
        ("entries", op.entries),
        ("generations", op.generations),
        ("lengths", op.lengths),
        ("keys", op.keys),
    ):
        if len(column) != wanted:
            return f"request {op.request_id}: {len(column)} {name} for {wanted} objects of {chunks} chunks"
    return None


def load_copies(op: LoadOp, shape: ChunkShape, chunks: range, view: Callable[[int], memoryview]) -> list[ChunkCopy]:
    """Copies of ``chunks`` (counted from the load's first) to ``op.blocks``; ``view(i)``: the i-th object of these."""
    size, base = shape.chunk_tokens, op.chunk * shape.chunk_tokens
    return [
        ChunkCopy(
            chunk=chunk,
            first=max(op.first - base, chunk * size),
            last=min(op.last - base, (chunk + 1) * size),
            buffer=view(place * shape.objects + number),
            layer=shape.layer(number),
        )
        for place, chunk in enumerate(chunks)
        for number in range(shape.objects)
    ]


def failed_blocks(op: LoadOp, shape: ChunkShape, good: int) -> Sequence[int]:
    """Blocks that hold undefined KV when only the first ``good`` objects of a load arrived.

    A chunk counts with all of its objects only.
    """
    whole = good // shape.objects
    if whole >= chunks_of(op, shape):
        return ()
    base = op.chunk * shape.chunk_tokens
    first_bad = max(op.first - base, whole * shape.chunk_tokens)
    return op.blocks[first_bad // shape.block_size : -(-(op.last - base) // shape.block_size)]


@frozen
class StoreItems:
    """Objects to be stored, of one request or several: columns with one item per object."""

    keys: Sequence[bytes]
    parents: Sequence[bytes]
    #: The blocks of each object's chunk.
    blocks: Sequence[Sequence[int]]

    def __len__(self) -> int:
        return len(self.keys)

    def part(self, objects: range) -> StoreItems:
        """Some of them."""
        cut = slice(objects.start, objects.stop)
        return StoreItems(self.keys[cut], self.parents[cut], self.blocks[cut])


def items_of(ops: Sequence[StoreOp], shape: ChunkShape) -> StoreItems:
    """What these orders store; chunk by chunk, and layer by layer in a chunk."""
    keys = [key for op in ops for key in op.keys]
    parents = [parent for op in ops for parent in op.parents]
    per = shape.blocks
    blocks = [
        op.blocks[index // shape.objects * per : (index // shape.objects + 1) * per]
        for op in ops
        for index in range(len(op.keys))
    ]
    return StoreItems(keys, parents, blocks)


def store_copies(
    items: StoreItems, shape: ChunkShape, chosen: Sequence[int], room: Callable[[int], memoryview]
) -> tuple[list[int], list[ChunkCopy]]:
    """Block ids and copies that fill ``room(index)`` for the ``chosen`` objects."""
    size = shape.chunk_tokens
    blocks: list[int] = []
    copies = []
    last, place = -1, -1
    for index in chosen:
        chunk = index // shape.objects
        if chunk != last:
            last, place = chunk, place + 1
            blocks += items.blocks[index]
        copies.append(
            ChunkCopy(
                chunk=place,
                first=place * size,
                last=(place + 1) * size,
                buffer=room(index),
                layer=shape.layer(index),
            )
        )
    return blocks, copies
