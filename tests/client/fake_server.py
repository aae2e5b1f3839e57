"""A server in a thread whose replies a test can spoil: shorten, swallow, answer under another epoch."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from maru_core.contracts import PoolRequest
from maru_core.fakes import FakeBackend
from maru_core.pool_format import Header, State, pack_header
from maru_core.protocol import NO_ENTRY, PROTOCOL_VERSION, Code, CommitStatus, Op, Presence, ReserveStatus
from maru_core.protocol.codec import decode, encode, pack_u32, pack_u64, split_keys, unpack_u32, unpack_u64

#: Given the request and the reply that it would get, the reply it gets; ``None``: none.
Spoiler = Callable[[list[Any], list[Any]], list[Any] | None]


class FakeServer:
    """One namespace, no eviction. ``held`` maps a reserved entry to its key, ``stored`` a key to (entry, generation,
    length), ``leases`` a lease id to its keys. ``spoil`` is called with every request and reply.
    """

    def __init__(self, folder: Path, backend: FakeBackend, *, epoch: int = 7, granule: int = 4096) -> None:
        self.url = f"ipc://{folder / 'server.sock'}"
        self.epoch = epoch
        self.spoil: Spoiler = lambda request, reply: reply
        self.weights_epoch = 0
        self.requests: list[list[Any]] = []
        self.cancelled: set[int] = set()
        self.held: dict[int, tuple[bytes, int, int]] = {}
        self.stored: dict[bytes, tuple[int, int, int]] = {}
        self.leases: dict[int, tuple[bytes, ...]] = {}
        self.reported: list[tuple[int, int]] = []
        self.sessions = 0
        self.goodbyes = 0
        self._undo: dict[int, tuple[str, Any]] = {}
        self._digest = b""
        self._folder = folder
        self._pool = backend.create_pool(PoolRequest(0, 1 << 20, granule, 0, None, f"fake-{epoch}-{id(self)}"))
        self._free = list(range(self._pool.region.descriptor.entry_count))
        self._generations = [0] * len(self._free)
        self._next = 1
        self._stop = threading.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(self.url)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End as a killed server does: nobody is told."""
        self._stop.set()
        self._thread.join()
        self._socket.close(0)
        self._context.term()

    def count(self, op: Op) -> int:
        """Requests of this kind so far."""
        return sum(request[0] == op for request in self.requests)

    def _serve(self) -> None:
        while not self._stop.is_set():
            if not self._socket.poll(20):
                continue
            peer, frame = self._socket.recv_multipart()
            request = decode(frame)
            self.requests.append(request)
            reply = self.spoil(request, self._answer(request))
            if reply is not None:
                self._socket.send_multipart([peer, encode(reply)])

    def _answer(self, request: list[Any]) -> list[Any]:
        op, request_id, epoch, _session, *arguments = request
        if epoch not in (0, self.epoch):
            return [request_id, self.epoch, Code.STALE_EPOCH, "another epoch"]
        if request_id in self.cancelled:
            return [request_id, self.epoch, Code.CANCELLED, "cancelled"]
        return [request_id, self.epoch, 0, *getattr(self, f"_{Op(op).name.lower()}")(request_id, *arguments)]

    def _hello(
        self, _id: int, version: int, _role: str, _who: list[Any], descriptor: bytes, _quota: int, _resume: list[Any]
    ) -> list[Any]:
        from maru_core.namespace import Namespace

        self.sessions += 1
        path = self._folder / f"session-{self.epoch}-{self.sessions}"
        path.touch(0o600)
        import msgpack

        self._digest = Namespace(tuple(map(tuple, msgpack.unpackb(descriptor)))).digest
        descriptor_wire = self._pool.region.descriptor.to_wire()
        return [1000 + self.sessions, str(path), self.weights_epoch, [descriptor_wire], [1 << 20], ["1", os.getpid()]]

    def _attach(self, _id: int, proof: bool, dma: bool) -> list[Any]:
        return []

    def _reserve(self, request_id: int, weights: int, blob: bytes, _parents: bytes, length: Any) -> list[Any]:
        keys = split_keys(blob)
        lengths = [length] * len(keys) if isinstance(length, int) else list(unpack_u64(length))
        statuses, entries, generations = [], [], []
        writing = {key for key, _, _ in self.held.values()}
        for key, size in zip(keys, lengths, strict=True):
            pages = -(-size // self._pool.region.descriptor.granule)
            entry, generation = NO_ENTRY, 0
            if weights != self.weights_epoch or size <= 0:
                status = ReserveStatus.REFUSED
            elif key in self.stored:
                status = ReserveStatus.PRESENT
            elif key in writing:
                status = ReserveStatus.BUSY
            elif len(self._free) < pages:
                status = ReserveStatus.NO_ROOM
            else:
                status, entry = ReserveStatus.NEW, self._free[0]
                del self._free[:pages]
                self._generations[entry] += 1
                generation = self._generations[entry]
                self.held[entry] = (key, generation, size)
                writing.add(key)
                self._header(entry, State.RESERVED)
            statuses.append(status)
            entries.append(entry)
            generations.append(generation)
        self._undo[request_id] = ("abort", [entry for entry in entries if entry != NO_ENTRY])
        return [bytes(statuses), pack_u32(entries), pack_u32(generations)]

    def _header(self, entry: int, state: State) -> None:
        key, generation, size = self.held[entry]
        descriptor = self._pool.region.descriptor
        raw = pack_header(Header(state, generation, size, 1, 0, self._digest, self.weights_epoch, bytes(32), key))
        self._pool.region.buffer[descriptor.header_at(entry) :][: len(raw)] = raw

    def damage(self, key: bytes) -> None:
        """Give the entry of a stored object to another generation, as if it were reused."""
        entry, generation, size = self.stored[key]
        self.held[entry] = (key, generation + 1, size)
        self._header(entry, State.READY)
        del self.held[entry]

    def _commit(self, _id: int, entries: bytes, generations: bytes, _sums: bytes) -> list[Any]:
        return [bytes(self._finish(entries, generations, store=True))]

    def _abort(self, _id: int, entries: bytes, generations: bytes) -> list[Any]:
        return [bytes(self._finish(entries, generations, store=False))]

    def _finish(self, entries: bytes, generations: bytes, *, store: bool) -> list[int]:
        statuses = []
        for entry, generation in zip(unpack_u32(entries), unpack_u32(generations), strict=True):
            if entry not in self.held or self.held[entry][1] != generation:
                statuses.append(CommitStatus.UNKNOWN)
                continue
            if store:
                self._header(entry, State.READY)
                key, _, size = self.held.pop(entry)
                self.stored[key] = (entry, generation, size)
            else:
                self._take_back(entry)
            statuses.append(CommitStatus.OK)
        return statuses

    def _take_back(self, entry: int) -> None:
        _, _, size = self.held.pop(entry)
        pages = -(-size // self._pool.region.descriptor.granule)
        self._free[:0] = range(entry, entry + pages)

    def _probe(self, _id: int, _weights: int, blob: bytes) -> list[Any]:
        return [bytes(Presence.READY if key in self.stored else Presence.ABSENT for key in split_keys(blob))]

    def _delete(self, request_id: int, weights: int, blob: bytes) -> list[Any]:
        reply = self._probe(request_id, weights, blob)
        for key in split_keys(blob):
            self.stored.pop(key, None)
        return reply

    def _report(self, _id: int, entries: bytes, generations: bytes) -> list[Any]:
        """Kept in ``reported``; nothing is dropped."""
        found = list(zip(unpack_u32(entries), unpack_u32(generations), strict=True))
        self.reported += found
        return [bytes(len(found))]

    def _acquire(self, request_id: int, _weights: int, blob: bytes, leading: bool) -> list[Any]:
        keys = split_keys(blob)
        statuses, places = bytearray(len(keys)), [(NO_ENTRY, 0, 0)] * len(keys)
        for index, key in enumerate(keys):
            if key in self.stored:
                statuses[index], places[index] = Presence.READY, self.stored[key]
            elif leading:
                break
        lease = 0
        if any(statuses):
            lease, self._next = self._next, self._next + 1
            self.leases[lease] = tuple(key for key, status in zip(keys, statuses, strict=True) if status)
            self._undo[request_id] = ("release", lease)
        columns = [pack_u32(p[0] for p in places), pack_u32(p[1] for p in places), pack_u64(p[2] for p in places)]
        return [lease, bytes(statuses), *columns]

    def _release(self, _id: int, blob: bytes) -> list[Any]:
        return [bytes(self.leases.pop(lease, None) is None for lease in unpack_u64(blob))]

    def _reset(self, _id: int, weights: int) -> list[Any]:
        if weights == self.weights_epoch:
            self.stored.clear()
            self.weights_epoch += 1
        return [self.weights_epoch]

    def _cancel(self, _id: int, blob: bytes) -> list[Any]:
        for request_id in unpack_u64(blob):
            kind, what = self._undo.pop(request_id, ("", None))
            if kind == "abort":
                for entry in what:
                    if entry in self.held:
                        self._take_back(entry)
            elif kind == "release":
                self.leases.pop(what, None)
            else:
                self.cancelled.add(request_id)
        return []

    def _stats(self, _id: int) -> list[Any]:
        return [{"server": {"version": "fake", "protocol": PROTOCOL_VERSION}}]

    def _ping(self, _id: int) -> list[Any]:
        return []

    def _bye(self, _id: int) -> list[Any]:
        self.goodbyes += 1
        return []
