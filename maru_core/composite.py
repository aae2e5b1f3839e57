"""For backends whose pools are made by other backends, as ``mixed``'s are."""

from __future__ import annotations

from collections.abc import Callable

from maru_core import foreign
from maru_core.contracts import PoolPlan, PoolWish, StorageBackend


def plan_member(wish: PoolWish, backends: Callable[[str], StorageBackend]) -> tuple[PoolPlan, ...]:
    """The pools that the backend of ``wish`` plans for it, at least one. ``backends`` as plan_pools is given it.

    Raises BackendError that names that backend for whatever it does wrong.
    """
    return foreign.plan_pools(backends, wish)
