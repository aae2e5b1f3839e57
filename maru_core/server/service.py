"""``maru serve``: puts lock, pools, directory and loop together, and takes them down again."""

from __future__ import annotations

import gc
import os
import resource
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

import zmq
from attrs import frozen

from maru_core import __version__, logs
from maru_core.access import KeyRing
from maru_core.address import Address
from maru_core.contracts import PolicyFactory, PoolPlan, StorageBackend
from maru_core.errors import ConfigError
from maru_core.foreign import is_of_one_host
from maru_core.protocol.messages import MAX_ARRAY
from maru_core.protocol.version import PROTOCOL_VERSION
from maru_core.runtime_dir import RuntimeDir, check_url
from maru_core.server.directory import Directory
from maru_core.server.doors import Footprint, places
from maru_core.server.eviction import least_recently_used
from maru_core.server.handlers import Handlers
from maru_core.server.heap import give_back_large_blocks
from maru_core.server.keeping import FolderKeeper
from maru_core.server.listening import KeyWatch, authenticator, listen
from maru_core.server.liveness import SessionLocks
from maru_core.server.loop import ServerLoop
from maru_core.server.memory import Memory, start_cold, start_warm
from maru_core.server.mover import Mover
from maru_core.server.served import ServedPools
from maru_core.server.sessions import SessionRegistry
from maru_core.server.weights import WeightsFile

#: Memory in bytes that messages may take besides what the directory needs for an entry when all are in use.
_MESSAGE_MEMORY = 2 << 30
_ENTRY_MEMORY = 512


@frozen
class ServerSettings:
    """What a server is started with. Sizes in bytes, times in seconds.

    ``pools``: in the order in which objects are placed. ``read_order``: their numbers, those first where an object that
    is in several is read. ``demote``, ``promote``: whether objects move between pools, see :class:`Directory`.
    ``shared_by_hosts`` ``None``: pools that other hosts can map, if it listens where they reach it. ``take_over``: see
    PoolRequest.
    ``url`` ``None``: the socket of the runtime folder. ``runtime_dir`` ``None``: the per-user folder. ``idle_exit``
    ``None``: serve until stopped. ``lease_share``: the part of a pool that one session may lease. ``keep_pools``: leave
    the pools in memory at the end, for the next server of this folder. ``dma_grace``: how long devices of a client that
    died may still move bytes. ``namespace_quota``: the most that a namespace may take of all pools, unless the operator
    sets another quota for it. ``eviction_policy``: what makes the orders of eviction.
    ``keys``: folder of the keys that a ``tcp`` address uses. ``metrics``: ``host:port`` of the listener for Prometheus.
    """

    pools: tuple[PoolPlan, ...]
    granule: int = 64 * 1024
    url: str | None = None
    runtime_dir: str | None = None
    idle_exit: float | None = None
    lease_share: float = 0.5
    keep_pools: bool = False
    dma_grace: float = 1.0
    namespace_quota: int | None = None
    keys: str | None = None
    metrics: str | None = None
    eviction_policy: PolicyFactory = least_recently_used
    read_order: tuple[int, ...] = ()
    demote: bool = True
    promote: bool = False
    shared_by_hosts: bool | None = None
    take_over: bool = False


def run_server(
    settings: ServerSettings,
    backends: Callable[[str], StorageBackend],
    *,
    ready: Callable[[str], None] | None = None,
) -> None:
    """Serve until SIGTERM, SIGINT, SIGHUP or idle; ``ready`` is called with the address once clients can connect.

    ``backends`` finds the backend of a pool by name.

    What a killed server of this runtime folder left in memory is served again if it is still there and as it was left;
    else the start is cold. Raises AlreadyRunning when another server has the runtime folder, ConfigError for a setting,
    BackendError when there is no room for a pool. Nothing stays behind, except the lock file, the administration's
    credential, and the weights epochs once there was a reset; with ``keep_pools`` the pools, and which they were.
    """
    if not settings.pools or not 0 < settings.lease_share <= 1:
        raise ConfigError(f"a server needs a pool and a lease share in (0, 1], got {settings}")
    if len(settings.pools) > MAX_ARRAY:
        raise ConfigError(
            f"{len(settings.pools)} pools are more than the {MAX_ARRAY} that clients can be told of; name fewer "
            f"devices in maru_cxl_pool_path, or make fewer and larger ones of them"
        )
    log = logs.get_logger(__name__)
    runtime = RuntimeDir.open(settings.runtime_dir)
    url = check_url(settings.url, secured=settings.keys is not None) if settings.url else runtime.url
    shared_by_hosts = _shared_by_hosts(settings, url, backends)
    keys = _load_keys(settings.keys) if settings.keys is not None and url.startswith("tcp:") else None
    with ExitStack() as cleanup:
        cleanup.callback(os.close, runtime.lock_server())
        locks = SessionLocks(runtime.sessions)
        earlier = locks.prepare()
        keeper = FolderKeeper(runtime, time.monotonic, {plan.path for plan in settings.pools if plan.path})
        cleanup.callback(keeper.close)
        keeper()
        cleanup.callback(locks.close, settings.keep_pools)
        weights = WeightsFile(runtime.weights)
        epochs = weights.load()
        cleanup.callback(weights.retry)
        _allow_many_sessions()
        give_back_large_blocks()
        memory = _memory(settings, runtime, shared_by_hosts)
        sessions = SessionRegistry(len(settings.pools), lambda: secrets.randbits(63))
        sessions.most = places()
        keep, now = settings.keep_pools, time.monotonic()
        # What is built here lives as long as the server: looking for garbage in it takes longer than building it.
        gc.disable()
        cleanup.callback(gc.enable)
        served = ServedPools(runtime.pools)
        started = start_warm(memory, backends, epochs, keep, cleanup, earlier, sessions, served, now)
        if started is None:
            for session in earlier:
                locks.remove(session)
            started = start_cold(memory, backends, epochs, keep, cleanup, sessions)
        directory, regions = started
        served.note([arena.descriptor.identity for arena in directory.arenas])
        if not keep:
            cleanup.callback(served.forget)
        epoch = secrets.randbits(63) | 1
        handlers = Handlers(
            directory, sessions, locks, weights, epoch, os.getpid(), time.monotonic, settings.dma_grace, access=keys
        )
        if memory.moves:
            handlers.carrier = mover = Mover(regions)
            cleanup.callback(mover.close)
        context: zmq.Context[zmq.Socket[bytes]] = cleanup.enter_context(zmq.Context())
        chores: list[Callable[[], None]] = [weights.retry, keeper]
        if keys is not None:
            cleanup.enter_context(authenticator(context, keys))
            chores.append(KeyWatch(keys))
        loop = ServerLoop(context, handlers, settings.idle_exit, keys=keys, chores=chores, connections=sessions.most)
        cleanup.callback(loop.close)
        entries = sum(arena.end - arena.base for arena in directory.arenas)
        chores.append(Footprint(_MESSAGE_MEMORY + entries * _ENTRY_MEMORY, loop.hang_up))
        handlers.administration.token = runtime.make_token()
        handlers.administration.stop = loop.end
        if settings.metrics is not None:
            chores.append(_start_metrics(settings.metrics, handlers, cleanup))
        address, keep_bound = listen(loop, url, cleanup)
        chores.append(keep_bound)
        runtime.write_info(
            {
                "pid": os.getpid(),
                "version": __version__,
                "protocol": PROTOCOL_VERSION,
                "url": address,
                "started": time.time(),
            }
        )
        cleanup.callback(runtime.server_info.unlink, missing_ok=True)
        cleanup.enter_context(_stop_on_signal(loop))
        _tell(directory, address, epoch)
        gc.collect()
        gc.freeze()
        gc.enable()
        if ready is not None:
            ready(address)
        loop.run()
        log.info("stopping", sessions=len(handlers.sessions))


def _load_keys(folder: str) -> KeyRing:
    try:
        return KeyRing.load(folder)
    except OSError as error:
        raise ConfigError(f"cannot read keys from {folder}: {error.strerror}") from error


def _memory(settings: ServerSettings, runtime: RuntimeDir, shared_by_hosts: tuple[bool, ...]) -> Memory:
    return Memory(
        settings.pools,
        settings.granule,
        runtime.owner,
        shared_by_hosts,
        settings.take_over,
        settings.lease_share,
        settings.namespace_quota,
        settings.eviction_policy,
        settings.read_order,
        settings.demote,
        settings.promote,
    )


def _tell(directory: Directory, address: str, epoch: int) -> None:
    log = logs.get_logger(__name__)
    for arena in directory.arenas:
        log.info(
            "pool ready",
            pool=arena.number,
            backend=arena.descriptor.backend,
            location=arena.descriptor.location,
            bytes=arena.descriptor.size,
            granule=arena.granule,
        )
    log.info("serving", url=address, epoch=epoch, bytes_total=sum(arena.descriptor.size for arena in directory.arenas))


def _shared_by_hosts(settings: ServerSettings, url: str, backends: Callable[[str], StorageBackend]) -> tuple[bool, ...]:
    """Of each pool. By itself only one that other hosts can both hear of and map."""
    if settings.shared_by_hosts is not None:
        return (settings.shared_by_hosts,) * len(settings.pools)
    reached = not Address.parse(url).is_local
    return tuple(reached and not is_of_one_host(backends, plan.backend) for plan in settings.pools)


def _start_metrics(where: str, handlers: Handlers, cleanup: ExitStack) -> Callable[[], None]:
    """Start the listener; returns what publishes the numbers of a moment to it."""
    # Only here: a server without metrics needs neither the library nor an event loop.
    from maru_core.server.metrics import MetricsListener

    listener = MetricsListener(where)
    cleanup.callback(listener.close)
    listener.start(handlers.snapshot())
    return lambda: listener.publish(handlers.snapshot())


def _allow_many_sessions() -> None:
    """Each session costs the server two descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@contextmanager
def _stop_on_signal(loop: ServerLoop) -> Iterator[None]:
    """SIGTERM, SIGINT and SIGHUP end the loop, where handlers can be set at all (the main thread).

    A SIGHUP that is ignored, as under ``nohup``, stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        loop.stop()

    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
