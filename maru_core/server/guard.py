"""Whether a learned order of eviction serves more than least recently used would, and if not, no longer follow it.

What is learned from the past need not hold, and for some loads nothing can be learned. So the order that would have
been is run beside the one that is: a list of the keys that a pool of the same size would hold if it had always evicted
what was used longest ago, tails before heads. Every object that is found though that pool would have lost it is a
credit, and every one that is missed though that pool would have it is a debt. While there is a debt, the learned order
is not followed. A small allowance pays debts off, so that the learned order is tried again, and bounds what trying
costs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

#: Of larger pools only a sample of keys is looked at: at least about as many as this, and at most one in 256.
_SAMPLE: Final = 32_768
_MOST_SHIFT: Final = 8
#: What trying the learned order may cost: the part of all lookups, and of those for what was there and is lost.
_ALLOWANCE: Final = 0.001
_ALLOWANCE_LOST: Final = 0.02
#: Parts of the pool: the most credit and debt that count, and the credit at which the learned order is followed again.
_MOST_CREDIT: Final = 4.0
_MOST_DEBT: Final = 0.5
_ENOUGH: Final = 1 / 1024
#: Requests that are learned from before the learned order is followed.
_LEAST_REQUESTS: Final = 512
#: How fast the size of the pool in objects is forgotten when it holds less, per eviction.
_FADE: Final = 1 / 4096


class Guard:
    """Of one pool with ``count`` places, for all its namespaces, which are told apart by a number."""

    __slots__ = ("_count", "_credit", "_ghost", "_mask", "_requests", "_shift", "_size", "learned")

    def __init__(self, count: int) -> None:
        self._shift = min(_MOST_SHIFT, (count // _SAMPLE).bit_length())
        self._mask = (1 << self._shift) - 1
        self._count = count
        #: Objects that the pool holds when it is full; 0 before it was.
        self._size = 0.0
        self._credit = 0.0
        self._requests = 0
        self._ghost: OrderedDict[bytes, None] = OrderedDict()
        #: Whether the learned order is to be followed.
        self.learned = False

    def looked_up(self, namespace: int, keys: Sequence[bytes], found: int, known: int, whole: bool) -> None:
        """The first ``found`` of ``keys``, a chain, are about to be read; ``whole``: all of them from this pool.

        The first ``known`` were asked for before.
        """
        ghost, mask = self._ghost, self._mask
        suffix = namespace.to_bytes(8, "big") if namespace else b""
        ahead = behind = looked = 0
        # Heads last, so that tails are lost first.
        for at in range(len(keys) - 1, -1, -1):
            key = keys[at]
            if mask and key[-1] & mask:
                continue
            looked += 1
            key += suffix
            if key in ghost:
                ghost.move_to_end(key)
                if at >= found:
                    behind += 1
            elif at < found and whole:
                ghost[key] = None
                ahead += 1
        self._requests += known > 0
        lost = max(0, known - found) / (1 << self._shift)
        # Where nothing is lost, no order can be better.
        self._count_in(ahead - behind + min(_ALLOWANCE * looked, _ALLOWANCE_LOST * lost))

    def stored(self, namespace: int, keys: Sequence[bytes], absent: Sequence[bool], asked: int) -> None:
        """``keys`` are to be stored, or would be by another order; not those that go to another pool (``absent``).

        ``asked``: how many of them :meth:`looked_up` was told of before.
        """
        ghost, mask = self._ghost, self._mask
        suffix = namespace.to_bytes(8, "big") if namespace else b""
        behind = 0
        for at in range(len(keys) - 1, -1, -1):
            key = keys[at]
            if (mask and key[-1] & mask) or (at < len(absent) and absent[at]):
                continue
            key += suffix
            if key in ghost:
                ghost.move_to_end(key)
                behind += at >= asked
            else:
                ghost[key] = None
        self._count_in(-behind)

    def full(self, held: int) -> None:
        """Something is to be evicted of the ``held`` objects in the pool."""
        self._size = max(held, self._size * (1 - _FADE))

    def _count_in(self, credit: float) -> None:
        size = (self._size or self._count) / (1 << self._shift)
        ghost = self._ghost
        while len(ghost) > size:
            ghost.popitem(last=False)
        self._credit = credit = max(-_MOST_DEBT * size, min(self._credit + credit, _MOST_CREDIT * size))
        self.learned = self._requests >= _LEAST_REQUESTS and credit >= (0 if self.learned else _ENOUGH * size)
