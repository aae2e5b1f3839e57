"""One socket of one thread: send a frame, wait for its reply, never past the deadline."""

from __future__ import annotations

import math
import os
import threading
import time
from typing import Any

import zmq

from maru_core.access import PUBLIC_SUFFIX, SERVER, ClientKeys
from maru_core.errors import ConfigError, ProtocolError, Unavailable
from maru_core.protocol import MAX_MESSAGE
from maru_core.protocol.codec import decode, describe

#: Requests that may wait in a socket that is not connected; more than that and the caller is told at once.
SEND_QUEUE = 1000
#: What a context and its first socket take at most; a later socket takes two.
_DESCRIPTORS = 12
#: A plain number: combining and passing enumeration members takes time.
_NOBLOCK = int(zmq.NOBLOCK)


def new_context() -> zmq.Context[zmq.Socket[bytes]]:
    """A context for the sockets of one handler; raises Unavailable when no file descriptor is left."""
    try:
        _expect_descriptors()
        return zmq.Context()
    except (OSError, zmq.ZMQError) as error:
        raise Unavailable(f"ZeroMQ cannot start: {error}; raise the limit of open files") from error


class Channel:
    """A DEALER socket of one thread; whoever uses it, its thread or the one that closes it, holds ``lock``.

    Replies are matched by request id. A reply that nobody waits for any more (its request was given up and cancelled
    by id) is dropped, so the socket stays usable after a deadline: what is sent next reaches the server after the
    cancellation, never before it.

    With ``keys`` both sides prove who they are, and nobody else can read or change what is sent.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], url: str, keys: ClientKeys | None = None) -> None:
        self.lock = threading.Lock()
        self._url = url
        self._keys = keys
        try:
            _expect_descriptors()
            self._socket = context.socket(zmq.DEALER)
        except (OSError, zmq.ZMQError) as error:
            raise Unavailable(f"no socket to reach {url}: {error}; raise the limit of open files") from error
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, SEND_QUEUE)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 250)
        self._timeout_ms = -1
        self._parked: dict[int, list[Any] | None] = {}
        try:
            if url.startswith("tcp://["):
                # Not for names: those would be looked up as IPv6 only, also where the server listens on IPv4.
                self._socket.setsockopt(zmq.IPV6, 1)
            if keys is not None:
                keys.apply(self._socket)
            self._socket.connect(url)
        except zmq.ZMQError as error:
            self._socket.close(0)
            raise ConfigError(
                f"maru_server_url {url!r} cannot be used: {error.strerror or error}; give auto, ipc:///path or tcp://host:port"
            ) from error

    def send(self, frame: bytes) -> None:
        """Queue one frame; raises Unavailable at once when the queue is full or the socket is closed."""
        try:
            self._socket.send(frame, _NOBLOCK)
        except zmq.Again:
            if self._keys is not None:
                # Also when the server refused the key: ZeroMQ gives such a connection up for good.
                raise Unavailable(nobody_answers(self._url, self._keys)) from None
            raise Unavailable(f"{SEND_QUEUE} requests already wait for the server at {self._url}") from None
        except zmq.ZMQError as error:
            raise Unavailable(f"the connection to {self._url} is closed ({error})") from None

    def expect(self, request_id: int) -> None:
        """Keep the reply to this request when it comes while another one is waited for."""
        self._parked[request_id] = None

    def forget(self, request_id: int) -> None:
        """Drop the reply to this request whenever it comes."""
        self._parked.pop(request_id, None)

    def receive(self, request_id: int, timeout: float) -> list[Any] | None:
        """The reply to ``request_id``, ``None`` when ``timeout`` seconds passed; raises ProtocolError, Unavailable."""
        parked = self._parked.get(request_id)
        if parked is not None:
            del self._parked[request_id]
            return parked
        deadline = 0.0
        remaining = timeout
        while True:
            frame = self._receive_frame(remaining)
            if frame is None:
                return None
            message = decode(frame)
            if len(message) < 3 or not (type(message[0]) is type(message[1]) is type(message[2]) is int):
                raise ProtocolError(f"a reply must start with request id, epoch and code, got {describe(message)}")
            if message[0] == request_id:
                self._parked.pop(request_id, None)
                return message
            if message[0] in self._parked:
                self._parked[message[0]] = message
            # A stray reply: go on with what is left of the time. The clock is only read in this rare case.
            now = time.monotonic()
            if not deadline:
                deadline = now + timeout
            remaining = max(0.0, deadline - now)

    def close(self) -> None:
        """Close at once, dropping what was not sent. Idempotent."""
        self._socket.close(0)

    def __del__(self) -> None:
        # The thread that owned the socket ended. Without this pyzmq warns about a socket left open.
        socket = getattr(self, "_socket", None)
        if socket is not None:
            socket.close(0)

    def _receive_frame(self, timeout: float) -> bytes | None:
        socket = self._socket
        try:
            if timeout <= 0:
                return socket.recv(_NOBLOCK)
            milliseconds = math.ceil(timeout * 1000)
            if milliseconds != self._timeout_ms:
                socket.setsockopt(zmq.RCVTIMEO, milliseconds)
                self._timeout_ms = milliseconds
            return socket.recv()
        except zmq.Again:
            return None
        except zmq.ZMQError as error:
            raise Unavailable(f"the connection to {self._url} is closed ({error})") from None


def nobody_answers(url: str, keys: ClientKeys | None, *, listens: bool = False) -> str:
    """The reason to give when no server answers. One that knows none of a client's keys does not answer either.

    ``listens``: a process certainly listens at ``url``.
    """
    if listens:
        return f"the Maru server at {url} listens but does not answer: see whether its process is stopped or starved"
    if keys is None:
        return f"no Maru server answers at {url}; start one with `maru serve`, or set maru_server_url to auto"
    return (
        f"no Maru server answers at {url} with the keys of {keys.source}: is one there, does it have this client's "
        f"public key, and is the {SERVER}{PUBLIC_SUFFIX} beside it that server's?"
    )


def _expect_descriptors() -> None:
    """Raise OSError when few file descriptors are left: ZeroMQ would end the process where it needs one of its own."""
    taken: list[int] = []
    try:
        for _ in range(_DESCRIPTORS):
            taken.append(os.eventfd(0))
    finally:
        for descriptor in taken:
            os.close(descriptor)
