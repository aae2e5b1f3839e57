"""The background thread of one handler: keeps its link up.

It pings over a socket of its own, opens sessions, starts the server where the configuration says so, and delivers what
calls put off: cancellations, aborts, reports, releases.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from maru_core.client.channel import Channel, nobody_answers
from maru_core.client.link import SLICE, Chore, Gone, Link
from maru_core.client.session import Requester, Session
from maru_core.errors import BackendError, ConfigError, MaruError, ProtocolError, ServerError, StaleEpoch, Unavailable
from maru_core.protocol import Op
from maru_core.protocol.codec import encode, pack_u32, pack_u64

#: Seconds between pings of a healthy server, and how long one may take before the link counts as down.
PING_INTERVAL = 0.5
PING_TIMEOUT = 1.0
#: The same for one part of what a session says that it still uses, when the server came back.
RESUME_TIMEOUT = 5.0
#: Seconds between attempts while down, after an ordinary failure and after one that a retry hardly mends.
RETRY_INTERVAL = 0.1
RETRY_INTERVAL_REFUSED = 2.0
#: Seconds without a server after which memory that its successor may need is unmapped if nothing there is in use.
LET_GO_AFTER = 3.0
#: Put-off work is collected this many seconds so that it travels together, and most items of it in one message.
GATHER = 0.001
GATHER_ITEMS = 10_000
#: How long closing may take, seconds: for one message of the goodbye, and in all.
FAREWELL = 0.3
JOIN = 1.0
#: The same for who cannot prove its death: what it held would stay taken for ever.
FAREWELL_UNPROVEN = 3.0
JOIN_UNPROVEN = 10.0


class Upkeep:
    """See the module. ``open_session`` runs on the thread, is given a way to send requests and the session that is void
    now, which goes on if the result has its id; it may raise any MaruError.

    ``ensure_server`` runs there before each attempt while no server answers; ``is_dead`` tells at once, where that can
    be told, that nobody listens.
    """

    def __init__(
        self,
        link: Link,
        open_session: Callable[[Link, Requester, Session | None], Session],
        ensure_server: Callable[[Callable[[], bool]], None],
        is_dead: Callable[[], bool],
    ) -> None:
        self._link = link
        self._open_session = open_session
        self._ensure_server = ensure_server
        self._is_dead = is_dead
        self._chores: list[Chore] = []
        self._due = 0.0
        self._told: set[str] = set()
        self._down_since: float | None = None
        self._settled = threading.Event()
        self._fatal: MaruError | None = None
        self._goodbye_to: Session | None = None
        self._may_end = True
        self._own = Channel(link.context, link.url, link.keys)  # raises ConfigError for an address that cannot be used
        self._thread = threading.Thread(target=self._run, name="maru-upkeep", daemon=True)

    def start(self, wait: float) -> None:
        """Start, and wait up to ``wait`` seconds for the first session; raises what a retry would hardly mend."""
        self._thread.start()
        self._settled.wait(wait)
        if self._fatal is not None:
            raise self._fatal

    def stop(self, may_end: bool = True) -> None:
        """End the session and the thread, at most JOIN seconds; idempotent.

        Unless ``may_end`` the session is left to end with the process: something still writes under it.
        """
        link = self._link
        if link.closed:
            return
        self._may_end, self._goodbye_to = may_end, link.live
        proven = self._goodbye_to is None or self._goodbye_to.proof is not None
        all_closed = link.close()
        link.inbox.put(None)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(JOIN if proven else JOIN_UNPROVEN)
        # Terminating a context waits for its sockets, so only when all are closed; else the last one's end does it.
        if all_closed and not self._thread.is_alive():
            self._own.close()
            link.context.term()

    def request(self, op: Op, epoch: int, session_id: int, arguments: Sequence[Any]) -> tuple[int, list[Any]]:
        """One request of this thread: the server's epoch and the results. Ends early when the handler is closed."""
        # A server that has just come back may have much to read, and a long list to go through.
        timeout = RESUME_TIMEOUT if op is Op.HELLO and arguments[-1] else PING_TIMEOUT
        return self._request(op, epoch, session_id, arguments, timeout)

    def _request(
        self, op: Op, epoch: int, session_id: int, arguments: Sequence[Any], timeout: float, closing: bool = False
    ) -> tuple[int, list[Any]]:
        request_id = next(self._link.ids)
        frame = encode((int(op), request_id, epoch, session_id, *arguments))
        try:
            self._own.send(frame)
        except Unavailable:
            self._reconnect()
            raise
        deadline = time.monotonic() + timeout
        while (remaining := deadline - time.monotonic()) > 0 and (closing or not self._link.closed):
            reply = self._own.receive(request_id, min(remaining, SLICE))
            if reply is None and self._is_dead():
                break
            if reply is not None:
                if reply[2] != 0 or (epoch and reply[1] != epoch):
                    raise self._link.refusal(reply, epoch)
                return reply[1], reply[3:]
        self._reconnect()
        # Only of a unix socket is it known.
        listens = self._link.url.startswith("ipc:") and not self._is_dead()
        raise Unavailable(nobody_answers(self._link.url, self._link.keys, listens=listens))

    def _reconnect(self) -> None:
        """Take a new socket: ZeroMQ gives a connection up for good when its peer refuses it or is no server of ours."""
        if self._link.url.startswith("tcp:") and not self._link.closed:
            self._own.close()
            self._own = Channel(self._link.context, self._link.url, self._link.keys)

    def _run(self) -> None:
        pause = 0.0
        while not self._link.closed:
            self._gather(pause)
            if self._link.closed:
                break
            try:
                self._tend()
                pause = max(0.0, min(PING_INTERVAL, self._due - time.monotonic()))
            except (Unavailable, StaleEpoch) as error:  # StaleEpoch: it restarted while a session was being opened
                self._went_down(error)
                pause = RETRY_INTERVAL
            except MaruError as error:
                # Before the first session the caller of connect() gets it as an exception.
                self._went_down(error, "warning" if self._settled.is_set() else "debug")
                if not self._settled.is_set():
                    self._fatal = error
                    self._settled.set()
                pause = RETRY_INTERVAL_REFUSED
            except Exception as error:  # noqa: BLE001 - the thread must outlive any fault, and says which
                self._link.note("exception", "maru link failed", url=self._link.url)
                self._went_down(
                    MaruError(f"the connection to {self._link.url} failed: {type(error).__name__}: {error}")
                )
                pause = RETRY_INTERVAL_REFUSED
            self._let_go()
        self._farewell()

    def _gather(self, pause: float) -> None:
        """Wait up to ``pause`` seconds for something to do, then take everything that is there."""
        inbox = self._link.inbox
        try:
            self._take(inbox.get(timeout=pause) if pause > 0 else inbox.get_nowait())
            if self._chores:
                time.sleep(GATHER)
            while True:
                self._take(inbox.get_nowait())
        except queue.Empty:
            return

    def _take(self, chore: Chore | Gone | None) -> None:
        if chore is None:
            self._due = 0.0
        elif isinstance(chore, Gone):
            self._link.noticed(chore)
        else:
            self._chores.append(chore)

    def _tend(self) -> None:
        link = self._link
        session, checked = link.session, False
        if session is not None and (link.lost is session or link.live is None or time.monotonic() >= self._due):
            session, checked = self._check(session), True
        if session is None:
            session, checked = self._renew(), True
        # What was put off goes first: a call that finds the link up finds nothing of an earlier one in its way.
        self._flush(session)
        if checked and link.lost is not session:
            self._went_up(session)
            self._settled.set()

    def _check(self, session: Session) -> Session | None:
        """Ping; the session when it still holds, ``None`` when it is void."""
        if self._link.lost is session:
            self._void(session)
            return None
        try:
            self._request(Op.PING, session.epoch, session.id, (), PING_TIMEOUT)
        except StaleEpoch:
            self._void(session)
            return None
        except Unavailable as error:
            self._went_down(error)
            self._ensure_server(lambda: self._link.closed)
            raise
        self._due = time.monotonic() + PING_INTERVAL
        return session

    def _renew(self) -> Session:
        link = self._link
        self._ensure_server(lambda: link.closed)
        previous = link.session
        session = self._open_session(link, self.request, previous)
        resumed = previous is not None and previous.id == session.id
        link.holdings.open(session.holder, resumed=resumed)
        link.session = session
        if previous is not None and not resumed:
            self._chores = [chore for chore in self._chores if chore.holder[1] != previous.id]
            previous.regions.close()
        link.guard.keep_only(session.proof)
        self._due = time.monotonic() + PING_INTERVAL
        return session

    def _void(self, session: Session) -> None:
        """A session has to be opened. Until then the memory of this one stays mapped: it is read to the end."""
        self._link.live = None
        self._link.lost = session

    def _went_up(self, session: Session) -> None:
        link = self._link
        self._told.clear()
        self._down_since = None
        if link.live is not session and not link.closed:
            link.live = session
            if link.closed:  # closed by another thread in between
                link.live = None
            resumed = bool(session.lineage)
            link.note("info", "maru link up", url=link.url, epoch=session.epoch, session=session.id, resumed=resumed)

    def _let_go(self) -> None:
        """A server that is to make other pools in the same memory cannot start while somebody has it mapped."""
        session, since = self._link.session, self._down_since
        if session is None or since is None or time.monotonic() - since < LET_GO_AFTER:
            return
        if self._link.holdings.is_empty:
            session.regions.let_go()

    def _went_down(self, error: MaruError, level: str = "warning") -> None:
        link = self._link
        link.live = None
        if self._down_since is None:
            self._down_since = time.monotonic()
        if link.closed:
            return
        # Calls expect that the server may be away, whatever the reason; those of connect() are raised as they are.
        link.problem = Unavailable(str(error)) if isinstance(error, BackendError | ConfigError) else error
        # Each reason once per outage, however often it is tried again.
        if str(error) not in self._told:
            self._told.add(str(error))
            link.note(level, "maru link down", url=link.url, reason=str(error))

    def _flush(self, session: Session, closing: bool = False) -> None:
        """Deliver put-off work; what cannot be delivered stays for the next round."""
        mine = [chore for chore in self._chores if chore.holder[1] == session.id and session.covers(chore.holder[0])]
        for op in (Op.CANCEL, Op.ABORT, Op.REPORT, Op.RELEASE):
            items = [item for chore in mine if chore.op is op for item in chore.items]
            for start in range(0, len(items), GATHER_ITEMS):
                part = items[start : start + GATHER_ITEMS]
                arguments = self._packed(op, part)
                timeout = _farewell_of(session) if closing else PING_TIMEOUT
                try:
                    self._request(op, session.epoch, session.id, arguments, timeout, closing)
                except (ServerError, ProtocolError) as error:
                    self._link.note("error", "put-off work refused", op=op.name, items=len(part), reason=str(error))
                except StaleEpoch:
                    self._link.lose(session)
                    return
        self._chores = []

    def _packed(self, op: Op, items: list[Any]) -> list[bytes]:
        """Columns of ``items``; without those that are none, which would keep the others from ever being delivered."""
        try:
            return _columns(op, items)
        except (TypeError, ValueError, OverflowError):
            good = [item for item in items if _is_packable(op, item)]
            self._link.note(
                "error", "put-off work dropped", op=op.name, items=len(items) - len(good), reason="these are no ids"
            )
            return _columns(op, good)

    def _farewell(self) -> None:
        session = self._link.session
        if session is not None:
            try:
                if self._goodbye_to is session and self._may_end:
                    self._gather(0.0)
                    self._flush(session, closing=True)
                    # The server gives the pages of reservations that nobody has ended to others.
                    session.regions.settle_reserved(self._link.holdings.writing())
                    self._request(Op.BYE, session.epoch, session.id, (), _farewell_of(session), closing=True)
            except MaruError as error:
                self._link.note("debug", "goodbye not delivered", url=self._link.url, reason=str(error))
            if self._may_end:
                self._link.guard.close(session.proof)
                session.regions.close()
        self._own.close()


def _farewell_of(session: Session) -> float:
    return FAREWELL if session.proof is not None else FAREWELL_UNPROVEN


def _columns(op: Op, items: list[Any]) -> list[bytes]:
    if op in (Op.ABORT, Op.REPORT):
        return [pack_u32(entry for entry, _ in items), pack_u32(generation for _, generation in items)]
    return [pack_u64(items)]


def _is_packable(op: Op, item: Any) -> bool:
    try:
        _columns(op, [item])
    except (TypeError, ValueError, OverflowError):
        return False
    return True
