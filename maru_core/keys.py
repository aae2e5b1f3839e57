"""Token prefix to chunk keys: a blake2b chain, one link per whole chunk; and the keys of a chunk's layers."""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Final

from attrs import define, field

from maru_core.errors import MaruError
from maru_core.pool_format import KEY_SIZE

#: The array type code of an unsigned integer of exactly four bytes.
_U32 = next(code for code in "IL" if array(code).itemsize == 4)


#: What sets a layer's key apart from its chunk's, and how it is written.
_SUFFIX: Final = struct.Struct("<I")
#: An odd number whose multiples spread over all bits, so that no two layers have the same.
_SPREAD: Final = 0x9E37_79B9


def layer_keys(chunk_keys: Iterable[bytes], layers: int) -> list[bytes]:
    """Keys of layerwise objects: those of a chunk from layer 0 on, then those of the next chunk.

    The last four bytes of the chunk's key are mixed with the layer. They differ between the layers of a chunk and stay
    as evenly spread as a hash, which the server's index and the sample of checksums go by; the other 28 still name one
    prefix alone.
    """
    steps = [layer * _SPREAD & 0xFFFF_FFFF for layer in range(layers)]
    pack, size = _SUFFIX.pack, _SUFFIX.size
    keys: list[bytes] = []
    for key in chunk_keys:
        head, number = key[:-size], int.from_bytes(key[-size:], "little")
        keys += [head + pack(number ^ step) for step in steps]
    return keys


def cache_salt_field(salt: str | None) -> tuple[tuple[str, bytes], ...]:
    """The extra field for a request's cache salt: none at all for ``None``, an empty value for ``""``."""
    return () if salt is None else (("cache_salt", salt.encode("utf-8", "surrogatepass")),)


@define(eq=False)
class KeyChain:
    """Chunk keys of one request, computed once and extended as tokens are appended.

    ``root`` is :attr:`maru_core.namespace.Namespace.root`. ``extra`` holds what else decides the KV of the whole
    prompt, as (tag, value) pairs: tags and values are length-delimited, so that two different sequences never hash
    alike; their order counts. Key ``i`` names tokens ``[0, (i+1)*chunk_tokens)``; only whole chunks have one.
    ``objects_per_chunk``: 1, or in the layerwise format the number of layers. A chunk's objects are a chain, too: layer
    0 follows the last layer of the chunk before, so that eviction takes the deepest ones first.
    """

    root: bytes
    chunk_tokens: int
    extra: Sequence[tuple[str, bytes]] = ()
    objects_per_chunk: int = 1
    keys: list[bytes] = field(init=False, factory=list)
    _start: bytes = field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        if len(self.root) != KEY_SIZE:
            raise MaruError(f"a key chain's root has {len(self.root)} bytes; take the {KEY_SIZE} of Namespace.root")
        if self.chunk_tokens < 1:
            raise MaruError(f"chunk_tokens={self.chunk_tokens}: a chunk holds at least one token")
        if self.objects_per_chunk < 1:
            raise MaruError(f"objects_per_chunk={self.objects_per_chunk}: a chunk is at least one object")
        start = hashlib.blake2b(self.root, digest_size=KEY_SIZE, person=b"maru-extra")
        for tag, value in self.extra:
            for part in (tag.encode("utf-8", "surrogatepass"), value):
                start.update(len(part).to_bytes(8, "little"))
                start.update(part)
        self._start = start.digest()

    def extend(self, tokens: Sequence[int], upto: int) -> None:
        """Append the keys of the whole chunks in ``tokens[:upto]`` that have none yet.

        ``tokens`` is the request's whole list so far; only the part that is not hashed yet is read, by slices. Raises
        MaruError, with the keys before it kept, when a chunk holds something that is not an integer of 32 bits or the
        list is shorter than ``upto``.
        """
        size = self.chunk_tokens
        keys = self.keys
        for index in range(len(keys), upto // size):
            first = index * size
            chunk = tokens[first : first + size]
            if len(chunk) != size:
                raise MaruError(
                    f"chunk {index} needs tokens {first}..{first + size - 1}, but the list ends at {len(tokens)};"
                    f" pass upto={len(tokens)} or less"
                )
            link = hashlib.blake2b(self.parent(index), digest_size=KEY_SIZE, person=b"maru-chunk")
            link.update(_pack(chunk, first))
            keys.append(link.digest())

    def parent(self, index: int) -> bytes:
        """The key that chunk ``index`` was chained to: the chunk before it, or this chain's start for the first."""
        return self.keys[index - 1] if index else self._start

    def object_keys(self, first: int, end: int) -> list[bytes]:
        """Keys of the objects of chunks ``[first, end)``, chunk after chunk, each from layer 0 on."""
        chunks = self.keys[first:end]
        return chunks if self.objects_per_chunk == 1 else layer_keys(chunks, self.objects_per_chunk)

    def objects(self, chunks: Sequence[int]) -> tuple[list[bytes], list[bytes]]:
        """Keys of the objects of these chunks, each from layer 0 on, and for each of them the key that precedes it.

        Of a chunk's layer 0 that is the last one of the chunk before, whether or not that is among ``chunks``.
        """
        of_chunks = [self.keys[chunk] for chunk in chunks]
        count = self.objects_per_chunk
        keys = of_chunks if count == 1 else layer_keys(of_chunks, count)
        parents = [b"", *keys[:-1]] if keys else []
        for place, chunk in enumerate(chunks):
            if not place or chunks[place - 1] != chunk - 1:
                parents[place * count] = self.object_keys(chunk - 1, chunk)[-1] if chunk else self._start
        return keys, parents


def _pack(chunk: Sequence[int], first: int) -> bytes:
    """Token ids as little-endian u32; ``first`` is the position of the first one, for the error."""
    try:
        packed = array(_U32, chunk)
    except (OverflowError, TypeError) as error:
        for position, token in enumerate(chunk, first):
            if not hasattr(token, "__index__") or not 0 <= token < 1 << 32:
                raise MaruError(
                    f"token {token!r} at position {position} is no unsigned 32-bit integer; such a prompt has no key"
                ) from error
        raise
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()
