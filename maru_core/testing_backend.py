"""What every storage backend must do. Inherit, give the two fixtures, and pytest runs it over your backend.

::

    from maru_core.testing_backend import BackendContract

    class TestAcme(BackendContract):
        @pytest.fixture
        def backend(self): return AcmeBackend()

        @pytest.fixture
        def ask(self, tmp_path): return PoolRequest(0, 1 << 20, 4096, 0, str(tmp_path), "owner")
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import pytest
from attrs import evolve

from maru_core.contracts import Pool, PoolRequest, PoolWish, Region, StorageBackend
from maru_core.errors import BackendError
from maru_core.pool_format import HEADER_SIZE, SUPERBLOCK_SIZE, unpack_superblock
from maru_core.protocol import PoolDescriptor

Create = Callable[..., Pool]
Map = Callable[[PoolDescriptor], Region]


class BackendContract:
    """Tests of create_pool and map_region, of Pool and of Region.

    ``one_place``: what ``ask`` names holds one pool at a time, like a device, whoever asks for it.
    ``finds_moved``: a pool is found by its identity, too, where another host has another path for it.
    """

    one_place = False
    finds_moved = False

    @pytest.fixture
    def backend(self) -> StorageBackend:
        """The backend under test."""
        raise NotImplementedError

    @pytest.fixture
    def ask(self) -> PoolRequest:
        """A request for a pool of 1 to 64 MiB, pool 0, in a private place."""
        raise NotImplementedError

    @pytest.fixture
    def create(self, backend: StorageBackend, ask: PoolRequest) -> Iterator[Create]:
        """``create(**changes)``: a pool as in ``ask``, destroyed after the test."""
        made: list[Pool] = []

        def make(**changes: Any) -> Pool:
            pool = backend.create_pool(evolve(ask, **changes))
            made.append(pool)
            return pool

        yield make
        for pool in made:
            pool.destroy()

    @pytest.fixture
    def remap(self, backend: StorageBackend) -> Iterator[Map]:
        """``remap(descriptor)``: a client's mapping, closed after the test."""
        made: list[Region] = []

        def make(descriptor: PoolDescriptor) -> Region:
            region = backend.map_region(descriptor)
            made.append(region)
            return region

        yield make
        for region in made:
            region.close()

    def test_its_plan_is_what_it_makes(self, backend: StorageBackend, ask: PoolRequest, create: Create) -> None:
        def others(name: str) -> StorageBackend:
            assert name == backend.name
            return backend

        (plan,) = backend.plan_pools(PoolWish(backend.name, ask.size, ask.path), others)
        assert plan.backend == backend.name
        assert ask.size / 1.05 <= plan.size <= ask.size
        assert create(size=plan.size, path=plan.path).region.descriptor.backend == backend.name

    def test_a_new_pool_is_as_large_as_asked_and_empty(self, create: Create, ask: PoolRequest) -> None:
        region = create(entry_base=1000).region
        d = region.descriptor
        assert ask.size / 1.05 <= d.size <= ask.size * 1.05
        assert len(region.buffer) == d.size
        assert not region.buffer.readonly
        assert (d.pool, d.granule, d.entry_base) == (ask.pool, ask.granule, 1000)
        assert d.table_offset >= SUPERBLOCK_SIZE
        assert d.data_offset % ask.granule == 0
        assert d.data_at(d.entry_base + d.entry_count) <= d.size
        table = region.buffer[d.table_offset : d.table_offset + d.entry_count * HEADER_SIZE]
        assert not any(table)
        assert d.table_offset + len(table) <= d.data_offset

    def test_the_superblock_says_what_the_descriptor_says(self, create: Create, backend: StorageBackend) -> None:
        region = create().region
        d = region.descriptor
        block = unpack_superblock(region.buffer)
        assert d.backend == backend.name
        assert (block.identity, block.granule, block.entry_count) == (d.identity, d.granule, d.entry_count)
        assert (block.table_offset, block.data_offset) == (d.table_offset, d.data_offset)
        assert len(d.identity) == 16
        assert any(d.identity)

    def test_the_descriptor_survives_the_wire(self, create: Create) -> None:
        d = create().region.descriptor
        assert PoolDescriptor.from_wire(msgpack.unpackb(msgpack.packb(d.to_wire()))) == d

    def test_every_mapping_shows_the_same_bytes(self, create: Create, remap: Map) -> None:
        pool = create()
        d = pool.region.descriptor
        writer, reader = remap(d), remap(d)
        last = d.data_at(d.entry_base + d.entry_count) - 4
        for offset, data in ((d.data_offset, b"head"), (last, b"tail")):
            writer.buffer[offset : offset + 4] = data
            writer.publish(offset, 4)
            reader.acquire(offset, 4)
            assert bytes(reader.buffer[offset : offset + 4]) == data
            assert bytes(pool.region.buffer[offset : offset + 4]) == data
        assert reader.descriptor == d

    @pytest.mark.parametrize(("offset", "length"), [(0, 1 << 40), (5000, 3), (1 << 40, 10), (-5, 10), (0, 0), (7, -1)])
    def test_populating_changes_nothing_and_never_raises(
        self, create: Create, backend: StorageBackend, offset: int, length: int
    ) -> None:
        pool = create()
        pool.region.buffer[-4:] = b"tail"
        region = backend.map_region(pool.region.descriptor)
        region.populate(offset, length)
        assert bytes(region.buffer[-4:]) == b"tail"
        region.close()
        region.populate(offset, length)

    @pytest.mark.parametrize("change", ["identity", "size", "granule", "entry_count", "data_offset"])
    def test_a_pool_that_is_not_the_one_described_is_not_mapped(
        self, create: Create, backend: StorageBackend, change: str
    ) -> None:
        d = create().region.descriptor
        other: Any = {
            "identity": bytes(16),
            "size": d.size + 4096,
            "granule": d.granule // 2,
            "entry_count": d.entry_count - 1,
            "data_offset": d.data_offset - HEADER_SIZE,
        }[change]
        with pytest.raises(BackendError):
            backend.map_region(evolve(d, **{change: other}))

    @pytest.mark.parametrize(
        "change",
        [
            {"size": 0},
            {"size": -1},
            {"granule": 0},
            {"entry_count": 2**40},
            {"table_offset": 0},
            {"data_offset": 2**62},
            {"entry_base": -1},
            {"location": "/nowhere/at/all"},
        ],
        ids=str,
    )
    def test_an_impossible_descriptor_is_refused(
        self, create: Create, backend: StorageBackend, change: dict[str, Any]
    ) -> None:
        d = create().region.descriptor
        if self.finds_moved and "location" in change:
            backend.map_region(evolve(d, **change)).close()
            change = {**change, "identity": bytes(16)}
        with pytest.raises(BackendError):
            backend.map_region(evolve(d, **change))

    def test_a_destroyed_pool_cannot_be_mapped(self, create: Create, backend: StorageBackend) -> None:
        pool = create()
        d = pool.region.descriptor
        pool.destroy()
        pool.destroy()
        with pytest.raises(BackendError):
            backend.map_region(d)

    def test_a_pool_made_anew_is_another(self, create: Create, backend: StorageBackend) -> None:
        first = create()
        old = first.region.descriptor
        first.destroy()
        new = create().region.descriptor
        assert new.identity != old.identity
        with pytest.raises(BackendError):
            backend.map_region(old)
        backend.map_region(new).close()

    def test_a_pool_in_use_is_not_made_again(self, create: Create) -> None:
        pool = create()
        with pytest.raises(BackendError, match="in use"):
            create()
        assert unpack_superblock(pool.region.buffer).identity == pool.region.descriptor.identity

    def test_pools_are_apart(self, create: Create) -> None:
        if self.one_place:
            pool = create()
            for change in ({"pool": 1}, {"owner": "another"}):
                with pytest.raises(BackendError, match="in use"):
                    create(**change)
            assert unpack_superblock(pool.region.buffer).identity == pool.region.descriptor.identity
            return
        pools = [create(), create(pool=1), create(owner="another")]
        d = pools[0].region.descriptor
        for number, pool in enumerate(pools, 1):
            pool.region.buffer[d.data_offset] = number
        assert [pool.region.buffer[d.data_offset] for pool in pools] == [1, 2, 3]
        assert len({pool.region.descriptor.identity for pool in pools}) == 3

    def test_a_pool_that_hosts_share_says_so_or_is_refused(
        self, backend: StorageBackend, ask: PoolRequest, create: Create
    ) -> None:
        if getattr(backend, "one_host", False):
            with pytest.raises(BackendError, match="maru_visibility"):
                create(shared_by_hosts=True)
        else:
            assert create(shared_by_hosts=True).region.descriptor.flush
        assert not getattr(backend, "one_host", False) or not create().region.descriptor.flush

    def test_a_closed_region_shows_nothing_new(self, create: Create, backend: StorageBackend) -> None:
        region = backend.map_region(create().region.descriptor)
        region.close()
        region.close()
        with pytest.raises(BackendError, match="closed"):
            region.buffer  # noqa: B018 - the property raises

    def test_memory_stays_while_a_view_shows_it(self, create: Create, backend: StorageBackend) -> None:
        pool = create()
        d = pool.region.descriptor
        region = backend.map_region(d)
        part = region.buffer[d.data_offset : d.data_offset + 4]
        part[:] = b"seen"
        region.close()
        pool.destroy()
        del region
        gc.collect()
        assert bytes(part) == b"seen"
        part[:] = b"more"
        assert bytes(part) == b"more"

    def test_a_pool_that_cannot_hold_a_granule_is_refused(self, create: Create) -> None:
        with pytest.raises(BackendError, match="cannot hold one granule"):
            create(size=8192, granule=65536)

    def test_more_than_there_is_is_refused_with_both_sizes(self, create: Create) -> None:
        with pytest.raises(BackendError, match=rf"{1 << 52} bytes .*asked for, \d+ bytes .*there"):
            create(size=1 << 52)
        create()

    def test_a_pool_that_was_left_is_taken_over_with_what_is_in_it(
        self, backend: StorageBackend, ask: PoolRequest, create: Create, remap: Map
    ) -> None:
        """``leave``, or a killed server, leaves memory and superblock as they are."""
        pool = create()
        descriptor = pool.region.descriptor
        pool.region.buffer[descriptor.table_offset] = 7
        client = remap(descriptor)
        client.buffer[descriptor.data_offset : descriptor.data_offset + 4] = b"kept"
        assert backend.adopt_pool(evolve(ask, owner="somebody-else")) is None
        pool.leave()
        pool.leave()
        changes: tuple[dict[str, Any], ...] = ({"size": ask.size * 2}, {"granule": ask.granule * 2}, {"pool": 1})
        for change in changes:
            assert backend.adopt_pool(evolve(ask, **change)) is None, change
        again = backend.adopt_pool(ask)
        assert again is not None
        assert again.region.descriptor == descriptor, "the same identity: clients go on with their mapping"
        assert again.region.buffer[descriptor.table_offset] == 7
        client.buffer[descriptor.data_offset : descriptor.data_offset + 4] = b"late"
        assert bytes(again.region.buffer[descriptor.data_offset : descriptor.data_offset + 4]) == b"late"
        again.destroy()
        assert backend.adopt_pool(ask) is None
