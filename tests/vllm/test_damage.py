"""R139 in the connector, on a real server and pool: damaged objects are recomputed, never used, never spread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from maru_core.checksum import NO_CHECKSUM, is_covered
from maru_core.client import MaruHandler
from maru_core.keys import KeyChain
from tests.client.pool_bytes import Stored, flip, swap
from tests.client.real import Folder
from tests.vllm.fake_store import FakeStore
from tests.vllm.mini_engine import CHUNK, Engine, reference
from tests.waiting import eventually

EngineOn = Callable[..., Engine]


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(seed * 131 + index * 7 + index // 13) % 997 for index in range(length)]


@pytest.fixture
def folder(maru_runtime_dir: Path) -> Iterator[Folder]:
    made = Folder(maru_runtime_dir)
    yield made
    made.end()


class Fleet:
    """Engines whose two sides have sessions of their own with one real server."""

    def __init__(self, folder: Folder, engine_on: EngineOn, mode: str) -> None:
        self._folder = folder
        self._engine_on = engine_on
        self._mode = mode
        self.watcher = folder.connect(verify=mode)
        self._number = 0

    def engine(self, **options: object) -> tuple[Engine, list[MaruHandler]]:
        """An engine with an empty cache of its own, and its handlers: the scheduler's, then the worker's."""
        made: list[MaruHandler] = []

        def connect(_store: FakeStore) -> MaruHandler:
            made.append(self._folder.connect(verify=self._mode))
            return made[-1]

        return self._engine_on(FakeStore(), handler=connect, **options), made

    def ask(self, tokens: list[int], **options: object) -> tuple[int, MaruHandler | None]:
        """Have a new engine answer; the external tokens that it was promised, and its worker's handler."""
        engine, made = self.engine(**options)
        self._number += 1
        name = f"r{self._number}"
        engine.add(name, tokens, max_tokens=2)
        engine.run()
        assert engine.answers[name] == reference(tokens, 2)
        assert not engine.side._guard.caught
        assert not engine.worker._guard.caught
        external = engine.external.get(name, 0)
        engine.side.shutdown()
        engine.worker.shutdown()
        return external, made[1] if len(made) > 1 else None

    def keys(self, tokens: list[int]) -> list[bytes]:
        engine, _ = self.engine()
        assert engine.side._plan is not None
        keys = KeyChain(engine.side._plan.namespace.root, CHUNK)
        keys.extend(tokens, len(tokens) // CHUNK * CHUNK)
        engine.side.shutdown()
        return keys.keys

    def damaged(self) -> int:
        number: int = self.watcher.stats()["counters"]["damaged"]
        return number


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["off", "sample", "full"])
def test_the_worker_gives_chunks_the_checksums_that_its_mode_covers(
    folder: Folder, engine_on: EngineOn, mode: str
) -> None:
    """Over the bytes that lie in the pool once they are copied: another engine finds them whole."""
    fleet = Fleet(folder, engine_on, mode)
    tokens = prompt(CHUNK * 40)
    fleet.ask(tokens, num_blocks=200)
    sums = [(key, Stored.of(fleet.watcher, key).header.checksum) for key in fleet.keys(tokens)]
    assert len(sums) == 40
    for key, found in sums:
        assert (found != NO_CHECKSUM) == is_covered(mode, key)  # type: ignore[arg-type]
    external, worker = fleet.ask([*tokens, 1], num_blocks=200)
    assert external == len(tokens)
    assert fleet.damaged() == 0
    assert worker is not None
    assert (worker._checks.header_mismatches, worker._checks.checksum_mismatches) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("extra", [{}, {"maru_async_load": True}], ids=["sync", "parked"])
def test_a_damaged_chunk_is_recomputed_and_replaced(
    folder: Folder, engine_on: EngineOn, extra: dict[str, bool]
) -> None:
    """Wherever in a chunk or its header the damage is: the answer is right, and so is what the next engine loads."""
    fleet = Fleet(folder, engine_on, "full")
    tokens = prompt(CHUNK * 4 + 1)
    keys = fleet.keys(tokens)
    fleet.ask(tokens)
    size = len(Stored.of(fleet.watcher, keys[0]).payload)

    @settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None)
    @given(st.integers(0, 3), st.integers(0, size - 1) | st.integers(-128, -33), st.integers(1, 255))
    def check(chunk: int, position: int, bits: int) -> None:
        before = fleet.damaged()
        stored = Stored.of(fleet.watcher, keys[chunk])
        if position >= 0:
            flip(stored.payload, position, bits)
        else:
            flip(stored.raw_header, 128 + position, bits)
        external, worker = fleet.ask(tokens, extra=extra)
        assert external == CHUNK * 4, "it was promised"
        assert worker is not None
        found = worker._checks.header_mismatches, worker._checks.checksum_mismatches
        # A header whose state alone changed says that the object is gone, not that it is damaged; its CRC says more.
        assert found == ((0, 1) if position >= 0 else (1, 0))
        eventually(lambda: fleet.damaged() == before + 1)
        fleet.ask(tokens)  # whatever is missing is stored by now, or is stored by this
        assert fleet.ask(tokens)[0] == CHUNK * 4
        assert fleet.damaged() == before + 1

    check()


def test_exchanged_chunks_are_never_loaded(folder: Folder, engine_on: EngineOn) -> None:
    """Payloads, then headers, of two chunks of one prompt."""
    fleet = Fleet(folder, engine_on, "full")
    tokens = prompt(CHUNK * 4 + 1)
    keys = fleet.keys(tokens)
    for what in ("payload", "raw_header"):
        fleet.ask(tokens)
        before = fleet.damaged()
        first, second = (Stored.of(fleet.watcher, keys[chunk]) for chunk in (1, 2))
        swap(getattr(first, what), getattr(second, what))
        fleet.ask(tokens)
        if what == "payload":  # with the other's header an object is not even found
            eventually(lambda before=before: fleet.damaged() == before + 2)
        fleet.ask(tokens)
        fleet.ask(tokens)


def test_nothing_of_a_failed_load_is_stored(folder: Folder, engine_on: EngineOn) -> None:
    """All later engines load what is in the pool then, and answer right."""
    fleet = Fleet(folder, engine_on, "full")
    short, long = prompt(CHUNK * 2 + 1), prompt(CHUNK * 6 + 1)
    fleet.ask(short)
    flip(Stored.of(fleet.watcher, fleet.keys(short)[1]).payload, 5, 8)
    assert fleet.ask(long)[0] == CHUNK * 2
    eventually(lambda: fleet.damaged() == 1)
    for _ in range(3):
        external, _ = fleet.ask(long)
    assert external == CHUNK * 6
    assert fleet.damaged() == 1
