"""What a batch of calls has taken from the server, and how it is given back. Never blocks."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import suppress

from attrs import define, field

from maru_core.client.link import Link
from maru_core.errors import MaruError
from maru_core.protocol import Op, ReserveStatus


@define(eq=False)
class Taken:
    """What one batch has asked for and been given, noted early enough to be undone whenever an exception comes.

    A signal handler may raise between any two instructions, so also when a reply was read and nobody has it yet. So
    each request is noted before it is sent; a server can undo it by its id.
    """

    holder: tuple[int, int] = (0, 0)
    requests: list[int] = field(factory=list)
    #: Entries, generations, lengths.
    written: list[tuple[Sequence[int], Sequence[int], Sequence[int]]] = field(factory=list)
    read: list[int] = field(factory=list)

    def undo(self, link: Link) -> None:
        """Give back all of it, also what its replies said to nobody. Idempotent."""
        for entries, generations, lengths in self.written:
            end_writing(link, self.holder, entries, generations, lengths)
        if self.read:
            link.end_lease(self.holder, tuple(self.read))
        if self.requests:
            link.defer(self.holder, Op.CANCEL, tuple(self.requests))


def end_writing(
    link: Link, holder: tuple[int, int], entries: Sequence[int], generations: Sequence[int], lengths: Sequence[int]
) -> None:
    """These pages go back; whatever was written to them leaves this host's caches before the server hears of it."""
    with suppress(MaruError):  # of an epoch that is over: nobody is told, and the pools are unmapped
        link.session_of(holder[0]).regions.settle(entries, lengths)
    link.end_writing(holder, tuple(zip(entries, generations, strict=True)))


def granted(
    statuses: bytes, entries: array[int], generations: array[int], lengths: Sequence[int]
) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
    """Entries, generations and lengths of the keys that are NEW."""
    if statuses.count(ReserveStatus.NEW) == len(statuses):
        return entries, generations, lengths
    new = [index for index, status in enumerate(statuses) if status == ReserveStatus.NEW]
    return [entries[index] for index in new], [generations[index] for index in new], [lengths[index] for index in new]
