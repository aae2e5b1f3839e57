"""Places of objects in mapped pools."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from maru_core.client.regions import Regions
from maru_core.contracts import PoolRequest, ReadExtent, Region
from maru_core.errors import ProtocolError, StaleEpoch
from maru_core.fakes import FakeBackend
from maru_core.host import PluginHost
from maru_core.plugin import hookimpl
from maru_core.pool_format import HEADER_SIZE
from maru_core.protocol import NO_ENTRY
from tests.budgets import examples

GRANULE = 4096


def two_pools() -> tuple[Regions, list[object]]:
    backend = FakeBackend()
    first = backend.create_pool(PoolRequest(0, 1 << 18, GRANULE, 0, None, "t0", True)).region.descriptor
    request = PoolRequest(1, 1 << 18, GRANULE, first.entry_count, None, "t1", True)
    second = backend.create_pool(request).region.descriptor
    regions = Regions([first, second], PluginHost.with_plugins({"fake": backend}), bytes(16))
    regions.map_all()
    return regions, [first, second]


@settings(deadline=None, max_examples=examples(60))
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


@pytest.mark.parametrize("lengths", [[GRANULE] * 4, [GRANULE] * 3 + [GRANULE - 1]])
def test_neighbours_by_number_in_two_pools_are_two_runs(lengths: list[int]) -> None:
    regions, (first, second) = two_pools()
    base = second.entry_base  # type: ignore[attr-defined]
    regions.publish(array("I", range(base - 2, base + 2)), lengths)
    above, below = (first.data_at(base - 2), 2 * GRANULE), (second.data_at(base), sum(lengths[2:]))  # type: ignore[attr-defined]
    assert regions.of(first).published == [above]  # type: ignore[attr-defined, arg-type]
    assert regions.of(second).published == [below]  # type: ignore[attr-defined, arg-type]


def test_a_view_never_leaves_its_pool() -> None:
    regions, (first, _) = two_pools()
    last = first.entry_count - 1  # type: ignore[attr-defined]
    assert len(regions.view(last, GRANULE)) == GRANULE
    for entry, length in ((last, GRANULE + 1), (10**6, 1), (0, -1)):
        with pytest.raises(ProtocolError):
            regions.view(entry, length)


@settings(deadline=None, max_examples=examples(60))
@given(
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 2)), max_size=6), st.integers(-1, 3 * GRANULE), st.booleans()
)
def test_many_places_are_those_that_one_by_one_are_found(
    wanted: list[tuple[int, int]], length: int, even: bool
) -> None:
    entries, lengths = [entry for entry, _ in wanted], [length + (0 if even else more) for _, more in wanted]
    regions, pools = two_pools()
    for pool in pools:
        buffer = regions.of(pool).buffer  # type: ignore[arg-type]
        buffer[:] = bytes(range(251)) * (len(buffer) // 251) + bytes(len(buffer) % 251)
    try:
        expected = [bytes(regions.room(*place)) for place in zip(entries, lengths, strict=True)]
    except ProtocolError:
        with pytest.raises(ProtocolError):
            regions.rooms(entries, lengths)
    else:
        found = regions.rooms(entries, lengths)
        assert [bytes(view) for view in found] == expected
        assert not any(view.readonly for view in found)


def test_after_close_nothing_is_handed_out() -> None:
    regions, _ = two_pools()
    regions.close()
    regions.close()
    with pytest.raises(StaleEpoch):
        regions.view(0, 1)
    with pytest.raises(StaleEpoch):
        regions.rooms([0, 1], [1, 1])
    with pytest.raises(StaleEpoch):
        regions.publish([0], [1])
    assert regions.verify([0], [1], [1]) == [False]


class Reads:
    """A device hint that notes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int, list[tuple[int, int]]]] = []

    @hookimpl
    def maru_before_read(self, region: Region, extents: Sequence[ReadExtent]) -> None:
        self.told.append(("before", region.descriptor.pool, [(item.offset, item.length) for item in extents]))

    @hookimpl
    def maru_after_read(self, region: Region, extents: Sequence[ReadExtent]) -> None:
        self.told.append(("after", region.descriptor.pool, [(item.offset, item.length) for item in extents]))


def test_a_read_is_announced_to_device_hints_and_its_end_too() -> None:
    """Per pool, sorted by offset, also when the copy fails."""
    _, (first, second) = two_pools()
    reads = Reads()
    regions = Regions([first, second], PluginHost.with_plugins({"reads": reads}), bytes(16))
    regions.of = lambda pool: SimpleNamespace(descriptor=pool)  # type: ignore[assignment, method-assign, return-value]
    entries = [first.entry_count + 1, 4, 2]  # type: ignore[attr-defined]

    def torn_copy() -> None:
        with regions.reading(entries, [10, 20, 30]):
            assert [item[:2] for item in reads.told] == [("before", 0), ("before", 1)]
            raise OSError("torn")

    with pytest.raises(OSError, match="torn"):
        torn_copy()
    at = first.data_offset  # type: ignore[attr-defined]
    assert reads.told[0][2] == [(at + 2 * GRANULE, 30), (at + 4 * GRANULE, 20)]
    assert reads.told[1][2] == [(second.data_offset + GRANULE, 10)]  # type: ignore[attr-defined]
    assert [item[:2] for item in reads.told[2:]] == [("after", 0), ("after", 1)]
    assert [item[2] for item in reads.told[2:]] == [item[2] for item in reads.told[:2]]


def test_without_a_hint_that_hears_of_reads_nothing_is_put_together() -> None:
    _, pools = two_pools()
    host = PluginHost.with_plugins({})
    regions = Regions(pools, host, bytes(16))
    regions.of = lambda pool: pytest.fail("nobody asked")  # type: ignore[assignment, method-assign, return-value]
    assert not host.hears_reads
    with regions.reading([2, 4], [10, 20]):
        pass
    assert PluginHost.with_plugins({"reads": Reads()}).hears_reads


def joined(ranges: list[tuple[int, int]]) -> set[int]:
    return {at for offset, length in ranges for at in range(offset, offset + length)}


@example([(entry, 100) for entry in range(50, 75)])
@settings(deadline=None, max_examples=examples(60))
@given(
    st.one_of(
        st.lists(st.tuples(st.integers(0, 110), st.integers(1, 2 * GRANULE)), max_size=12, unique_by=lambda i: i[0]),
        # A batch of equal objects, which may go on in the second pool.
        st.builds(
            lambda first, step, count, length: [(first + step * number, length) for number in range(count)],
            st.integers(0, 100),
            st.integers(1, 12),
            st.integers(1, 30),
            st.integers(1, GRANULE),
        ),
    )
)
def test_no_barrier_joins_what_lies_in_different_pools(objects: list[tuple[int, int]]) -> None:
    """Every object's bytes and header are acquired, and no range leaves the part of the pool that it is for."""
    regions, pools = two_pools()
    first, second = pools
    total = first.entry_count + second.entry_count  # type: ignore[attr-defined]
    objects = [(entry, min(length, GRANULE)) for entry, length in objects if entry < total]
    entries, lengths = array("I", [entry for entry, _ in objects]), [length for _, length in objects]
    regions.acquire(entries, lengths)
    data = [regions.of(pool).acquired[:] for pool in pools]  # type: ignore[attr-defined, arg-type]
    for pool in pools:
        regions.of(pool).acquired.clear()  # type: ignore[attr-defined, arg-type]
    regions.verify(entries, [1] * len(entries), lengths)
    headers = [regions.of(pool).acquired for pool in pools]  # type: ignore[attr-defined, arg-type]
    for pool, found, tops in zip(pools, data, headers, strict=True):
        inside = [(e, n) for e, n in objects if pool.entry_base <= e < pool.entry_base + pool.entry_count]  # type: ignore[attr-defined]
        assert all(pool.data_offset <= at and at + n <= pool.size for at, n in found)  # type: ignore[attr-defined]
        assert joined(found) >= {pool.data_at(e) + i for e, n in inside for i in (0, n - 1)}  # type: ignore[attr-defined]
        end = pool.table_offset + pool.entry_count * HEADER_SIZE  # type: ignore[attr-defined]
        assert all(pool.table_offset <= at and at + n <= end for at, n in tops)  # type: ignore[attr-defined]
        assert joined(tops) >= {pool.header_at(e) + i for e, _ in inside for i in range(HEADER_SIZE)}  # type: ignore[attr-defined]
        assert len(tops) <= len(inside)


def test_keys_that_were_not_found_are_left_out() -> None:
    regions, (first, _) = two_pools()
    regions.acquire(array("I", [3, NO_ENTRY, 4]), [GRANULE, 0, 100])
    start = first.data_at(3)  # type: ignore[attr-defined]
    assert regions.of(first).acquired == [(start, GRANULE + 100)]  # type: ignore[attr-defined, arg-type]


def test_only_what_is_in_the_way_is_let_go_and_it_is_mapped_again_when_used(monkeypatch: pytest.MonkeyPatch) -> None:
    regions, (first, second) = two_pools()
    stays, goes = regions.of(first), regions.of(second)  # type: ignore[arg-type]
    goes.in_place = True  # type: ignore[attr-defined]
    assert not regions.was_let_go
    entry = first.entry_count  # type: ignore[attr-defined]
    regions.let_go()
    assert regions.was_let_go
    assert (stays.closed, goes.closed) == (False, True)  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        # A call that had found the region before it was let go.
        patch.setattr(regions, "of", lambda pool: goes)
        with pytest.raises(StaleEpoch, match="unmapped"):
            regions.view(entry, 1)
        assert regions.verify([entry], [1], [1]) == [False]
    assert len(regions.view(entry, 1)) == 1
    assert regions.of(second) is not goes  # type: ignore[arg-type]
    assert regions.of(first) is stays  # type: ignore[arg-type]
    assert not regions.was_let_go
    regions.close()
    regions.let_go()


@pytest.mark.parametrize("hosts", [True, False])
def test_caches_are_only_minded_where_hosts_share_the_pool(hosts: bool) -> None:
    backend = FakeBackend()
    request = PoolRequest(0, 1 << 18, GRANULE, 0, None, "t0", shared_by_hosts=hosts)
    pool = backend.create_pool(request).region.descriptor
    regions = Regions([pool], PluginHost.with_plugins({"fake": backend}), bytes(16))
    regions.settle([2], [100])  # not mapped: nothing can have been written
    assert regions._mapped == {}
    regions.map_all()
    regions.settle([2], [100])
    assert regions.of(pool).published == ([(pool.data_at(2), 100)] if hosts else [])  # type: ignore[attr-defined]
    regions.view(2, 100)
    regions.verify([2], [1], [100])
    assert len(regions.of(pool).acquired) == (2 if hosts else 0)  # type: ignore[attr-defined]
    for nonsense in (10**6, 1 << 40, -1, "x"):
        regions.settle([nonsense], [1])  # type: ignore[list-item]
    regions.settle_reserved([10**6])
    regions.close()
    regions.settle([2], [100])
    regions.settle_reserved([2])


def test_a_registrar_hears_of_pools_while_they_are_mapped() -> None:
    told: list[tuple[str, int]] = []

    class Registrar:
        def region_mapped(self, region: Region) -> None:
            told.append(("mapped", region.buffer.nbytes))

        def region_unmapping(self, region: Region) -> None:
            told.append(("unmapping", region.buffer.nbytes))

        def stats(self) -> dict[str, int]:
            return {}

    backend = FakeBackend()
    requests = [PoolRequest(number, 1 << 18, GRANULE, number * 1000, None, f"t{number}") for number in range(2)]
    pools = [backend.create_pool(request).region.descriptor for request in requests]
    regions = Regions(pools, PluginHost.with_plugins({"fake": backend}), bytes(16), Registrar())
    assert told == []
    regions.map_all()
    regions.map_all()
    sizes = [pool.size for pool in pools]
    assert told == [("mapped", size) for size in sizes]
    regions.close()
    regions.close()
    assert told[2:] == [("unmapping", size) for size in sizes]
