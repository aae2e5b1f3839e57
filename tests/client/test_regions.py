"""Places of objects in mapped pools."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maru_core.client.regions import Regions
from maru_core.contracts import PoolRequest
from maru_core.errors import ProtocolError, StaleEpoch
from maru_core.fakes import FakeBackend
from maru_core.host import PluginHost

GRANULE = 4096


def two_pools() -> tuple[Regions, list[object]]:
    backend = FakeBackend()
    first = backend.create_pool(PoolRequest(0, 1 << 18, GRANULE, 0, None, "t0")).region.descriptor
    second = backend.create_pool(PoolRequest(1, 1 << 18, GRANULE, first.entry_count, None, "t1")).region.descriptor
    regions = Regions([first, second], PluginHost.with_plugins({"fake": backend}), bytes(16))
    regions.map_all()
    return regions, [first, second]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 110), st.integers(1, 3 * GRANULE)), max_size=12, unique_by=lambda item: item[0])
)
def test_exactly_the_bytes_of_the_objects_are_published(objects: list[tuple[int, int]]) -> None:
    """Whatever is merged: every object's bytes are covered, and nothing of an entry that is not in the list."""
    regions, (first, second) = two_pools()
    total = first.entry_count + second.entry_count  # type: ignore[attr-defined]
    kept, taken = [], set()
    for entry, length in objects:
        pages = set(range(entry, entry + -(-length // GRANULE)))
        inside = max(pages) < (first.entry_count if entry < first.entry_count else total)  # type: ignore[attr-defined]
        if inside and not pages & taken:
            kept.append((entry, length))
            taken |= pages
    regions.publish(array("I", [entry for entry, _ in kept]), [length for _, length in kept])
    covered = {0: bytearray(1 << 18), 1: bytearray(1 << 18)}
    for number, pool in enumerate((first, second)):
        for offset, length in regions.of(pool).published:  # type: ignore[attr-defined, arg-type]
            covered[number][offset : offset + length] = b"\1" * length
    for entry in range(total):
        pool = first if entry < first.entry_count else second  # type: ignore[attr-defined]
        offset = pool.data_at(entry)  # type: ignore[attr-defined]
        page = covered[pool.pool][offset : offset + GRANULE]  # type: ignore[attr-defined]
        length = next((length for start, length in kept if start == entry), 0)
        assert page[: min(length, GRANULE)] == b"\1" * min(length, GRANULE)
        if entry not in taken:
            assert not any(page)


def test_equal_objects_in_a_row_are_published_at_once() -> None:
    regions, (first, _) = two_pools()
    regions.publish(array("I", [3, 5, 7]), [5000, 5000, 5000])
    start = first.data_at(3)  # type: ignore[attr-defined]
    assert regions.of(first).published == [(start, 4 * GRANULE + 5000)]  # type: ignore[attr-defined, arg-type]


def test_a_view_never_leaves_its_pool() -> None:
    regions, (first, _) = two_pools()
    last = first.entry_count - 1  # type: ignore[attr-defined]
    assert len(regions.view(last, GRANULE)) == GRANULE
    for entry, length in ((last, GRANULE + 1), (10**6, 1), (0, -1)):
        with pytest.raises(ProtocolError):
            regions.view(entry, length)


def test_after_close_nothing_is_handed_out() -> None:
    regions, _ = two_pools()
    regions.close()
    regions.close()
    with pytest.raises(StaleEpoch):
        regions.view(0, 1)
    with pytest.raises(StaleEpoch):
        regions.publish([0], [1])
    assert regions.verify([0], [1], [1]) == [False]
