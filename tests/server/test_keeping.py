"""What cleaners of ``/tmp`` go by: locks on folders, and times of files."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from maru_core.runtime_dir import RuntimeDir
from maru_core.server.keeping import TOUCH_INTERVAL, FolderKeeper
from tests.waiting import NEVER


def can_be_cleaned(folder: Path) -> bool:
    """As systemd-tmpfiles asks."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def test_every_file_is_touched_every_hour(tmp_path):
    runtime = RuntimeDir.open(tmp_path / "run")
    runtime.sessions.mkdir()
    files = [runtime.server_lock, runtime.weights, *(runtime.sessions / f"{n:016x}.lock" for n in range(600))]
    (tmp_path / "elsewhere").write_text("")
    (runtime.path / "link").symlink_to(tmp_path / "elsewhere")
    for path in files:
        path.write_text("")
    for path in (*files, runtime.path, runtime.sessions, tmp_path / "elsewhere"):
        os.utime(path, (1.0, 1.0))

    def old() -> int:
        return sum(path.stat().st_mtime == 1.0 for path in (*files, runtime.path, runtime.sessions))

    now = 0.0
    keeper = FolderKeeper(runtime, lambda: now)
    keeper()
    assert old() == 604
    now = TOUCH_INTERVAL
    keeper()
    assert 300 < old() < 604, "not all of them in one turn"
    runtime.weights.unlink()
    files.remove(runtime.weights)
    for _ in range(3):
        keeper()
    assert old() == 0
    assert (tmp_path / "elsewhere").stat().st_mtime == 1.0
    keeper.close()


def test_folders_are_locked_as_soon_as_nobody_else_locks_them(tmp_path):
    runtime = RuntimeDir.open(tmp_path / "run")
    keeper = FolderKeeper(runtime, lambda: 0.0)
    cleaner = os.open(runtime.path, os.O_RDONLY)
    fcntl.flock(cleaner, fcntl.LOCK_EX)
    keeper()
    os.close(cleaner)
    assert can_be_cleaned(runtime.path)
    runtime.sessions.mkdir()
    keeper()
    assert not can_be_cleaned(runtime.path)
    assert not can_be_cleaned(runtime.sessions)
    keeper.close()
    assert can_be_cleaned(runtime.path)


def test_a_folder_of_pools_is_left_to_the_backend(tmp_path):
    """Two servers may share it, and take turns by its lock."""
    runtime = RuntimeDir.open(tmp_path / "run")
    runtime.sessions.mkdir()
    (tmp_path / "link").symlink_to(runtime.path)
    keeper = FolderKeeper(runtime, lambda: 0.0, [str(tmp_path / "link")])
    keeper()
    assert can_be_cleaned(runtime.path)
    assert not can_be_cleaned(runtime.sessions)
    keeper.close()


@pytest.mark.slow
def test_a_server_holds_its_folder_of_sessions(start_server):
    server = start_server()
    assert not can_be_cleaned(server.folder / "sessions")
    server.process.terminate()
    server.process.wait(NEVER)
    assert can_be_cleaned(server.folder / "sessions")
