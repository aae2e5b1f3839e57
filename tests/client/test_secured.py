"""Handlers that reach their server over tcp with keys."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from maru_core.access import make_keys
from maru_core.client import MaruHandler, StoreResult
from maru_core.config import MaruConfig
from maru_core.errors import BackendError, ConfigError, ServerError, Unavailable
from maru_core.host import PluginHost
from maru_core.namespace import OPERATOR_FACT, Namespace
from maru_core.testing import ServerFactory
from tests.server.keyed import free_port, own_address
from tests.waiting import eventually


@pytest.fixture
def url(maru_server: ServerFactory, maru_runtime_dir: Path) -> str:
    """A server with keys at an address that other hosts could reach."""
    make_keys(maru_runtime_dir / "keys", ["client"])
    make_keys(maru_runtime_dir / "keys", ["red"], ["red"])
    host = own_address()
    address = f"tcp://{host}:{free_port(host)}"
    maru_server(server_url=address, keys=str(maru_runtime_dir / "keys"))
    return address


def connect(url: str, keys: Path | None, facts: dict[str, str] | None = None, **more: object) -> MaruHandler:
    config = MaruConfig(server_url=url, keys=None if keys is None else str(keys), **more)
    host = PluginHost.with_plugins({}, built_ins=True)
    return MaruHandler.connect(config, Namespace.of({"model": "m", **(facts or {})}), host=host)


@pytest.mark.slow
def test_store_and_retrieve(url: str, maru_runtime_dir: Path) -> None:
    with connect(url, maru_runtime_dir / "keys") as handler:
        assert handler.store("a", b"bytes") is StoreResult.STORED
        found = handler.retrieve("a")
        assert found is not None
        assert bytes(found.view) == b"bytes"
        found.close()
        assert handler.stats()["client"]["url"] == url


@pytest.mark.slow
def test_a_client_has_only_its_own_files(url: str, maru_runtime_dir: Path, tmp_path: Path) -> None:
    for name in ("red.key", "server.pub"):
        (tmp_path / name).write_bytes((maru_runtime_dir / "keys" / name).read_bytes())
        (tmp_path / name).chmod(0o600)
    with connect(url, tmp_path / "red.key", {OPERATOR_FACT: "red"}) as handler:
        assert handler.store("a", b"bytes") is StoreResult.STORED
    started = time.monotonic()
    with pytest.raises(ServerError, match="client red is bound to maru_cache_namespace 'red', this is 'blue'"):
        connect(url, tmp_path / "red.key", {OPERATOR_FACT: "blue"})
    assert time.monotonic() - started < 5


@pytest.mark.slow
def test_wrong_keys_are_one_clear_reason_and_no_hang(url: str, maru_runtime_dir: Path, tmp_path: Path) -> None:
    make_keys(tmp_path / "strange", ["client"])
    server = (maru_runtime_dir / "keys" / "server.pub").read_bytes()
    for wrong_server in (True, False):
        if not wrong_server:
            (tmp_path / "strange" / "server.pub").write_bytes(server)
        started = time.monotonic()
        with capture_logs() as logs, connect(url, tmp_path / "strange", connect_timeout=1.5) as handler:
            assert time.monotonic() - started < 3
            with pytest.raises(Unavailable, match=r"with the keys of .*client\.key") as refused:
                handler.store("a", b"bytes")
            assert "\n" not in str(refused.value)
            with pytest.raises(Unavailable):
                handler.retrieve("a")
        assert len([entry for entry in logs if entry["event"] == "maru link down"]) == 1


@pytest.mark.slow
def test_a_key_that_is_let_in_later_needs_no_restart(url: str, maru_runtime_dir: Path, tmp_path: Path) -> None:
    make_keys(tmp_path / "late", ["client"])
    (tmp_path / "late" / "server.pub").write_bytes((maru_runtime_dir / "keys" / "server.pub").read_bytes())
    with connect(url, tmp_path / "late", connect_timeout=1.0) as handler:
        with pytest.raises(Unavailable):
            handler.store("a", b"bytes")
        (maru_runtime_dir / "keys" / "late.pub").write_bytes((tmp_path / "late" / "client.pub").read_bytes())

        def stored() -> bool:
            try:
                return handler.store("a", b"bytes") is not None
            except Unavailable:
                return False

        eventually(stored)


def test_without_keys_an_address_of_another_host_is_refused_at_once(maru_runtime_dir: Path) -> None:
    for url in ("tcp://192.0.2.9:5555", "tcp://cache.example:5555", "tcp://[2001:db8::1]:5555", "tcp://0.0.0.0:5555"):
        with pytest.raises(ConfigError, match="maru keygen"):
            MaruConfig(server_url=url)
        assert MaruConfig(server_url=url, keys=str(maru_runtime_dir)).server_url == url
        with pytest.raises(ConfigError, match=r"no key file .*client\.key"):
            connect(url, maru_runtime_dir)


@pytest.mark.slow
def test_keys_do_not_matter_on_the_private_socket(maru_server: ServerFactory, tmp_path: Path) -> None:
    server = maru_server(keys=str(tmp_path))
    with connect(server.url, tmp_path) as handler:
        assert handler.store("a", b"bytes") is StoreResult.STORED


@pytest.mark.slow
def test_a_client_that_cannot_map_the_pool_has_no_hits_and_one_warning(url: str, maru_runtime_dir: Path) -> None:
    """As on another host: the server answers, its memory is not there."""
    with connect(url, maru_runtime_dir / "keys") as here:
        here.store("a", b"bytes")
        for pool in (maru_runtime_dir / "pools").iterdir():
            pool.rename(maru_runtime_dir / pool.name)
        with capture_logs() as logs, connect(url, maru_runtime_dir / "keys") as away:
            for _ in range(3):
                with pytest.raises(BackendError, match="pool"):
                    away.retrieve("a")
                with suppress(BackendError):
                    assert away.store("b", b"bytes") is StoreResult.BUSY, (
                        "the reservation before it is being given back"
                    )

            def taken() -> int:
                pool = away.stats()["pools"][0]
                return int(pool["leased"] + pool["reserved"])

            eventually(lambda: taken() == 0)
            assert not here.exists("b")
        assert len([entry for entry in logs if entry["log_level"] == "warning"]) == 1
