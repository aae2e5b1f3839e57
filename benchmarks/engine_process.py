"""Talks to a vLLM engine in a process of its own: a JSON request per line to it, a JSON reply per line back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from scripts.quickstart.processes import session_members

#: Lines of what an engine printed that are shown when it has ended.
_TAIL = 30


class EngineProcess:
    """What the starters of both kinds of engines share. ``log`` is the file that the process prints to."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self._log = log

    def pause(self) -> None:
        """Stop all its processes: an idle engine of vLLM polls, and takes the processors from the one that is timed."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let them go on."""
        self._signal(signal.SIGCONT)

    def log(self) -> str:
        """What it printed so far."""
        return self._log.read_text(errors="replace")

    def _signal(self, number: int) -> None:
        for pid in session_members(self._process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _call(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Raises RuntimeError with the last lines of the log when the engine has ended; so does :meth:`_read`."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._dead() from None
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._dead()
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _dead(self) -> RuntimeError:
        code = self._process.wait()
        tail = "\n".join(self.log().splitlines()[-_TAIL:])
        return RuntimeError(f"the engine ended with exit code {code}; its last lines:\n{tail}")
