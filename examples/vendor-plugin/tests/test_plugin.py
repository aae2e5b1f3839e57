"""The hooks, a real server, and what is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from maru_example_vendor.backend import MARK
from maru_example_vendor.plugin import ExamplePlugin

from maru_core.client import MaruHandler
from maru_core.config import MaruConfig, PluginSettings
from maru_core.contracts import PoolRequest, ReadExtent
from maru_core.host import PluginHost
from maru_core.namespace import Namespace
from maru_core.testing import HostFactory, ServerFactory


@pytest.fixture
def host(maru_host: HostFactory) -> PluginHost:
    return maru_host({"example": ExamplePlugin()})


def test_it_counts_reads_from_its_own_pools_only(host: PluginHost, tmp_path: Path) -> None:
    (tmp_path / MARK).touch()
    pools = [
        host.backend(name).create_pool(PoolRequest(0, 1 << 20, 4096, 0, str(tmp_path), "t"))
        for name in ("example", "cpu")
    ]
    for pool in pools:
        extents = [ReadExtent(0, 65536, 4096), ReadExtent(0, 131072, 4096)]
        host.before_read(pool.region, extents)
        host.after_read(pool.region, extents)
        pool.destroy()
    stats = host.hint_stats()
    assert (stats["example.reads"], stats["example.read_bytes"]) == (1, 8192)
    assert float(stats["example.read_ms"]) > 0


def test_the_plugin_loads_nothing_heavy() -> None:
    code = "import sys, maru_example_vendor.plugin; print('maru_example_vendor.backend' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


def test_it_is_not_discovered_unless_a_test_says_so() -> None:
    assert "example" not in PluginHost.discover(PluginSettings()).backends()


@pytest.mark.installed_plugins
def test_the_installed_plugin_is_found() -> None:
    found = PluginHost.discover(PluginSettings(allowed=("example",), strict=True))
    assert "example" in found.backends()


@pytest.mark.installed_plugins
def test_a_server_serves_its_pools(maru_server: ServerFactory, tmp_path: Path) -> None:
    """A real server of a real installation: the plugin is found by its entry point, there and here."""
    (tmp_path / MARK).touch()
    server = maru_server(storage_backend="example", pool_path=str(tmp_path))
    config = MaruConfig.from_mapping({"maru_server_url": server.url}, {})
    with MaruHandler.connect(config, Namespace.of({"model": "m"})) as handler:
        assert handler.store("k", b"bytes")
        with handler.retrieve("k") as found:
            assert bytes(found.view) == b"bytes"
        (pool,) = handler.server_stats()["pools"]
        assert pool["backend"] == "example"
