"""Stores that the server works on in several slices, in a pool that is full."""

from __future__ import annotations

import pytest

from maru_core.client import MaruHandler
from maru_core.pool_format import KEY_SIZE
from maru_core.protocol import CommitStatus, ReserveStatus
from maru_core.server.steps import SLICE
from tests.client.real import Folder

LENGTH = 4096


def chain(tag: int, count: int) -> list[bytes]:
    return [bytes([tag]) + place.to_bytes(KEY_SIZE - 1, "big") for place in range(count)]


def put(handler: MaruHandler, keys: list[bytes], as_chain: bool, length: int | list[int] = LENGTH) -> bytes:
    """Store a prefix; what became of each object."""
    parents = bytes(KEY_SIZE) if as_chain else [bytes(KEY_SIZE), *keys[:-1]]
    grants = handler.reserve(keys, length, parents)
    assert set(handler.commit(grants, grants.new)) <= {CommitStatus.OK}
    return grants.statuses


@pytest.mark.parametrize("as_chain", [True, False], ids=["chain", "parents"])
@pytest.mark.parametrize("mixed", [False, True], ids=["one length", "lengths"])
def test_what_comes_behind_a_gap_takes_no_room_from_what_comes_before_it(
    folder: Folder, as_chain: bool, mixed: bool
) -> None:
    """Half of the pool is leased, and the prompt is longer than the rest: storing it again shortens nothing."""
    reader, handler = folder.connect(), folder.connect()
    put(reader, chain(1, 2 * SLICE), as_chain=True)
    assert reader.acquire(chain(1, 2 * SLICE), leading=True).leading > 400
    keys = chain(2, 3 * SLICE)
    length = [LENGTH - place % 2 for place in range(len(keys))] if mixed else LENGTH
    for _ in range(3):
        statuses = put(handler, keys, as_chain, length)
        kept = statuses.index(ReserveStatus.NO_ROOM)
        assert kept > 300
        assert set(statuses[kept:]) == {ReserveStatus.NO_ROOM}
        # The server may make a little room ahead, from the end.
        assert handler.probe(keys).rstrip(b"\0") in [b"\1" * left for left in range(kept - 32, kept + 1)]
    counters = handler.server_stats()["counters"]
    assert counters["internal_errors"] == 0
    assert counters["skipped_no_room"] >= 3 * (len(keys) - kept)


def test_another_prefix_behind_a_gap_is_asked_for(folder: Folder) -> None:
    """Only what follows an object without room is left out."""
    handler = folder.connect()
    first, second = chain(1, SLICE + SLICE // 2), chain(2, 10)
    put(handler, second, as_chain=True)
    assert handler.acquire(second, leading=True).leading == len(second)
    grants = handler.reserve(chain(3, 700), LENGTH, bytes(KEY_SIZE))
    keys = [*first, *second]
    parents = [bytes(KEY_SIZE), *first[:-1], bytes(KEY_SIZE), *second[:-1]]
    asked = handler.reserve(keys, LENGTH, parents)
    kept = asked.statuses.index(ReserveStatus.NO_ROOM)
    assert kept < SLICE
    assert set(asked.statuses[kept : len(first)]) == {ReserveStatus.NO_ROOM}
    assert set(asked.statuses[len(first) :]) == {ReserveStatus.PRESENT}
    handler.abort(asked)
    handler.abort(grants)
