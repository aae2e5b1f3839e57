"""Tokens of the step before are not kept from anybody by a step that reads a load which has not ended.

vLLM hands them out when it has submitted a step, and then plans the next. So on a device a step leaves it to the next
one to wait for the outcome. What must hold: the next one knows it before it queues anything, what the step computed on
a load is stored when that is known to be good, and a failure is told with the next step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("vllm")

from attrs import evolve

from maru_integrations.vllm.metadata import LOAD_FAILED, PREEMPTED, MaruConnectorMetadata, StoreOp
from maru_integrations.vllm.streams import HostLane
from maru_integrations.vllm.worker import MaruWorker, Threads
from tests.vllm.test_fences import LAYERS, NEW, OLD, World, key
from tests.waiting import NEVER, eventually

#: Seconds in which a call that does not wait has long returned.
SOON = 0.1
STORE = StoreOp("r1", [0], [key(9)], [bytes(32)], [2], store_id=5, asynchronous=True)


class Scene(World):
    """A step reads a load that has been released and does not end before it is let."""

    def __init__(self, ahead: bool = True, lost: int | None = None) -> None:
        super().__init__(early=1, ahead=ahead)
        self.seen: list[int] = []
        self.step(lambda: self.attend(0, []))  # from here on hooks are known to come
        self.transfer.lost = lost
        self.received(loads=[self.stored(NEW)])

    def read(self, stores: list[StoreOp] | None = None) -> None:
        """The step, on the calling thread."""
        self.step(
            lambda: self.attend(1, self.seen),
            received=["r1"],
            stores=[STORE] if stores is None else stores,
        )

    def let(self) -> None:
        self.loads[0].may_finish.set()

    def failed(self) -> set[int]:
        return self.answers.take_failed_blocks()

    def results(self) -> tuple[list[int], list[tuple[int, str]]]:
        """How many chunks each load brought, and how many each store kept and why not more."""
        answer = self.answers.take_metadata()
        if answer is None:
            return [], []
        return [load.good for load in answer.loads], [(store.kept, store.reason) for store in answer.stored]


@contextmanager
def scene(**options: Any) -> Iterator[Scene]:
    made = Scene(**options)
    try:
        yield made
    finally:
        made.close()


def waits(call: Callable[[], object], until: Callable[[], object]) -> bool:
    """Whether a call of vLLM's thread, which is another one here, returns only after ``until``."""
    thread = threading.Thread(target=call)
    thread.start()
    thread.join(SOON)
    waited = thread.is_alive()
    until()
    thread.join(NEVER)
    assert not thread.is_alive()
    return waited


def test_a_step_does_not_wait_for_the_load_and_the_next_one_does() -> None:
    with scene() as world:
        world.read()
        message = MaruConnectorMetadata()
        assert waits(lambda: world.worker.begin(message, has_hooks=lambda: True), world.let)
        world.ran()
        assert world.seen == [NEW] * LAYERS
        world.answers.take_finished()
        assert world.results()[0] == [1]


def test_without_steps_ahead_the_step_waits() -> None:
    """Its own token comes next, and the others' with it."""
    with scene(ahead=False) as world:
        assert waits(world.read, world.let)


def test_what_is_stored_within_the_step_waits() -> None:
    with scene() as world:
        assert waits(lambda: world.read(stores=[evolve(STORE, store_id=0, asynchronous=False)]), world.let)
        assert key(9) in world.store.objects


def test_in_host_memory_the_step_waits() -> None:
    """There it has read layer by layer what had arrived: little is left to wait for, and an outcome is told at once."""
    with scene() as world:
        threads = world.worker._loader._settings  # type: ignore[union-attr]
        worker = MaruWorker(
            lambda: world.worker.connect(),
            world.answers,
            world.worker._shape,
            layer_names=[f"layer.{layer}" for layer in range(LAYERS)],
            threads=Threads(HostLane, threads, ahead=True),
        )
        assert not worker._may_settle_later
        worker.close()
        world.let()


def test_what_the_step_computed_is_stored_when_the_load_has_ended() -> None:
    with scene() as world:
        world.read()
        assert key(9) not in world.store.objects
        assert waits(world.step, world.let)
        eventually(lambda: key(9) in world.store.objects and world.store.objects[key(9)].ready)
        assert world.store.objects[key(9)].data == bytes([OLD]) * LAYERS


def test_a_failure_is_told_with_the_next_step_and_nothing_is_stored() -> None:
    with scene(lost=1) as world:
        world.read()
        assert not world.failed()
        world.let()
        world.step(stores=[evolve(STORE, store_id=6, keys=[key(10)])])
        assert world.failed() == {1}
        world.step()
        loads, stores = world.results()
        assert loads == [1], "the repetition brought it"
        assert stores == [(0, LOAD_FAILED)] * 2, "the next step, too, reads what the first one computed"
        assert not {key(9), key(10)} & set(world.store.objects)


@pytest.mark.parametrize("how", [{"cancelled_loads": [1]}, {"preempted": ["r1"]}], ids=["cancelled", "preempted"])
def test_a_request_that_goes_is_told_of_before_its_load_is_stopped(how: dict[str, Any]) -> None:
    """The step has read its blocks: whether they were there is known before they are somebody else's."""
    with scene(lost=1) as world:
        world.read()
        message = MaruConnectorMetadata(**how)
        assert waits(lambda: world.worker.preempt(message), world.let)
        world.answers.take_finished()
        assert world.failed() == {1}
        assert world.results()[0] == [1]


def test_what_a_preempted_request_was_to_store_is_not_stored() -> None:
    with scene() as world:
        world.read()
        world.let()
        world.step(preempted=["r1"])
        world.step()
        assert world.results()[1] == [(0, PREEMPTED)]
        assert key(9) not in world.store.objects


@pytest.mark.parametrize("hooks", [True, False])
def test_the_step_after_it_may_read_another_load(hooks: bool) -> None:
    """Each step leaves its own to the next; one that runs a single graph has waited for all layers first."""
    with scene() as world:
        other = world.stored(NEW, 2)
        world.step(lambda: world.attend(1, world.seen), received=["r1"], stores=[STORE], loads=[other])
        received: set[str] = set()
        assert waits(lambda: received.update(world.step()[1]), world.let)
        eventually(lambda: len(world.loads) == 2)
        world.until(lambda: bool(received.update(world.step()[1]) or received))
        message = MaruConnectorMetadata(received=["r2"])
        later: list[int] = []
        world.worker.begin(message, has_hooks=lambda: hooks)
        if hooks:
            world.attend(2, later)
        assert waits(lambda: world.worker.store(message), world.loads[1].may_finish.set) is not hooks
        world.step(lambda: None if hooks else world.attend(2, later))
        world.ran()
        assert later == [NEW] * LAYERS


def test_a_worker_that_is_closed_before_the_next_step_ends_its_threads() -> None:
    with scene() as world:
        world.read()
        world.let()
        world.worker.close()
        assert not [thread for thread in threading.enumerate() if thread.name in ("maru-load", "maru-store")]
