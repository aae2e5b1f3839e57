"""What a user is told of the server's pools when a session begins.

Another size than was asked for, room that is lost, and that what was stored is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from maru_core import logs
from maru_core.client.session import Session
from maru_core.config import MaruConfig
from maru_core.pools import granule_for
from maru_core.protocol.messages import PoolDescriptor
from maru_core.sizes import format_size

#: Backends round pool sizes to pages, the largest common one being a huge page of 2 MiB.
_PAGE: Final = 2 * 1024 * 1024
#: Share of the room that may be lost without a word.
_LOST: Final = 0.1


class PoolNotices:
    """Of one handler. ``object_bytes``: the length of its objects; ``None`` when they have several or nobody knows."""

    def __init__(self, config: MaruConfig, object_bytes: int | None) -> None:
        self._config = config
        self._object_bytes = object_bytes
        self._log = logs.get_logger(__name__)
        self._sizes_told = False
        #: Granules that were told to be too large.
        self._granules_told: set[int] = set()

    def tell(self, session: Session, previous: Session | None, url: str) -> None:
        """Say what there is to say of the pools of ``session``, each thing once; ``previous``: the one before it."""
        if previous is not None:
            self._tell_loss(session, previous, url)
        self._tell_sizes(session)
        self._tell_lost_room(session)

    def _tell_loss(self, session: Session, previous: Session, url: str) -> None:
        """The pools of a killed server are served again by one with the same sizes; any other one begins with none."""
        if [pool.identity for pool in session.pools] == [pool.identity for pool in previous.pools]:
            return
        before, now = _described(previous.pools), _described(session.pools)
        if before == now:
            remedy = "the server's log says why; `maru serve --keep-pools` keeps them when it is stopped"
        elif self._config.server_url == "auto":
            remedy = (
                "engines start a server with sizes of their own where none is: give them those of the one before "
                "(maru_pool_size, maru_chunk_size and so on), or, so that they start none, set "
                f"maru_server_url={url}"
            )
        else:
            remedy = "start the server with the sizes of before, and it takes over the pools of one that was killed"
        self._log.warning(
            "another server has taken the place of the one before, and what that had stored is gone",
            server_pid=session.server_pid,
            pools_before=before,
            pools=now,
            remedy=remedy,
        )

    def _tell_sizes(self, session: Session) -> None:
        if self._sizes_told:
            return
        self._sizes_told = True
        wanted = self._config.quota_wish()
        if not wanted:
            return
        there = sum(pool.size for pool in session.pools)
        # Backends round down to whole pages.
        slack = _PAGE * len(session.pools)
        if there - wanted >= slack:
            self._log.warning(
                "the server's pools are larger than this engine's sizes, which are the quota of its namespace",
                pool_size=there,
                quota=wanted,
                server_pid=session.server_pid,
            )
        elif wanted - there >= slack and self._config.server_url == "auto":
            self._log.warning(
                "the server's pools have another size than this engine asks for; the first engine's counts",
                pool_size=there,
                asked_for=wanted,
                server_pid=session.server_pid,
            )

    def _tell_lost_room(self, session: Session) -> None:
        """An object takes whole granules: where they are much larger, most of a pool may hold nothing."""
        length = self._object_bytes
        if not length:
            return
        for granule in sorted({pool.granule for pool in session.pools} - self._granules_told):
            taken = -(-length // granule) * granule
            if taken - length <= _LOST * taken:
                continue
            self._granules_told.add(granule)
            remedies = []
            if granule_for(length) < granule:
                remedies.append(
                    f"start the server with --granule {granule_for(length)}, or maru_chunk_size={granule_for(length)} "
                    f"in the settings of whoever starts it"
                )
            if self._config.use_layerwise:
                remedies.append("without maru_use_layerwise an object is a whole chunk")
            self._log.warning(
                "the granule of the server's pools is too large for this engine's objects, and room is lost",
                object_bytes=length,
                granule=granule,
                lost_percent=round(100 * (taken - length) / taken),
                server_pid=session.server_pid,
                remedy="; or ".join(remedies) or "a larger maru_kv_chunk_tokens makes larger objects",
            )


def _described(pools: Sequence[PoolDescriptor]) -> str:
    return ", ".join(f"{pool.backend} of {format_size(pool.size)} in granules of {pool.granule}" for pool in pools)
