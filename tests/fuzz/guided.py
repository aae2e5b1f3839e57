"""Coverage-guided fuzzing of decoder, checks and handlers in one process.

An input is a short conversation: frames that a fresh server gets one after the other, and restarts in between. Inputs
that reach something new in the server's code are kept and varied further. After every message the pool must add up, and
nothing may have been answered with INTERNAL; at the end of a conversation every invariant of the directory must hold.
"""

from __future__ import annotations

import random
import struct
import sys
import types
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgpack
from attrs import define, field

import maru_core.protocol
import maru_core.server
from maru_core.protocol import PROTOCOL_VERSION, Code, Op
from maru_core.server.handlers import Handlers, Task
from tests.fuzz.messages import Speaker
from tests.server.pure import World
from tests.server.test_edge import TOKEN, AlwaysHeld, Unsaved, answer

Conversation = tuple[bytes, ...]
Place = tuple[types.CodeType, int, int]

_FOLDERS = tuple(str(Path(str(package.__file__)).parent) for package in (maru_core.server, maru_core.protocol))
#: Frames of one conversation, at most.
_LONGEST = 12
#: What the fresh server answers to HELLO, and stands for the end of one server and the start of the next.
EPOCH, SESSION, RESTART = 7, 1, b"restart"
CORPUS = Path(__file__).with_name("corpus.msgpack.z")


class Fault(AssertionError):
    """A conversation after which something is wrong."""


def converse(frames: Iterable[bytes]) -> None:
    """Have a fresh server answer; raises Fault, or whatever the server lets out."""
    world = World.of(64)
    handlers = _serve(world)
    hello = [Op.HELLO, 1, 0, 0, PROTOCOL_VERSION, "client", [1, "h", "n"], b"\x90", 0, []]
    for message in (hello, [Op.ATTACH, 2, EPOCH, SESSION, True, False]):
        reply = answer(handlers, message)
        assert reply is not None
        assert reply[2] == Code.OK
    tasks: deque[Task] = deque()
    for frame in frames:
        if frame == RESTART:
            tasks.clear()
            world = world.reborn(world.directory.namespaces.epochs())
            handlers = _serve(world)
        else:
            outcome = handlers.handle(frame)
            if isinstance(outcome, Task):
                tasks.append(outcome)
        tasks.extend(handlers.sweep())
        _turn(handlers, tasks)
    while tasks:
        _turn(handlers, tasks)
    world.check()


def _serve(world: World) -> Handlers:
    handlers = Handlers(world.directory, world.sessions, AlwaysHeld(), Unsaved(), EPOCH, 1, lambda: 0.0)
    handlers.administration.token = TOKEN
    return handlers


def _turn(handlers: Handlers, tasks: deque[Task]) -> None:
    """A slice of the work that is left, as between two messages, and a look at the pool."""
    if tasks:
        task = tasks.popleft()
        if not task.advance():
            tasks.append(task)
    while handlers.settle():
        handlers.make_ahead()
    directory = handlers.directory
    if directory.counters["internal_errors"]:
        raise Fault("an answer was INTERNAL")
    for arena in directory.arenas:
        if arena.used + arena.reserved + arena.free.free != arena.end - arena.base:
            raise Fault(f"the pool does not add up: {arena}")


def places(conversation: Conversation) -> set[Place]:
    """Steps from line to line of the server's code that a conversation takes."""
    seen: set[Place] = set()

    def enter(frame: types.FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        code = frame.f_code
        if not code.co_filename.startswith(_FOLDERS):
            return None
        last = 0

        def step(frame: types.FrameType, event: str, argument: object) -> Callable[..., Any]:
            nonlocal last
            if event == "line":
                seen.add((code, last, frame.f_lineno))
                last = frame.f_lineno
            return step

        return step

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        converse(conversation)
    finally:
        sys.settrace(before)
    return seen


def honest(chance: random.Random) -> Conversation:
    """A client that stores some objects, and reads, cancels, gives back or deletes what it stored."""
    count = chance.choice([1, 3, 8, 40])
    keys = b"".join(bytes([at]) * 32 for at in range(1, count + 1))
    handles = [struct.pack(f"<{count}I", *column) for column in (range(count), [1] * count)]
    messages = [
        [Op.RESERVE, 101, EPOCH, SESSION, 0, keys, bytes(32), chance.choice([50, 100])],
        [Op.COMMIT, 102, EPOCH, SESSION, *handles, b""],
        [Op.ACQUIRE, 103, EPOCH, SESSION, 0, keys, True],
        [Op.RELEASE, 104, EPOCH, SESSION, struct.pack("<Q", EPOCH << 20 | chance.choice([1, 2]))],
        [Op.CANCEL, 105, EPOCH, SESSION, struct.pack("<2Q", 101, 103)],
        [Op.DELETE, 106, EPOCH, SESSION, 0, keys],
        [Op.RESET, 107, EPOCH, SESSION, 0],
        [Op.BYE, 108, EPOCH, SESSION],
    ]
    return tuple(_pack([int(op), *rest]) for op, *rest in messages[: chance.randint(2, len(messages))])


@define
class Guided:
    """Varies conversations. ``corpus``: those that reached something that none before them did."""

    chance: random.Random
    corpus: list[Conversation] = field(factory=list)
    seen: set[Place] = field(factory=set)
    tried: int = 0
    messages: int = 0

    def attempt(self, conversation: Conversation) -> bool:
        """Try one; whether it reached something new. A fault carries the conversation."""
        self.tried += 1
        self.messages += len(conversation)
        try:
            found = places(conversation)
        except Exception as error:
            raise Fault(f"{type(error).__name__}: {error}", conversation) from error
        if found <= self.seen:
            return False
        self.seen |= found
        self.corpus.append(conversation)
        return True

    def run(self, count: int) -> None:
        """Try ``count`` new conversations."""
        for _ in range(count):
            self.attempt(self._next())

    def _next(self) -> Conversation:
        chance = self.chance
        speaker = Speaker(chance, EPOCH, SESSION)
        speaker.token = TOKEN if chance.random() < 0.9 else "guess"
        speaker.counts = (0, 1, 2, 3, 5, 8) if chance.random() < 0.98 else (64, 520, 1030)
        speaker.known = [(at, 1) for at in range(8)]
        speaker.leases = [EPOCH << 20 | at for at in (1, 2)]
        kind = chance.random()
        frames = list(chance.choice(self.corpus)) if self.corpus and kind < 0.8 else []
        if kind > 0.9:
            frames = list(honest(chance))
        for _ in range(chance.choice([1, 1, 2, 4])):
            way = chance.randrange(7)
            at = chance.randrange(len(frames) + 1)
            if way == 0 or not frames:
                frames.insert(at, _pack(speaker.good()))
            elif way == 1:
                frames.insert(at, speaker.bad())
            elif way == 2:
                at %= len(frames)
                frames[at] = _disturbed(frames[at], speaker)
            elif way == 3 and self.corpus:
                frames[at:] = chance.choice(self.corpus)[at:]
            elif way == 4:
                frames[at:at] = [RESTART, _pack(speaker.good(Op.HELLO))]
            elif way == 5:
                del frames[at : at + 1]
            else:
                frames.insert(at, chance.choice(frames))
        return tuple(frame for frame in frames[:_LONGEST] if len(frame) < 200_000)

    def distil(self) -> list[Conversation]:
        """The corpus without what others reach as well, the shortest conversations first."""
        kept: list[Conversation] = []
        seen: set[Place] = set()
        for conversation in sorted(self.corpus, key=lambda frames: sum(map(len, frames))):
            found = places(conversation)
            if not found <= seen:
                seen |= found
                kept.append(conversation)
        return kept


def _disturbed(frame: bytes, speaker: Speaker) -> bytes:
    """A frame with one value of the message or one byte replaced."""
    chance = speaker.chance
    if chance.random() < 0.5:
        try:
            message = msgpack.unpackb(frame)
        except Exception:  # noqa: BLE001 - any damage at all
            message = None
        if isinstance(message, list) and message:
            message[chance.randrange(len(message))] = speaker.value()
            return _pack(message)
    changed = bytearray(frame or b"\0")
    changed[chance.randrange(len(changed))] = chance.randrange(256)
    return bytes(changed)


def _pack(value: Sequence[Any]) -> bytes:
    packed: bytes = msgpack.packb(value, use_bin_type=True)
    return packed


def load(path: Path = CORPUS) -> list[Conversation]:
    """The conversations that are kept with the tests."""
    return [tuple(frames) for frames in msgpack.unpackb(zlib.decompress(path.read_bytes()))]


def save(corpus: Sequence[Conversation], path: Path = CORPUS) -> None:
    """Keep conversations with the tests."""
    path.write_bytes(zlib.compress(_pack(corpus), 9))
