"""Several pools of other backends under one name: objects go into the first that has room (``maru_write_order``).

It makes no memory itself: each pool is made and mapped by the backend that it belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NoReturn

from maru_core.composite import plan_member
from maru_core.contracts import BackendProvision, Pool, PoolPlan, PoolRequest, PoolWish, Region, StorageBackend
from maru_core.errors import BackendError
from maru_core.plugin import hookimpl
from maru_core.protocol import PoolDescriptor

NAME: Final = "mixed"


class MixedBackend:
    """Plans the pools of its members. Implements :class:`maru_core.contracts.StorageBackend`."""

    name: Final = NAME

    def plan_pools(self, wish: PoolWish, backends: Callable[[str], StorageBackend]) -> Sequence[PoolPlan]:
        """The pools of every member of ``wish``, one member after the other."""
        if not wish.members:
            raise BackendError("mixed has no members; name the backends in maru_write_order, such as cpu,cxl")
        plans: list[PoolPlan] = []
        for member in wish.members:
            if member.backend == NAME:
                raise BackendError("mixed cannot be a member of itself; name other backends in maru_write_order")
            plans += plan_member(member, backends)  # what a member does wrong is told of that member
        return plans

    def create_pool(self, request: PoolRequest) -> Pool:
        """Never called for a planned pool."""
        _none()

    def adopt_pool(self, request: PoolRequest) -> Pool | None:
        """Never called for a planned pool."""
        _none()

    def map_region(self, descriptor: PoolDescriptor) -> Region:
        """Never called for a pool that a server describes."""
        _none()


@hookimpl
def maru_storage_backends() -> Sequence[BackendProvision]:
    """The ``mixed`` backend."""
    return [BackendProvision(NAME, MixedBackend, summary="pools of several backends, in maru_write_order")]


def _none() -> NoReturn:
    raise BackendError("mixed has no pools of its own: each belongs to one of the backends in maru_write_order")
