"""What namespaces take of the pools, against their quotas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from maru_core.server.arena import Arena
from maru_core.server.namespaces import NamespaceState


class Quotas:
    """Of all namespaces in ``arenas``."""

    def __init__(self, arenas: Sequence[Arena]) -> None:
        self._arenas = arenas
        #: Bytes per namespace that moves have taken beside what they copy; they do not count against a quota.
        self.moving: dict[int, int] = {}
        #: Namespaces that took more than their quota before it was lowered.
        self._over: list[NamespaceState] = []

    def bytes_of(self, namespace: NamespaceState) -> int:
        """Bytes of the granules that ``namespace`` has taken, without copies that are being made."""
        taken = sum([pages * arena.granule for pages, arena in zip(namespace.taken, self._arenas, strict=True)])
        return taken - self.moving.get(namespace.number, 0)

    def review(self, namespace: NamespaceState) -> None:
        """The quota of ``namespace`` has changed."""
        if namespace not in self._over:
            self._over.append(namespace)

    def over(self) -> Iterator[NamespaceState]:
        """Those that have more than their quota since it was lowered."""
        for namespace in tuple(self._over):
            if namespace.quota is None or self.bytes_of(namespace) <= namespace.quota:
                self._over.remove(namespace)
            else:
                yield namespace
