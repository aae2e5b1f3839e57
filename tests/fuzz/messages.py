"""Frames that no honest client sends, and well-formed ones that they are made from. Random, but only by ``chance``."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

import msgpack
from attrs import define, field

from maru_core.namespace import digest_of
from maru_core.protocol import MAX_KEYS, MAX_MESSAGE, NO_ENTRY, PROTOCOL_VERSION, Op
from maru_core.protocol.messages import EVERYTHING, AdminVerb

#: Numbers at which something ends.
EDGES = (0, 1, 2, 31, 32, 63, 64, 127, 128, 255, 256, 511, 512, 513, 65535, 65536, MAX_KEYS, NO_ENTRY - 1, NO_ENTRY)
EDGES += (2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -1, -(2**31), -(2**63))
#: First bytes of msgpack values that announce more than a frame can hold.
_HUGE = (b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff")
_HUGE += (b"\xdc\xff\xff", b"\xc9\xff\xff\xff\xff\x01", b"\xc5\xff\xff")
HTTP = b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: curl\r\nAccept: */*\r\n\r\n"


@define
class Speaker:
    """Makes messages for one session: ``epoch`` and ``session`` as HELLO answered.

    ``known``: entries and generations that RESERVE granted; ``leases``: what ACQUIRE answered.
    """

    chance: random.Random
    epoch: int = 0
    session: int = 0
    known: list[tuple[int, int]] = field(factory=list)
    leases: list[int] = field(factory=list)
    weights: int = 0
    #: Credential of administration; a wrong one unless it is known.
    token: str = "guess"
    #: Numbers of keys in one message; the last ones are worked on in several slices.
    counts: tuple[int, ...] = (0, 1, 2, 3, 8, 64, 200, 520, 1030)
    _request: int = 0

    # -- well-formed -----------------------------------------------------------------------------------------------

    def good(self, op: Op | None = None) -> list[Any]:
        """A message whose types and lengths are right."""
        chance = self.chance
        if op is None:
            op = chance.choice(list(Op))
            if op in (Op.HELLO, Op.BYE, Op.RESET) and chance.random() < 0.8:
                op = chance.choice([Op.RESERVE, Op.COMMIT, Op.ACQUIRE])  # what ends something ends the talk
        self._request += 1
        return [int(op), self._request, self.epoch, self.session, *self.arguments(op)]

    def arguments(self, op: Op) -> list[Any]:
        """Well-formed arguments."""
        chance = self.chance
        if op is Op.HELLO:
            name = bytes([0x90 + chance.randrange(4)])
            return [PROTOCOL_VERSION, "client", [1, "host", "fuzz"], name, chance.choice(EDGES[:20]), self._resume()]
        if op is Op.ATTACH:
            # Without proof nobody could ever tell that this session is over.
            return [chance.random() < 0.98, chance.random() < 0.5]
        if op is Op.RESERVE:
            count = self._count()
            parents = chance.choice([b"", self._keys(1), self._keys(count)])
            length: Any = chance.choice([1, 100, 4096, 5000, 20_000, 1 << 40])
            if chance.random() < 0.3:
                length = struct.pack(f"<{count}Q", *[chance.randrange(1, 30_000) for _ in range(count)])
            return [self._weights(), self._keys(count), parents, length]
        if op is Op.COMMIT:
            entries, generations = self._handles()
            return [entries, generations, chance.choice([b"", bytes(2 * len(entries))])]
        if op is Op.ABORT:
            return list(self._handles())
        if op in (Op.PROBE, Op.DELETE):
            return [self._weights(), self._keys(self._count())]
        if op is Op.ACQUIRE:
            return [self._weights(), self._keys(self._count()), chance.random() < 0.5]
        if op is Op.RELEASE:
            chosen = [chance.choice(self.leases) for _ in range(3)] if self.leases else []
            return [_u64([*chosen, chance.randrange(1000)])]
        if op is Op.RESET:
            return [self._weights()]
        if op is Op.ADMIN:
            verb = chance.choice(list(AdminVerb))
            digest = chance.choice([b"", bytes(16), digest_of(bytes([0x90 + chance.randrange(4)]))])
            more: dict[AdminVerb, list[Any]] = {
                AdminVerb.RESET: [chance.choice([digest, EVERYTHING])],
                AdminVerb.QUOTA: [digest, chance.choice(EDGES[:20])],
                AdminVerb.EVICT: [digest],
                AdminVerb.STOP: [],
            }
            return [self.token, verb.value, *more.get(verb, [chance.choice([0, 0, *EDGES])])]
        if op is Op.CANCEL:
            return [_u64([max(0, self._request + chance.randint(-5, 5)) for _ in range(chance.randint(0, 4))])]
        return []

    def learn(self, message: Sequence[Any], reply: Sequence[Any]) -> None:
        """Take from the reply to ``message`` what later messages may name; a bad message may have had the same id."""
        if len(reply) < 3 or reply[2] != 0 or not message:
            return
        if message[0] == Op.RESERVE and len(reply) == 6 and len(reply[4]) == len(reply[5]):
            columns = [struct.unpack(f"<{len(column) // 4}I", column) for column in reply[4:6]]
            self.known += [pair for pair in zip(*columns, strict=True) if pair[0] != NO_ENTRY]
            del self.known[:-200]
        elif message[0] == Op.ACQUIRE and len(reply) == 8 and reply[3]:
            self.leases.append(reply[3])
            del self.leases[:-50]
        elif message[0] == Op.RESET and len(reply) == 4 and type(reply[3]) is int:
            self.weights = reply[3]

    def _weights(self) -> int:
        return self.chance.choice([self.weights] * 8 + [0, self.weights + 1, 2**64 - 1])

    def _count(self) -> int:
        return self.chance.choice(self.counts)

    def _keys(self, count: int) -> bytes:
        first = self.chance.randrange(300)
        return b"".join((first + at).to_bytes(8, "big").rjust(32, b"\1") for at in range(count))

    def _handles(self) -> tuple[bytes, bytes]:
        chance = self.chance
        chosen = [chance.choice(self.known) for _ in range(chance.choice([0, 1, 3, 20]))] if self.known else []
        if chance.random() < 0.3:
            chosen.append((chance.randrange(2**32), chance.randrange(2**32)))
        entries, generations = zip(*chosen, strict=True) if chosen else ((), ())
        return _u32(entries), _u32(generations)

    def _resume(self) -> list[Any]:
        if self.chance.random() < 0.5:
            return []
        leases = self.leases[-2:]
        entries, generations = self._handles()
        held, held_generations = self._handles()
        count = len(held) // 4
        leases = leases[:count]
        sizes = [count - len(leases) + 1, *[1] * (len(leases) - 1)] if leases else []
        if not leases:
            held = held_generations = b""
        part, last = self.chance.choice([(0, True), (0, True), (0, False), (1, True), (1, False)])
        columns = [entries, generations, _u64(leases), _u32(sizes), held, held_generations]
        return [self.session, self.chance.choice([1, 1, 2]), part, last, *columns]

    # -- anything else ---------------------------------------------------------------------------------------------

    def bad(self) -> bytes:
        """A frame that is wrong in one or several ways, or by chance in none."""
        ways: Sequence[Callable[[], bytes]] = (
            self._other_argument,
            self._other_argument,
            self._other_length,
            self._flipped,
            self._flipped,
            self._truncated,
            self._spliced,
            self._announced,
            self._nested,
            self._random,
            lambda: HTTP,
            self._plain_value,
            self._many_arguments,
        )
        return self.chance.choice(ways)()

    def value(self, depth: int = 2) -> Any:
        """A value of any type."""
        chance = self.chance
        makers: list[Callable[[], Any]] = [
            lambda: None,
            lambda: chance.random() < 0.5,
            lambda: chance.choice(EDGES),
            lambda: chance.choice(EDGES),
            lambda: chance.random() * 1e300,
            lambda: float("nan"),
            lambda: "text" * chance.choice([0, 1, 5000]),
            lambda: bytes(chance.choice([0, 1, 4, 8, 31, 32, 33, 64, 96, 4096])),
            lambda: chance.randbytes(chance.choice([3, 16, 32, 64, 320])),
            lambda: msgpack.ExtType(chance.randrange(128), b"ext"),
        ]
        if depth:
            makers.append(lambda: [self.value(depth - 1) for _ in range(chance.randint(0, 4))])
            makers.append(lambda: {chance.choice(["a", "b", 1]): self.value(depth - 1)})
        return chance.choice(makers)()

    def largest(self) -> list[bytes]:
        """Frames at and over the limits."""
        head = [int(Op.PROBE), 1, self.epoch, self.session, 0]
        columns = [bytes(32 * (MAX_KEYS + more)) for more in (0, 1)]
        return [*(_pack([*head, column]) for column in columns), bytes(MAX_MESSAGE), self.chance.randbytes(MAX_MESSAGE)]

    def _other_argument(self) -> bytes:
        message = self.good()
        for _ in range(self.chance.choice([1, 1, 1, 2])):
            message[self.chance.randrange(len(message))] = self.value()
        return _pack(message)

    def _other_length(self) -> bytes:
        """A column that is longer or shorter than it should be, sometimes over every limit."""
        message = self.good()
        columns = [at for at, value in enumerate(message) if isinstance(value, bytes)]
        if columns:
            at = self.chance.choice(columns)
            if self.chance.random() < 0.01:
                message[at] = bytes(32 * (MAX_KEYS + self.chance.choice([0, 1])))
            else:
                message[at] = message[at][: self.chance.randrange(len(message[at]) + 1)] + bytes(
                    self.chance.choice(EDGES[:9])
                )
        return _pack(message)

    def _flipped(self) -> bytes:
        frame = bytearray(_pack(self.good()))
        for _ in range(self.chance.choice([1, 1, 2, 8])):
            at = self.chance.randrange(min(len(frame), self.chance.choice([8, 40, 10_000])))
            frame[at] = self.chance.randrange(256)
        return bytes(frame)

    def _truncated(self) -> bytes:
        frame = _pack(self.good())
        return frame[: self.chance.randrange(len(frame))]

    def _spliced(self) -> bytes:
        one, other = _pack(self.good()), _pack(self.good())
        return one[: self.chance.randrange(len(one))] + other[self.chance.randrange(len(other)) :]

    def _announced(self) -> bytes:
        """A value that says it is huge, alone or as an argument."""
        huge = self.chance.choice(_HUGE)
        if self.chance.random() < 0.3:
            return huge + bytes(self.chance.choice([0, 10]))
        message = self.good()
        at = self.chance.randrange(len(message) + 1)
        return bytes([0x90 + len(message) + 1]) + b"".join(map(_pack, message[:at])) + huge

    def _nested(self) -> bytes:
        deep = self.chance.choice([b"\x91", b"\x81\xa1a", b"\x81\x01"]) * self.chance.choice([5, 300, 10_000]) + b"\x01"
        if self.chance.random() < 0.5:
            return deep
        return b"\x95" + b"".join(map(_pack, self.good(Op.PING)[:4])) + deep

    def _random(self) -> bytes:
        size = self.chance.choice([0, 1, 2, 10, 100, 1000, 20_000])
        if self.chance.random() < 0.002:
            size = MAX_MESSAGE - self.chance.randrange(100)
        return self.chance.randbytes(size)

    def _plain_value(self) -> bytes:
        return _pack(self.value())

    def _many_arguments(self) -> bytes:
        message = self.good()
        return _pack([*message, *[self.value(0) for _ in range(self.chance.choice([1, 2, 60, 200]))]])


def _pack(value: Any) -> bytes:
    """As msgpack, with what it cannot hold cut down."""
    packed: bytes = msgpack.packb(value, use_bin_type=True)
    return packed


def _u32(values: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


def _u64(values: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)
