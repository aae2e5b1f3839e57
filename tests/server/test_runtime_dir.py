"""Whose folder, whose lock, which address."""

from __future__ import annotations

import fcntl
import os
import threading

import pytest

from maru_core.errors import ConfigError
from maru_core.runtime_dir import AlreadyRunning, RuntimeDir, check_url


def test_the_folder_is_private(tmp_path):
    folder = RuntimeDir.open(tmp_path / "new")
    assert os.stat(folder.path).st_mode & 0o777 == 0o700
    assert folder.url == f"ipc://{folder.path}/server.sock"


@pytest.mark.parametrize("mode", [0o750, 0o701, 0o777])
def test_a_folder_that_others_reach_is_refused(tmp_path, mode):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(mode)
    with pytest.raises(ConfigError, match=f"{mode:04o}.*chmod 700"):
        RuntimeDir.open(tmp_path / "open")


def test_a_link_or_a_file_is_refused(tmp_path):
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "file").write_text("")
    for name in ("link", "file"):
        with pytest.raises(ConfigError, match=name):
            RuntimeDir.open(tmp_path / name)


def test_a_folder_of_somebody_else_is_refused(tmp_path, monkeypatch):
    folder = tmp_path / "theirs"
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    with pytest.raises(ConfigError, match="belongs to user"):
        RuntimeDir.open(folder)


def test_one_lock_holder_at_a_time(tmp_path):
    folder = RuntimeDir.open(tmp_path / "run")
    held = folder.lock_server()
    folder.write_info({"pid": 12345, "url": "ipc://x"})
    with pytest.raises(AlreadyRunning, match="12345"):
        folder.lock_server()
    os.close(held)
    os.close(folder.lock_server())


def test_damaged_info_is_no_info(tmp_path):
    folder = RuntimeDir.open(tmp_path / "run")
    assert folder.read_info() is None
    folder.server_info.write_text("{nonsense")
    assert folder.read_info() is None


def test_a_long_socket_path_is_refused_with_the_limit(tmp_path):
    folder = RuntimeDir.open(tmp_path / ("x" * 100))
    with pytest.raises(ConfigError, match="107"):
        _ = folder.url


@pytest.mark.parametrize("url", ["ipc:///tmp/x", "tcp://127.0.0.1:*", "tcp://127.0.0.1:5555", "tcp://[::1]:80"])
def test_addresses_that_are_served(url):
    assert check_url(url) == url


@pytest.mark.parametrize(
    "url", ["tcp://0.0.0.0:1", "tcp://*:1", "tcp://10.0.0.1:1", "http://x", "ipc://", "tcp://localhost:"]
)
def test_addresses_that_are_refused(url):
    with pytest.raises(ConfigError, match="maru_server_url"):
        check_url(url)


def of_another_user(folder, monkeypatch) -> None:
    """Make it look as if root (this process) did not own ``folder``."""
    if os.geteuid() == 0:
        os.chown(folder, 12345, -1)
        for path in folder.iterdir():
            os.chown(path, 12345, -1)
    monkeypatch.setattr(os, "getuid", lambda: 0)


def test_root_looks_into_a_folder_that_it_does_not_serve_from(tmp_path, monkeypatch):
    folder = RuntimeDir.open(tmp_path / "run")
    token = folder.make_token()
    of_another_user(folder.path, monkeypatch)
    assert RuntimeDir.inspect(folder.path).read_credential() == token
    with pytest.raises(ConfigError, match="belongs to user"):
        RuntimeDir.open(folder.path)
    folder.path.chmod(0o755)
    with pytest.raises(ConfigError, match="mode 0755"):
        RuntimeDir.inspect(folder.path)


def test_others_than_root_look_into_their_own_folders_only(tmp_path, monkeypatch):
    folder = RuntimeDir.open(tmp_path / "run")
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    with pytest.raises(ConfigError, match="belongs to user"):
        RuntimeDir.inspect(folder.path)


def test_looking_makes_nothing(tmp_path):
    folder = RuntimeDir.inspect(tmp_path / "none")
    assert not folder.is_served()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_cannot_make_root_read_something_else(tmp_path, monkeypatch):
    secret = tmp_path / "secret"
    secret.write_text("5" * 64)
    folder = RuntimeDir.open(tmp_path / "run")
    folder.admin_token.symlink_to(secret)
    folder.server_info.symlink_to(secret)
    with pytest.raises(ConfigError, match="cannot read the administration's credential"):
        RuntimeDir.inspect(folder.path).read_credential()
    assert folder.read_info() is None
    folder.admin_token.unlink()
    os.mkfifo(folder.admin_token)
    with pytest.raises(ConfigError, match="not a file of the folder's owner"):
        RuntimeDir.inspect(folder.path).read_credential()
    if os.geteuid() == 0:
        folder.admin_token.unlink()
        os.link(secret, folder.admin_token)
        os.chown(folder.path, 12345, -1)
        with pytest.raises(ConfigError, match="not a file of the folder's owner"):
            RuntimeDir.inspect(folder.path).read_credential()


def test_looking_whether_a_server_runs_keeps_none_from_starting(tmp_path):
    folder = RuntimeDir.open(tmp_path / "run")
    os.close(folder.lock_server())
    assert not folder.is_served()
    glance = os.open(folder.server_lock, os.O_RDONLY)
    fcntl.flock(glance, fcntl.LOCK_SH)
    timer = threading.Timer(0.015, os.close, (glance,))
    timer.start()
    held = folder.lock_server()
    timer.join()
    assert folder.is_served()
    os.close(held)
    assert not folder.is_served()


@pytest.mark.parametrize("name", ["server_lock", "server_info"])
def test_a_folder_in_the_place_of_a_file_is_named(tmp_path, name):
    folder = RuntimeDir.open(tmp_path / "run")
    getattr(folder, name).mkdir()
    assert folder.read_info() is None
    write = folder.lock_server if name == "server_lock" else lambda: folder.write_info({})
    with pytest.raises(ConfigError, match=f"cannot write .*{getattr(folder, name).name}: Is a directory"):
        write()
    assert len(list(folder.path.iterdir())) <= 2, "nothing is left behind"


def test_every_folder_that_is_made_is_private(tmp_path):
    mask = os.umask(0)
    try:
        RuntimeDir.open(tmp_path / "a" / "b" / "c")
    finally:
        os.umask(mask)
    assert [os.stat(tmp_path / name).st_mode & 0o777 for name in ("a", "a/b", "a/b/c")] == [0o700] * 3


@pytest.mark.parametrize("path", ["file", "file/below", "x" * 300])
def test_what_cannot_be_a_folder_is_named(tmp_path, path):
    (tmp_path / "file").write_text("")
    for look in (RuntimeDir.open, RuntimeDir.inspect):
        with pytest.raises(ConfigError, match=r"set .*maru_runtime_dir") as error:
            look(tmp_path / path)
        assert "Errno" not in str(error.value)
