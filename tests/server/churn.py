"""Random clients of several models in one directory, for as long as one likes, and what they must find.

Plain random numbers instead of Hypothesis: a million operations have to fit into minutes, and a failure is reproduced
by its seed. Beside the directory there is a pool of stamps, one per granule. Writers put a stamp of their own wherever
they reserved. Readers must find the stamp of what was last committed under their key, and find it again when they let
go.
"""

from __future__ import annotations

import random
from array import array
from collections import deque
from itertools import chain

from attrs import define, field

from maru_core.pool_format import NO_KEY
from maru_core.protocol.messages import CommitStatus, Presence, ReserveStatus
from maru_core.server.index import KeyIndex
from maru_core.server.moves import Move
from maru_core.server.namespaces import NamespaceState
from maru_core.server.sessions import Session
from tests.server.pure import GRANULE, World
from tests.server.raw import key

#: Namespaces: granules per object (several: any of them), quota in granules.
MODELS: tuple[tuple[tuple[int, ...], int | None], ...] = (
    ((3,), None),
    ((1,), None),
    ((5,), None),
    ((9,), 150),
    ((1, 2, 7, 20), 90),
)
#: The hot set: chains of the first namespace that somebody asks for again and again.
HOT_CHAINS, HOT_LENGTH = 6, 8
#: Keys of each namespace beyond the hot set.
KEYS = 240
CLIENTS_PER_MODEL = 2
#: Leases and batches of reservations that are open at a time, in all; and while everything is held at once.
OPEN_LEASES, OPEN_BATCHES = 8, 4
SIEGE_LEASES, SIEGE_BATCHES = 60, 60
#: Operations per phase; every tenth is a siege. Operations over which a hit rate is taken.
PHASE = 500
WINDOW = 10 * PHASE


def name_of(number: int) -> bytes:
    """Keys of which several end in the same bytes: the index must not take one for another."""
    return bytes([number // 64]) + key(number % 64)[1:]


NAMES = [name_of(number) for number in range(HOT_CHAINS * HOT_LENGTH + KEYS)]


@define
class Written:
    """A reservation that its owner has not given back yet."""

    entry: int
    generation: int
    pages: int
    name: int
    stamp: int
    epoch: int


@define
class Client:
    """A session and what it holds: batches of reservations; leases with entry, generation, granules and stamp."""

    model: int
    session: Session
    batches: list[list[Written]] = field(factory=list)
    leases: dict[int, list[tuple[int, int, int, int]]] = field(factory=dict)


class Churn:
    """One run. ``check_every``: operations between two looks at everything, see :meth:`World.check`."""

    def __init__(
        self,
        seed: int,
        counts: tuple[int, ...] = (600, 200),
        check_every: int = 250,
        demote: bool = False,
        promote: bool = False,
    ) -> None:
        self.random = random.Random(seed)
        self.world = World.of(*counts, share=0.5, ahead=0.15 if demote else 0.02, demote=demote, promote=promote)
        #: Moves in progress; those whose bytes were copied; the most that there were at a time.
        self.moves: deque[Move] = deque()
        self.copied: set[Move] = set()
        self.most_moves = 0
        self.memory = [0] * sum(counts)
        self.check_every = check_every
        self.clients = [self._client(model) for model in range(len(MODELS)) for _ in range(CLIENTS_PER_MODEL)]
        self._set_quotas()
        #: Stamp of what was committed last, by model and number of the key.
        self.content: dict[tuple[int, int], int] = {}
        self.drains: list[tuple[NamespaceState, KeyIndex]] = []
        self.stamps = self.lease = self.done = 0
        self.hot_rates: list[float] = []
        self._hot_hits = self._hot_asked = 0
        self.totals: dict[str, int] = {}
        self._begin_counting()
        self._acts = (
            (0.30, self.reserve),
            (0.52, self.finish),
            (0.64, self.acquire),
            (0.78, self.release),
            (0.85, self.use_hot_set),
            (0.93, self.move if demote or promote else self.use_hot_set),
            (0.965, self.make_ahead),
            (0.985, self.delete),
            (0.989, self.drain),
            (0.990, self.reset),
            (0.992, self.change_quota),
            (0.9995, self.die),
            (0.9998, self.crash),
            (1.0, self.release),
        )

    def run(self, operations: int) -> None:
        """Operations with all checks; raises AssertionError."""
        draw = self.random.random
        for _ in range(operations):
            chance = draw()
            for bound, act in self._acts:
                if chance < bound:
                    act()
                    break
            self.check_sums()
            self.done += 1
            if not self.done % self.check_every:
                self.world.check()
            if not self.done % WINDOW:
                self.hot_rates.append(self._hot_hits / self._hot_asked)
                self._hot_hits = self._hot_asked = 0
        self.world.check()
        self._keep_counters()

    def check_sums(self) -> None:
        """What must hold after every operation and costs next to nothing."""
        world = self.world
        directory = world.directory
        directory.settle()
        spaces = [*directory.namespaces]
        for arena in directory.arenas:
            number = arena.number
            used, reserved = arena.used, arena.reserved
            assert used + reserved + arena.free.free == arena.end - arena.base
            assert min(used, reserved, arena.leased, arena.free.free) >= 0
            assert sum([space.taken[number] for space in spaces]) == used + reserved
            assert sum([space.reserved[number] for space in spaces]) == reserved
            copies = sum([self._pages(move) for move in self.moves if move.target_pool == number])
            assert arena.moving == copies
            assert sum([client.session.reserved_pages[number] for client in self.clients]) == reserved - copies
            moving = sum([self._pages(move) for move in self.moves if move.source_pool == number])
            assert sum([client.session.leased_pages[number] for client in self.clients]) >= arena.leased - moving
        counters = directory.counters
        objects = sum([arena.objects for arena in directory.arenas])
        gone = counters["evicted"] + counters["deleted"] + self._drained
        assert objects == self._objects_before + counters["stored"] - gone
        assert sum([space.objects for space in spaces]) == objects
        assert counters["skipped_no_room"] + counters["skipped_over_quota"] == self._skipped
        assert counters["hits"] + counters["misses"] == self._asked
        assert counters["hits"] == self._hits

    # What clients do.

    def reserve(self) -> None:
        client = self._any_client()
        if sum([len(other.batches) for other in self.clients]) >= (SIEGE_BATCHES if self._siege else OPEN_BATCHES):
            self.finish()
            return
        rng = self.random
        sizes = MODELS[client.model][0]
        numbers = self._numbers(rng.randrange(1, 9))
        chance = rng.random()
        parents: tuple[bytes, ...] = ()
        if chance < 0.6:
            parents = (NAMES[numbers[0] - 1],)
        elif chance < 0.7:
            parents = tuple(rng.choice(NAMES) if rng.random() < 0.8 else NO_KEY for _ in numbers)
        if rng.random() < 0.05:
            length: int | list[int] = [rng.randrange(1, 12 * GRANULE) for _ in numbers]
        else:
            length = rng.choice(sizes) * GRANULE - rng.randrange(GRANULE)
        self._reserve(client, numbers, parents, length)

    def _reserve(
        self, client: Client, numbers: list[int], parents: tuple[bytes, ...], length: int | list[int]
    ) -> list[Written]:
        session, space = client.session, client.session.namespace
        directory = self.world.directory
        taken = sum(space.taken) - self._copies_of(space)
        names = [NAMES[number] for number in numbers]
        statuses, entries, generations = directory.reserve(session, names, parents, length)
        batch = []
        for at, status in enumerate(statuses):
            if status == ReserveStatus.NO_ROOM:
                self._skipped += 1
            elif status == ReserveStatus.NEW:
                size = length if isinstance(length, int) else length[at]
                self.stamps += 1
                pages = -(-size // GRANULE)
                entry = entries[at]
                self.memory[entry : entry + pages] = [self.stamps] * pages
                batch.append(Written(entry, generations[at], pages, numbers[at], self.stamps, space.weights_epoch))
        if batch:
            client.batches.append(batch)
            if space.quota is not None:
                now = sum(space.taken) - self._copies_of(space)
                assert now * GRANULE <= max(space.quota, taken * GRANULE), "over its quota"
        return batch

    def finish(self) -> None:
        """Commit or abort a batch or a part of it."""
        rng = self.random
        client = self._any_client([client for client in self.clients if client.batches])
        if client is None or (self._siege and rng.random() < 0.7):
            return
        batch = client.batches.pop(rng.randrange(len(client.batches)))
        if rng.random() < 0.15:
            cut = rng.randrange(len(batch))
            if batch[:cut]:
                client.batches.append(batch[:cut])
            batch = batch[cut:]
            rng.shuffle(batch)
        if rng.random() < 0.1:
            entries, generations = [item.entry for item in batch], [item.generation for item in batch]
            for answer in (CommitStatus.OK, CommitStatus.UNKNOWN):
                statuses = self.world.directory.abort(client.session, entries, generations)
                assert statuses == bytes([answer]) * len(batch)
            return
        self._commit(client, batch)

    def _commit(self, client: Client, batch: list[Written]) -> None:
        columns = array("I", [item.entry for item in batch]), array("I", [item.generation for item in batch])
        statuses = self.world.directory.commit(client.session, *columns)
        epoch = client.session.namespace.weights_epoch
        for item, status in zip(batch, statuses, strict=True):
            self._see(item.entry, item.pages, item.stamp)
            assert status == (CommitStatus.OK if item.epoch == epoch else CommitStatus.UNKNOWN)
            if item.epoch == epoch:
                self.content[client.model, item.name] = item.stamp
        if self.random.random() < 0.05:
            assert self.world.directory.commit(client.session, *columns) == statuses, "a repeated COMMIT is another"

    def acquire(self) -> None:
        client = self._any_client()
        if sum([len(other.leases) for other in self.clients]) >= (SIEGE_LEASES if self._siege else OPEN_LEASES):
            self.release()
            return
        self._acquire(client, self._numbers(self.random.randrange(1, 17)), self.random.random() < 0.7)

    def _acquire(self, client: Client, numbers: list[int], leading: bool) -> bytes:
        self.lease += 1
        names = [NAMES[number] for number in numbers]
        statuses, entries, generations, lengths = self.world.directory.acquire(
            client.session, self.lease, names, leading
        )
        taken = []
        for at, status in enumerate(statuses):
            if status == Presence.READY:
                stamp, pages = self.content[client.model, numbers[at]], -(-lengths[at] // GRANULE)
                self._see(entries[at], pages, stamp)
                taken.append((entries[at], generations[at], pages, stamp))
        if taken:
            client.leases[self.lease] = taken
        self._asked += len(statuses)
        self._hits += len(taken)
        return bytes(statuses)

    def release(self) -> None:
        client = self._any_client([client for client in self.clients if client.leases])
        if client is None or (self._siege and self.random.random() < 0.7):
            return
        lease = self.random.choice([*client.leases])
        self._release(client, lease)

    def _release(self, client: Client, lease: int) -> None:
        for entry, generation, pages, stamp in client.leases.pop(lease):
            self._see(entry, pages, stamp)
            assert self.world.directory.objects.generation[entry] == generation
        limit = self.random.randrange(1, 20)
        while True:
            known, ended = self.world.directory.release(client.session, lease, limit)
            assert known
            if ended:
                break
        if self.random.random() < 0.1:
            assert self.world.directory.release(client.session, lease, limit) == (False, True)

    def use_hot_set(self) -> None:
        """Load a chain, and store what is missing of it."""
        first = HOT_LENGTH * self.random.randrange(HOT_CHAINS)
        numbers = list(range(first, first + HOT_LENGTH))
        client = self.random.choice(self.clients[:CLIENTS_PER_MODEL])
        hits = self._acquire(client, numbers, True).count(Presence.READY)
        self._hot_hits += hits
        self._hot_asked += HOT_LENGTH
        missing = numbers[hits:]
        if missing:
            batch = self._reserve(client, missing, (NAMES[missing[0] - 1] if hits else NO_KEY,), 3 * GRANULE)
            if batch:
                client.batches.remove(batch)
                self._commit(client, batch)
        if hits:
            self._release(client, self.lease)

    def delete(self) -> None:
        client = self._any_client()
        numbers = self._numbers(self.random.randrange(1, 5))
        statuses = self.world.directory.delete(client.session, [NAMES[number] for number in numbers])
        for number, status in zip(numbers, statuses, strict=True):
            if status == Presence.READY:
                del self.content[client.model, number]

    # What happens to the server.

    def make_ahead(self) -> None:
        directory = self.world.directory
        for _ in range(100):
            if not directory.is_short():
                return
            directory.make_ahead()
        raise AssertionError("there is no end to it")

    def move(self) -> None:
        """Begin some moves, copy the bytes of some, end some."""
        rng, directory = self.random, self.world.directory
        for _ in range(rng.randrange(1, 6)):
            move = directory.next_move()
            if move is None:
                break
            self.moves.append(move)
        self.most_moves = max(self.most_moves, len(self.moves))
        while self.moves and rng.random() < 0.8:
            move = self.moves[0]
            if rng.random() < 0.95:
                pages = self._pages(move)
                self.memory[move.target : move.target + pages] = self.memory[move.source : move.source + pages]
                self.copied.add(move)
                if rng.random() < 0.2:
                    return
            self.moves.popleft()
            directory.finish_move(move, move in self.copied)
            self.copied.discard(move)

    def _pages(self, move: Move) -> int:
        return -(-move.length // GRANULE)

    def _copies_of(self, space: NamespaceState) -> int:
        home = self.world.directory.objects.home
        return sum([self._pages(move) for move in self.moves if home[move.target] == space.number])

    def reset(self) -> None:
        client = self._any_client()
        space = client.session.namespace
        old = self.world.directory.reset(space, space.weights_epoch)
        for place in [place for place in self.content if place[0] == client.model]:
            del self.content[place]
        if old is not None:
            self.drains.append((space, old))

    def drain(self) -> None:
        if self.drains:
            space, old = self.drains[0]
            self.world.directory.settle()
            before = self._objects()
            if self.world.directory.drain(space, old, self.random.randrange(1, 40)):
                self.drains.pop(0)
            self._drained += before - self._objects()

    def change_quota(self) -> None:
        model = self.random.choice([model for model, (_, quota) in enumerate(MODELS) if quota is not None])
        quota = self.random.choice([MODELS[model][1], 40, 10, 300])
        space = self.clients[model * CLIENTS_PER_MODEL].session.namespace
        self.world.directory.set_quota(space, quota * GRANULE)

    def die(self) -> None:
        at = self.random.randrange(len(self.clients))
        self.world.directory.settle()
        self.world.finish(self.clients[at].session)
        self.clients[at] = self._client(self.clients[at].model)

    def crash(self) -> None:
        """The next server finds the memory of this one; some clients come back and some died as well."""
        rng = self.random
        self._keep_counters()
        before, self.world = self.world, self.world.reborn(self.world.directory.namespaces.epochs())
        assert self.world.is_as_before(before)
        self.drains.clear()
        self.moves.clear()
        self.copied.clear()
        self._begin_counting()
        directory = self.world.directory
        for at, client in enumerate(self.clients):
            session = self.world.sessions.get(client.session.id)
            assert session is not None
            if rng.random() < 0.2:
                self.world.finish(session)
                self.clients[at] = self._client(client.model)
                continue
            client.session = session
            client.batches = [batch for batch in client.batches if rng.random() < 0.8]
            client.leases = {lease: held for lease, held in client.leases.items() if rng.random() < 0.8}
            mine = [item for batch in client.batches for item in batch]
            parts = directory.unlisted(session, [item.entry for item in mine], [item.generation for item in mine])
            lost = list(chain.from_iterable(parts))
            directory.give_back(session, lost)
            for lease, held in client.leases.items():
                directory.resume_lease(session, lease, [item[0] for item in held], [item[1] for item in held])
            self.world.sessions.resumed(session)
        # What an unfinished reset had hidden is freed by this, and was not counted as an object any more.
        while not directory.thaw(20):
            pass
        self._set_quotas()
        self.world.check()

    # Helpers.

    def _client(self, model: int) -> Client:
        return Client(model, self.world.session(b"model %d" % model))

    def _set_quotas(self) -> None:
        for client in self.clients:
            quota = MODELS[client.model][1]
            if quota is not None:
                self.world.directory.set_quota(client.session.namespace, quota * GRANULE)

    def _any_client(self, among: list[Client] | None = None) -> Client | None:
        among = self.clients if among is None else among
        return self.random.choice(among) if among else None

    def _numbers(self, count: int) -> list[int]:
        """Neighbouring keys; the lower ones are asked for more often."""
        first = HOT_CHAINS * HOT_LENGTH + int(KEYS * self.random.random() ** 2)
        return list(range(first, min(first + count, len(NAMES))))

    def _see(self, entry: int, pages: int, stamp: int) -> None:
        """Somebody looks at bytes that nobody else may have written over."""
        assert self.memory[entry : entry + pages] == [stamp] * pages, "somebody else wrote here"

    @property
    def _siege(self) -> bool:
        return self.done // PHASE % 10 == 9

    def _objects(self) -> int:
        return sum(arena.objects for arena in self.world.directory.arenas)

    def _begin_counting(self) -> None:
        self._objects_before = self._objects()
        self._drained = self._skipped = self._asked = self._hits = 0

    def _keep_counters(self) -> None:
        for name, value in self.world.directory.counters.items():
            self.totals[name] = self.totals.get(name, 0) + value
