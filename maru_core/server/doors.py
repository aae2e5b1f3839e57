"""What ZeroMQ itself does not bound: how many connections there are, and what half of a message may take."""

from __future__ import annotations

import os
import resource
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any, Final

import zmq
from attrs import define, field

from maru_core import logs

#: Descriptors that connections and sessions leave to everything else.
_RESERVE: Final = 128
#: More than this is not needed, and no descriptor table has to be that long.
_MOST: Final = 100_000
_MONITOR: Final = "inproc://maru-doors-"
_EVENT: Final = struct.Struct("=Hi")
_EVENTS: Final = int(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED)


def places() -> int:
    """How many connections there may be, and how many sessions: half each of the descriptors that are left."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if most == resource.RLIM_INFINITY:
        return _MOST
    return min(_MOST, max(8, (most - len(os.listdir("/proc/self/fd")) - _RESERVE) // 2))


def own_memory() -> int:
    """Bytes of memory of this process that are nobody else's: neither pools nor files."""
    with open("/proc/self/statm", "rb") as file:
        words = file.read().split()
    return (int(words[1]) - int(words[2])) * resource.getpagesize()


class Doors:
    """Hangs up on connections to ``listener`` beyond the first ``most``.

    ZeroMQ would accept them until no descriptor is left, and then end the process (``ipc``) or spin (``tcp``). It tells
    of each that it accepted; a thread reads that, so that a busy loop does not matter.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], listener: zmq.Socket[bytes], most: int) -> None:
        self._most = most
        self._open: set[int] = set()
        #: Connections that were hung up on.
        self.refused = 0
        address = f"{_MONITOR}{id(listener)}"
        listener.monitor(address, _EVENTS)
        self._events = context.socket(zmq.PAIR)
        self._events.setsockopt(zmq.LINGER, 0)
        self._events.connect(address)
        self._thread = threading.Thread(target=self._watch, name="maru-doors", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait for the thread; the listener must be closed."""
        self._thread.join(5)

    def _watch(self) -> None:
        try:
            while True:
                event, which = _EVENT.unpack(self._events.recv_multipart()[0])
                if event == zmq.EVENT_MONITOR_STOPPED:
                    return
                if event != zmq.EVENT_ACCEPTED:
                    self._open.discard(which)
                    continue
                self._open.add(which)
                if len(self._open) > self._most:
                    self.refused += 1
                    _hang_up(which)
        except zmq.ZMQError:
            return
        finally:
            self._events.close(0)


def _hang_up(descriptor: int) -> None:
    # Only shut down: ZeroMQ owns the descriptor, sees the end of the stream, and closes it.
    try:
        connection = socket.socket(fileno=descriptor)
    except OSError:
        return
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # gone by itself
    finally:
        connection.detach()


@define(eq=False)
class Footprint:
    """Calls ``hang_up`` when the process has ``allowed`` bytes of memory more than at the start.

    ZeroMQ gathers the frames of one message, and replies that a peer does not read, outside of any limit and unseen;
    only closing the connections frees them. Call about twice a second.
    """

    _allowed: int
    _hang_up: Callable[[], None]
    _measure: Callable[[], int] = own_memory
    _limit: int = field(init=False)
    _was_cut: bool = field(init=False, default=False)
    _log: Any = field(init=False, factory=lambda: logs.get_logger(__name__))

    @_limit.default
    def _above_start(self) -> int:
        return self._measure() + self._allowed

    def __call__(self) -> None:
        """Look. Takes microseconds. Raises OSError."""
        used = self._measure()
        if self._was_cut:
            self._was_cut = False
            # What is left is the server's own; hanging up again would not help.
            self._limit = max(self._limit, used + self._allowed // 2)
        elif used > self._limit:
            self._was_cut = True
            self._log.error("hanging up on every client: messages took too much memory", bytes=used, limit=self._limit)
            self._hang_up()
