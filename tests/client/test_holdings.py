"""What a handler tells a server that came back, part by part."""

from __future__ import annotations

from array import array

import hypothesis.strategies as st
import pytest
from hypothesis import given

from maru_core.client.holdings import Holdings, Snapshot
from maru_core.errors import StaleEpoch
from maru_core.protocol import NO_ENTRY
from maru_core.server import requests

HELLO = [2, "client", [1, "h", "n"], b"\x90", 0]
U32 = st.integers(0, 2**32 - 1)
HELD = st.lists(st.tuples(st.one_of(U32, st.just(NO_ENTRY)), U32), max_size=20)


@given(st.dictionaries(U32, U32, max_size=30), st.dictionaries(st.integers(0, 2**64 - 1), HELD), st.integers(1, 9))
def test_the_parts_list_everything_once_and_a_server_takes_them(
    writing: dict[int, int], reading: dict[int, list[tuple[int, int]]], limit: int
) -> None:
    columns = {
        lease: (array("I", [e for e, _ in held]), array("I", [g for _, g in held])) for lease, held in reading.items()
    }
    parts = list(Snapshot(writing, columns).to_wire(5, 6, limit))
    wrote: list[tuple[int, int]] = []
    read: dict[int, list[tuple[int, int]]] = {}
    order: list[int] = []
    for number, part in enumerate(parts):
        resume = requests.hello([*HELLO, part]).resume
        assert resume is not None
        assert (resume.session, resume.attempt, resume.part) == (5, 6, number)
        assert resume.last is (number == len(parts) - 1)
        assert len(resume.entries) + len(resume.held) <= limit
        wrote += zip(resume.entries, resume.generations, strict=True)
        held = list(zip(resume.held, resume.held_generations, strict=True))
        for lease, size in zip(resume.leases, resume.sizes, strict=True):
            if not order or order[-1] != lease:
                order.append(lease)
            read.setdefault(lease, []).extend(held[:size])
            del held[:size]
        assert not held
    assert dict(wrote) == writing
    assert len(wrote) == len(writing)
    found = {lease: [item for item in held if item[0] != NO_ENTRY] for lease, held in reading.items()}
    assert read == {lease: held for lease, held in found.items() if held}
    assert len(order) == len(read), "the parts of a lease follow each other"


def test_nothing_is_added_between_two_servers() -> None:
    holdings = Holdings()
    holdings.open((1, 2), resumed=False)
    holdings.writes((1, 2), [3], [4])
    assert holdings.seal() == Snapshot({3: 4}, {})
    with pytest.raises(StaleEpoch):
        holdings.writes((1, 2), [5], [6])
    holdings.open((7, 2), resumed=True)
    assert holdings.seal() == Snapshot({3: 4}, {})
