"""The connection of one handler: up, down, and back up by itself.

Calls run on the caller's thread over a socket of that thread. A background thread with a socket of its own pings,
opens sessions, and delivers what was put off: releases, cancellations, aborts. While the link is down calls fail at
once; only the background thread waits for the server.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import structlog
import zmq
from attrs import frozen

from maru_core.client.channel import Channel
from maru_core.client.session import ForkGuard, Session
from maru_core.errors import (
    MaruError,
    ProtocolError,
    ServerError,
    StaleEpoch,
    Unavailable,
    VersionMismatch,
)
from maru_core.protocol import Code, Op
from maru_core.protocol.codec import encode, pack_u32, pack_u64

T = TypeVar("T")

#: Seconds between pings of a healthy server, and how long one may take before the link counts as down.
PING_INTERVAL = 0.5
PING_TIMEOUT = 1.0
#: Waiting callers look this often, in seconds, whether the link went down meanwhile.
SLICE = 0.1
#: Seconds between attempts while down, after an ordinary failure and after one that a retry hardly mends.
RETRY_INTERVAL = 0.1
RETRY_INTERVAL_REFUSED = 2.0
#: Put-off work is collected this many seconds so that it travels together.
GATHER = 0.001
#: Most items of put-off work in one message.
GATHER_ITEMS = 10_000
#: An unanswered request says something about the server only when it was given this many seconds.
TELLING_WAIT = SLICE
#: How long closing may take, seconds: for the goodbye and for the background thread in all.
FAREWELL = 0.3
JOIN = 1.0

#: Operations whose late execution would take or change something: cancelled by id when given up.
_WITH_EFFECTS = frozenset({Op.RESERVE, Op.COMMIT, Op.ABORT, Op.ACQUIRE, Op.DELETE, Op.RESET})


@frozen(eq=False)
class Chore:
    """Work for the background thread under one (epoch, session): lease ids, request ids, or (entry, generation)s."""

    holder: tuple[int, int]
    op: Op
    items: tuple[Any, ...]


class Link:
    """See the module. ``open_session`` runs on the background thread and may raise any MaruError.

    ``ensure_server`` is called there before each attempt while no server answers; it starts one where the
    configuration says so. ``is_dead`` tells at once, where that can be told, that nobody listens.
    ``live`` is the session to use, ``None`` while down.
    """

    def __init__(
        self,
        url: str,
        open_session: Callable[[Link], Session],
        ensure_server: Callable[[Callable[[], bool]], None],
        is_dead: Callable[[], bool],
        *,
        request_timeout: float,
    ) -> None:
        self.url = url
        self.request_timeout = request_timeout
        self.live: Session | None = None
        #: Weights epoch of this handler; the first session sets it, and it outlives every server.
        self.weights_epoch: int | None = None
        self.problem: MaruError = Unavailable(f"no Maru server has answered at {url} yet")
        self.fatal: MaruError | None = None
        self.settled = threading.Event()
        self._log = structlog.get_logger(__name__)
        self._open_session = open_session
        self._ensure_server = ensure_server
        self._is_dead = is_dead
        self._session: Session | None = None
        self._lost: Session | None = None
        self._closing = False
        self._goodbye = True
        self._last: Session | None = None
        self._ids = itertools.count(1)
        self._inbox: queue.SimpleQueue[Chore | None] = queue.SimpleQueue()
        self._chores: list[Chore] = []
        self._due = 0.0
        self._local = threading.local()
        self._channels: weakref.WeakSet[Channel] = weakref.WeakSet()
        self._channels_lock = threading.Lock()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.guard = ForkGuard(self._on_fork)
        self._own = Channel(self._context, url)  # raises ConfigError for an address that cannot be used
        self._thread = threading.Thread(target=self._run, name="maru-link", daemon=True)

    def start(self) -> None:
        """Start the background thread."""
        self._thread.start()

    # -- calls, on any thread ---------------------------------------------------------------------------------------

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
    ) -> T:
        """One request and its parsed reply. Whatever goes wrong, what the request took is cancelled by id.

        Raises Unavailable, StaleEpoch, ServerError, and ProtocolError when ``parse`` rejects the reply.
        """
        request_id = next(self._ids)
        frame = encode((int(op), request_id, session.epoch, session.id, *arguments))
        channel = self._channel(session)
        wait = self.request_timeout if timeout is None else timeout
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
        request_id = next(self._ids)
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
        raise self._refusal(reply, session)

    def give_up(self, channel: Channel, session: Session, op: Op, request_id: int) -> None:
        """Cancel a submitted request by id, on its own socket first and again until the server confirms it."""
        with channel.lock:
            channel.forget(request_id)
            self._give_up(channel, session, op, request_id)

    def defer(self, holder: tuple[int, int], op: Op, items: tuple[Any, ...]) -> None:
        """Hand work to the background thread, done when the server is there. Never blocks; safe in finalizers.

        It is dropped when the session ends first: the server has freed everything then.
        """
        self._inbox.put(Chore(holder, op, items))

    def voided(self, session: Session) -> MaruError:
        """Why ``session`` is not live: StaleEpoch when another took its place, else what keeps the link down."""
        live = self.live
        if live is not None and live.holder != session.holder:
            return StaleEpoch(f"the Maru server at {self.url} restarted; what was held before is void")
        return self._away()

    def session_of(self, epoch: int) -> Session:
        """The latest session if it is of ``epoch``, even while the link is down; raises StaleEpoch, Unavailable."""
        session = self._session
        if session is not None and session.epoch == epoch and not self._closing:
            return session
        if self._closing or session is None:
            raise self._away()
        raise StaleEpoch(f"the Maru server at {self.url} restarted; what was held before is void")

    def wake(self) -> None:
        """Look at the server now."""
        self._due = 0.0
        self._inbox.put(None)

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

    def close(self, *, goodbye: bool = True) -> None:
        """End the session and the background thread, at most JOIN seconds; idempotent.

        Without ``goodbye`` the session is left to end with the process, because something still writes under it.
        """
        if self._closing:
            return
        session, self._goodbye = self.live, goodbye
        self.problem = Unavailable("this MaruHandler is closed")
        self.live = None
        self._last = session
        self._closing = True
        self._inbox.put(None)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(JOIN)
        self._close_sockets()

    # -- shared -----------------------------------------------------------------------------------------------------

    def _channel(self, session: Session) -> Channel:
        """This thread's socket, a new one for each server: the old one would only try again after a pause."""
        channel: Channel | None = getattr(self._local, "channel", None)
        if channel is not None:
            if self._local.epoch == session.epoch:
                return channel
            with channel.lock:
                channel.close()
        with self._channels_lock:
            if self._closing:
                raise self._away()
            channel = Channel(self._context, self.url)
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
        frame = encode((int(Op.CANCEL), next(self._ids), session.epoch, session.id, pack_u64((request_id,))))
        try:
            channel.send(frame)
        except Unavailable as error:
            self._note("debug", "cancellation put off", request=request_id, reason=str(error))
        self.defer(session.holder, Op.CANCEL, (request_id,))

    def lose(self, session: Session) -> None:
        """The server said that this session is void: have another one opened."""
        self._lost = session
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

    def _refusal(self, reply: list[Any], session: Session | None) -> MaruError:
        code = reply[2]
        text = str(reply[3]) if len(reply) > 3 else ""
        if code == Code.VERSION:
            return VersionMismatch(f"the Maru server at {self.url} refuses this client: {text}")
        if code == Code.STALE_EPOCH or (session is not None and reply[1] != session.epoch):
            return StaleEpoch(f"the Maru server at {self.url} restarted; what was held before is void")
        if code == Code.NO_SESSION:
            return StaleEpoch(f"the Maru server at {self.url} no longer knows this session; what it held is void")
        if code == Code.CANCELLED:
            return Unavailable(f"the request was cancelled before it reached the Maru server at {self.url}")
        return ServerError(code, f"the Maru server at {self.url} answered {_name_of(code)}: {text}")

    def _note(self, level: str, event: str, **values: object) -> None:
        try:
            getattr(self._log, level)(event, **values)
        except (OSError, ValueError):  # the log goes to a pipe or file that was closed: there is nowhere to say so
            return

    def _on_fork(self) -> None:
        """In a forked child: no thread, no socket, no session of the parent is to be touched."""
        self.live = None
        self._session = None
        self._closing = True
        self.problem = MaruError("a MaruHandler cannot be used in a forked process; connect a new one there")
        self._channels_lock = threading.Lock()
        self._local = threading.local()

    # -- background thread ------------------------------------------------------------------------------------------

    def request(self, op: Op, epoch: int, session_id: int, arguments: Sequence[Any]) -> tuple[int, list[Any]]:
        """One request of the background thread: the server's epoch and the results. Ends early when closing."""
        return self._request(op, epoch, session_id, arguments, PING_TIMEOUT)

    def _request(
        self, op: Op, epoch: int, session_id: int, arguments: Sequence[Any], timeout: float, closing: bool = False
    ) -> tuple[int, list[Any]]:
        request_id = next(self._ids)
        self._own.send(encode((int(op), request_id, epoch, session_id, *arguments)))
        deadline = time.monotonic() + timeout
        while (remaining := deadline - time.monotonic()) > 0 and (closing or not self._closing):
            reply = self._own.receive(request_id, min(remaining, SLICE))
            if reply is None and self._is_dead():
                break
            if reply is not None:
                if reply[2] != 0 or (epoch and reply[1] != epoch):
                    raise self._refusal(reply, None if not epoch else self._session)
                return reply[1], reply[3:]
        raise Unavailable(
            f"no Maru server answers at {self.url}; start one with `maru serve`, or set maru_server_url to auto"
        )

    def _run(self) -> None:
        pause = 0.0
        while not self._closing:
            self._gather(pause)
            if self._closing:
                break
            try:
                self._tend()
                pause = max(0.0, min(PING_INTERVAL, self._due - time.monotonic()))
            except Unavailable as error:
                self._went_down(error)
                pause = RETRY_INTERVAL
            except MaruError as error:
                self._went_down(error)
                if not self.settled.is_set():
                    self.fatal = error
                    self.settled.set()
                pause = RETRY_INTERVAL_REFUSED
            except Exception as error:  # noqa: BLE001 - the thread must outlive any fault, and says which
                self._note("exception", "maru link failed", url=self.url)
                self._went_down(MaruError(f"the connection to {self.url} failed: {type(error).__name__}: {error}"))
                pause = RETRY_INTERVAL_REFUSED
        self._farewell()

    def _gather(self, pause: float) -> None:
        """Wait up to ``pause`` seconds for something to do, then take everything that is there."""
        try:
            chore = self._inbox.get(timeout=pause) if pause > 0 else self._inbox.get_nowait()
            if chore is not None:
                self._chores.append(chore)
                time.sleep(GATHER)
            while True:
                chore = self._inbox.get_nowait()
                if chore is not None:
                    self._chores.append(chore)
        except queue.Empty:
            return

    def _tend(self) -> None:
        session = self._session
        if session is not None and (self._lost is session or self.live is None or time.monotonic() >= self._due):
            session = self._check(session)
        if session is None:
            session = self._renew()
        # What was put off goes first: a call that finds the link up finds nothing of an earlier one in its way.
        self._flush(session)
        if self._lost is not session:
            self._went_up(session)
            self.settled.set()

    def _check(self, session: Session) -> Session | None:
        """Ping; the session when it still holds, ``None`` when it is void."""
        if self._lost is session:
            self._discard(session)
            return None
        try:
            self._request(Op.PING, session.epoch, session.id, (), PING_TIMEOUT)
        except StaleEpoch:
            self._discard(session)
            return None
        except Unavailable as error:
            self._went_down(error)
            self._ensure_server(lambda: self._closing)
            raise
        self._due = time.monotonic() + PING_INTERVAL
        return session

    def _renew(self) -> Session:
        self._ensure_server(lambda: self._closing)
        session = self._open_session(self)
        self._session = session
        self._due = time.monotonic() + PING_INTERVAL
        return session

    def _discard(self, session: Session) -> None:
        self.live = None
        self._session = None
        self._chores = [chore for chore in self._chores if chore.holder != session.holder]
        self.guard.close(session.proof)
        session.regions.close()

    def _went_up(self, session: Session) -> None:
        if self.live is not session and not self._closing:
            self.live = session
            if self._closing:
                self.live = None
            self._note("info", "maru link up", url=self.url, epoch=session.epoch, session=session.id)

    def _went_down(self, error: MaruError) -> None:
        known = str(error) == str(self.problem)
        self.live = None
        if self._closing:
            return
        self.problem = error
        if not known:
            self._note("warning", "maru link down", url=self.url, reason=str(error))

    def _flush(self, session: Session, closing: bool = False) -> None:
        """Deliver put-off work, cancellations first: an abort after a lost commit relies on that order."""
        mine = [chore for chore in self._chores if chore.holder == session.holder]
        for op in (Op.CANCEL, Op.ABORT, Op.RELEASE):
            items = [item for chore in mine if chore.op is op for item in chore.items]
            for start in range(0, len(items), GATHER_ITEMS):
                part = items[start : start + GATHER_ITEMS]
                if op is Op.ABORT:
                    arguments = [pack_u32(entry for entry, _ in part), pack_u32(generation for _, generation in part)]
                else:
                    arguments = [pack_u64(part)]
                timeout = FAREWELL if closing else PING_TIMEOUT
                try:
                    self._request(op, session.epoch, session.id, arguments, timeout, closing)
                except (ServerError, ProtocolError) as error:
                    self._note("error", "put-off work refused", op=op.name, items=len(part), reason=str(error))
                except StaleEpoch:
                    self.lose(session)
                    return
        self._chores = []

    def _farewell(self) -> None:
        session = self._session
        if session is not None:
            try:
                if self._last is session and self._goodbye:
                    self._gather(0.0)
                    self._flush(session, closing=True)
                    self._request(Op.BYE, session.epoch, session.id, (), FAREWELL, closing=True)
            except MaruError as error:
                self._note("debug", "goodbye not delivered", url=self.url, reason=str(error))
            if self._goodbye:
                self.guard.close(session.proof)
                session.regions.close()
        self._own.close()

    def _close_sockets(self) -> None:
        with self._channels_lock:
            channels = list(self._channels)
        idle = [channel for channel in channels if channel.lock.acquire(timeout=0.1)]
        for channel in idle:
            channel.close()
            channel.lock.release()
        # Terminating a context waits for its sockets, so only when all are closed; otherwise the last one's end does.
        if len(idle) == len(channels) and not self._thread.is_alive():
            self._own.close()
            self._context.term()


def _name_of(code: int) -> str:
    return Code(code).name if code in Code._value2member_map_ else f"code {code}"
