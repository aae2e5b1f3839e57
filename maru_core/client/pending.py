"""An ACQUIRE that was sent and is asked after later, for callers that may not wait."""

from __future__ import annotations

from array import array

from maru_core.client.channel import Channel
from maru_core.client.columns import acquired, join_keys
from maru_core.client.holdings import Holdings
from maru_core.client.link import Link
from maru_core.client.session import Session
from maru_core.client.values import Lease
from maru_core.errors import StaleEpoch, Unavailable
from maru_core.protocol import NO_ENTRY, Op, Presence


class LeaseBuilder:
    """Puts the replies to the parts of one batch together. Parts that are never asked for stay ABSENT."""

    def __init__(self, session: Session, keys: tuple[bytes, ...], holdings: Holdings) -> None:
        self._session = session
        self._holdings = holdings
        self._keys = keys
        self._statuses = b""
        self._entries = array("I")
        self._generations = array("I")
        self._lengths = array("Q")
        self.ids: tuple[int, ...] = ()

    def add(self, part: tuple[int, bytes, array[int], array[int], array[int]]) -> bool:
        """Take one part; whether every key of it is READY. Raises StaleEpoch when it is void already."""
        lease, statuses, entries, generations, lengths = part
        if lease:
            # Columns of its own: those below may grow.
            self._holdings.reads(self._session.holder, lease, entries[:], generations[:])
            self.ids += (lease,)
        if self._statuses:
            self._statuses += statuses
            self._entries += entries
            self._generations += generations
            self._lengths += lengths
        else:
            self._statuses, self._entries, self._generations, self._lengths = statuses, entries, generations, lengths
        return statuses.count(Presence.READY) == len(statuses)

    def build(self) -> Lease:
        """The lease over all keys."""
        missing = len(self._keys) - len(self._statuses)
        if missing:
            self._statuses += bytes([Presence.ABSENT]) * missing
            self._entries.extend([NO_ENTRY] * missing)
            self._generations.extend([0] * missing)
            self._lengths.extend([0] * missing)
        session = self._session
        return Lease(
            session.epoch,
            session.id,
            self.ids,
            self._keys,
            self._statuses,
            self._entries,
            self._generations,
            self._lengths,
        )


class PendingAcquire:
    """Made by :meth:`MaruHandler.submit_acquire`. Used on the thread that made it; ends by a lease or by ``cancel``.

    One that is dropped without either is cancelled, so nothing stays leased for nobody.
    """

    def __init__(
        self,
        link: Link,
        session: Session,
        keys: tuple[bytes, ...],
        parts: list[range],
        leading: bool,
        weights_epoch: int | None,
    ) -> None:
        self._link = link
        self._session = session
        self._keys = keys
        self._parts = parts
        self._leading = leading
        self._weights_epoch = weights_epoch
        self._builder = LeaseBuilder(session, keys, link.holdings)
        self._next = 0
        self._sent: tuple[Channel, int] | None = None
        self._done = not parts
        self._submit()

    def poll(self, timeout: float = 0.0) -> Lease | None:
        """The lease, or ``None`` when it has not come within ``timeout`` seconds (0: do not wait).

        Raises Unavailable, StaleEpoch, ServerError or ProtocolError when it never will; nothing is leased then. After
        the lease was handed out, or after an error or ``cancel``, further calls raise Unavailable.
        """
        if self._done and not self._keys:
            return self._builder.build()
        if self._done or self._sent is None:
            raise Unavailable("this PendingAcquire is over: it was answered, failed or was cancelled before")
        link, session = self._link, self._session
        if link.live is not session:
            error = link.voided(session)
            self.cancel()
            raise error
        channel, request_id = self._sent
        try:
            reply = link.collect(channel, request_id, timeout)
            if reply is None:
                return None
            part = self._parts[self._next - 1]
            complete = self._builder.add(acquired(link.results(reply, session), len(part), session.pools))
            if self._next == len(self._parts) or (self._leading and not complete):
                self._done = True
                return self._builder.build()
            self._sent = None
            self._submit()
        except StaleEpoch:
            self._done = True
            link.lose(session)
            raise
        except BaseException:
            self.cancel()
            raise
        return None

    def cancel(self) -> None:
        """Give up: whatever was or will be leased for this is given back. Never blocks; idempotent."""
        if self._done:
            return
        self._done = True
        if self._sent is not None:
            channel, request_id = self._sent
            self._link.give_up(channel, self._session, Op.ACQUIRE, request_id)
            self._link.wake()  # an answer that is late may mean that the server is away
        if self._builder.ids:
            self._link.end_lease(self._session.holder, self._builder.ids)

    def _submit(self) -> None:
        if self._done:
            return
        part = self._parts[self._next]
        self._next += 1
        blob = join_keys(self._keys[part.start : part.stop])
        self._sent = self._link.submit(self._session, Op.ACQUIRE, [self._weights_epoch, blob, self._leading])

    def __del__(self) -> None:
        # Not on its own thread's socket: a finalizer may run on any thread. The background thread confirms it.
        if getattr(self, "_done", True):
            return
        self._done = True
        if self._sent is not None:
            self._sent[0].forget(self._sent[1])
            self._link.defer(self._session.holder, Op.CANCEL, (self._sent[1],))
        if self._builder.ids:
            self._link.end_lease(self._session.holder, self._builder.ids)
