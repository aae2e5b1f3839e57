"""A real server on a real socket."""

from __future__ import annotations

import pytest

from maru_core.pool_format import State, unpack_header
from maru_core.protocol import Op
from tests.server.fakes import FileRegion
from tests.server.raw import key, keys

pytestmark = pytest.mark.slow


def test_an_object_is_stored_found_and_leased(start_server, connect):
    server = start_server()
    writer, reader = connect(server).hello(), connect(server).hello()
    statuses, entries, generations = writer.reserve(keys(0, 3))
    assert statuses == b"\0\0\0"
    region = FileRegion(writer.pools[0])
    at = writer.pools[0].header_at(entries[0])
    header = unpack_header(region.buffer[at : at + 128])
    assert (header.state, header.key, header.session) == (State.RESERVED, key(0), writer.session)
    assert reader.probe(keys(0, 3)) == b"\2\2\2"
    assert writer.commit(entries, generations) == b"\0\0\0"
    header = unpack_header(region.buffer[at : at + 128])
    assert (header.state, header.generation) == (State.READY, generations[0])
    lease, found, where = reader.acquire(keys(0, 4))
    assert found == b"\1\1\1\0"
    assert where[:3] == entries
    assert reader.call(Op.RELEASE, lease.to_bytes(8, "little")) == [b"\0"]
    assert reader.call(Op.BYE) == []
    region.close()
