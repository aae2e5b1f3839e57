"""What the low-level calls answer: columns, one item per key, in the order of the keys."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from enum import Enum

from attrs import field, frozen

from maru_core.protocol import Presence, ReserveStatus


class StoreResult(Enum):
    """What became of one object that was to be stored."""

    STORED = "stored"
    #: Somebody stored it before; nothing was copied.
    PRESENT = "present"
    #: Another session is writing it right now; nothing was copied.
    BUSY = "busy"
    #: Nothing could be evicted to make room.
    NO_ROOM = "no room"
    #: The weights epoch is stale, the length is impossible, or a reset came before the commit.
    REFUSED = "refused"


@frozen(eq=False)
class Grants:
    """Answer of ``reserve``. ``statuses[i]`` is a ReserveStatus; entry and generation mean something where it is NEW.

    ``epoch`` and ``session`` say under which connection they hold; ``lengths`` in bytes.
    """

    epoch: int
    session: int
    keys: tuple[bytes, ...] = field(repr=False)
    statuses: bytes
    entries: array[int]
    generations: array[int]
    lengths: Sequence[int] = field(repr=False)

    @property
    def new(self) -> Sequence[int]:
        """Indices of the keys that are to be written: status NEW."""
        statuses = self.statuses
        if statuses.count(ReserveStatus.NEW) == len(statuses):
            return range(len(statuses))
        return [index for index, status in enumerate(statuses) if status == ReserveStatus.NEW]


@frozen(eq=False)
class Lease:
    """Answer of ``acquire``. ``statuses[i]`` is a Presence; the other columns mean something where it is READY.

    ``ids`` has one lease of the server per message that the batch took, none when nothing was found. The bytes stay
    in place until :meth:`MaruHandler.release`; nothing else ends a lease while the process lives.
    """

    epoch: int
    session: int
    ids: tuple[int, ...]
    keys: tuple[bytes, ...] = field(repr=False)
    statuses: bytes
    entries: array[int]
    generations: array[int]
    lengths: array[int]

    @property
    def leading(self) -> int:
        """How many keys from the first on are READY without a gap."""
        statuses = self.statuses
        return len(statuses) - len(statuses.lstrip(_READY))


_READY = bytes([Presence.READY])
