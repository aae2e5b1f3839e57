"""The client side of Maru: :class:`MaruHandler` and what its calls answer."""

from maru_core.client.handler import MaruHandler
from maru_core.client.located import Located
from maru_core.client.objects import Allocation, Retrieved
from maru_core.client.pending import PendingAcquire
from maru_core.client.values import Grants, Lease, StoreResult

__all__ = ["Allocation", "Grants", "Lease", "Located", "MaruHandler", "PendingAcquire", "Retrieved", "StoreResult"]
