"""The bytes of stored objects and of their headers, for tests that damage them behind everybody's back."""

from __future__ import annotations

from typing import Any

from attrs import evolve, frozen

from maru_core.client import MaruHandler
from maru_core.pool_format import HEADER_SIZE, Header, pack_header, unpack_header


@frozen
class Stored:
    """One stored object as it lies in the pool. Holds no lease."""

    payload: memoryview
    raw_header: memoryview

    @classmethod
    def of(cls, handler: MaruHandler, key: bytes) -> Stored:
        """Where the object of a raw 32-byte key lies."""
        lease = handler.acquire([key], leading=True)
        assert lease.leading == 1
        session = handler._link.up()
        pool = session.pools[0]
        offset = pool.header_at(lease.entries[0])
        raw = session.regions.of(pool).buffer[offset : offset + HEADER_SIZE]
        payload = handler.view(lease.epoch, lease.entries[0], lease.lengths[0])
        handler.release(lease)
        return cls(payload, raw)

    @property
    def header(self) -> Header:
        found = unpack_header(self.raw_header)
        assert found is not None
        return found

    def change(self, **fields: Any) -> None:
        """Another header whose CRC holds."""
        self.raw_header[:] = pack_header(evolve(self.header, **fields))


def flip(where: memoryview, position: int, bits: int) -> None:
    """Change one byte."""
    where[position] ^= bits


def swap(first: memoryview, second: memoryview) -> None:
    """Exchange two stretches of equal length."""
    first[:], second[:] = bytes(second), bytes(first)
