"""Foreign code, held at arm's length: what it raises or answers wrongly becomes an error that names it.

Factories are guarded where the host calls them (:mod:`maru_core.host`), hints by :mod:`maru_core.hints`; here are the
methods of storage backends, which servers and clients call while they start or map.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from maru_core.contracts import Pool, PoolPlan, PoolRequest, PoolWish, Region, StorageBackend
from maru_core.errors import BackendError, MaruError
from maru_core.plugin_checks import check_methods
from maru_core.protocol.messages import PoolDescriptor

T = TypeVar("T")

#: Finds a backend by name, as :meth:`maru_core.host.PluginHost.backend` does.
Backends = Callable[[str], StorageBackend]


def pass_interrupt(error: BaseException) -> None:
    """Raise a real KeyboardInterrupt again. A subclass, like SystemExit, is a plugin's own doing."""
    if type(error) is KeyboardInterrupt:
        raise error


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


def plan_pools(backends: Backends, wish: PoolWish) -> tuple[PoolPlan, ...]:
    """See StorageBackend.plan_pools; at least one plan, each of a backend and a size. Raises BackendError."""

    def check(plans: Any) -> tuple[PoolPlan, ...]:
        found = tuple(plans)
        for plan in found:
            if not isinstance(plan, PoolPlan):
                raise TypeError(f"{plan!r} is no PoolPlan")
            if type(plan.size) is not int or plan.size <= 0 or not isinstance(plan.backend, str):
                raise ValueError(f"{plan} has no size in bytes, or no backend")
        if not found:
            raise ValueError(f"it plans no pool for {wish}")
        return found

    return _call(wish.backend, "plan_pools", lambda: backends(wish.backend).plan_pools(wish, backends), check)


def create_pool(backends: Backends, plan: PoolPlan, request: PoolRequest) -> Pool:
    """See StorageBackend.create_pool; raises BackendError."""
    return _call(plan.backend, "create_pool", lambda: backends(plan.backend).create_pool(request), _pool)


def adopt_pool(backends: Backends, plan: PoolPlan, request: PoolRequest) -> Pool | None:
    """See StorageBackend.adopt_pool; raises BackendError."""

    def check(pool: Any) -> Pool | None:
        return None if pool is None else _pool(pool)

    return _call(plan.backend, "adopt_pool", lambda: backends(plan.backend).adopt_pool(request), check)


def map_region(backends: Backends, descriptor: PoolDescriptor) -> Region:
    """See StorageBackend.map_region; raises BackendError."""
    name = descriptor.backend
    return _call(name, "map_region", lambda: backends(name).map_region(descriptor), _region)


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


def _pool(pool: Any) -> Pool:
    check_methods("its pool", pool, ("destroy", "leave"))
    _region(pool.region)
    checked: Pool = pool
    return checked


def _region(region: Any) -> Region:
    check_methods("its region", region, ("publish", "acquire", "populate", "close"))
    if not isinstance(region.descriptor, PoolDescriptor) or not isinstance(region.buffer, memoryview):
        raise TypeError(f"its region has descriptor {region.descriptor!r} and buffer {region.buffer!r}")
    checked: Region = region
    return checked
