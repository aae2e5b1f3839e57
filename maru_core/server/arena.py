"""One pool as the directory sees it: free granules, eviction order, headers, and what they add up to."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from attrs import define, field

from maru_core.contracts import PolicyFactory
from maru_core.pool_format import HEADER_SIZE
from maru_core.protocol.messages import PoolDescriptor
from maru_core.server.allocator import Allocator
from maru_core.server.eviction import least_recently_used
from maru_core.server.headers import HeaderTable
from maru_core.server.tenants import Tenants


@define(eq=False)
class Arena:
    """Entries ``base .. end-1``. All amounts in granules; ``reserved + used + free.free == count`` after every call."""

    number: int
    descriptor: PoolDescriptor
    free: Allocator
    #: Order of eviction.
    tenants: Tenants
    headers: HeaderTable
    base: int
    end: int
    granule: int
    reserved: int = 0
    #: READY objects, and RETIRING ones that somebody still reads.
    used: int = 0
    #: The share of ``used`` that is leased.
    leased: int = 0
    #: READY objects, in number.
    objects: int = field(default=0)
    #: Granules per object, of all sizes that there have been.
    sizes: set[int] = field(factory=set)
    #: The share of ``reserved`` that copies of objects of other pools are being written to.
    moving: int = 0
    #: Granules of objects that were evicted here, ever.
    evicted: int = 0
    #: Objects that were leased to readers here, that came down from another pool, and that went down; ever.
    hits: int = 0
    demoted_in: int = 0
    demoted_out: int = 0
    #: Replicas that were made here, ever, and those that are here.
    promoted_in: int = 0
    replicas: int = 0
    #: Publishes bytes at an offset of the pool; ``None`` where all who map it are coherent with this host.
    publish: Callable[[int, int], None] | None = None

    @classmethod
    def of(
        cls,
        number: int,
        descriptor: PoolDescriptor,
        table: memoryview,
        policy: PolicyFactory = least_recently_used,
        clock: Callable[[], float] = monotonic,
        publish: Callable[[int, int], None] | None = None,
    ) -> Arena:
        """Over the header table ``table`` (``entry_count * HEADER_SIZE`` writable bytes, zeroed)."""
        count = descriptor.entry_count
        base = descriptor.entry_base
        headers = HeaderTable(
            table[: count * HEADER_SIZE], base, publish and _shifted(publish, descriptor.table_offset)
        )
        tenants = Tenants(policy(base, count, clock))
        granule = descriptor.granule
        return cls(number, descriptor, Allocator(count), tenants, headers, base, base + count, granule, publish=publish)

    def pages_for(self, length: int) -> int:
        """Granules that an object of ``length`` bytes takes here."""
        return -(-length // self.granule)

    def settle(self, entry: int, pages: int) -> None:
        """Write back what a process of this host that died may have left of these pages in its caches.

        Else a cache would do so later, over what another host has written there by then.
        """
        if self.publish is not None:
            self.publish(self.descriptor.data_at(entry), pages * self.granule)


def _shifted(publish: Callable[[int, int], None], by: int) -> Callable[[int, int], None]:
    return lambda offset, length: publish(by + offset, length)
