"""A program that stores and reads stamped objects without end, by every kind of call, and checks every byte.

It is killed, stopped and forked at any moment, and its server too. What it counts, and what must never happen, is in
:mod:`tests.chaos.tally`.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from attrs import define, field, frozen

from maru_core import logs
from maru_core.client import MaruHandler, StoreResult
from maru_core.client.objects import Allocation
from maru_core.client.session import ForkGuard
from maru_core.client.values import Grants, Lease
from maru_core.config import MaruConfig
from maru_core.errors import MaruError, StaleEpoch, Unavailable
from maru_core.host import PluginHost
from maru_core.pool_format import NO_KEY
from maru_core.protocol import CommitStatus, Presence, ReserveStatus
from tests.chaos.stamps import CHAIN, KEYS, difference, key_of, name_of, namespace, size_of, stamped, verified
from tests.chaos.tally import Tally

#: Allocations of one client that are open at a time, at most.
_OPEN = 3
#: A forked child lives so long, in seconds, whatever happens to its parent.
CHILD_LIFE = 6.0


@frozen
class Plan:
    """What one client does. Times in seconds, chances per operation.

    ``remote``: it cannot prove its death, like a client on another host. ``writes``: share of writing operations.
    """

    url: str
    folder: str
    number: int
    space: str
    writes: float
    seed: int
    request_timeout: float = 0.5
    stop_chance: float = 0.0
    fork_chance: float = 0.0
    remote: bool = False


def run(plan: Plan) -> None:
    """Work until SIGTERM, then close the handler."""
    folder = Path(plan.folder)
    tally = Tally(folder / "tallies" / str(plan.number), folder / "told")
    ending: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: ending.append(number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logs.setup("error")
    try:
        if plan.remote:
            ForkGuard.lock = lambda self, path: None  # type: ignore[method-assign]
        config = MaruConfig(server_url=plan.url, request_timeout=plan.request_timeout, connect_timeout=5)
        host = PluginHost.with_plugins({}, built_ins=True)
        with MaruHandler.connect(config, namespace(plan.space), host=host, name=f"chaos {plan.number}") as handler:
            client = Client(plan, handler, tally)
            while not ending:
                client.step()
            client.finish()
        tally.add("ended")
    except MaruError as error:
        tally.fault(error)


@define
class Client:
    """One program. Every step is one operation of some kind."""

    _plan: Plan
    _handler: MaruHandler
    _tally: Tally
    _chance: random.Random = field(init=False)
    _open: list[tuple[int, int, Allocation]] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        self._chance = random.Random(self._plan.seed)

    def step(self) -> None:
        """One operation; outages are waited out."""
        chance = self._chance
        acts: Sequence[Callable[[], None]]
        if chance.random() < self._plan.writes:
            acts = (self._write_chain, self._write_chain, self._store, self._allocate, self._allocate)
        else:
            acts = (self._read_chain, self._read_chain, self._retrieve, self._pending, self._look, self._delete)
        if chance.random() < self._plan.fork_chance:
            self._fork()
        try:
            chance.choice(acts)()
        except Unavailable:  # and StaleEpoch
            self._tally.add("away")
            time.sleep(0.01)
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not happen
            self._tally.fault(error)
            time.sleep(0.05)

    def finish(self) -> None:
        """Give back what is open; nothing that was read may have had another checksum."""
        damaged = self._handler._checks.checksum_mismatches
        if damaged:
            self._tally.tell("faults", f"{damaged} checksums did not match")
        for *_, allocation in self._open:
            allocation.abort()

    # -- choices ---------------------------------------------------------------------------------------------------

    def _chain(self) -> list[int]:
        """The head of some prefix; a few prefixes are much more popular than others."""
        chain = int(self._chance.paretovariate(0.6)) % (KEYS // CHAIN)
        return list(range(chain * CHAIN, chain * CHAIN + self._chance.randint(1, CHAIN)))

    def _keys(self, numbers: Sequence[int]) -> list[bytes]:
        return [key_of(self._plan.space, number) for number in numbers]

    def _nap(self, most: float = 0.02) -> None:
        if self._chance.random() < 0.05:
            time.sleep(self._chance.uniform(0, most))

    def _maybe_stop(self) -> None:
        """Stop in the middle of something; somebody else continues this process later."""
        if self._chance.random() < self._plan.stop_chance:
            self._tally.add("self_stops")
            os.kill(os.getpid(), signal.SIGSTOP)

    # -- writing ---------------------------------------------------------------------------------------------------

    def _fill(self, view: memoryview, number: int, weights: int) -> None:
        """Write in two halves, with whatever may happen in between."""
        data = stamped(self._plan.space, number, weights)
        half = len(data) // 2
        view[:half] = data[:half].data
        self._nap()
        self._maybe_stop()
        view[half:] = data[half:].data
        self._still_mine(view, number, weights)

    def _still_mine(self, view: memoryview, number: int, weights: int) -> None:
        problem = difference(view, self._plan.space, number, weights)
        if problem is not None:
            self._tally.tell("intruded", f"object {number} of {self._plan.space} while it was reserved: {problem}")

    def _write_chain(self) -> None:
        handler, tally = self._handler, self._tally
        numbers = self._chain()
        weights = handler.weights_epoch
        grants = handler.reserve(self._keys(numbers), [size_of(number) for number in numbers], NO_KEY)
        self._count_refusals(grants.statuses)
        written = []
        try:
            for index in grants.new:
                view = handler.view(grants.epoch, grants.entries[index], grants.lengths[index])
                self._fill(view, numbers[index], weights)
                written.append((index, view))
                if self._chance.random() < 0.02:
                    break
            self._nap()
            for index, view in written:
                self._still_mine(view, numbers[index], weights)
        except BaseException:
            handler.abort(grants)
            raise
        done = [index for index, _ in written]
        rest = [index for index in grants.new if index not in done]
        written.clear()
        if rest:
            handler.abort(grants, rest)
        statuses = handler.commit(grants, done)
        tally.add("stored", statuses.count(CommitStatus.OK))
        if CommitStatus.UNKNOWN in statuses:
            self._explain(weights, grants, [i for i, s in zip(done, statuses, strict=True) if s != CommitStatus.OK])

    def _count_refusals(self, statuses: bytes) -> None:
        self._tally.add("busy", statuses.count(ReserveStatus.BUSY))
        self._tally.add("no_room", statuses.count(ReserveStatus.NO_ROOM))
        if ReserveStatus.REFUSED in statuses:
            self._tally.add("refused", statuses.count(ReserveStatus.REFUSED))
            # Every length here is possible, so the weights are old; asking for a reset of old weights only tells.
            self._handler.reset()

    def _explain(self, weights: int, grants: Grants | None, indices: Sequence[int]) -> None:
        """A commit was refused: only a reset explains that, and then the weights are stale for good."""
        answer = self._handler.reserve([bytes(32)], 8, weights_epoch=weights)
        self._handler.abort(answer)
        if answer.statuses[0] != ReserveStatus.REFUSED:
            self._tally.tell("lost", f"{len(indices)} reservations ended without a reset: {grants} {list(indices)}")

    def _store(self) -> None:
        numbers = self._chain()
        weights = self._handler.weights_epoch
        data = [stamped(self._plan.space, number, weights).data for number in numbers]
        results = self._handler.batch_store([name_of(number) for number in numbers], data)
        self._tally.add("stored", results.count(StoreResult.STORED))
        if StoreResult.REFUSED in results:
            self._handler.reset()

    def _allocate(self) -> None:
        """Open an allocation and leave it open, or finish one that is."""
        if len(self._open) == _OPEN or (self._open and self._chance.random() < 0.5):
            number, weights, allocation = self._open.pop(self._chance.randrange(len(self._open)))
            try:
                self._still_mine(allocation.view, number, weights)
            finally:
                if self._chance.random() < 0.1:
                    allocation.abort()
                else:
                    result = allocation.commit()
                    self._tally.add("stored", result is StoreResult.STORED)
                    if result is StoreResult.REFUSED:
                        self._explain(weights, None, [number])
            return
        number = self._chance.choice(self._chain())
        weights = self._handler.weights_epoch
        allocation = self._handler.alloc(name_of(number), size_of(number))
        if allocation.refusal is not None:
            if allocation.refusal is StoreResult.REFUSED:
                self._handler.reset()
            return
        self._open.append((number, weights, allocation))
        self._fill(allocation.view, number, weights)

    # -- reading ---------------------------------------------------------------------------------------------------

    def _check(self, copy: bytes, verified: bool, number: int, weights: int) -> None:
        problem = difference(copy, self._plan.space, number, weights)
        if verified:
            self._tally.add("hits")
        if problem is not None:
            text = f"object {number} of {self._plan.space}, weights {weights}: {problem}"
            self._tally.tell("wrong" if verified else "moved", text)

    def _read_lease(self, lease: Lease, numbers: Sequence[int], weights: int) -> None:
        """Copy, check, wait, and check again: leased bytes stay, whether they are still visible or not."""
        handler = self._handler
        ready = [index for index, status in enumerate(lease.statuses) if status == Presence.READY]
        located = handler.adopt(lease.epoch, lease.entries, lease.generations, lease.lengths)
        views = [(index, located.view(index)) for index in ready]
        for _ in range(2):
            for index, view in views:
                copy = bytes(view)
                self._check(copy, verified(located, index), numbers[index], weights)
            self._nap(0.1)
            self._maybe_stop()

    def _read_chain(self) -> None:
        numbers = self._chain()
        weights = self._handler.weights_epoch
        lease = self._handler.acquire(self._keys(numbers), leading=self._chance.random() < 0.8)
        try:
            self._read_lease(lease, numbers, weights)
        finally:
            self._handler.release(lease)

    def _retrieve(self) -> None:
        numbers = self._chain()
        weights = self._handler.weights_epoch
        found = self._handler.batch_retrieve([name_of(number) for number in numbers])
        for number, item in zip(numbers, found, strict=True):
            if item is None:
                continue
            with suppress(StaleEpoch):
                # An array holds the lease for as long as it lives.
                array = np.frombuffer(item.view, dtype=np.uint8)
                copy = array.tobytes()
                sound = item.verify()
                item.close()
                self._check(copy, sound, number, weights)
                self._nap()
                self._check(array.tobytes(), False, number, weights)
                del array

    def _pending(self) -> None:
        numbers = self._chain()
        weights = self._handler.weights_epoch
        pending = self._handler.submit_acquire(self._keys(numbers), leading=True)
        for _ in range(self._chance.randint(0, 20)):
            lease = pending.poll(0.005)
            if lease is not None:
                try:
                    self._read_lease(lease, numbers, weights)
                finally:
                    self._handler.release(lease)
                return
        pending.cancel()
        self._tally.add("cancelled")

    def _look(self) -> None:
        numbers = self._chain()
        presences = self._handler.probe(self._keys(numbers))
        if len(presences) != len(numbers):
            raise AssertionError(f"{len(presences)} answers to {len(numbers)} keys")

    def _delete(self) -> None:
        if self._chance.random() < 0.2:
            numbers = self._chance.sample(self._chain(), 1)
            self._tally.add("deleted", self._handler.delete_keys(self._keys(numbers)).count(Presence.READY))

    # -- forks -----------------------------------------------------------------------------------------------------

    def _fork(self) -> None:
        """A child that lives on for a while, or ends at once in one of several ways, and never may do harm."""
        self._tally.add("forks")
        way = self._chance.randrange(3)
        child = os.fork()
        if child:
            return
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.alarm(int(CHILD_LIFE) + 2)
        try:
            if way == 0:
                self._handler.close()
            elif way == 1:
                self._child_uses_everything()
                time.sleep(CHILD_LIFE)
            for *_, allocation in self._open:
                with suppress(MaruError):
                    allocation.abort()
        finally:
            os._exit(0)

    def _child_uses_everything(self) -> None:
        for call in (
            lambda: self._handler.probe([NO_KEY]),
            lambda: self._handler.store("x", b"y"),
            self._handler.stats,
        ):
            try:
                call()
            except MaruError:
                continue
            self._tally.tell("faults", "a forked child could use its parent's handler")
