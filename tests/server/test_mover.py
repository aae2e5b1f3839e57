"""Bytes on their way from pool to pool, on a thread of their own."""

from __future__ import annotations

import threading
import time

import pytest
from attrs import define, field

from maru_core.protocol.messages import PoolDescriptor
from maru_core.server import mover as module
from maru_core.server.mover import SLICE, Mover
from maru_core.server.moves import Move
from tests.server.raw import key
from tests.waiting import NEVER


@define
class Memory:
    """A region of plain memory that notes when somebody publishes or acquires."""

    number: int
    buffer: memoryview
    calls: list[tuple[str, int, int, int, bytes]]
    fault: Exception | None = None
    gate: threading.Event = field(factory=threading.Event)

    @property
    def descriptor(self) -> PoolDescriptor:
        return PoolDescriptor(self.number, "memory", "", b"", len(self.buffer), 100, 0, 1, 0, 0)

    def publish(self, offset: int, length: int) -> None:
        self.calls.append(("publish", self.number, offset, length, bytes(self.buffer[offset : offset + length])))

    def acquire(self, offset: int, length: int) -> None:
        assert self.gate.wait(NEVER)
        self.calls.append(("acquire", self.number, offset, length, b""))
        if self.fault is not None:
            raise self.fault

    def populate(self, offset: int, length: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self.buffer.release()


def memories(size: int) -> list[Memory]:
    calls: list[tuple[str, int, int, int, bytes]] = []
    found = [Memory(number, memoryview(bytearray(size)), calls) for number in range(2)]
    for memory in found:
        memory.gate.set()
    return found


def a_move(source: int, target: int, length: int) -> Move:
    return Move(1, 2, 0, 1, source, target, length, 1, 1)


def wait_for(mover: Mover) -> tuple[Move, bool]:
    end = time.monotonic() + NEVER
    while (over := mover.finished()) is None:
        assert time.monotonic() < end
        time.sleep(0.001)
    return over


@pytest.fixture
def upper_and_lower():
    yield (pair := memories(3 * SLICE + 4096))
    for memory in pair:
        memory.close()


def stamp(memory: Memory) -> bytes:
    """Every 32 bytes say where they are."""
    bytes_ = b"".join(key(at) for at in range(len(memory.buffer) // 32))
    memory.buffer[:] = bytes_
    return bytes_


def test_every_byte_gets_there_and_no_other(upper_and_lower):
    upper, lower = upper_and_lower
    before = stamp(upper)
    mover = Mover(upper_and_lower)
    length = 2 * SLICE + 321
    move = a_move(640, 4096, length)
    mover.begin(move)
    assert mover.busy
    assert wait_for(mover) == (move, True)
    assert not mover.busy
    assert mover.finished() is None
    mover.close()
    assert lower.buffer[4096 : 4096 + length] == before[640 : 640 + length]
    assert not any(lower.buffer[:4096])
    assert not any(lower.buffer[4096 + length :])
    assert upper.buffer == before
    assert upper.calls == [
        ("acquire", 0, 640, length, b""),
        ("publish", 1, 4096, length, before[640 : 640 + length]),
    ], "it is fetched before, and shown to other hosts when all of it is there"


def test_moves_end_in_the_order_in_which_they_began(upper_and_lower):
    stamp(upper_and_lower[0])
    mover = Mover(upper_and_lower)
    begun = [a_move(at * 100, at * 200, 50 + at) for at in range(20)]
    for move in begun:
        mover.begin(move)
    assert [wait_for(mover) for _ in begun] == [(move, True) for move in begun]
    mover.close()


@pytest.mark.parametrize("where", [(3 * SLICE + 4000, 0), (0, 3 * SLICE + 4000), (-1, 0), (0, -1)])
def test_nothing_outside_of_a_pool_is_touched(upper_and_lower, where):
    upper, lower = upper_and_lower
    stamp(upper)
    mover = Mover(upper_and_lower)
    mover.begin(a_move(*where, 97))
    assert wait_for(mover)[1] is False
    mover.close()
    assert not any(lower.buffer)


def test_a_fault_costs_one_move(upper_and_lower):
    upper, _ = upper_and_lower
    stamp(upper)
    mover = Mover(upper_and_lower)
    upper.fault = OSError("the device is gone")
    mover.begin(a_move(0, 0, 100))
    assert wait_for(mover)[1] is False
    upper.fault = None
    mover.begin(a_move(0, 0, 100))
    assert wait_for(mover)[1] is True
    mover.close()


def test_the_end_does_not_wait_for_what_is_left(upper_and_lower, monkeypatch):
    upper, lower = upper_and_lower
    stamp(upper)
    copied = threading.Event()
    copy = module._copy_bytes

    def slow(*args):
        copied.set()
        time.sleep(0.05)
        copy(*args)

    monkeypatch.setattr(module, "_copy_bytes", slow)
    mover = Mover(upper_and_lower)
    for _ in range(100):
        mover.begin(a_move(0, 0, 3 * SLICE))
    assert copied.wait(NEVER)
    begin = time.monotonic()
    mover.close()
    assert time.monotonic() - begin < 10, "all of it takes twenty"
    assert not any(lower.buffer[2 * SLICE :])


def test_a_closed_mover_lets_the_pools_go(upper_and_lower):
    stamp(upper_and_lower[0])
    mover = Mover(upper_and_lower)
    mover.begin(a_move(0, 0, SLICE + 1))
    wait_for(mover)
    mover.close()
    for memory in upper_and_lower:
        memory.close()  # BufferError while anybody has a view of it
