"""Objects whose every eight bytes say whose they are: namespace, key, weights epoch and position.

Bytes of a neighbour, of another namespace, of old weights, from another place, or half of one writer and half of
another one therefore never look right.
"""

from __future__ import annotations

import hashlib
import itertools
from functools import cache, lru_cache

import numpy as np
import numpy.typing as npt
from attrs import evolve

from maru_core.client import Located, MaruHandler
from maru_core.namespace import Namespace

#: Keys of one prefix, each the parent of the next.
CHAIN = 8
#: Keys in all; their bytes are many times the pool, so it is always full.
KEYS = 320 * CHAIN
#: No object is longer, in bytes.
LONGEST = 32 * 1024
SPACES = ("red", "blue")
#: Weights epochs among which the owner of wrong bytes is searched.
_WEIGHTS = 4

Bytes = npt.NDArray[np.uint8]


def namespace(space: str) -> Namespace:
    """What the programs of one ``space`` share."""
    return Namespace.of({"model": "stamped", "space": space})


def name_of(number: int) -> str:
    """The user's key of object ``number``."""
    return f"object {number}"


@cache
def key_of(space: str, number: int) -> bytes:
    """The 32 bytes that :meth:`MaruHandler.key` makes of :func:`name_of`, so that both levels of calls meet."""
    stub = MaruHandler.__new__(MaruHandler)
    stub._namespace = namespace(space)
    return stub.key(name_of(number))


def size_of(number: int) -> int:
    """Length in bytes: that of its chain, except for chains of several sizes."""
    chain, place = divmod(number, CHAIN)
    return 1000 + chain * 7919 % 20_000 + (place * 1501 if chain % 5 == 0 else 0)


def stamped(space: str, number: int, weights: int) -> Bytes:
    """What object ``number`` consists of under a weights epoch."""
    return _stamped(_seed(space, number, weights), size_of(number))


@lru_cache(maxsize=4096)
def _seed(space: str, number: int, weights: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{space}/{number}/{weights}".encode(), digest_size=8).digest(), "little")


def _stamped(seed: int, size: int) -> Bytes:
    words = _positions()[: -(-size // 8)] ^ np.uint64(seed)
    return words.view(np.uint8)[:size]


@cache
def _positions() -> npt.NDArray[np.uint64]:
    return np.arange(LONGEST // 8, dtype=np.uint64) * np.uint64(0x9E37_79B9_7F4A_7C15)


def difference(found: memoryview | bytes | Bytes, space: str, number: int, weights: int) -> str | None:
    """Where ``found`` is not what it should be, in words; ``None`` when every byte is right."""
    got = np.frombuffer(found, dtype=np.uint8)
    wanted = stamped(space, number, weights)
    if len(got) != len(wanted):
        return f"{len(got)} bytes instead of {len(wanted)}"
    if np.array_equal(got, wanted):
        return None
    wrong = np.flatnonzero(got != wanted)
    return f"{len(wrong)} of {len(wanted)} bytes differ, from {wrong[0]} to {wrong[-1]}{_owner(got, int(wrong[0]))}"


def verified(located: Located, index: int) -> bool:
    """Whether the header still shows one object of a lease, which may have others that were not found."""
    columns = (column[index : index + 1] for column in (located.entries, located.generations, located.lengths))
    return evolve(located, **dict(zip(("entries", "generations", "lengths"), columns, strict=True))).verify()[0]


def _owner(got: Bytes, at: int) -> str:
    """Whose bytes lie at ``at``, as far as a search over recent weights can tell."""
    start = at // 8 * 8
    word = got[start : start + 8]
    if len(word) < 8:
        return ""
    if not word.any():
        return " (zeros)"
    value = int(word.view(np.uint64)[0])
    for space, number, weights in itertools.product(SPACES, range(KEYS), range(_WEIGHTS)):
        place = _offsets().get(value ^ _seed(space, number, weights))
        if place is not None:
            return f" (object {number} of {space}, weights {weights}, offset {place})"
    return ""


@cache
def _offsets() -> dict[int, int]:
    return {int(word): 8 * at for at, word in enumerate(_positions())}
