"""Order between vLLM's thread and a thread of ours that touches the same pages.

On a device, work is queued on streams: a thread that copies pages has a stream of its own, which waits for an event of
vLLM's stream before it touches them, and whose copies are awaited before anybody is told of them. On the host, what a
thread did is done, and nothing is needed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol


class Lane(Protocol):
    """Where one background thread runs its copies.

    ``queues``: whether work is queued and runs later, so that what was ordered behind a copy may run although that
    failed; where it does not, what was waited for is there.
    """

    @property
    def queues(self) -> bool:
        """See above."""

    def fence(self) -> Any:
        """A point in time on the *calling* thread's current stream: after everything that was queued there by now.

        Called on vLLM's thread. What it returns is only good for :meth:`after`.
        """

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Wraps all of the background thread's work: its copies run on this lane."""

    def after(self, fence: Any) -> None:
        """What this lane runs from now on comes after ``fence``. Called on the background thread; does not block."""

    def drain(self) -> None:
        """Block until everything on this lane has run, so that every stream sees it. Called on its thread.

        Raises RuntimeError when something of it failed.
        """


class HostLane:
    """Pages in host memory: copies happen when they are called, and so does what vLLM computes."""

    queues = False

    def fence(self) -> Any:
        """Nothing is queued."""
        return None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The calling thread may run on any core of the process: its starter may be pinned to one, to compute there."""
        from maru_transfer.host_copy import process_cores, roam

        roam(process_cores())
        yield

    def after(self, fence: Any) -> None:
        """All that came before is done."""

    def drain(self) -> None:
        """All is done."""


class DeviceLane:
    """Pages on a CUDA device. torch is used only from the first call on, never when this is made."""

    queues = True

    def __init__(self, device: Any) -> None:
        self._device = device
        self._stream: Any = None

    def fence(self) -> Any:
        """An event of the calling thread's current stream."""
        torch = importlib.import_module("torch")

        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The calling thread's device and current stream are this lane's."""
        torch = importlib.import_module("torch")

        with torch.cuda.device(self._device):
            if self._stream is None:
                self._stream = torch.cuda.Stream(self._device)
            with torch.cuda.stream(self._stream):
                yield

    def after(self, fence: Any) -> None:
        """The device waits, not the thread."""
        # Asking keeps the interpreter's lock; the call gives it up, and an engine may keep it for milliseconds.
        if not fence.query():
            self._stream.wait_event(fence)

    def drain(self) -> None:
        """The thread waits, without the interpreter lock."""
        if not self._stream.query():
            self._stream.synchronize()


@contextmanager
def on_lane(lane: Lane, fence: Any, begin: Callable[[], bool], end: Callable[[], None]) -> Iterator[bool]:
    """Wraps a copy of the calling thread, which has entered ``lane``, that comes after ``fence``.

    Yields whether it may be made, which is what ``begin`` says. ``end`` is called after that when everything has run,
    or failed to: pages and buffers are touched no more.
    """
    if not begin():
        yield False
        return
    try:
        lane.after(fence)
        yield True
    finally:
        try:
            lane.drain()
        finally:
            end()


def lane_for(device: Any) -> Lane:
    """The lane for pages on a torch device."""
    return HostLane() if device.type == "cpu" else DeviceLane(device)
