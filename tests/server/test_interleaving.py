"""Long requests of many sessions, one step of one and one of another, with all that may come between: resets, cancelled
requests, sessions that end, kills of the server, and what its clients then say they use, true or not.

Plain random numbers: a failure is reproduced by its seed. Requests work on a key or two at a time, so that they meet.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import msgpack
import pytest

from maru_core.protocol import PROTOCOL_VERSION, Code, Op
from maru_core.protocol.messages import EVERYTHING
from maru_core.server import admin, life, operations, reservations
from maru_core.server.eviction import least_recently_used
from maru_core.server.handlers import Handlers, Task
from maru_core.server.moves import Move
from maru_core.server.reuse import reuse_policy
from maru_core.server.sessions import Session
from tests.budgets import examples
from tests.server.pure import GRANULE, World
from tests.server.raw import key, pack, u64
from tests.server.test_edge import TOKEN, AlwaysHeld, Unsaved

NAMESPACES = (b"\x90", b"\x91\x01", b"\x91\x02")
LENGTHS = (1, GRANULE, 3 * GRANULE)
#: What may happen, and how often.
ACTS = {"reserve": 25, "acquire": 20, "commit": 18, "abort": 4, "release": 10, "delete": 3, "report": 1, "reset": 3}
ACTS |= {"cancel": 5, "bye": 1, "die": 1, "sweep": 3, "admin": 3, "crash": 1}
Handle = tuple[int, int]


class Locks(AlwaysHeld):
    """Clients die one by one."""

    def __init__(self) -> None:
        self.dead: set[int] = set()

    def held(self, session: int) -> bool:
        return session not in self.dead


class Copies:
    """Copies of objects that are done after a while, or fail."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._moves: deque[Move] = deque()

    @property
    def busy(self) -> bool:
        return bool(self._moves)

    def begin(self, move: Move) -> None:
        self._moves.append(move)

    def finished(self) -> tuple[Move, bool] | None:
        if not self._moves or self._chance.random() < 0.5:
            return None
        return self._moves.popleft(), self._chance.random() < 0.9


class Client:
    """What the owner of a session knows of it."""

    def __init__(self, namespace: bytes) -> None:
        self.namespace = namespace
        self.weights = 0
        self.writing: list[Handle] = []
        self.reading: dict[int, list[Handle]] = {}


class Crowd:
    """One server at a time, some clients, and all that is in progress."""

    def __init__(self, seed: int) -> None:
        self.chance = chance = random.Random(seed)
        counts = [chance.randint(5, 20) for _ in range(chance.choice([1, 2, 2, 3]))]
        policy = chance.choice([least_recently_used, reuse_policy])
        knobs: dict[str, Any] = {"demote": chance.random() < 0.7, "promote": chance.random() < 0.6, "policy": policy}
        self.world = World.of(*counts, ahead=0.3, quota=chance.choice([None, 6 * GRANULE]), **knobs)
        self.locks, self.now, self.epoch, self.request = Locks(), 0.0, 7, 0
        self.tasks: list[tuple[Task, list[Any] | None]] = []
        self.clients: dict[int, Client] = {}
        self.seen: set[Session] = set()
        self.serve()

    def serve(self) -> None:
        self.handlers = Handlers(
            self.world.directory, self.world.sessions, self.locks, Unsaved(), self.epoch, 1, lambda: self.now
        )
        self.handlers.administration.token = TOKEN
        if len(self.world.directory.arenas) > 1:
            self.handlers.carrier = Copies(self.chance)

    # -- what is asked, and what becomes of it -------------------------------------------------------------------------

    def send(self, op: Op, session: int, *arguments: Any) -> None:
        self.request += 1
        message = [int(op), self.request, 0 if op == Op.HELLO else self.epoch, session, *arguments]
        outcome = self.handlers.handle(msgpack.packb(message, use_bin_type=True))
        if isinstance(outcome, Task):
            self.tasks.append((outcome, message))
        else:
            self.hear(message, outcome)

    def hear(self, message: list[Any], reply: bytes | None) -> None:
        assert reply is not None
        number, _, code, *results = msgpack.unpackb(reply)
        assert (number, code == Code.INTERNAL) == (message[1], False), results
        if code != Code.OK:
            return
        op, session, client = message[0], message[3], self.clients.get(message[3])
        if op == Op.HELLO:
            self.clients.setdefault(results[0], Client(message[7])).weights = results[2]
            self.send(Op.ATTACH, results[0], True, False)
        elif op == Op.BYE:
            self.clients.pop(session, None)
        elif client is None:
            return
        elif op == Op.RESERVE:
            client.writing += [
                handle for status, handle in zip(results[0], pairs(*results[1:]), strict=True) if not status
            ]
        elif op == Op.ACQUIRE and results[0]:
            client.reading[results[0]] = [handle for handle in pairs(*results[2:4]) if handle[1]]
        elif op in (Op.COMMIT, Op.ABORT):
            done = {entry for entry, _ in pairs(*message[4:6])}
            client.writing = [handle for handle in client.writing if handle[0] not in done]
        elif op == Op.RELEASE:
            client.reading.pop(int.from_bytes(message[4], "little"), None)
        elif op == Op.RESET:
            client.weights = results[0]

    def keys(self) -> bytes:
        first = self.chance.randrange(10)
        numbers = range(first, first + self.chance.randint(1, 6))
        if self.chance.random() < 0.3:
            numbers = [self.chance.randrange(16) for _ in numbers]  # type: ignore[assignment]
        return b"".join(map(key, numbers))

    def handles(self, client: Client) -> list[Handle]:
        """Mostly its own."""
        if client.writing and self.chance.random() < 0.8:
            return client.writing[: self.chance.randint(1, 6)]
        return self.lies()

    def lies(self) -> list[Handle]:
        """What is not the client's own, mostly; some of it twice."""
        total = self.world.directory.objects.total
        known = [handle for each in self.clients.values() for held in each.reading.values() for handle in held]
        known += [(self.chance.randrange(total + 2), self.chance.randint(1, 3)) for _ in range(2)]
        return self.chance.choices(known, k=3)

    # -- what happens --------------------------------------------------------------------------------------------------

    def step(self) -> None:
        chance = self.chance
        if len(self.clients) < 2 or (len(self.clients) < 5 and chance.random() < 0.05):
            self.send(Op.HELLO, 0, PROTOCOL_VERSION, "client", [1, "h", "n"], chance.choice(NAMESPACES), 0, [])
        if not self.clients:
            return
        number = chance.choice([*self.clients])
        client = self.clients[number]
        act = chance.choices([*ACTS], [*ACTS.values()])[0]
        if act == "reserve":
            keys = self.keys()
            parents = chance.choice([b"", key(chance.randrange(16)), key(20) + keys[:-32]])
            sizes: Any = u64(*(chance.choice(LENGTHS) for _ in range(len(keys) // 32)))
            length = chance.choice(LENGTHS) if chance.random() < 0.7 else sizes
            self.send(Op.RESERVE, number, client.weights, keys, parents, length)
        elif act == "acquire":
            self.send(Op.ACQUIRE, number, client.weights, self.keys(), chance.random() < 0.5)
        elif act in ("commit", "abort", "report"):
            columns = columns_of(self.lies() if act == "report" else self.handles(client))
            self.send(Op[act.upper()], number, *columns, *([b""] if act == "commit" else []))
        elif act == "release":
            self.send(Op.RELEASE, number, u64(chance.choice([*client.reading, 1])))
        elif act == "delete":
            self.send(Op.DELETE, number, client.weights, self.keys())
        elif act == "reset":
            self.send(Op.RESET, number, client.weights)
        elif act == "cancel":
            running = [message[1] for _, message in self.tasks if message is not None and message[3] == number]
            self.send(Op.CANCEL, number, u64(chance.choice([*running, self.request + 1])))
        elif act == "bye":
            self.send(Op.BYE, number)
        elif act == "die":
            self.locks.dead.add(number)
            del self.clients[number]
        elif act == "sweep":
            self.sweep()
        elif act == "admin":
            self.administer()
        elif not self.ending():
            self.crash()

    def sweep(self) -> None:
        self.now += self.chance.choice([0.5, 70.0])
        self.tasks += [(task, None) for task in self.handlers.sweep()]

    def administer(self) -> None:
        digest = self.chance.choice([space.digest for space in self.world.directory.namespaces])
        verb = self.chance.choice(["reset", "reset", "quota", "evict"])
        wanted: Any = EVERYTHING if verb == "reset" and self.chance.random() < 0.2 else digest
        limit = [self.chance.choice([0, GRANULE, 9 * GRANULE])] if verb == "quota" else []
        self.send(Op.ADMIN, 0, TOKEN, verb, wanted, *limit)

    def crash(self) -> None:
        """The server is killed; some clients go on under the next, and some of what these list is not theirs."""
        self.world.directory.settle()
        self.tasks.clear()
        before, self.world = self.world, self.world.reborn(self.world.directory.namespaces.epochs())
        assert self.world.is_as_before(before)
        self.seen.clear()
        self.epoch += 1
        self.serve()
        for number, client in [*self.clients.items()]:
            if self.chance.random() < 0.2:
                del self.clients[number]
                continue
            client.writing = [handle for handle in client.writing if self.chance.random() < 0.3]
            listed = dict(client.reading)
            if self.chance.random() < 0.3:
                listed[1] = self.lies()
            held = [handle for handles in listed.values() for handle in handles]
            sizes = pack([len(handles) for handles in listed.values()])
            resume = [number, 1, 0, True, *columns_of(client.writing), u64(*listed), sizes, *columns_of(held)]
            for _ in range(self.chance.randint(1, 2)):
                who = [PROTOCOL_VERSION, "client", [1, "h", "n"], client.namespace, 0, resume]
                self.send(Op.HELLO, 0, *who)
            if self.chance.random() < 0.5:
                for _ in range(self.chance.randrange(6)):
                    self.turn()
                self.administer()
        self.locks.dead.update({session.id for session in self.world.sessions} - self.clients.keys())

    def turn(self) -> None:
        """A step of something that is in progress."""
        if self.tasks:
            at = self.chance.randrange(len(self.tasks))
            task, message = self.tasks[at]
            if task.advance():
                del self.tasks[at]
                if message is not None:
                    self.hear(message, task.reply)
        if self.handlers.settle():
            self.handlers.make_ahead()

    def ending(self) -> list[Session]:
        self.seen.update(self.world.sessions)
        return [each for each in self.seen if each.closed and (each.reserved or each.doomed or each.held)]

    def check(self) -> None:
        self.world.check(self.ending())
        assert not self.world.directory.counters["internal_errors"]

    def end(self) -> None:
        """All clients die, and nothing is left."""
        self.locks.dead.update(session.id for session in self.world.sessions)
        for _ in range(50):
            self.sweep()
            while self.tasks or self.handlers.moving:
                self.turn()
        self.check()
        assert not len(self.world.sessions)
        assert not self.world.directory.frozen
        assert not any(arena.reserved or arena.leased for arena in self.world.directory.arenas)
        assert not self.handlers.running_bytes


def pairs(entries: bytes, generations: bytes) -> list[Handle]:
    columns = [memoryview(column).cast("I").tolist() for column in (entries, generations)]
    return list(zip(*columns, strict=True))


def columns_of(handles: list[Handle]) -> list[bytes]:
    return [pack([handle[at] for handle in handles]) for at in (0, 1)]


def play(seed: int, steps: int) -> None:
    crowd = Crowd(seed)
    for _ in range(steps):
        crowd.step()
        crowd.check()
        crowd.turn()
    crowd.end()


@pytest.fixture(autouse=True)
def short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    # What a session gives up is gathered from many steps, of which each gives up little.
    for module, keys in ((operations, 1), (reservations, 1), (life, 3)):
        monkeypatch.setattr(module, "SLICE", keys)
    for name in ("DELETE_SLICE", "MIXED_SLICE", "RESERVE_SLICE"):
        monkeypatch.setattr(operations, name, 1)
    monkeypatch.setattr(admin, "_DROPPED", 1)


@pytest.mark.parametrize("seed", range(4))
def test_what_comes_between_the_steps_of_a_request_hurts_nobody(seed: int) -> None:
    play(seed, 120)


@pytest.mark.slow
def test_what_comes_between_the_steps_of_many_requests_hurts_nobody() -> None:
    for seed in range(1000, 1000 + examples(200)):
        play(seed, 150)
