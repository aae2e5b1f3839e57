"""Whose folder, whose lock, which address."""

from __future__ import annotations

import os

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
