"""A look-up of many keys that takes the caller's thread only a little at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from attrs import evolve

from maru_core.client import Lease, PendingAcquire
from maru_core.errors import StaleEpoch, Unavailable

#: What is hashed, packed and sent at once: 128 chunks of 256 tokens, or 2,048 keys, take about half a millisecond, and
#: their answer half of that.
MAX_CHUNKS = 128
MAX_OBJECTS = 2048


class Asker(Protocol):
    """What a question needs of a session: see :class:`maru_core.client.MaruHandler`."""

    @property
    def weights_epoch(self) -> int:
        """The one that this session has seen."""

    def submit_acquire(self, keys: Sequence[bytes], *, leading: bool, weights_epoch: int) -> PendingAcquire:
        """Send an ``acquire`` without waiting."""

    def release(self, lease: Lease) -> None:
        """End a lease."""


class Question:
    """Which of the objects of chunks ``[first, end)`` are there, up to the first that is not: leased slice by slice.

    A slice is sent when the one before was answered with all of its objects, so a prompt that nobody has stored costs
    one. All are asked under one weights epoch. Ends by a lease, an error or :meth:`cancel`; until then it holds what
    was leased so far.
    """

    def __init__(
        self,
        asker: Asker,
        keys: Callable[[int, int], Sequence[bytes]],
        first: int,
        end: int,
        objects: int,
        clock: Callable[[], float],
    ) -> None:
        """Send the first slice; raises MaruError. ``clock`` in seconds.

        ``keys(first, end)``: of all objects of these chunks, ``objects`` of each. May hash what was not hashed before.
        """
        self._asker = asker
        self._keys = keys
        self._next = first
        self._end = end
        self._step = max(1, min(MAX_CHUNKS, MAX_OBJECTS // objects))
        self._clock = clock
        self._weights_epoch = asker.weights_epoch
        self._lease: Lease | None = None
        self._asked = 0
        #: Slices that were sent.
        self.slices = 0
        self._pending: PendingAcquire | None = None
        self._send()

    def poll(self, timeout: float = 0.0) -> Lease | None:
        """The lease over all slices that were asked for, or ``None``: not after ``timeout`` seconds.

        May take the time of making one more slice longer. Raises MaruError when it will never come; nothing is leased
        then.
        """
        deadline = self._clock() + timeout
        try:
            while True:
                if self._pending is None:
                    raise Unavailable("this look-up is over: it was answered, failed or was cancelled before")
                lease = self._pending.poll(timeout)
                if lease is None:
                    return None
                self._pending = None
                self._take(lease)
                if lease.leading < self._asked or self._next >= self._end:
                    whole, self._lease = self._lease, None
                    return whole
                self._send()
                timeout = deadline - self._clock()
                if timeout <= 0:
                    return None
        except BaseException:
            self.cancel()
            raise

    def end(self) -> Lease | None:
        """Ask no further: the lease over the slices that were answered, ``None`` when none was. As if it were all."""
        lease, self._lease = self._lease, None
        self.cancel()
        return lease

    def cancel(self) -> None:
        """Give up: whatever was or will be leased for this is given back. Never blocks; idempotent."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.cancel()
        lease, self._lease = self._lease, None
        if lease is not None:
            self._asker.release(lease)

    def _send(self) -> None:
        first, self._next = self._next, min(self._end, self._next + self._step)
        keys = self._keys(first, self._next)
        self._asked = len(keys)
        self._pending = self._asker.submit_acquire(keys, leading=True, weights_epoch=self._weights_epoch)
        self.slices += 1

    def _take(self, lease: Lease) -> None:
        before = self._lease
        if before is None:
            self._lease = lease
            return
        if (before.epoch, before.session) != (lease.epoch, lease.session):
            self._asker.release(lease)
            raise StaleEpoch("the Maru server restarted during a look-up; what it had leased before is void")
        self._lease = evolve(
            before,
            ids=before.ids + lease.ids,
            keys=before.keys + lease.keys,
            statuses=before.statuses + lease.statuses,
            entries=before.entries + lease.entries,
            generations=before.generations + lease.generations,
            lengths=before.lengths + lease.lengths,
        )
