"""The loop: one ROUTER socket, one thread, one frame or one slice at a time.

Between two slices of long requests every waiting message gets its turn, so nobody waits longer than a message and a
slice of each other peer.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import zmq

from maru_core.access import KeyRing
from maru_core.protocol.messages import MAX_MESSAGE
from maru_core.server.handlers import Handlers, Task

#: Seconds between two looks for dead sessions; a killed client's pages are free within about this time.
SWEEP_INTERVAL = 0.5
#: Longest wait for a message before the loop looks at the clock and at signals, in milliseconds.
_WAIT_MS = 100
#: A message from this size on, in bytes, may take so long that its turn is timed.
_LARGE = 64 * 1024
#: Messages that wait per peer in each direction. A peer that does not read loses further replies.
_RECEIVE_LIMIT = 32
_SEND_LIMIT = 256
#: Seconds that a connection may take to prove its key.
_HANDSHAKE_MS = 10_000
#: Name under which the authenticator is asked about keys.
ZAP_DOMAIN = "maru"
#: Plain numbers: combining enumeration members takes time.
_NOBLOCK = int(zmq.NOBLOCK)
_NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)


class ServerLoop:
    """Serves ``handlers`` until ``stop`` is called or nobody was attached for ``idle_exit`` seconds.

    ``keys``: only clients whose public keys are among them are served; an authenticator must run in ``context``.
    ``chores`` are called at each sweep and must be quick.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        handlers: Handlers,
        idle_exit: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        keys: KeyRing | None = None,
        chores: Sequence[Callable[[], None]] = (),
    ) -> None:
        self._handlers = handlers
        self._idle_exit = idle_exit
        self._clock = clock
        self._tasks: deque[tuple[bytes, Task]] = deque()
        self._stopping = self._ending = False
        self._keys = keys
        self._chores = chores
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
        self._socket.setsockopt(zmq.RCVHWM, _RECEIVE_LIMIT)
        self._socket.setsockopt(zmq.SNDHWM, _SEND_LIMIT)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 0)
        self._socket.setsockopt(zmq.BACKLOG, 1024)
        self._socket.setsockopt(zmq.RCVTIMEO, _WAIT_MS)
        if keys is not None:
            self._socket.setsockopt(zmq.CURVE_SERVER, 1)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.pair.secret)
            self._socket.setsockopt_string(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
            # Without an authenticator nobody is let in, rather than everybody.
            self._socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
            self._socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)

    def bind(self, url: str) -> str:
        """Listen; returns the address with any wildcard filled in. Raises zmq.ZMQError."""
        if url.startswith("tcp://["):
            self._socket.setsockopt(zmq.IPV6, 1)
        self._socket.bind(url)
        endpoint: bytes = self._socket.getsockopt(zmq.LAST_ENDPOINT)  # type: ignore[assignment]
        return endpoint.rstrip(b"\0").decode()

    def unbind(self, address: str) -> None:
        """Listen there no more; connections that exist live on. Raises zmq.ZMQError."""
        self._socket.unbind(address)

    def end(self) -> None:
        """End :meth:`run` at the next sweep, when the reply to whoever asked for it is sent."""
        self._ending = True

    def stop(self) -> None:
        """End :meth:`run` soon; safe in a signal handler and from other threads."""
        self._stopping = True

    def run(self) -> None:
        """Serve."""
        handlers, tasks, receive, clock = self._handlers, self._tasks, self._socket.recv, self._clock
        more = self._socket.getsockopt
        identify = None if self._keys is None else self._receive_known
        who: str | None = ""
        large = ahead = False
        busy_since = clock()
        next_sweep = busy_since
        while not self._stopping:
            peer, frame = b"", None
            try:
                peer = receive(_NOBLOCK if tasks or ahead else 0)
                if identify is None:
                    frame = receive()
                else:
                    frame, who = identify(self._keys)
            except zmq.Again:
                if ahead and not tasks:
                    handlers.make_ahead()
            heavy = bool(tasks) or (frame is not None and len(frame) > _LARGE)
            started = time.thread_time() if heavy else 0.0
            if frame is not None:
                if more(zmq.RCVMORE):
                    self._socket.recv_multipart()
                    handlers.directory.counters["bad_requests"] += 1
                elif who is None:
                    handlers.directory.counters["keys_refused"] += 1
                else:
                    outcome = handlers.handle(frame, who)
                    if isinstance(outcome, Task):
                        tasks.append((peer, outcome))
                    elif outcome is not None:
                        self._send(peer, outcome)
            # A large message is a turn of its own, but never two in a row while work waits.
            large = frame is not None and len(frame) > _LARGE and not large
            if tasks and not large:
                peer, task = tasks.popleft()
                if not task.advance():
                    tasks.append((peer, task))
                elif task.reply is not None:
                    self._send(peer, task.reply)
            ahead = handlers.settle()
            if heavy:
                handlers.longest_turn = max(handlers.longest_turn, time.thread_time() - started)
            now = clock()
            if now >= next_sweep or handlers.sweep_soon:
                next_sweep = now + SWEEP_INTERVAL
                if self._ending:
                    return
                tasks.extend((b"", task) for task in handlers.sweep())
                for chore in self._chores:
                    chore()
                if self._idle_exit is not None:
                    if handlers.sessions.attached:
                        busy_since = now
                    elif now - busy_since >= self._idle_exit:
                        return

    def close(self) -> None:
        """Close the socket; what was not sent is dropped."""
        self._socket.close(0)

    def _receive_known(self, keys: KeyRing | None) -> tuple[bytes, str | None]:
        """The next frame and the public key of who sent it; ``None`` when the server does not know that any more."""
        frame = self._socket.recv(copy=False)
        try:
            identity = str(frame.get("User-Id"))
        except zmq.ZMQError:
            return frame.bytes, None
        return frame.bytes, identity if keys is not None and identity in keys.clients else None

    def _send(self, peer: bytes, reply: bytes) -> None:
        try:
            self._socket.send(peer, _NOBLOCK_MORE)
            self._socket.send(reply, _NOBLOCK)
        except zmq.ZMQError:
            # The peer is gone or does not read; it will time out and cancel. Nobody else waits for it.
            self._handlers.directory.counters["replies_dropped"] += 1
