"""Offers the orders of eviction that Maru comes with. Nothing of the server is imported before one is used."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from maru_core.contracts import NewPolicy, PolicyProvision
from maru_core.plugin import hookimpl


def make_lru(base: int, count: int, clock: Callable[[], float]) -> NewPolicy:
    """See :func:`maru_core.server.eviction.least_recently_used`."""
    from maru_core.server.eviction import least_recently_used

    return least_recently_used(base, count, clock)


def make_reuse(base: int, count: int, clock: Callable[[], float]) -> NewPolicy:
    """See :func:`maru_core.server.reuse.reuse_policy`."""
    from maru_core.server.reuse import reuse_policy

    return reuse_policy(base, count, clock)


@hookimpl
def maru_eviction_policies() -> Sequence[PolicyProvision]:
    """``reuse``, the default, and ``lru``."""
    return [
        PolicyProvision("reuse", make_reuse, summary="what is unlikely to be used again soon goes first"),
        PolicyProvision("lru", make_lru, summary="what was used longest ago goes first"),
    ]
