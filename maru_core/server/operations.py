"""What a session can ask for: operations on objects, one slice at a time."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Generator, Mapping, Sequence
from itertools import compress, count
from typing import Any, Protocol

from maru_core.errors import ProtocolError
from maru_core.pool_format import KEY_SIZE
from maru_core.protocol.codec import describe, unpack_u64
from maru_core.protocol.messages import NO_ENTRY, Code, Op, Presence, ReserveStatus
from maru_core.server import requests
from maru_core.server.directory import Directory
from maru_core.server.index import KeyIndex
from maru_core.server.namespaces import NamespaceState
from maru_core.server.orphans import Orphans
from maru_core.server.requests import Refusal
from maru_core.server.reservations import Reserved, keys_of
from maru_core.server.sessions import AcquireUndo, ReserveUndo, Session
from maru_core.server.steps import DELETE_SLICE, MIXED_SLICE, RESERVE_SLICE, SLICE, Steps

#: 1 for NEW, else 0: the whole column is looked at in one go, so it has to be quick.
_IS_NEW = bytes(status == ReserveStatus.NEW for status in range(256))
#: Lease ids have room for a million million requests above this base, and stay below 64 bits.
_LEASE_BASE = (1 << 42) - 1


#: Does something to the objects of these entries and generations; returns a column of statuses.
_ActOnHandles = Callable[[Session, Sequence[int], Sequence[int]], bytes | bytearray]


class Epochs(Protocol):
    """Where weights epochs outlive the server (:mod:`maru_core.server.weights`)."""

    def save(self, epochs: Mapping[bytes, int]) -> None:
        """Keep these, by namespace digest; never raises."""


class Operations:
    """Each takes a session, the request's id and its arguments; see :mod:`maru_core.server.steps`.

    ``epoch`` is the server's.
    """

    def __init__(self, directory: Directory, weights: Epochs, epoch: int) -> None:
        self._directory = directory
        self._weights = weights
        # Sessions may go on with leases of the server before this one: ids must not meet theirs.
        self._leases = count((epoch & _LEASE_BASE) << 20 | 1)

    def table(self) -> dict[int, Callable[[Session, int, list[Any]], Steps]]:
        """By number on the wire."""
        return {
            Op.RESERVE: self.reserve,
            Op.COMMIT: self.commit,
            Op.ABORT: self.abort,
            Op.PROBE: self.probe,
            Op.ACQUIRE: self.acquire,
            Op.RELEASE: self.release,
            Op.DELETE: self.delete,
            Op.REPORT: self.report,
            Op.RESET: self.reset,
            Op.CANCEL: self.cancel,
        }

    def cancel(self, session: Session, request: int, raw: list[Any]) -> Steps:
        """Undo requests by id, or refuse them when they arrive."""
        ids = unpack_u64(requests.arguments(raw, 1)[0])
        requests.within_limit(len(ids))
        for done, number in enumerate(ids, 1):
            if done % SLICE == 0:
                yield
                self._go_on(session, request)
            if number in session.running:
                session.dropped.add(number)
                continue
            undo = session.recall(number)
            if undo is None:
                session.expect_cancelled(number)
                continue
            self._directory.counters["cancelled"] += 1
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

    def reserve(self, session: Session, request: int, raw: list[Any]) -> Steps:
        """Take pages for keys that nobody has."""
        weights_epoch, keys, parents, length = requests.arguments(raw, 4)
        requests.number(weights_epoch, "weights epoch")
        total = requests.key_count(keys)
        if type(parents) is not bytes or len(parents) not in (0, KEY_SIZE, len(keys)):
            raise ProtocolError(f"parents must be none, one, or as many as keys ({total}), got {describe(parents)}")
        chain = len(parents) == KEY_SIZE
        sizes = requests.lengths(length, total)
        width = RESERVE_SLICE if type(sizes) is int else MIXED_SLICE
        statuses, entries, generations = bytearray(), array("I"), array("I")
        orphans = Orphans()
        for at in range(0, total, width):
            count = min(width, total - at)
            packed = requests.column_slice(keys, at, count)
            if not chain:
                before = requests.column_slice(parents, at, count)
            else:
                before = parents if at == 0 else keys[(at - 1) * KEY_SIZE : at * KEY_SIZE]
            part_sizes = sizes if type(sizes) is int else sizes[at : at + count]  # type: ignore[index]
            if weights_epoch != session.namespace.weights_epoch:
                got = _nowhere(ReserveStatus.REFUSED, count)
            else:
                got = self._directory.reserve(session, (), keys_of(before), part_sizes, packed, orphans)
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
            self._directory.counters["skipped_busy"] += statuses.count(ReserveStatus.BUSY)
            self._directory.counters["skipped_refused"] += statuses.count(ReserveStatus.REFUSED)
        if mine[0]:
            session.remember(request, ReserveUndo(*mine))
        return [statuses, entries.tobytes(), generations.tobytes()]

    def _give_back(self, session: Session, entries: array[int], generations: array[int]) -> Generator[None, None, None]:
        for at in range(0, len(entries), SLICE):
            if session.closed:
                return
            part = slice(at, at + SLICE)
            self._directory.abort(session, entries[part], generations[part])
            yield

    def commit(self, session: Session, request: int, raw: list[Any]) -> Steps:
        """Make reserved objects READY."""
        entries, generations = requests.handles(*requests.arguments(raw, 3)[:2])
        checksums = unpack_u64(raw[2]) if raw[2] == b"" else unpack_u64(raw[2], len(entries))
        statuses = bytearray()
        for at in range(0, len(entries), SLICE):
            if at:
                yield
                self._go_on(session, request)
            part = slice(at, at + SLICE)
            statuses += self._directory.commit(session, entries[part], generations[part], checksums[part])
        return [statuses]

    def abort(self, session: Session, request: int, raw: list[Any]) -> Steps:
        """Give reserved pages back."""
        return (yield from self._in_parts(session, request, raw, SLICE, self._directory.abort))

    def _in_parts(self, session: Session, request: int, raw: list[Any], width: int, act: _ActOnHandles) -> Steps:
        """Let ``act`` work on the entries and generations that are the arguments, ``width`` at a time."""
        entries, generations = requests.handles(*requests.arguments(raw, 2))
        statuses = bytearray()
        for at in range(0, len(entries), width):
            if at:
                yield
                self._go_on(session, request)
            part = slice(at, at + width)
            statuses += act(session, entries[part], generations[part])
        return [statuses]

    # -- reading ---------------------------------------------------------------------------------------------------

    def probe(self, session: Session, request: int, raw: list[Any]) -> Steps:
        """Say what is there."""

        def probe(keys: bytes) -> bytes:
            return self._directory.probe(session, (), keys)

        return (yield from self._of_keys(session, request, raw, SLICE, probe))

    def _of_keys(
        self, session: Session, request: int, raw: list[Any], width: int, act: Callable[[bytes], bytes]
    ) -> Steps:
        """Presence of keys, of which ``act`` is given ``width`` at a time; ABSENT what is of another weights epoch."""
        weights_epoch, keys = requests.arguments(raw, 2)
        requests.number(weights_epoch, "weights epoch")
        total = requests.key_count(keys)
        statuses = bytearray()
        for at in range(0, total, width):
            if at:
                yield
                self._go_on(session, request)
            current = weights_epoch == session.namespace.weights_epoch
            count = min(width, total - at)
            statuses += act(requests.column_slice(keys, at, count)) if current else bytes([Presence.ABSENT]) * count
        return [statuses]

    def acquire(self, session: Session, request: int, raw: list[Any]) -> Steps:
        """Lease what is READY."""
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
                self._directory.counters["misses"] += count
                statuses += bytes(count)
                entries.extend([NO_ENTRY] * count)
                generations.extend([0] * count)
                lengths.extend([0] * count)
            else:
                packed = requests.column_slice(keys, at, SLICE)
                after = requests.column_slice(keys, at - 1, 1) if at else None
                got = self._directory.acquire(session, lease, (), leading, packed, after)
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
        known, done = self._directory.release(session, lease, SLICE)
        while not done:
            yield
            if session.closed:
                break
            _, done = self._directory.release(session, lease, SLICE)
        return known

    def release(self, session: Session, request: int, raw: list[Any]) -> Steps:
        """End leases."""
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

    def delete(self, session: Session, request: int, raw: list[Any]) -> Steps:
        """Drop READY objects by key."""

        def delete(keys: bytes) -> bytes:
            return self._directory.delete(session, keys_of(keys))

        return (yield from self._of_keys(session, request, raw, DELETE_SLICE, delete))

    def report(self, session: Session, request: int, raw: list[Any]) -> Steps:
        """Drop objects that a reader found damaged."""
        return (yield from self._in_parts(session, request, raw, DELETE_SLICE, self._directory.drop_damaged))

    def reset(self, session: Session, request: int, raw: list[Any]) -> Steps:
        """Begin a new weights epoch in the namespace of the session."""
        weights_epoch = requests.number(requests.arguments(raw, 1)[0], "weights epoch")
        namespace = session.namespace
        hidden = self.hide([namespace])[0] if weights_epoch == namespace.weights_epoch else None
        # The answer is the epoch that began here, even if another reset follows while this one still frees.
        current = namespace.weights_epoch
        while hidden is not None and not self._directory.drain(namespace, hidden, DELETE_SLICE):
            yield
        return [current]

    def hide(self, namespaces: Sequence[NamespaceState]) -> list[KeyIndex | None]:
        """Begin a new weights epoch in each; returns what is left to drain, ``None`` where there is nothing."""
        # Saved first, or a server that is killed in between would serve old bytes to engines with new weights.
        begun = {namespace.digest: namespace.weights_epoch + 1 for namespace in namespaces}
        self._weights.save(self._directory.namespaces.epochs() | begun)
        return [self._directory.reset(namespace, namespace.weights_epoch) for namespace in namespaces]


def _nowhere(status: ReserveStatus, count: int) -> Reserved:
    """The answer for keys of which nothing is reserved."""
    return bytearray([status]) * count, array("I", [NO_ENTRY]) * count, array("I", [0]) * count


def _taken(statuses: bytearray, entries: array[int], generations: array[int]) -> tuple[array[int], array[int]]:
    """Entries and generations of the keys that were answered NEW."""
    if statuses.count(ReserveStatus.NEW) == len(statuses):
        return entries, generations
    new = statuses.translate(_IS_NEW)
    return array("I", compress(entries, new)), array("I", compress(generations, new))
