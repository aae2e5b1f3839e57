"""Objects that a lease keeps in place, as this process sees them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from attrs import define, field

from maru_core.client.checks import Checks
from maru_core.client.regions import Regions
from maru_core.errors import StaleEpoch


@define(eq=False)
class Located:
    """Objects of one epoch that a lease keeps in place, as this process sees them. Made after the lease was granted.

    Their bytes are acquired, all at once, before the first of them is handed out.
    """

    epoch: int
    entries: Sequence[int]
    generations: Sequence[int]
    lengths: Sequence[int]
    keys: Sequence[bytes]
    _regions: Regions
    _checks: Checks
    _acquired: bool = field(default=False, init=False)

    def view(self, index: int) -> memoryview:
        """Bytes of object ``index``; raises StaleEpoch when the pools were unmapped since."""
        self._acquire()
        return self._regions.room(self.entries[index], self.lengths[index])

    def views(self) -> Sequence[memoryview]:
        """:meth:`view` of each, in order and at once."""
        self._acquire()
        return self._regions.rooms(self.entries, self.lengths)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Wrap the copy in this: tells device hints what is about to be read, and when that is over."""
        self._acquire()  # first: hints may read ahead
        with self._regions.reading(self.entries, self.lengths):
            yield

    def verify(self) -> list[bool]:
        """For each object: whether a copy that has completed by now is the object that was leased. Looks at headers."""
        return self._regions.verify(self.entries, self.generations, self.lengths)

    def check(self, indices: Iterable[int] | None = None) -> list[bool]:
        """:meth:`verify` for ``indices`` (``None``: all), and whether header and bytes are undamaged; needs the keys.

        Reads the bytes of those objects that ``maru_verify`` covers. What is damaged is reported to the server, which
        drops it.
        """
        with suppress(StaleEpoch):  # then each of them is gone
            self._acquire()
        judge, regions, epoch = self._checks.judge, self._regions, self.epoch
        keys, entries, generations, lengths = self.keys, self.entries, self.generations, self.lengths
        chosen = range(len(entries)) if indices is None else indices
        return [judge(regions, epoch, keys[i], entries[i], generations[i], lengths[i]) for i in chosen]

    def check_again(self, index: int) -> bool:
        """:meth:`check` for an object that was good: its bytes are compared once more only in mode ``full``."""
        if self._checks.mode == "full":
            return self.check((index,))[0]
        return self._regions.is_granted(
            self.entries[index], self.generations[index], self.lengths[index], self.keys[index]
        )

    def _acquire(self) -> None:
        if not self._acquired:
            # Two threads that come here at once do it twice, which harms nobody.
            self._regions.acquire(self.entries, self.lengths)
            self._acquired = True
