"""Checksums of stored payloads: which objects have one, and what it is.

Writers and readers agree on both without talking: whether an object is in the sample follows from its key alone.
"""

from __future__ import annotations

from typing import Final, Literal

import xxhash

#: What ``maru_verify`` may be.
Verify = Literal["off", "sample", "full"]

#: One key in so many is in the sample, by its last byte. Chunk keys are hashes; numbers differ there, too.
SAMPLE: Final = 16
#: What a header holds when there is no checksum (:class:`maru_core.pool_format.Header`).
NO_CHECKSUM: Final = 0
#: Stands for the one payload in 2**64 whose hash is NO_CHECKSUM.
_INSTEAD: Final = 1


def is_covered(mode: Verify, key: bytes) -> bool:
    """Whether the object of ``key`` is given a checksum, and has it compared, in this mode."""
    return mode == "full" or (mode == "sample" and not key[-1] % SAMPLE)


def checksum(payload: memoryview | bytes) -> int:
    """The 64-bit checksum (XXH3) of a payload, never NO_CHECKSUM.

    It finds damage, not forgery: who can write to a pool can write a checksum that fits. Other threads run meanwhile.
    """
    # Before its version 4 xxhash lets go of the interpreter's lock here only, and not in xxh3_64_intdigest.
    digest = xxhash.xxh3_64()
    digest.update(payload)
    return digest.intdigest() or _INSTEAD
