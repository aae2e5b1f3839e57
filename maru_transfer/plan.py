"""Copy planning: which bytes of paged memory belong to which bytes of stored objects. Pure arithmetic, no torch.

A plan is a list of pieces: tokens that lie in consecutive slots, the same for every plane and layer. Engines that copy
strided boxes take it as it is. What the kernels are asked for is cut by :mod:`maru_transfer.slices`; what is wrong with
a request is told here for all.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from maru_core.errors import TransferError
from maru_core.geometry import ChunkCopy, ObjectLayout, PagedLayout


@frozen
class Piece:
    """``count`` tokens that follow each other both in the paged memory and in one object.

    They start at ``slot`` of manager block ``block`` and at token ``token`` of the chunk of ``copies[copy]``. A piece
    reaches past the end of its block only where the next block of the request follows it in memory without a gap.
    ``layer``: the copy's, the only one that moves; ``None``: all of them do.
    """

    copy: int
    block: int
    slot: int
    token: int
    count: int
    layer: int | None = None


def mismatch(paged: PagedLayout, stored: ObjectLayout) -> str | None:
    """Why objects of layout ``stored``, of either format, cannot hold what ``paged`` does; ``None`` when they can."""
    if not paged.planes:
        return "the paged layout has no planes"
    pairs = (
        ("planes", len(paged.planes), stored.num_planes),
        ("layers", paged.num_layers, paged.num_layers if stored.num_layers == 1 else stored.num_layers),
        ("elements per token", paged.hidden, stored.hidden),
        ("bytes per element", paged.element_size, stored.element_size),
    )
    for what, here, there in pairs:
        if here != there:
            return f"the paged memory has {here} {what}, the stored objects have {there}"
    sizes = (paged.num_layers, paged.num_blocks, paged.block_size, paged.hidden, paged.element_size)
    if min(*sizes, stored.chunk_tokens) < 1:
        return f"a size is not positive: {paged}, {stored}"
    for number, plane in enumerate(paged.planes):
        if min(plane.offset, plane.block, plane.token, plane.head, plane.dim) < 0:
            return f"plane {number} has a negative stride or offset: {plane}"
    return None


def extent(paged: PagedLayout) -> int:
    """Elements from a layer's first one to just past the last that any plane addresses."""
    last = 0
    for plane in paged.planes:
        reach = (
            plane.offset
            + (paged.num_blocks - 1) * plane.block
            + (paged.block_size - 1) * plane.token
            + (paged.num_heads - 1) * plane.head
            + (paged.head_size - 1) * plane.dim
        )
        last = max(last, reach)
    return last + 1


def refuse_read_only(copies: Sequence[ChunkCopy]) -> None:
    """Raises TransferError when a buffer that is to be stored into cannot be written."""
    for number, copy in enumerate(copies):
        if copy.buffer.readonly:
            raise TransferError(f"copy {number} (chunk {copy.chunk}) stores into a read-only buffer")


def plan_pieces(
    paged: PagedLayout,
    stored: ObjectLayout,
    block_ids: Sequence[int],
    copies: Sequence[ChunkCopy],
    *,
    reads_pages: bool = False,
) -> list[Piece]:
    """Split copies into pieces, in order of copies and tokens.

    ``reads_pages``: the blocks are read, not written. Then one may stand at several places: what requests that share
    blocks store is moved together.

    Raises TransferError, naming the culprit, when layouts disagree, tokens lie outside of the copy's chunk, its layer
    is none that an object can hold, the block table is too short, names a block that does not exist or one to write
    for two places, or a buffer has another size.
    """
    problem = mismatch(paged, stored)
    if problem:
        raise TransferError(problem)
    size = paged.block_size
    gapless = all(plane.block == size * plane.token for plane in paged.planes)
    places: dict[int, int] = {}
    pieces: list[Piece] = []
    for number, copy in enumerate(copies):
        _check_copy(number, copy, paged, stored)
        start = copy.chunk * stored.chunk_tokens
        position = copy.first
        previous: Piece | None = None
        while position < copy.last:
            place, slot = divmod(position, size)
            block = _block(paged, block_ids, place, number, copy)
            if not reads_pages and places.setdefault(block, place) != place:
                raise TransferError(
                    f"block {block} stands at places {places[block]} and {place} of the block table;"
                    " one block cannot hold two stretches of a request"
                )
            count = min(size - slot, copy.last - position)
            if previous and gapless and previous.block * size + previous.slot + previous.count == block * size + slot:
                whole = previous.count + count
                previous = Piece(number, previous.block, previous.slot, previous.token, whole, copy.layer)
                pieces[-1] = previous
            else:
                previous = Piece(number, block, slot, position - start, count, copy.layer)
                pieces.append(previous)
            position += count
    return pieces


def _check_copy(number: int, copy: ChunkCopy, paged: PagedLayout, stored: ObjectLayout) -> None:
    low, high = copy.chunk * stored.chunk_tokens, (copy.chunk + 1) * stored.chunk_tokens
    if not 0 <= low <= copy.first <= copy.last <= high:
        raise TransferError(
            f"copy {number} asks for tokens [{copy.first}, {copy.last}), but chunk {copy.chunk} holds [{low}, {high})"
        )
    try:
        nbytes, contiguous = copy.buffer.nbytes, copy.buffer.c_contiguous
    except ValueError as error:
        raise TransferError(f"copy {number} (chunk {copy.chunk}) has a buffer that was released: {error}") from error
    if nbytes != stored.nbytes or not contiguous:
        raise TransferError(
            f"copy {number} (chunk {copy.chunk}) has a buffer of {nbytes} bytes,"
            f" an object is {stored.nbytes} contiguous bytes"
        )
    if copy.layer is None:
        if stored.num_layers != paged.num_layers:
            raise TransferError(
                f"copy {number} (chunk {copy.chunk}) names no layer, but an object holds one of {paged.num_layers}"
            )
    elif stored.num_layers != 1:
        raise TransferError(
            f"copy {number} (chunk {copy.chunk}) names layer {copy.layer}, but an object holds all {stored.num_layers}"
        )
    elif not 0 <= copy.layer < paged.num_layers:
        raise TransferError(
            f"copy {number} (chunk {copy.chunk}) names layer {copy.layer}, but there are {paged.num_layers}"
        )


def _block(paged: PagedLayout, block_ids: Sequence[int], place: int, number: int, copy: ChunkCopy) -> int:
    if place >= len(block_ids):
        raise TransferError(
            f"copy {number} needs tokens [{copy.first}, {copy.last}), but the block table holds"
            f" {len(block_ids)} blocks of {paged.block_size} tokens"
        )
    block = block_ids[place]
    if not 0 <= block < paged.num_blocks:
        raise TransferError(f"block {block} at place {place} of the block table is not one of {paged.num_blocks}")
    return block
