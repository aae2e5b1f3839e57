"""Writes the header table of one pool (:mod:`maru_core.pool_format`), in batches.

The table is any writable memory, so tests pass a ``bytearray``. Little-endian hosts only, as is the pool format.
"""

from __future__ import annotations

import struct
from array import array
from binascii import crc32
from collections.abc import Sequence
from itertools import repeat

from maru_core.pool_format import (
    HEADER_BODY,
    HEADER_CHECKSUM_OFFSET,
    HEADER_PREFIX,
    HEADER_SIZE,
    HEADER_VIEW_OFFSET,
    KEY_SIZE,
    NO_KEY,
    Header,
    State,
    unpack_header,
)

_WORDS = HEADER_SIZE // 4
_CRC_GAP = bytes(4)
_RESERVED = int(State.RESERVED)
_PAIR = f"{2 * KEY_SIZE}s"
_WHOLE = f"{HEADER_SIZE}s"


def chain_pairs(parent: bytes, keys: bytes) -> list[bytes]:
    """Each key of a column behind the key before it, as headers hold them; the first one behind ``parent``."""
    count = len(keys) // KEY_SIZE
    windows = memoryview(parent + keys)
    even, odd = (count + 1) // 2, count // 2
    pairs = [b""] * count
    pairs[0::2] = struct.unpack_from(_PAIR * even, windows)
    pairs[1::2] = struct.unpack_from(_PAIR * odd, windows, KEY_SIZE)
    return pairs


def pairs_of(parents: Sequence[bytes], keys: Sequence[bytes]) -> list[bytes]:
    """Each key behind its parent; ``parents`` is empty when none has one."""
    if not parents:
        return [NO_KEY + key for key in keys]
    return [parent + key for parent, key in zip(parents, keys, strict=True)]


class HeaderTable:
    """Header table of the entries ``base .. base+count-1``; the only writer of it."""

    def __init__(self, table: memoryview, base: int) -> None:
        self._bytes = table.cast("B")
        self._words = self._bytes.cast("I")
        self._base = base
        # CRC-32 is linear: for messages of one length crc(a ^ b) == crc(a) ^ crc(b) ^ crc(0). A change of the state
        # byte therefore changes the CRC by a constant, and nobody has to read the other 123 bytes again.
        nothing = crc32(bytes(HEADER_BODY.size))
        self._flip = [crc32(bytes([x]) + bytes(HEADER_BODY.size - 1)) ^ nothing for x in range(4)]

    def write_reserved(
        self,
        start: int,
        stride: int,
        pairs: Sequence[bytes],
        generations: Sequence[int],
        length: int,
        session: int,
        digest: bytes,
        weights_epoch: int,
    ) -> None:
        """RESERVED headers of ``len(pairs)`` objects at ``start``, ``start + stride``, … of ``length`` bytes each.

        ``pairs``: parent key and key of each (:func:`chain_pairs`, :func:`pairs_of`).
        """
        count = len(pairs)
        pack = HEADER_PREFIX.pack
        # A CRC goes on from that of the front, which all headers of one generation share.
        if len(set(generations)) == 1:
            front = pack(_RESERVED, generations[0], length, session, 0, digest, weights_epoch)
            headers = (_CRC_GAP + front).join((b"", *pairs))
            crcs = array("I", map(crc32, pairs, repeat(crc32(front))))
        else:
            fronts = {
                generation: pack(_RESERVED, generation, length, session, 0, digest, weights_epoch)
                for generation in set(generations)
            }
            heads = {generation: crc32(front) for generation, front in fronts.items()}
            headers = b"".join(
                [_CRC_GAP + fronts[generation] + pair for generation, pair in zip(generations, pairs, strict=True)]
            )
            crcs = array("I", map(crc32, pairs, map(heads.__getitem__, generations)))
        first = start - self._base
        # The CRCs come last: a reader in between sees a torn header, never a wrong one.
        table = self._bytes
        if stride == 1:
            table[first * HEADER_SIZE : (first + count) * HEADER_SIZE] = headers
        else:
            at, step = first * HEADER_SIZE, stride * HEADER_SIZE
            for header in struct.unpack(_WHOLE * count, headers):
                table[at : at + HEADER_SIZE] = header
                at += step
        begin = first * _WORDS
        step = stride * _WORDS
        self._words[begin : begin + count * step : step] = memoryview(crcs)

    def change_steps(self, entries: slice, old: State, new: State) -> None:
        """Rewrite the state of headers in even steps whose state is ``old``; their CRCs follow."""
        first, last = entries.start - self._base, entries.stop - 1 - self._base
        step = entries.step * HEADER_SIZE
        states = self._bytes[first * HEADER_SIZE + HEADER_VIEW_OFFSET : (last + 1) * HEADER_SIZE : step]
        count = len(states)
        states[:] = bytes([new]) * count
        crcs = self._words[first * _WORDS : (last + 1) * _WORDS : entries.step * _WORDS]
        # All of them in one operation on a long number.
        flips = int.from_bytes(self._flip[old ^ new].to_bytes(4, "little") * count, "little")
        flipped = int.from_bytes(crcs.tobytes(), "little") ^ flips
        crcs[:] = memoryview(flipped.to_bytes(4 * count, "little")).cast("I")

    def change_state(self, entries: Sequence[int], old: State, new: State) -> None:
        """The same for headers anywhere."""
        flip = self._flip[old ^ new]
        states, words, base = self._bytes, self._words, self._base
        for entry in entries:
            at = entry - base
            states[at * HEADER_SIZE + HEADER_VIEW_OFFSET] = new
            words[at * _WORDS] ^= flip

    def set_checksum(self, entry: int, checksum: int) -> None:
        """Put the payload's checksum into a header."""
        at = (entry - self._base) * HEADER_SIZE
        body = bytearray(self._bytes[at + HEADER_VIEW_OFFSET : at + HEADER_SIZE])
        where = HEADER_CHECKSUM_OFFSET - HEADER_VIEW_OFFSET
        body[where : where + 8] = checksum.to_bytes(8, "little")
        self._bytes[at : at + HEADER_SIZE] = crc32(body).to_bytes(4, "little") + body

    def read(self, entry: int) -> Header | None:
        """The header of ``entry``; ``None`` when its CRC does not hold."""
        at = (entry - self._base) * HEADER_SIZE
        return unpack_header(self._bytes[at : at + HEADER_SIZE])

    def release(self) -> None:
        """Let go of the memory, so that the pool can be unmapped."""
        self._words.release()
        self._bytes.release()
