"""Programs set logging up; lines go to the stream given, for people or for machines."""

from __future__ import annotations

import io
import json

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
