"""Looking a request's prefix up while vLLM's own prefix cache changes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maru_core.client import Grants
from maru_core.keys import KeyChain
from maru_integrations.vllm import questions
from maru_integrations.vllm.matching import Matcher
from maru_integrations.vllm.requests import RequestState
from tests.vllm.fake_store import FakeHandler, FakeStore

CHUNK, BLOCK, CHUNKS = 16, 8, 5
TOKENS = list(range(CHUNK * CHUNKS + 1))


def stored(first: int, last: int) -> tuple[FakeStore, FakeHandler, RequestState]:
    """Chunks ``[first, last)`` of the request are in the pool."""
    store = FakeStore()
    handler = FakeHandler(store)
    chain = KeyChain(bytes(32), CHUNK)
    chain.extend(TOKENS, CHUNK * CHUNKS)
    keys = chain.keys[first:last]
    grants: Grants = handler.reserve(keys, 8, [bytes(32)] * len(keys), weights_epoch=0)
    handler.commit(grants, checksums=False)
    request = SimpleNamespace(request_id="r", all_token_ids=TOKENS)
    return store, handler, RequestState(request, KeyChain(bytes(32), CHUNK))


@pytest.mark.parametrize("first", [0, 1, 3])
def test_an_answer_to_what_is_not_asked_any_more_promises_nothing(first: int) -> None:
    """Asked for what lies behind three chunks of vLLM's own, which are gone when the answer comes."""
    store, handler, state = stored(first, CHUNKS)
    matcher = Matcher(handler, chunk_tokens=CHUNK, block_size=BLOCK, lookup_timeout=1.0, clock=lambda: 0.0)  # type: ignore[arg-type]
    store.answer_after = 1
    assert matcher.match(state, len(TOKENS), 3 * CHUNK) is None
    assert matcher.match(state, len(TOKENS), 0) is None, "it is asked again, from the start"
    found = matcher.match(state, len(TOKENS), 0)
    if first:
        assert found == 0, "what is there does not begin where it would have to"
        assert not store.leases
        return
    assert found == CHUNKS * CHUNK
    assert state.hit is not None
    assert state.hit.first_chunk == 0
    assert len(state.hit.lease.keys) == CHUNKS
    matcher.drop(state)
    assert not store.leases


def test_a_longer_prefix_of_vllms_own_takes_what_is_left_of_the_answer() -> None:
    store, handler, state = stored(0, CHUNKS)
    matcher = Matcher(handler, chunk_tokens=CHUNK, block_size=BLOCK, lookup_timeout=1.0, clock=lambda: 0.0)  # type: ignore[arg-type]
    store.answer_after = 1
    assert matcher.match(state, len(TOKENS), 0) is None
    assert matcher.match(state, len(TOKENS), 3 * CHUNK) == 2 * CHUNK


def sliced(monkeypatch: pytest.MonkeyPatch, chunks: int, clock: Clock) -> tuple[FakeStore, RequestState, Matcher]:
    """All chunks of a request are in the pool, and a look-up asks for so many at a time."""
    monkeypatch.setattr(questions, "MAX_CHUNKS", chunks)
    store, handler, state = stored(0, CHUNKS)
    matcher = Matcher(handler, chunk_tokens=CHUNK, block_size=BLOCK, lookup_timeout=1.0, clock=clock)  # type: ignore[arg-type]
    return store, state, matcher


class Clock:
    """Told how late it is."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_long_prompt_is_asked_for_in_slices_and_hashed_as_they_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    store, state, matcher = sliced(monkeypatch, 2, clock)
    store.answer_after = 1
    asked = []
    for _ in range(10):
        matcher.new_step(idle=False)
        found = matcher.match(state, len(TOKENS), 0)
        assert state.chain is not None
        asked.append((found, store.lookups, len(state.chain.keys)))
        if found is not None:
            break
        clock.now += 0.005
    # A slice is sent and waited for once, in vain; a step later it is there, and the next one is sent and waited for.
    assert asked == [(None, 1, 2), (None, 2, 4), (None, 3, 5), (CHUNKS * CHUNK, 3, 5)]
    assert [bool(wait) for wait in store.patience] == [True, False, True, False, True, False]
    matcher.drop(state)
    assert not store.leases


def test_a_deadline_leaves_what_was_answered_until_then(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    store, state, matcher = sliced(monkeypatch, 2, clock)
    breaker = matcher._breaker
    store.answer_after = 1
    assert matcher.match(state, len(TOKENS), 0) is None
    assert matcher.match(state, len(TOKENS), 0) is None
    clock.now = 2.0
    store.answer_after = 99  # also of the slice that is on its way
    assert matcher.match(state, len(TOKENS), 0) == 2 * CHUNK
    assert not breaker.is_open
    matcher.drop(state)
    assert not store.leases


def test_a_request_that_goes_between_slices_gives_back_what_was_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    store, state, matcher = sliced(monkeypatch, 2, Clock())
    store.answer_after = 1
    assert matcher.match(state, len(TOKENS), 0) is None
    assert matcher.match(state, len(TOKENS), 0) is None
    assert store.leases
    matcher.drop(state)
    assert not store.leases


def test_a_question_that_is_given_up_is_taken_back() -> None:
    """Whatever the server leases for it later is nobody's."""
    store, handler, state = stored(0, CHUNKS)
    now = [0.0]
    matcher = Matcher(handler, chunk_tokens=CHUNK, block_size=BLOCK, lookup_timeout=1.0, clock=lambda: now[0])  # type: ignore[arg-type]
    store.answer_after = 10**9
    assert matcher.match(state, len(TOKENS), 0) is None
    assert state.lookup is not None
    pending = state.lookup.pending._pending
    now[0] = 1.0
    assert matcher.match(state, len(TOKENS), 0) == 0
    assert pending is not None
    assert pending.cancelled  # type: ignore[attr-defined]
    store.answer_after = 0
    assert matcher.match(state, len(TOKENS), 0) == 0, "a request asks once"
    assert not store.leases


def test_a_promise_of_a_server_that_is_gone_is_not_repeated() -> None:
    """A lease ends with the server that gave it: what it covered would fail to load."""
    store, handler, state = stored(0, CHUNKS)
    matcher = Matcher(handler, chunk_tokens=CHUNK, block_size=BLOCK, lookup_timeout=1.0, clock=lambda: 0.0)  # type: ignore[arg-type]
    assert matcher.match(state, len(TOKENS), 0) == CHUNKS * CHUNK
    assert matcher.match(state, len(TOKENS), 0) == CHUNKS * CHUNK
    store.epoch += 1
    assert matcher.match(state, len(TOKENS), 0) == 0
    assert state.hit is None
    assert not store.leases


def test_a_hit_behind_a_prefix_that_vllm_no_longer_has_is_given_back() -> None:
    """It begins at the fourth chunk; nobody has the first three any more."""
    store, handler, state = stored(0, CHUNKS)
    matcher = Matcher(handler, chunk_tokens=CHUNK, block_size=BLOCK, lookup_timeout=1.0, clock=lambda: 0.0)  # type: ignore[arg-type]
    assert matcher.match(state, len(TOKENS), 3 * CHUNK) == 2 * CHUNK
    assert matcher.match(state, len(TOKENS), 3 * CHUNK - 1) == 0
    assert state.hit is None
    assert not store.leases


@given(st.integers(1, CHUNK * CHUNKS + 1), st.integers(0, 2 * CHUNKS), st.integers(0, CHUNKS))
def test_a_hit_ends_on_a_block_that_was_stored_and_leaves_a_token_to_compute(tokens: int, own: int, there: int) -> None:
    """R023: whole chunks of the prompt that are stored, also when a longer one was, behind what vLLM has itself."""
    local = min(own * BLOCK, tokens // BLOCK * BLOCK)
    store, handler, state = stored(0, there)
    matcher = Matcher(handler, chunk_tokens=CHUNK, block_size=BLOCK, lookup_timeout=1.0, clock=lambda: 0.0)  # type: ignore[arg-type]
    end = min(there, tokens // CHUNK) * CHUNK
    most = (tokens - 1) // BLOCK * BLOCK
    for _ in range(2):  # however often vLLM asks
        assert matcher.match(state, tokens, local) == max(0, min(end, most) - local)
    matcher.drop(state)
    assert not store.leases


def test_what_somebody_else_is_writing_for_ever_is_a_miss_at_once() -> None:
    """R025: nobody waits for it, nor asks again."""
    store, handler, state = stored(0, CHUNKS)
    for found in store.objects.values():
        found.ready = False
    matcher = Matcher(handler, chunk_tokens=CHUNK, block_size=BLOCK, lookup_timeout=1.0, clock=lambda: 0.0)  # type: ignore[arg-type]
    assert [matcher.match(state, len(TOKENS), 0) for _ in range(3)] == [0, 0, 0]
    assert store.lookups == 1
    assert not store.leases
