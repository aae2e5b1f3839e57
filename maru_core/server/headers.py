"""Writes the header table of one pool (:mod:`maru_core.pool_format`), in batches.

A header begins with its CRC and its state in one aligned word, and every change of state is one store of that word: a
server that is killed at any instruction leaves each header as it was before or as it is after. Only a header that is
being written anew can be torn, and nobody was told of that object yet.

The table is any writable memory, so tests pass a ``bytearray``. Little-endian hosts only, as is the pool format.

Where hosts that are not coherent with each other share the pool, every change is published before the call returns,
and so before any reply that tells of it: a reader that looks at a header after its copy sees what became of the object.
The table has one writer, whose own cache is right, so nothing is acquired here but before a warm start.
"""

from __future__ import annotations

import struct
from array import array
from binascii import crc32
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat

from maru_core.pool_format import (
    DIGEST_SIZE,
    HEADER_BODY,
    HEADER_CHECKSUM_OFFSET,
    HEADER_KEY_OFFSET,
    HEADER_PREFIX,
    HEADER_SIZE,
    HEADER_VIEW_OFFSET,
    KEY_SIZE,
    NO_KEY,
    Header,
    State,
    unpack_header,
)

#: Words of 8 bytes per header, numbers of 4 bytes per header, and which of those is the generation.
_WORDS = HEADER_SIZE // 8
_NUMBERS = HEADER_SIZE // 4
_GENERATION = 2
#: Words per key.
_KEY_WORDS = KEY_SIZE // 8
#: Headers that are read at a time.
_SCANNED = 4096
#: Headers up to this many entries apart are published at once: a line more costs less than a call.
_PUBLISHED_GAP = 8
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
    """Header table of the entries ``base .. base+count-1``; the only writer of it.

    ``publish`` is given the offset in the table and the length of what was changed; ``None``: all readers are coherent.
    """

    def __init__(self, table: memoryview, base: int, publish: Callable[[int, int], None] | None = None) -> None:
        self._publish = publish
        self._bytes = table.cast("B")
        self._words = self._bytes.cast("Q")
        self._numbers = self._bytes.cast("I")
        self._base = base
        # CRC-32 is linear: for messages of one length crc(a ^ b) == crc(a) ^ crc(b) ^ crc(0). A change of the state
        # byte therefore changes the CRC by a constant, and nobody has to read the other 123 bytes again.
        nothing = crc32(bytes(HEADER_BODY.size))
        self._flip = [
            crc32(bytes([x]) + bytes(HEADER_BODY.size - 1)) ^ nothing | x << 8 * HEADER_VIEW_OFFSET for x in range(4)
        ]

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
        begin = first * _NUMBERS
        step = stride * _NUMBERS
        self._numbers[begin : begin + count * step : step] = memoryview(crcs)
        if self._publish is not None:
            self._publish_all(range(start, start + count * stride, stride))

    def change_steps(self, entries: slice, old: State, new: State) -> None:
        """Rewrite the state of headers in even steps whose state is ``old``."""
        first, last = entries.start - self._base, entries.stop - 1 - self._base
        words = self._words[first * _WORDS : last * _WORDS + 1 : entries.step * _WORDS]
        count = len(words)
        # All of them in one operation on a long number.
        flips = int.from_bytes(self._flip[old ^ new].to_bytes(8, "little") * count, "little")
        flipped = int.from_bytes(words.tobytes(), "little") ^ flips
        words[:] = memoryview(flipped.to_bytes(8 * count, "little")).cast("Q")
        if self._publish is not None:
            self._publish_all(range(entries.start, entries.stop, entries.step))

    def change_state(self, entries: Sequence[int], old: State, new: State) -> None:
        """The same for headers anywhere."""
        flip = self._flip[old ^ new]
        words, base = self._words, self._base
        for entry in entries:
            words[(entry - base) * _WORDS] ^= flip
        if self._publish is not None:
            self._publish_all(sorted(entries))

    def set_checksum(self, entry: int, checksum: int) -> None:
        """Put the payload's checksum into a header."""
        at = (entry - self._base) * HEADER_SIZE
        body = bytearray(self._bytes[at + HEADER_VIEW_OFFSET : at + HEADER_SIZE])
        where = HEADER_CHECKSUM_OFFSET - HEADER_VIEW_OFFSET
        body[where : where + 8] = checksum.to_bytes(8, "little")
        self._bytes[at : at + HEADER_SIZE] = crc32(body).to_bytes(4, "little") + body
        if self._publish is not None:
            self._publish(at, HEADER_SIZE)

    def read(self, entry: int) -> Header | None:
        """The header of ``entry``; ``None`` when its CRC does not hold."""
        at = (entry - self._base) * HEADER_SIZE
        return unpack_header(self._bytes[at : at + HEADER_SIZE])

    def generations(self) -> array[int]:
        """The generation in each header, whether its CRC holds or not."""
        return array("I", self._numbers[_GENERATION::_NUMBERS].tolist())

    def scan(self) -> Iterator[tuple[int, tuple[int, int, int, int, int, bytes, int, bytes, bytes] | None]]:
        """Entry and fields (those of :class:`Header`, in order) of each header that is not certainly FREE.

        ``None`` instead of the fields where the CRC does not hold.
        """
        unpack, size = HEADER_BODY.unpack_from, HEADER_BODY.size
        for first in range(0, len(self._bytes) // HEADER_SIZE, _SCANNED):
            # A copy of a part: slices of bytes are cheaper than those of a memoryview.
            part = bytes(self._bytes[first * HEADER_SIZE : (first + _SCANNED) * HEADER_SIZE])
            for index in [index for index, state in enumerate(part[HEADER_VIEW_OFFSET::HEADER_SIZE]) if state]:
                at = index * HEADER_SIZE
                begin = at + HEADER_VIEW_OFFSET
                sound = crc32(part[begin : begin + size]) == int.from_bytes(part[at:begin], "little")
                yield self._base + first + index, unpack(part, begin) if sound else None

    def clear(self, entry: int) -> None:
        """Make a torn header a FREE one; its generation stays."""
        at = entry - self._base
        generation = self._numbers[at * _NUMBERS + _GENERATION]
        body = HEADER_BODY.pack(State.FREE, generation, 0, 0, 0, bytes(DIGEST_SIZE), 0, NO_KEY, NO_KEY)
        self._bytes[at * HEADER_SIZE : (at + 1) * HEADER_SIZE] = crc32(body).to_bytes(4, "little") + body
        if self._publish is not None:
            self._publish(at * HEADER_SIZE, HEADER_SIZE)

    def key(self, entry: int) -> memoryview:
        """The key in the header of ``entry``, of an object that is there."""
        at = (entry - self._base) * HEADER_SIZE
        return self._bytes[at + HEADER_KEY_OFFSET : at + HEADER_SIZE]

    def same_keys(self, entries: slice, packed: bytes) -> bool:
        """Whether objects in even steps have the keys of the column ``packed``."""
        first = (entries.start - self._base) * _WORDS + HEADER_KEY_OFFSET // 8
        end = (entries.stop - self._base) * _WORDS
        step = entries.step * _WORDS
        keys, words = memoryview(packed).cast("Q"), self._words
        # A column of words at a time: comparing whole keys would make an object of each.
        return all(words[first + at : end : step] == keys[at::_KEY_WORDS] for at in range(_KEY_WORDS))

    def _publish_all(self, entries: Sequence[int]) -> None:
        """Publish the headers of rising ``entries``, those close behind one another at once."""
        assert self._publish is not None
        if not entries:
            return
        start = after = entries[0]
        for entry in entries:
            if entry >= after + _PUBLISHED_GAP:
                self._publish((start - self._base) * HEADER_SIZE, (after - start) * HEADER_SIZE)
                start = entry
            after = entry + 1
        self._publish((start - self._base) * HEADER_SIZE, (after - start) * HEADER_SIZE)

    def release(self) -> None:
        """Let go of the memory, so that the pool can be unmapped."""
        self._words.release()
        self._numbers.release()
        self._bytes.release()
