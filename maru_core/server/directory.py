"""The directory: which object lies where, who writes it, who reads it, and what may be evicted.

A pure state machine. It is given time, memory for the headers and sessions; it does no I/O and never waits. Every call
handles one batch of keys and leaves all invariants holding; callers bound the batch (:mod:`maru_core.server.handlers`).

Here is what can be asked of it; :mod:`.objects` has what is known of each object, :mod:`.room` allocates,
:mod:`.clearing` chooses what goes for that, :mod:`.removal` takes it away, :mod:`.reservations` and :mod:`.leases` keep
who writes and who reads.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence

from maru_core.protocol.messages import CommitStatus, Presence
from maru_core.server.arena import Arena
from maru_core.server.holdings import EntrySet
from maru_core.server.index import KeyIndex, tags_of
from maru_core.server.leases import PRESENCE, Acquired, Leases
from maru_core.server.moves import Move, Moves
from maru_core.server.namespaces import Namespaces, NamespaceState
from maru_core.server.objects import READY, REPLICA, Objects, Postponed
from maru_core.server.orphans import Orphans
from maru_core.server.quotas import Quotas
from maru_core.server.recovery import FindSession, Recovered, Recovery
from maru_core.server.removal import Removal
from maru_core.server.reservations import Reservations, Reserved, keys_of
from maru_core.server.room import Room
from maru_core.server.sessions import Session

_FOUND = bytes([Presence.READY])


class Directory:
    """Objects of all namespaces in all pools.

    ``lease_share``: the part of a pool that one session may lease. ``ahead_share``: the part of all pools that
    :meth:`make_ahead` keeps free at most. ``epochs``: weights epochs from before, by namespace digest.
    ``namespace_quota``: the most bytes that a namespace may take unless :meth:`set_quota` says otherwise.

    ``arenas`` are in the order in which they are written to. ``demote``: what is used least in one of them moves to a
    later one, and only the last one loses objects while it has any that may go. ``promote``: what is used again and
    again in a later one gets a replica in the first. ``read_order``: the places of ``arenas`` in the order in which an
    object is read from them if it is in several; those that are missing come last, and all are in order by default.
    """

    def __init__(
        self,
        arenas: Sequence[Arena],
        lease_share: float = 0.5,
        ahead_share: float = 0.01,
        epochs: Mapping[bytes, int] | None = None,
        namespace_quota: int | None = None,
        demote: bool = False,
        promote: bool = False,
        read_order: Sequence[int] = (),
    ) -> None:
        self.arenas = list(arenas)
        self.counters = dict.fromkeys(
            (
                "hits",
                "misses",
                "stored",
                "evicted",
                "skipped_no_room",
                "skipped_over_quota",
                "aborted",
                "deleted",
                "resets",
                "damaged",
                "demoted",
                "promoted",
                "replicas_dropped",
                "moves_dropped",
            ),
            0,
        )
        self.objects = Objects(arenas)
        capacities = [(arena.end - arena.base) * arena.granule for arena in arenas]
        self.namespaces = Namespaces(
            self.objects, capacities, epochs, default_quota=namespace_quota, on_forget=self._forget_policies
        )
        self._postponed = Postponed()
        self._removal = Removal(self.objects, self.namespaces, self.counters)
        self._quotas = Quotas(self.arenas)
        self._room = Room(self.objects, self._removal, self._quotas, ahead_share, lease_share, demote)
        self._moves = Moves(
            self.objects,
            self.namespaces,
            self._room,
            self._removal,
            self._quotas.moving,
            self.counters,
            demote,
            promote,
        )
        self._promote = promote and len(self.arenas) > 1
        order = list(dict.fromkeys((*read_order, *range(len(self.arenas)))))
        self._rank = [order.index(number) for number in range(len(self.arenas))]
        self._reservations = Reservations(self.objects, self._room, self._postponed, self.counters)
        self._leases = Leases(self.objects, self._removal, self._postponed, self.counters, lease_share)

    def recover(self, find_session: FindSession) -> Recovered:
        """Fill this empty directory from the header tables; see :mod:`maru_core.server.recovery`.

        Frozen from here until :meth:`thaw`. Raises BackendError, after which the directory cannot be used.
        """
        self._removal.frozen = True
        return Recovery(self.objects, self.namespaces, self._removal, find_session).run()

    @property
    def frozen(self) -> bool:
        """Whether nothing may be evicted or freed, because somebody unknown may still read it."""
        return self._removal.frozen

    def thaw(self, limit: int) -> bool:
        """Nobody unknown reads anything any more: free at most ``limit`` objects; whether that was all of them."""
        self._postponed.settle()
        return self._removal.thaw(limit)

    def unlisted(self, session: Session, entries: Sequence[int], generations: Sequence[int]) -> Iterator[list[int]]:
        """First entries of what ``session`` has reserved and does not list, after each slice of work some of them.

        The session may take and free nothing before that is over. A reset in between may name entries twice.
        """
        self._postponed.settle()
        self._removal.withheld.claim(session.id, filter(self.objects.is_free, entries))
        return self._reservations.unlisted(session, entries, generations)

    def give_back(self, session: Session, entries: Sequence[int]) -> None:
        """Free those of ``entries`` that ``session`` has reserved; each once, however often it is named."""
        self._postponed.settle()
        self._reservations.give_back(session, entries)

    def resume_lease(self, session: Session, lease: int, entries: Sequence[int], generations: Sequence[int]) -> None:
        """A recovered session still reads these, under ``lease``; those that are something else now are left out.

        So are those of other namespaces. Raises ProtocolError for more than a session may lease at a time.
        """
        self._postponed.settle()
        self._removal.withheld.claim(session.id, filter(self.objects.is_free, entries))
        self._leases.resume(session, lease, entries, generations)

    def wish_quota(self, namespace: NamespaceState, quota: int) -> None:
        """A session wants ``namespace`` to take up to ``quota`` bytes (0: no wish); the largest wish counts.

        What an operator configured is not exceeded, and a wish for all pools or more is a wish for no limit.
        """
        self.namespaces.wish(namespace, quota)

    def set_quota(self, namespace: NamespaceState, quota: int | None) -> None:
        """The operator's word: ``namespace`` may take ``quota`` bytes; ``None`` takes the word back.

        What is over the quota already stays until somebody needs the room; it is the first to go then.
        """
        self._postponed.settle()
        self.namespaces.order(namespace, quota)
        self._quotas.review(namespace)

    def settle(self) -> None:
        """Do what the last call left for later: bookkeeping that no reply has to wait for.

        Every call does this first, so a caller only gains by calling it after it has sent the reply.
        """
        self._postponed.settle()

    def is_short(self) -> bool:
        """Whether the last RESERVE left so little room that :meth:`make_ahead` has something to do."""
        return self._room.is_short()

    def make_ahead(self) -> None:
        """Evict a few objects for the next RESERVE. For times when nobody waits; takes tens of microseconds."""
        self._postponed.settle()
        self._room.make_ahead()

    def has_next_move(self) -> bool:
        """Whether :meth:`next_move` may find something to do."""
        return self._moves.is_due()

    def next_move(self) -> Move | None:
        """Begin to move an object from a pool that is short of room to a later one; for times when nobody waits.

        Whoever has copied the bytes, or failed to, says so with :meth:`finish_move`; the object is found where it was
        until then. ``None``: there is nothing to move, or enough is in progress. Takes tens of microseconds.
        """
        self._postponed.settle()
        return self._moves.next()

    def finish_move(self, move: Move, copied: bool) -> bool:
        """The bytes of ``move`` are in their new place, or could not be copied; whether the object is there now.

        Moves are to be finished in the order in which they began.
        """
        self._postponed.settle()
        return self._moves.finish(move, copied)

    def reserve(
        self,
        session: Session,
        keys: Sequence[bytes],
        parents: Sequence[bytes],
        length: int | Sequence[int],
        packed: bytes | None = None,
        orphans: Orphans | None = None,
    ) -> Reserved:
        """Take pages for keys that nobody has; ``length`` in bytes.

        ``packed``: the keys as one column, if at hand; ``keys`` may be empty then, here and elsewhere.

        ``parents`` is empty, or as long as ``keys``, or one key: the parent of the first of a chain, in which each
        key is the parent of the next. ``orphans``: of the parts of the same request that came before this one.

        Returns columns of :class:`ReserveStatus`, first entry (NO_ENTRY without one) and generation (0 likewise), which
        may not be changed.
        """
        self._postponed.settle()
        column = b"".join(keys) if packed is None else packed
        return self._reservations.reserve(session, keys, parents, length, column, orphans or Orphans())

    def commit(
        self, session: Session, entries: Sequence[int], generations: Sequence[int], checksums: Sequence[int] = ()
    ) -> bytearray:
        """Make reserved objects READY; returns a column of :class:`CommitStatus`. Idempotent.

        What a reset came between is freed instead. The columns may not change afterwards.
        """
        self._postponed.settle()
        return self._reservations.commit(session, entries, generations, checksums)

    def abort(self, session: Session, entries: Sequence[int], generations: Sequence[int]) -> bytearray:
        """Give reserved pages back; returns a column of :class:`CommitStatus`. Idempotent."""
        self._postponed.settle()
        return self._reservations.abort(session, entries, generations)

    def probe(self, session: Session, keys: Sequence[bytes], packed: bytes | None = None) -> bytes:
        """A column of :class:`Presence`. Says nothing about what holds a moment later."""
        self._postponed.settle()
        column = b"".join(keys) if packed is None else packed
        return self._leases.presence(session.namespace.index.find(column, tags_of(column)))

    def acquire(
        self,
        session: Session,
        lease: int,
        keys: Sequence[bytes],
        leading: bool,
        packed: bytes | None = None,
        after: bytes | None = None,
    ) -> Acquired:
        """Lease what is READY, under ``lease`` (which may exist already).

        Returns columns of :class:`Presence`, first entry, generation and length in bytes. With ``leading`` only the
        READY keys at the head are leased and all keys after the first other one are answered ABSENT. The columns may
        not be changed. ``after``: the key before ``keys`` in the same request, when it comes in parts.
        """
        self._postponed.settle()
        column = b"".join(keys) if packed is None else packed
        found = session.namespace.index.find(column, tags_of(column))
        if self.objects.replica:
            found = self._preferred(found)
        got = self._leases.acquire(session, lease, found, leading)
        self._postponed.add(lambda: self._looked_up(session, column, got[0], got[1], after))
        return got

    def _preferred(self, found: Sequence[int | None]) -> Sequence[int | None]:
        """The same, but replicas where those are to be read."""
        objects, rank = self.objects, self._rank
        chosen = list(found)
        for at, entry in enumerate(found):
            if entry is None or (replica := objects.replica.get(entry)) is None:
                continue
            if rank[objects.arena_of(replica).number] < rank[objects.arena_of(entry).number]:
                chosen[at] = replica
        return chosen

    def _looked_up(
        self,
        session: Session,
        packed: bytes,
        statuses: bytes | bytearray,
        entries: array[int],
        after: bytes | None,
    ) -> None:
        """Tell the policies what a request found."""
        keys = keys_of(packed)
        if len(set(keys)) < len(keys):
            return  # no chain, so it says nothing about chains
        hits = len(keys) - len(statuses.lstrip(_FOUND))
        number = session.namespace.number
        if len(self.arenas) == 1:
            self.arenas[0].tenants.looked_up(number, keys, hits, entries[:hits], after)
            return
        if self._promote:
            self._moves.used(entries[:hits])
        for arena in self.arenas:
            mine = [entry for entry in entries[:hits] if arena.base <= entry < arena.end]
            arena.tenants.looked_up(number, keys, hits, mine, after)

    def release(self, session: Session, lease: int, limit: int) -> tuple[bool, bool]:
        """End at most ``limit`` keys of ``lease``; returns whether it was known and whether all of it has ended."""
        self._postponed.settle()
        return self._leases.release(session, lease, limit)

    def delete(self, session: Session, keys: Sequence[bytes]) -> bytes:
        """Drop READY objects; returns a column of :class:`Presence` from before. What is being written stays."""
        self._postponed.settle()
        statuses = bytearray(len(keys))
        index, state = session.namespace.index, self.objects.state
        for at, key in enumerate(keys):
            entry = index.get(key)
            if entry is None:
                continue
            statuses[at] = PRESENCE[state[entry]]
            if state[entry] == READY:
                self._removal.retire(entry)
                self.counters["deleted"] += 1
        return bytes(statuses)

    def evict(self, namespace: NamespaceState, entries: Iterable[int]) -> None:
        """Drop those of ``entries`` that are READY objects of ``namespace`` which no session reads."""
        self._postponed.settle()
        objects = self.objects
        for entry in entries:
            readers = objects.readers[entry] - self._moves.reads(entry)
            readers += objects.readers[objects.replica[entry]] if entry in objects.replica else 0
            if objects.state[entry] == READY and objects.home[entry] == namespace.number and not readers:
                self._removal.retire(entry)
                self.counters["evicted"] += 1

    def drop_damaged(self, session: Session, entries: Sequence[int], generations: Sequence[int]) -> bytearray:
        """Drop READY objects of the session's namespace that it found damaged, also while others lease them.

        Returns a column of :class:`CommitStatus`; UNKNOWN: it is not there any more, or never was this namespace's.
        """
        self._postponed.settle()
        statuses = bytearray(len(entries))
        objects, home = self.objects, session.namespace.number
        for at, (entry, generation) in enumerate(zip(entries, generations, strict=True)):
            if (
                entry < objects.total
                and objects.state[entry] in (READY, REPLICA)
                and objects.generation[entry] == generation
                and objects.home[entry] == home
            ):
                # A replica is a copy: what it has wrong, the object may have, too.
                self._removal.retire(objects.original.get(entry, entry))
                self.counters["damaged"] += 1
            else:
                statuses[at] = CommitStatus.UNKNOWN
        return statuses

    def reset(self, namespace: NamespaceState, weights_epoch: int) -> KeyIndex | None:
        """Hide all objects of ``namespace`` and begin a new weights epoch, unless ``weights_epoch`` is past already.

        Reservations that exist cannot commit any more. Returns what :meth:`drain` has to free, ``None`` for nothing.
        """
        self._postponed.settle()
        if weights_epoch != namespace.weights_epoch:
            return None
        old, namespace.index = namespace.index, self.namespaces.new_index()
        namespace.weights_epoch += 1
        self.counters["resets"] += 1
        for session in namespace.sessions.values():
            session.doomed.take_over(session.reserved)
            session.reserved = EntrySet()
        if not len(old):
            return None
        namespace.draining.append(old)
        return old

    def drain(self, namespace: NamespaceState, old: KeyIndex, limit: int) -> bool:
        """Free at most ``limit`` objects that a reset hid; whether that was all of them."""
        self._postponed.settle()
        for _ in range(limit):
            entry = old.take_any()
            if entry is None:
                namespace.draining = [index for index in namespace.draining if index is not old]
                return True
            if self.objects.state[entry] == READY:
                self._removal.retire(entry)
        return False

    def end_session(self, session: Session, limit: int) -> bool:
        """Free at most ``limit`` things that a closed session holds; whether that was all of them."""
        self._postponed.settle()
        self._removal.withheld.end(session.id)
        if not self._reservations.drop(session, limit):
            self._leases.drop(session, limit)
        return not (session.reserved or session.doomed or session.held)

    def _forget_policies(self, number: int) -> None:
        for arena in self.arenas:
            arena.tenants.forget(number)
