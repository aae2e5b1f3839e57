"""Key to first entry, as many small dicts: a dict that grows is rebuilt in one go, and a big one takes too long.

With 64 shards a rebuild stays below a millisecond up to several million keys. Chunk keys are hashes, so their last byte
spreads them evenly; other keys only lose the benefit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_SHARDS = 64
_LAST = 31


class KeyIndex:
    """Maps 32-byte keys to numbers."""

    def __init__(self) -> None:
        self._shards: list[dict[bytes, int]] = [{} for _ in range(_SHARDS)]
        #: By last byte of the key.
        self._route = self._shards * (256 // _SHARDS)
        self._getters = [shard.get for shard in self._route]
        self._cursor = 0

    def __len__(self) -> int:
        return sum(map(len, self._shards))

    def find(self, keys: Sequence[bytes], packed: bytes | None = None) -> list[int | None]:
        """The entry of each key, ``None`` where there is none. ``packed``: the keys as one column, if at hand."""
        column = b"".join(keys) if packed is None else packed
        getters = self._getters
        return [getters[last](key) for last, key in zip(column[_LAST :: _LAST + 1], keys, strict=True)]

    def get(self, key: bytes) -> int | None:
        """The entry of one key."""
        return self._route[key[_LAST]].get(key)

    def put(self, keys: Sequence[bytes], entries: Iterable[int], packed: bytes) -> None:
        """Enter keys, ``packed`` as one column; those beyond the last of ``entries`` are left out."""
        shards = map(self._route.__getitem__, packed[_LAST :: _LAST + 1])
        for shard, key, entry in zip(shards, keys, entries, strict=False):
            shard[key] = entry

    def remove(self, key: bytes, entry: int) -> bool:
        """Remove ``key`` if it leads to ``entry``; whether it did."""
        shard = self._route[key[_LAST]]
        if shard.get(key) != entry:
            return False
        del shard[key]
        return True

    def remove_all(self, keys: Iterable[bytes], entries: Iterable[int]) -> list[tuple[bytes, int]]:
        """:meth:`remove` for many; returns those that were not here."""
        route, strange = self._route, []
        for key, entry in zip(keys, entries, strict=True):
            shard = route[key[_LAST]]
            if shard.get(key) == entry:
                del shard[key]
            else:
                strange.append((key, entry))
        return strange

    def take_any(self) -> int | None:
        """Remove some key and return its entry; ``None`` when empty."""
        while self._cursor < _SHARDS:
            shard = self._shards[self._cursor]
            if shard:
                return shard.popitem()[1]
            self._cursor += 1
        return None
