"""The fake backend keeps the contract, so that tests over it mean something."""

import pytest

from maru_core.contracts import PoolRequest, StorageBackend
from maru_core.fakes import FakeBackend
from maru_core.testing_backend import BackendContract


class TestFake(BackendContract):
    @pytest.fixture
    def backend(self) -> StorageBackend:
        return FakeBackend()

    @pytest.fixture
    def ask(self) -> PoolRequest:
        return PoolRequest(0, 1 << 20, 8192, 0, None, "owner")


def test_it_notes_what_was_published_and_acquired() -> None:
    region = FakeBackend().create_pool(PoolRequest(0, 1 << 20, 4096, 0, None, "t")).region
    region.publish(8, 4)
    region.acquire(16, 2)
    assert (region.published, region.acquired, region.closed) == ([(8, 4)], [(16, 2)], False)
