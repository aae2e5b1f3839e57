"""Who holds what: sessions, their reservations and leases, and what of their requests can still be undone."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator

from attrs import define, field, frozen

from maru_core.errors import ProtocolError
from maru_core.server.holdings import EntryCounts, EntrySet
from maru_core.server.liveness import SessionRecord
from maru_core.server.namespaces import NamespaceState

#: Digest of :meth:`Namespaces.unknown`.
UNKNOWN = b""
#: Requests with effects that a session can still cancel, and cancelled ids that are waited for, per session.
UNDO_LIMIT = 1024
#: Pages in records of what can be undone, per session, unless it has more than half as many reserved.
UNDO_PAGES = 1 << 16
#: Sessions that have not attached yet, in all. One key may have a quarter of these, and of all sessions.
MAX_UNATTACHED = 1000
_KEY_SHARE = 4
#: A session that has not attached by then is dropped; a silent one without proof counts as quarantined. Seconds.
PATIENCE = 60.0


@frozen
class ReserveUndo:
    """What a RESERVE took: parallel columns of first entries and generations."""

    entries: array[int]
    generations: array[int]


@frozen
class AcquireUndo:
    """The lease that an ACQUIRE took."""

    lease: int


Undo = ReserveUndo | AcquireUndo


@define(eq=False)
class Session:
    """One connected handler. ``pools`` is the number of pools; columns hold granules per pool."""

    id: int
    namespace: NamespaceState
    role: str
    name: str
    seen: float
    pools: int
    attached: bool = False
    #: Public key (text) of the client that opened it; empty on sockets without keys. Only it may use the session.
    owner: str = ""
    #: Whether the owner holds the ``flock`` by which its death can be proven.
    proof: bool = False
    #: A session of the server before this one whose owner has not said HELLO again yet: nobody knows what it uses.
    awaited: bool = False
    #: Whether HELLO may still say what it uses: nothing else was executed for it since it was taken over.
    resumable: bool = False
    #: When its owner was first seen dead, seconds.
    died: float | None = None
    #: Whether devices may still move bytes of the owner for a moment after its death.
    dma: bool = False
    #: Nothing is executed for it any more; what it holds is being freed.
    closed: bool = False
    #: First entries that may be committed, and those that a reset came between (freed by COMMIT or ABORT).
    reserved: EntrySet = field(factory=EntrySet)
    doomed: EntrySet = field(factory=EntrySet)
    #: Leases by id, and how many of them hold each entry.
    leases: dict[int, array[int]] = field(factory=dict)
    held: EntryCounts = field(factory=EntryCounts)
    reserved_pages: list[int] = field(init=False)
    leased_pages: list[int] = field(init=False)
    undo: OrderedDict[int, Undo] = field(factory=OrderedDict)
    #: Pages that the records of ``undo`` name.
    undo_pages: int = 0
    #: What the leases take: an item for each object that one names, and LEASE_COST for each lease.
    lease_items: int = 0
    #: Bytes of the requests in progress.
    running_bytes: int = 0
    #: Requests in progress, and those of them that were cancelled meanwhile.
    running: set[int] = field(factory=set)
    dropped: set[int] = field(factory=set)
    #: Ids that were cancelled before they arrived.
    cancelled: OrderedDict[int, None] = field(factory=OrderedDict)

    def __attrs_post_init__(self) -> None:
        self.reserved_pages = [0] * self.pools
        self.leased_pages = [0] * self.pools

    def remember(self, request: int, undo: Undo) -> None:
        """Keep how to undo ``request``; the oldest records are forgotten."""
        if request in self.undo:
            self.recall(request)
        self.undo[request] = undo
        self.undo_pages += _pages(undo)
        if len(self.undo) > UNDO_LIMIT:
            self.undo_pages -= _pages(self.undo.popitem(last=False)[1])
        if self.undo_pages > UNDO_PAGES:
            # Most of what they name was committed or given back since; a record that is in force is a late one.
            most = max(UNDO_PAGES, 2 * (len(self.reserved) + len(self.doomed) + _pages(undo)))
            while self.undo_pages > most:
                self.undo_pages -= _pages(self.undo.popitem(last=False)[1])

    def recall(self, request: int) -> Undo | None:
        """How to undo ``request``, which is forgotten with that; ``None`` when it is not known."""
        undo = self.undo.pop(request, None)
        if undo is not None:
            self.undo_pages -= _pages(undo)
        return undo

    def expect_cancelled(self, request: int) -> None:
        """Refuse ``request`` when it arrives; the oldest such id is forgotten."""
        self.cancelled[request] = None
        if len(self.cancelled) > UNDO_LIMIT:
            self.cancelled.popitem(last=False)


def _pages(undo: Undo) -> int:
    return len(undo.entries) if isinstance(undo, ReserveUndo) else 0


class SessionRegistry:
    """All sessions by id. Pure: ids come from ``new_id``, time is passed in (seconds, monotonic)."""

    def __init__(self, pools: int, new_id: Callable[[], int]) -> None:
        self._pools = pools
        self._new_id = new_id
        self._by_id: dict[int, Session] = {}
        #: The most sessions at a time: each needs a descriptor.
        self.most = 1 << 30
        # May name sessions that have attached since; those are taken out before anybody is refused.
        self._fresh: dict[int, Session] = {}
        #: What they hold is in quarantine: attached without proof and silent for long, or dead but for their devices.
        self.silent: dict[int, Session] = {}
        #: Sessions of the server before this one that are awaited.
        self.awaited: dict[int, Session] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_id.values()))

    @property
    def attached(self) -> int:
        """Number of attached sessions."""
        return sum(session.attached for session in self._by_id.values())

    def check_room(self, owner: str) -> None:
        """Raise ProtocolError when ``owner`` (a key, empty where there are none) may open no further session now."""
        share = _KEY_SHARE if owner else 1
        if len(self._fresh) * share >= MAX_UNATTACHED:
            self._fresh = {s.id: s for s in self._fresh.values() if not (s.attached or s.closed)}
            waiting = len(self._fresh)
            if owner:
                waiting = sum(s.owner == owner for s in self._fresh.values())
            if waiting * share >= MAX_UNATTACHED or len(self._fresh) >= MAX_UNATTACHED:
                raise ProtocolError(
                    f"{waiting} sessions have not attached yet, which is the limit; try again in {PATIENCE:.0f} seconds"
                )
        if len(self._by_id) * share >= self.most:
            mine = sum(s.owner == owner for s in self._by_id.values()) if owner else len(self._by_id)
            if mine * share >= self.most or len(self._by_id) >= self.most:
                raise ProtocolError(f"{mine} sessions are open, which is the limit of this server's open files")

    def open(self, namespace: NamespaceState, role: str, name: str, now: float) -> Session:
        """A new session, not attached."""
        number = self._new_id()
        while number == 0 or number in self._by_id:
            number = self._new_id()
        session = Session(number, namespace, role, name, now, self._pools)
        self._by_id[number] = self._fresh[number] = session
        namespace.sessions[number] = session
        return session

    def adopt(self, number: int, namespace: NamespaceState, record: SessionRecord, now: float) -> Session:
        """A session of the server before this one: attached, and awaited until its owner says what it still uses."""
        session = Session(number, namespace, record.role, record.name, now, self._pools)
        session.attached = session.awaited = session.resumable = True
        session.proof, session.dma, session.owner = record.proof, record.dma, record.owner
        self._by_id[number] = self.awaited[number] = session
        namespace.sessions[number] = session
        return session

    def belongs(self, session: Session, namespace: NamespaceState) -> bool:
        """Whether ``session`` is of ``namespace``; one whose record was damaged is of the first that it names."""
        if session.namespace.digest == UNKNOWN:
            session.namespace.sessions.pop(session.id, None)
            session.namespace = namespace
            namespace.sessions[session.id] = session
        return session.namespace is namespace

    def resumed(self, session: Session) -> None:
        """The owner of an awaited session said what it uses."""
        session.awaited = False
        self.awaited.pop(session.id, None)

    def get(self, number: int) -> Session | None:
        """The session, unless unknown or closed."""
        session = self._by_id.get(number)
        return None if session is None or session.closed else session

    def close(self, session: Session) -> None:
        """Forget ``session``; what it holds is the caller's business."""
        session.closed = True
        self._by_id.pop(session.id, None)
        self.silent.pop(session.id, None)
        self.awaited.pop(session.id, None)
        self._fresh.pop(session.id, None)
        session.namespace.sessions.pop(session.id, None)

    def heard(self, session: Session, now: float) -> None:
        """A message of ``session`` came in."""
        session.seen = now
        if self.silent:
            self.silent.pop(session.id, None)

    def forgettable(self) -> list[Session]:
        """Silent sessions that hold nothing: whoever comes back opens another one, and no file stays open for it."""
        return [s for s in self.silent.values() if not (s.awaited or s.reserved or s.doomed or s.held or s.running)]

    def quarantine(self, session: Session) -> None:
        """Count what ``session`` holds as quarantined until something is heard of it."""
        self.silent[session.id] = session

    def expired(self, now: float) -> list[Session]:
        """Sessions that never attached in time; they hold nothing."""
        return [s for s in self._by_id.values() if not s.attached and now - s.seen > PATIENCE]

    def note_silence(self, now: float) -> list[Session]:
        """Mark attached sessions without proof that are silent for long; returns those newly marked."""
        fresh = [
            s
            for s in self._by_id.values()
            if s.attached and not s.proof and now - s.seen > PATIENCE and s.id not in self.silent
        ]
        self.silent.update((s.id, s) for s in fresh)
        return fresh
