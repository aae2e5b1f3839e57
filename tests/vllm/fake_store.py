"""An in-memory stand-in for server and handler, with the faults that the connector must survive."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

from attrs import define, field

from maru_core.client import Grants, Lease
from maru_core.errors import StaleEpoch, Unavailable
from maru_core.protocol import CommitStatus, Presence, ReserveStatus


def one_at_a_time(method: Any) -> Any:
    """A server answers one request after the other."""

    @wraps(method)
    def locked(self: Any, *args: Any, **kwargs: Any) -> Any:
        with (self if isinstance(self, FakeStore) else self.store).lock:
            return method(self, *args, **kwargs)

    return locked


@define
class StoredObject:
    """One object: its bytes, whether it is visible, and how many leases hold it."""

    key: bytes
    entry: int
    generation: int
    data: bytearray
    ready: bool = False
    leases: int = 0
    gone: bool = False


@define
class FakeStore:
    """What all handlers of a test share. ``lost`` makes verification of these entries fail."""

    epoch: int = 7
    weights_epoch: int = 0
    up: bool = True
    answer_after: int = 0
    objects: dict[bytes, StoredObject] = field(factory=dict)
    by_entry: dict[int, StoredObject] = field(factory=dict)
    leases: dict[int, list[StoredObject]] = field(factory=dict)
    lost: set[int] = field(factory=set)
    fail_loads: int = 0
    lookups: int = 0
    #: Seconds that each poll was willing to wait.
    patience: list[float] = field(factory=list)
    #: Called before an object's bytes are handed out to be read or to be written, in order to be slow.
    before_read: Callable[[], None] = lambda: None
    before_write: Callable[[], None] = lambda: None
    #: Objects that there is room for; what nobody leases makes room.
    capacity: int | None = None
    #: Objects that may be leased at a time, each counted once; the first that is over that is BUSY.
    share: int | None = None
    #: Threads of several engines call at once.
    lock: threading.RLock = field(factory=threading.RLock, repr=False)
    _next: int = 0

    @one_at_a_time
    def number(self) -> int:
        self._next += 1
        return self._next

    @one_at_a_time
    def drop(self, key: bytes) -> None:
        """Evict: hidden at once, its bytes overwritten as soon as nobody leases it."""
        found = self.objects.pop(key)
        found.gone = True
        if not found.leases:
            self._reuse(found)

    @one_at_a_time
    def has_room(self) -> bool:
        """Whether there is room for one more object; evicts the oldest that may go."""
        if self.capacity is None or len(self.objects) < self.capacity:
            return True
        old = next((key for key, found in self.objects.items() if found.ready and not found.leases), None)
        if old is not None:
            self.drop(old)
        return old is not None

    def _reuse(self, found: StoredObject) -> None:
        found.generation += 1
        found.data[:] = b"\xee" * len(found.data)

    @one_at_a_time
    def release(self, lease_id: int) -> None:
        for found in self.leases.pop(lease_id, []):
            found.leases -= 1
            if found.gone and not found.leases:
                self._reuse(found)


@define
class FakeLocated:
    store: FakeStore
    entries: Sequence[int]
    generations: Sequence[int]

    def view(self, index: int) -> memoryview:
        self.store.before_read()
        if self.store.fail_loads:
            self.store.fail_loads -= 1
            raise OSError("injected: the pool cannot be read")
        return memoryview(self.store.by_entry[self.entries[index]].data)

    def views(self) -> list[memoryview]:
        return [self.view(index) for index in range(len(self.entries))]

    def reading(self) -> AbstractContextManager[None]:
        return nullcontext()

    def verify(self) -> list[bool]:
        return self.check()

    @one_at_a_time
    def check(self, indices: Iterable[int] | None = None) -> list[bool]:
        chosen = range(len(self.entries)) if indices is None else indices
        found = [(self.store.by_entry[self.entries[index]], self.generations[index]) for index in chosen]
        return [
            item.ready and item.generation == generation and item.entry not in self.store.lost
            for item, generation in found
        ]


@define
class FakePending:
    store: FakeStore
    keys: tuple[bytes, ...]
    stale: bool = False
    polls: int = 0
    cancelled: bool = False

    @one_at_a_time
    def poll(self, timeout: float = 0.0) -> Lease | None:
        if not self.store.up:
            raise Unavailable("injected: the server is away")
        self.polls += 1
        self.store.patience.append(timeout)
        if self.polls <= self.store.answer_after:
            return None
        taken: list[StoredObject] = []
        statuses = bytearray(len(self.keys))
        held = {id(found) for objects in self.store.leases.values() for found in objects}
        for index, key in enumerate(self.keys):
            found = self.store.objects.get(key)
            if self.stale or found is None or not found.ready:
                break
            held.add(id(found))
            if self.store.share is not None and len(held) > self.store.share:
                statuses[index] = Presence.BUSY
                break
            statuses[index] = Presence.READY
            taken.append(found)
        lease_id = self.store.number()
        for found in taken:
            found.leases += 1
        if taken:
            self.store.leases[lease_id] = taken
        pad = [0] * (len(self.keys) - len(taken))
        return Lease(
            epoch=self.store.epoch,
            session=1,
            ids=(lease_id,) if taken else (),
            keys=self.keys,
            statuses=bytes(statuses),
            entries=array("I", [found.entry for found in taken] + pad),
            generations=array("I", [found.generation for found in taken] + pad),
            lengths=array("Q", [len(found.data) for found in taken] + pad),
        )

    def cancel(self) -> None:
        self.cancelled = True


@define
class FakeHandler:
    """The calls that the connector uses."""

    store: FakeStore
    weights_epoch: int = 0
    closed: bool = False
    #: What RESERVE was given each time, in seconds.
    timeouts: list[float | None] = field(factory=list)

    @property
    def is_up(self) -> bool:
        return self.store.up

    @property
    def epoch(self) -> int:
        if not self.store.up:
            raise Unavailable("injected: the server is away")
        return self.store.epoch

    def holds(self, epoch: int) -> bool:
        return self.store.up and epoch == self.store.epoch

    @one_at_a_time
    def submit_acquire(self, keys: Sequence[bytes], *, leading: bool, weights_epoch: int | None = None) -> FakePending:
        assert leading
        if not self.store.up:
            raise Unavailable("injected: the server is away")
        self.store.lookups += 1
        epoch = self.weights_epoch if weights_epoch is None else weights_epoch
        return FakePending(self.store, tuple(keys), stale=epoch != self.store.weights_epoch)

    @one_at_a_time
    def release(self, lease: Lease) -> None:
        for lease_id in lease.ids:
            self.store.release(lease_id)

    def adopt(
        self,
        epoch: int,
        entries: Sequence[int],
        generations: Sequence[int],
        lengths: Sequence[int],
        keys: Sequence[bytes],
    ) -> FakeLocated:
        if epoch != self.store.epoch:
            raise StaleEpoch("injected: another epoch")
        return FakeLocated(self.store, entries, generations)

    @one_at_a_time
    def reserve(
        self,
        keys: Sequence[bytes],
        length: int,
        parents: Sequence[bytes] | None = None,
        *,
        weights_epoch: int | None = None,
        timeout: float | None = None,
    ) -> Grants:
        self.timeouts.append(timeout)
        if not self.store.up:
            raise Unavailable("injected: the server is away")
        assert parents is not None
        assert len(parents) == len(keys)
        statuses = bytearray(len(keys))
        entries = array("I", [0] * len(keys))
        generations = array("I", [0] * len(keys))
        for index, key in enumerate(keys):
            if weights_epoch != self.store.weights_epoch:
                statuses[index] = ReserveStatus.REFUSED
                continue
            found = self.store.objects.get(key)
            if found is not None:
                statuses[index] = ReserveStatus.PRESENT if found.ready else ReserveStatus.BUSY
                continue
            if not self.store.has_room():
                statuses[index] = ReserveStatus.NO_ROOM
                continue
            entry = self.store.number()
            found = StoredObject(key, entry, 1, bytearray(length))
            self.store.objects[key] = self.store.by_entry[entry] = found
            entries[index], generations[index] = entry, 1
        return Grants(self.store.epoch, 1, tuple(keys), bytes(statuses), entries, generations, [length] * len(keys))

    def room(self, grants: Grants, index: int) -> memoryview:
        self.store.before_write()
        return memoryview(self.store.by_entry[grants.entries[index]].data)

    def rooms(self, grants: Grants, indices: Sequence[int]) -> list[memoryview]:
        return [self.room(grants, index) for index in indices]

    @one_at_a_time
    def commit(
        self,
        grants: Grants,
        indices: Sequence[int] | None = None,
        *,
        checksums: bool,
        timeout: float | None = None,
    ) -> bytes:
        chosen = grants.new if indices is None else indices
        for index in chosen:
            self.store.by_entry[grants.entries[index]].ready = True
        return bytes([CommitStatus.OK]) * len(chosen)

    @one_at_a_time
    def abort(self, grants: Grants, indices: Sequence[int] | None = None) -> None:
        for index in grants.new if indices is None else indices:
            found = self.store.by_entry[grants.entries[index]]
            if not found.ready:
                self.store.objects.pop(found.key, None)

    @one_at_a_time
    def reset(self, *, timeout: float | None = None) -> int:
        if not self.store.up:
            raise Unavailable("injected: the server is away")
        for key in list(self.store.objects):
            self.store.drop(key)
        self.store.weights_epoch += 1
        self.weights_epoch = self.store.weights_epoch
        return self.weights_epoch

    def close(self, *, may_end: bool = True) -> None:
        self.closed = True
