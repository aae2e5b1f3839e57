"""A look-up in slices finds what one in a single piece finds, and never holds a lease for nobody."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maru_core.client import Lease
from maru_core.errors import StaleEpoch, Unavailable
from maru_integrations.vllm import questions
from maru_integrations.vllm.questions import Question
from tests.vllm.fake_store import FakeHandler, FakeStore


def key(chunk: int, number: int) -> bytes:
    return chunk.to_bytes(16, "little") + number.to_bytes(16, "little")


class Keys:
    """Of chunks with so many objects; remembers the largest number that was made at once."""

    def __init__(self, objects: int) -> None:
        self.objects = objects
        self.most = 0

    def __call__(self, first: int, end: int) -> list[bytes]:
        made = [key(chunk, number) for chunk in range(first, end) for number in range(self.objects)]
        self.most = max(self.most, len(made))
        return made


def stored(keys: Sequence[bytes]) -> tuple[FakeStore, FakeHandler]:
    store = FakeStore()
    handler = FakeHandler(store)
    if keys:
        grants = handler.reserve(keys, 8, [bytes(32)] * len(keys), weights_epoch=0)
        handler.commit(grants, checksums=False)
    return store, handler


def ask(handler: FakeHandler, keys: Keys, first: int, end: int) -> Question:
    ticks = itertools.count()
    return Question(handler, keys, first, end, keys.objects, lambda: next(ticks) * 0.4)


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "MAX_CHUNKS", 3)
    monkeypatch.setattr(questions, "MAX_OBJECTS", 8)


@given(
    first=st.integers(0, 5),
    chunks=st.integers(1, 20),
    objects=st.integers(1, 10),
    there=st.integers(0, 200),
    timeout=st.sampled_from([0.0, 1.0, 100.0]),
    late=st.integers(0, 2),
    polls=st.integers(0, 60),
)
def test_slices_find_what_one_piece_finds(
    first: int, chunks: int, objects: int, there: int, timeout: float, late: int, polls: int
) -> None:
    keys = Keys(objects)
    everything = Keys(objects)(first, first + chunks)
    store, handler = stored(everything[:there])
    store.answer_after = late
    question = ask(handler, keys, first, first + chunks)
    lease: Lease | None = None
    for _ in range(polls):
        before = question.slices
        lease = question.poll(timeout)
        assert timeout or question.slices <= before + 1, "a poll that may not wait makes one slice at most"
        if lease is not None:
            break
    assert keys.most <= max(8, objects)
    if lease is None:
        question.cancel()
        assert not store.leases
        with pytest.raises(Unavailable):
            question.poll()
        return
    asked = len(lease.keys)
    assert list(lease.keys) == everything[:asked]
    assert lease.leading == min(there, len(everything))
    assert asked - lease.leading < max(8, objects) + 1, "nothing is asked for behind what is missing but its slice"
    assert [store.by_entry[entry].key for entry in lease.entries[: lease.leading]] == everything[: lease.leading]
    assert len(lease.statuses) == len(lease.generations) == len(lease.lengths) == asked
    question.cancel()
    assert sum(map(len, store.leases.values())) == lease.leading
    handler.release(lease)
    assert not store.leases


def test_a_server_that_goes_between_slices_leaves_no_lease() -> None:
    keys = Keys(1)
    store, handler = stored(Keys(1)(0, 9))
    question = ask(handler, keys, 0, 9)
    assert question.poll() is None
    store.up = False
    with pytest.raises(Unavailable):
        question.poll()
    assert not store.leases


def test_slices_of_two_servers_are_not_put_together() -> None:
    store, handler = stored(Keys(1)(0, 9))
    question = ask(handler, Keys(1), 0, 9)
    assert question.poll() is None
    store.epoch += 1
    with pytest.raises(StaleEpoch):
        question.poll()
    assert not store.leases


def test_a_reset_between_slices_ends_the_run_where_it_came() -> None:
    """What is asked for after it belongs to weights that the first slices were not computed with."""
    store, handler = stored(Keys(1)(0, 9))
    question = ask(handler, Keys(1), 0, 9)
    assert question.poll() is None
    handler.weights_epoch = store.weights_epoch = 1
    assert question.poll() is None, "the second slice was on its way"
    lease = question.poll()
    assert lease is not None
    assert lease.leading == 6
    handler.release(lease)


def test_it_goes_on_within_the_time_that_it_may_take() -> None:
    _, handler = stored(Keys(1)(0, 20))
    ticks = itertools.count()
    # A slice takes 0.4 s by this clock, so the fourth one is not begun before the time is over.
    question = Question(handler, Keys(1), 0, 20, 1, lambda: next(ticks) * 0.4)
    assert question.poll(1.0) is None
    assert 2 <= question.slices <= 5
