"""Where KV lies: in an engine's paged memory, and in a stored object. Values only, no arithmetic, no torch."""

from __future__ import annotations

from attrs import frozen


@frozen
class PlaneStrides:
    """How one plane (K, V, or MLA's latent) of one layer is addressed, in *elements* from the layer's first element.

    Element (block b, token t, head h, dim d) lies at
    ``offset + b*block + t*token + h*head + d*dim``. This holds K and V apart, packed per head, NHD, HND, and keys that
    are stored transposed within a block alike.
    """

    offset: int
    block: int
    token: int
    head: int
    dim: int


@frozen
class PagedLayout:
    """Paged KV memory of one engine rank; every layer has the same layout.

    ``planes`` holds K and V, or one plane for MLA. ``num_blocks`` counts manager blocks (block 0 is vLLM's null block),
    ``block_size`` tokens in one. ``element_size`` in bytes.
    """

    planes: tuple[PlaneStrides, ...]
    num_layers: int
    num_blocks: int
    block_size: int
    num_heads: int
    head_size: int
    element_size: int

    @property
    def hidden(self) -> int:
        """Elements of one token in one plane of one layer."""
        return self.num_heads * self.head_size


@frozen
class ObjectLayout:
    """An object's bytes: ``[planes, layers, chunk_tokens, hidden]``, token-major, C order.

    Chunkwise objects hold every layer of the engine rank. Layerwise ones hold one, ``num_layers`` is 1, and so many of
    them as there are layers make a chunk.
    """

    num_planes: int
    num_layers: int
    chunk_tokens: int
    hidden: int
    element_size: int

    @property
    def nbytes(self) -> int:
        """Size of one object in bytes."""
        return self.num_planes * self.num_layers * self.chunk_tokens * self.hidden * self.element_size


@frozen(eq=False)
class ChunkCopy:
    """One object's share of a transfer: absolute tokens ``[first, last)`` of a request, all inside chunk ``chunk``.

    Chunk ``c`` covers tokens ``[c*chunk_tokens, (c+1)*chunk_tokens)``; token t is slot ``t % block_size`` of the
    request's block ``block_ids[t // block_size]``. ``buffer`` is the whole object, ``ObjectLayout.nbytes`` bytes.
    ``layer``: the one true layer that a layerwise object holds; ``None``: the object holds them all.
    """

    chunk: int
    first: int
    last: int
    buffer: memoryview
    layer: int | None = None
