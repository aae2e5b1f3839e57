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
#: Requests that may go on and are remembered.
_MOST_PARTS: Final = 64
#: Requests that are learned from before the learned order is followed.
_LEAST_REQUESTS: Final = 512
#: How fast the size of the pool in objects is forgotten when it holds less, per eviction.
_FADE: Final = 1 / 65_536


class Guard:
    """Of one pool with ``count`` places, for all its namespaces, which are told apart by a number.

    ``trusting``: the learned order is always followed, for comparison.
    """

    __slots__ = (
        "_count",
        "_credit",
        "_ghost",
        "_mask",
        "_parts",
        "_requests",
        "_shift",
        "_size",
        "_trusting",
        "learned",
    )

    def __init__(self, count: int, trusting: bool = False) -> None:
        self._shift = min(_MOST_SHIFT, (count // _SAMPLE).bit_length())
        self._mask = (1 << self._shift) - 1
        self._count = count
        #: Objects that the pool holds when it is full; 0 before it was.
        self._size = 0.0
        self._credit = 0.0
        self._requests = 0
        self._ghost: OrderedDict[bytes, None] = OrderedDict()
        #: What was looked at of requests that may go on, by their namespace and the last key so far.
        self._parts: OrderedDict[tuple[int, bytes | None], list[bytes]] = OrderedDict()
        #: Whether the learned order is to be followed.
        self._trusting = trusting
        self.learned = trusting

    def looked_up(
        self, namespace: int, keys: Sequence[bytes], found: int, known: int, whole: bool, after: bytes | None = None
    ) -> None:
        """The first ``found`` of ``keys``, a chain, are about to be read; ``whole``: all of them from this pool.

        The first ``known`` were asked for before. ``after``: the key before them in the same request.
        """
        ghost = self._ghost
        ahead = behind = 0
        sample = self._sample(namespace, keys)
        for at, key in sample:
            if key in ghost:
                behind += at >= found
            elif at < found and whole:
                ghost[key] = None
                ahead += 1
        self._use(namespace, [key for _, key in sample], after, keys[found - 1] if found else None)
        self._requests += known > 0
        lost = max(0, known - found) / (1 << self._shift)
        # Where nothing is lost, no order can be better.
        self._count_in(ahead - behind + min(_ALLOWANCE * len(sample), _ALLOWANCE_LOST * lost))

    def stored(
        self, namespace: int, keys: Sequence[bytes], absent: Sequence[bool], asked: int, parent: bytes | None = None
    ) -> None:
        """``keys`` are to be stored, or would be by another order; not those that go to another pool (``absent``).

        ``asked``: how many of them :meth:`looked_up` was told of before. ``parent``: the key before them.
        """
        ghost = self._ghost
        behind = 0
        sample = [(at, key) for at, key in self._sample(namespace, keys) if at >= len(absent) or not absent[at]]
        for at, key in sample:
            if key in ghost:
                behind += at >= asked
            else:
                ghost[key] = None
        self._use(namespace, [key for _, key in sample], parent, keys[-1])
        self._count_in(-behind)

    def _sample(self, namespace: int, keys: Sequence[bytes]) -> list[tuple[int, bytes]]:
        """Those of ``keys`` that are looked at, and their places."""
        mask = self._mask
        sample = [item for item in enumerate(keys) if not item[1][-1] & mask] if mask else list(enumerate(keys))
        if namespace:
            suffix = namespace.to_bytes(8, "big")
            return [(at, key + suffix) for at, key in sample]
        return sample

    def _use(self, namespace: int, sample: list[bytes], before: bytes | None, last: bytes | None) -> None:
        """``sample`` was used now, behind the key ``before``; ``last``: where the request may go on."""
        ghost, parts = self._ghost, self._parts
        heads = parts.pop((namespace, before), None) if before is not None else None
        # Heads last, so that tails are lost first.
        whole = [*heads, *sample] if heads else sample
        for key in reversed(whole):
            if key in ghost:
                ghost.move_to_end(key)
        if last is not None:
            parts[namespace, last] = whole
            if len(parts) > _MOST_PARTS:
                parts.popitem(last=False)

    def full(self, held: int) -> None:
        """Something is to be evicted of the ``held`` objects in the pool."""
        # What is leased is not held, so it is the most that counts.
        self._size = max(held, self._size * (1 - _FADE))

    def _count_in(self, credit: float) -> None:
        size = round((self._size or self._count) / (1 << self._shift))
        ghost = self._ghost
        while len(ghost) > size:
            ghost.popitem(last=False)
        self._credit = credit = max(-_MOST_DEBT * size, min(self._credit + credit, _MOST_CREDIT * size))
        enough = self._requests >= _LEAST_REQUESTS and credit >= (0 if self.learned else _ENOUGH * size)
        self.learned = enough or self._trusting
