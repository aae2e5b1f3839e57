"""What starting a server holds while it looks what becomes of it."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from maru_core.client import bootstrap
from maru_core.client.bootstrap import EXIT_TAKEN, ServerStarter
from maru_core.config import MaruConfig
from maru_core.errors import BackendError
from maru_core.runtime_dir import RuntimeDir


def test_a_second_start_that_fails_closes_what_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of a descriptor that was closed is the next one's who opens anything, such as another thread."""
    opened: list[int] = []

    def spawn(starter: ServerStarter, log_path: Path) -> int:
        if opened:
            opened.append(os.open(os.devnull, os.O_RDONLY))
            raise BackendError("it cannot be started again")
        report, told = os.pipe()
        os.write(told, bytes([EXIT_TAKEN]))
        os.close(told)
        opened.append(report)
        return report

    monkeypatch.setattr(ServerStarter, "_spawn", spawn)
    monkeypatch.setattr(bootstrap, "_RETRY", 0.0)
    with TemporaryDirectory() as folder:
        starter = ServerStarter(MaruConfig(), RuntimeDir.open(Path(folder, "run")), None)
        with pytest.raises(BackendError, match="started again"):
            starter(lambda: False)
    report, strangers = opened
    assert report != strangers
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(report)
    os.fstat(strangers)
    os.close(strangers)
