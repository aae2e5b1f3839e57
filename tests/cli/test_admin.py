"""``maru keygen`` and ``maru admin``."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path

import pytest
import zmq
from click.testing import CliRunner, Result

from maru_core.cli import main
from maru_core.client import StoreResult
from maru_core.client.peek import Peek
from maru_core.errors import Unavailable
from maru_core.namespace import Namespace
from maru_core.protocol import PROTOCOL_VERSION, Op
from maru_core.server.liveness import SessionRecord
from maru_core.testing import ServerFactory
from tests.client.real import Folder
from tests.server.keyed import free_port, own_address
from tests.server.raw import RawClient
from tests.waiting import NEVER


def maru(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def admin(folder: Folder, *arguments: object) -> Result:
    return maru("admin", "--runtime-dir", folder.path, *arguments)


def test_keygen_says_what_it_wrote_and_replaces_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    first = maru("keygen", folder)
    assert first.exit_code == 0
    names = ("server.key", "server.pub", "client.key", "client.pub")
    assert first.output.split() == [str(folder / name) for name in names]
    again = maru("keygen", folder)
    assert again.exit_code == 1
    assert "--force" in again.output
    more = maru("keygen", folder, "--client", "red", "--namespace", "a", "--namespace", "b")
    assert more.output.split() == [str(folder / "red.key"), str(folder / "red.pub")]
    assert 'namespaces = "a, b"' in (folder / "red.pub").read_text()
    assert maru("keygen", folder, "--client", "red", "--force").exit_code == 0
    assert "namespaces" not in (folder / "red.pub").read_text()
    assert maru("keygen", folder, "--client", "../red").exit_code == 1


@pytest.mark.slow
def test_an_operator_sees_and_resets_namespaces(folder: Folder) -> None:
    handler = folder.connect(instance_id="i")
    handler.store("a", b"x" * 5000)
    table = admin(folder, "namespaces")
    assert table.exit_code == 0, table.output
    digest = handler.namespace.digest.hex()
    assert digest in table.output
    assert "model=test" in table.output
    (listed,) = json.loads(admin(folder, "namespaces", "--json").output)
    assert (listed["objects"], listed["bytes"], listed["weights_epoch"]) == (1, 5000, 0)
    assert "client" in admin(folder, "sessions").output
    (session,) = json.loads(admin(folder, "sessions", "--json").output)
    assert session["namespace"] == digest
    assert admin(folder, "reset", digest).output == "1 namespaces reset\n"
    assert handler.retrieve("a") is None
    assert handler.store("b", b"x") is StoreResult.REFUSED
    (listed,) = json.loads(admin(folder, "namespaces", "--json").output)
    assert (listed["objects"], listed["weights_epoch"]) == (0, 1)
    assert admin(folder, "reset", "--all").exit_code == 0


@pytest.mark.slow
def test_an_operator_limits_a_namespace(folder: Folder) -> None:
    handler = folder.connect()
    digest = handler.namespace.digest.hex()
    assert admin(folder, "quota", digest, "1M").output == f"{digest} may hold 1.0 MiB\n"
    assert "1.0 MiB" in admin(folder, "namespaces").output
    assert admin(folder, "quota", digest, "0").exit_code == 0
    assert json.loads(admin(folder, "namespaces", "--json").output)[0]["quota"] is None


@pytest.mark.slow
def test_an_operator_evicts(folder: Folder) -> None:
    handler = folder.connect()
    handler.store("a", b"x")
    handler.store("b", b"x")
    held = handler.retrieve("a")
    assert admin(folder, "evict", handler.namespace.digest.hex()).output == "1 objects evicted\n"
    assert handler.batch_exists(["a", "b"]) == [True, False]
    assert held is not None
    held.close()


@pytest.mark.slow
def test_an_operator_forgets_a_session(folder: Folder) -> None:
    handler = folder.connect()
    assert handler.store("a", b"x") is StoreResult.STORED
    (session,) = json.loads(admin(folder, "sessions", "--json").output)
    refused = admin(folder, "forget", f"{session['session']:016x}")
    assert refused.exit_code == 1
    assert "ends with its process" in refused.output
    os.kill(folder.pid(), signal.SIGKILL)
    (lock,) = (folder.path / "sessions").glob("*.lock")
    # As a process in another kernel leaves it: no lock tells whether it lives.
    lock.with_name(f"{1:016x}.lock").write_bytes(SessionRecord("ab" * 16, "client", "gone", False, False).to_line())
    folder.connect()
    assert "awaited, without proof" in admin(folder, "sessions").output
    assert admin(folder, "forget", "1").output == "0000000000000001 is forgotten\n"
    assert 1 not in [one["session"] for one in json.loads(admin(folder, "sessions", "--json").output)]


@pytest.mark.slow
def test_an_operator_stops_the_server(maru_server: ServerFactory) -> None:
    server = maru_server()
    result = maru("admin", "--runtime-dir", server.runtime_dir, "stop")
    assert result.exit_code == 0, result.output
    assert server.process.wait(NEVER) == 0
    gone = maru("admin", "--runtime-dir", server.runtime_dir, "stop")
    assert gone.exit_code == 1
    assert "no Maru server listens" in gone.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("reset",), "--all"),
        (("reset", "00" * 16, "--all"), "--all"),
        (("reset", "nonsense"), "no digest"),
        (("reset", "00" * 16), "no namespace has the digest"),
        (("reset", ""), "no digest"),
        (("reset", " "), "no digest"),
        (("evict", "00"), "32 hexadecimal digits"),
        (("quota", "00" * 16, "lots"), "no size"),
        (("quota", "00" * 16, "9" * 30), "no size"),
        (("quota", "00" * 16, "9" * 5000), "no size"),
        (("quota", "00" * 16, "9" * 400 + ".5T"), "no size"),
        (("quota", "00" * 16, "0.0001"), "no size"),
        (("forget", "nonsense"), "no session"),
        (("forget", "0"), "no session"),
        (("forget", "1" + "0" * 16), "no session"),
        (("forget", "abc"), "no session is 0000000000000abc"),
    ],
)
def test_mistakes_are_named(folder: Folder, arguments: tuple[str, ...], word: str) -> None:
    folder.connect()
    result = admin(folder, *arguments)
    assert result.exit_code != 0
    assert word in result.output
    assert "Traceback" not in result.output


@pytest.mark.slow
def test_another_credential_is_refused(folder: Folder, tmp_path: Path) -> None:
    folder.connect()
    (tmp_path / "token").write_text("0" * 64)
    result = admin(folder, "--token-file", tmp_path / "token", "stop")
    assert result.exit_code == 1
    assert "not the credential" in result.output
    (tmp_path / "token").write_text("short")
    assert "64 characters" in admin(folder, "--token-file", tmp_path / "token", "stop").output
    assert "cannot read" in admin(folder, "--token-file", tmp_path / "none", "stop").output


@pytest.mark.slow
def test_status_without_the_credential_shows_totals(folder: Folder) -> None:
    handler = folder.connect()
    handler.store("a", b"x" * 5000)
    (folder.path / "admin.token").unlink()
    result = maru("status", "--runtime-dir", folder.path)
    assert result.exit_code == 0, result.output
    assert "8.0 KiB" in result.output
    assert handler.namespace.digest.hex() not in result.output


@pytest.mark.slow
def test_the_credential_goes_to_no_other_server(maru_server: ServerFactory, maru_runtime_dir: Path) -> None:
    """Somebody else's socket, asked about with the runtime folder of a server that lives elsewhere."""
    server = maru_server()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    spy = context.socket(zmq.ROUTER)
    spy.bind(f"ipc://{maru_runtime_dir}/spy.sock")
    heard: list[bytes] = []

    def listen() -> None:
        while spy.poll(1500):
            heard.append(spy.recv_multipart()[1])

    thread = threading.Thread(target=listen)
    thread.start()
    common = ("--runtime-dir", server.runtime_dir, "--url", f"ipc://{maru_runtime_dir}/spy.sock", "--timeout", "0.5")
    maru("status", *common)
    result = maru("admin", *common, "stop")
    thread.join()
    spy.close(0)
    context.term()
    assert "no credential is known" in result.output
    token = (server.runtime_dir / "admin.token").read_text().strip().encode()
    assert heard, "status asked"
    assert not any(token in frame for frame in heard)
    assert maru("admin", "--runtime-dir", server.runtime_dir, "--url", server.url, "sessions").exit_code == 0


@pytest.mark.slow
def test_a_server_at_a_tcp_address_is_found_and_administered_with_keys(
    maru_server: ServerFactory, maru_runtime_dir: Path
) -> None:
    keys = maru_runtime_dir / "keys"
    assert maru("keygen", keys).exit_code == 0
    host = own_address()
    maru_server(server_url=f"tcp://{host}:{free_port(host)}", keys=str(keys))
    where = ("--runtime-dir", maru_runtime_dir)
    assert maru("admin", *where, "--keys", keys, "sessions").exit_code == 0
    without = maru("admin", *where, "sessions")
    assert without.exit_code == 1
    assert "--keys" in without.output
    assert maru("status", *where, "--keys", keys).exit_code == 0
    if host != "127.0.0.1":
        blind = maru("status", *where)
        assert blind.exit_code == 2
        assert "--keys" in blind.output
    assert maru("keygen", maru_runtime_dir / "strange").exit_code == 0
    stranger = maru("status", *where, "--keys", maru_runtime_dir / "strange", "--timeout", "0.3")
    assert stranger.exit_code == 1
    assert "no answer within 0.3 s" in stranger.output
    assert "strange/client.key" in stranger.output


def test_peek_says_that_nobody_answers(maru_runtime_dir: Path) -> None:
    with pytest.raises(Unavailable, match=r"no answer within 0\.1 s"):
        Peek(f"ipc://{maru_runtime_dir}/x.sock", 0.1).stats()


@pytest.mark.slow
def test_sessions_of_a_reset_namespace_find_the_new_weights_epoch(folder: Folder) -> None:
    handler = folder.connect()
    admin(folder, "reset", "--all")
    later = folder.connect()
    assert later.store("a", b"x") is StoreResult.STORED
    assert handler.retrieve("a") is None, "an engine that still runs the old weights"


@pytest.mark.parametrize("verb", ["namespaces", "sessions", "reset", "quota", "evict", "forget", "stop"])
def test_help_needs_no_server(tmp_path: Path, verb: str) -> None:
    result = maru("admin", "--runtime-dir", tmp_path / "none", verb, "--help")
    assert result.exit_code == 0, result.output
    assert "Usage" in result.output


@pytest.mark.slow
def test_names_do_not_reach_the_terminal_as_they_are(folder: Folder) -> None:
    evil = "x\x1b[2J\x1b]0;title\x07\ny\r\x9b1m\u202e"
    handler = folder.connect(Namespace.of({"model": evil}))
    handler.store("a", b"x")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    client = RawClient(context, f"ipc://{folder.path}/server.sock", 10.0)
    client.call(Op.HELLO, PROTOCOL_VERSION, evil, [1, "h", evil], b"\x90", 0, [])
    for verb in ("namespaces", "sessions"):
        shown = admin(folder, verb).output
        assert "x\\x1b[2J\\x1b]0;title\\x07\\ny\\r\\x9b1m\\u202e" in shown
        assert all(character.isprintable() for character in shown.replace("\n", ""))
        assert len(shown.splitlines()) == {"namespaces": 3, "sessions": 3}[verb]
    client.close()
    context.destroy(0)


@pytest.mark.parametrize("name", ["x" * 300, "y/" * 3000, "z" * 90])
def test_a_folder_with_a_long_name_is_named(tmp_path: Path, name: str) -> None:
    for command in (("status",), ("admin", "sessions")):
        where = ("--runtime-dir", tmp_path / name)
        result = maru(command[0], *where, *command[1:])
        assert isinstance(result.exception, SystemExit)
        assert result.exit_code in (1, 2)
        assert "maru_runtime_dir" in result.output


def test_keys_that_cannot_be_reached_are_named(tmp_path: Path) -> None:
    result = maru("status", "--url", "tcp://127.0.0.1:1", "--keys", tmp_path / ("k" * 300))
    assert isinstance(result.exception, SystemExit)
    assert "File name too long" in result.output


@pytest.mark.slow
def test_what_a_killed_server_wrote_is_not_believed(maru_server: ServerFactory, maru_runtime_dir: Path) -> None:
    server = maru_server(server_url=f"tcp://127.0.0.1:{free_port('127.0.0.1')}")
    server.process.kill()
    server.process.wait()
    assert (maru_runtime_dir / "server.json").exists()
    (maru_runtime_dir / "server.json").write_text(json.dumps({"url": "tcp://10.0.0.1:5", "pid": 1}))
    for command in (("status",), ("admin", "sessions")):
        result = maru(command[0], "--runtime-dir", maru_runtime_dir, *command[1:])
        assert result.exit_code == 1
        assert "server.sock" in result.output
        assert "10.0.0.1" not in result.output


def test_a_key_is_bound_to_nothing_by_mistake_only(tmp_path: Path) -> None:
    for value in ("", " "):
        result = maru("keygen", tmp_path / "keys", "--namespace", value)
        assert result.exit_code == 2
        assert "--namespace needs a value" in result.output
    assert not (tmp_path / "keys").exists()


def test_folders_above_the_keys_are_private(tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        assert maru("keygen", tmp_path / "above" / "keys").exit_code == 0
    finally:
        os.umask(mask)
    assert (tmp_path / "above").stat().st_mode & 0o777 == 0o700
