"""Which sessions end by themselves, with a clock of the test's own."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from attrs import define, field
from structlog.testing import capture_logs

from maru_core.protocol import PROTOCOL_VERSION, Code, Op
from maru_core.server.handlers import Handlers, Task
from maru_core.server.sessions import PATIENCE, SessionRegistry
from tests.server.pure import World
from tests.server.raw import keys
from tests.server.test_edge import Unsaved


@define
class Locks:
    """``dead``: sessions whose lock nobody holds."""

    dead: set[int] = field(factory=set)
    files: set[int] = field(factory=set)

    def create(self, session: int) -> str:
        self.files.add(session)
        return f"/{session}"

    def ensure(self, session: int) -> str:
        return f"/{session}"

    def record(self, session: int, record: object) -> None:
        assert session in self.files

    def held(self, session: int) -> bool:
        return session not in self.dead

    def remove(self, session: int) -> None:
        self.files.discard(session)


class Server:
    """Handlers, and a clock that the test moves."""

    def __init__(self, dma_grace: float = 0.0) -> None:
        self.now = 0.0
        self.locks = Locks()
        self.world = World.of(16)
        numbers = iter(range(5, 1 << 30))
        sessions = SessionRegistry(1, lambda: next(numbers))
        self.handlers = Handlers(
            self.world.directory, sessions, self.locks, Unsaved(), 7, 1, lambda: self.now, dma_grace
        )

    def call(self, *message: Any) -> list[Any]:
        outcome = self.handlers.handle(msgpack.packb(message))
        while isinstance(outcome, Task):
            if outcome.advance():
                outcome = outcome.reply
        assert outcome is not None
        return msgpack.unpackb(outcome)

    def open(self, *, proof: bool, dma: bool = False) -> int:
        reply = self.call(Op.HELLO, 1, 0, 0, PROTOCOL_VERSION, "client", [1, "h", "n"], b"\x90", 0, [])
        assert self.call(Op.ATTACH, 2, 7, reply[3], proof, dma)[2] == Code.OK
        return reply[3]

    def alive(self, session: int) -> bool:
        self.handlers.settle()
        for task in self.handlers.sweep():
            while not task.advance():
                pass
        return self.call(Op.PROBE, 3, 7, session, 0, keys(0, 1))[2] == Code.OK


def test_a_session_that_never_attaches_goes_and_one_with_proof_stays():
    server = Server()
    stays = server.open(proof=True)
    goes = server.call(Op.HELLO, 1, 0, 0, PROTOCOL_VERSION, "client", [1, "h", "n"], b"\x90", 0, [])[3]
    server.now = PATIENCE + 1
    assert not server.alive(goes)
    server.now = 1e9
    assert server.alive(stays), "no clock ends what has not died"


@pytest.mark.parametrize("what", ["nothing", "a reservation", "a lease"])
def test_without_proof_only_who_holds_nothing_is_forgotten(what):
    server = Server()
    session = server.open(proof=False)
    granted = server.call(Op.RESERVE, 3, 7, session, 0, keys(0, 1), b"", 100)
    if what != "a reservation":
        assert server.call(Op.COMMIT, 4, 7, session, *granted[4:6], b"")[3] == b"\0"
    if what == "a lease":
        assert server.call(Op.ACQUIRE, 5, 7, session, 0, keys(0, 1), False)[3]
    server.now = PATIENCE - 1
    assert server.alive(session)
    server.now = 1e9
    assert server.alive(session) is (what != "nothing")
    assert server.locks.files == (set() if what == "nothing" else {session})


def test_devices_of_a_dead_client_have_a_moment():
    server = Server(dma_grace=2.0)
    plain, device = server.open(proof=True), server.open(proof=True, dma=True)
    for number, session in enumerate((plain, device)):
        server.call(Op.RESERVE, 3, 7, session, 0, keys(10 * number, 2), b"", 100)
    server.locks.dead = {plain, device}
    server.now = 100.0
    assert not server.alive(plain)
    pool = server.handlers.stats()["pools"][0]
    assert (pool["reserved"], pool["quarantined"]) == (0, 200)
    server.now = 101.9
    server.handlers.sweep()
    assert server.handlers.stats()["pools"][0]["quarantined"] == 200
    server.now = 102.1
    assert not server.alive(device)
    assert server.world.directory.arenas[0].free.free == 16


def test_who_is_waited_for_is_told_once_and_can_be_forgotten():
    server = Server()
    old = World.of(16)
    session = old.session()
    old.store(session, [bytes(31) + b"1"])
    again = old.reborn()
    for earlier in again.sessions:
        earlier.proof = False
    server.handlers = Handlers(again.directory, again.sessions, server.locks, Unsaved(), 7, 1, lambda: server.now)
    with capture_logs() as logs:
        for server.now in (1.0, PATIENCE + 1, PATIENCE + 2):
            server.handlers.sweep()
    (told,) = [line for line in logs if "awaited" in line["event"]]
    assert told["sessions"] == [f"{session.id:016x}"]
    assert "maru admin forget" in told["remedy"]
    (silent,) = [line for line in logs if "silent" in line["event"]]
    assert f"maru admin forget {session.id:016x}" in silent["remedy"]
