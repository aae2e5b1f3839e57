"""Lets the request of a load that goes layer by layer go on before all of it is there: at once, or between steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from attrs import frozen

from maru_core.brake import Pull
from maru_core.contracts import LayeredLoad
from maru_core.foreign import pass_interrupt
from maru_integrations.vllm.answers import Answers
from maru_integrations.vllm.checking import Checking
from maru_integrations.vllm.loadqueue import LoadJob, LoadQueue
from maru_integrations.vllm.overlap import stop
from maru_integrations.vllm.release import Outlook, Progress, Recent, is_due

#: How long the loader sleeps between looks at the layers of a load that is to be released early, in seconds.
_LOOK = 0.0003


@frozen
class LoaderSettings:
    """``piece_bytes``: a large load may be asked to yield after that. ``release_after``: layers; 0: never early.

    ``spares_decodes``: with that many layers a load is released by :meth:`Releases.release` only, or by its end.
    """

    piece_bytes: int = 256 << 20
    release_after: int = 0
    spares_decodes: bool = False
    num_layers: int = 0
    log_timing: bool = False

    @property
    def releases_early(self) -> bool:
        """Whether requests may go on before all of their layers are there."""
        return 0 < self.release_after < self.num_layers


@frozen(eq=False)
class Underway:
    """A load of ``nbytes`` bytes that goes layer by layer since ``began``, by the clock."""

    job: LoadJob
    load: LayeredLoad
    began: float
    nbytes: int


class Releases:
    """Of one loader, with whom it shares its lock, queue and answers.

    Invariants: a load is told as released at most once, never before all of its objects were proven, never once it was
    cancelled, and before its end is told.
    """

    def __init__(
        self,
        lock: threading.Condition,
        queue: LoadQueue,
        answers: Answers,
        settings: LoaderSettings,
        clock: Callable[[], float],
    ) -> None:
        self._lock = lock
        self._queue = queue
        self._answers = answers
        self._settings = settings
        self._clock = clock
        #: What :meth:`release` may release. Taken back before its load is let go of.
        self._held: Underway | None = None
        #: Seconds per byte of loads by layer that ended well.
        self._pace = Recent()

    # -- on vLLM's thread ------------------------------------------------------------------------------------------

    def release(self, computing: int, outlook: Callable[[], Outlook]) -> None:
        """A step of so many requests ends: let a request go on whose load is held, if that is due."""
        held = self._held
        if held is None:
            return
        progress = self._progress(held)
        if progress is None or not is_due(progress, self._settings.release_after, computing, outlook()):
            return
        with self._lock:
            if self._held is held and self._queue.release(held.job):
                self._held = None
                # Before anybody can see its end, which would be told as one of a load that was not released.
                self._answers.load_released(held.job.op)

    def _progress(self, held: Underway) -> Progress | None:
        try:
            done = held.load.layers_done()
        except BaseException as error:  # noqa: BLE001 - a plugin's code; the loader's thread hears and tells of it
            pass_interrupt(error)
            return None
        with self._lock:
            pace = self._pace.median
        layers = self._settings.num_layers
        usual = None if pace is None else pace * held.nbytes / layers
        return Progress(done, layers, self._clock() - held.began, usual)

    # -- on either thread, under the lock ------------------------------------------------------------------------

    def stop(self) -> None:
        """Nobody wants the load that is held, if there is one: it will not be released, and stops."""
        held, self._held = self._held, None
        if held is not None:
            stop(held.load)

    # -- on the loader's thread ------------------------------------------------------------------------------------

    def follow(self, underway: Underway, checking: Checking) -> bool:
        """Until its request may go on: enough layers are there. Whether its objects are sound, as far as is known.

        ``checking``: what says so of each. Raises TransferError when the load fails before that.
        """
        job, load = underway.job, underway.load
        while load.layers_done() < self._settings.release_after or not checking.done():
            if job.cancelled or job.expires <= self._clock():
                load.cancel()
                return True
            time.sleep(_LOOK)
        if not all(checking.result()):
            load.cancel()
            return False
        with self._lock:
            if self._settings.spares_decodes:
                if self._queue.pull(self._clock()) is Pull.STOP:
                    stop(load)
                else:
                    self._held = underway
                return True
            released = self._queue.release(job)
        if released:
            self._answers.load_released(job.op)
        else:
            load.cancel()
        return True

    def arrived(self, underway: Underway) -> None:
        """All of its layers are there."""
        with self._lock:
            self._pace.add((self._clock() - underway.began) / underway.nbytes)

    def ended(self) -> None:
        """Nothing is under way any more: from now on nothing is released."""
        with self._lock:
            self._held = None
