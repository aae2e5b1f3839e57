"""What STATS answers: counters that are kept anyway, put into one map of plain values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from maru_core.server.directory import Directory
from maru_core.server.namespaces import NamespaceState
from maru_core.server.sessions import SessionRegistry


def collect(
    server: Mapping[str, Any],
    directory: Directory,
    sessions: SessionRegistry,
    namespaces: Iterable[NamespaceState] = (),
) -> dict[str, Any]:
    """The map of STATS, which lists ``namespaces``; amounts in bytes, rounded up to granules.

    O(pools + listed namespaces + sessions).
    """
    pools = []
    for arena in directory.arenas:
        quarantined = sum(session.reserved_pages[arena.number] for session in sessions.silent.values())
        granule = arena.granule
        pools.append(
            {
                "pool": arena.descriptor.pool,
                "backend": arena.descriptor.backend,
                "location": arena.descriptor.location,
                "granule": granule,
                "capacity": (arena.end - arena.base) * granule,
                "used": arena.used * granule,
                "free": arena.free.free * granule,
                "reserved": (arena.reserved - quarantined) * granule,
                "quarantined": quarantined * granule,
                "leased": arena.leased * granule,
                "objects": arena.objects,
                "moving": arena.moving * granule,
                "hits": arena.hits,
                "evicted": arena.evicted * granule,
                "demoted_in": arena.demoted_in,
                "demoted_out": arena.demoted_out,
                "promoted_in": arena.promoted_in,
                "replicas": arena.replicas,
            }
        )
    return {
        "server": dict(server),
        "pools": pools,
        "sessions": sessions.attached,
        "counters": dict(directory.counters),
        "namespaces": [of_namespace(namespace, directory) for namespace in namespaces],
    }


def of_namespace(namespace: NamespaceState, directory: Directory) -> dict[str, Any]:
    """What STATS and ADMIN tell about one namespace; amounts as in :func:`collect`."""
    granules = [arena.granule for arena in directory.arenas]
    return {
        "digest": namespace.digest.hex(),
        "objects": namespace.objects,
        "bytes": namespace.stored_bytes,
        "used": _bytes(namespace.taken, granules) - _bytes(namespace.reserved, granules),
        "reserved": _bytes(namespace.reserved, granules),
        "quota": namespace.quota,
        "weights_epoch": namespace.weights_epoch,
    }


def _bytes(pages: Sequence[int], granules: Sequence[int]) -> int:
    return sum([count * granule for count, granule in zip(pages, granules, strict=True)])
