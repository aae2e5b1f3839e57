"""Loads that arrive layer by layer: a thread moves one layer after another while others wait for them.

No torch here: what a layer's arrival means is the engine's business.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

from maru_core.errors import TransferError
from maru_transfer.helpers import share


class Arrival(Protocol):
    """Work of one layer that was submitted. Its methods may be called from any thread and block for no byte."""

    def query(self) -> bool:
        """Whether it has run."""

    def order(self) -> None:
        """What the calling thread's current stream runs later comes behind it."""


class SameProcess:
    """Made in one process, tells another one that was forked from it: threads and devices are not there."""

    def __init__(self) -> None:
        self._owner = os.getpid()

    @property
    def here(self) -> bool:
        """Whether this is still the process."""
        return os.getpid() == self._owner

    def check(self) -> None:
        """Raises TransferError when it is not."""
        if not self.here:
            raise TransferError("this transfer, or load, belongs to the process that this one was forked from")


class Arrived:
    """Implements :class:`Arrival` for what was done when it was submitted."""

    def query(self) -> bool:
        """It has."""
        return True

    def order(self) -> None:
        """It is."""


class EndingLoad:
    """A load under way: whoever asks, on whichever thread, is told of its end and of its error.

    What it holds by ``move``, such as the buffers, it lets go of when it ends.
    """

    def __init__(self, move: Callable[[], None]) -> None:
        """``move`` moves everything; also when it raises, nothing is under way any more."""
        self._move: Callable[[], None] | None = move
        self._process = SameProcess()
        self._changed = threading.Condition()
        self._ended = False
        self._error: BaseException | None = None

    def run(self) -> None:
        """Move everything. Raises nothing: errors are told by the other methods."""
        error: BaseException | None = None
        try:
            if self._move is not None:
                self._move()
        except BaseException as caught:  # noqa: BLE001 - every kind must reach who waits
            error = caught
        with self._changed:
            self._error = error
            self._ended = True
            self._move = None
            self._changed.notify_all()

    def finish(self) -> None:
        """Blocks until :meth:`run` has ended."""
        self._process.check()
        with self._changed:
            self._changed.wait_for(lambda: self._ended)
            self._raise()

    def _raise(self) -> None:
        if isinstance(self._error, TransferError):
            raise TransferError(str(self._error)) from self._error
        if self._error is not None:
            raise TransferError(f"the load failed: {self._error!r}") from self._error


class SteppedLoad(EndingLoad):
    """Implements :class:`maru_core.contracts.LayeredLoad`: :meth:`run` calls ``move`` for layer 0, 1, ..."""

    def __init__(self, layers: int, move: Callable[[int], Arrival], settle: Callable[[], None] = lambda: None) -> None:
        """``move`` submits one layer; ``settle`` blocks until all that was submitted has run, also after an error."""
        super().__init__(lambda: self._step(move, settle))
        self._layers = layers
        self._arrivals: list[Arrival] = []
        self._done = 0
        self._cancelled = False

    def layers_done(self) -> int:
        """See :class:`maru_core.contracts.LayeredLoad`; so are the others."""
        self._process.check()
        with self._changed:
            self._raise()
            while self._done < len(self._arrivals) and (self._ended or self._arrivals[self._done].query()):
                self._done += 1
            return self._done

    def wait_layer(self, layer: int) -> None:
        """Blocks until the layer is submitted."""
        self._process.check()
        if not 0 <= layer < self._layers:
            raise TransferError(f"layer {layer} is none of the {self._layers} that this load moves")
        with self._changed:
            self._changed.wait_for(lambda: self._ended or len(self._arrivals) > layer)
            self._raise()
            if self._ended:
                return
            arrival = self._arrivals[layer]
        arrival.order()

    def cancel(self) -> None:
        """Takes effect before the next layer."""
        self._cancelled = True

    def _step(self, move: Callable[[int], Arrival], settle: Callable[[], None]) -> None:
        try:
            for layer in range(self._layers):
                if self._cancelled:
                    raise TransferError(f"the load was cancelled before layer {layer} of {self._layers}")
                arrival = move(layer)
                with self._changed:
                    self._arrivals.append(arrival)
                    self._changed.notify_all()
        finally:
            settle()


class Runs(Protocol):
    """What a :class:`LoadThread` runs."""

    def run(self) -> None:
        """Runs to its end; raises nothing."""

    def cancel(self) -> None:
        """Ends :meth:`run` soon, or before it began."""


class LoadThread:
    """The thread on which a transfer's layered loads run one after another; it ends with :meth:`close`.

    Used by one thread at a time. Started by the first load.
    """

    def __init__(self, initializer: Callable[[], None] = lambda: None) -> None:
        """``initializer`` is called on the thread before anything else."""
        self._initializer = initializer
        self._pool: ThreadPoolExecutor | None = None
        #: Who began a load may let go of it when it has ended, and with it of its error.
        self._loads: list[tuple[weakref.ref[Runs], threading.Event]] = []
        self._process = SameProcess()

    def start(self, load: Runs) -> None:
        """Run ``load`` behind those that were started before. Raises TransferError in a forked child."""
        self._process.check()
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "maru-layers", initializer=self._initializer)
        ended = threading.Event()
        self._loads = [(other, event) for other, event in self._loads if not event.is_set()]
        self._loads.append((weakref.ref(load), ended))
        share(self._pool, partial(_run, load, ended))

    def settle(self) -> None:
        """Block until every load that was started has ended; who holds it hears of its errors."""
        if not self._process.here:
            return
        for _, ended in self._loads:
            ended.wait()
        self._loads = []

    def close(self) -> None:
        """Cancel what runs or waits, and end the thread. Idempotent; does nothing in a forked child."""
        if not self._process.here:
            return
        for reference, _ in self._loads:
            load = reference()
            if load is not None:
                load.cancel()
        self.settle()
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


def _run(load: Runs, ended: threading.Event) -> None:
    try:
        load.run()
    finally:
        ended.set()
