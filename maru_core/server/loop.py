"""The loop: one ROUTER socket, one thread, one frame or one slice at a time.

Between two slices of long requests every waiting message gets its turn, so nobody waits longer than a message and a
slice of each other peer.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import zmq

from maru_core import logs
from maru_core.access import KeyRing
from maru_core.protocol.messages import MAX_MESSAGE
from maru_core.server.doors import Doors
from maru_core.server.handlers import Handlers, Task

#: Seconds between two looks for dead sessions; a killed client's pages are free within about this time.
SWEEP_INTERVAL = 0.5
#: Longest wait for a message before the loop looks at the clock and at signals, in milliseconds.
_WAIT_MS = 100
#: The same while bytes are moved between pools, which is not announced when they are there.
_MOVE_MS = 1
#: A message from this size on, in bytes, may take so long that its turn is timed.
_LARGE = 64 * 1024
#: Messages that wait per peer in each direction. A peer that does not read loses further replies.
_RECEIVE_LIMIT = 32
#: ZeroMQ hears only once in a hundred calls what a busy peer has read: a lower limit would lose replies to good ones.
_SEND_LIMIT = 256
#: Milliseconds that a connection may take to greet, and to prove its key where there are keys.
_HANDSHAKE_MS = 3_000
#: Frames of a message of several that are dropped in one turn.
_FRAMES = 1000
#: Seconds to wait after a fault, so that one that stays does not take a processor.
_AFTER_FAULT = 0.01
#: Different faults that are logged; one that stays is logged once.
_TOLD = 100
#: Name under which the authenticator is asked about keys.
ZAP_DOMAIN = "maru"
#: Plain numbers: combining enumeration members takes time.
_NOBLOCK = int(zmq.NOBLOCK)
_NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)


class ServerLoop:
    """Serves ``handlers`` until ``stop`` is called or nobody was attached for ``idle_exit`` seconds.

    ``keys``: only clients whose public keys are among them are served; an authenticator must run in ``context``.
    ``chores`` are called at each sweep and must be quick. ``connections``: the most at a time; further ones are hung up
    on. Nothing that an operation, a sweep or a chore raises ends the loop.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        handlers: Handlers,
        idle_exit: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        keys: KeyRing | None = None,
        chores: Sequence[Callable[[], None]] = (),
        connections: int = 1 << 30,
    ) -> None:
        self._context = context
        self._handlers = handlers
        self._idle_exit = idle_exit
        self._clock = clock
        self._tasks: deque[tuple[bytes, Task]] = deque()
        self._stopping = self._ending = False
        self._keys = keys
        self._chores = chores
        self._connections = connections
        self._reopen = False
        self._next_sweep = self._busy_since = clock()
        self._told: set[str] = set()
        self._log = logs.get_logger(__name__)
        #: Whether there is an address at which new clients are let in.
        self.listens = False
        self._refused = 0
        self._socket, self._doors = self._open()

    def _open(self) -> tuple[zmq.Socket[bytes], Doors]:
        listener = self._context.socket(zmq.ROUTER)
        listener.setsockopt(zmq.LINGER, 0)
        listener.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
        listener.setsockopt(zmq.RCVHWM, _RECEIVE_LIMIT)
        listener.setsockopt(zmq.SNDHWM, _SEND_LIMIT)
        listener.setsockopt(zmq.ROUTER_MANDATORY, 0)
        listener.setsockopt(zmq.BACKLOG, 1024)
        listener.setsockopt(zmq.RCVTIMEO, _WAIT_MS)
        listener.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        if self._keys is not None:
            listener.setsockopt(zmq.CURVE_SERVER, 1)
            listener.setsockopt(zmq.CURVE_SECRETKEY, self._keys.pair.secret)
            listener.setsockopt_string(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
            # Without an authenticator nobody is let in, rather than everybody.
            listener.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        return listener, Doors(self._context, listener, self._connections)

    def bind(self, url: str) -> str:
        """Listen; returns the address with any wildcard filled in. Raises zmq.ZMQError."""
        if url.startswith("tcp://["):
            self._socket.setsockopt(zmq.IPV6, 1)
        self._socket.bind(url)
        self.listens = True
        endpoint: bytes = self._socket.getsockopt(zmq.LAST_ENDPOINT)  # type: ignore[assignment]
        return endpoint.rstrip(b"\0").decode()

    def unbind(self, address: str) -> None:
        """Listen there no more; connections that exist live on. Raises zmq.ZMQError."""
        self._socket.unbind(address)
        self.listens = False

    def hang_up(self) -> None:
        """Close every connection, and listen nowhere until bound again; sessions live on and clients come back.

        That happens after the sweep that is in progress.
        """
        self._reopen = True

    def end(self) -> None:
        """End :meth:`run` at the next sweep, when the reply to whoever asked for it is sent."""
        self._ending = True

    def stop(self) -> None:
        """End :meth:`run` soon; safe in a signal handler and from other threads."""
        self._stopping = True

    def run(self) -> None:
        """Serve. Raises zmq.ZMQError when the socket or its context was closed meanwhile."""
        self._next_sweep = self._busy_since = self._clock()
        while not self._stopping:
            try:
                if self._serve():
                    return
            except Exception as error:
                if isinstance(error, zmq.ZMQError) and error.errno in (zmq.ETERM, zmq.ENOTSOCK):
                    raise
                self._fault("a turn of the loop", error)
                time.sleep(_AFTER_FAULT)
            if self._reopen:
                self._reopen = False
                self._hang_up()

    def _serve(self) -> bool:
        """Serve until there is something to do about the socket; whether to end."""
        handlers, tasks, receive, clock = self._handlers, self._tasks, self._socket.recv, self._clock
        more = self._socket.getsockopt
        identify = None if self._keys is None else self._receive_known
        who: str | None = ""
        large = ahead = False
        # After a fault the rest of the message may still be there.
        dropping = bool(more(zmq.RCVMORE))
        while not self._stopping:
            peer, frame = b"", None
            heavy = dropping or bool(tasks)
            started = time.thread_time() if heavy else 0.0
            if dropping:
                dropping = self._drop_frames()
            else:
                busy = bool(tasks) or ahead
                if not busy and handlers.moving:
                    busy = True
                    self._socket.poll(_MOVE_MS)
                try:
                    peer = receive(_NOBLOCK if busy else 0)
                    if identify is None:
                        frame = receive()
                    else:
                        frame, who = identify(self._keys)
                except zmq.Again:
                    if ahead and not tasks:
                        handlers.make_ahead()
            if not heavy and frame is not None and len(frame) > _LARGE:
                heavy, started = True, time.thread_time()
            if frame is not None:
                if more(zmq.RCVMORE):
                    dropping = True
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
            if now >= self._next_sweep or handlers.sweep_soon:
                self._next_sweep = now + SWEEP_INTERVAL
                if self._sweep(now):
                    return True
                if self._reopen:
                    return False
        return True

    def _drop_frames(self) -> bool:
        """Take frames of a message that nobody reads; whether there are more. Nobody else's can be had before."""
        receive, more = self._socket.recv, self._socket.getsockopt
        for _ in range(_FRAMES):
            try:
                receive(_NOBLOCK)
            except zmq.Again:
                return False
            if not more(zmq.RCVMORE):
                return False
        return True

    def _sweep(self, now: float) -> bool:
        """What is done about twice a second; whether to end."""
        if self._ending:
            return True
        handlers = self._handlers
        try:
            self._tasks.extend((b"", task) for task in handlers.sweep())
        except Exception as error:  # noqa: BLE001 - what it should have found is found the next time
            self._fault("the look for dead sessions", error)
        for chore in self._chores:
            try:
                chore()
            except Exception as error:  # noqa: BLE001 - others have theirs to do
                self._fault("a chore", error)
        if self._doors.refused > self._refused:
            fresh, self._refused = self._doors.refused - self._refused, self._doors.refused
            handlers.directory.counters["connections_refused"] += fresh
            self._tell("connections", "connections are over the limit", most=self._connections)
        if self._idle_exit is not None:
            if handlers.sessions.attached:
                self._busy_since = now
            elif now - self._busy_since >= self._idle_exit:
                return True
        return False

    def _hang_up(self) -> None:
        self._socket.close(0)
        self._doors.join()
        self.listens, self._refused = False, 0
        while not self._stopping:
            try:
                self._socket, self._doors = self._open()
                return
            except zmq.ZMQError as error:
                self._fault("a new socket", error)
                time.sleep(_WAIT_MS / 1000)

    def _fault(self, what: str, error: Exception) -> None:
        self._handlers.directory.counters["internal_errors"] += 1
        self._tell(f"{what}: {error!r}", f"{what} failed", exc_info=error)

    def _tell(self, key: str, event: str, **facts: object) -> None:
        """Log an error the first time."""
        if key not in self._told and len(self._told) < _TOLD:
            self._told.add(key)
            self._log.error(event, **facts)

    def close(self) -> None:
        """Close the socket; what was not sent is dropped."""
        self._socket.close(0)
        self._doors.join()

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
