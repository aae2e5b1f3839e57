"""Foreign code, held at arm's length: what it raises or answers wrongly becomes an error that names it.

Factories are guarded where the host calls them (:mod:`maru_core.host`), hints by :mod:`maru_core.hints`; here are the
methods of storage backends, which servers and clients call while they start or map.
"""

from __future__ import annotations

import signal
import threading
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from maru_core import logs
from maru_core.contracts import Pool, PoolPlan, PoolRequest, PoolWish, Region, StorageBackend
from maru_core.errors import BackendError, MaruError
from maru_core.plugin_checks import check_methods
from maru_core.protocol.messages import PoolDescriptor

T = TypeVar("T")

#: How much larger than asked for a pool may be.
_MOST = 1.05

#: Finds a backend by name, as :meth:`maru_core.host.PluginHost.backend` does.
Backends = Callable[[str], StorageBackend]


def pass_interrupt(error: BaseException) -> None:
    """Raise again what is to end the process: a real KeyboardInterrupt, or what a handler of SIGINT or SIGTERM raised.

    Engines end by a SystemExit of such a handler, which comes once. Any other, like a subclass of KeyboardInterrupt, is
    a plugin's own doing.
    """
    if type(error) is KeyboardInterrupt or _came_by_signal(error):
        raise error


def _came_by_signal(error: BaseException) -> bool:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    codes = [code for code in (getattr(handler, "__code__", None) for handler in handlers) if code is not None]
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def show(error: BaseException) -> str:
    """Type and text of an error, for a message. The text is foreign code, too."""
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException as worse:  # noqa: BLE001 - see pass_interrupt
        pass_interrupt(worse)
        return f"{type(error).__name__} (its text cannot be had)"


class BoundedCall:
    """One call on a thread of its own: whoever waits for it may leave it behind. Then it goes on by itself."""

    def __init__(self, name: str, call: Callable[[], Any]) -> None:
        """Start it. ``name``: of the thread."""
        self.answer: Any = None
        #: What it raised; a KeyboardInterrupt is the callee's own, as the user's comes to the main thread only.
        self.error: BaseException | None = None
        self._call = call
        self._done = threading.Event()
        try:
            threading.Thread(target=self._run, name=name, daemon=True).start()
        except RuntimeError:  # no more threads, or the interpreter ends: then without a limit
            self._run()

    def wait(self, limit: float) -> bool:
        """Whether it ended within ``limit`` seconds.

        In two waits: a process that was stopped for long finds the first one over, and the call just needs a moment.
        """
        return self._done.wait(limit / 2) or self._done.wait(limit / 2)

    def _run(self) -> None:
        try:
            self.answer = self._call()
        except BaseException as error:  # noqa: BLE001 - told where it is waited for
            self.error = error
        finally:
            self._done.set()


def is_of_one_host(backends: Backends, name: str) -> bool:
    """Whether no other host can map pools of this backend, see StorageBackend. Raises BackendError."""
    return _call(name, "one_host", lambda: getattr(backends(name), "one_host", False), bool)


def plan_pools(backends: Backends, wish: PoolWish) -> tuple[PoolPlan, ...]:
    """See StorageBackend.plan_pools; at least one plan, each of a backend and a size. Raises BackendError."""

    def check(plans: Any) -> tuple[PoolPlan, ...]:
        found = tuple(plans)
        for plan in found:
            if not isinstance(plan, PoolPlan):
                raise TypeError(f"{plan!r} is no PoolPlan")
            if type(plan.size) is not int or not 0 < plan.size < 1 << 63:
                raise ValueError(f"{plan} has no size in bytes")
            if not all(isinstance(text, str) for text in (plan.backend, plan.path or "", plan.size_setting)):
                raise ValueError(f"{plan} has no backend, or a path or setting that is no text")
            if "\0" in (plan.path or ""):
                raise ValueError(f"{plan} has a path that cannot be")
        if not found:
            raise ValueError(f"it plans no pool for {wish}")
        return found

    return _call(wish.backend, "plan_pools", lambda: backends(wish.backend).plan_pools(wish, backends), check)


def create_pool(backends: Backends, plan: PoolPlan, request: PoolRequest) -> Pool:
    """See StorageBackend.create_pool; the pool is the one that was asked for. Raises BackendError."""

    def check(pool: Any) -> Pool:
        try:
            return _pool(pool, plan, request)
        except BaseException:
            end_pool(pool, keep=False)
            raise

    return _call(plan.backend, "create_pool", lambda: backends(plan.backend).create_pool(request), check)


def adopt_pool(backends: Backends, plan: PoolPlan, request: PoolRequest) -> Pool | None:
    """See StorageBackend.adopt_pool; raises BackendError."""

    def check(pool: Any) -> Pool | None:
        try:
            return None if pool is None else _pool(pool, plan, request)
        except BaseException:
            end_pool(pool, keep=True)
            raise

    return _call(plan.backend, "adopt_pool", lambda: backends(plan.backend).adopt_pool(request), check)


def end_pool(pool: Any, *, keep: bool, alone: bool = False) -> None:
    """Let go of a pool, which stays if ``keep``. ``alone``: nobody else has it, see :class:`Pool`. What fails is told.

    The others of the server are still to be let go of, so only a real interrupt passes.
    """
    try:
        if alone and not keep and hasattr(pool, "nobody_left"):
            pool.nobody_left()
        pool.leave() if keep else pool.destroy()
    except BaseException as error:  # noqa: BLE001 - see above
        pass_interrupt(error)
        logs.get_logger(__name__).warning("a pool could not be let go", pool=type(pool).__name__, reason=show(error))


def map_region(backends: Backends, descriptor: PoolDescriptor) -> Region:
    """See StorageBackend.map_region; the region is of that pool. Raises BackendError."""
    name = descriptor.backend

    def check(region: Any) -> Region:
        found = _region(region)
        if found.descriptor != descriptor:
            raise ValueError(f"its region is of {found.descriptor!r}, asked for was {descriptor!r}")
        return found

    return _call(name, "map_region", lambda: backends(name).map_region(descriptor), check)


def _call(backend: str, method: str, call: Callable[[], Any], check: Callable[[Any], T]) -> T:
    wrong, whose = f"{method} of backend {backend} failed", "`maru plugins` says whose it is"
    try:
        answer = call()
    except MaruError:
        raise
    except BaseException as error:
        pass_interrupt(error)
        raise BackendError(f"{wrong}: {show(error)}; {whose}") from error
    try:
        return check(answer)
    except BaseException as error:
        pass_interrupt(error)
        raise BackendError(f"{wrong}, its answer is of no use: {show(error)}; {whose}") from error


def _pool(pool: Any, plan: PoolPlan, request: PoolRequest) -> Pool:
    check_methods("its pool", pool, ("destroy", "leave"))
    found = _region(pool.region).descriptor
    got = (found.pool, found.backend, found.granule, found.entry_base)
    asked = (request.pool, plan.backend, request.granule, request.entry_base)
    if got != asked:
        raise ValueError(f"its pool has number, backend, granule and first entry {got}, asked for were {asked}")
    if found.size > request.size * _MOST:
        raise ValueError(f"its pool has {found.size} bytes, asked for were {request.size}")
    if request.shared_by_hosts and not found.flush:
        raise ValueError("its pool does not say flush, although hosts share it")
    checked: Pool = pool
    return checked


def _region(region: Any) -> Region:
    check_methods("its region", region, ("publish", "acquire", "populate", "close"))
    descriptor, buffer = region.descriptor, region.buffer
    if not isinstance(descriptor, PoolDescriptor) or not isinstance(buffer, memoryview):
        raise TypeError(f"its region has descriptor {descriptor!r} and buffer {buffer!r}")
    if PoolDescriptor.from_wire(descriptor.to_wire()) != descriptor or not descriptor.is_possible:
        raise ValueError(f"its region has a descriptor that cannot be: {descriptor!r}")
    if buffer.readonly or buffer.format != "B" or not buffer.c_contiguous or buffer.nbytes != descriptor.size:
        raise ValueError(f"its region shows {buffer.nbytes} of {descriptor.size} bytes, or not as writable bytes")
    checked: Region = region
    return checked
