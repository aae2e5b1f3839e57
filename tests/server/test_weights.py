"""Weights epochs on disk."""

from __future__ import annotations

import json

import pytest
from structlog.testing import capture_logs

from maru_core.errors import ConfigError
from maru_core.protocol import Op
from maru_core.server.weights import WeightsFile
from tests.server.raw import keys
from tests.server.test_restart import kill
from tests.waiting import eventually

RED, BLUE = bytes(16), b"\1" * 16


def test_what_was_saved_is_loaded(tmp_path):
    path = tmp_path / "weights.json"
    assert WeightsFile(path).load() == {}
    WeightsFile(path).save({RED: 3, BLUE: (1 << 63) - 1})
    assert WeightsFile(path).load() == {RED: 3, BLUE: (1 << 63) - 1}
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("epoch", [-1, 1 << 63, 1.0, True, None, "1"])
def test_a_number_that_no_server_wrote_is_refused(tmp_path, epoch):
    path = tmp_path / "weights.json"
    path.write_text(json.dumps({RED.hex(): epoch}))
    with pytest.raises(ConfigError, match="no number of 63 bits"):
        WeightsFile(path).load()


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, '{"00": 1}', '{"": 1}', '{"zz": 1}', "\0"])
def test_damage_is_refused(tmp_path, text):
    path = tmp_path / "weights.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="cannot be read"):
        WeightsFile(path).load()


def test_what_could_not_be_saved_is_saved_later(tmp_path):
    path = tmp_path / "weights.json"
    path.mkdir()
    file = WeightsFile(path)
    with capture_logs() as logs:
        file.save({RED: 1})
        file.save({RED: 2})
        file.retry()
    assert [line["log_level"] for line in logs] == ["error"], "one reason is told once"
    path.rmdir()
    with capture_logs() as logs:
        file.retry()
        file.retry()
    assert [line["log_level"] for line in logs] == ["info"]
    assert WeightsFile(path).load() == {RED: 2}


@pytest.mark.slow
def test_a_reset_is_kept_once_there_is_room_again(start_server, connect):
    server = start_server()
    client = connect(server).hello()
    client.store(keys(0, 4))
    path = server.folder / "weights.json"
    path.mkdir()
    assert client.call(Op.RESET, 0) == [1], "the reset holds in this server anyway"
    path.rmdir()
    eventually(path.exists)
    kill(server)
    assert connect(start_server()).hello().weights_epoch == 1
