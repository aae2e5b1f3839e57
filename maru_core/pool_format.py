"""What a pool looks like in memory: superblock, header table, data.

::

    0            SUPERBLOCK_SIZE               data_offset
    | superblock | header table, one entry per | data, ``entry_count`` granules of ``granule`` bytes |
    |            | granule, 128 bytes each     |                                                     |

An object owns a run of whole granules; the header-table entry of its *first* granule describes it. Headers sit apart
from the data because inline headers would break alignment and coalescing, and could not be found among mixed sizes.

Only the server writes headers. Clients read them after a copy, to prove that what they copied was the object they
had been granted (``architecture.md`` §4, invariant 5).
"""

from __future__ import annotations

import struct
import zlib
from enum import IntEnum
from typing import Final

from attrs import frozen

from maru_core.errors import BackendError

MAGIC: Final = b"MARUPOOL"
FORMAT_VERSION: Final = 2
SUPERBLOCK_SIZE: Final = 4096
HEADER_SIZE: Final = 128
KEY_SIZE: Final = 32
DIGEST_SIZE: Final = 16
NO_KEY: Final = bytes(KEY_SIZE)

#: magic, format version, granule, entry_count, table_offset, data_offset, identity, boot id, place; CRC-32 last.
_SUPERBLOCK = struct.Struct("<8sIIQQQ16s16s16s")
_CRC = struct.Struct("<I")

#: Everything of a header after its CRC: state, 3 spare bytes, generation, length, session, checksum, namespace
#: digest, weights epoch, 4 spare bytes, parent key, key. With the CRC in front it is HEADER_SIZE bytes. In a chain the
#: parent of a key is the key before it, so the last 64 bytes of its headers are windows of one column of keys.
HEADER_BODY: Final = struct.Struct("<B3xIQQQ16sQ4x32s32s")
#: The same up to the keys, for writers that put many headers together.
HEADER_PREFIX: Final = struct.Struct("<B3xIQQQ16sQ4x")
HEADER_VIEW_OFFSET: Final = 4
HEADER_CHECKSUM_OFFSET: Final = 28
#: The key is what a header ends with.
HEADER_KEY_OFFSET: Final = HEADER_SIZE - KEY_SIZE


class State(IntEnum):
    """Life of the object that a header describes."""

    FREE = 0
    RESERVED = 1
    READY = 2
    RETIRING = 3


@frozen
class Header:
    """One decoded header-table entry. ``length`` in bytes, ``checksum`` 0 when none was given."""

    state: State
    generation: int
    length: int
    session: int
    checksum: int
    digest: bytes
    weights_epoch: int
    parent: bytes
    key: bytes


@frozen
class Superblock:
    """Geometry and identity of a pool. ``granule`` and offsets in bytes; ``identity`` is new at every cold start.

    ``place`` says which memory it was made in, in the backend's terms: a copy of the bytes is another pool.
    """

    granule: int
    entry_count: int
    table_offset: int
    data_offset: int
    identity: bytes
    boot_id: bytes
    place: bytes = bytes(16)


def plan_pool(
    size: int, granule: int, alignment: int = 4096, *, size_setting: str = "maru_pool_size"
) -> tuple[int, int]:
    """Return ``(entry_count, data_offset)`` of a pool of ``size`` bytes in all, headers included.

    ``data_offset`` is a multiple of the larger of ``alignment`` and ``granule`` so that every granule is aligned.
    Raises BackendError when not even one granule fits.
    """
    align = max(alignment, granule)
    count = max(0, (size - SUPERBLOCK_SIZE) // (granule + HEADER_SIZE))
    while count > 0:
        data_offset = -(-(SUPERBLOCK_SIZE + count * HEADER_SIZE) // align) * align
        fits = (size - data_offset) // granule
        if fits >= count:
            return count, data_offset
        count = min(count - 1, fits)
    raise BackendError(
        f"a pool of {size} bytes cannot hold one granule of {granule} bytes beside its headers; "
        f"raise {size_setting} or lower maru_chunk_size"
    )


def pack_superblock(block: Superblock) -> bytes:
    """Encode ``block`` with its CRC; shorter than SUPERBLOCK_SIZE, the rest of the page stays zero."""
    body = _SUPERBLOCK.pack(
        MAGIC,
        FORMAT_VERSION,
        block.granule,
        block.entry_count,
        block.table_offset,
        block.data_offset,
        block.identity,
        block.boot_id,
        block.place,
    )
    return body + _CRC.pack(zlib.crc32(body))


def unpack_superblock(raw: bytes | memoryview) -> Superblock:
    """Decode and check a superblock; raises BackendError that says what is wrong with it."""
    body = bytes(raw[: _SUPERBLOCK.size])
    crc = bytes(raw[_SUPERBLOCK.size : _SUPERBLOCK.size + _CRC.size])
    if len(body) < _SUPERBLOCK.size or crc != _CRC.pack(zlib.crc32(body)):
        raise BackendError("the pool has no valid superblock; it was not made by Maru or is damaged")
    magic, version, granule, count, table, data, identity, boot, place = _SUPERBLOCK.unpack(body)
    if magic != MAGIC or version != FORMAT_VERSION:
        raise BackendError(f"the pool has format {magic!r} version {version}, this Maru needs {FORMAT_VERSION}")
    return Superblock(granule, count, table, data, identity, boot, place)


def pack_header(header: Header) -> bytes:
    """Encode one header-table entry, CRC first."""
    body = HEADER_BODY.pack(
        header.state,
        header.generation,
        header.length,
        header.session,
        header.checksum,
        header.digest,
        header.weights_epoch,
        header.parent,
        header.key,
    )
    return _CRC.pack(zlib.crc32(body)) + body


def unpack_header(raw: bytes | memoryview) -> Header | None:
    """Decode one entry; ``None`` when its CRC does not hold (never written, or torn)."""
    body = bytes(raw[_CRC.size : HEADER_SIZE])
    if len(body) != HEADER_BODY.size or bytes(raw[: _CRC.size]) != _CRC.pack(zlib.crc32(body)):
        return None
    state, generation, length, session, checksum, digest, weights_epoch, parent, key = HEADER_BODY.unpack(body)
    if state not in State._value2member_map_:
        return None
    return Header(State(state), generation, length, session, checksum, digest, weights_epoch, parent, key)
