"""The cxl backend on files that stand in for devices, and on a real device where there is one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from maru_backends.cxl import CxlBackend
from maru_core.contracts import PoolRequest, StorageBackend
from maru_core.testing_backend import BackendContract

MIB = 1 << 20


def quick(**changes: object) -> CxlBackend:
    """A backend that does not wait for anybody."""
    return CxlBackend(**{"patience": 0.1, "settle": 0.0, **changes})


class TestFolder(BackendContract):
    """A file in a folder, made for the pool."""

    @pytest.fixture
    def backend(self) -> StorageBackend:
        return quick()

    @pytest.fixture
    def ask(self, tmp_path: Path) -> PoolRequest:
        return PoolRequest(0, 16 * MIB, 8192, 0, str(tmp_path), "owner")


class TestFile(TestFolder):
    """A file with a size of its own."""

    one_place = True

    @pytest.fixture
    def ask(self, tmp_path: Path) -> PoolRequest:
        path = tmp_path / "device"
        with path.open("wb") as file:
            file.truncate(64 * MIB + 4097)
        path.chmod(0o600)
        return PoolRequest(0, 16 * MIB, 8192, 0, str(path), "owner")


class TestTmpfs(TestFile):
    """The same in memory."""

    @pytest.fixture
    def tmp_path(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="maru-test-", dir="/dev/shm") as folder:
            yield Path(folder)


@pytest.mark.device
class TestDevice(TestFolder):
    """A real device."""

    one_place = True

    @pytest.fixture
    def ask(self) -> PoolRequest:
        path = os.environ.get("MARU_TEST_DAX")
        if not path:
            pytest.skip("MARU_TEST_DAX names no DAX device, such as /dev/dax0.0, that these tests may overwrite")
        return PoolRequest(0, 16 * MIB, 8192, 0, path, "owner")
