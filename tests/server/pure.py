"""A directory without sockets or files, and everything that must hold of it at any time."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from itertools import count

from attrs import define

from maru_core.contracts import PolicyFactory
from maru_core.pool_format import HEADER_SIZE, State
from maru_core.protocol.messages import NO_ENTRY, PoolDescriptor
from maru_core.server.arena import Arena
from maru_core.server.directory import Directory
from maru_core.server.eviction import LeastRecentlyUsed, least_recently_used
from maru_core.server.index import tags_of
from maru_core.server.liveness import SessionRecord
from maru_core.server.namespaces import NamespaceState
from maru_core.server.objects import REPLICA
from maru_core.server.reuse import ReusePolicy
from maru_core.server.sessions import Session, SessionRegistry

GRANULE = 100

Epochs = dict[bytes, int]


@define
class World:
    """A directory over plain memory. ``counts`` granules per pool; ``tables`` are the header tables."""

    directory: Directory
    sessions: SessionRegistry
    tables: list[bytearray]
    share: float = 1.0
    ahead: float = 0.01
    demote: bool = False
    promote: bool = False
    read_order: tuple[int, ...] = ()
    policy: PolicyFactory = least_recently_used

    @classmethod
    def of(
        cls,
        *counts: int,
        share: float = 1.0,
        ahead: float = 0.01,
        quota: int | None = None,
        demote: bool = False,
        promote: bool = False,
        read_order: tuple[int, ...] = (),
        policy: PolicyFactory = least_recently_used,
    ) -> World:
        tables = [bytearray(count * HEADER_SIZE) for count in counts]
        return cls.over(tables, share, ahead, None, quota, demote, promote, read_order, policy)

    @classmethod
    def over(
        cls,
        tables: list[bytearray],
        share: float = 1.0,
        ahead: float = 0.01,
        epochs: Epochs | None = None,
        quota: int | None = None,
        demote: bool = False,
        promote: bool = False,
        read_order: tuple[int, ...] = (),
        policy: PolicyFactory = least_recently_used,
    ) -> World:
        """Over header tables that exist; empty until it recovers what they say. ``quota`` of any namespace."""
        arenas, base = [], 0
        ticks = count(1.0)
        for number, table in enumerate(tables):
            entries = len(table) // HEADER_SIZE
            descriptor = PoolDescriptor(number, "fake", "", b"", entries * GRANULE, GRANULE, base, entries, 0, 0)
            arenas.append(Arena.of(number, descriptor, memoryview(table), policy, lambda: next(ticks)))
            base += entries
        numbers = iter(range(1, 1 << 30))
        directory = Directory(arenas, share, ahead, epochs, quota, demote, promote, read_order)
        registry = SessionRegistry(len(tables), lambda: next(numbers))
        return cls(directory, registry, tables, share, ahead, demote, promote, read_order, policy)

    def reborn(self, epochs: Epochs | None = None, tables: list[bytearray] | None = None) -> World:
        """What the next server makes of this one's memory (or of ``tables``) and sessions, which it awaits."""
        copies = [bytearray(table) for table in tables or self.tables]
        world = World.over(
            copies, self.share, self.ahead, epochs, None, self.demote, self.promote, self.read_order, self.policy
        )
        for session in self.sessions:
            record = SessionRecord(session.namespace.digest.hex(), session.role, session.name, True, False)
            namespace = world.directory.namespaces.of_digest(session.namespace.digest)
            world.sessions.adopt(session.id, namespace, record, 0.0)

        def writer(number: int, namespace: NamespaceState) -> Session:
            session = world.sessions.get(number)
            assert session is not None, "a session has pages but no record"
            return session

        world.directory.recover(writer)
        return world

    def ready(self) -> dict[tuple[bytes, bytes], tuple[int, int]]:
        """Entry and generation of every READY object, by namespace digest and key."""
        self.directory.settle()
        objects = self.directory.objects
        return {
            (namespace.digest, bytes(objects.arena_of(entry).headers.key(entry))): (entry, objects.generation[entry])
            for namespace in self.directory.namespaces
            for entry in namespace.index
            if objects.state[entry] == State.READY
        }

    def places(self) -> dict[tuple[bytes, bytes], set[tuple[int, int]]]:
        """The same for all copies of each."""
        found, objects = self.ready(), self.directory.objects
        places = {name: {place} for name, place in found.items()}
        for name, (entry, _) in found.items():
            copy = objects.replica.get(entry)
            if copy is not None:
                places[name].add((copy, objects.generation[copy]))
        return places

    def is_as_before(self, before: World) -> bool:
        """Whether all that could be found there is found here, at one of the places where it was."""
        mine, theirs = self.ready(), before.places()
        return mine.keys() == theirs.keys() and all(place in theirs[name] for name, place in mine.items())

    def links(self) -> dict[tuple[bytes, bytes], bytes]:
        """Key of the parent by namespace digest and key of each object that can be found and has one."""
        self.directory.settle()
        objects = self.directory.objects
        found = {}
        for namespace in self.directory.namespaces:
            for entry in namespace.index:
                elder = objects.parent[entry]
                if elder == NO_ENTRY or objects.state[elder] not in (State.RESERVED, State.READY):
                    continue
                if objects.generation[elder] == objects.parent_generation[entry]:
                    name, parent = (bytes(objects.arena_of(each).headers.key(each)) for each in (entry, elder))
                    found[namespace.digest, name] = parent
        return found

    def session(self, namespace: bytes = b"n") -> Session:
        return self.sessions.open(self.directory.namespaces.open(namespace), "client", "", 0.0)

    def store(self, session: Session, keys: list[bytes], length: int = GRANULE, parents: tuple[bytes, ...] = ()):
        """Reserve and commit; returns the statuses of RESERVE."""
        statuses, entries, generations = self.directory.reserve(session, tuple(keys), parents, length)
        new = [at for at, status in enumerate(statuses) if status == 0]
        answer = self.directory.commit(
            session, *(array("I", [column[at] for at in new]) for column in (entries, generations))
        )
        assert not any(answer)
        return bytes(statuses)

    def finish(self, session: Session) -> None:
        """End a session, a few things at a time."""
        self.sessions.close(session)
        while not self.directory.end_session(session, 3):
            pass

    def check(self, ending: Iterable[Session] = ()) -> None:
        """Every invariant of directory, allocator and headers. ``ending``: closed sessions that hold something yet."""
        directory = self.directory
        directory.settle()
        sessions = [*self.sessions, *ending]
        moves = [*directory._moves]
        sources, targets = [move.source for move in moves], [move.target for move in moves]
        for arena in directory.arenas:
            assert arena.moving == directory.objects.pages_of([e for e in targets if arena.base <= e < arena.end])
            assert arena.used + arena.reserved + arena.free.free == arena.end - arena.base
            taken: dict[int, str] = {}
            reserved = used = objects = leased = 0
            for entry in range(arena.base, arena.end):
                state = directory.objects.state[entry]
                if state == State.FREE or entry in taken:
                    continue
                for granule in range(entry, entry + directory.objects.pages[entry]):
                    assert granule not in taken, "objects overlap"
                    taken[granule] = "object"
                header = arena.headers.read(entry)
                assert header is not None, "a header is torn"
                assert header.state == (State.READY if state == REPLICA else state)
                assert header.generation == directory.objects.generation[entry] > 0
                assert tags_of(header.key).tolist() == [directory.objects.tag[entry]]
                assert header.length == directory.objects.length[entry]
                pages = directory.objects.pages[entry]
                reserved += pages * (state == State.RESERVED)
                used += pages * (state != State.RESERVED)
                objects += state == State.READY
                leased += pages * (directory.objects.readers[entry] > 0)
                readers = sum(entry in session.held for session in sessions) + sources.count(entry)
                assert directory.objects.readers[entry] == readers
            tags = [0] * (arena.end - arena.base)
            behind = -1
            for start, length in arena.free.runs():
                assert start > behind, "free runs are not joined"
                behind = start + length
                tags[start] = tags[behind - 1] = length
                for granule in range(start + arena.base, start + arena.base + length):
                    assert granule not in taken, "a free granule belongs to an object"
                    taken[granule] = "free"
                    header = arena.headers.read(granule)
                    assert header is None or header.state == State.FREE, "a freed header looks alive"
            assert tags == [arena.free.run_at(granule) for granule in range(arena.end - arena.base)]
            for pool, start, length in directory._removal.withheld:
                if pool is arena:
                    used += length
                    for granule in range(start, start + length):
                        assert granule not in taken, "a withheld granule is in use"
                        taken[granule] = "withheld"
            assert len(taken) == arena.end - arena.base, "a granule is lost"
            assert (reserved, used, objects, leased) == (arena.reserved, arena.used, arena.objects, arena.leased)
            for session in sessions:
                mine = [entry for entry in (*session.reserved, *session.doomed) if arena.base <= entry < arena.end]
                assert session.reserved_pages[arena.number] == sum(directory.objects.pages[entry] for entry in mine)
                held = [entry for entry in session.held if arena.base <= entry < arena.end]
                assert session.leased_pages[arena.number] == sum(directory.objects.pages[entry] for entry in held)
        owned = [entry for session in sessions for entry in (*session.reserved, *session.doomed)] + targets
        assert len(owned) == len(set(owned)) == sum(state == State.RESERVED for state in directory.objects.state)
        for session in sessions:
            states = {directory.objects.state[entry] for entry in session.held}
            assert states <= {State.READY, State.RETIRING, REPLICA}
        self.check_replicas()
        self.check_indexes()
        self.check_children()
        self.check_shares()
        self.check_orders()

    def check_orders(self) -> None:
        """What may be evicted is in an order of its own namespace, which says nothing of what is not."""
        objects = self.directory.objects
        for arena in self.directory.arenas:
            policies = arena.tenants._policies
            places = range(arena.base, arena.end)
            loose = [e for e in places if objects.state[e] in (State.READY, REPLICA) and not objects.readers[e]]
            parked: list[int] = []
            if all(type(policy) is LeastRecentlyUsed for policy in policies.values()):
                uses = [policy._uses.last for policy in policies.values()][:1]
                times = dict(zip(places, *uses, strict=True)) if uses else {}
                assert [entry for entry, time in times.items() if time] == loose
                parked = [entry for entry, time in times.items() if time & 1]
            elif all(type(policy) is ReusePolicy for policy in policies.values()):
                shared = next(iter(policies.values()))._places
                codes = {entry: code for entry, code in zip(places, shared.bucket, strict=True) if code}
                assert [*codes] == loose
                parked = [entry for entry, code in codes.items() if code & 1]
                assert not any(shared.kind[entry - arena.base] for entry in loose), "a note of what was there before"
                assert {code >> 1 for code in codes.values()} == shared.buckets.keys(), "an empty bucket stays"
                held = Counter(codes.values())
                for number, bucket in shared.buckets.items():
                    assert (bucket.alive, bucket.parked) == (held[2 * number], held[2 * number + 1])
                for number, policy in policies.items():
                    buckets = policy._buckets
                    mine = [entry for entry in loose if objects.home[entry] == number]
                    assert buckets.held == len(mine)
                    seen = {bucket.number for bucket in (*buckets._listed, buckets._returned)}
                    offered = [codes[entry] >> 1 for entry in mine if not codes[entry] & 1]
                    assert seen.issuperset(offered), "nobody looks there for victims"
            assert all(objects.children[entry] for entry in parked), "it may go, and is never offered"

    def check_indexes(self) -> None:
        directory = self.directory
        for namespace in directory.namespaces:
            ready = bytes_ready = 0
            for entry in namespace.index:
                assert directory.objects.state[entry] in (State.RESERVED, State.READY)
                arena = next(a for a in directory.arenas if a.base <= entry < a.end)
                header = arena.headers.read(entry)
                assert header is not None
                assert header.digest == namespace.digest
                assert namespace.index.get(header.key) == entry
                if directory.objects.state[entry] == State.READY:
                    ready += 1
                    bytes_ready += directory.objects.length[entry]
            if not namespace.draining:
                assert (ready, bytes_ready) == (namespace.objects, namespace.stored_bytes)

    def check_replicas(self) -> None:
        objects = self.directory.objects
        assert objects.original == {replica: original for original, replica in objects.replica.items()}
        assert sorted(objects.original) == [entry for entry, state in enumerate(objects.state) if state == REPLICA]
        for arena in objects.arenas:
            assert arena.replicas == sum(arena.base <= entry < arena.end for entry in objects.original)
        for original, replica in objects.replica.items():
            assert objects.state[original] == State.READY
            assert objects.arena_of(replica) is not objects.arena_of(original)
            assert (objects.parent[replica], objects.children[replica]) == (NO_ENTRY, 0)
            for column in (objects.length, objects.home, objects.tag):
                assert column[original] == column[replica]
            one, other = (objects.arena_of(entry).headers.read(entry) for entry in (original, replica))
            assert one is not None
            assert other is not None
            for what in ("key", "parent", "digest", "weights_epoch", "checksum", "length"):
                assert getattr(one, what) == getattr(other, what)

    def check_shares(self) -> None:
        """What each namespace takes; objects that are gone from its index but not yet from the pool included."""
        objects = self.directory.objects
        for arena in self.directory.arenas:
            taken: Counter[int] = Counter()
            reserved: Counter[int] = Counter()
            for entry in range(arena.base, arena.end):
                if objects.state[entry] != State.FREE:
                    taken[objects.home[entry]] += objects.pages[entry]
                if objects.state[entry] == State.RESERVED:
                    reserved[objects.home[entry]] += objects.pages[entry]
            for namespace in self.directory.namespaces:
                assert namespace.taken[arena.number] == taken[namespace.number]
                assert namespace.reserved[arena.number] == reserved[namespace.number]

    def check_children(self) -> None:
        objects = self.directory.objects
        copies = [move.target for move in self.directory._moves]
        alive = [entry for entry, state in enumerate(objects.state) if state in (State.RESERVED, State.READY)]
        alive = [entry for entry in alive if entry not in copies]
        # A parent that is gone may have an heir in its place, of another generation.
        children = Counter((objects.parent[child], objects.parent_generation[child]) for child in alive)
        for entry in alive:
            assert objects.children[entry] == children[entry, objects.generation[entry]]
            assert objects.parent[entry] in (NO_ENTRY, *range(objects.total))
        cross: dict[int, set[int]] = {}
        for entry in alive:
            elder = objects.parent[entry]
            linked = elder in alive and objects.generation[elder] == objects.parent_generation[entry]
            if linked and objects.arena_of(elder) is not objects.arena_of(entry):
                cross.setdefault(elder, set()).add(entry)
        assert objects.cross == cross
