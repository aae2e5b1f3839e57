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

    @classmethod
    def of(
        cls,
        number: int,
        descriptor: PoolDescriptor,
        table: memoryview,
        policy: PolicyFactory = least_recently_used,
        clock: Callable[[], float] = monotonic,
    ) -> Arena:
        """Over the header table ``table`` (``entry_count * HEADER_SIZE`` writable bytes, zeroed)."""
        count = descriptor.entry_count
        base = descriptor.entry_base
        headers = HeaderTable(table[: count * HEADER_SIZE], base)
        tenants = Tenants(policy(base, count, clock))
        return cls(number, descriptor, Allocator(count), tenants, headers, base, base + count, descriptor.granule)

    def pages_for(self, length: int) -> int:
        """Granules that an object of ``length`` bytes takes here."""
        return -(-length // self.granule)
