"""Maru's contract suite over this backend, and the rules that are its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from attrs import evolve
from maru_example_vendor.backend import FOLDER, MARK, SPARE, ExampleBackend

from maru_core.contracts import PoolRequest, PoolWish
from maru_core.errors import BackendError
from maru_core.testing_backend import BackendContract


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / MARK).touch()
    return tmp_path


@pytest.fixture
def ask(folder: Path) -> PoolRequest:
    return PoolRequest(0, 2 << 20, 8192, 0, str(folder), "owner")


@pytest.fixture
def backend() -> ExampleBackend:
    return ExampleBackend("example", {})


class TestContract(BackendContract):
    @pytest.fixture
    def backend(self) -> ExampleBackend:
        return ExampleBackend("example", {})

    @pytest.fixture
    def ask(self, folder: Path) -> PoolRequest:
        return PoolRequest(0, 2 << 20, 8192, 0, str(folder), "owner")


def test_a_folder_without_the_mark_gets_no_pool(backend: ExampleBackend, ask: PoolRequest, folder: Path) -> None:
    (folder / MARK).unlink()
    with pytest.raises(BackendError, match=f"is not marked .*is it mounted.* touch {folder / MARK}"):
        backend.create_pool(ask)
    assert list(folder.iterdir()) == []


def test_the_folder_is_the_operators_to_give(backend: ExampleBackend, ask: PoolRequest) -> None:
    with pytest.raises(BackendError, match="set MARU_EXAMPLE_PATH or maru_pool_path"):
        backend.create_pool(evolve(ask, path=None))


def test_a_path_of_its_own_counts_first(folder: Path) -> None:
    def planned(environ: dict[str, str], path: str | None) -> str | None:
        backend = ExampleBackend("example", environ)
        (plan,) = backend.plan_pools(PoolWish("example", 2 << 20, path), lambda name: backend)
        return plan.path

    assert planned({FOLDER: str(folder)}, "/elsewhere") == str(folder)
    assert planned({FOLDER: ""}, "/elsewhere") == "/elsewhere"
    assert planned({}, None) is None


def test_what_must_stay_free_stays_free(ask: PoolRequest, folder: Path) -> None:
    with pytest.raises(BackendError, match=rf"0 bytes are there .*{SPARE} 8192T"):
        ExampleBackend("example", {SPARE: "8192T"}).create_pool(ask)
    with pytest.raises(BackendError, match=f"{SPARE} is 'much'"):
        ExampleBackend("example", {SPARE: "much"}).create_pool(ask)
    assert [path.name for path in folder.iterdir()] == [MARK]


def test_hosts_do_not_share_files(backend: ExampleBackend, ask: PoolRequest) -> None:
    with pytest.raises(BackendError, match="maru_visibility=auto"):
        backend.create_pool(evolve(ask, shared_by_hosts=True))


def test_files_are_private_and_go_with_their_pool(backend: ExampleBackend, ask: PoolRequest, folder: Path) -> None:
    pool = backend.create_pool(ask)
    path = Path(pool.region.descriptor.location)
    assert path.stat().st_mode & 0o777 == 0o600
    pool.destroy()
    assert [path.name for path in folder.iterdir()] == [MARK]


def test_the_file_of_a_killed_server_is_taken_over_or_replaced(
    backend: ExampleBackend, ask: PoolRequest, folder: Path
) -> None:
    code = f"""
import os, signal
from maru_core.contracts import PoolRequest
from maru_example_vendor.backend import ExampleBackend
ExampleBackend("example", {{}}).create_pool({ask!r})
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode < 0
    pool = backend.adopt_pool(ask)
    assert pool is not None
    first = pool.region.descriptor.identity
    pool.leave()
    pool = backend.create_pool(ask)
    assert pool.region.descriptor.identity != first
    pool.destroy()


def test_what_others_could_have_written_is_not_taken_over(
    backend: ExampleBackend, ask: PoolRequest, folder: Path
) -> None:
    pool = backend.create_pool(ask)
    path = Path(pool.region.descriptor.location)
    pool.leave()
    path.chmod(0o644)
    assert backend.adopt_pool(ask) is None
    path.chmod(0o600)
    copy = folder / "copy"
    copy.write_bytes(path.read_bytes())
    copy.chmod(0o600)
    copy.replace(path)
    assert backend.adopt_pool(ask) is None, "a copy"
