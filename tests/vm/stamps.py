"""Objects whose every eight bytes say whose they are and where in it they lie; needs nothing but Python."""

from __future__ import annotations

import hashlib
from array import array

#: Lengths in bytes of a set of objects, one after the other and again: below and above a page, a granule and an
#: alignment of 2 MiB, and never whole words only.
SIZES = (1, 4096, 65_537, 300_001, 1 << 20, (2 << 20) + 77)


def size_of(number: int) -> int:
    """Length of object ``number`` of a set, in bytes."""
    return SIZES[number % len(SIZES)]


def stamped(name: str, size: int) -> bytes:
    """The bytes of an object: the word at position i is i more than a number that is made of the name."""
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little") << 32
    return array("Q", range(seed, seed + -(-size // 8))).tobytes()[:size]


def difference(found: memoryview | bytes, name: str, size: int) -> str | None:
    """What is wrong with the bytes of an object, in words; ``None`` when all are right."""
    wanted = stamped(name, size)
    if len(found) != size:
        return f"{name}: {len(found)} bytes instead of {size}"
    if found == wanted:
        return None
    first = next(at for at in range(size) if found[at] != wanted[at])
    return f"{name}: wrong from byte {first} of {size}: {bytes(found[first : first + 8]).hex()}"
