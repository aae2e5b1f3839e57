"""Whether stored bytes are what was stored: judges objects, counts and reports those that are damaged."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

from attrs import define, field

from maru_core.checksum import NO_CHECKSUM, Verify, checksum, is_covered
from maru_core.client.regions import Regions
from maru_core.errors import StaleEpoch
from maru_core.pool_format import State

#: Damaged objects that are remembered, so that each is counted and reported once.
_REMEMBERED: Final = 4096

#: Told of a damaged object: epoch, entry, generation, key, and what is wrong with it. Must not block.
Report = Callable[[int, int, int, bytes, str], None]


@define(eq=False)
class Checks:
    """How one handler verifies, and what it found. Thread-safe.

    ``mode`` is ``maru_verify``. An object is *damaged* when its header does not hold or is not that of what was granted
    although nothing took the object away (``header_mismatches``), or when its bytes do not have the checksum in its
    header (``checksum_mismatches``). Each is counted and reported once.
    """

    mode: Verify
    _report: Report
    header_mismatches: int = 0
    checksum_mismatches: int = 0
    _lock: Any = field(factory=threading.Lock)
    _found: dict[tuple[int, int, int], None] = field(factory=dict)

    def checksums(
        self, regions: Regions, keys: Sequence[bytes], entries: Sequence[int], lengths: Sequence[int]
    ) -> list[int]:
        """For each object its checksum, NO_CHECKSUM where the mode does not cover it; empty when it covers none.

        Call it once the bytes are in place, before they are published: then they may still be in the cache.
        """
        mode = self.mode
        if mode == "off" or not any(is_covered(mode, key) for key in keys):
            return []
        return [
            checksum(regions.room(entry, length)) if is_covered(mode, key) else NO_CHECKSUM
            for key, entry, length in zip(keys, entries, lengths, strict=True)
        ]

    def judge(self, regions: Regions, epoch: int, key: bytes, entry: int, generation: int, length: int) -> bool:
        """Whether this object is whole: its header, and what the mode covers of its bytes.

        Call it after the copy has completed: then it is about what was copied. The bytes were acquired before that;
        headers are acquired here. False is a miss, whatever the reason.
        """
        what = self._fault(regions, key, entry, generation, length)
        if what:
            self._damaged(epoch, entry, generation, key, what)
        return what is None

    def _fault(self, regions: Regions, key: bytes, entry: int, generation: int, length: int) -> str | None:
        """What is wrong with an object: ``None`` nothing, empty when it is gone, else what is damaged."""
        proven = regions.is_granted(entry, generation, length, key)
        if proven and not is_covered(self.mode, key):
            return None
        try:
            header = regions.header(entry, length)
            if not proven or header is None:
                # One that was deleted or reset is gone, not damaged. A header that does not hold says neither.
                return "header" if header is None or header.state == State.READY else ""
            if header.checksum in (NO_CHECKSUM, checksum(regions.room(entry, length))):
                return None
        except StaleEpoch:  # unmapped meanwhile
            return ""
        # Bytes of an object that went away while they were read prove nothing.
        return "checksum" if regions.is_granted(entry, generation, length, key) else ""

    def _damaged(self, epoch: int, entry: int, generation: int, key: bytes, what: str) -> None:
        place = epoch, entry, generation
        with self._lock:
            if place in self._found:
                return
            self._found[place] = None
            while len(self._found) > _REMEMBERED:
                del self._found[next(iter(self._found))]
            if what == "header":
                self.header_mismatches += 1
            else:
                self.checksum_mismatches += 1
        self._report(*place, key, what)
