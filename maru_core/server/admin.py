"""Administration: what an operator may ask of a server, with a credential of its own.

Like other operations these are generators that work on a little at a time, so that everybody else keeps being served.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

from attrs import define, field

from maru_core import logs
from maru_core.errors import ProtocolError
from maru_core.namespace import facts_of
from maru_core.pool_format import DIGEST_SIZE
from maru_core.protocol.codec import describe
from maru_core.protocol.messages import EVERYTHING, AdminVerb, Code
from maru_core.server import requests, stats
from maru_core.server.directory import Directory
from maru_core.server.index import KeyIndex
from maru_core.server.namespaces import NamespaceState
from maru_core.server.requests import Refusal
from maru_core.server.sessions import Session, SessionRegistry
from maru_core.server.steps import Steps

#: Namespaces or sessions in one answer: less than the longest array that a message may hold.
PAGE = 50
#: Longest text about a namespace, in characters.
MAX_DESCRIPTION = 1000
#: Wrong credentials that one identity may offer between two sweeps; after that none of its is looked at.
MAX_WRONG = 3
#: Requests of administration in progress at a time.
MAX_RUNNING = 4
#: Objects that are dropped, and namespaces that are hidden, before others get their turn.
_DROPPED = 256
_HIDDEN = 100


@define(eq=False)
class Administration:
    """Checks the credential and carries out verbs. ``clock`` in seconds, as that of the sessions.

    ``hide`` begins a new weights epoch in namespaces, and returns what each has to free. ``token`` ``None``: every
    request is refused. ``stop`` ends the server soon. ``forget`` ends a session whose death nothing can prove.
    """

    directory: Directory
    sessions: SessionRegistry
    clock: Callable[[], float]
    hide: Callable[[Sequence[NamespaceState]], Sequence[KeyIndex | None]]
    token: str | None = field(default=None, repr=False)
    stop: Callable[[], None] = field(default=lambda: None)
    forget: Callable[[Session], Steps] | None = None
    _wrong: dict[str, int] = field(init=False, factory=dict)
    _running: int = field(init=False, default=0)
    _log: Any = field(init=False, factory=lambda: logs.get_logger(__name__))

    def begin(self, identity: str, raw: list[Any]) -> Steps:
        """Check one request of ``identity`` (empty: the private socket); raises Refusal, ProtocolError."""
        if len(raw) < 2 or type(raw[0]) is not str or type(raw[1]) is not str:
            raise ProtocolError("ADMIN needs a credential (text), a verb (text) and the verb's arguments")
        token, name = raw[:2]
        if self._wrong.get(identity, 0) >= MAX_WRONG:
            self._count()
            raise Refusal(Code.FORBIDDEN, "too many wrong credentials; try again in a second")
        expected = self.token
        if expected is None or not hmac.compare_digest(expected.encode(), token.encode("utf-8", "surrogatepass")):
            self._wrong[identity] = self._wrong.get(identity, 0) + 1
            self._count()
            raise Refusal(Code.FORBIDDEN, "not the credential of this server's administration; see admin.token")
        verb = self._verbs().get(name)
        if verb is None:
            raise ProtocolError(f"unknown verb {describe(name)}; expected one of {', '.join(AdminVerb)}")
        if self._running >= MAX_RUNNING:
            raise ProtocolError(f"{MAX_RUNNING} requests of administration are in progress; wait for a reply")
        return self._run(name, verb(raw[2:]))

    def sweep(self) -> None:
        """Look at credentials again. Call about twice a second."""
        if self._wrong:
            self._log.warning("wrong credentials for administration", offered=sum(self._wrong.values()))
            self._wrong.clear()

    def _count(self) -> None:
        self.directory.counters["admin_refused"] += 1

    def _run(self, name: str, steps: Steps) -> Steps:
        if name not in (AdminVerb.NAMESPACES, AdminVerb.SESSIONS):
            self._log.info("administration", verb=name)
        self._running += 1
        try:
            return (yield from steps)
        finally:
            self._running -= 1

    def _verbs(self) -> dict[str, Callable[[list[Any]], Steps]]:
        return {
            AdminVerb.NAMESPACES: self._namespaces,
            AdminVerb.SESSIONS: self._sessions,
            AdminVerb.RESET: self._reset,
            AdminVerb.QUOTA: self._quota,
            AdminVerb.EVICT: self._evict,
            AdminVerb.FORGET: self._forget,
            AdminVerb.STOP: self._stop,
        }

    def _namespaces(self, raw: list[Any]) -> Steps:
        yield from ()
        start = requests.number(requests.arguments(raw, 1)[0], "number of the first namespace")
        known = self.directory.namespaces.by_number
        page = list(islice((state for number, state in known.items() if number >= start), PAGE + 1))
        return [
            [_namespace(state, self.directory) for state in page[:PAGE]],
            page[PAGE].number if len(page) > PAGE else 0,
        ]

    def _sessions(self, raw: list[Any]) -> Steps:
        yield from ()
        # No more than there are: numbers of 64 bits are more than can be skipped.
        start = min(requests.number(requests.arguments(raw, 1)[0], "number of sessions to skip"), len(self.sessions))
        now = self.clock()
        page = list(islice(self.sessions, start, start + PAGE + 1))
        return [[self._session(session, now) for session in page[:PAGE]], start + PAGE if len(page) > PAGE else 0]

    def _session(self, session: Session, now: float) -> dict[str, Any]:
        granules = [arena.granule for arena in self.directory.arenas]
        return {
            "session": session.id,
            "namespace": session.namespace.digest.hex(),
            "role": session.role[:MAX_DESCRIPTION],
            "name": session.name[:MAX_DESCRIPTION],
            "attached": session.attached,
            "proof": session.proof,
            "awaited": session.awaited,
            "silent_s": now - session.seen,
            "reserved": sum(map(int.__mul__, session.reserved_pages, granules)),
            "leased": sum(map(int.__mul__, session.leased_pages, granules)),
            "leases": len(session.leases),
        }

    def _reset(self, raw: list[Any]) -> Steps:
        (wanted,) = requests.arguments(raw, 1)
        # Never for an empty digest: that is what becomes of a variable that nobody set.
        chosen = list(self.directory.namespaces) if wanted == EVERYTHING else [self._chosen(wanted)]
        hidden: list[KeyIndex | None] = []
        for at in range(0, len(chosen), _HIDDEN):
            if at:
                yield
            hidden += self.hide(chosen[at : at + _HIDDEN])
        for state, old in zip(chosen, hidden, strict=True):
            while old is not None and not self.directory.drain(state, old, _DROPPED):
                yield
        return [len(chosen)]

    def _quota(self, raw: list[Any]) -> Steps:
        yield from ()
        digest, limit = requests.arguments(raw, 2)
        requests.number(limit, "quota")
        state = self._chosen(digest)
        self.directory.set_quota(state, limit or None)
        return [limit]

    def _evict(self, raw: list[Any]) -> Steps:
        state = self._chosen(requests.arguments(raw, 1)[0])
        if self.directory.frozen:
            raise ProtocolError("sessions of the server before this one may still read; try again when they are back")
        before = self.directory.counters["evicted"]
        for entries in state.index.parts():
            for at in range(0, len(entries), _DROPPED):
                self.directory.evict(state, entries[at : at + _DROPPED])
                yield
        return [self.directory.counters["evicted"] - before]

    def _forget(self, raw: list[Any]) -> Steps:
        number = requests.number(requests.arguments(raw, 1)[0], "session")
        session = self.sessions.get(number)
        if session is None or self.forget is None:
            raise ProtocolError(f"no session is {number:016x}")
        yield from self.forget(session)
        return []

    def _stop(self, raw: list[Any]) -> Steps:
        yield from ()
        requests.arguments(raw, 0)
        self.stop()
        return []

    def _chosen(self, digest: object) -> NamespaceState:
        if type(digest) is not bytes or len(digest) != DIGEST_SIZE:
            raise ProtocolError(f"a namespace is named by a digest of {DIGEST_SIZE} bytes, got {describe(digest)}")
        for state in self.directory.namespaces:
            if state.digest == digest:
                return state
        raise ProtocolError(f"no namespace has the digest {digest.hex()}")


def _namespace(state: NamespaceState, directory: Directory) -> dict[str, Any]:
    return {
        **stats.of_namespace(state, directory),
        "sessions": len(state.sessions),
        "facts": "" if state.descriptor is None else _description(state.descriptor),
    }


def _description(descriptor: bytes) -> str:
    """The facts in a descriptor as text for people."""
    facts: Iterable[tuple[str, Any]] = (facts_of(descriptor) or {}).items()
    return ", ".join(f"{name}={value}" for name, value in facts if value not in ("", None))[:MAX_DESCRIPTION]
