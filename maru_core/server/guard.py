"""Whether a learned order of eviction serves more than least recently used would, and if not, no longer follow it.

What is learned from the past need not hold, and for some loads nothing can be learned. So the order that would have
been is run beside the one that is: a list of the keys that a pool of the same size would hold if it had always evicted
what was used longest ago, tails before heads. Every object that is found though that pool would have lost it is a
credit, and every one that is missed though that pool would have it is a debt. While there is a debt, the learned order
is not followed. A small allowance pays debts off, so that the learned order is tried again, and bounds what trying
costs.

What the learned order has evicted and the other would have kept is a debt to come. So the learned order is followed
only while there is credit for a part of that: at first it decides about few objects, and about more as it gains.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from itertools import compress, islice
from typing import Final

from maru_core.pool_format import KEY_SIZE
from maru_core.protocol.messages import NO_ENTRY

#: Of larger pools only a sample of keys is looked at: at least about as many as this, and at most one in 256.
_SAMPLE: Final = 8_192
_MOST_SHIFT: Final = 8
#: What trying the learned order may cost: the part of all lookups, and of those for what was there and is lost.
_ALLOWANCE: Final = 0.0015
_ALLOWANCE_LOST: Final = 0.1
#: Parts of the pool: the most credit and debt that count, and the credit at which the learned order is followed again.
_MOST_CREDIT: Final = 4.0
_MOST_DEBT: Final = 0.5
_ENOUGH: Final = 1 / 1024
#: Requests that may go on and are remembered.
_MOST_PARTS: Final = 64
#: Requests that are learned from before the learned order is followed.
_LEAST_REQUESTS: Final = 512
#: The part of what the other order would have and the pool has not that credit must make up for.
_RISK: Final = 0.25
_GONE: Final = -1
_ANY: Final = 1 << 62


class Guard:
    """Of one pool with ``count`` places, for all its namespaces, which are told apart by a number.

    ``trusting``: the learned order is always followed, for comparison.
    """

    __slots__ = (
        "_alone",
        "_chosen",
        "_credit",
        "_ghost",
        "_held",
        "_last",
        "_mask",
        "_missing",
        "_parts",
        "_requests",
        "_shift",
        "_trusting",
        "learned",
        "slack",
    )

    def __init__(self, count: int, trusting: bool = False) -> None:
        self._shift = min(_MOST_SHIFT, (count // _SAMPLE).bit_length())
        self._mask = (1 << self._shift) - 1
        #: By last byte of a key, 1 where it is looked at.
        self._chosen = bytes([not last & self._mask for last in range(256)])
        self._credit = 0.0
        self._requests = 0
        #: Whether there are no objects in other pools. What those keep cannot be told from what this one keeps, and a
        #: chain that lies in several is held by its children there; so the learned order is not followed then.
        self._alone = True
        #: What the other order would have, used last at the end: where it is in the pool, or _GONE.
        self._ghost: OrderedDict[bytes, int] = OrderedDict()
        self._missing = 0
        #: What is looked at of what is in the pool, by entry; and of what was evicted last. Deleted objects are in here
        #: until something takes their place.
        self._held: dict[int, bytes] = {}
        self._last: dict[int, bytes] = {}
        #: What was looked at of requests that may go on, by their namespace and the last key so far.
        self._parts: OrderedDict[tuple[int, bytes | None], list[bytes]] = OrderedDict()
        #: Whether the learned order is to be followed.
        self._trusting = trusting
        self.learned = trusting
        #: Objects that may be evicted before the next decision.
        self.slack = _ANY

    def looked_up(
        self,
        namespace: int,
        keys: Sequence[bytes],
        entries: Sequence[int],
        found: int,
        known: int,
        after: bytes | None = None,
    ) -> None:
        """The first ``found`` of ``keys``, a chain, are about to be read: ``entries``, if all of them are in this pool.

        The first ``known`` were asked for before. ``after``: the key before them in the same request.
        """
        ghost = self._ghost
        names, head, places = self._sample(namespace, keys, found, entries)
        ahead, behind = 0, sum(map(ghost.__contains__, names[head:] if head else names))
        if len(entries) == found:
            held = self._held
            for name, entry in zip(names, places, strict=False):
                # What was there before this list was, nobody can judge.
                if name not in ghost and held.get(entry) == name:
                    ahead += 1
                self._hold(name, entry)
        else:
            self._alone = False
        self._use(namespace, names, after, keys[found - 1] if found else None)
        self._requests += known > 0
        lost = max(0, known - found) / (1 << self._shift)
        # Where nothing is lost, no order can be better.
        self._count_in(ahead - behind + min(_ALLOWANCE * len(names), _ALLOWANCE_LOST * lost))

    def stored(
        self,
        namespace: int,
        keys: Sequence[bytes],
        entries: Sequence[int],
        asked: int,
        parent: bytes | None = None,
    ) -> None:
        """``keys`` are to be stored, in ``entries``; those beyond would be by another order.

        NO_ENTRY has what goes to another pool. ``asked``: how many of them :meth:`looked_up` was told of before.
        ``parent``: the key before them.
        """
        ghost = self._ghost
        if NO_ENTRY in entries:
            self._alone = False
            here = [at for at, entry in enumerate(entries) if entry != NO_ENTRY] + list(range(len(entries), len(keys)))
            # What is asked for comes before what is not.
            names, head, places = self._sample(
                namespace,
                [keys[at] for at in here],
                bisect_left(here, asked),
                [entry for entry in entries if entry != NO_ENTRY],
            )
        else:
            names, head, places = self._sample(namespace, keys, asked, entries)
        behind = sum(map(ghost.__contains__, names[head:])) if head < len(names) else 0
        for name, entry in zip(names, places, strict=False):
            self._hold(name, entry)
        for name in names[len(places) :]:
            if name not in ghost:
                ghost[name] = _GONE
                self._missing += 1
        self._use(namespace, names, parent, keys[-1])
        self._count_in(-behind)

    def moved_in(self) -> None:
        """There is something here that came from another pool."""
        self._alone = False

    def evicted(self, entries: Sequence[int]) -> None:
        """The pool loses these, unless :meth:`kept` says otherwise before the next call."""
        held, ghost = self._held, self._ghost
        self._last = last = {}
        for entry in entries:
            name = held.pop(entry, None)
            if name is not None:
                last[entry] = name
                if ghost.get(name) == entry:
                    ghost[name] = _GONE
                    self._missing += 1
        if self.learned:
            self._decide()

    def kept(self, entries: Sequence[int]) -> None:
        """These of the last call of :meth:`evicted` stay."""
        for entry in entries:
            name = self._last.pop(entry, None)
            if name is not None:
                self._held[entry] = name
                if self._ghost.get(name) == _GONE:
                    self._ghost[name] = entry
                    self._missing -= 1

    def _hold(self, name: bytes, entry: int) -> None:
        """The object ``name`` is at ``entry``, and is used now."""
        held, ghost = self._held, self._ghost
        before = held.get(entry)
        if before != name:
            if before is not None and ghost.get(before) == entry:
                ghost[before] = _GONE
                self._missing += 1
            held[entry] = name
        if ghost.get(name) == _GONE:
            self._missing -= 1
        ghost[name] = entry

    def _sample(
        self, namespace: int, keys: Sequence[bytes], head: int, entries: Sequence[int]
    ) -> tuple[list[bytes], int, Sequence[int]]:
        """Those of ``keys`` that are looked at, how many of these are among the first ``head``, and their entries."""
        if self._mask:
            chosen = b"".join(keys)[KEY_SIZE - 1 :: KEY_SIZE].translate(self._chosen)
            names, head = list(compress(keys, chosen)), chosen.count(1, 0, head)
            entries = list(compress(entries, chosen))
        else:
            names, head = list(keys), min(head, len(keys))
        if namespace:
            suffix = namespace.to_bytes(8, "big")
            names = [key + suffix for key in names]
        return names, head, entries

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

    def _count_in(self, credit: float) -> None:
        ghost, size = self._ghost, len(self._held)
        while len(ghost) > size:
            if ghost.popitem(last=False)[1] == _GONE:
                self._missing -= 1
        self._credit = max(-_MOST_DEBT * size, min(self._credit + credit, _MOST_CREDIT * size))
        self._decide()

    def _decide(self) -> None:
        ghost, size = self._ghost, len(self._held)
        missing = self._missing
        if len(ghost) > size:
            # So many would have been evicted by now in the other order, too.
            missing -= list(islice(ghost.values(), len(ghost) - size)).count(_GONE)
        # Some of what the other order has kept will be asked for.
        margin = self._credit - _RISK * missing
        enough = self._alone and self._requests >= _LEAST_REQUESTS and margin >= (0 if self.learned else _ENOUGH * size)
        self.learned = enough or self._trusting
        self.slack = int(margin) << self._shift if self.learned and not self._trusting else _ANY
