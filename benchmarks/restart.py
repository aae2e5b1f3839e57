"""A server with 100,000 objects is killed and started again: how long until it serves, and whether all is still there.

``python benchmarks/restart.py [--json FILE]`` stores objects of 4,000 random bytes, kills the server (-9), starts
it again in the same runtime folder, and takes the time from there to the first PROBE that a new client gets answered.
Then every key must be found and every object have its checksum. Clients that live on while this happens, each of which
writes some objects and reads others at that moment, must go on by themselves with what they held.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.outcome import Bound, Outcome, main  # noqa: E402
from maru_core import logs  # noqa: E402
from maru_core.client import MaruHandler  # noqa: E402
from maru_core.config import MaruConfig  # noqa: E402
from maru_core.errors import MaruError, Unavailable  # noqa: E402
from maru_core.namespace import Namespace  # noqa: E402
from maru_core.pool_format import NO_KEY  # noqa: E402
from maru_core.protocol import CommitStatus, Presence  # noqa: E402
from maru_core.testing_server import RunningServer  # noqa: E402
from tests.chaos.stamps import verified  # noqa: E402

OBJECTS = 100_000
GRANULE = 4096
LENGTH = 4000
LIMIT_S = 2.0
CLIENTS = 3
#: Objects that each of these clients writes, and as many that it reads, while the server is killed.
HELD = 8
BATCH = 1000
#: Clients that are not back by then, in seconds, do not come back.
PATIENCE_S = 20.0


def connect(url: str) -> MaruHandler:
    """A handler in the namespace of this benchmark."""
    config = MaruConfig.from_mapping({"maru_server_url": url, "maru_eager_map": True}, {})
    return MaruHandler.connect(config, Namespace.of({"purpose": "restart"}))


def fill(handler: MaruHandler, count: int) -> dict[bytes, bytes]:
    """Store ``count`` random objects in chains; the checksum of each."""
    checksums: dict[bytes, bytes] = {}
    while len(checksums) < count:
        keys = [secrets.token_bytes(32) for _ in range(min(BATCH, count - len(checksums)))]
        grants = handler.reserve(keys, LENGTH, NO_KEY)
        blob = memoryview(os.urandom(LENGTH * len(keys)))
        for index in grants.new:
            data = blob[index * LENGTH : (index + 1) * LENGTH]
            handler.view(grants.epoch, grants.entries[index], LENGTH)[:] = data
            checksums[keys[index]] = hashlib.blake2b(data, digest_size=16).digest()
        if len(grants.new) < len(keys) or any(handler.commit(grants)):
            raise RuntimeError("the pool is too small: the measurement is void")
    return checksums


def audit(handler: MaruHandler, checksums: dict[bytes, bytes]) -> tuple[int, int]:
    """How many keys are missing, and how many objects are not what they were."""
    missing = wrong = 0
    names = list(checksums)
    for at in range(0, len(names), BATCH):
        keys = names[at : at + BATCH]
        lease = handler.acquire(keys, leading=False, timeout=10)
        located = handler.adopt(lease.epoch, lease.entries, lease.generations, lease.lengths)
        for index, key in enumerate(keys):
            if lease.statuses[index] != Presence.READY:
                missing += 1
                continue
            digest = hashlib.blake2b(located.view(index), digest_size=16).digest()
            wrong += digest != checksums[key] or not verified(located, index)
        handler.release(lease)
    return missing, wrong


def live_on(url: str) -> None:
    """A client that is there before, while and after the server is away; a process of its own."""
    with connect(url) as handler:
        checksums = fill(handler, HELD)
        lease = handler.acquire(list(checksums), leading=False)
        grants = handler.reserve([secrets.token_bytes(32) for _ in range(HELD)], LENGTH)
        views = [handler.view(grants.epoch, entry, LENGTH) for entry in grants.entries]
        for view in views:
            view[: LENGTH // 2] = bytes([7]) * (LENGTH // 2)
        print("ready", flush=True)
        # "ready" is also answered while nothing happened yet, so the outage itself is waited for.
        gone = wait_for(handler, answers=False)
        for view in views:
            view[LENGTH // 2 :] = bytes([7]) * (LENGTH - LENGTH // 2)
        back = wait_for(handler, answers=True)
        kept = read = 0
        problem = ""
        try:
            located = handler.adopt(lease.epoch, lease.entries, lease.generations, lease.lengths)
            for index, key in enumerate(lease.keys):
                digest = hashlib.blake2b(located.view(index), digest_size=16).digest()
                read += digest == checksums[key] and verified(located, index)
            handler.release(lease)
            kept = list(handler.commit(grants)).count(CommitStatus.OK)
            kept -= sum(not _is_seven(handler, key) for key in grants.keys)
        except MaruError as error:
            problem = f"{type(error).__name__}: {error}"
        print(json.dumps({"away_s": back - gone, "kept": kept, "read": read, "problem": problem}), flush=True)


def _is_seven(handler: MaruHandler, key: bytes) -> bool:
    lease = handler.acquire([key], leading=False)
    if lease.statuses[0] != Presence.READY:
        return False
    same = bytes(handler.view(lease.epoch, lease.entries[0], LENGTH)) == bytes([7]) * LENGTH
    handler.release(lease)
    return same


def wait_for(handler: MaruHandler, *, answers: bool) -> float:
    """The time at which a call is answered; or at which the last one was before one is not."""
    answered = time.monotonic()
    deadline = answered + 2 * PATIENCE_S
    while time.monotonic() < deadline:
        try:
            handler.probe([NO_KEY])
            answered = time.monotonic()
            if answers:
                break
        except Unavailable:
            if not answers:
                return answered
        time.sleep(0.002)
    return time.monotonic()


@contextmanager
def witnesses(url: str, count: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Clients in processes of their own, ready; ended with the block."""
    started: list[subprocess.Popen[str]] = []
    try:
        for _ in range(count):
            command = [sys.executable, __file__, "--live-on", url]
            started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT))
        for process in started:
            assert process.stdout is not None
            while process.stdout.readline() != "ready\n":
                if process.poll() is not None:
                    raise RuntimeError(f"a client ended with {process.returncode}")
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def restart(server: RunningServer, settings: dict[str, Any]) -> tuple[RunningServer, float]:
    """Kill and start again; seconds from the start to the first PROBE of a new client that is answered."""
    server.kill()
    again: list[RunningServer | BaseException] = []

    def start() -> None:
        try:
            again.append(RunningServer.start(server.runtime_dir, settings))
        except RuntimeError as error:
            again.append(error)

    begin = time.monotonic()
    thread = threading.Thread(target=start)
    thread.start()
    # Looks for the server again and again, in ever longer pauses of at most 0.25 s; a start takes longer than that.
    with connect(server.url) as newcomer:
        while True:
            try:
                newcomer.probe([NO_KEY])
                break
            except Unavailable:
                if again and isinstance(again[0], BaseException):
                    raise again[0] from None
                time.sleep(0.001)
    seconds = time.monotonic() - begin
    thread.join()
    if isinstance(again[0], BaseException):
        raise again[0]
    return again[0], seconds


def judge(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the clients that lived on have to say."""
    return {
        "longest_away_s": max(report["away_s"] for report in reports),
        "not_back": sum(report["away_s"] > PATIENCE_S for report in reports),
        "lost": sum(2 * HELD - report["kept"] - report["read"] for report in reports),
        "why": next((report["problem"] for report in reports if report["problem"]), ""),
    }


def measure(options: argparse.Namespace) -> Outcome:
    """Fill, kill, start, look."""
    count: int = options.objects
    folder = Path(tempfile.mkdtemp(prefix="restart-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    settings = {
        # With some room left over: a pool that is nearly full evicts ahead.
        "pool_size": (count + count // 10 + 4 * CLIENTS * HELD) * (GRANULE + 128) + (1 << 20),
        "chunk_size": GRANULE,
        "lease_share": 1.0,
    }
    server = RunningServer.start(folder, settings)
    try:
        with witnesses(server.url, CLIENTS) as clients, connect(server.url) as handler:
            checksums = fill(handler, count)
            epoch = handler.epoch
            if handler.server_stats()["counters"]["evicted"]:
                raise RuntimeError("objects were evicted before the kill: the measurement is void")
            server, seconds = restart(server, settings)
            lived_on = judge([json.loads(client.communicate(timeout=3 * PATIENCE_S)[0]) for client in clients])
            wait_for(handler, answers=True)
            if handler.epoch == epoch:
                raise RuntimeError("the server was not started again: the measurement is void")
            missing, wrong = audit(handler, checksums)
            counters = handler.server_stats()["counters"]
    finally:
        server.end()
        shutil.rmtree(folder)
    figures = {
        "objects": count,
        "serving_after_s": seconds,
        "missing": missing,
        "wrong": wrong,
        "evicted": counters["evicted"],
        "clients": lived_on,
    }
    table = [
        ["what", "figure"],
        ["objects before the kill", str(count)],
        ["seconds until a new client is answered", f"{seconds:.2f}"],
        ["objects that are missing", str(missing)],
        ["objects with another checksum", str(wrong)],
        ["clients that lived on", str(CLIENTS)],
        ["longest time without an answer, seconds", f"{lived_on['longest_away_s']:.2f}"],
        ["objects in the middle of a write or a read that were lost", str(lived_on["lost"])],
    ]
    bounds = [
        Bound("seconds until it serves", seconds, LIMIT_S),
        Bound("missing objects", missing, 0),
        Bound("wrong objects", wrong, 0),
        Bound("clients that did not come back", lived_on["not_back"], 0),
        Bound("objects lost in clients that lived on", lived_on["lost"], 0),
    ]
    notes = [f"a client that lived on says: {lived_on['why']}"] if lived_on["why"] else []
    if missing == count:
        notes.append("nothing was found again: the server started cold")
    return Outcome(table, figures, bounds, notes)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options beyond ``--json``."""
    parser.add_argument("--objects", type=int, default=OBJECTS, help=f"how many [default: {OBJECTS}]")


if __name__ == "__main__":
    logs.setup("error")
    if sys.argv[1:2] == ["--live-on"]:
        live_on(sys.argv[2])
    else:
        sys.exit(main(__doc__, measure, add_options))
