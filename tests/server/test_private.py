"""A server that is started as documented can be reached by its own user and by nobody else."""

from __future__ import annotations

import os
import pickle
import re
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgpack
import pytest

from maru_core.client.bootstrap import is_listening
from maru_core.protocol import Op
from maru_core.testing import ServerFactory
from tests.server.keyed import free_port
from tests.server.raw import RawClient, keys
from tests.waiting import NEVER, eventually


def sockets_of(pid: int) -> set[str]:
    """Inodes of the sockets that a process has open."""
    found = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            match = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{name}"))
        except FileNotFoundError:
            continue
        if match:
            found.add(match[1])
    return found


def listening(pid: int) -> set[str]:
    """Where a process listens, or can be sent a datagram: ``kind address``."""
    own = sockets_of(pid)
    found = set()
    for kind in ("tcp", "tcp6", "udp", "udp6", "raw", "raw6"):
        try:
            lines = Path(f"/proc/net/{kind}").read_text().splitlines()[1:]
        except FileNotFoundError:
            continue
        for line in lines:
            fields = line.split()
            if fields[9] in own and (kind[:3] != "tcp" or fields[3] == "0A"):
                found.add(f"{kind} {fields[1]}")
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[6] in own and int(fields[3], 16) & 0x10000:
            found.add(f"unix {fields[7] if len(fields) > 7 else '?'}")
    return found


def mode(path: Path) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)


@pytest.mark.slow
def test_the_default_start_listens_on_nothing_but_the_private_socket(maru_server: ServerFactory) -> None:
    server = maru_server()
    assert listening(server.pid) == {f"unix {server.runtime_dir}/server.sock"}


@pytest.mark.slow
def test_what_is_asked_for_is_seen_by_the_same_look(maru_server: ServerFactory, maru_runtime_dir: Path) -> None:
    other = maru_runtime_dir / "other"
    other.mkdir(mode=0o700)
    server = maru_server(other, server_url="tcp://127.0.0.1:45871", metrics="127.0.0.1:45872")
    assert listening(server.pid) == {"tcp 0100007F:B32F", "tcp 0100007F:B330"}


class Marker:
    """Unpickled, it runs a command."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (self.command,)


@pytest.mark.slow
def test_what_would_run_when_unpickled_runs_nowhere(start_server, connect, context, runtime_dir):
    marker = runtime_dir / "marker"
    payload = pickle.dumps(Marker(f"touch {marker}"))
    pickle.loads(payload)  # noqa: S301 - it does what it says where somebody unpickles it
    assert marker.exists()
    marker.unlink()
    port = free_port("127.0.0.1")
    server = start_server("--metrics", f"127.0.0.1:{port}")
    client = connect(server).hello()
    token = (runtime_dir / "admin.token").read_text().strip()
    for message in (
        payload,
        msgpack.packb([6, 1, client.epoch, client.session, 0, payload]),
        msgpack.packb([6, 1, client.epoch, client.session, 0, msgpack.ExtType(1, payload)]),
        msgpack.packb([1, 1, 0, 0, 2, "client", [1, "h", "n"], payload, 0, []]),
        msgpack.packb([15, 1, 0, 0, token, "namespaces", payload]),
    ):
        rude = RawClient(context, server.url)
        rude.socket.send(message)
        rude.socket.poll(300)
        rude.close()
    with socket.create_connection(("127.0.0.1", port)) as plain:
        plain.sendall(b"GET /metrics HTTP/1.1\r\nX: " + payload + b"\r\n\r\n" + payload)
        plain.recv(100)
    connect(server).admin(token, "namespaces", 0)
    client.call(Op.PING)
    assert not marker.exists()


@pytest.mark.slow
def test_files_are_private_whatever_the_mask(maru_runtime_dir: Path) -> None:
    folder = maru_runtime_dir / "run"
    code = "import os, sys; os.umask(0); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    command = [sys.executable, "-c", code, "-m", "maru_core.cli", "serve", "--runtime-dir", str(folder)]
    process = subprocess.Popen(
        [*command, "--pool-size", "4M", "--pool-path", str(maru_runtime_dir)], stderr=subprocess.DEVNULL
    )
    try:
        eventually((folder / "server.json").exists)
        assert mode(folder) == 0o700
        assert mode(folder / "sessions") == 0o700
        for name in ("server.sock", "server.lock", "server.json", "admin.token"):
            assert mode(folder / name) == 0o600, name
        pools = [path for path in maru_runtime_dir.rglob("*") if path.is_file() and folder not in path.parents]
        assert pools
        assert {mode(path) for path in pools} == {0o600}
    finally:
        process.terminate()
        process.wait(NEVER)


def serve(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "maru_core.cli", "serve", "--runtime-dir", str(folder), "--pool-size", "1M"]
    return subprocess.run([*command, *more], capture_output=True, text=True, timeout=30, check=False)


def refused(run: subprocess.CompletedProcess[str], *words: str) -> None:
    assert run.returncode == 1, run.stderr
    assert "Traceback" not in run.stderr
    for word in words:
        assert word in run.stderr


@pytest.mark.slow
def test_a_socket_in_a_folder_that_others_can_write_to_is_refused(maru_runtime_dir: Path) -> None:
    shared = maru_runtime_dir / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    refused(serve(maru_runtime_dir / "run", "--url", f"ipc://{shared}/x.sock"), "others can write", str(shared))
    missing = maru_runtime_dir / "missing"
    refused(serve(maru_runtime_dir / "run", "--url", f"ipc://{missing}/x.sock"), str(missing))


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="giving a folder away needs root")
def test_a_socket_in_a_folder_of_another_user_is_refused(maru_runtime_dir: Path) -> None:
    theirs = maru_runtime_dir / "theirs"
    theirs.mkdir(mode=0o700)
    os.chown(theirs, 12345, 12345)
    refused(serve(maru_runtime_dir / "run", "--url", f"ipc://{theirs}/x.sock"), "belongs to user 12345")
    refused(serve(theirs), "belongs to user 12345")


@pytest.mark.slow
def test_a_file_that_is_no_socket_is_not_replaced(maru_runtime_dir: Path) -> None:
    path = maru_runtime_dir / "notes"
    path.write_text("mine")
    refused(serve(maru_runtime_dir / "run", "--url", f"ipc://{path}"), str(path), "no socket")
    assert path.read_text() == "mine"


@pytest.mark.slow
def test_sessions_that_is_no_folder_is_named(maru_runtime_dir: Path) -> None:
    (maru_runtime_dir / "sessions").write_text("")
    refused(serve(maru_runtime_dir), f"{maru_runtime_dir}/sessions", "remove")
    (maru_runtime_dir / "sessions").unlink()
    (maru_runtime_dir / "elsewhere").mkdir()
    (maru_runtime_dir / "sessions").symlink_to("elsewhere")
    refused(serve(maru_runtime_dir), f"{maru_runtime_dir}/sessions")


@pytest.mark.slow
def test_a_socket_that_was_removed_comes_back(start_server, connect):
    server = start_server()
    old = connect(server).hello()
    old.store(keys(0, 1))
    path = Path(server.url.removeprefix("ipc://"))
    for _ in range(2):
        path.unlink()
        old.call(Op.PING)
        eventually(lambda: is_listening(path))
        time.sleep(1.2)  # longer than two sweeps: the new socket must stay
        assert is_listening(path)
        assert mode(path) == 0o600
        assert connect(server).hello().probe(keys(0, 1)) == b"\1"
    old.call(Op.PING)
    server.process.terminate()
    assert server.process.wait(NEVER) == 0
    assert not path.exists()


@pytest.mark.slow
def test_a_socket_that_is_anothers_by_now_is_left_alone(start_server, connect, runtime_dir):
    server = start_server()
    old = connect(server).hello()
    path = Path(server.url.removeprefix("ipc://"))
    path.unlink()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        inode = path.stat().st_ino
        eventually(lambda: "another socket is where" in (runtime_dir / "server.log").read_text())
        old.call(Op.PING)
        assert path.stat().st_ino == inode
