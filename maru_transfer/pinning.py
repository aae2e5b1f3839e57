"""Registers mapped pools with a device's driver, so that the device's copy engines reach them without help.

In pieces: drivers refuse a single registration of half a terabyte and more, an engine can use what is registered while
the rest still is, and whoever closes a pool waits for one piece only. It runs on a thread of its own; until a piece is
registered, and when it cannot be, copies take the slower way through a small locked buffer.

What an engine asks of the driver waits for the piece that is under way. So pieces are large as long as the engine only
starts, and small from its first step on. Small ones are not joined later: they would have to be unregistered for that,
meanwhile copies would be several times slower, and the engine would be held up as long as the first time.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Literal

from maru_core import logs
from maru_core.contracts import MemorySpan, Region
from maru_core.population import Population
from maru_transfer.cuda_driver import (
    ALREADY_REGISTERED,
    INVALID_VALUE,
    NOT_PERMITTED,
    NOT_SUPPORTED,
    OPERATING_SYSTEM,
    OUT_OF_MEMORY,
    DriverError,
    HostMemoryDriver,
)
from maru_transfer.memlock import memlock_hint
from maru_transfer.pinned_pieces import BUSY, STARTING, Pace, cut, page_size, piece_end, whole_pages

#: Seconds between two pieces. The driver's lock goes to whoever asks first: without a pause that is the next piece, and
#: an engine's launches wait for many of them in a row.
PAUSE: Final = 0.00015
#: Seconds between two looks whether to go on, while pages are not populated yet.
_LOOK: Final = 0.1
#: How long, in seconds, closing waits for what is being registered or unregistered.
JOIN: Final = 1.0
#: With these no memory of this kind can be registered: what was is given back, too.
_HOPELESS: Final = frozenset({NOT_PERMITTED, NOT_SUPPORTED})
#: What drivers answer when a limit on locked memory is in the way.
_OF_LIMITS: Final = frozenset({INVALID_VALUE, OUT_OF_MEMORY, OPERATING_SYSTEM, NOT_PERMITTED})

State = Literal["registering", "registered", "partly", "not registered", "closing"]


class _Registration:
    """One mapped pool. Fields are guarded by the lock of :class:`PinnedPools`."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self.location = region.descriptor.location
        #: Keeps the memory mapped until it is unregistered.
        self.view: memoryview | None = memoryview(region.buffer)
        self.address = address_of(self.view)
        self.size = self.view.nbytes
        self.population = Population(region)
        #: What is registered, ascending; both lists have one item per piece.
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.users = 0
        self.busy = True
        #: The pool is being unmapped.
        self.leaving = False
        #: No new copy may rely on it.
        self.withdrawn = False
        self.state: State = "registering"
        self.reason = ""
        #: How long registering took, and until the first piece was; 0 while it is under way.
        self.seconds = 0.0
        self.first_seconds = 0.0

    @property
    def registered(self) -> int:
        """Bytes."""
        return sum(self.ends) - sum(self.starts)


class PinnedPools:
    """Implements :class:`maru_core.contracts.PoolRegistrar` and :class:`~maru_core.contracts.PinnedMemory`.

    A failure is kept as ``reason``, told once, and is otherwise without consequence. A pool is unregistered when it is
    unmapped and the last :meth:`held` of before has ended; its memory stays mapped until then.
    """

    def __init__(
        self,
        open_driver: Callable[[], HostMemoryDriver],
        *,
        busy: Callable[[], bool] = lambda: True,
        piece: int | None = None,
        pause: float = PAUSE,
    ) -> None:
        """``open_driver`` is called on the registering thread, once it has something to do; may raise DriverError.

        ``busy``: whether somebody waits for what the engine does, asked on that thread before each piece. ``piece``:
        bytes of every registration, whole pages; ``None``: as large as that and the driver's speed allow.
        """
        if piece is not None and (piece < 1 or piece % page_size()):
            raise ValueError(f"pieces of {piece} bytes; they must be whole pages of {page_size()}")
        self._open_driver = open_driver
        self._busy = busy
        self._piece = piece
        self._pause = pause
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._log = logs.get_logger(__name__)
        self._registrations: list[_Registration] = []
        self._driver: HostMemoryDriver | None = None
        self._opening = threading.Lock()
        self._told: set[str] = set()
        self._closed = False
        self._stop = threading.Event()
        self._threads: set[threading.Thread] = set()
        # At exit no thread may be inside the driver while that is taken down.
        weakref.finalize(self, _end, self._stop, self._threads)

    # -- what is mapped ------------------------------------------------------------------------------------------

    def region_mapped(self, region: Region) -> None:
        """Start to register the pool; returns at once."""
        if self._elsewhere or self._closed:
            return
        try:
            registration = _Registration(region)
        except Exception as error:  # noqa: BLE001 - a pool that cannot be registered is slower, nothing else
            self._tell(region.descriptor.location, f"{type(error).__name__}: {error}")
            return
        with self._lock:
            self._registrations.append(registration)
        self._start(registration, "maru-register")

    def region_unmapping(self, region: Region) -> None:
        """Have the pool unregistered as soon as no copy uses it; returns at once."""
        if self._elsewhere:
            return
        with self._lock:
            mine = [registration for registration in self._registrations if registration.region is region]
            for registration in mine:
                registration.leaving = registration.withdrawn = True
                registration.population.stop()
                registration.state = "closing"
        for registration in mine:
            self._settle(registration)

    def close(self) -> None:
        """Unregister everything, waiting at most about JOIN seconds for it. Idempotent."""
        if self._elsewhere:
            return
        self._closed = True
        with self._lock:
            regions = [registration.region for registration in self._registrations]
        for region in regions:
            self.region_unmapping(region)
        _join(self._threads)
        self._release()

    # -- what copies ask -----------------------------------------------------------------------------------------

    @contextmanager
    def held(self) -> Iterator[None]:
        """What is registered within stays so, except what is being unmapped already."""
        if self._elsewhere:
            yield
            return
        with self._lock:
            mine = [registration for registration in self._registrations if not registration.withdrawn]
            for registration in mine:
                registration.users += 1
        try:
            yield
        finally:
            with self._lock:
                for registration in mine:
                    registration.users -= 1
            for registration in mine:
                if registration.withdrawn:
                    self._settle(registration)

    def spans(self, address: int, length: int) -> Sequence[MemorySpan]:
        """The stretch cut at the edges of pieces. Ask within :meth:`held`, and copy within it, too."""
        if length <= 0:
            return []
        if not self._elsewhere:
            with self._lock:
                for registration in self._registrations:
                    inside = registration.address <= address < registration.address + registration.size
                    if inside and not registration.withdrawn:
                        return cut(registration.starts, registration.ends, address, length)
        return [MemorySpan(0, length, False)]

    def covers(self, address: int, length: int) -> bool:
        """Whether every byte is registered, be it in several pieces."""
        return length > 0 and all(span.pinned for span in self.spans(address, length))

    def stats(self) -> dict[str, int | float | str]:
        """Bytes registered and not, in how many pieces, how long it took, the state, and why not all are."""
        if self._elsewhere:
            return {"state": "not registered", "reason": "this process was forked: its parent has them registered"}
        with self._lock:
            registrations = list(self._registrations)
            registered = sum(registration.registered for registration in registrations)
            states = {registration.state for registration in registrations}
            return {
                "state": states.pop() if len(states) == 1 else ", ".join(sorted(states)) or "no pool",
                "registered_bytes": registered,
                "unregistered_bytes": sum(registration.size for registration in registrations) - registered,
                "pieces": sum(len(registration.starts) for registration in registrations),
                "seconds": round(sum(registration.seconds for registration in registrations), 3),
                "first_piece_seconds": round(max((item.first_seconds for item in registrations), default=0.0), 3),
                "reason": next((item.reason for item in registrations if item.reason), ""),
            }

    # -- the thread ----------------------------------------------------------------------------------------------

    @property
    def _elsewhere(self) -> bool:
        """In a forked child: nothing is registered for it, and locks may be held by threads that are not there."""
        return os.getpid() != self._process

    def _start(self, registration: _Registration, name: str) -> None:
        thread = threading.Thread(target=self._work, args=(registration,), name=name, daemon=True)
        self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError as error:  # no thread can be started, or the interpreter ends
            self._threads.discard(thread)
            with self._lock:
                registration.busy = False
            self._fail(registration, error)

    def _settle(self, registration: _Registration) -> None:
        """Undo what is withdrawn when it is time: on a thread, or here when nothing of it is registered."""
        with self._lock:
            if not registration.withdrawn or registration.busy or registration.users or registration.view is None:
                return
            registration.busy = True
            registered = bool(registration.starts)
        if registered:
            self._start(registration, "maru-unregister")
        else:
            self._undo(registration)

    def _work(self, registration: _Registration) -> None:
        """Register the pool, and unregister it when it was withdrawn and nobody uses it."""
        try:
            if not registration.withdrawn:
                self._register(registration)
            with self._lock:
                undo = registration.withdrawn and not registration.users and not self._stop.is_set()
                registration.busy = undo
            if undo:
                self._undo(registration)
        except Exception as error:  # noqa: BLE001 - whatever the driver does, an engine goes on
            self._fail(registration, error)
        finally:
            self._threads.discard(threading.current_thread())

    def _register(self, registration: _Registration) -> None:
        began = time.perf_counter()
        problem: Exception | None = None
        try:
            driver = self._attached()
            pace = Pace(self._piece)
            pool = whole_pages(registration.address, registration.size)
            end = pool[0]
            while end < pool[1]:
                start, end = end, self._populated(registration, pool, end, pace)
                if registration.leaving or self._stop.is_set():
                    break
                try:
                    asked = time.perf_counter()
                    driver.register(start, end - start)
                    pace.took(end - start, time.perf_counter() - asked)
                except DriverError as error:
                    problem = error
                    if error.code == ALREADY_REGISTERED:  # by somebody who may undo it any time: not ours to rely on
                        continue
                    break
                with self._lock:
                    registration.starts.append(start)
                    registration.ends.append(end)
                    registration.first_seconds = registration.first_seconds or time.perf_counter() - began
                time.sleep(self._pause)
        except Exception as error:  # noqa: BLE001 - a driver of another version may fail in any way
            problem = error
        with self._lock:
            registration.seconds = time.perf_counter() - began
            registered = registration.registered
            if isinstance(problem, DriverError) and problem.code in _HOPELESS:
                registration.withdrawn = True
        try:
            if problem is not None:
                self._fail(registration, problem)
            elif not registration.leaving:
                self._log.info(
                    "maru.pool_registered",
                    location=registration.location,
                    bytes=registered,
                    pieces=len(registration.starts),
                    seconds=round(registration.seconds, 2),
                )
        finally:
            # Last: who sees how it ended finds the reason, too.
            with self._lock:
                if not registration.leaving:
                    registration.state = "partly" if problem is not None else "registered"
                    if registration.withdrawn or not registered:
                        registration.state = "not registered"

    def _populated(self, registration: _Registration, pool: tuple[int, int], start: int, pace: Pace) -> int:
        """Where the next piece ends, once its pages are there, or nobody wants it any more.

        Page faults are not for the driver to take, under its lock: they last ten times as long as the rest.
        """
        while not (registration.leaving or self._stop.is_set()):
            end = self._end(pool, start, pace)
            if registration.population.reach(end - registration.address, timeout=_LOOK):
                # The engine may have begun to work meanwhile.
                return min(end, self._end(pool, start, pace))
        return start

    def _end(self, pool: tuple[int, int], start: int, pace: Pace) -> int:
        return piece_end(pool, start, pace.size(BUSY if self._busy() else STARTING))

    def _unregister(self, registration: _Registration) -> None:
        """Exactly what was registered, the last piece first. What fails is not tried again: its context is gone."""
        if not registration.starts:
            return
        try:
            driver = self._attached()
        except DriverError as error:
            self._log.debug("maru.pool_not_unregistered", location=registration.location, reason=str(error))
            with self._lock:
                registration.starts.clear()
                registration.ends.clear()
            return
        while not self._stop.is_set():
            with self._lock:
                if not registration.starts:
                    return
                start, end = registration.starts.pop(), registration.ends.pop()
            try:
                driver.unregister(start, end - start)
            except DriverError as error:
                self._log.debug("maru.pool_not_unregistered", location=registration.location, reason=str(error))
            time.sleep(self._pause)

    def _undo(self, registration: _Registration) -> None:
        """Unregister, and let go of the memory of a pool that is unmapped; the last one closes the driver."""
        self._unregister(registration)
        with self._lock:
            registration.busy = False
            # Otherwise the process ends before all of it was unregistered.
            if not registration.leaving or registration.starts:
                return
            registration.view = None
            if registration in self._registrations:
                self._registrations.remove(registration)
        self._release()

    def _release(self) -> None:
        with self._lock:
            driver = None
            if self._closed and not self._registrations:
                driver, self._driver = self._driver, None
        if driver is not None:
            driver.close()

    def _attached(self) -> HostMemoryDriver:
        with self._opening:
            driver = self._driver
            if driver is None:
                driver = self._driver = self._open_driver()
        driver.attach()
        return driver

    def _fail(self, registration: _Registration, problem: Exception) -> None:
        reason = registration.reason = _explain(problem, registration.size)
        self._tell(registration.location, reason, registered=registration.registered, size=registration.size)

    def _tell(self, location: str, reason: str, **figures: int) -> None:
        if reason in self._told:
            return
        self._told.add(reason)
        self._log.warning(
            "maru.pool_not_registered",
            location=location,
            reason=reason,
            effect="copies between pool and device go through a small locked buffer, which is slower",
            **figures,
        )


def address_of(view: memoryview) -> int:
    """Where the bytes of a writable, contiguous buffer lie."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _explain(problem: Exception, size: int) -> str:
    text = str(problem) if isinstance(problem, DriverError) else f"{type(problem).__name__}: {problem}"
    if isinstance(problem, DriverError) and problem.code in _OF_LIMITS:
        hint = memlock_hint(size)
        if hint is not None:
            return f"{text}; {hint}"
    return text


def _end(stop: threading.Event, threads: set[threading.Thread]) -> None:
    stop.set()
    _join(threads)


def _join(threads: set[threading.Thread]) -> None:
    deadline = time.monotonic() + JOIN
    for thread in list(threads):
        if thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))
