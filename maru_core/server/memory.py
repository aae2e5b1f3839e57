"""The pools of a server and the directory over them: as a killed server left them, or new."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack

from attrs import asdict, frozen

from maru_core import logs
from maru_core.contracts import PolicyFactory, Pool, PoolPlan, PoolRequest, Region, StorageBackend
from maru_core.errors import BackendError, MaruError
from maru_core.foreign import adopt_pool, create_pool, end_pool
from maru_core.pool_format import HEADER_SIZE
from maru_core.protocol.messages import NO_ENTRY
from maru_core.server.arena import Arena
from maru_core.server.directory import Directory
from maru_core.server.liveness import SessionRecord
from maru_core.server.namespaces import NamespaceState
from maru_core.server.served import ServedPools
from maru_core.server.sessions import Session, SessionRegistry

_PREFAULT = 1 << 20


@frozen
class Memory:
    """What the pools are to be. Sizes in bytes; ``owner`` and ``take_over`` as in PoolRequest.

    ``shared_by_hosts``: of each plan. ``lease_share``, ``namespace_quota``, ``read_order``, ``demote`` and ``promote``
    as in :class:`Directory`.
    """

    plans: tuple[PoolPlan, ...]
    granule: int
    owner: str
    shared_by_hosts: tuple[bool, ...]
    take_over: bool
    lease_share: float
    namespace_quota: int | None
    policy: PolicyFactory
    read_order: tuple[int, ...] = ()
    demote: bool = False
    promote: bool = False

    @property
    def moves(self) -> bool:
        """Whether objects move between pools at all."""
        return len(self.plans) > 1 and (self.demote or self.promote)


#: Makes the pool of a plan, or takes it over.
MakePool = Callable[[PoolPlan, PoolRequest], Pool]


class Pools:
    """Pools that this server holds, and an arena over each."""

    def __init__(self) -> None:
        self.arenas: list[Arena] = []
        self._pools: list[tuple[Pool, memoryview]] = []

    def add_all(self, memory: Memory, make: MakePool) -> None:
        """Make every pool of ``memory``; raises BackendError."""
        base = 0
        for number, plan in enumerate(memory.plans):
            pool = make(
                plan,
                PoolRequest(
                    number,
                    plan.size,
                    memory.granule,
                    base,
                    plan.path,
                    memory.owner,
                    memory.shared_by_hosts[number],
                    memory.take_over,
                    plan.size_setting,
                ),
            )
            descriptor = pool.region.descriptor
            end = descriptor.table_offset + descriptor.entry_count * HEADER_SIZE
            pool.region.acquire(0, end)  # of a pool that is taken over, another host may have written it
            table = pool.region.buffer[descriptor.table_offset : end]
            self._pools.append((pool, table))
            base += descriptor.entry_count
            if base >= NO_ENTRY:
                raise BackendError(
                    f"pools of {base} granules in all, the limit is {NO_ENTRY - 1}; raise maru_chunk_size"
                )
            publish = pool.region.publish if descriptor.flush else None
            self.arenas.append(Arena.of(number, descriptor, table, memory.policy, publish=publish))

    @property
    def regions(self) -> list[Region]:
        """All of them, mapped."""
        return [pool.region for pool, _ in self._pools]

    def prefault(self) -> None:
        """Map the header tables of new pools, which are zero, now rather than in a client's request."""
        for pool, table in self._pools:
            for at in range(0, len(table), _PREFAULT):
                table[at : at + _PREFAULT] = bytes(len(table[at : at + _PREFAULT]))
            # The superblock as well: nobody knows of the pool yet.
            pool.region.publish(0, pool.region.descriptor.table_offset + len(table))

    def close(self, keep: bool, sessions: SessionRegistry | None = None) -> None:
        """Let go of all of them; they stay in memory if ``keep``. ``sessions``: of all who may have mapped them."""
        alone = sessions is not None and not len(sessions)
        for arena in self.arenas:
            arena.headers.release()
        for pool, table in reversed(self._pools):
            table.release()
            end_pool(pool, keep=keep, alone=alone)


def _directory(memory: Memory, pools: Pools, epochs: Mapping[bytes, int]) -> Directory:
    return Directory(
        pools.arenas,
        memory.lease_share,
        epochs=epochs,
        namespace_quota=memory.namespace_quota,
        demote=memory.demote,
        promote=memory.promote,
        read_order=memory.read_order,
    )


def start_cold(
    memory: Memory,
    backends: Callable[[str], StorageBackend],
    epochs: Mapping[bytes, int],
    keep: bool,
    cleanup: ExitStack,
    sessions: SessionRegistry,
) -> tuple[Directory, list[Region]]:
    """A directory over new pools, and these, which ``cleanup`` leaves in memory if ``keep``, else removes.

    ``epochs``: weights epochs from before. ``sessions``: those of this server. Raises BackendError when there is no
    room.
    """
    pools = Pools()
    with ExitStack() as attempt:
        attempt.callback(pools.close, False)
        pools.add_all(memory, lambda plan, request: create_pool(backends, plan, request))
        pools.prefault()
        attempt.pop_all()
    cleanup.callback(pools.close, keep, sessions)
    return _directory(memory, pools, epochs), pools.regions


def start_warm(
    memory: Memory,
    backends: Callable[[str], StorageBackend],
    epochs: Mapping[bytes, int],
    keep: bool,
    cleanup: ExitStack,
    earlier: Mapping[int, SessionRecord],
    sessions: SessionRegistry,
    served: ServedPools,
    now: float,
) -> tuple[Directory, list[Region]] | None:
    """Directory and pools of a server that was killed, on the same memory; ``None`` when that cannot be, never half.

    ``earlier`` are its sessions, which become awaited ones in ``sessions``, seen at ``now``; ``served`` its pools.
    """
    log = logs.get_logger(__name__)
    pools = Pools()

    def take_over(plan: PoolPlan, request: PoolRequest) -> Pool:
        pool = adopt_pool(backends, plan, request)
        if pool is None:
            raise BackendError(f"pool {request.pool} of an earlier server is not there, or is another one")
        return pool

    def writer(number: int, namespace: NamespaceState) -> Session:
        known = sessions.get(number)
        if known is not None:
            # A record that was damaged does not tell whose it is, but this header does.
            sessions.belongs(known, namespace)
            return known
        log.warning("the record of a writing session is lost: its pages stay taken", session=f"{number:016x}")
        lost = SessionRecord(namespace.digest.hex(), "unknown", "", False, False)
        return sessions.adopt(number, namespace, lost, now)

    with ExitStack() as attempt:
        attempt.callback(pools.close, True)
        try:
            pools.add_all(memory, take_over)
            if not served.are([arena.descriptor.identity for arena in pools.arenas]):
                raise BackendError("these are not all the pools that were served last, and no others")
            directory = _directory(memory, pools, epochs)
            unknown = directory.namespaces.unknown()
            for number, record in earlier.items():
                digest = bytes.fromhex(record.digest)
                namespace = directory.namespaces.of_digest(digest) if digest else unknown
                sessions.adopt(number, namespace, record, now)
            found = directory.recover(writer)
        except MaruError as error:
            # Where nothing was left, there is nothing that is not taken over.
            if served.any() or pools.arenas:
                log.warning(
                    "cold start: what the server before had stored is gone",
                    reason=str(error),
                    asked_for=", ".join(f"{plan.backend} of {plan.size} bytes" for plan in memory.plans),
                    granule=memory.granule,
                    remedy="pools of a killed server are taken over by one with the same backends, sizes and granule",
                )
            for session in sessions:
                sessions.close(session)
            return None
        attempt.pop_all()
    cleanup.callback(pools.close, keep, sessions)
    log.info("recovered", awaited_sessions=len(sessions.awaited), **asdict(found))
    return directory, pools.regions
