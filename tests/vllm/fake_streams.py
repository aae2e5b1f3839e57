"""A device on which nothing runs before it must: streams, events, and an adversary that picks the worst order.

Work that is queued on a stream runs only when somebody waits for it, and then as little as possible besides. So code
that relies on an order which it did not ask for reads or overwrites the wrong bytes, every time.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from attrs import define, field

from maru_core.errors import TransferError
from maru_core.geometry import ChunkCopy
from tests.waiting import NEVER


@define(eq=False)
class Event:
    """A place in a stream."""

    stream: Stream
    passed: bool = False


@define(eq=False)
class Stream:
    """Work in order; each item runs or is an event to wait for."""

    name: str
    work: deque[Callable[[], None] | Event] = field(factory=deque)


@define(eq=False)
class Device:
    """Pages of one layer or several: ``pages[layer][block]`` is one value."""

    pages: list[list[Any]]
    lock: threading.RLock = field(factory=threading.RLock)
    compute: Stream = field(factory=lambda: Stream("compute"))
    _current: threading.local = field(factory=threading.local)

    @property
    def current(self) -> Stream:
        return getattr(self._current, "stream", self.compute)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        self._current.stream = stream
        try:
            yield
        finally:
            del self._current.stream

    def queue(self, work: Callable[[], None] | Event) -> None:
        with self.lock:
            self.current.work.append(work)

    def record(self) -> Event:
        with self.lock:
            event = Event(self.current)
            self.current.work.append(lambda: setattr(event, "passed", True))
            return event

    def reach(self, stream: Stream, event: Event | None = None) -> None:
        """Run ``stream`` up to ``event`` or its end, and of other streams only what it waits for."""
        with self.lock:
            while stream.work and not (event is not None and event.passed):
                item = stream.work.popleft()
                if isinstance(item, Event):
                    self.reach(item.stream, item)
                else:
                    item()


@define(eq=False)
class FakeLane:
    """Implements maru_integrations.vllm.streams.Lane. ``broken``: which of its promises it does not keep."""

    device: Device
    broken: str = ""
    stream: Stream = field(factory=lambda: Stream("lane"))
    queues = True

    def fence(self) -> Event:
        return self.device.record()

    @contextmanager
    def entered(self) -> Iterator[None]:
        with self.device.on(self.stream):
            yield

    def after(self, fence: Event) -> None:
        if self.broken != "after":
            self.device.queue(fence)

    def drain(self) -> None:
        if self.broken != "drain":
            self.device.reach(self.stream)


@define(eq=False)
class QueuedTransfer:
    """Implements Transfer and LoadsByLayer with work on the calling thread's current stream, as on a GPU.

    A load has read its buffers when it returns, as through staging memory, and its pages are written when the stream
    gets there. A chunk is one block; layer ``n`` of an object is its byte ``n``. ``lost``: the first layer that does
    not arrive of loads by layer, as is known when they end.
    """

    device: Device
    broken: str = ""
    lost: int | None = None

    def load(self, block_ids: Sequence[int], copies: Sequence[ChunkCopy]) -> None:
        for layer in range(len(self.device.pages)):
            self._load_layer(block_ids, copies, layer)

    def _load_layer(self, block_ids: Sequence[int], copies: Sequence[ChunkCopy], layer: int) -> None:
        for copy in copies:
            block, value = block_ids[copy.chunk], copy.buffer[layer]
            self.device.queue(lambda block=block, value=value: self._write(layer, block, value))  # type: ignore[misc]

    def _write(self, layer: int, block: int, value: int) -> None:
        self.device.pages[layer][block] = value

    def store(self, block_ids: Sequence[int], copies: Sequence[ChunkCopy]) -> None:
        pages = self.device.pages

        def read(copy: ChunkCopy) -> None:
            for layer in range(len(pages)):
                copy.buffer[layer] = pages[layer][block_ids[copy.chunk]]

        for copy in copies:
            self.device.queue(lambda copy=copy: read(copy))  # type: ignore[misc]
        self.device.reach(self.device.current)

    def begin_load(self, block_ids: Sequence[int], copies: Sequence[ChunkCopy]) -> QueuedLoad:
        events = []
        for layer in range(len(self.device.pages)):
            if self.lost is None or layer < self.lost:
                self._load_layer(block_ids, copies, layer)
            events.append(self.device.record())
        return QueuedLoad(self.device, self.device.current, events, self.broken, self.lost is not None)

    def close(self) -> None:
        pass


@define(eq=False)
class QueuedLoad:
    """Implements LayeredLoad. Its last layer arrives when the test says so, or when somebody waits for it."""

    device: Device
    stream: Stream
    events: list[Event]
    broken: str
    fails: bool = False
    may_finish: threading.Event = field(factory=threading.Event)

    def _check(self) -> None:
        if self.fails and self.may_finish.is_set():
            raise TransferError("injected")

    def layers_done(self) -> int:
        self._check()
        self.device.reach(self.stream, self.events[0])
        return sum(event.passed for event in self.events)

    def wait_layer(self, layer: int) -> None:
        self._check()
        if self.broken != "wait_layer":
            self.device.queue(self.events[layer])

    def finish(self) -> None:
        assert self.may_finish.wait(NEVER)
        self.device.reach(self.stream)
        self._check()

    def cancel(self) -> None:
        self.may_finish.set()
