"""Key files: what `maru keygen` writes, and what is refused."""

from __future__ import annotations

import os
import stat

import pytest
import zmq

from maru_core import access
from maru_core.access import ClientKeys, KeyRing, make_keys
from maru_core.errors import ConfigError
from maru_core.namespace import Namespace, cache_namespace_of
from tests.server.keyed import descriptor


def test_keys_are_private_and_never_replaced_unless_asked(tmp_path):
    before = os.umask(0)
    try:
        written = make_keys(tmp_path / "a" / "keys", ["client"])
    finally:
        os.umask(before)
    folder = tmp_path / "a" / "keys"
    assert sorted(path.name for path in written) == ["client.key", "client.pub", "server.key", "server.pub"]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    content = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ConfigError, match="--force"):
        make_keys(folder, ["client"])
    make_keys(folder, ["other"])
    assert {name: (folder / name).read_bytes() for name in content} == content
    make_keys(folder, ["client"], force=True)
    assert (folder / "client.key").read_bytes() != content["client.key"]
    assert (folder / "server.key").read_bytes() == content["server.key"], "that would shut every client out"
    assert not list(folder.glob("*.new"))


def test_the_public_file_holds_no_secret(tmp_path):
    make_keys(tmp_path / "keys", ["client"])
    secret = ClientKeys.load(tmp_path / "keys").own.secret
    assert secret not in (tmp_path / "keys" / "client.pub").read_bytes()
    assert secret in (tmp_path / "keys" / "client.key").read_bytes()
    assert secret.decode() not in repr(ClientKeys.load(tmp_path / "keys"))


def test_the_keys_are_a_pair(tmp_path):
    make_keys(tmp_path / "keys", ["client"])
    own = ClientKeys.load(tmp_path / "keys" / "client.key").own
    assert zmq.curve_public(own.secret) == own.public


@pytest.mark.parametrize("name", ["server", "", "../x", "a/b", ".hidden", "x" * 65, "a b"])
def test_names_that_are_no_clients(tmp_path, name):
    with pytest.raises(ConfigError, match="no name for a client"):
        make_keys(tmp_path / "keys", [name])
    assert not (tmp_path / "keys").exists()


@pytest.mark.parametrize("value", ["a,b", 'a"', "a\nnamespaces = b", " a"])
def test_namespaces_that_a_key_file_cannot_hold(tmp_path, value):
    with pytest.raises(ConfigError, match="cannot be bound"):
        make_keys(tmp_path / "keys", ["client"], [value])


def test_a_folder_that_others_reach_is_refused(tmp_path):
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        make_keys(tmp_path, ["client"])
    assert not list(tmp_path.iterdir())


def test_a_secret_that_others_can_read_is_refused(tmp_path):
    make_keys(tmp_path / "keys", ["client"])
    for name, load in (("client.key", ClientKeys.load), ("server.key", KeyRing.load)):
        path = tmp_path / "keys" / name
        path.chmod(0o640)
        with pytest.raises(ConfigError, match=f"chmod 600 {path}"):
            load(tmp_path / "keys")
        path.chmod(0o600)


@pytest.mark.parametrize(
    "damage", [b"", b"\xff\xfe", b"public-key", b'public-key = "short"\n', b'public-key = "' + b"~" * 40]
)
def test_damaged_files_are_named(tmp_path, damage):
    make_keys(tmp_path / "keys", ["client"])
    for name, load in (("client.key", ClientKeys.load), ("server.pub", ClientKeys.load), ("client.pub", KeyRing.load)):
        path = tmp_path / "keys" / name
        whole = path.read_bytes()
        path.write_bytes(damage)
        with pytest.raises(ConfigError, match=f"{path} .*maru keygen"):
            load(tmp_path / "keys")
        path.write_bytes(whole)
        path.rename(tmp_path / "away")
        if load is ClientKeys.load:
            with pytest.raises(ConfigError, match=f"no key file {path}"):
                load(tmp_path / "keys")
        (tmp_path / "away").rename(path)


def test_mistaken_files_are_explained(tmp_path):
    make_keys(tmp_path / "keys", ["client"])
    with pytest.raises(ConfigError, match="server's secret key"):
        ClientKeys.load(tmp_path / "keys" / "server.key")
    (tmp_path / "keys" / "client.pub").chmod(0o600)
    with pytest.raises(ConfigError, match="no secret key"):
        ClientKeys.load(tmp_path / "keys" / "client.pub")


def test_a_key_under_two_names_lets_nobody_in(tmp_path):
    make_keys(tmp_path / "keys", ["red"], ["red"])
    ring = KeyRing.load(tmp_path / "keys")
    assert len(ring.clients) == 1
    (tmp_path / "keys" / "blue.pub").write_bytes((tmp_path / "keys" / "red.pub").read_bytes())
    assert ring.refresh()
    assert ring.clients == {}
    assert "one of its own" in next(iter(ring.problems.values()))
    with pytest.raises(ConfigError, match="one of its own"):
        KeyRing.load(tmp_path / "keys")


def test_a_folder_that_vanishes_lets_nobody_in(tmp_path):
    make_keys(tmp_path / "keys", ["red"])
    ring = KeyRing.load(tmp_path / "keys")
    assert not ring.refresh(), "nothing changed"
    (tmp_path / "keys").rename(tmp_path / "gone")
    assert ring.refresh()
    assert ring.clients == {}


def test_a_binding_can_be_changed_by_hand(tmp_path):
    make_keys(tmp_path / "keys", ["red"], ["red"])
    ring = KeyRing.load(tmp_path / "keys")
    (identity,) = ring.clients
    assert ring.refuses(identity, descriptor("red")) is None
    assert "red" in str(ring.refuses(identity, descriptor("blue")))
    path = tmp_path / "keys" / "red.pub"
    path.write_text(path.read_text().replace('"red"\ncurve', '"red, blue"\ncurve'))
    os.utime(path, (1, 1))
    ring.refresh()
    assert ring.refuses(identity, descriptor("blue")) is None
    assert ring.refuses("someone else", descriptor("red")) is not None


def test_the_operators_namespace_is_read_from_whole_descriptors_only():
    whole = Namespace.of({"operator": "red", "model": "m"}).descriptor
    assert cache_namespace_of(whole) == "red"
    assert cache_namespace_of(Namespace.of({"model": "m"}).descriptor) is None
    assert cache_namespace_of(Namespace.of({"operator": 5}).descriptor) is None
    for damaged in (whole + b"\0", whole[:-1], b"", b"\xc1", b"\x90\x90", b"\x81\xa8operator\xa3red"):
        assert cache_namespace_of(damaged) is None


def test_a_folder_that_cannot_be_read_for_a_moment_shuts_nobody_out(tmp_path, monkeypatch):
    folder = tmp_path / "keys"
    make_keys(folder, ["red", "blue"])
    ring = KeyRing.load(folder)
    before = dict(ring.clients)
    assert len(before) == 2
    scan = os.scandir

    def broken(path):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "scandir", broken)
    assert ring.refresh(), "it is told"
    assert "Too many open files" in ring.unreadable
    assert not ring.refresh(), "once"
    assert ring.clients == before
    monkeypatch.setattr(os, "scandir", scan)
    assert not ring.refresh()
    assert ring.unreadable == ""
    folder.rename(tmp_path / "elsewhere")
    assert ring.refresh()
    assert not ring.clients, "taken away on purpose"


def test_a_file_that_did_not_change_is_not_read_again(tmp_path, monkeypatch):
    folder = tmp_path / "keys"
    make_keys(folder, ["red"])
    ring = KeyRing.load(folder)
    make_keys(folder, ["blue"])
    read, fails = access.read_public, True

    def fragile(path):
        if fails:
            raise ConfigError("no descriptor left") from OSError(24, "Too many open files")
        return read(path)

    monkeypatch.setattr(access, "read_public", fragile)
    assert ring.refresh()
    assert [client.name for client in ring.clients.values()] == ["red"]
    assert list(ring.problems) == ["blue"]
    assert not ring.refresh(), "told once"
    fails = False
    assert ring.refresh(), "tried again"
    assert sorted(client.name for client in ring.clients.values()) == ["blue", "red"]
    assert not ring.problems
