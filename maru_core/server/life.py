"""How sessions begin, go on under another server, and end."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any, Final, Protocol

from attrs import define, field

from maru_core import __version__, logs
from maru_core.errors import ProtocolError
from maru_core.protocol.codec import describe
from maru_core.protocol.messages import MAX_KEYS, MAX_MESSAGE, MAX_RESUME, Code
from maru_core.protocol.version import PROTOCOL_VERSION
from maru_core.server import requests
from maru_core.server.directory import Directory
from maru_core.server.liveness import SessionRecord
from maru_core.server.requests import Refusal
from maru_core.server.sessions import PATIENCE, Session, SessionRegistry
from maru_core.server.steps import SLICE, Steps

#: Sessions that one line of the log names.
_NAMED = 10
#: How often, on average, a session may list each page of the pools as leased. Only bounds what a listing takes.
_LISTED: Final = 8
#: What taking up a lease costs beside its objects, in objects.
_COST_OF_LEASE: Final = 4


class Proofs(Protocol):
    """How the death of a session's owner is proven (:mod:`maru_core.server.liveness`)."""

    def create(self, session: int) -> str:
        """Make the lock file of a new session; returns its path. Raises OSError."""

    def held(self, session: int) -> bool:
        """Whether somebody holds the lock now."""

    def ensure(self, session: int) -> str:
        """The path of a session's lock file, which is made anew if it was lost. Raises OSError."""

    def record(self, session: int, record: SessionRecord) -> None:
        """Note whose session it is, before it may hold anything. Raises OSError."""

    def remove(self, session: int) -> None:
        """Forget the session and unlink its file: everything that it held is free."""


class Access(Protocol):
    """Which clients may use which namespaces (:mod:`maru_core.access`)."""

    def refuses(self, identity: str, descriptor: bytes) -> str | None:
        """Why the client with this public key may not use this namespace; ``None`` when it may."""


@define(eq=False)
class Gathered:
    """What a session lists in several parts of one ``attempt``."""

    attempt: int
    parts: int = 0
    entries: array[int] = field(factory=lambda: array("I"))
    generations: array[int] = field(factory=lambda: array("I"))
    leases: array[int] = field(factory=lambda: array("Q"))
    sizes: array[int] = field(factory=lambda: array("I"))
    held: array[int] = field(factory=lambda: array("I"))
    held_generations: array[int] = field(factory=lambda: array("I"))

    def add(self, part: requests.Resume) -> None:
        """Take the next part."""
        self.parts += 1
        self.entries += part.entries
        self.generations += part.generations
        self.leases += part.leases
        self.sizes += part.sizes
        self.held += part.held
        self.held_generations += part.held_generations


class SessionLife:
    """``clock`` in seconds, monotonic. ``dma_grace``: how long, in seconds, devices of a dead client may move bytes."""

    def __init__(
        self,
        directory: Directory,
        sessions: SessionRegistry,
        proofs: Proofs,
        access: Access | None,
        clock: Callable[[], float],
        dma_grace: float,
        pid: int,
    ) -> None:
        self._directory = directory
        self._sessions = sessions
        self._proofs = proofs
        self._access = access
        self._clock = clock
        self._dma_grace = dma_grace
        self._pid = pid
        #: Whether :meth:`sweep` has something to do that clients wait for.
        self.sweep_soon = False
        self._thawing = False
        self._started = clock()
        self._told_awaited = False
        #: What awaited sessions have listed so far, and those whose whole list is being gone through.
        self._gathered: dict[int, Gathered] = {}
        self._resuming: set[int] = set()
        #: Closed sessions whose holdings are being freed.
        self._ending = 0
        self._log = logs.get_logger(__name__)

    def sweep(self) -> list[Steps]:
        """Look for dead and silent sessions; returns the work of freeing what they held. Call about once a second."""
        self.sweep_soon = False
        now = self._clock()
        silent = self._sessions.note_silence(now)
        gone = self._sessions.expired(now) + self._sessions.forgettable()
        gone += [s for s in self._sessions if s.attached and s.proof and self._is_over(s, now)]
        for session in gone:
            self._log.info("session expired", session=session.id, name=session.name, attached=session.attached)
            self._directory.counters["expired_sessions"] += 1
        for session in silent:
            if session not in gone:
                self._log.warning(
                    "session is silent, what it holds is kept",
                    session=session.id,
                    name=session.name,
                    remedy=f"`maru admin forget {session.id:016x}` when its process is gone",
                )
        if self._directory.frozen and not self._told_awaited and now - self._started > PATIENCE:
            self._told_awaited = True
            self._log.warning(
                "nothing is evicted while sessions of the server before this one are awaited",
                sessions=[f"{session:016x}" for session in self._sessions.awaited][:_NAMED],
                awaited=len(self._sessions.awaited),
                remedy="see `maru admin sessions`; `maru admin forget SESSION` when its process is gone",
            )
        work = [self._end(session) for session in gone]
        if self._directory.frozen and not self._sessions.awaited and not self._thawing:
            self._thawing = True
            work.append(self._thaw())
        return work

    def _is_over(self, session: Session, now: float) -> bool:
        """Whether the owner is dead, and with it every device that it had set to work."""
        if session.died is None:
            if self._proofs.held(session.id):
                return False
            session.died = now
        if not session.dma or now - session.died >= self._dma_grace:
            return True
        self._sessions.quarantine(session)
        return False

    def _thaw(self) -> Steps:
        """Everybody who may have used what was recovered has said so, or is dead."""
        # Sessions that have just ended free what they held first.
        while self._ending:
            yield
        self._log.info("recovery complete: all earlier sessions are back or gone")
        while not self._directory.thaw(SLICE):
            yield
        self._thawing = False
        return []

    def hello(self, raw: list[Any], identity: str) -> Steps:
        """Open a session, or go on with one of the server before this one."""
        if raw and (type(raw[0]) is not int or raw[0] != PROTOCOL_VERSION):
            raise Refusal(
                Code.VERSION,
                f"this server speaks protocol {PROTOCOL_VERSION} (Maru {__version__}), the client {describe(raw[0])}; "
                f"install the same version of Maru on both sides",
            )
        hello = requests.hello(raw)
        reason = None if self._access is None else self._access.refuses(identity, hello.descriptor)
        if reason is not None:
            raise Refusal(Code.FORBIDDEN, reason)
        namespace = self._directory.namespaces.open(hello.descriptor, identity)
        self._directory.wish_quota(namespace, hello.quota)
        session = None
        if hello.resume is not None:
            session = self._sessions.get(hello.resume.session)
            if session is not None and session.owner != identity:
                session = None
        if (
            hello.resume is not None
            and session is not None
            and session.resumable
            and self._sessions.belongs(session, namespace)
        ):
            yield from self._resume(session, hello.resume)
            path = self._proofs.ensure(session.id)
        else:
            self._sessions.check_room(identity)
            session = self._sessions.open(namespace, hello.role, hello.name, self._clock())
            session.owner = identity
            try:
                path = self._proofs.create(session.id)
            except OSError:
                self._sessions.close(session)
                raise
        pools = [arena.descriptor.to_wire() for arena in self._directory.arenas]
        return [session.id, path, namespace.weights_epoch, pools, [MAX_MESSAGE], [__version__, self._pid]]

    def _resume(self, session: Session, part: requests.Resume) -> Steps:
        """Gather what a session of the server before this one still uses; go on with it at the last part."""
        session.died = None
        if part.part == 0:
            gathered = self._gathered[session.id] = Gathered(part.attempt)
        else:
            known = self._gathered.get(session.id)
            if known is None or (known.attempt, known.parts) != (part.attempt, part.part):
                raise ProtocolError(f"part {part.part} of what session {session.id} resumes is out of turn; begin anew")
            gathered = known
        gathered.add(part)
        entries = self._directory.objects.total
        if len(gathered.entries) > entries + MAX_RESUME or len(gathered.held) > _LISTED * (entries + MAX_KEYS):
            del self._gathered[session.id]
            raise ProtocolError(f"session {session.id} lists more than it can have had in pools of {entries} pages")
        if not part.last:
            return []
        del self._gathered[session.id]
        # HELLO comes again when its reply was lost, maybe before the first one has been executed.
        while session.id in self._resuming:
            yield
            self._still(session)
        self._resuming.add(session.id)
        try:
            yield from self._take_up(session, gathered)
        finally:
            self._resuming.discard(session.id)
        return []

    def _take_up(self, session: Session, listed: Gathered) -> Steps:
        """Free what ``session`` does not use any more, and lease again what it reads."""
        lost: list[int] = []
        for some in self._directory.unlisted(session, listed.entries, listed.generations):
            lost += some
            yield
            self._still(session)
        for at in range(0, len(lost), SLICE):
            self._directory.give_back(session, lost[at : at + SLICE])
            yield
            self._still(session)
        lease, start, known = 0, 0, False
        worked = 0
        for number, size in zip(listed.leases, listed.sizes, strict=True):
            if number != lease:
                # What is leased already stays as it is. A lease that goes on in the next part begins only once.
                lease, known = number, number in session.leases
            for at in range(start, start + size, SLICE):
                part = slice(at, min(at + SLICE, start + size))
                if not known:
                    self._directory.resume_lease(session, lease, listed.held[part], listed.held_generations[part])
                worked += _COST_OF_LEASE + part.stop - part.start
                if worked >= SLICE:
                    yield
                    self._still(session)
                    worked = 0
            start += size
        if session.awaited:
            self._sessions.resumed(session)
            self.sweep_soon = not self._sessions.awaited
            self._log.info("session resumed", session=session.id, name=session.name, freed=len(lost))
        return []

    def _still(self, session: Session) -> None:
        if session.closed or not session.resumable:
            raise Refusal(Code.NO_SESSION, f"session {session.id} ended or went on while it was being resumed")

    def attach(self, session: Session, request: int, raw: list[Any]) -> Steps:
        """From here on the session may hold something."""
        yield from ()
        held, dma = requests.arguments(raw, 2)
        proof = requests.flag(held, "proof held")
        session.dma = requests.flag(dma, "DMA")
        if proof and not self._proofs.held(session.id):
            raise ProtocolError("the lock file is not locked; take an exclusive flock on it before ATTACH")
        digest = session.namespace.digest.hex()
        record = SessionRecord(digest, session.role, session.name, proof, session.dma, session.owner)
        self._proofs.record(session.id, record)
        session.proof = proof
        session.attached = True
        return []

    def bye(self, session: Session, request: int, raw: list[Any]) -> Steps:
        """End the session."""
        requests.arguments(raw, 0)
        return (yield from self._end(session))

    def forget(self, session: Session) -> Steps:
        """End a session because an operator says that its owner is dead, where nothing else can tell.

        Raises ProtocolError for any other session.
        """
        if not session.attached or (session.proof and not session.awaited):
            raise ProtocolError(
                f"session {session.id:016x} is neither awaited nor without proof: it ends with its process"
            )
        self._log.warning("session forgotten by order", session=session.id, name=session.name)
        self._directory.counters["expired_sessions"] += 1
        yield from self._end(session)
        self.sweep_soon = True
        return []

    def _end(self, session: Session) -> Steps:
        self._sessions.close(session)
        self._gathered.pop(session.id, None)
        self._ending += 1
        try:
            while not self._directory.end_session(session, SLICE):
                yield
        finally:
            self._ending -= 1
        # Last: while anything is left, the next server must find out that it may free it.
        self._proofs.remove(session.id)
        return []
