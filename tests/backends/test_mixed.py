"""Pools of several backends under one name: which there are, in which order they are filled and read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from maru_backends.cpu import CpuBackend
from maru_backends.cxl import CxlBackend
from maru_backends.mixed import MixedBackend
from maru_core.client import MaruHandler
from maru_core.config import MaruConfig
from maru_core.contracts import PoolPlan, PoolRequest, PoolWish
from maru_core.errors import BackendError, ConfigError
from maru_core.fakes import FakeBackend
from maru_core.foreign import adopt_pool, create_pool, map_region, plan_pools
from maru_core.host import PluginHost
from maru_core.namespace import Namespace
from maru_core.pools import pool_wish, read_order
from maru_core.protocol import PoolDescriptor
from maru_core.testing import ServerFactory
from maru_core.testing_backend import BackendContract


class _Twice(FakeBackend):
    """A backend of two devices."""

    name = "twice"  # type: ignore[misc]

    def plan_pools(self, wish: PoolWish, backends: Any) -> list[PoolPlan]:
        assert wish.size is not None
        return [PoolPlan("twice", wish.size // 2, path) for path in ("/dev/one", "/dev/two")]


def _config(**settings: object) -> MaruConfig:
    return MaruConfig.from_mapping({f"maru_{name}": value for name, value in settings.items()}, {})


def _plans(config: MaruConfig) -> tuple[PoolPlan, ...]:
    host = PluginHost.with_plugins({"fake": FakeBackend(), "twice": _Twice()}, built_ins=True, strict=True)
    return plan_pools(host.backend, pool_wish(config))


def test_one_backend_plans_its_own_pools() -> None:
    assert _plans(_config(pool_size="2M", pool_path="/x")) == (PoolPlan("cpu", 2 << 20, "/x"),)


def test_mixed_plans_those_of_its_members_in_write_order() -> None:
    config = _config(storage_backend="mixed", write_order="twice,cpu,fake", pool_size="4M", cpu_pool_size="1M")
    plans = _plans(config)
    assert plans == (
        PoolPlan("twice", 2 << 20, "/dev/one"),
        PoolPlan("twice", 2 << 20, "/dev/two"),
        PoolPlan("cpu", 1 << 20, None, "maru_cpu_pool_size"),
        PoolPlan("fake", 4 << 20, None),
    )
    assert read_order(config, plans) == (0, 1, 2, 3)
    other = _config(storage_backend="mixed", read_order="fake,twice")
    assert read_order(other, plans) == (3, 0, 1, 2)


def test_what_cannot_be_is_refused_with_the_setting() -> None:
    with pytest.raises(ConfigError, match="maru_write_order names mixed"):
        _plans(_config(storage_backend="mixed", write_order="cpu,mixed"))
    with pytest.raises(BackendError, match="maru_write_order"):
        _plans(_config(storage_backend="mixed", write_order=""))
    with pytest.raises(BackendError, match="acme"):
        _plans(_config(storage_backend="mixed", write_order="cpu,acme"))
    with pytest.raises(ConfigError, match="maru_read_order names cxl, there are pools of cpu only"):
        read_order(_config(read_order="cxl"), [PoolPlan("cpu", 1 << 20, None)])


@pytest.mark.parametrize("answer", [[], ["cpu"], None])
def test_a_backend_that_plans_nonsense_is_refused(answer: Any) -> None:
    class Odd(FakeBackend):
        def plan_pools(self, wish: PoolWish, backends: Any) -> Any:
            return answer

    with pytest.raises(BackendError, match="plan_pools of backend fake"):
        plan_pools(lambda name: Odd(), PoolWish("fake", 1 << 20, None))
    host = PluginHost.with_plugins({"fake": Odd()}, built_ins=True, strict=True)
    with pytest.raises(BackendError, match="plan_pools of backend fake"):
        plan_pools(host.backend, pool_wish(_config(storage_backend="mixed", write_order="cpu,fake")))


def test_mixed_has_no_pools_of_its_own() -> None:
    with pytest.raises(BackendError, match="no pools of its own"):
        MixedBackend().create_pool(PoolRequest(0, 1 << 20, 4096, 0, None, "t"))


@pytest.mark.slow
def test_a_server_serves_the_pools_of_its_members(maru_server: ServerFactory) -> None:
    server = maru_server(storage_backend="mixed", write_order="cpu", cpu_pool_size="2M", pool_size="8M")
    config = _config(server_url=server.url)
    namespace = Namespace.of({"model": "m", "tokens": 256})
    with MaruHandler.connect(config, namespace, host=PluginHost.with_plugins({}, built_ins=True)) as handler:
        assert handler.store("k", b"bytes")
        (pool,) = handler.server_stats()["pools"]
        assert pool["backend"] == "cpu"
        assert 0 < pool["capacity"] <= 2 << 20


class _Member:
    """The pools of one member as a server has them made: planned by mixed, made and mapped by whose they are."""

    def __init__(self, member: Any) -> None:
        self.name = member.name
        self.one_host = getattr(member, "one_host", False)
        self._member = member
        self._backends = lambda name: {"mixed": MixedBackend(), member.name: member}[name]

    def plan_pools(self, wish: PoolWish, backends: Any) -> tuple[PoolPlan, ...]:
        return plan_pools(self._backends, PoolWish("mixed", None, None, (wish,)))

    def create_pool(self, request: PoolRequest) -> Any:
        return create_pool(self._backends, self._plan(request), request)

    def adopt_pool(self, request: PoolRequest) -> Any:
        return adopt_pool(self._backends, self._plan(request), request)

    def map_region(self, descriptor: PoolDescriptor) -> Any:
        return map_region(self._backends, descriptor)

    def _plan(self, request: PoolRequest) -> PoolPlan:
        return PoolPlan(self.name, request.size, request.path)


class TestCpuInMixed(BackendContract):
    @pytest.fixture
    def backend(self) -> Any:
        return _Member(CpuBackend())

    @pytest.fixture
    def ask(self, tmp_path: Path) -> PoolRequest:
        return PoolRequest(0, 1 << 20, 4096, 0, str(tmp_path), "owner")


class TestCxlInMixed(BackendContract):
    @pytest.fixture
    def backend(self) -> Any:
        return _Member(CxlBackend(patience=0.2, settle=0.0))

    @pytest.fixture
    def ask(self, tmp_path: Path) -> PoolRequest:
        return PoolRequest(0, 8 << 20, 4096, 0, str(tmp_path), "owner")


@pytest.mark.slow
@pytest.mark.parametrize("order", ["cpu,cxl", "cxl,cpu"])
@pytest.mark.parametrize("demote", [True, False])
def test_bytes_over_both_media_while_one_and_both_are_full(
    maru_server: ServerFactory, tmp_path: Path, order: str, demote: bool
) -> None:
    """One chain over both pools is found whole and equal; what does not fit goes tail first, and nothing is wrong."""
    (tmp_path / "device").mkdir()
    server = maru_server(
        storage_backend="mixed",
        write_order=order,
        pool_size="8M",
        cxl_pool_path=str(tmp_path / "device"),
        demote=str(demote).lower(),
    )
    # A request that is given up is a miss, which on a busy machine would say nothing about the pools.
    config = _config(server_url=server.url, verify="full", request_timeout=60)
    with MaruHandler.connect(config, Namespace.of({"model": "m"}), host=_host()) as handler:

        def data(number: int) -> bytes:
            return number.to_bytes(4, "little") * 15_000

        def store(first: int, count: int) -> None:
            for at in range(first, first + count, 10):
                names = [f"k{number}" for number in range(at, at + 10)]
                handler.batch_store(names, [data(number) for number in range(at, at + 10)])

        def found(numbers: range) -> int:
            hits = 0
            for number in numbers:
                result = handler.retrieve(f"k{number}")
                if result is not None:
                    with result:
                        assert bytes(result.view) == data(number)
                    hits += 1
            return hits

        store(0, 200)  # 12 MB: the first pool is full, both are not
        assert found(range(200)) == 200, handler.server_stats()
        first, second = handler.server_stats()["pools"]
        assert (first["backend"], second["backend"]) == tuple(order.split(","))
        assert first["objects"] + second["objects"] == 200
        assert min(first["objects"], second["objects"]) > 50
        assert bool(first["demoted_out"]) is demote
        store(200, 400)  # both are full, again and again
        assert found(range(600)) > 200, handler.server_stats()
        for pool in handler.server_stats()["pools"]:
            assert pool["used"] + pool["free"] + pool["reserved"] + pool["quarantined"] == pool["capacity"]
        assert handler.server_stats()["counters"]["evicted"] > 0


def _host() -> PluginHost:
    return PluginHost.with_plugins({}, built_ins=True)
