"""What storage backends, transfer engines and orders of eviction must do. Vendors implement these; so do the built-ins.

Import from here, whichever file a name lies in. Nothing here needs torch.
"""

from maru_core.contracts.eviction import EvictionPolicy, NewPolicy, PolicyFactory, PolicyProvision
from maru_core.contracts.findings import Diagnose, Finding, Level
from maru_core.contracts.pinning import MemorySpan, PinnedMemory, PoolRegistrar, UsesPinnedMemory
from maru_core.contracts.storage import (
    BackendFactory,
    BackendProvision,
    Pool,
    PoolPlan,
    PoolRequest,
    PoolWish,
    ReadExtent,
    Region,
    StorageBackend,
    one_pool,
)
from maru_core.contracts.transfers import (
    EngineFactory,
    EngineProvision,
    LayeredLoad,
    LoadsByLayer,
    PreparedCopies,
    PreparedLayeredLoad,
    PreparesLayeredLoads,
    PreparesLoads,
    PreparesStores,
    Transfer,
    TransferEngine,
)

__all__ = [
    "BackendFactory",
    "BackendProvision",
    "Diagnose",
    "EngineFactory",
    "EngineProvision",
    "EvictionPolicy",
    "Finding",
    "LayeredLoad",
    "Level",
    "LoadsByLayer",
    "MemorySpan",
    "NewPolicy",
    "PinnedMemory",
    "PolicyFactory",
    "PolicyProvision",
    "Pool",
    "PoolPlan",
    "PoolRegistrar",
    "PoolRequest",
    "PoolWish",
    "PreparedCopies",
    "PreparedLayeredLoad",
    "PreparesLayeredLoads",
    "PreparesLoads",
    "PreparesStores",
    "ReadExtent",
    "Region",
    "StorageBackend",
    "Transfer",
    "TransferEngine",
    "UsesPinnedMemory",
    "one_pool",
]
