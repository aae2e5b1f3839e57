"""Random lives of engines on a real server that is killed, stopped, filled: right answers, and nothing stays held."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from maru_core.client import MaruHandler
from maru_core.errors import MaruError
from maru_core.keys import KeyChain
from tests.client.pool_bytes import Stored
from tests.client.real import Folder
from tests.vllm.fake_store import FakeStore
from tests.vllm.lives import check_answers, live, make_texts
from tests.vllm.mini_engine import CHUNK, Engine
from tests.vllm.slow_transfer import Pace, SlowTransfer
from tests.vllm.test_connector import prompt, settled
from tests.waiting import NEVER, eventually

EngineOn = Callable[..., Engine]

ASYNC = {"maru_async_load": True, "maru_async_store": True}
KNOBS = {
    "in the step": {},
    "beside": ASYNC,
    "overlap": {**ASYNC, "maru_overlap_load_with_compute": True},
    "layerwise": {**ASYNC, "maru_overlap_load_with_compute": True, "maru_use_layerwise": True},
    "window": {**ASYNC, "maru_load_admission_window": 1, "maru_load_or_compute": "auto"},
}


@pytest.fixture
def folder(maru_runtime_dir: Path) -> Iterator[Folder]:
    made = Folder(maru_runtime_dir)
    yield made
    made.end()


class Trouble:
    """Things that happen to a server and to its pool."""

    def __init__(self, folder: Folder, watcher: MaruHandler, rng: random.Random, verify: str) -> None:
        self._folder = folder
        self._watcher = watcher
        self._rng = rng
        self._verify = verify
        self._timers: list[threading.Timer] = []
        self.keys: list[bytes] = []

    def make(self, engine: Engine, dice: float) -> None:
        with suppress(MaruError, OSError, KeyError, AssertionError, ValueError):
            if dice < 0.015:
                os.kill(self._folder.pid(), self._rng.choice([signal.SIGKILL, signal.SIGTERM]))
            elif dice < 0.03:
                self._pause(self._rng.choice([0.02, 0.3, 1.2]))
            elif dice < 0.05 and self._verify == "full" and self.keys:
                payload = Stored.of(self._watcher, self._rng.choice(self.keys)).payload
                payload[self._rng.randrange(len(payload))] ^= 1 << self._rng.randrange(8)
            elif dice < 0.06:
                engine.side.reset_cache()
            elif dice < 0.07:
                engine.scheduler.reset_prefix_cache()
            elif dice < 0.075:
                self._watcher.reset()

    def _pause(self, seconds: float) -> None:
        pid = self._folder.pid()
        os.kill(pid, signal.SIGSTOP)

        def go_on() -> None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

        self._timers.append(threading.Timer(seconds, go_on))
        self._timers[-1].start()

    def end(self) -> None:
        for timer in self._timers:
            timer.join()


@pytest.mark.slow
@pytest.mark.parametrize("verify", ["full", "off"])
@pytest.mark.parametrize("knobs", KNOBS)
@pytest.mark.timeout(120)
def test_two_engines_and_a_server_in_trouble(folder: Folder, engine_on: EngineOn, knobs: str, verify: str) -> None:
    """Killed, stopped for a while, reset by somebody else, a pool of a megabyte, and with checksums damaged bytes."""
    rng = random.Random(f"{knobs} {verify}")
    pool = rng.choice(["1M", "4M"])
    more: dict[str, Any] = {"verify": verify, "pool_size": pool, "request_timeout": 0.5}
    if rng.random() < 0.3:
        more["chunk_size"] = 16384
    more["lease_share"] = random.Random(f"share {knobs} {verify}").choice([0.02, 0.05, 0.5])
    watcher = folder.connect(**more)
    texts = make_texts(rng)
    for _ in range(2):
        made: list[MaruHandler] = []

        def connect(_store: FakeStore, made: list[MaruHandler] = made) -> MaruHandler:
            made.append(folder.connect(**more))
            return made[-1]

        engine = engine_on(
            FakeStore(),
            handler=connect,
            extra={**KNOBS[knobs], "maru_load_timeout": 1.0},
            num_blocks=rng.choice([20, 32, 64]),
            budget=rng.choice([16, 64, 200]),
            max_seqs=rng.choice([2, 8]),
            prefix_caching=rng.random() < 0.8,
            threads=bool(KNOBS[knobs]),
            ahead=rng.random() < 0.3 and "overlap" not in knobs and "layerwise" not in knobs,
        )
        free = engine.free_blocks()
        trouble = Trouble(folder, watcher, rng, verify)
        assert engine.side._plan is not None
        for text in texts:
            keys = KeyChain(
                engine.side._plan.namespace.root, CHUNK, objects_per_chunk=engine.side._plan.objects_per_chunk
            )
            keys.extend(text, len(text) // CHUNK * CHUNK)
            trouble.keys += keys.object_keys(0, len(text) // CHUNK)
        prompts = live(engine, rng, texts, 120, partial(trouble.make, engine), hooks=0.8)
        trouble.end()
        engine.run(5000)  # a store may be waiting for a server that is gone
        check_answers(engine, prompts)
        engine.poisoned.clear()
        settled(engine, free)

        eventually(partial(nothing_held, watcher))
        start = time.monotonic()
        engine.side.shutdown()
        engine.worker.shutdown()
        assert time.monotonic() - start < 20
    eventually(partial(nobody_else, watcher))
    assert watcher.server_stats(timeout=20)["counters"]["internal_errors"] == 0


def nothing_held(watcher: MaruHandler) -> bool:
    """Whether a server answers and says that no page is leased or reserved."""
    try:
        (pool,) = watcher.server_stats()["pools"]
    except MaruError:
        return False
    return not pool["leased"] and not pool["reserved"]


def nobody_else(watcher: MaruHandler) -> bool:
    """Whether a server answers and says that the watcher is its only client."""
    try:
        return bool(watcher.server_stats()["sessions"] == 1)
    except MaruError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("order", ["worker first", "scheduler first"])
@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("knobs", ["beside", "overlap", "layerwise"])
def test_an_engine_that_ends_with_loads_and_stores_under_way_leaves_nothing_behind(
    folder: Folder, engine_on: EngineOn, knobs: str, killed: bool, order: str
) -> None:
    """In bounded time; also when the server was killed just before."""
    pace = Pace()
    watcher = folder.connect(pool_size="8M")

    def engine() -> Engine:
        return engine_on(
            FakeStore(),
            handler=lambda _: folder.connect(pool_size="8M"),
            extra=KNOBS[knobs],
            threads=True,
            num_blocks=200,
            budget=2000,
            max_seqs=20,
            transfer=lambda *what: SlowTransfer(*what, pace),
        )

    first = engine()
    for number in range(4):
        first.add(f"w{number}", prompt(190, number), max_tokens=1)
    first.run()
    first.side.shutdown()
    first.worker.shutdown()
    eventually(partial(nobody_else, watcher))
    second = engine()
    gate = threading.Event()
    pace.pause = lambda: [None, gate.wait(NEVER)][0]
    for number in range(4):
        second.add(f"l{number}", prompt(190, number), max_tokens=1)
        second.add(f"s{number}", prompt(190, number + 10), max_tokens=1)
    while not second.held or pace.calls[-1].endswith("ends"):
        second.step()
    (pool,) = watcher.server_stats()["pools"]
    assert pool["leased"], "loads are under way"
    if killed:
        os.kill(folder.pid(), signal.SIGKILL)
    sides = [second.worker, second.side] if order == "worker first" else [second.side, second.worker]
    pace.pause = lambda: time.sleep(0.1)
    gate.set()
    start = time.monotonic()
    for side in sides:
        side.shutdown()
    assert time.monotonic() - start < 20

    eventually(lambda: nothing_held(watcher) and nobody_else(watcher))
    assert not {"maru-load", "maru-store"} & {thread.name for thread in threading.enumerate()}
