"""A real server process for a test, which ends with the test whatever happens."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from maru_core.config import ENVIRON_PREFIX

#: A server whose test runner was killed ends itself after so many seconds without a session.
_ORPHAN_EXIT: Final = 120
_START_TIMEOUT: Final = 30.0
_END_TIMEOUT: Final = 10.0


class RunningServer:
    """One ``maru serve`` process with a runtime folder, socket and pool of its own."""

    def __init__(self, process: subprocess.Popen[bytes], runtime_dir: Path, url: str) -> None:
        self.process: Final = process
        self.runtime_dir: Final = runtime_dir
        #: Where the server listens, for ``maru_server_url``.
        self.url: Final = url

    @classmethod
    def start(cls, runtime_dir: Path, settings: Mapping[str, object]) -> RunningServer:
        """Start a server and wait until it serves; raises RuntimeError with what it wrote when it does not."""
        pools = runtime_dir / "pools"
        pools.mkdir(exist_ok=True)
        chosen = {"pool_size": "16M", "pool_path": str(pools), "idle_exit": _ORPHAN_EXIT, **settings}
        url = str(chosen.setdefault("server_url", f"ipc://{runtime_dir}/server.sock"))
        chosen["runtime_dir"] = str(runtime_dir)
        variables = {ENVIRON_PREFIX + name.upper(): str(value) for name, value in chosen.items()}
        output = runtime_dir / "server.out"
        state = runtime_dir / "server.json"
        state.unlink(missing_ok=True)
        command = [sys.executable, "-m", "maru_core.cli", "serve", "--idle-exit", str(chosen["idle_exit"])]
        with output.open("ab") as sink:
            process = subprocess.Popen(
                command, env=os.environ | variables, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink
            )
        server = cls(process, runtime_dir, url)
        try:
            server._wait(state, output)
        except BaseException:
            server.end()
            raise
        return server

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self.process.pid

    def stop(self) -> int:
        """End the server as an operator would, and return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(_END_TIMEOUT)

    def kill(self) -> None:
        """End the server as a crash would: no clean-up."""
        self.process.kill()
        self.process.wait(_END_TIMEOUT)

    def end(self) -> None:
        """End the server by any means. Idempotent."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            try:
                self.stop()
            except subprocess.TimeoutExpired:
                self.kill()

    def _wait(self, state: Path, output: Path) -> None:
        deadline = time.monotonic() + _START_TIMEOUT
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with {self.process.returncode}:\n{output.read_text()}")
            if state.exists() and _pid_in(state) == self.process.pid:
                return
            time.sleep(0.02)
        raise RuntimeError(f"the server did not serve within {_START_TIMEOUT} s:\n{output.read_text()}")


def _pid_in(state: Path) -> int | None:
    try:
        pid = json.loads(state.read_text())["pid"]
    except (ValueError, KeyError):  # only half written yet
        return None
    return pid if isinstance(pid, int) else None
