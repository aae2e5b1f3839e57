"""Every order between vLLM's stream and those of our threads is asked for: on a device that is as late as it may be.

Each test says what must hold with the fences, and that without any single one of them it does not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm")

from maru_core.geometry import ObjectLayout
from maru_integrations.vllm.answers import Answers
from maru_integrations.vllm.copies import ChunkShape
from maru_integrations.vllm.metadata import LoadOp, MaruConnectorMetadata, StoreOp
from maru_integrations.vllm.moving import Link
from maru_integrations.vllm.releasing import LoaderSettings
from maru_integrations.vllm.saver import SaverSettings
from maru_integrations.vllm.worker import MaruWorker, Threads
from tests.vllm.fake_store import FakeHandler, FakeStore
from tests.vllm.fake_streams import Device, FakeLane, QueuedTransfer

LAYERS, BLOCKS = 3, 8
NAMES = [f"layer.{layer}" for layer in range(LAYERS)]
STORED = ObjectLayout(1, LAYERS, 1, 1, 1)
SHAPE = ChunkShape(1, 1, STORED.nbytes)
OLD, NEW = 7, 42


def key(number: int) -> bytes:
    return bytes([number]) * 32


class World:
    """A worker on a late device, and the steps that vLLM would make."""

    def __init__(self, broken: str = "", early: int = 0, ahead: bool = False) -> None:
        self.device = Device([[OLD] * BLOCKS for _ in range(LAYERS)])
        self.store = FakeStore()
        self.handler = FakeHandler(self.store)
        self.answers = Answers()
        self.transfer = QueuedTransfer(self.device, broken)
        self.loads: list[Any] = []
        begin = self.transfer.begin_load

        class Noting(QueuedTransfer):
            def begin_load(noting, blocks: Any, copies: Any) -> Any:
                self.loads.append(begin(blocks, copies))
                return self.loads[-1]

        link = Link(self.handler, Noting(self.device, broken), STORED, QueuedTransfer(self.device, broken))  # type: ignore[arg-type]
        self.worker = MaruWorker(
            lambda: link,
            self.answers,
            SHAPE,
            layer_names=NAMES,
            threads=Threads(
                lambda: FakeLane(self.device, broken),
                LoaderSettings(release_after=early, num_layers=LAYERS),
                SaverSettings(limit_bytes=1 << 20),
                ahead,
            ),
        )

    def step(self, forward: Callable[[], None] = lambda: None, **metadata: Any) -> tuple[set[str], set[str]]:
        """One step whose forward pass queues what ``forward`` does; what it reports as sent and received."""
        message = MaruConnectorMetadata(**metadata)
        self.worker.preempt(message)
        self.worker.begin(message, has_hooks=lambda: True)
        forward()
        for op in message.loads:
            self.worker.load(op)
        self.worker.store(message)
        self.answers.hold(message.held)
        self.worker.end()
        return self.answers.take_finished()

    def until(self, what: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 5
        while not what():
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def received(self, forward: Callable[[], None] = lambda: None, **metadata: Any) -> None:
        """Such a step, and further ones until its load was reported."""
        received = self.step(forward, **metadata)[1]
        self.until(lambda: bool(received.update(self.step()[1]) or received))

    def stored(self, value: int, number: int = 1) -> LoadOp:
        """An object that is in the pool, as a load to block ``number``."""
        grants = self.handler.reserve([key(number)], LAYERS, [bytes(32)], weights_epoch=0)
        self.handler.room(grants, 0)[:] = bytes([value]) * LAYERS
        self.handler.commit(grants, checksums=False)
        found = self.store.objects[key(number)]
        return LoadOp(
            load_id=number,
            request_id=f"r{number}",
            parked=True,
            epoch=self.store.epoch,
            chunk=0,
            first=0,
            last=1,
            blocks=[number],
            entries=[found.entry],
            generations=[found.generation],
            lengths=[LAYERS],
            keys=[key(number)],
            overlap=True,
        )

    def compute(self, block: int, value: int) -> None:
        """Queue a forward pass that writes a block."""
        for layer in range(LAYERS):
            self.device.queue(lambda layer=layer: self.device.pages[layer].__setitem__(block, value))  # type: ignore[misc]

    def attend(self, block: int, seen: list[int]) -> None:
        """Queue a forward pass that reads a block, layer by layer, with vLLM's hooks."""
        for layer, name in enumerate(NAMES):
            self.worker.wait_layer(name)
            self.device.queue(lambda layer=layer: seen.append(self.device.pages[layer][block]))  # type: ignore[misc]

    def ran(self) -> None:
        self.device.reach(self.device.compute)

    def close(self) -> None:
        for load in self.loads:
            load.may_finish.set()
        self.worker.close()


def store_reads_what_the_step_computed(broken: str) -> None:
    world = World(broken)
    try:
        op = StoreOp("a", [0], [key(1)], [bytes(32)], [3], store_id=1, asynchronous=True)
        world.step(lambda: world.compute(3, NEW), stores=[op])
        world.until(lambda: key(1) in world.store.objects and world.store.objects[key(1)].ready)
        assert bytes(world.store.objects[key(1)].data) == bytes([NEW]) * LAYERS
    finally:
        world.close()


def load_leaves_alone_what_a_step_in_flight_still_reads(broken: str) -> None:
    """Its blocks belonged to a request whose last step is queued and has not run."""
    world, seen = World(broken), []
    try:
        op = world.stored(NEW)
        world.received(lambda: world.attend(1, seen), loads=[op])
        world.ran()
        assert seen == [OLD] * LAYERS
    finally:
        world.close()


def request_reads_what_was_loaded(broken: str) -> None:
    """A request that was reported as received reads its pages in the next step."""
    world, seen = World(broken), []
    try:
        op = world.stored(NEW)
        world.received(loads=[op])
        world.step(lambda: world.attend(1, seen), received=["r1"])
        world.ran()
        assert seen == [NEW] * LAYERS
    finally:
        world.close()


def request_reads_layers_while_later_ones_arrive(broken: str) -> None:
    world, seen = World(broken, early=1), []
    try:
        world.step(lambda: world.attend(0, []))  # from here on hooks are known to come
        op = world.stored(NEW)
        world.received(loads=[op])
        assert not world.loads[0].events[-1].passed, "released before the last layer is there"

        def forward() -> None:
            world.attend(1, seen)
            world.ran()
            world.loads[0].may_finish.set()

        world.step(forward, received=["r1"])
        assert seen == [NEW] * LAYERS
    finally:
        world.close()


CASES = [
    (store_reads_what_the_step_computed, "after"),
    (load_leaves_alone_what_a_step_in_flight_still_reads, "after"),
    (request_reads_what_was_loaded, "drain"),
    (request_reads_layers_while_later_ones_arrive, "wait_layer"),
]


@pytest.mark.parametrize("case", [case for case, _ in CASES])
def test_with_its_fences(case: Callable[[str], None]) -> None:
    case("")


@pytest.mark.parametrize(("case", "broken"), CASES)
def test_without_one_of_them_it_does_not_hold(case: Callable[[str], None], broken: str) -> None:
    with pytest.raises(AssertionError):
        case(broken)


def test_blocks_of_a_released_load_are_left_alone_before_a_step_may_reuse_them() -> None:
    """The request was aborted after its release: vLLM gives its blocks away at once."""
    world = World(early=1)
    try:
        world.step(lambda: world.attend(0, []))
        op = world.stored(NEW)
        world.received(loads=[op])
        world.step(lambda: world.compute(1, 99), cancelled_loads=[1])
        world.ran()
        assert not world.loads[0].stream.work
        assert [pages[1] for pages in world.device.pages] == [99] * LAYERS
    finally:
        world.close()


@pytest.mark.parametrize("waited", range(LAYERS + 1))
@pytest.mark.parametrize("lost", range(1, LAYERS))
def test_what_was_queued_behind_layers_that_did_not_arrive_counts_as_failed_although_they_came_later(
    lost: int, waited: int
) -> None:
    """``waited``: layers of which the step had queued something when the load failed. It is copied once more."""
    world, seen = World(early=1), []
    try:
        world.step(lambda: world.attend(0, []))
        op = world.stored(NEW)
        world.transfer.lost = lost
        world.received(loads=[op])

        def forward() -> None:
            for layer, name in enumerate(NAMES):
                if layer == waited:
                    world.loads[0].may_finish.set()
                world.worker.wait_layer(name)
                world.device.queue(lambda layer=layer: seen.append(world.device.pages[layer][1]))  # type: ignore[misc]
                if layer < waited:
                    world.ran()
            world.loads[0].may_finish.set()

        store = StoreOp("r1", [0], [key(9)], [bytes(32)], [2], store_id=5, asynchronous=True)
        message = MaruConnectorMetadata(received=["r1"], stores=[store])
        world.worker.begin(message, has_hooks=lambda: True)
        forward()
        world.worker.store(message)
        world.ran()
        world.worker.end()
        world.answers.take_finished()
        assert seen == [OLD if lost <= layer < waited else NEW for layer in range(LAYERS)]
        assert world.answers.take_failed_blocks() == ({1} if waited else set())
        assert [pages[1] for pages in world.device.pages] == [NEW] * LAYERS
        answer = world.answers.take_metadata()
        assert answer is not None
        assert [result.good for result in answer.loads] == [1]
        if waited:
            assert [(result.store_id, result.kept) for result in answer.stored] == [(5, 0)]
            assert key(9) not in world.store.objects
    finally:
        world.close()


def test_a_step_that_runs_one_graph_waits_for_all_layers_first() -> None:
    world, seen = World(early=1), []
    try:
        op = world.stored(NEW)
        world.received(loads=[op])
        message = MaruConnectorMetadata(received=["r1"])
        world.worker.begin(message, has_hooks=lambda: False)
        for layer in range(LAYERS):
            world.device.queue(lambda layer=layer: seen.append(world.device.pages[layer][1]))  # type: ignore[misc]
        world.ran()  # before the loader has seen to the rest
        assert seen == [NEW] * LAYERS
        world.loads[0].may_finish.set()
        world.worker.store(message)
    finally:
        world.close()


def test_hooks_that_stop_coming_are_noticed_and_what_was_read_counts_as_failed() -> None:
    world = World(early=1)
    try:
        world.step(lambda: world.attend(0, []))
        op = world.stored(NEW)
        world.received(loads=[op])
        world.loads[0].may_finish.set()
        store = StoreOp("r1", [0], [key(9)], [bytes(32)], [1], store_id=5, asynchronous=True)
        world.step(stores=[store], received=["r1"])
        assert world.answers.take_failed_blocks() == {1}
        answer = world.answers.take_metadata()
        assert answer is not None
        assert [(result.store_id, result.kept) for result in answer.stored] == [(5, 0)]
        assert key(9) not in world.store.objects
    finally:
        world.close()
