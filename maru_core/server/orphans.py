"""Which objects are not worth making room for, because there was none for one that precedes them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, field


@define
class Orphans:
    """Keys of one request for which there was no room, and those behind them.

    An object is found only behind its parent. A parent is kept while room is made for its child; one that could not be
    stored keeps nobody, and room behind the gap would be made by evicting what lies before it.
    """

    #: The counter of them: that of those before them.
    reason: str = field(default="skipped_no_room", init=False)
    _keys: set[bytes] = field(factory=set, init=False)

    @property
    def is_empty(self) -> bool:
        """Whether there was room for all so far."""
        return not self._keys

    def note(self, keys: Sequence[bytes], reason: str) -> None:
        """There was no room for ``keys``, which ``reason`` counts."""
        self.reason = reason
        self._keys.update(keys)

    def leading(self, keys: Sequence[bytes], parents: Sequence[bytes]) -> int:
        """How many of ``keys``, from the first, are such; ``parents``: none, or one per key."""
        if not self._keys or not parents:
            return 0
        for count, (key, parent) in enumerate(zip(keys, parents, strict=True)):
            if parent not in self._keys:
                return count
            self._keys.add(key)
        return len(keys)
