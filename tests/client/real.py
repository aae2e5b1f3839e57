"""Handlers and servers in processes of their own, for tests of what happens between processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from maru_core.client import MaruHandler
from maru_core.config import MaruConfig
from maru_core.host import PluginHost
from maru_core.namespace import Namespace

NAMESPACE = Namespace.of({"model": "test", "tokens": 256})


class Folder:
    """A runtime folder whose server ``auto`` starts; ends whatever was started, also when a test fails."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._pools = path / "pools"
        self._pools.mkdir()
        self._handlers: list[MaruHandler] = []
        self._processes: list[subprocess.Popen[str]] = []

    def settings(self, **more: object) -> dict[str, Any]:
        return {
            "runtime_dir": str(self.path),
            "pool_path": str(self._pools),
            "pool_size": "4M",
            "chunk_size": 4096,
            "idle_exit": 20,
            **more,
        }

    def connect(self, namespace: Namespace = NAMESPACE, **more: object) -> MaruHandler:
        host = PluginHost.with_plugins({}, built_ins=True)
        handler = MaruHandler.connect(MaruConfig(**self.settings(**more)), namespace, host=host)
        self._handlers.append(handler)
        return handler

    def pid(self) -> int:
        """The server's pid."""
        return int(json.loads((self.path / "server.json").read_text())["pid"])

    def pids(self) -> list[int]:
        """Every living server of this folder, by its command line."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                words = (process / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"serve" in words and str(self.path).encode() in words:
                found.append(int(process.name))
        return found

    def spoil_pool(self) -> None:
        """Damage what says that the pool is of this boot: no server can take it over."""
        (pool,) = self._pools.glob("*/pool-0")
        with pool.open("r+b") as file:
            file.seek(40)
            file.write(b"spoilt")

    def run(self, code: str, *arguments: str, stdin: int | None = None) -> subprocess.Popen[str]:
        """Start a Python process with ``handler`` connected to this folder."""
        prelude = (
            "import os, sys, time, signal, threading\n"
            "from maru_core.client import MaruHandler\n"
            "from maru_core.config import MaruConfig\n"
            "from maru_core.namespace import Namespace\n"
            f"def connect(**more):\n    return MaruHandler.connect(MaruConfig(**{{**{self.settings()!r}, **more}}),"
            " Namespace.of({'model': 'test', 'tokens': 256}))\n"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", prelude + code, *arguments],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent.parent.parent,
        )
        self._processes.append(process)
        return process

    def end(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.communicate()
        for handler in self._handlers:
            handler.close()
        for pid in self.pids():
            os.kill(pid, signal.SIGCONT)
            os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + 5
        while (left := self.pids()) and time.monotonic() < deadline:
            time.sleep(0.02)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
