"""Requests of one handler to its server, on any thread, and whether there is one to send them to.

Each thread has a socket of its own. While the link is down calls fail at once; only the thread of
:mod:`maru_core.client.upkeep` waits for the server, and brings the link up again.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from attrs import define, frozen

from maru_core import logs
from maru_core.access import ClientKeys
from maru_core.client.channel import Channel, new_context
from maru_core.client.holdings import Holdings
from maru_core.client.session import ForkGuard, Session
from maru_core.errors import (
    MaruError,
    ServerError,
    StaleEpoch,
    Unavailable,
    VersionMismatch,
)
from maru_core.protocol import Code, Op
from maru_core.protocol.codec import encode, pack_u64

T = TypeVar("T")

#: Waiting callers look this often, in seconds, whether the link went down meanwhile.
SLICE = 0.1
#: An unanswered request says something about the server only when it was given this many seconds.
TELLING_WAIT = SLICE
#: Operations whose late execution would take or change something: cancelled by id when given up.
_WITH_EFFECTS = frozenset({Op.RESERVE, Op.COMMIT, Op.ABORT, Op.ACQUIRE, Op.DELETE, Op.RESET})


@frozen(eq=False)
class Chore:
    """Work for the background thread under one (epoch, session): lease ids, request ids, or (entry, generation)s."""

    holder: tuple[int, int]
    op: Op
    items: tuple[Any, ...]


@define(eq=False)
class SharedLease:
    """Leases of one batch, given back when nothing shows any of its ``left`` objects any more."""

    holder: tuple[int, int]
    leases: tuple[int, ...]
    left: int


class Gone(weakref.ref[object]):
    """Tells the background thread that an object is gone, and with it one of those that its lease is kept for.

    Its callback must be a C function: in a finalizer written in Python, signal handlers may run, and what they raise is
    dropped together with the rest of the finalizer.
    """

    __slots__ = ("shared",)
    shared: SharedLease


class Link:
    """State that calls and upkeep share. ``live`` is the session to use, ``None`` while down; ``problem`` says why.

    ``session`` is the latest one, also while down, and ``lost`` one that the server called void. ``inbox`` holds what
    is put off for the upkeep; ``None`` in it means: look at the server now.
    """

    def __init__(self, url: str, *, request_timeout: float, keys: ClientKeys | None = None) -> None:
        self.url = url
        self.keys = keys
        self.live: Session | None = None
        self.session: Session | None = None
        self.lost: Session | None = None
        self.problem: MaruError = Unavailable(f"no Maru server has answered at {url} yet")
        #: Weights epoch of this handler; the first session sets it, and it outlives every server.
        self.weights_epoch: int | None = None
        self.closed = False
        self.ids = itertools.count(1)
        self.inbox: queue.SimpleQueue[Chore | Gone | None] = queue.SimpleQueue()
        #: Only living references tell.
        self._watched: dict[int, Gone] = {}
        self.context = new_context()
        self.guard = ForkGuard(self._on_fork)
        self.holdings = Holdings()
        self._request_timeout = request_timeout
        self._log = logs.get_logger(__name__)
        self._local = threading.local()
        self._channels: weakref.WeakSet[Channel] = weakref.WeakSet()
        self._channels_lock = threading.Lock()

    def up(self) -> Session:
        """The live session; raises Unavailable, saying why, at once when there is none."""
        session = self.live
        if session is None:
            raise self._away()
        return session

    def call(
        self,
        session: Session,
        op: Op,
        arguments: Sequence[Any],
        parse: Callable[[list[Any]], T],
        timeout: float | None = None,
        issued: list[int] | None = None,
    ) -> T:
        """One request and its parsed reply. Whatever goes wrong, what the request took is cancelled by id.

        Its id is added to ``issued`` before it is sent, for callers that may not keep the result either.
        Raises Unavailable, StaleEpoch, ServerError, and ProtocolError when ``parse`` rejects the reply.
        """
        request_id = next(self.ids)
        if issued is not None:
            issued.append(request_id)
        frame = encode((int(op), request_id, session.epoch, session.id, *arguments))
        channel = self._channel(session)
        wait = self._request_timeout if timeout is None else timeout
        with channel.lock:
            try:
                channel.send(frame)
                reply = channel.receive(request_id, wait if wait < SLICE else SLICE)
                if reply is None and wait > SLICE:
                    reply = self._keep_waiting(channel, request_id, session, wait - SLICE)
                if reply is not None:
                    return parse(self.results(reply, session))
            except StaleEpoch:
                self.lose(session)
                raise
            except BaseException:
                self._give_up(channel, session, op, request_id)
                raise
            self._give_up(channel, session, op, request_id)
        raise self.overdue(session, op, wait)

    def submit(self, session: Session, op: Op, arguments: Sequence[Any]) -> tuple[Channel, int]:
        """Send a request whose reply :meth:`collect` takes later, on this thread. Never blocks."""
        request_id = next(self.ids)
        frame = encode((int(op), request_id, session.epoch, session.id, *arguments))
        channel = self._channel(session)
        with channel.lock:
            channel.expect(request_id)
            try:
                channel.send(frame)
            except MaruError:
                channel.forget(request_id)
                raise
        return channel, request_id

    def collect(self, channel: Channel, request_id: int, timeout: float) -> list[Any] | None:
        """The reply to a submitted request, ``None`` when it has not come within ``timeout`` seconds."""
        with channel.lock:
            return channel.receive(request_id, timeout)

    def results(self, reply: list[Any], session: Session) -> list[Any]:
        """Results of a reply; raises what its code and epoch mean."""
        if reply[2] == 0 and reply[1] == session.epoch:
            return reply[3:]
        raise self.refusal(reply, session.epoch)

    def give_up(self, channel: Channel, session: Session, op: Op, request_id: int) -> None:
        """Cancel a submitted request by id, on its own socket first and again until the server confirms it."""
        with channel.lock:
            channel.forget(request_id)
            self._give_up(channel, session, op, request_id)

    def defer(self, holder: tuple[int, int], op: Op, items: tuple[Any, ...]) -> None:
        """Hand work to the background thread, done when the server is there. Never blocks; safe in finalizers.

        It is dropped when the session ends first: the server has freed everything then.
        """
        self.inbox.put(Chore(holder, op, items))

    def end_lease(self, holder: tuple[int, int], leases: tuple[int, ...]) -> None:
        """Nothing is read under these any more. Never blocks; safe in finalizers."""
        self.holdings.has_read(leases)
        self.defer(holder, Op.RELEASE, leases)

    def watch(self, shared: SharedLease, thing: object) -> None:
        """Count ``thing`` as one of what ``shared`` is left for, until it is gone."""
        gone = Gone(thing, self.inbox.put)
        gone.shared = shared
        self._watched[id(gone)] = gone

    def noticed(self, gone: Gone) -> None:
        """On the background thread: what is told by ``gone``; ends the lease when it was the last."""
        self._watched.pop(id(gone), None)
        gone.shared.left -= 1
        if not gone.shared.left:
            self.end_lease(gone.shared.holder, gone.shared.leases)

    def end_writing(self, holder: tuple[int, int], items: tuple[tuple[int, int], ...]) -> None:
        """Nothing is written to these pages (entry, generation) any more, and nothing of them is to be stored."""
        self.holdings.wrote((entry for entry, _ in items), (generation for _, generation in items))
        self.defer(holder, Op.ABORT, items)

    def voided(self, session: Session) -> MaruError:
        """Why ``session`` is not live: StaleEpoch when another took its place, else what keeps the link down."""
        live = self.live
        if live is not None and live is not session:
            return StaleEpoch(f"the Maru server at {self.url} restarted; what was held before is void")
        return self._away()

    def session_of(self, epoch: int) -> Session:
        """The latest session if it covers ``epoch``, even while the link is down; raises StaleEpoch, Unavailable."""
        session = self.session
        if session is not None and session.covers(epoch) and not self.closed:
            return session
        if self.closed or session is None:
            raise self._away()
        raise StaleEpoch(f"the Maru server at {self.url} restarted; what was held before is void")

    def wake(self) -> None:
        """Look at the server now."""
        self.inbox.put(None)

    def overdue(self, session: Session, op: Op, wait: float) -> Unavailable:
        """Note that a request was not answered in time; the error to raise. Opens the circuit if that is telling."""
        if self.live is None:
            return Unavailable(str(self.problem))
        error = Unavailable(f"the Maru server at {self.url} did not answer {op.name} within {wait:g} s")
        if wait >= TELLING_WAIT and self.live is session:
            self.problem = error
            self.live = None
        self.wake()
        return error

    def close(self) -> bool:
        """Fail every call from now on and close the sockets of all threads; whether every one of them is closed."""
        self.closed = True
        self.problem = Unavailable("this MaruHandler is closed")
        self.live = None
        with self._channels_lock:
            channels = list(self._channels)
        idle = [channel for channel in channels if channel.lock.acquire(timeout=SLICE)]
        for channel in idle:
            channel.close()
            channel.lock.release()
        return len(idle) == len(channels)

    def _channel(self, session: Session) -> Channel:
        """This thread's socket, a new one for each server: the old one would only try again after a pause."""
        channel: Channel | None = getattr(self._local, "channel", None)
        if channel is not None:
            if self._local.epoch == session.epoch:
                return channel
            with channel.lock:
                channel.close()
        with self._channels_lock:
            if self.closed:
                raise self._away()
            channel = Channel(self.context, self.url, self.keys)
            self._channels.add(channel)
        self._local.channel, self._local.epoch = channel, session.epoch
        return channel

    def _keep_waiting(self, channel: Channel, request_id: int, session: Session, wait: float) -> list[Any] | None:
        """Wait on, but no longer than the link is up; have the background thread look at the server."""
        self.wake()
        deadline = time.monotonic() + wait
        while (remaining := deadline - time.monotonic()) > 0 and self.live is session:
            reply = channel.receive(request_id, min(remaining, SLICE))
            if reply is not None:
                return reply
        return None

    def _give_up(self, channel: Channel, session: Session, op: Op, request_id: int) -> None:
        if op not in _WITH_EFFECTS:
            return
        frame = encode((int(Op.CANCEL), next(self.ids), session.epoch, session.id, pack_u64((request_id,))))
        try:
            channel.send(frame)
        except Unavailable as error:
            self.note("debug", "cancellation put off", request=request_id, reason=str(error))
        self.defer(session.holder, Op.CANCEL, (request_id,))

    def lose(self, session: Session) -> None:
        """The server said that this session is void: have another one opened."""
        self.lost = session
        if self.live is session:
            self.problem = StaleEpoch(f"the Maru server at {self.url} restarted; a new session is being opened")
            self.live = None
        self.wake()

    def _away(self) -> MaruError:
        # A fresh object each time: one exception raised on several threads would mix their tracebacks.
        problem = self.problem
        if isinstance(problem, ServerError):
            return ServerError(problem.code, str(problem))
        return type(problem)(str(problem))

    def refusal(self, reply: list[Any], epoch: int) -> MaruError:
        """What a reply other than a success means when it was asked for in ``epoch`` (0: in any)."""
        code = reply[2]
        text = str(reply[3]) if len(reply) > 3 else ""
        if code == Code.VERSION:
            return VersionMismatch(f"the Maru server at {self.url} refuses this client: {text}")
        if code == Code.STALE_EPOCH or (epoch and reply[1] != epoch):
            return StaleEpoch(f"the Maru server at {self.url} restarted; what was held before is void")
        if code == Code.NO_SESSION:
            return StaleEpoch(f"the Maru server at {self.url} no longer knows this session; what it held is void")
        if code == Code.CANCELLED:
            return Unavailable(f"the request was cancelled before it reached the Maru server at {self.url}")
        return ServerError(code, f"the Maru server at {self.url} answered {_name_of(code)}: {text}")

    def note(self, level: str, event: str, **values: object) -> None:
        """Log; a log that cannot be written must not end a call or the upkeep."""
        try:
            getattr(self._log, level)(event, **values)
        except (OSError, ValueError):  # the log goes to a pipe or file that was closed: there is nowhere to say so
            return

    def _on_fork(self) -> None:
        """In a forked child: no thread, no socket, no session of the parent is to be touched."""
        self.live = None
        self.session = None
        self.closed = True
        self.problem = MaruError("a MaruHandler cannot be used in a forked process; connect a new one there")
        self._channels_lock = threading.Lock()
        self._local = threading.local()


def _name_of(code: int) -> str:
    return Code(code).name if code in Code._value2member_map_ else f"code {code}"
