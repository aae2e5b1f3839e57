"""From a frame to calls of the directory and back to a frame.

What can be asked for is in :mod:`.operations`, :mod:`.life` and :mod:`.admin`. Here a frame is checked, handed to who
executes it, and whatever comes of it becomes a reply.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgpack
from attrs import define, field

from maru_core import __version__, logs
from maru_core.errors import ProtocolError
from maru_core.protocol.codec import decode, describe
from maru_core.protocol.messages import Code, Op
from maru_core.protocol.version import PROTOCOL_VERSION
from maru_core.server import requests, stats
from maru_core.server.admin import Administration
from maru_core.server.directory import Directory
from maru_core.server.life import Access, Proofs, SessionLife
from maru_core.server.moves import Move
from maru_core.server.operations import Epochs, Operations
from maru_core.server.requests import Refusal
from maru_core.server.sessions import Session, SessionRegistry
from maru_core.server.steps import Steps

#: Requests of one session that may be in progress at a time; each may hold MAX_MESSAGE bytes.
MAX_RUNNING = 32
#: Bytes of requests in progress: those of one session, and all. Each takes a few times its size meanwhile.
MAX_SESSION_BYTES = 64 << 20
MAX_BYTES = 256 << 20
#: Requests up to this size, in bytes, are finished in one slice or are few; they are not counted.
_SMALL = 4096


@define(eq=False)
class Task:
    """Work in progress. ``advance`` runs one slice; ``reply`` is the frame to send once it returned True."""

    _handlers: Handlers
    _steps: Steps
    _session: Session | None
    _request: int | None
    _bytes: int
    reply: bytes | None = None

    def advance(self) -> bool:
        """Run one slice; whether that was the last one."""
        outcome = self._handlers.advance(self._steps, self._session, self._request)
        if outcome is _UNFINISHED:
            return False
        self.reply = outcome
        self._handlers.running_bytes -= self._bytes
        if self._session is not None:
            self._session.running_bytes -= self._bytes
        if self._session is not None and self._request is not None:
            self._session.running.discard(self._request)
            self._session.dropped.discard(self._request)
        return True


_UNFINISHED = b"unfinished"


class Carrier(Protocol):
    """Who copies bytes from pool to pool (:mod:`maru_core.server.mover`)."""

    @property
    def busy(self) -> bool:
        """Whether there are moves that :meth:`finished` has not returned yet."""

    def begin(self, move: Move) -> None:
        """Copy the bytes of ``move`` beside the loop."""

    def finished(self) -> tuple[Move, bool] | None:
        """The next move that is over, in the order in which they began, and whether its bytes are there."""


@define(eq=False)
class Handlers:
    """Executes requests one slice at a time. ``clock`` in seconds, monotonic.

    ``dma_grace``: how long, in seconds, devices of a client that died may still move bytes.
    """

    directory: Directory
    sessions: SessionRegistry
    proofs: Proofs
    weights: Epochs
    epoch: int
    pid: int
    clock: Callable[[], float]
    dma_grace: float = 0.0
    #: The most processor time in seconds that one turn of the loop with heavy work took: one message and one slice.
    longest_turn: float = 0.0
    #: Bytes of requests in progress.
    running_bytes: int = field(init=False, default=0)
    #: Where there are several pools and objects are to be moved between them.
    carrier: Carrier | None = None
    #: Where clients have keys: which of them may use what.
    access: Access | None = None
    _work: Operations = field(init=False)
    administration: Administration = field()
    #: Requests by operation and answers other than OK by code, since the start.
    asked: dict[int, int] = field(init=False, factory=lambda: dict.fromkeys(map(int, Op), 0))
    refused: dict[int, int] = field(init=False, factory=lambda: dict.fromkeys(map(int, Code), 0))
    _life: SessionLife = field(init=False)
    _pack: Callable[[Any], bytes] = field(init=False)
    _operations: dict[int, Callable[[Session, int, list[Any]], Steps]] = field(init=False)
    _started: float = field(init=False)
    _log: Any = field(init=False)

    @_work.default
    def _all_operations(self) -> Operations:
        return Operations(self.directory, self.weights, self.epoch)

    @administration.default
    def _without_administration(self) -> Administration:
        return Administration(self.directory, self.sessions, self.clock, self._work.hide)

    def __attrs_post_init__(self) -> None:
        self._pack = msgpack.Packer(use_bin_type=True).pack
        self._started = self.clock()
        self._log = logs.get_logger(__name__)
        self.directory.counters.update(
            dict.fromkeys(
                (
                    "skipped_busy",
                    "skipped_refused",
                    "expired_sessions",
                    "bad_requests",
                    "cancelled",
                    "internal_errors",
                    "replies_dropped",
                    "admin_refused",
                    "keys_refused",
                    "connections_refused",
                ),
                0,
            )
        )
        self._life = SessionLife(
            self.directory, self.sessions, self.proofs, self.access, self.clock, self.dma_grace, self.pid
        )
        self.administration.forget = self._life.forget
        self._operations = {**self._work.table(), Op.ATTACH: self._life.attach, Op.BYE: self._life.bye}

    # -- the edge --------------------------------------------------------------------------------------------------

    def handle(self, frame: bytes, identity: str = "") -> bytes | Task | None:
        """Begin to execute one frame: its reply, the work that is left, or ``None`` when it cannot be answered.

        ``identity``: the public key of the client that it comes from, empty on sockets without keys.
        """
        try:
            message = decode(frame)
        except ProtocolError:
            self.directory.counters["bad_requests"] += 1
            return None
        if len(message) < 2 or not requests.is_u64(message[1]):
            self.directory.counters["bad_requests"] += 1
            return None
        request: int = message[1]
        session: Session | None = None
        try:
            if len(message) < 4 or not (type(message[0]) is type(message[2]) is type(message[3]) is int):
                raise ProtocolError("a request is [op, request id, epoch, session, arguments…], the first four numbers")
            op, _, epoch, number = message[:4]
            if op in self.asked:
                self.asked[op] += 1
            if epoch != self.epoch and (epoch or op not in _WITHOUT_EPOCH):
                raise Refusal(Code.STALE_EPOCH, f"this is epoch {self.epoch}, not {epoch}: the server was restarted")
            size = len(frame)
            if size > _SMALL and self.running_bytes + size > MAX_BYTES:
                raise ProtocolError(f"{MAX_BYTES >> 20} MiB of requests are in progress; try again")
            if op == Op.HELLO:
                return self._begin(self._life.hello(message[4:], identity), None, request, size)
            if op == Op.ADMIN:
                return self._begin(self.administration.begin(identity, message[4:]), None, request, size)
            session = self.sessions.get(number)
            if session is not None and session.owner != identity:
                session = None  # nobody learns that it exists
            if session is None:
                if number or op not in _WITHOUT_SESSION:
                    raise Refusal(Code.NO_SESSION, f"session {number} is unknown or closed; send HELLO")
            else:
                self.sessions.heard(session, self.clock())
                if op not in _BEFORE_USE:
                    if session.awaited:
                        raise Refusal(Code.NO_SESSION, f"session {number} must say HELLO, and what it still uses")
                    session.resumable = False
                if session.cancelled and request in session.cancelled:
                    del session.cancelled[request]
                    raise Refusal(Code.CANCELLED, f"request {request} was cancelled before it arrived")
            if op in _WITHOUT_SESSION:
                requests.arguments(message[4:], 0)
                return self._ok(request, [self.stats(session)] if op == Op.STATS else [])
            operation = self._operations.get(op)
            if operation is None:
                raise ProtocolError(f"unknown operation {describe(op)}")
            assert session is not None
            if not session.attached and op in _ATTACHED_ONLY:
                raise Refusal(Code.NO_SESSION, f"session {number} must ATTACH first")
            if len(session.running) >= MAX_RUNNING:
                raise ProtocolError(f"{MAX_RUNNING} long requests of this session are in progress; wait for a reply")
            if size > _SMALL and session.running_bytes + size > MAX_SESSION_BYTES:
                raise ProtocolError(f"{MAX_SESSION_BYTES >> 20} MiB of requests of this session are in progress; wait")
            return self._begin(operation(session, request, message[4:]), session, request, size)
        except Exception as error:  # noqa: BLE001 - the loop outlives any request
            return self._failure(request, error)

    def _begin(self, steps: Steps, session: Session | None, request: int, size: int) -> bytes | Task | None:
        outcome = self.advance(steps, session, request)
        if outcome is not _UNFINISHED:
            return outcome
        self.running_bytes += size
        if session is not None:
            session.running.add(request)
            session.running_bytes += size
        return Task(self, steps, session, request, size)

    def advance(self, steps: Steps, session: Session | None, request: int | None) -> bytes | None:
        """Run one slice of an operation: its reply, or ``_UNFINISHED``; ``None`` when nobody waits for a reply."""
        try:
            next(steps)
        except StopIteration as end:
            return None if request is None else self._ok(request, end.value)
        except Exception as error:  # noqa: BLE001 - the loop outlives any request
            return self._failure(request or 0, error)
        return _UNFINISHED

    def stats(self, session: Session | None = None) -> dict[str, Any]:
        """The map that STATS answers: of namespaces only the session's own, as others are none of its business."""
        self.directory.settle()
        server = {
            "version": __version__,
            "protocol": PROTOCOL_VERSION,
            "pid": self.pid,
            "epoch": self.epoch,
            "uptime_s": self.clock() - self._started,
            "longest_turn_s": self.longest_turn,
        }
        listed = () if session is None else (session.namespace,)
        return stats.collect(server, self.directory, self.sessions, listed)

    def snapshot(self) -> dict[str, Any]:
        """What metrics are made of: the totals of STATS, requests by operation, refusals by code."""
        asked = {Op(op).name: count for op, count in self.asked.items()}
        refused = {Code(code).name: count for code, count in self.refused.items() if code != Code.OK}
        return {**self.stats(), "asked": asked, "refused": refused}

    @property
    def sweep_soon(self) -> bool:
        """Whether :meth:`sweep` has something to do that clients wait for."""
        return self._life.sweep_soon

    def settle(self) -> bool:
        """Finish the bookkeeping of what was just answered, once the replies are sent; whether there is more to do.

        While there is, call :meth:`make_ahead` whenever nobody waits for an answer.
        """
        try:
            self.directory.settle()
            if self.carrier is not None:
                if (over := self.carrier.finished()) is not None:
                    # One at a time; the next one when nobody waits.
                    self.directory.finish_move(*over)
                    return True
                if self.directory.has_next_move():
                    return True
            return self.directory.is_short()
        except Exception as error:  # noqa: BLE001 - the loop outlives any request
            self._failure(0, error)
            return False

    @property
    def moving(self) -> bool:
        """Whether bytes are being moved between pools: :meth:`settle` is to be called when they are there."""
        return self.carrier is not None and self.carrier.busy

    def make_ahead(self) -> None:
        """Make a little room for requests to come. Takes tens of microseconds."""
        try:
            self.directory.make_ahead()
            if self.carrier is not None and (move := self.directory.next_move()) is not None:
                self.carrier.begin(move)
        except Exception as error:  # noqa: BLE001 - the loop outlives any request
            self._failure(0, error)

    def sweep(self) -> list[Task]:
        """Look for dead and silent sessions; returns the work of freeing what they held. Call about once a second."""
        self.administration.sweep()
        return [Task(self, steps, None, None, 0) for steps in self._life.sweep()]

    def _ok(self, request: int, results: list[Any]) -> bytes:
        return self._pack([request, self.epoch, 0, *results])

    def _failure(self, request: int, error: Exception) -> bytes:
        if isinstance(error, Refusal):
            code, text = error.code, str(error)
        elif isinstance(error, ProtocolError):
            code, text = Code.BAD_REQUEST, str(error)
            self.directory.counters["bad_requests"] += 1
        else:
            code, text = Code.INTERNAL, f"{type(error).__name__}: {error}"
            self.directory.counters["internal_errors"] += 1
            if isinstance(error, OSError):
                # A full disk, say: clients come again and again, and where it was met is no news.
                self._log.error("a request failed", request=request, reason=str(error))
            else:
                self._log.error("a request failed", request=request, exc_info=error)
        self.refused[code] += 1
        if code == Code.CANCELLED:
            self.directory.counters["cancelled"] += 1
        return self._pack([request, self.epoch, int(code), text])


#: What a recovered session may send before it has said what it uses, and what does not use anything.
_BEFORE_USE = frozenset({int(Op.HELLO), int(Op.ATTACH), int(Op.PING), int(Op.STATS), int(Op.BYE)})
_WITHOUT_EPOCH = frozenset({int(Op.HELLO), int(Op.PING), int(Op.STATS), int(Op.ADMIN)})
_WITHOUT_SESSION = frozenset({int(Op.PING), int(Op.STATS)})
_ATTACHED_ONLY = frozenset(
    int(op) for op in (Op.RESERVE, Op.COMMIT, Op.ABORT, Op.ACQUIRE, Op.RELEASE, Op.DELETE, Op.RESET, Op.REPORT)
)
