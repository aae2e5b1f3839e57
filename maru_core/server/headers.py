"""Writes the header table of one pool (:mod:`maru_core.pool_format`), in batches.

The table is any writable memory, so tests pass a ``bytearray``. Little-endian hosts only, as is the pool format.
"""

from __future__ import annotations

import struct
from array import array
from binascii import crc32
from collections.abc import Sequence

from maru_core.pool_format import (
    HEADER_BODY,
    HEADER_CHECKSUM_OFFSET,
    HEADER_PREFIX,
    HEADER_SIZE,
    HEADER_VIEW_OFFSET,
    Header,
    State,
    unpack_header,
)

_WORDS = HEADER_SIZE // 4
_CRC_GAP = bytes(4)
_RESERVED = int(State.RESERVED)
_BODY_AFTER_CRC = f"4x{HEADER_BODY.size}s"


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
        keys: Sequence[bytes],
        parents: Sequence[bytes],
        generations: Sequence[int],
        length: int,
        session: int,
        digest: bytes,
        weights_epoch: int,
    ) -> None:
        """RESERVED headers of ``len(keys)`` objects at ``start``, ``start + stride``, … of ``length`` bytes each."""
        count = len(keys)
        uniform = generations.count(generations[0]) == count
        prefixes = [
            HEADER_PREFIX.pack(_RESERVED, generation, length, session, 0, digest, weights_epoch)
            for generation in (generations[:1] if uniform else generations)
        ]
        pieces: list[bytes] = [_CRC_GAP] * (4 * count)
        pieces[1::4] = prefixes * count if uniform else prefixes
        pieces[2::4] = keys
        pieces[3::4] = parents
        headers = b"".join(pieces)
        crcs = array("I", map(crc32, struct.unpack(_BODY_AFTER_CRC * count, headers)))
        first = start - self._base
        # The CRCs come last: a reader in between sees a torn header, never a wrong one.
        if stride == 1:
            self._bytes[first * HEADER_SIZE : (first + count) * HEADER_SIZE] = headers
        else:
            for number in range(count):
                at = (first + number * stride) * HEADER_SIZE
                self._bytes[at : at + HEADER_SIZE] = headers[number * HEADER_SIZE : (number + 1) * HEADER_SIZE]
        begin = first * _WORDS
        step = stride * _WORDS
        self._words[begin : begin + count * step : step] = memoryview(crcs)

    def change_state(self, entries: list[int], old: State, new: State) -> None:
        """Rewrite the state of headers whose state is ``old``; their CRCs follow."""
        flip = self._flip[old ^ new]
        count = len(entries)
        first = entries[0] - self._base
        stride = entries[1] - entries[0] if count > 1 else 1
        if stride > 0 and entries == list(range(entries[0], entries[0] + count * stride, stride)):
            step = stride * HEADER_SIZE
            begin = first * HEADER_SIZE + HEADER_VIEW_OFFSET
            self._bytes[begin : begin + count * step : step] = bytes([new]) * count
            step = stride * _WORDS
            begin = first * _WORDS
            crcs = self._words[begin : begin + count * step : step]
            crcs[:] = memoryview(array("I", [crc ^ flip for crc in crcs.tolist()]))
            return
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
