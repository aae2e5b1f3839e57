"""The listener for Prometheus: what it tells, and that nobody who asks can do harm."""

from __future__ import annotations

import re
import socket
import threading
import time
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from maru_core.errors import ConfigError
from maru_core.protocol import Op
from maru_core.server.metrics import DEADLINE, MAX_CONNECTIONS, MAX_REQUEST, MetricsListener
from tests.server.keyed import free_port
from tests.server.raw import Refused, keys
from tests.server.test_edge import make_handlers
from tests.waiting import eventually


@pytest.fixture
def listener():
    handlers, _ = make_handlers()
    made = MetricsListener("127.0.0.1:0")
    made.start(handlers.snapshot())
    yield made
    made.close()


def get(address: str, path: str = "/metrics", method: str = "GET") -> tuple[int, str]:
    request = urllib.request.Request(f"http://{address}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def raw(address: str, data: bytes, timeout: float = 10) -> bytes:
    """Everything that comes back."""
    host, port = address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout) as plain:
        answer = b""
        try:
            plain.sendall(data)
            while part := plain.recv(65536):
                answer += part
        except ConnectionError:
            pass
        return answer


def samples(address: str) -> dict[tuple[str, ...], float]:
    """Values by name and label values, these in the order of the labels' names."""
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(get(address)[1])
        for sample in family.samples
    }


@pytest.mark.slow
def test_a_server_tells_what_it_did(start_server, connect):
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    client = connect(start_server("--metrics", address)).hello()
    client.store(keys(0, 3), 5000)
    client.acquire(keys(0, 5))
    client.reserve(keys(9, 1))
    client.reserve(keys(9, 1))
    client.weights_epoch = 7
    client.reserve(keys(20, 2))
    for _ in range(2):
        with pytest.raises(Refused):
            client.call(99)
    eventually(lambda: samples(address).get(("maru_refusals_total", "BAD_REQUEST")) == 2)
    found = samples(address)
    expected = {
        ("maru_hits_total",): 3,
        ("maru_misses_total",): 2,
        ("maru_stored_total",): 3,
        ("maru_skipped_total", "busy"): 1,
        ("maru_skipped_total", "refused"): 2,
        ("maru_skipped_total", "no_room"): 0,
        ("maru_sessions",): 1,
        ("maru_requests_total", "RESERVE"): 4,
        ("maru_requests_total", "HELLO"): 1,
        ("maru_pool_bytes", "file", "0", "used"): 3 * 8192,
        ("maru_pool_bytes", "file", "0", "reserved"): 4096,
        ("maru_pool_bytes", "file", "0", "quarantined"): 0,
        ("maru_pool_leased_bytes", "file", "0"): 3 * 8192,
        ("maru_pool_objects", "file", "0"): 3,
        ("maru_replies_dropped_total",): 0,
    }
    assert {name: found.get(name) for name in expected} == expected
    states = sum(value for name, value in found.items() if name[0] == "maru_pool_bytes")
    assert states == found["maru_pool_capacity_bytes", "file", "0"]
    assert found["maru_uptime_seconds",] > 0
    assert ("maru_longest_turn_seconds",) in found
    assert any(name[0] == "maru_build_info" for name in found)


@pytest.mark.slow
def test_keys_and_namespaces_are_not_told(start_server, connect):
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    server = start_server("--metrics", address)
    client = connect(server).hello()
    client.store(keys(0, 3))
    text = get(address)[1]
    assert "maru_stored_total" in text
    for secret in (
        client.stats()["namespaces"][0]["digest"],
        (server.folder / "admin.token").read_text().strip(),
        str(client.session),
        str(client.epoch),
        str(server.folder),
    ):
        assert secret not in text


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/metrics", 200),
        ("GET", "/metrics?name=x", 200),
        ("GET", "/healthz", 200),
        ("POST", "/metrics", 405),
        ("DELETE", "/healthz", 405),
        ("GET", "/", 404),
        ("GET", "/metrics/../admin", 404),
        ("POST", "/admin", 404),
    ],
)
def test_only_two_pages_can_be_read(listener, method, path, status):
    assert get(listener.address, path, method)[0] == status


@pytest.mark.parametrize(
    "data",
    [
        b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /metrics\r\n\r\n",
        b"GET /metrics FTP/1.1\r\n\r\n",
        b"\xff" * 100 + b"\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nX: " + b"y" * (2 * MAX_REQUEST) + b"\r\n\r\n",
        b"GET /" + b"x" * (1 << 20),
    ],
)
def test_nonsense_gets_no_metrics(listener, data):
    assert b"maru_" not in raw(listener.address, data)
    assert get(listener.address, "/healthz") == (200, "ok\n")


@pytest.mark.slow
def test_a_slow_client_is_cut_off(listener):
    started = time.monotonic()
    assert raw(listener.address, b"GET /metrics HTTP/1.1\r\n") == b""
    assert time.monotonic() - started < 5


@pytest.mark.slow
def test_a_client_that_does_not_read_is_cut_off(listener):
    host, port = listener.address.rsplit(":", 1)
    with socket.create_connection((host, int(port))) as plain:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        plain.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        eventually(lambda: listener._connections == 1)
        eventually(lambda: listener._connections == 0)


@pytest.mark.slow
def test_idle_connections_keep_nobody_out(listener):
    host, port = listener.address.rsplit(":", 1)
    held = [socket.create_connection((host, int(port))) for _ in range(MAX_CONNECTIONS)]
    eventually(lambda: listener._connections == MAX_CONNECTIONS)
    threads = threading.active_count()
    started = time.monotonic()
    for path in ("/healthz", "/metrics", "/healthz"):
        assert get(listener.address, path)[0] == 200
    assert time.monotonic() - started < DEADLINE
    assert threading.active_count() == threads
    assert held[0].recv(1) == b"", "the oldest one made room"
    eventually(lambda: listener._connections == 0)
    for one in held:
        one.close()


def test_connections_that_are_being_answered_are_not_closed(listener, monkeypatch):
    """When all places are taken by those, the newest is turned away."""
    monkeypatch.setattr("maru_core.server.metrics.MAX_CONNECTIONS", 0)
    assert raw(listener.address, b"GET /metrics HTTP/1.1\r\n\r\n") == b""


def test_many_requests_render_once_per_snapshot(listener, monkeypatch):
    rendered = []
    monkeypatch.setattr(
        "maru_core.server.metrics.generate_latest", lambda registry: rendered.append(1) or b"maru_x 1\n"
    )
    for _ in range(20):
        assert get(listener.address)[1] == "maru_x 1\n"
    assert len(rendered) == 1
    handlers, _ = make_handlers()
    listener.publish(handlers.snapshot())
    get(listener.address)
    assert len(rendered) == 2


@pytest.mark.slow
def test_scrapes_do_not_hold_up_the_server(start_server, connect):
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    client = connect(start_server("--metrics", address)).hello()
    ending = threading.Event()

    def scrape() -> None:
        while not ending.is_set():
            get(address)

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        took = []
        for _ in range(300):
            started = time.monotonic()
            client.call(Op.PING)
            took.append(time.monotonic() - started)
    finally:
        ending.set()
        thread.join()
    assert sorted(took)[len(took) // 2] < 0.05


def test_an_address_that_cannot_be_used_is_named(listener):
    with pytest.raises(ConfigError, match=re.escape(listener.address)):
        MetricsListener(listener.address)
    with pytest.raises(ConfigError, match="maru_metrics"):
        MetricsListener("no.such.host.invalid:1")
