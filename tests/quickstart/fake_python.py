"""Stands in for the environment's Python in tests of the quickstart: fake engines, server and model, no torch.

What engines and server know of each other is in files under ``FAKE_STATE``. ``FAKE_FAULT`` says what to get wrong,
``FAKE_HANG`` where to stand still.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path
from threading import Thread
from typing import Any

STATE = Path(os.environ["FAKE_STATE"])
FAULT = os.environ.get("FAKE_FAULT", "")
HANG = os.environ.get("FAKE_HANG", "")
CHUNKS = 12


def helper(code: str) -> None:
    """A process that outlives its parent."""
    subprocess.Popen([sys.executable, "-c", f"import time, signal, os\n{code}\ntime.sleep(600)"])


def stand_still(where: str) -> None:
    if where == HANG:
        # One that does not heed SIGTERM, and one that has left the session.
        helper("signal.signal(signal.SIGTERM, signal.SIG_IGN)")
        helper("os.setsid()")
        time.sleep(0.3)
        (STATE / "hangs").touch()
        time.sleep(600)


def poll_for_a_while() -> None:
    """As vLLM's workers do after a step."""
    ends = time.monotonic() + 1
    (STATE / f"polls-{os.getpid()}").write_text(str(ends))
    while time.monotonic() < ends:
        pass


def others_poll() -> bool:
    mine = f"polls-{os.getpid()}"
    others = [path for path in STATE.glob("polls-*") if path.name != mine]
    return any(float(path.read_text() or 0) > time.monotonic() for path in others)


class Handler(BaseHTTPRequestHandler):
    """The endpoints that the quickstart uses."""

    shares = False
    known: set[str] = set()  # noqa: RUF012 - of this one process
    external = 0

    def do_GET(self) -> None:
        hits = Handler.external // (2 if FAULT == "metric" else 1)
        self._reply(f'# HELP x\nvllm:external_prefix_cache_hits_total{{engine="0",model_name="m"}} {float(hits)}\n')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
        if self.path.startswith("/reset_prefix_cache"):
            Handler.known.clear()
            self._reply(json.dumps({"success": True}))
            return
        words = body["messages"][0]["content"].split()
        if self.path == "/tokenize":
            self._reply(json.dumps({"tokens": [hash(word) for word in words]}))
            return
        self._chat(words)

    def _chat(self, words: Sequence[str]) -> None:
        cached = self._cached(words)
        # So much longer without a cache that a busy machine does not make up for it.
        slow = FAULT == "slow" or others_poll()
        time.sleep((0.25 if slow else 0.001) if cached else 1.0 if len(words) >= 256 else 0.1)
        if FAULT == "polls":
            Thread(target=poll_for_a_while).start()
        answer = words[-3:]
        if FAULT == "answer" and self.shares and cached:
            answer = ["something", "else"]
        self.send_response(200)
        self.end_headers()
        self._event(choices=[{"delta": {"role": "assistant", "content": ""}}])
        for word in answer:
            self._event(choices=[{"delta": {"content": word + " "}}])
        details = {"cached_tokens": cached}
        usage = {"prompt_tokens": len(words), "completion_tokens": 3, "prompt_tokens_details": details}
        self._event(choices=[], usage=usage)
        self.wfile.write(b"data: [DONE]\n\n")

    def _cached(self, words: Sequence[str]) -> int:
        if len(words) < 256:
            return 0
        stand_still("ask")
        if FAULT == "dies" and self.shares:
            print("the engine met its fate", flush=True)
            os._exit(7)
        prefix = " ".join(words[: CHUNKS * 256])
        if prefix in Handler.known:
            return CHUNKS * 256
        Handler.known.add(prefix)
        if not self.shares:
            return 0
        if not (STATE / "stored").exists():
            (STATE / "stored").touch()
            return 0
        Handler.external += CHUNKS * 256
        with (STATE / "hits").open("a") as hits:
            hits.write("." * (CHUNKS - (FAULT == "server")))
        return CHUNKS * 256

    def _event(self, **values: Any) -> None:
        self.wfile.write(f"data: {json.dumps(values)}\n\n".encode())

    def _reply(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *arguments: object) -> None:
        """Nothing."""


def engine(arguments: Sequence[str]) -> None:
    Handler.shares = "--kv-transfer-config" in arguments
    # As vLLM does for its workers; nobody of this engine ever unlinks it.
    segment = shared_memory.SharedMemory(create=True, size=4096)
    resource_tracker.unregister(f"/{segment.name}", "shared_memory")
    with (STATE / "engines").open("a") as engines:
        engines.write(f"{os.getpid()} ")
    with (STATE / "segments").open("a") as segments:
        segments.write(f"/dev/shm/{segment.name}\n")
    stand_still("start")
    HTTPServer(("127.0.0.1", int(arguments[arguments.index("--port") + 1])), Handler).serve_forever()


def serve(arguments: Sequence[str]) -> None:
    runtime = Path(arguments[arguments.index("--runtime-dir") + 1])
    (runtime / "server.json").write_text("{}")
    (STATE / "pools").write_text(f"{arguments[arguments.index('--pool-path') + 1]}\n{runtime}\n")

    def ended(*_: object) -> None:
        alive = [pid for pid in (STATE / "engines").read_text().split() if Path("/proc", pid).exists()]
        (STATE / "server-ended").write_text(f"before engines {alive}" if alive else "in good order")
        sys.exit()

    signal.signal(signal.SIGTERM, ended)
    signal.pause()


def main(arguments: Sequence[str]) -> None:
    if arguments[0].endswith("prepare_model.py"):
        stand_still("model")
        print("/no/such/model")
    elif arguments[:2] == ["-m", "vllm.entrypoints.openai.api_server"]:
        engine(arguments)
    elif arguments[:3] == ["-m", "maru_core.cli", "serve"]:
        serve(arguments)
    elif arguments[:3] == ["-m", "maru_core.cli", "status"]:
        hits = STATE / "hits"
        print(json.dumps({"counters": {"hits": hits.stat().st_size if hits.exists() else 0}}))
    else:
        sys.exit(f"fake python: {arguments}")


if __name__ == "__main__":
    main(sys.argv[1:])
