"""A model of the directory beside the directory, under random operations."""

from __future__ import annotations

from array import array
from itertools import chain

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from maru_core.pool_format import State
from maru_core.protocol.messages import CommitStatus, Presence, ReserveStatus
from maru_core.server.eviction import least_recently_used
from maru_core.server.moves import Move
from maru_core.server.reuse import reuse_policy
from tests.budgets import examples
from tests.server.pure import GRANULE, World
from tests.server.raw import key

pytestmark = pytest.mark.slow


def name_of(number: int) -> bytes:
    """Sixteen keys, of which each two end in the same bytes: an index must not take one for the other."""
    return bytes([number // 8]) + key(number % 8)[1:]


KEYS = st.integers(0, 15).map(name_of)
COLUMN = st.lists(KEYS, min_size=1, max_size=6)
LENGTHS = st.sampled_from([1, GRANULE, GRANULE + 1, 3 * GRANULE, 7 * GRANULE])
WHO = st.integers(0, 2)


class DirectoryModel(RuleBasedStateMachine):
    """Two or three pools, three sessions of which two share a namespace, few keys, several object sizes.

    Beside the directory there is a pool of stamps, one per granule. Writers put a stamp of their own wherever they
    reserved, moves carry stamps along, and readers must find what was committed under their key.
    """

    @initialize(
        share=st.sampled_from([0.5, 1.0]),
        counts=st.sampled_from([(7, 6), (5, 9), (6, 4, 5), (12, 8)]),
        demote=st.sampled_from([True, True, False]),
        promote=st.booleans(),
        read_order=st.sampled_from([(), (1, 0)]),
        policy=st.sampled_from([least_recently_used, reuse_policy]),
    )
    def begin(self, share, counts, demote, promote, read_order, policy) -> None:
        order = {"promote": promote, "read_order": read_order, "policy": policy}
        self.world = World.of(*counts, share=share, ahead=0.4, demote=demote, **order)
        self.longest = max(int(count * share) for count in counts) * GRANULE
        self.memory = [0] * sum(counts)
        self.stamp = 0
        #: Stamp of what was committed last, by namespace digest and key.
        self.content: dict[tuple[bytes, bytes], int] = {}
        #: Moves in progress, each with whether its bytes were copied.
        self.moves: list[tuple[Move, bool]] = []
        self.clients = [self.world.session(b"a"), self.world.session(b"a"), self.world.session(b"b")]
        #: What each session reserved and did not give back: (session, entry, generation, key, epoch).
        self.writing: list[tuple[int, int, int, bytes, int]] = []
        #: (session, lease, [(entry, generation)])
        self.reading: list[tuple[int, int, list[tuple[int, int]]]] = []
        #: Stamp of what is or was leased, by entry and generation.
        self.seen: dict[tuple[int, int], int] = {}
        self.generations: dict[int, int] = {}
        self.next_lease = 0

    @rule(who=WHO, column=COLUMN, length=LENGTHS, chain=st.sampled_from(["none", "chain", "random"]), data=st.data())
    def reserve(self, who, column, length, chain, data):
        session = self.clients[who]
        parents: tuple[bytes, ...] = ()
        if chain == "chain":
            parents = (data.draw(KEYS),)
        elif chain == "random":
            parents = tuple(data.draw(st.lists(KEYS, min_size=len(column), max_size=len(column))))
        sizes = length if data.draw(st.booleans()) else [data.draw(LENGTHS) for _ in column]
        before = self.world.directory.probe(session, column)
        statuses, entries, generations = self.world.directory.reserve(session, tuple(column), parents, sizes)
        assert len(statuses) == len(entries) == len(generations) == len(column)
        seen = set()
        without_room = set()
        for at, (name, status) in enumerate(zip(column, statuses, strict=True)):
            above = (column[at - 1] if at else parents[0]) if chain == "chain" else parents[at] if parents else None
            if before[at] == Presence.READY:
                assert status == ReserveStatus.PRESENT
            elif before[at] == Presence.WRITING or name in seen:
                assert status in (ReserveStatus.BUSY, ReserveStatus.PRESENT, ReserveStatus.NO_ROOM)
            elif (sizes if isinstance(sizes, int) else sizes[at]) > self.longest:
                # Below one without room nothing is looked at any more.
                assert status == ReserveStatus.REFUSED or (status == ReserveStatus.NO_ROOM and above in without_room)
            else:
                assert status in (ReserveStatus.NEW, ReserveStatus.NO_ROOM)
            seen.add(name)
            if status == ReserveStatus.NO_ROOM:
                without_room.add(name)
            if status == ReserveStatus.NEW:
                assert generations[at] > self.generations.get(entries[at], 0), "the generation did not change"
                self.generations[entries[at]] = generations[at]
                epoch = session.namespace.weights_epoch
                self.write(entries[at], sizes if isinstance(sizes, int) else sizes[at])
                self.writing.append((who, entries[at], generations[at], name, epoch))

    @rule(who=WHO, first=st.integers(0, 15), count=st.integers(2, 8), length=st.sampled_from([1, 2 * GRANULE]))
    def store_chain(self, who, first, count, length):
        """What fills pools quickly; not more of a namespace than there is room for."""
        session = self.clients[who]
        names = [name_of(number) for number in range(first, min(first + count, 16))]
        parents = (name_of(first - 1),) if first else ()
        statuses, entries, generations = self.world.directory.reserve(session, tuple(names), parents, length)
        new = [at for at, status in enumerate(statuses) if status == ReserveStatus.NEW]
        for at in new:
            self.generations[entries[at]] = generations[at]
            self.write(entries[at], length)
            self.content[session.namespace.digest, names[at]] = self.stamp
        handles = [array("I", [column[at] for at in new]) for column in (entries, generations)]
        assert not any(self.world.directory.commit(session, *handles))

    def write(self, entry: int, length: int) -> None:
        self.stamp += 1
        pages = -(-length // GRANULE)
        self.memory[entry : entry + pages] = [self.stamp] * pages

    def store_one(self, session, name):
        if self.world.store(session, [name]) == bytes([ReserveStatus.NEW]):
            place = session.namespace.digest, name
            entry, _ = self.world.ready()[place]
            self.write(entry, 1)
            self.content[place] = self.memory[entry]

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), commit=st.booleans(), count=st.integers(1, 5))
    def finish(self, data, commit, count):
        picked = data.draw(st.lists(st.sampled_from(self.writing), min_size=1, max_size=count, unique=True))
        who = picked[0][0]
        picked = [item for item in picked if item[0] == who]
        session = self.clients[who]
        entries, generations = [item[1] for item in picked], [item[2] for item in picked]
        act = self.world.directory.commit if commit else self.world.directory.abort
        statuses = act(session, array("I", entries), array("I", generations))
        for status, (_, entry, _, name, epoch) in zip(statuses, picked, strict=True):
            stale = epoch != session.namespace.weights_epoch
            if commit:
                assert status == (CommitStatus.UNKNOWN if stale else CommitStatus.OK)
                if not stale:
                    self.content[session.namespace.digest, name] = self.memory[entry]
                    assert self.world.directory.probe(session, [name]) == bytes([Presence.READY])
            else:
                assert status == CommitStatus.OK
        self.writing = [item for item in self.writing if item not in picked]
        again = self.world.directory.commit(session, entries, generations)
        assert list(again) == (list(statuses) if commit else [CommitStatus.UNKNOWN] * len(entries))

    @precondition(lambda self: self.writing)
    @rule(data=st.data())
    def a_stranger_cannot_finish(self, data):
        who, entry, generation, _, _ = data.draw(st.sampled_from(self.writing))
        stranger = self.clients[(who + 1) % 3]
        handle = array("I", [entry]), array("I", [generation])
        assert self.world.directory.commit(stranger, *handle) == bytes([CommitStatus.UNKNOWN])
        assert self.world.directory.abort(stranger, [entry], [generation]) == bytes([CommitStatus.UNKNOWN])
        assert self.world.directory.commit(self.clients[who], [entry], [generation - 1]) == b"\1"

    @rule(who=WHO, column=COLUMN, leading=st.booleans())
    def acquire(self, who, column, leading):
        session = self.clients[who]
        before = self.world.directory.probe(session, column)
        self.next_lease += 1
        answer = self.world.directory.acquire(session, self.next_lease, column, leading)
        statuses, entries, generations, lengths = answer
        assert len(statuses) == len(entries) == len(generations) == len(lengths) == len(column)
        head = True
        taken = []
        for at, status in enumerate(statuses):
            if status == Presence.READY:
                assert before[at] == Presence.READY
                assert head or not leading
                assert lengths[at] == self.world.directory.objects.length[entries[at]]
                taken.append((entries[at], generations[at]))
                self.seen[taken[-1]] = self.content[session.namespace.digest, column[at]]
            elif status == Presence.BUSY:
                assert before[at] == Presence.READY
            else:
                assert status == before[at] or (leading and not head)
            head = head and status == Presence.READY
        if taken:
            self.reading.append((who, self.next_lease, taken))

    @precondition(lambda self: self.reading)
    @rule(data=st.data(), limit=st.integers(1, 4))
    def release(self, data, limit):
        item = data.draw(st.sampled_from(self.reading))
        who, lease, _ = item
        done = False
        while not done:
            known, done = self.world.directory.release(self.clients[who], lease, limit)
            assert known
        assert self.world.directory.release(self.clients[who], lease, limit) == (False, True)
        self.reading.remove(item)

    @rule()
    def make_ahead(self):
        """Nothing that is held or that somebody else precedes may go; ``everything_holds`` sees to that."""
        objects, evicted = self.world.directory.objects, self.world.directory.counters["evicted"]
        free = sum(arena.free.free for arena in objects.arenas)
        self.world.directory.make_ahead()  # as for moves
        while self.world.directory.is_short():
            self.world.directory.make_ahead()
        gained = sum(arena.free.free for arena in objects.arenas) - free
        assert gained >= self.world.directory.counters["evicted"] - evicted
        assert not gained or free + gained <= 0.4 * objects.total, "more was evicted than may be kept free"

    @precondition(lambda self: self.world.directory.has_next_move())
    @rule(data=st.data())
    def move_at_once(self, data):
        """One move from its beginning to its end."""
        self.next_move()
        if self.moves:
            self.copy(data)
            self.finish_move(data)

    @precondition(lambda self: self.world.directory.has_next_move())
    @rule()
    def next_move(self):
        """It may evict in a lower pool, or what fits nowhere below, and nothing else is lost."""
        counters = self.world.directory.counters
        before, links, evicted = self.world.places(), self.world.links(), counters["evicted"]
        move = self.world.directory.next_move()
        after = self.world.ready()
        assert len(after) == len(before) - counters["evicted"] + evicted
        assert all(place in before[name] for name, place in after.items())
        assert {name: parent for name, parent in links.items() if name in after} == {
            name: parent for name, parent in self.world.links().items() if name in after
        }, "a head went before its tail"
        if move is not None:
            assert move.target_pool > move.source_pool or (self.world.promote and move.target_pool == 0)
            self.moves.append((move, False))

    @precondition(lambda self: self.moves)
    @rule(data=st.data())
    def copy(self, data):
        at = data.draw(st.integers(0, len(self.moves) - 1))
        move, _ = self.moves[at]
        pages = -(-move.length // GRANULE)
        self.memory[move.target : move.target + pages] = self.memory[move.source : move.source + pages]
        self.moves[at] = move, True

    @precondition(lambda self: self.moves)
    @rule(data=st.data())
    def finish_move(self, data):
        """In any order, as far as the directory goes. The object is found before and after, and its bytes are there."""
        at = data.draw(st.integers(0, min(1, len(self.moves) - 1)))
        move, copied = self.moves.pop(at)
        before, links = self.world.ready(), self.world.links()
        moved = self.world.directory.finish_move(move, copied)
        after = self.world.ready()
        assert before.keys() == after.keys(), "a move lost something"
        assert self.world.links() == links
        changed = {before[name]: after[name] for name in before if before[name] != after[name]}
        here, there = (move.source, move.source_generation), (move.target, move.target_generation)
        assert changed == ({here: there} if moved and move.down else {})
        if moved and not move.down:
            assert self.world.directory.objects.replica[move.source] == move.target
        assert not moved or copied
        assert not self.world.directory.finish_move(move, copied), "it is over"

    @rule(who=WHO, data=st.data())
    def report_damage(self, who, data):
        session = self.clients[who]
        mine = {name: place for name, place in self.world.ready().items() if name[0] == session.namespace.digest}
        if mine:
            name = data.draw(st.sampled_from(sorted(mine)))
            entry, generation = data.draw(st.sampled_from(sorted(self.world.places()[name])))
            assert self.world.directory.drop_damaged(session, [entry], [generation]) == b"\0"
            assert self.world.directory.probe(session, [name[1]]) == bytes([Presence.ABSENT])

    @rule(who=WHO, name=KEYS)
    def evict_as_operator(self, who, name):
        namespace = self.clients[who].namespace
        entry = namespace.index.get(name)
        copies = {entry, self.world.directory.objects.replica.get(entry)}
        self.world.directory.evict(namespace, [] if entry is None else [entry])
        self.world.directory.settle()
        left = namespace.index.get(name)
        objects = self.world.directory.objects
        assert (
            left is None or objects.state[left] != State.READY or any(e in c.held for c in self.clients for e in copies)
        )

    @rule(who=WHO, column=COLUMN)
    def delete(self, who, column):
        session = self.clients[who]
        before = self.world.directory.probe(session, column)
        answer = self.world.directory.delete(session, column)
        assert answer[0] == before[0]
        after = self.world.directory.probe(session, column)
        assert all(status != Presence.READY for status in after)

    @rule(who=WHO, stale=st.booleans(), limit=st.integers(1, 5), data=st.data())
    def reset(self, who, stale, limit, data):
        namespace = self.clients[who].namespace
        epoch = namespace.weights_epoch
        hidden = self.world.directory.reset(namespace, epoch - 1 if stale else epoch)
        if stale:
            assert hidden is None
            assert namespace.weights_epoch == epoch
            return
        assert namespace.weights_epoch == epoch + 1
        everything = [name_of(number) for number in range(16)]
        assert not any(self.world.directory.probe(self.clients[who], everything))
        if hidden is not None:
            if data.draw(st.booleans()):
                other = self.clients[data.draw(WHO)]
                self.store_one(other, data.draw(KEYS))
                self.generations = dict(enumerate(self.world.directory.objects.generation))
            while not self.world.directory.drain(namespace, hidden, limit):
                pass

    @rule(who=WHO)
    def die(self, who):
        self.world.finish(self.clients[who])
        namespace = b"b" if who == 2 else b"a"
        self.clients[who] = self.world.session(namespace)
        self.writing = [item for item in self.writing if item[0] != who]
        self.reading = [item for item in self.reading if item[0] != who]

    @rule(data=st.data(), limit=st.integers(1, 5))
    def crash(self, data, limit):
        """The server is killed and comes back on the same memory; clients say what they still use, or died too."""
        before = self.world.ready()
        directory, dead = self.world.directory, self.world
        self.world = self.world.reborn(directory.namespaces.epochs())
        assert self.world.is_as_before(dead)
        self.moves.clear()
        assert self.world.directory.next_move() is None, "somebody unknown may read what it would move"
        self.world.check()
        directory = self.world.directory
        generations = list(directory.objects.generation)
        for who, old in enumerate(self.clients):
            session = self.world.sessions.get(old.id)
            mine = [item for item in self.writing if item[0] == who]
            assert {*session.reserved, *session.doomed} == {item[1] for item in mine}
            if data.draw(st.booleans(), "dies"):
                self.world.finish(session)
                session = self.world.session(b"b" if who == 2 else b"a")
                keep, read = [], []
            else:
                keep = [item for item in mine if data.draw(st.booleans(), "still writes")]
                read = [item for item in self.reading if item[0] == who and data.draw(st.booleans(), "still reads")]
                parts = directory.unlisted(session, [item[1] for item in keep], [item[2] for item in keep])
                lost = list(chain.from_iterable(parts))
                assert sorted(lost) == sorted(item[1] for item in mine if item not in keep)
                directory.give_back(session, lost)
                for _, lease, taken in read:
                    directory.resume_lease(session, lease, *zip(*taken, strict=True))
                self.world.sessions.resumed(session)
            self.clients[who] = session
            self.writing = [item for item in self.writing if item[0] != who or item in keep]
            self.reading = [item for item in self.reading if item[0] != who or item in read]
            # Before all are back, room is only what is free: what others may still read is neither evicted nor dropped.
            self.store_one(session, data.draw(KEYS))
            directory.delete(session, [data.draw(KEYS)])
            for entry, _ in before.values():
                assert directory.objects.generation[entry] == generations[entry], "reused before all were back"
            self.world.check()
        assert directory.frozen
        while not directory.thaw(limit):
            pass
        assert not directory.frozen
        alive = {entry for _, _, taken in self.reading for entry, _ in taken}
        for entry, state in enumerate(directory.objects.state):
            assert state != State.RETIRING or entry in alive, "nobody reads it, and it is not freed"
        self.generations = dict(enumerate(directory.objects.generation))

    @invariant()
    def everything_holds(self):
        self.world.check()
        directory = self.world.directory
        objects = directory.objects
        for place, (entry, _) in self.world.ready().items():
            pages = objects.pages[entry]
            assert self.memory[entry : entry + pages] == [self.content[place]] * pages, "these are other bytes"
        for _, _, taken in self.reading:
            for entry, generation in taken:
                pages = objects.pages[entry]
                assert self.memory[entry : entry + pages] == [self.seen[entry, generation]] * pages, "under a lease"
                assert directory.objects.generation[entry] == generation, "a leased page was reused"
                assert directory.objects.readers[entry] > 0
        for _, entry, generation, _, _ in self.writing:
            assert directory.objects.generation[entry] == generation, "a reserved page was reused"


TestDirectoryModel = DirectoryModel.TestCase
TestDirectoryModel.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
