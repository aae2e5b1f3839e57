"""A client that speaks the protocol with nothing but msgpack and ZeroMQ."""

from __future__ import annotations

import fcntl
import os
import struct
from typing import Any

import msgpack
import zmq

from maru_core.access import ClientKeys
from maru_core.protocol import PROTOCOL_VERSION, Code, Op, PoolDescriptor


class Refused(Exception):
    """A reply with another code than OK."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code
        self.text = text


def key(number: int, tag: bytes = b"") -> bytes:
    """Some 32-byte key."""
    return (tag + number.to_bytes(8, "big")).rjust(32, b"\1")


def keys(first: int, count: int, tag: bytes = b"") -> bytes:
    """A packed column of keys."""
    return b"".join(key(number, tag) for number in range(first, first + count))


def u32(blob: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(blob) // 4}I", blob))


def u64(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


class RawClient:
    """One DEALER socket and, after ``hello``, one session."""

    def __init__(
        self, context: zmq.Context[Any], url: str, timeout: float = 10.0, keys: ClientKeys | None = None
    ) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.keys = keys
        if keys is not None:
            keys.apply(self.socket)
        self.timeout = timeout
        self.socket.connect(url)
        self.request = 0
        self.epoch = self.session = 0
        self.pools: list[PoolDescriptor] = []
        self.weights_epoch = 0
        self.lock_path = ""
        self.lock: int | None = None

    def send(self, op: int, *arguments: Any, request: int | None = None) -> int:
        if request is None:
            self.request += 1
            request = self.request
        self.socket.send(msgpack.packb([int(op), request, self.epoch, self.session, *arguments]))
        return request

    def receive(self, timeout: float | None = None) -> list[Any]:
        if not self.socket.poll(int(1000 * (self.timeout if timeout is None else timeout))):
            raise TimeoutError("no reply")
        reply: list[Any] = msgpack.unpackb(self.socket.recv())
        return reply

    def result(self, request: int) -> list[Any]:
        """Results of ``request``; replies to earlier ones are skipped."""
        while True:
            reply = self.receive()
            if reply[0] == request:
                break
        if reply[2] != Code.OK:
            raise Refused(reply[2], reply[3])
        return reply[3:]

    def call(self, op: int, *arguments: Any) -> list[Any]:
        return self.result(self.send(op, *arguments))

    def hello(
        self,
        namespace: bytes = b"\x90",
        attach: bool = True,
        proof: bool = True,
        resume: list[Any] | None = None,
        dma: bool = False,
        quota: int = 0,
    ) -> RawClient:
        who = [os.getpid(), "host", "raw"]
        request = self.send(Op.HELLO, PROTOCOL_VERSION, "client", who, namespace, quota, resume or [])
        reply = self.receive()
        assert reply[0] == request, reply
        if reply[2] != Code.OK:
            raise Refused(reply[2], reply[3])
        self.epoch = reply[1]
        before = self.lock_path
        self.session, self.lock_path, self.weights_epoch, pools = reply[3:7]
        if self.lock is not None and self.lock_path != before:
            os.close(self.lock)
            self.lock = None
        self.pools = [PoolDescriptor.from_wire(pool) for pool in pools]
        if attach:
            if proof and self.lock is None:
                self.lock = os.open(self.lock_path, os.O_RDWR | os.O_CLOEXEC)
                fcntl.flock(self.lock, fcntl.LOCK_EX)
            self.call(Op.ATTACH, proof, dma)
        return self

    def resume(
        self,
        url: str,
        writing: tuple[list[int], list[int]] = ([], []),
        reading: dict[int, tuple[list[int], list[int]]] | None = None,
        namespace: bytes = b"\x90",
    ) -> bool:
        """Go on at a server that was started again, with entries and generations; whether it is the same session."""
        context = self.socket.context
        self.socket.close(0)
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        if self.keys is not None:
            self.keys.apply(self.socket)
        self.socket.connect(url)
        earlier, self.epoch, self.session = self.session, 0, 0
        leases = reading or {}
        columns = [
            earlier,
            self.request,
            0,
            True,
            pack(writing[0]),
            pack(writing[1]),
            u64(*leases),
            pack([len(entries) for entries, _ in leases.values()]),
            pack([entry for entries, _ in leases.values() for entry in entries]),
            pack([generation for _, generations in leases.values() for generation in generations]),
        ]
        self.hello(namespace, resume=columns)
        return self.session == earlier

    def reserve(self, column: bytes, length: Any = 4096, parents: bytes = b"") -> tuple[bytes, list[int], list[int]]:
        statuses, entries, generations = self.call(Op.RESERVE, self.weights_epoch, column, parents, length)
        return statuses, u32(entries), u32(generations)

    def commit(self, entries: list[int], generations: list[int]) -> bytes:
        return self.call(Op.COMMIT, pack(entries), pack(generations), b"")[0]

    def store(self, column: bytes, length: Any = 4096, parents: bytes = b"") -> bytes:
        """RESERVE, then COMMIT of what was NEW; returns the statuses of RESERVE."""
        statuses, entries, generations = self.reserve(column, length, parents)
        new = [at for at, status in enumerate(statuses) if status == 0]
        assert self.commit([entries[at] for at in new], [generations[at] for at in new]) == bytes(len(new))
        return statuses

    def acquire(self, column: bytes, leading: bool = False) -> tuple[int, bytes, list[int]]:
        lease, statuses, entries, _, _ = self.call(Op.ACQUIRE, self.weights_epoch, column, leading)
        return lease, statuses, u32(entries)

    def probe(self, column: bytes) -> bytes:
        return self.call(Op.PROBE, self.weights_epoch, column)[0]

    def stats(self) -> dict[str, Any]:
        return self.call(Op.STATS)[0]

    def admin(self, token: str, verb: str, *arguments: Any) -> list[Any]:
        return self.call(Op.ADMIN, token, verb, *arguments)

    def close(self) -> None:
        self.socket.close(0)
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None


def pack(values: list[int]) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)
