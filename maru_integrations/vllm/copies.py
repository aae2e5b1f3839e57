"""From the scheduler side's orders to copies between objects and blocks. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from maru_core.batches import ChunkCopies
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


def load_copies(op: LoadOp, shape: ChunkShape, chunks: range, buffers: Sequence[memoryview]) -> Sequence[ChunkCopy]:
    """Copies of ``chunks`` (counted from the load's first) to ``op.blocks``; ``buffers``: those of their objects."""
    base = op.chunk * shape.chunk_tokens
    return ChunkCopies(
        shape.objects_of(chunks), shape.objects, shape.chunk_tokens, buffers, op.first - base, op.last - base
    )


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
    """Objects to be stored, of one request or several: whole chunks, layer by layer within each.

    ``keys`` and ``parents`` have one item per object, ``blocks`` the ids of each chunk, one chunk after the other.
    """

    keys: Sequence[bytes]
    parents: Sequence[bytes]
    blocks: Sequence[int]

    def __len__(self) -> int:
        return len(self.keys)


def items_of(ops: Sequence[StoreOp]) -> StoreItems:
    """What these orders store."""
    return StoreItems(
        [key for op in ops for key in op.keys],
        [parent for op in ops for parent in op.parents],
        [block for op in ops for block in op.blocks],
    )


def part_of(op: StoreOp, shape: ChunkShape, objects: range) -> StoreItems:
    """Some whole chunks of what an order stores."""
    part = slice(objects.start, objects.stop)
    chunks = range(objects.start // shape.objects, objects.stop // shape.objects)
    blocks = op.blocks[chunks.start * shape.blocks : chunks.stop * shape.blocks]
    return StoreItems(op.keys[part], op.parents[part], blocks)


def store_copies(shape: ChunkShape, chosen: Sequence[int], rooms: Sequence[memoryview]) -> Sequence[ChunkCopy]:
    """Copies that fill ``rooms``, one for each of the ``chosen`` objects of some items, from the items' blocks."""
    return ChunkCopies(chosen, shape.objects, shape.chunk_tokens, rooms)
