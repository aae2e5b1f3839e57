"""Metrics for Prometheus, on a listener of their own that can do nothing but tell them.

The loop publishes a snapshot about twice a second; a thread renders it at most once and hands it out. However many ask,
and however slowly, the loop waits for nobody.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from maru_core import logs
from maru_core.address import Address
from maru_core.errors import ConfigError

#: Connections at a time; one more closes the oldest that waits for no answer.
MAX_CONNECTIONS: Final = 64
#: Bytes of a request, and seconds for it and for its answer.
MAX_REQUEST: Final = 8192
DEADLINE: Final = 2.0

#: What counters mean. Others that the directory keeps are told under their own names.
_MEANING: Final[Mapping[str, str]] = {
    "hits": "Keys that were asked for and leased to a reader.",
    "misses": "Keys that were asked for and not there.",
    "stored": "Objects that were committed.",
    "evicted": "Objects that made room for others, or that an operator dropped.",
    "aborted": "Reservations that were given back.",
    "deleted": "Objects that clients deleted.",
    "demoted": "Objects that moved to a lower pool instead of being evicted.",
    "promoted": "Replicas that were made in the first pool of what is used much in others.",
    "replicas_dropped": "Replicas that made room, or went with their objects.",
    "moves_dropped": "Copies to another pool that nobody wanted any more when they were made, or that failed.",
    "resets": "Namespaces that began a new weights epoch.",
    "expired_sessions": "Sessions that ended by the proven death of their owner, or that never attached.",
    "bad_requests": "Messages that were not understood or over a limit.",
    "cancelled": "Requests that were cancelled.",
    "internal_errors": "Faults inside the server.",
    "replies_dropped": "Replies to peers that did not read them.",
    "admin_refused": "Requests of administration without the right credential.",
    "keys_refused": "Messages of clients whose key was taken away.",
    "connections_refused": "Connections over the limit, which were hung up on.",
}
_SKIPPED: Final = "skipped_"
_DIRECTIONS: Final = ("demoted_in", "demoted_out", "promoted_in")
_STATES: Final = ("used", "free", "reserved", "quarantined")


class StatsCollector(Collector):
    """Turns the latest snapshot into metrics."""

    def __init__(self) -> None:
        self.snapshot: Mapping[str, Any] = {}

    def describe(self) -> list[Metric]:
        """Nothing: names depend on what the server counts, and are not checked for clashes."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All metrics."""
        snapshot = self.snapshot
        server = snapshot["server"]
        build = GaugeMetricFamily("maru_build_info", "Constant 1.", labels=("version", "protocol"))
        build.add_metric((server["version"], str(server["protocol"])), 1)
        yield build
        yield GaugeMetricFamily("maru_uptime_seconds", "Time since the start.", server["uptime_s"])
        yield GaugeMetricFamily(
            "maru_longest_turn_seconds",
            "Most processor time that one message and one slice of work took.",
            server["longest_turn_s"],
        )
        yield GaugeMetricFamily("maru_sessions", "Attached sessions.", snapshot["sessions"])
        yield from _pools(snapshot["pools"])
        yield from _counters(snapshot["counters"])
        yield _labelled("maru_requests", "Requests by operation.", "op", snapshot["asked"])
        yield _labelled("maru_refusals", "Answers other than OK, by code.", "code", snapshot["refused"])


def _labelled(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(name, text, labels=(label,))
    for value, count in values.items():
        family.add_metric((value,), count)
    return family


def _counters(counters: Mapping[str, int]) -> Iterator[Metric]:
    skipped = {name.removeprefix(_SKIPPED): count for name, count in counters.items() if name.startswith(_SKIPPED)}
    yield _labelled("maru_skipped", "Objects that were not stored, by reason.", "reason", skipped)
    for name, count in counters.items():
        if not name.startswith(_SKIPPED):
            yield CounterMetricFamily(f"maru_{name}", _MEANING.get(name, f"Counter {name} of the directory."), count)


def _pools(pools: list[Mapping[str, Any]]) -> Iterator[Metric]:
    labels = ("pool", "backend")
    states = GaugeMetricFamily(
        "maru_pool_bytes", "Bytes of a pool by state; together they are its capacity.", labels=(*labels, "state")
    )
    capacity = GaugeMetricFamily("maru_pool_capacity_bytes", "Bytes of a pool for objects.", labels=labels)
    leased = GaugeMetricFamily("maru_pool_leased_bytes", "Used bytes of a pool that somebody reads.", labels=labels)
    objects = GaugeMetricFamily("maru_pool_objects", "Objects in a pool.", labels=labels)
    moving = GaugeMetricFamily(
        "maru_pool_moving_bytes", "Reserved bytes of a pool that objects of others are being copied to.", labels=labels
    )
    replicas = GaugeMetricFamily("maru_pool_replicas", "Replicas in a pool of objects of others.", labels=labels)
    hits = CounterMetricFamily("maru_pool_hits", "Keys that were leased to a reader in a pool.", labels=labels)
    evicted = CounterMetricFamily("maru_pool_evicted_bytes", "Bytes of objects evicted from a pool.", labels=labels)
    moves = CounterMetricFamily(
        "maru_pool_moves", "Objects that came into a pool and left it.", labels=(*labels, "direction")
    )
    for pool in pools:
        which = str(pool["pool"]), pool["backend"]
        for state in _STATES:
            states.add_metric((*which, state), pool[state])
        capacity.add_metric(which, pool["capacity"])
        leased.add_metric(which, pool["leased"])
        objects.add_metric(which, pool["objects"])
        moving.add_metric(which, pool["moving"])
        replicas.add_metric(which, pool["replicas"])
        hits.add_metric(which, pool["hits"])
        evicted.add_metric(which, pool["evicted"])
        for direction in _DIRECTIONS:
            moves.add_metric((*which, direction), pool[direction])
    yield from (states, capacity, leased, objects, moving, replicas, hits, evicted, moves)


class MetricsListener:
    """``GET /metrics`` and ``GET /healthz`` at ``where`` (``host:port``), and nothing else.

    Raises ConfigError when that cannot be bound. One thread, at most MAX_CONNECTIONS connections of at most DEADLINE
    seconds for the request and as much for the answer.
    """

    def __init__(self, where: str) -> None:
        host, _, port = where.rpartition(":")
        host = host.strip("[]")
        self._log = logs.get_logger(__name__)
        try:
            self._socket = socket.create_server(
                (host, int(port)), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=MAX_CONNECTIONS
            )
        except (OSError, ValueError) as error:
            raise ConfigError(f"metrics cannot be served at {where}: {error}; choose another maru_metrics") from error
        shown = f"[{host}]" if ":" in host else host
        #: Where it listens, as ``host:port``.
        self.address: Final = f"{shown}:{self._socket.getsockname()[1]}"
        if not Address("tcp", host=host).is_local:
            self._log.warning("metrics can be read by other hosts", address=self.address)
        self._collector = StatsCollector()
        # Not the library's own: that one also holds whatever else is in this process, and tells about the interpreter.
        self._registry = CollectorRegistry()
        self._registry.register(self._collector)
        self._rendered: tuple[Mapping[str, Any] | None, bytes] = (None, b"")
        self._connections = 0
        #: Those that wait for nothing: they have not asked yet, or have their answer. Oldest first.
        self._idle: dict[asyncio.StreamWriter, None] = {}
        self._loop = asyncio.new_event_loop()
        self._ending = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="maru-metrics", daemon=True)

    def start(self, snapshot: Mapping[str, Any]) -> None:
        """Begin to answer."""
        self.publish(snapshot)
        self._thread.start()
        self._log.info("metrics", address=self.address)

    def publish(self, snapshot: Mapping[str, Any]) -> None:
        """Answer with this from now on; it may not be changed any more."""
        self._collector.snapshot = snapshot

    def close(self) -> None:
        """End the thread and the connections."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._ending.set)
            self._thread.join(2 * DEADLINE)
        self._socket.close()
        if not self._thread.is_alive():
            self._loop.close()

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._answer, sock=self._socket, limit=MAX_REQUEST)
        await self._ending.wait()
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        full = self._connections > MAX_CONNECTIONS
        if full and self._idle:
            # Whoever opens connections and asks nothing keeps nobody out who has a question.
            oldest = next(iter(self._idle))
            del self._idle[oldest]
            oldest.transport.abort()
            full = False
        try:
            if not full:
                self._idle[writer] = None
                request = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), DEADLINE)
                self._idle.pop(writer, None)
                writer.write(self._reply(request))
                await asyncio.wait_for(writer.drain(), DEADLINE)
                writer.write_eof()
                # The peer closes when it has read the answer; closing first could take it away.
                self._idle[writer] = None
                await asyncio.wait_for(reader.read(1), DEADLINE)
        except (OSError, EOFError, asyncio.LimitOverrunError, asyncio.TimeoutError):
            return  # gone, too slow or too much: it gets no answer
        finally:
            self._idle.pop(writer, None)
            self._connections -= 1
            writer.transport.abort()

    def _reply(self, request: bytes) -> bytes:
        words = request.split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return _response("400 Bad Request", b"not a request of HTTP/1.1\n")
        path = words[1].split(b"?", 1)[0]
        if path not in (b"/metrics", b"/healthz"):
            return _response("404 Not Found", b"there is /metrics and /healthz\n")
        if words[0] != b"GET":
            return _response("405 Method Not Allowed", b"only GET\n", "Allow: GET\r\n")
        if path == b"/healthz":
            return _response("200 OK", b"ok\n")
        return _response("200 OK", self._render(), kind=CONTENT_TYPE_LATEST)

    def _render(self) -> bytes:
        snapshot = self._collector.snapshot
        if self._rendered[0] is not snapshot:
            self._rendered = snapshot, generate_latest(self._registry)
        return self._rendered[1]


def _response(status: str, body: bytes, more: str = "", kind: str = "text/plain; charset=utf-8") -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n{more}Connection: close\r\n\r\n"
    )
    return head.encode() + body
