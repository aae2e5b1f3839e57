"""Key to first entry, without the keys: the header table of the pools has them already.

A key is found by its last four bytes, a number that costs a fraction of the key itself, and is then compared with the
whole key in the header of the object that was found. A key whose last four bytes belong to another key already is kept
whole; of a million keys that are hashes, about a hundred are.

The numbers are in many small dicts: a dict that grows is rebuilt in one go, and a big one takes too long. With 64 of
them a rebuild stays below a millisecond up to several million keys. Chunk keys are hashes, so their last byte spreads
them evenly; other keys only lose the benefit.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Protocol

from maru_core.pool_format import KEY_SIZE

_SHARDS = 64
_LAST = KEY_SIZE - 1
#: 32-bit words of a key.
_WORDS = KEY_SIZE // 4


class KeyTable(Protocol):
    """Where whole keys are."""

    def same_keys(self, entries: Sequence[int], packed: bytes) -> bool:
        """Whether these objects have these keys, ``packed`` as one column."""


def tags_of(packed: bytes) -> array[int]:
    """The number by which each key of a column is found."""
    return array("I", packed)[_WORDS - 1 :: _WORDS]


def _column(found: list[int | None]) -> array[int]:
    """The same as an array, where there is no ``None``."""
    return array("I", found)  # type: ignore[arg-type]


class KeyIndex:
    """Maps 32-byte keys to the numbers of objects. ``table`` must have the key of an object while it is in here."""

    def __init__(self, table: KeyTable) -> None:
        self._table = table
        self._shards: list[dict[int, int]] = [{} for _ in range(_SHARDS)]
        #: By highest byte of the tag, which is the last byte of the key.
        self._route = self._shards * (256 // _SHARDS)
        self._getters = [shard.get for shard in self._route]
        #: Whole keys whose tag leads to another object, and the same the other way round.
        self._twins: dict[bytes, int] = {}
        self._twin_keys: dict[int, bytes] = {}
        self._cursor = 0

    def __len__(self) -> int:
        return sum(map(len, self._shards)) + len(self._twins)

    def __iter__(self) -> Iterator[int]:
        """The objects that are in here."""
        for shard in self._shards:
            yield from shard.values()
        yield from self._twins.values()

    def find(self, packed: bytes, tags: Sequence[int]) -> Sequence[int | None]:
        """The entry of each key of a column with these :func:`tags_of`, ``None`` where there is none.

        An array where there is no ``None``.
        """
        getters = self._getters
        found = [getters[last](tag) for last, tag in zip(packed[_LAST::KEY_SIZE], tags, strict=True)]
        if None not in found:
            column = _column(found)
            return column if self._table.same_keys(column, packed) else self._check(packed, found)
        return found if not self._twins and found.count(None) == len(found) else self._check(packed, found)

    def get(self, key: bytes) -> int | None:
        """The entry of one key."""
        entry = self._route[key[_LAST]].get(int.from_bytes(key[-4:], "little"))
        if entry is None:
            return self._twins.get(key) if self._twins else None
        return entry if self._table.same_keys((entry,), key) else self._twins.get(key)

    def put(self, packed: bytes, tags: Sequence[int], entries: Sequence[int]) -> None:
        """Enter keys that :meth:`find` did not find; those beyond the last of ``entries`` are left out."""
        shards = map(self._route.__getitem__, packed[_LAST::KEY_SIZE])
        for shard, tag, entry in zip(shards, tags, entries, strict=False):
            if shard.setdefault(tag, entry) != entry:
                at = entries.index(entry) * KEY_SIZE
                key = packed[at : at + KEY_SIZE]
                self._twins[key] = entry
                self._twin_keys[entry] = key

    def enter(self, key: bytes, tag: int, entry: int) -> bool:
        """Enter one key unless it is there already; whether it was not."""
        known = self._route[tag >> 24].setdefault(tag, entry)
        if known == entry:
            return True
        if key in self._twins or self._table.same_keys((known,), key):
            return False
        self._twins[key] = entry
        self._twin_keys[entry] = key
        return True

    def remove(self, tag: int, entry: int) -> bool:
        """Take ``entry`` out, whose key has ``tag``; whether it was here."""
        shard = self._route[tag >> 24]
        if shard.get(tag) == entry:
            del shard[tag]
            return True
        key = self._twin_keys.pop(entry, None) if self._twin_keys else None
        if key is None:
            return False
        del self._twins[key]
        return True

    def remove_all(self, tags: Sequence[int], entries: Sequence[int]) -> list[tuple[int, int]]:
        """:meth:`remove` for many; returns those that were not here."""
        route, strange = self._route, []
        for tag, entry in zip(tags, entries, strict=True):
            shard = route[tag >> 24]
            if shard.get(tag) == entry:
                del shard[tag]
            elif not self.remove(tag, entry):
                strange.append((tag, entry))
        return strange

    def parts(self) -> Iterator[list[int]]:
        """All entries, some at a time: each part is as it is when it is asked for."""
        for shard in self._shards:
            yield list(shard.values())
        yield list(self._twins.values())

    def take_any(self) -> int | None:
        """Remove some key and return its entry; ``None`` when empty."""
        while self._cursor < _SHARDS:
            shard = self._shards[self._cursor]
            if shard:
                return shard.popitem()[1]
            self._cursor += 1
        if not self._twins:
            return None
        entry = self._twins.popitem()[1]
        del self._twin_keys[entry]
        return entry

    def _check(self, packed: bytes, found: list[int | None]) -> Sequence[int | None]:
        """Correct what the tags alone said."""
        twins, same = self._twins.get, self._table.same_keys
        for at, entry in enumerate(found):
            key = packed[at * KEY_SIZE : (at + 1) * KEY_SIZE]
            if entry is None or not same((entry,), key):
                found[at] = twins(key)
        return found if None in found else _column(found)
