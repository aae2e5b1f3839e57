"""A thread that computes holds up the scheduler's look-ups hardly longer than their answers take."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from maru_core.client import MaruHandler
from maru_core.config import MaruConfig
from maru_core.keys import KeyChain
from maru_core.namespace import Namespace
from maru_core.testing_server import RunningServer
from maru_integrations.vllm.planning import SchedulerSettings
from maru_integrations.vllm.scheduler import MaruScheduler
from maru_integrations.vllm.streams import HostLane
from maru_integrations.vllm.turns import SOON, prompt_turns
from tests.vllm.steps import request
from tests.vllm.test_loader_saver import World, closing

NAMESPACE = Namespace.of({"test": "turns"})
CHUNK, BLOCK = 32, 16
SETTINGS = SchedulerSettings(
    chunk_tokens=CHUNK, block_size=BLOCK, loads=True, stores=True, parks=True, lookup_timeout=5.0
)


@contextmanager
def computing() -> Iterator[None]:
    """A thread that runs Python and nothing else, which never gives the interpreter's lock away by itself."""
    ended = False

    def run() -> None:
        while not ended:
            pass

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended = True
        thread.join()


@pytest.fixture
def handler(tmp_path: Path) -> Iterator[MaruHandler]:
    server = RunningServer.start(tmp_path, {})
    try:
        with MaruHandler.connect(MaruConfig.from_mapping({"maru_server_url": server.url}, {}), NAMESPACE) as made:
            yield made
    finally:
        server.end()


def test_a_look_up_does_not_wait_for_turns_of_5_ms(handler: MaruHandler) -> None:
    """Asked and answered in less time than a thread that computes would keep the lock for once."""
    chain = KeyChain(NAMESPACE.root, CHUNK)
    tokens = request("any").all_token_ids
    chain.extend(tokens, len(tokens) // CHUNK * CHUNK)
    handler.commit(handler.reserve(chain.keys, 8, chain.keys, weights_epoch=0), checksums=False)
    side = MaruScheduler(handler, NAMESPACE, SETTINGS)
    side.bind_block_pool(SimpleNamespace(get_cached_block=lambda *_: None))
    took = []
    with computing():
        for number in range(12):
            one = request(f"r{number}")
            one.block_hashes = []
            start = time.perf_counter()
            side.arrived(one)
            found: Any = (None, False)
            while found[0] is None:
                found = side.match(one, 0)
            took.append(time.perf_counter() - start)
            assert found[0] > 0
            side.finished(one)
    # The best of them, since others use this machine, too.
    assert min(took) < 0.7 * sys.getswitchinterval()


class Device(HostLane):
    """As calls of a device's driver do, it lets go of the lock."""

    def after(self, fence: Any) -> None:
        for _ in range(3):
            time.sleep(0)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_copy_begins_after_one_turn_and_leaves_others_theirs(overlap: bool) -> None:
    """The loader's thread waits for its first turn, and for no other before bytes are on their way."""
    usual = sys.getswitchinterval()
    world = World()
    loader = world.loader(release_after=1, lane=Device())
    begun: list[float] = []
    meanwhile: list[float] = []

    def copying() -> None:
        begun.append(time.perf_counter())
        meanwhile.append(sys.getswitchinterval())

    world.pace.pause = copying
    took = []
    with closing(world, loader), computing():
        for number in range(12):
            op = world.load(number, 1, 2, overlap=overlap)
            begun.clear()
            start = time.perf_counter()
            loader.submit([op])
            world.until(loads=number + 1, poll=loader.poll)
            took.append(begun[0] - start)
            assert sys.getswitchinterval() == usual
    # One by layer begins on a thread of its own, maybe before the loader's has heard of it.
    assert overlap or set(meanwhile) == {usual}
    # The best of them, since others use this machine, too.
    assert min(took) < 2 * usual


@pytest.mark.parametrize("fails", [False, True])
def test_the_interval_is_what_it_was_afterwards(fails: bool) -> None:
    before = sys.getswitchinterval()
    try:
        with prompt_turns():
            assert sys.getswitchinterval() == pytest.approx(SOON)
            with prompt_turns():
                pass
            assert sys.getswitchinterval() == pytest.approx(SOON)
            if fails:
                raise KeyError
    except KeyError:
        pass
    assert sys.getswitchinterval() == before


def test_an_interval_that_is_shorter_stays() -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(SOON / 2)
    try:
        with prompt_turns():
            assert sys.getswitchinterval() == pytest.approx(SOON / 2)
        assert sys.getswitchinterval() == pytest.approx(SOON / 2)
    finally:
        sys.setswitchinterval(before)
