"""What a handler still uses: pages that it writes and objects that it reads.

Its server may be killed and come back on the same memory. Then it has to be told, and nothing else may be added under
the session of before: a page that is not in the list is given to others.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from attrs import frozen

from maru_core.errors import StaleEpoch
from maru_core.protocol import NO_ENTRY
from maru_core.protocol.codec import pack_u32, pack_u64
from maru_core.protocol.messages import MAX_RESUME

#: Entries and generations.
Columns = tuple[Sequence[int], Sequence[int]]


@frozen
class Snapshot:
    """Reservations (generation by first entry) and leases (columns by id) at one moment."""

    writing: dict[int, int]
    reading: dict[int, Columns]

    def to_wire(self, session: int, attempt: int, limit: int = MAX_RESUME) -> Iterator[list[Any]]:
        """What HELLO says of an earlier ``session``, in parts of at most ``limit`` items.

        ``attempt``: a number that no earlier listing of this session had.
        """
        part = 0
        writing = iter(self.writing.items())
        listing = _Listing(list(islice(writing, limit)))
        while listing.size == limit:
            yield [session, attempt, part, False, *listing.columns()]
            part += 1
            listing = _Listing(list(islice(writing, limit)))
        for lease, columns in self.reading.items():
            # Keys that were not found have no entry.
            held = [(entry, generation) for entry, generation in zip(*columns, strict=True) if entry != NO_ENTRY]
            at = 0
            while at < len(held):
                if listing.size == limit:
                    yield [session, attempt, part, False, *listing.columns()]
                    part += 1
                    listing = _Listing([])
                some = held[at : at + limit - listing.size]
                listing.reads(lease, some)
                at += len(some)
        yield [session, attempt, part, True, *listing.columns()]


class _Listing:
    """One part of what HELLO says."""

    def __init__(self, writing: list[tuple[int, int]]) -> None:
        self.size = len(writing)
        self._writing = writing
        self._leases: list[int] = []
        self._sizes: list[int] = []
        self._held: list[tuple[int, int]] = []

    def reads(self, lease: int, held: list[tuple[int, int]]) -> None:
        """Add objects of a lease."""
        self.size += len(held)
        self._leases.append(lease)
        self._sizes.append(len(held))
        self._held += held

    def columns(self) -> list[bytes]:
        """Its columns on the wire."""
        return [
            *_packed(self._writing),
            pack_u64(self._leases),
            pack_u32(self._sizes),
            *_packed(self._held),
        ]


def _packed(items: list[tuple[int, int]]) -> tuple[bytes, bytes]:
    return pack_u32([entry for entry, _ in items]), pack_u32([generation for _, generation in items])


class Holdings:
    """Thread-safe. What ends is taken out without a lock, so that finalizers may do it anywhere."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: tuple[int, int] | None = None
        self._writing: dict[int, int] = {}
        self._reading: dict[int, Columns] = {}

    @property
    def is_empty(self) -> bool:
        """Whether nothing is held now; more may come at any time."""
        return not self._writing and not self._reading

    def open(self, holder: tuple[int, int], *, resumed: bool) -> None:
        """From here on things are added under ``holder`` (epoch and session); what was there stays if ``resumed``."""
        with self._lock:
            if not resumed:
                self._writing.clear()
                self._reading.clear()
            self._holder = holder

    def seal(self) -> Snapshot:
        """Add nothing more before :meth:`open`; returns what is there."""
        with self._lock:
            self._holder = None
            return Snapshot(self._writing.copy(), self._reading.copy())

    def writes(self, holder: tuple[int, int], entries: Iterable[int], generations: Iterable[int]) -> None:
        """Pages were reserved; raises StaleEpoch when it is too late for that, and they must not be touched."""
        with self._lock:
            self._check(holder)
            self._writing.update(zip(entries, generations, strict=True))

    def writing(self) -> list[int]:
        """First entries of what is reserved."""
        return list(self._writing)

    def wrote(self, entries: Iterable[int], generations: Iterable[int]) -> None:
        """These are not written any more."""
        writing = self._writing
        for entry, generation in zip(entries, generations, strict=True):
            if writing.get(entry) == generation:
                writing.pop(entry, None)

    def reads(self, holder: tuple[int, int], lease: int, entries: Sequence[int], generations: Sequence[int]) -> None:
        """Objects were leased; raises StaleEpoch when it is too late for that, and they must not be read."""
        with self._lock:
            self._check(holder)
            self._reading[lease] = entries, generations

    def has_read(self, leases: Iterable[int]) -> None:
        """These leases are over."""
        for lease in leases:
            self._reading.pop(lease, None)

    def _check(self, holder: tuple[int, int]) -> None:
        if self._holder != holder:
            raise StaleEpoch("the Maru server restarted while it answered; what it gave is void")
