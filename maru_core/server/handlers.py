"""From a frame to calls of the directory and back to a frame.

An operation is a generator: it works on at most SLICE keys, yields so that others are served, and returns its results.
What it took before it yielded is always recorded in its session, so that a session that ends, or a request that is
cancelled, in the middle leaves nothing behind.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Generator, Mapping, Sequence
from itertools import compress, count
from typing import Any, Protocol

import msgpack
import structlog
from attrs import define, field

from maru_core import __version__
from maru_core.errors import ProtocolError
from maru_core.pool_format import KEY_SIZE
from maru_core.protocol.codec import decode, describe, unpack_u64
from maru_core.protocol.messages import MAX_MESSAGE, NO_ENTRY, Code, Op, Presence, ReserveStatus
from maru_core.protocol.version import PROTOCOL_VERSION
from maru_core.server import requests, stats
from maru_core.server.admin import Administration
from maru_core.server.directory import Directory
from maru_core.server.index import KeyIndex
from maru_core.server.liveness import SessionRecord
from maru_core.server.namespaces import NamespaceState
from maru_core.server.requests import Refusal
from maru_core.server.sessions import AcquireUndo, ReserveUndo, Session, SessionRegistry

#: Keys that are worked on before other requests get their turn: less than a millisecond.
SLICE = 512
#: The same for DELETE, REPORT and RESET, which handle keys one by one.
DELETE_SLICE = 256
#: The same for RESERVE of objects whose lengths may all differ: room is made for each by itself.
MIXED_SLICE = 64
#: Requests of one session that may be in progress at a time; each may hold MAX_MESSAGE bytes.
MAX_RUNNING = 32

#: What an operation yields (nothing) and returns (its results).
Steps = Generator[None, None, list[Any]]


class Proofs(Protocol):
    """How the death of a session's owner is proven (:mod:`maru_core.server.liveness`)."""

    def create(self, session: int) -> str:
        """Make the lock file of a new session; returns its path. Raises OSError."""

    def held(self, session: int) -> bool:
        """Whether somebody holds the lock now."""

    def path_of(self, session: int) -> str:
        """The path of a session's lock file."""

    def record(self, session: int, record: SessionRecord) -> None:
        """Note whose session it is, before it may hold anything. Raises OSError."""

    def remove(self, session: int) -> None:
        """Forget the session and unlink its file: everything that it held is free."""


class Epochs(Protocol):
    """Where weights epochs outlive the server (:mod:`maru_core.server.weights`)."""

    def save(self, epochs: Mapping[bytes, int]) -> None:
        """Keep these, by namespace digest; never raises."""


class Access(Protocol):
    """Which clients may use which namespaces (:mod:`maru_core.access`)."""

    def refuses(self, identity: str, descriptor: bytes) -> str | None:
        """Why the client with this public key may not use this namespace; ``None`` when it may."""


@define(eq=False)
class Task:
    """Work in progress. ``advance`` runs one slice; ``reply`` is the frame to send once it returned True."""

    _handlers: Handlers
    _steps: Steps
    _session: Session | None
    _request: int | None
    reply: bytes | None = None

    def advance(self) -> bool:
        """Run one slice; whether that was the last one."""
        outcome = self._handlers.advance(self._steps, self._session, self._request)
        if outcome is _UNFINISHED:
            return False
        self.reply = outcome
        if self._session is not None and self._request is not None:
            self._session.running.discard(self._request)
            self._session.dropped.discard(self._request)
        return True


_UNFINISHED = b"unfinished"


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
    #: Whether :meth:`sweep` has something to do that clients wait for.
    sweep_soon: bool = False
    #: Where clients have keys: which of them may use what.
    access: Access | None = None
    administration: Administration = field()
    #: Requests by operation and answers other than OK by code, since the start.
    asked: dict[int, int] = field(init=False, factory=lambda: dict.fromkeys(map(int, Op), 0))
    refused: dict[int, int] = field(init=False, factory=lambda: dict.fromkeys(map(int, Code), 0))
    _leases: count[int] = field(init=False)
    _thawing: bool = field(init=False, default=False)
    #: Closed sessions whose holdings are being freed.
    _ending: int = field(init=False, default=0)
    _pack: Callable[[Any], bytes] = field(init=False)
    _operations: dict[int, Callable[[Session, int, list[Any]], Steps]] = field(init=False)
    _started: float = field(init=False)
    _log: Any = field(init=False)

    @administration.default
    def _without_administration(self) -> Administration:
        return Administration(self.directory, self.sessions, self.clock, self._hide)

    def __attrs_post_init__(self) -> None:
        self._pack = msgpack.Packer(use_bin_type=True).pack
        self._started = self.clock()
        # Sessions may go on with leases of the server before this one: ids must not meet theirs.
        self._leases = count((self.epoch & _LEASE_BASE) << 20 | 1)
        self._log = structlog.get_logger(__name__)
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
                ),
                0,
            )
        )
        self._operations = {
            Op.ATTACH: self._attach,
            Op.RESERVE: self._reserve,
            Op.COMMIT: self._commit,
            Op.ABORT: self._abort,
            Op.PROBE: self._probe,
            Op.ACQUIRE: self._acquire,
            Op.RELEASE: self._release,
            Op.DELETE: self._delete,
            Op.RESET: self._reset,
            Op.CANCEL: self._cancel,
            Op.BYE: self._bye,
            Op.REPORT: self._report,
        }

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
            if op == Op.HELLO:
                return self._begin(self._hello(message[4:], identity), None, request)
            if op == Op.ADMIN:
                return self._begin(self.administration.begin(identity, message[4:]), None, request)
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
            return self._begin(operation(session, request, message[4:]), session, request)
        except Exception as error:  # noqa: BLE001 - the loop outlives any request
            return self._failure(request, error)

    def _begin(self, steps: Steps, session: Session | None, request: int) -> bytes | Task | None:
        outcome = self.advance(steps, session, request)
        if outcome is not _UNFINISHED:
            return outcome
        if session is not None:
            session.running.add(request)
        return Task(self, steps, session, request)

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

    def settle(self) -> bool:
        """Finish the bookkeeping of what was just answered, once the replies are sent; whether a pool is short of room.

        While it is, call :meth:`make_ahead` whenever nobody waits for an answer.
        """
        try:
            self.directory.settle()
            return self.directory.is_short()
        except Exception as error:  # noqa: BLE001 - the loop outlives any request
            self._failure(0, error)
            return False

    def make_ahead(self) -> None:
        """Make a little room for requests to come. Takes tens of microseconds."""
        try:
            self.directory.make_ahead()
        except Exception as error:  # noqa: BLE001 - the loop outlives any request
            self._failure(0, error)

    def sweep(self) -> list[Task]:
        """Look for dead and silent sessions; returns the work of freeing what they held. Call about once a second."""
        self.sweep_soon = False
        self.administration.sweep()
        now = self.clock()
        silent = self.sessions.note_silence(now)
        gone = self.sessions.expired(now) + self.sessions.forgettable()
        gone += [s for s in self.sessions if s.attached and s.proof and self._is_over(s, now)]
        for session in gone:
            self._log.info("session expired", session=session.id, name=session.name, attached=session.attached)
            self.directory.counters["expired_sessions"] += 1
        for session in silent:
            if session not in gone:
                self._log.warning("session is silent, what it holds is kept", session=session.id, name=session.name)
        tasks = [Task(self, self._end(session), None, None) for session in gone]
        if self.directory.frozen and not self.sessions.awaited and not self._thawing:
            self._thawing = True
            tasks.append(Task(self, self._thaw(), None, None))
        return tasks

    def _is_over(self, session: Session, now: float) -> bool:
        """Whether the owner is dead, and with it every device that it had set to work."""
        if session.died is None:
            if self.proofs.held(session.id):
                return False
            session.died = now
        if not session.dma or now - session.died >= self.dma_grace:
            return True
        self.sessions.quarantine(session)
        return False

    def _thaw(self) -> Steps:
        """Everybody who may have used what was recovered has said so, or is dead."""
        # Sessions that have just ended free what they held first.
        while self._ending:
            yield
        self._log.info("recovery complete: all earlier sessions are back or gone")
        while not self.directory.thaw(SLICE):
            yield
        self._thawing = False
        return []

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
            self._log.error("a request failed", request=request, exc_info=error)
        self.refused[code] += 1
        if code == Code.CANCELLED:
            self.directory.counters["cancelled"] += 1
        return self._pack([request, self.epoch, int(code), text])

    # -- sessions --------------------------------------------------------------------------------------------------

    def _hello(self, raw: list[Any], identity: str) -> Steps:
        if raw and (type(raw[0]) is not int or raw[0] != PROTOCOL_VERSION):
            raise Refusal(
                Code.VERSION,
                f"this server speaks protocol {PROTOCOL_VERSION} (Maru {__version__}), the client {describe(raw[0])}; "
                f"install the same version of Maru on both sides",
            )
        hello = requests.hello(raw)
        reason = None if self.access is None else self.access.refuses(identity, hello.descriptor)
        if reason is not None:
            raise Refusal(Code.FORBIDDEN, reason)
        namespace = self.directory.namespaces.open(hello.descriptor)
        self.directory.wish_quota(namespace, hello.quota)
        session = None
        if hello.resume is not None:
            session = self.sessions.get(hello.resume.session)
            if session is not None and session.owner != identity:
                session = None
        if hello.resume is not None and session is not None and session.resumable and session.namespace is namespace:
            yield from self._resume(session, hello.resume)
            path = self.proofs.path_of(session.id)
        else:
            session = self.sessions.open(namespace, hello.role, hello.name, self.clock())
            session.owner = identity
            try:
                path = self.proofs.create(session.id)
            except OSError:
                self.sessions.close(session)
                raise
        pools = [arena.descriptor.to_wire() for arena in self.directory.arenas]
        return [session.id, path, namespace.weights_epoch, pools, [MAX_MESSAGE], [__version__, self.pid]]

    def _resume(self, session: Session, resume: requests.Resume) -> Steps:
        """Free what a session of the server before this one does not use any more, and lease again what it reads."""
        session.died = None
        lost = self.directory.unlisted(session, resume.entries, resume.generations)
        for at in range(0, len(lost), SLICE):
            if at:
                yield
                self._still(session)
            self.directory.give_back(session, lost[at : at + SLICE])
        # HELLO may come twice, when its reply was lost: what is leased already stays as it is.
        worked = 0
        for lease, (entries, generations) in resume.leases.items():
            if lease in session.leases:
                continue
            for at in range(0, len(entries), SLICE):
                part = slice(at, at + SLICE)
                self.directory.resume_lease(session, lease, entries[part], generations[part])
                worked += len(entries[part])
                if worked >= SLICE:
                    yield
                    self._still(session)
                    worked = 0
        if session.awaited:
            self.sessions.resumed(session)
            self.sweep_soon = not self.sessions.awaited
            self._log.info("session resumed", session=session.id, name=session.name, freed=len(lost))
        return []

    def _still(self, session: Session) -> None:
        if session.closed or not session.resumable:
            raise Refusal(Code.NO_SESSION, f"session {session.id} ended or went on while it was being resumed")

    def _attach(self, session: Session, request: int, raw: list[Any]) -> Steps:
        yield from ()
        held, dma = requests.arguments(raw, 2)
        proof = requests.flag(held, "proof held")
        session.dma = requests.flag(dma, "DMA")
        if proof and not self.proofs.held(session.id):
            raise ProtocolError("the lock file is not locked; take an exclusive flock on it before ATTACH")
        digest = session.namespace.digest.hex()
        record = SessionRecord(digest, session.role, session.name, proof, session.dma, session.owner)
        self.proofs.record(session.id, record)
        session.proof = proof
        session.attached = True
        return []

    def _bye(self, session: Session, request: int, raw: list[Any]) -> Steps:
        requests.arguments(raw, 0)
        return (yield from self._end(session))

    def _end(self, session: Session) -> Steps:
        self.sessions.close(session)
        self._ending += 1
        try:
            while not self.directory.end_session(session, SLICE):
                yield
        finally:
            self._ending -= 1
        # Last: while anything is left, the next server must find out that it may free it.
        self.proofs.remove(session.id)
        return []

    def _cancel(self, session: Session, request: int, raw: list[Any]) -> Steps:
        ids = unpack_u64(requests.arguments(raw, 1)[0])
        requests.within_limit(len(ids))
        for number in ids:
            if number in session.running:
                session.dropped.add(number)
                continue
            undo = session.undo.pop(number, None)
            if undo is None:
                session.expect_cancelled(number)
                continue
            self.directory.counters["cancelled"] += 1
            if isinstance(undo, ReserveUndo):
                yield from self._give_back(session, undo.entries, undo.generations)
            else:
                yield from self._end_lease(session, undo.lease)
            yield
        return []

    def _go_on(self, session: Session, request: int) -> bool:
        """After a yield: False when the request was cancelled; raises when its session ended."""
        if session.closed:
            raise Refusal(Code.NO_SESSION, f"session {session.id} ended while the request was in progress")
        return request not in session.dropped

    # -- writing ---------------------------------------------------------------------------------------------------

    def _reserve(self, session: Session, request: int, raw: list[Any]) -> Steps:
        weights_epoch, keys, parents, length = requests.arguments(raw, 4)
        requests.number(weights_epoch, "weights epoch")
        total = requests.key_count(keys)
        if type(parents) is not bytes or len(parents) not in (0, KEY_SIZE, len(keys)):
            raise ProtocolError(f"parents must be none, one, or as many as keys ({total}), got {describe(parents)}")
        chain = len(parents) == KEY_SIZE
        sizes = requests.lengths(length, total)
        width = SLICE if type(sizes) is int else MIXED_SLICE
        statuses, entries, generations = bytearray(), array("I"), array("I")
        for at in range(0, total, width):
            count = min(width, total - at)
            if weights_epoch != session.namespace.weights_epoch:
                statuses += bytes([ReserveStatus.REFUSED]) * count
                entries.extend([NO_ENTRY] * count)
                generations.extend([0] * count)
            else:
                part_parents: tuple[bytes, ...]
                if chain:
                    part_parents = (parents if at == 0 else keys[(at - 1) * KEY_SIZE : at * KEY_SIZE],)
                else:
                    part_parents = requests.key_slice(parents, at, width)
                part_sizes = sizes if type(sizes) is int else sizes[at : at + width]  # type: ignore[index]
                packed = requests.column_slice(keys, at, width)
                got = self.directory.reserve(session, (), part_parents, part_sizes, packed)
                if total > width:
                    statuses += got[0]
                    entries += got[1]
                    generations += got[2]
                else:
                    statuses, entries, generations = got
            if at + width < total:
                yield
                if not self._go_on(session, request):
                    yield from self._give_back(session, *_taken(statuses, entries, generations))
                    raise Refusal(Code.CANCELLED, f"request {request} was cancelled")
        mine = _taken(statuses, entries, generations)
        if len(mine[0]) != total:
            self.directory.counters["skipped_busy"] += statuses.count(ReserveStatus.BUSY)
            self.directory.counters["skipped_refused"] += statuses.count(ReserveStatus.REFUSED)
        if mine[0]:
            session.remember(request, ReserveUndo(*mine))
        return [statuses, entries.tobytes(), generations.tobytes()]

    def _give_back(self, session: Session, entries: array[int], generations: array[int]) -> Generator[None, None, None]:
        for at in range(0, len(entries), SLICE):
            if session.closed:
                return
            part = slice(at, at + SLICE)
            self.directory.abort(session, entries[part], generations[part])
            yield

    def _commit(self, session: Session, request: int, raw: list[Any]) -> Steps:
        entries, generations = requests.handles(*requests.arguments(raw, 3)[:2])
        checksums = unpack_u64(raw[2]) if raw[2] == b"" else unpack_u64(raw[2], len(entries))
        statuses = bytearray()
        for at in range(0, len(entries), SLICE):
            if at:
                yield
                self._go_on(session, request)
            part = slice(at, at + SLICE)
            statuses += self.directory.commit(session, entries[part], generations[part], checksums[part])
        return [statuses]

    def _abort(self, session: Session, request: int, raw: list[Any]) -> Steps:
        entries, generations = requests.handles(*requests.arguments(raw, 2))
        statuses = bytearray()
        for at in range(0, len(entries), SLICE):
            if at:
                yield
                self._go_on(session, request)
            part = slice(at, at + SLICE)
            statuses += self.directory.abort(session, entries[part], generations[part])
        return [statuses]

    # -- reading ---------------------------------------------------------------------------------------------------

    def _probe(self, session: Session, request: int, raw: list[Any]) -> Steps:
        weights_epoch, keys = requests.arguments(raw, 2)
        requests.number(weights_epoch, "weights epoch")
        total = requests.key_count(keys)
        statuses = bytearray()
        for at in range(0, total, SLICE):
            if at:
                yield
                self._go_on(session, request)
            packed = requests.column_slice(keys, at, SLICE)
            current = weights_epoch == session.namespace.weights_epoch
            statuses += self.directory.probe(session, (), packed) if current else bytes(len(packed) // KEY_SIZE)
        return [statuses]

    def _acquire(self, session: Session, request: int, raw: list[Any]) -> Steps:
        weights_epoch, keys, leading = requests.arguments(raw, 3)
        requests.number(weights_epoch, "weights epoch")
        requests.flag(leading, "leading only")
        total = requests.key_count(keys)
        lease = next(self._leases)
        statuses: bytes | bytearray = bytearray()
        entries, generations, lengths = array("I"), array("I"), array("Q")
        for at in range(0, total, SLICE):
            count = min(SLICE, total - at)
            current = weights_epoch == session.namespace.weights_epoch
            stopped = leading and at and statuses[-1] != Presence.READY
            if not current or stopped:
                self.directory.counters["misses"] += count
                statuses += bytes(count)
                entries.extend([NO_ENTRY] * count)
                generations.extend([0] * count)
                lengths.extend([0] * count)
            else:
                packed = requests.column_slice(keys, at, SLICE)
                got = self.directory.acquire(session, lease, (), leading, packed)
                if total > SLICE:
                    statuses += got[0]
                    entries += got[1]
                    generations += got[2]
                    lengths += got[3]
                else:
                    statuses, entries, generations, lengths = got
            if at + SLICE < total:
                yield
                if not self._go_on(session, request):
                    yield from self._end_lease(session, lease)
                    raise Refusal(Code.CANCELLED, f"request {request} was cancelled")
        if Presence.READY in statuses:
            session.remember(request, AcquireUndo(lease))
        else:
            lease = 0
        return [lease, statuses, entries.tobytes(), generations.tobytes(), lengths.tobytes()]

    def _end_lease(self, session: Session, lease: int) -> Generator[None, None, bool]:
        """Release all of a lease; returns whether it was known."""
        known, done = self.directory.release(session, lease, SLICE)
        while not done:
            yield
            if session.closed:
                break
            _, done = self.directory.release(session, lease, SLICE)
        return known

    def _release(self, session: Session, request: int, raw: list[Any]) -> Steps:
        leases = unpack_u64(requests.arguments(raw, 1)[0])
        requests.within_limit(len(leases))
        statuses = bytearray()
        worked = 0
        for lease in leases:
            held = session.leases.get(lease)
            worked += 1 + (len(held) if held is not None else 0)
            if worked > SLICE:
                yield
                self._go_on(session, request)
                worked = 0
            known = yield from self._end_lease(session, lease)
            statuses.append(not known)
        return [statuses]

    def _delete(self, session: Session, request: int, raw: list[Any]) -> Steps:
        weights_epoch, keys = requests.arguments(raw, 2)
        requests.number(weights_epoch, "weights epoch")
        total = requests.key_count(keys)
        statuses = bytearray()
        for at in range(0, total, DELETE_SLICE):
            if at:
                yield
                self._go_on(session, request)
            part = requests.key_slice(keys, at, DELETE_SLICE)
            current = weights_epoch == session.namespace.weights_epoch
            statuses += self.directory.delete(session, part) if current else bytes(len(part))
        return [statuses]

    def _report(self, session: Session, request: int, raw: list[Any]) -> Steps:
        entries, generations = requests.handles(*requests.arguments(raw, 2))
        statuses = bytearray()
        for at in range(0, len(entries), DELETE_SLICE):
            if at:
                yield
                self._go_on(session, request)
            part = slice(at, at + DELETE_SLICE)
            statuses += self.directory.drop_damaged(session, entries[part], generations[part])
        return [statuses]

    def _reset(self, session: Session, request: int, raw: list[Any]) -> Steps:
        weights_epoch = requests.number(requests.arguments(raw, 1)[0], "weights epoch")
        namespace = session.namespace
        hidden = self._hide([namespace])[0] if weights_epoch == namespace.weights_epoch else None
        # The answer is the epoch that began here, even if another reset follows while this one still frees.
        current = namespace.weights_epoch
        while hidden is not None and not self.directory.drain(namespace, hidden, DELETE_SLICE):
            yield
        return [current]

    def _hide(self, namespaces: Sequence[NamespaceState]) -> list[KeyIndex | None]:
        """Begin a new weights epoch in each; returns what is left to drain, ``None`` where there is nothing."""
        # Saved first, or a server that is killed in between would serve old bytes to engines with new weights.
        begun = {namespace.digest: namespace.weights_epoch + 1 for namespace in namespaces}
        self.weights.save(self.directory.namespaces.epochs() | begun)
        return [self.directory.reset(namespace, namespace.weights_epoch) for namespace in namespaces]


#: 1 for NEW, else 0: the whole column is looked at in one go, so it has to be quick.
_IS_NEW = bytes(status == ReserveStatus.NEW for status in range(256))
#: Lease ids have room for a million million requests above this base, and stay below 64 bits.
_LEASE_BASE = (1 << 42) - 1
#: What a recovered session may send before it has said what it uses, and what does not use anything.
_BEFORE_USE = frozenset({int(Op.HELLO), int(Op.ATTACH), int(Op.PING), int(Op.STATS), int(Op.BYE)})
_WITHOUT_EPOCH = frozenset({int(Op.HELLO), int(Op.PING), int(Op.STATS), int(Op.ADMIN)})
_WITHOUT_SESSION = frozenset({int(Op.PING), int(Op.STATS)})
_ATTACHED_ONLY = frozenset(
    int(op) for op in (Op.RESERVE, Op.COMMIT, Op.ABORT, Op.ACQUIRE, Op.RELEASE, Op.DELETE, Op.RESET, Op.REPORT)
)


def _taken(statuses: bytearray, entries: array[int], generations: array[int]) -> tuple[array[int], array[int]]:
    """Entries and generations of the keys that were answered NEW."""
    if statuses.count(ReserveStatus.NEW) == len(statuses):
        return entries, generations
    new = statuses.translate(_IS_NEW)
    return array("I", compress(entries, new)), array("I", compress(generations, new))
