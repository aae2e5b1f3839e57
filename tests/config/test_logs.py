"""Programs set logging up; lines go to the stream given, for people or for machines."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import structlog

from maru_core import logs
from maru_core.errors import ConfigError


def test_lines_for_people_leave_stdout_alone(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup()
    structlog.get_logger("x").warning("pool_made", size=4096)
    out, err = capsys.readouterr()
    assert out == ""
    assert "pool_made" in err
    assert "size=4096" in err
    assert "\x1b[" not in err


def test_a_terminal_obeys_nothing_that_a_client_chose() -> None:
    stream = io.StringIO()
    logs.setup(stream=stream)
    structlog.get_logger("x").info("session lost", client="\x1b[2Jgone", known=["\x1b[31m"])
    (line,) = stream.getvalue().splitlines()
    assert "\x1b" not in line
    assert "\r" not in line
    assert "gone" in line


def test_lines_for_machines_are_json_with_level_time_and_traceback() -> None:
    stream = io.StringIO()
    logs.setup(json=True, stream=stream)
    try:
        raise ValueError("culprit")
    except ValueError:
        structlog.get_logger("x").exception("failed", key="k")
    (line,) = stream.getvalue().splitlines()
    event = json.loads(line)
    assert (event["event"], event["level"], event["key"]) == ("failed", "error", "k")
    assert event["timestamp"].endswith("Z")
    assert "culprit" in event["exception"]


def test_a_traceback_says_where_and_not_what_variables_held() -> None:
    stream = io.StringIO()
    logs.setup(stream=stream)
    secret = "correct horse"
    try:
        raise ValueError("culprit \x1b[2J")
    except ValueError:
        structlog.get_logger("x").exception("failed", length=len(secret))
    shown = stream.getvalue()
    assert "culprit" in shown
    assert "test_logs.py" in shown
    assert secret not in shown
    assert "\x1b" not in shown


@pytest.mark.parametrize(("level", "shown"), [("debug", 3), ("info", 2), ("warning", 1), ("error", 0)])
def test_the_level_filters(level: str, shown: int) -> None:
    stream = io.StringIO()
    logs.setup(level, json=True, stream=stream)
    log = structlog.get_logger("x")
    log.debug("a")
    log.info("b")
    log.warning("c")
    assert len(stream.getvalue().splitlines()) == shown


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ConfigError, match="log level 'loud' is unknown; expected one of debug, info"):
        logs.setup("loud")


class Full(io.StringIO):
    """A file on a device that is full for a while."""

    full = True

    def write(self, text: str) -> int:
        if self.full:
            raise OSError(28, "No space left on device")
        return super().write(text)


def test_a_line_that_cannot_be_written_stops_nobody_and_is_counted() -> None:
    stream = Full()
    logs.setup(stream=stream)
    log = logs.get_logger("x").bind(who="me")
    log.info("a")
    structlog.get_logger("y").error("b", exc_info=ValueError("culprit"))
    stream.full = False
    log.info("c")
    lines = stream.getvalue().splitlines()
    assert lines[0] == "2 log lines could not be written"
    assert "c" in lines[1]
    assert "who=me" in lines[1]
    stream.close()
    log.warning("d")


def test_whatever_a_program_makes_of_structlog_logging_never_raises() -> None:
    structlog.configure(processors=[lambda *_: 1 / 0])
    with pytest.raises(ZeroDivisionError):
        structlog.get_logger().info("a")
    log = logs.get_logger("x")
    for tell in (log.debug, log.info, log.warning, log.error, log.exception):
        tell("a", fact=1)


def test_modules_log_in_the_way_that_never_raises() -> None:
    root = Path(logs.__file__).parents[1]
    loud = [
        path
        for package in ("maru_core", "maru_integrations")
        for path in (root / package).rglob("*.py")
        if "structlog.get_logger" in path.read_text() and path != Path(logs.__file__)
    ]
    assert not loud
