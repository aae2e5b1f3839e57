"""Calls on batches of raw 32-byte keys: one round trip each, columns in and out, everything checked."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from maru_core.checksum import Verify
from maru_core.client.arguments import check_timeout, is_length, length_of, lengths_of, sequence_of
from maru_core.client.checks import Checks
from maru_core.client.columns import (
    acquired,
    commit_statuses,
    expect_results,
    join_keys,
    presences,
    reserved,
    single_map,
    single_number,
)
from maru_core.client.link import Link
from maru_core.client.located import Located
from maru_core.client.pending import LeaseBuilder, PendingAcquire
from maru_core.client.session import Session
from maru_core.client.taken import Taken, end_writing, granted
from maru_core.client.values import Grants, Lease
from maru_core.errors import MaruError, ProtocolError, StaleEpoch, Unavailable
from maru_core.pool_format import KEY_SIZE
from maru_core.protocol import MAX_KEYS, Op
from maru_core.protocol.codec import pack_u32, pack_u64

#: Bytes of one key in the largest request (key, parent, length), and what the rest of a message may take.
_KEY_COST = 32 + 32 + 8
_MESSAGE_OVERHEAD = 1024


class KeyCalls:
    """The low-level half of :class:`MaruHandler`. Every method is thread-safe.

    ``timeout`` is in seconds for the whole call; ``None`` is ``maru_request_timeout`` for each message of it (batches
    over the protocol's limits go as several). Common errors: Unavailable (server away or silent; at once while it is
    known to be away), StaleEpoch (it restarted), ServerError, ProtocolError (wrong keys, or a reply that does not
    answer every key). When a call raises, whatever its batch had taken is given back.
    """

    def __init__(self, link: Link, verify: Verify) -> None:
        self._link = link
        # Not by a method of this object: a handler in a cycle would not end when it is dropped.
        self._checks = Checks(verify, partial(_report_damage, link))

    @property
    def is_up(self) -> bool:
        """Whether calls are sent to a server now; while not, they fail at once and the handler looks for one."""
        return self._link.live is not None

    @property
    def epoch(self) -> int:
        """Epoch of the server; raises Unavailable while there is none."""
        return self._link.up().epoch

    def holds(self, epoch: int) -> bool:
        """Whether what was reserved or leased under the server of ``epoch`` is still held, and the server there."""
        session = self._link.live
        return session is not None and session.covers(epoch)

    @property
    def weights_epoch(self) -> int:
        """Weights epoch that this handler stores and looks up under."""
        return self._link.weights_epoch or 0

    def reserve(
        self,
        keys: Sequence[bytes],
        length: int | Sequence[int],
        parents: Sequence[bytes] | bytes | None = None,
        *,
        weights_epoch: int | None = None,
        timeout: float | None = None,
    ) -> Grants:
        """Ask for room for objects of ``length`` bytes each; write where the status is NEW, then ``commit``.

        ``parents[i]`` is the key that precedes ``keys[i]`` in its prefix (32 zero bytes: none). One key as ``bytes``
        says that ``keys`` are a chain, each the parent of the next, and precedes the first.
        """
        taken = Taken()
        try:
            return self._reserve(taken, keys, length, parents, weights_epoch, timeout)
        except BaseException:
            taken.undo(self._link)
            raise

    def _reserve(
        self,
        taken: Taken,
        keys: Sequence[bytes],
        length: int | Sequence[int],
        parents: Sequence[bytes] | bytes | None = None,
        weights_epoch: int | None = None,
        timeout: float | None = None,
    ) -> Grants:
        """:meth:`reserve` for callers that undo ``taken`` themselves when anything raises."""
        session = self._link.up()
        taken.holder = session.holder
        keys = tuple(sequence_of(keys, "keys"))
        count = len(keys)
        uniform = is_length(length)
        size = length_of(length, "length") if uniform else 0
        lengths = (size,) * count if uniform else lengths_of(length, "length")  # type: ignore[arg-type]
        chain = parents if isinstance(parents, bytes) else None
        if parents is not None and not isinstance(parents, bytes):
            parents = sequence_of(parents, "parents")
        if len(lengths) != count or (parents is not None and chain is None and len(parents) != count):
            raise ProtocolError(
                f"{count} keys with {len(lengths)} lengths and {'no' if parents is None else len(parents)} parents; "
                f"give one of each per key"
            )
        if chain is not None and len(chain) != KEY_SIZE:
            raise ProtocolError(f"a key must have {KEY_SIZE} bytes, got {len(chain)}")
        same_length = uniform or len(set(lengths)) == 1
        epoch = self._link.weights_epoch if weights_epoch is None else weights_epoch
        statuses, entries, generations = b"", array("I"), array("I")
        for part, wait in self._parts(count, session, timeout):
            chosen = lengths[part.start : part.stop]
            if parents is None:
                preceding = b""
            elif chain is None:
                preceding = join_keys(parents[part.start : part.stop])  # type: ignore[arg-type]
            else:
                preceding = keys[part.start - 1] if part.start else chain
            arguments: list[Any] = [
                epoch,
                join_keys(keys[part.start : part.stop]),
                preceding,
                size if uniform else pack_u64(chosen),
            ]
            parse = partial(reserved, lengths=chosen, uniform=same_length, pools=session.pools)
            answer = self._link.call(session, Op.RESERVE, arguments, parse, wait, taken.requests)
            new = granted(*answer, chosen)
            taken.written.append(new)
            self._link.holdings.writes(session.holder, *new[:2])
            if not statuses:
                statuses, entries, generations = answer
            else:
                statuses += answer[0]
                entries = entries + answer[1]  # a new one: what was noted before must not grow
                generations = generations + answer[2]
        return Grants(session.epoch, session.id, keys, statuses, entries, generations, lengths)

    def commit(
        self,
        grants: Grants,
        indices: Sequence[int] | None = None,
        *,
        checksums: bool = False,
        timeout: float | None = None,
    ) -> bytes:
        """Publish and make visible what was written; a CommitStatus for each of ``indices`` (``None``: ``grants.new``).

        With ``checksums`` the objects that ``maru_verify`` covers get one, of the bytes that lie in the pool now.
        UNKNOWN: not visible, because of a reset meanwhile. When it raises, these grants are void: their pages go back
        unless the server had already committed them.
        """
        chosen = grants.new if indices is None else indices
        whole = isinstance(chosen, range) and len(chosen) == len(grants.statuses)
        entries = grants.entries if whole else array("I", [grants.entries[index] for index in chosen])
        generations = grants.generations if whole else array("I", [grants.generations[index] for index in chosen])
        lengths = grants.lengths if whole else [grants.lengths[index] for index in chosen]
        statuses = b""
        try:
            session = self._link.up()
            if session.id != grants.session or not session.covers(grants.epoch):
                raise StaleEpoch("these reservations were made before the server restarted; nothing was committed")
            sums: list[int] = []
            if checksums:
                keys = grants.keys if whole else [grants.keys[index] for index in chosen]
                sums = self._checks.checksums(session.regions, keys, entries, lengths)
            session.regions.publish(entries, lengths)
            for part, wait in self._parts(len(entries), session, timeout):
                columns = [
                    pack_u32(entries[part.start : part.stop]),
                    pack_u32(generations[part.start : part.stop]),
                    pack_u64(sums[part.start : part.stop]),
                ]
                parse = partial(commit_statuses, count=len(part))
                statuses += self._link.call(session, Op.COMMIT, columns, parse, wait)
        except BaseException:
            self._put_back(grants, chosen)
            raise
        self._link.holdings.wrote(entries, generations)
        return statuses

    def abort(self, grants: Grants, indices: Sequence[int] | None = None) -> None:
        """Give reserved pages back without storing. Delivered by the background thread. Idempotent.

        Never blocks, but for writing caches back where hosts share the pool (docs/visibility.md).
        """
        self._put_back(grants, grants.new if indices is None else indices)

    def probe(self, keys: Sequence[bytes], *, weights_epoch: int | None = None, timeout: float | None = None) -> bytes:
        """A Presence for each key; nothing is leased, so it may be gone in the next moment."""
        return self._presences(Op.PROBE, keys, weights_epoch, timeout)

    def delete_keys(
        self, keys: Sequence[bytes], *, weights_epoch: int | None = None, timeout: float | None = None
    ) -> bytes:
        """Remove objects; a Presence for each key that says what was there. Leased bytes stay until released."""
        return self._presences(Op.DELETE, keys, weights_epoch, timeout)

    def acquire(
        self, keys: Sequence[bytes], *, leading: bool, weights_epoch: int | None = None, timeout: float | None = None
    ) -> Lease:
        """Lease what is READY; with ``leading`` only the keys before the first that is not."""
        taken = Taken()
        try:
            return self._acquire(taken, keys, leading, weights_epoch, timeout)
        except BaseException:
            taken.undo(self._link)
            raise

    def _acquire(
        self,
        taken: Taken,
        keys: Sequence[bytes],
        leading: bool,
        weights_epoch: int | None = None,
        timeout: float | None = None,
    ) -> Lease:
        """:meth:`acquire` for callers that undo ``taken`` themselves when anything raises."""
        session = self._link.up()
        taken.holder = session.holder
        keys = tuple(sequence_of(keys, "keys"))
        builder = LeaseBuilder(session, keys, self._link.holdings)
        epoch = self._link.weights_epoch if weights_epoch is None else weights_epoch
        for part, wait in self._parts(len(keys), session, timeout):
            arguments = [epoch, join_keys(keys[part.start : part.stop]), leading]
            parse = partial(acquired, count=len(part), pools=session.pools)
            answer = self._link.call(session, Op.ACQUIRE, arguments, parse, wait, taken.requests)
            if answer[0]:
                taken.read.append(answer[0])
            if not builder.add(answer) and leading:
                break
        return builder.build()

    def submit_acquire(
        self, keys: Sequence[bytes], *, leading: bool, weights_epoch: int | None = None
    ) -> PendingAcquire:
        """Send an ``acquire`` without waiting; poll the result on this thread."""
        session = self._link.up()
        keys = tuple(sequence_of(keys, "keys"))
        parts = [part for part, _ in self._parts(len(keys), session, None)]
        epoch = self._link.weights_epoch if weights_epoch is None else weights_epoch
        return PendingAcquire(self._link, session, keys, parts, leading, epoch)

    def release(self, lease: Lease) -> None:
        """End a lease. Never blocks; delivered by the background thread until the server confirms. Idempotent."""
        if lease.ids:
            self._link.end_lease((lease.epoch, lease.session), lease.ids)

    def room(self, grants: Grants, index: int) -> memoryview:
        """Writable bytes of a reserved object, to be written and not to be read; otherwise as :meth:`view`."""
        return self._link.session_of(grants.epoch).regions.room(grants.entries[index], grants.lengths[index])

    def rooms(self, grants: Grants, indices: Sequence[int]) -> Sequence[memoryview]:
        """:meth:`room` for each of many objects; quick where they have one length."""
        regions = self._link.session_of(grants.epoch).regions
        entries, lengths = grants.entries, grants.lengths
        if indices != range(len(entries)):
            entries, lengths = array("I", [entries[i] for i in indices]), [lengths[i] for i in indices]
        return regions.rooms(entries, lengths)

    def view(self, epoch: int, entry: int, length: int) -> memoryview:
        """Writable bytes of an object, without a copy. ``epoch`` is that of the grants or lease it comes from.

        Each call acquires them for reading. To write a reserved object, :meth:`room` does without.

        Nothing here watches such a view: it must not be written once its grants are committed, aborted, or the handler
        is closed, nor read once its lease is released. :class:`Allocation` and :class:`Retrieved` see to that.

        Raises StaleEpoch when the server restarted since: the same entry is something else now. Works while the link
        is down, as long as the epoch is the latest one known.
        """
        return self._link.session_of(epoch).regions.view(entry, length)

    def verify(
        self, epoch: int, entries: Sequence[int], generations: Sequence[int], lengths: Sequence[int]
    ) -> list[bool]:
        """For each object: whether its header still shows it READY with this generation, length and namespace.

        Call it after the copy has completed; only then a ``True`` proves what was copied.
        """
        return self._link.session_of(epoch).regions.verify(entries, generations, lengths)

    def adopt(
        self,
        epoch: int,
        entries: Sequence[int],
        generations: Sequence[int],
        lengths: Sequence[int],
        keys: Sequence[bytes] = (),
    ) -> Located:
        """Objects that another process of this engine leased; raises StaleEpoch in another epoch.

        ``keys`` are needed for :meth:`Located.check`.
        """
        regions = self._link.session_of(epoch).regions
        return Located(epoch, entries, generations, lengths, keys, regions, self._checks)

    def reset(self, *, timeout: float | None = None) -> int:
        """Drop everything in the namespace (new weights); the weights epoch that this handler uses from here on."""
        session = self._link.up()
        current = self._link.call(session, Op.RESET, [self.weights_epoch], single_number, timeout)
        self._link.weights_epoch = current
        return current

    def ping(self, *, timeout: float | None = None) -> float:
        """Seconds of one round trip."""
        session = self._link.up()
        start = time.perf_counter()
        self._link.call(session, Op.PING, (), partial(expect_results, count=0, op="PING"), timeout)
        return time.perf_counter() - start

    def server_stats(self, *, timeout: float | None = None) -> dict[str, Any]:
        """What the server counts: server, pools, sessions, counters, namespaces."""
        return self._link.call(self._link.up(), Op.STATS, (), single_map, timeout)

    def _presences(self, op: Op, keys: Sequence[bytes], weights_epoch: int | None, timeout: float | None) -> bytes:
        session = self._link.up()
        keys = sequence_of(keys, "keys")
        epoch = self._link.weights_epoch if weights_epoch is None else weights_epoch
        found = []
        for part, wait in self._parts(len(keys), session, timeout):
            parse = partial(presences, count=len(part), op=op.name)
            arguments = [epoch, join_keys(keys[part.start : part.stop])]
            found.append(self._link.call(session, op, arguments, parse, wait))
        return b"".join(found)

    def _put_back(self, grants: Grants, indices: Sequence[int]) -> None:
        if indices:
            end_writing(
                self._link,
                (grants.epoch, grants.session),
                [grants.entries[index] for index in indices],
                [grants.generations[index] for index in indices],
                [grants.lengths[index] for index in indices],
            )

    def _parts(self, count: int, session: Session, timeout: float | None) -> Iterator[tuple[range, float | None]]:
        """Slices of a batch that fit one message each, with the seconds that are left for it."""
        check_timeout(timeout)
        most = max(1, min(MAX_KEYS, (session.max_message - _MESSAGE_OVERHEAD) // _KEY_COST))
        if count <= most:
            if count:
                yield range(count), timeout
            return
        deadline = None if timeout is None else time.monotonic() + timeout
        for start in range(0, count, most):
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise Unavailable(
                    f"{count - start} of {count} keys were left when the {timeout} s for the call were over"
                )
            yield range(start, min(start + most, count)), left


def _report_damage(link: Link, epoch: int, entry: int, generation: int, key: bytes, what: str) -> None:
    """Have the server drop a damaged object, so that nobody hits it again. Never blocks."""
    link.note("error", "damaged object", key=key.hex(), wrong=what, entry=entry, generation=generation)
    try:
        holder = link.session_of(epoch).holder
    except MaruError:  # the epoch is over, and the object with it
        return
    link.defer(holder, Op.REPORT, ((entry, generation),))
