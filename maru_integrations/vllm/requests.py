"""The live requests, and what the scheduler side remembers of each. No I/O but for a warning."""

from __future__ import annotations

from typing import Any

from attrs import define, field

from maru_core import logs
from maru_core.client import Lease
from maru_core.keys import KeyChain
from maru_integrations.vllm import support
from maru_integrations.vllm.questions import Question
from maru_integrations.vllm.waits import Wait


@define
class Lookup:
    """A question to the server that has not been answered: chunks from ``first_chunk`` on, for as long as ``wait``.

    ``polled``: how many of its slices have been waited for. ``in_order``: nobody was before it in line then.
    """

    pending: Question
    first_chunk: int
    wait: Wait
    polled: int = 0
    in_order: bool = True


@define
class Hit:
    """A promise: the server leased ``chunks`` whole chunks of this request's prefix from ``first_chunk`` on.

    ``local`` and ``tokens`` are what was last answered to vLLM: tokens ``[local, local + tokens)`` come from Maru.
    """

    lease: Lease
    first_chunk: int
    chunks: int
    local: int = 0
    tokens: int = 0
    promised: bool = False


@define
class RequestState:
    """One live request.

    ``chain`` is ``None`` when its KV cannot be identified. ``blocks``: its block table, as of the last load or
    step of it. ``next_chunk``: first chunk that has not been handed to a worker for storing in this life; ``known``:
    chunks that came out of the pool in this life. ``asked``: the pool was asked and had nothing, until the request
    starts over; ``passed_over``: it was not asked, because the server counts as away. ``failed``: a load failed; the
    same hit answered again would livelock, so it gets none. ``tainted``: some of its KV is older than a reset or was
    computed on a failed load, so nothing is stored until it starts over; ``outdated``: it is older than a reset.
    """

    request: Any
    chain: KeyChain | None
    blocks: list[int] = field(factory=list)
    next_chunk: int = 0
    known: range = range(0)
    lookup: Lookup | None = None
    hit: Hit | None = None
    asked: bool = False
    passed_over: bool = False
    failed: bool = False
    #: Tokens that vLLM's own cache and Maru have for it, when it is next scheduled as a new one.
    expected: int = 0
    tainted: bool = False
    outdated: bool = False

    @property
    def has_kv(self) -> bool:
        """Whether something was computed or loaded for it in this life."""
        return bool(self.blocks or self.known) or self.failed

    def outdate(self) -> None:
        """Some of its KV is older than a reset."""
        self.tainted = self.outdated = True

    def start_over(self) -> None:
        """Forget what depends on blocks: they were taken away (preemption)."""
        self.blocks = []
        self.next_chunk = 0
        self.known = range(0)
        self.asked = False
        self.tainted = False
        self.outdated = False


@define(eq=False)
class LiveRequests:
    """Every request by id, from when it is first heard of until its end. ``root``: what all keys begin with.

    ``chunk_tokens`` and ``objects_per_chunk`` as in KeyChain.
    """

    root: bytes
    chunk_tokens: int
    objects_per_chunk: int = 1
    states: dict[str, RequestState] = field(factory=dict, init=False)
    #: Reasons for which requests are not cached, each of which is told once.
    _told: set[str] = field(factory=set, init=False)
    _log: logs.Log = field(factory=lambda: logs.get_logger(__name__), init=False)

    def of(self, request: Any) -> RequestState:
        """The state of a request, which is heard of by now."""
        state = self.states.get(request.request_id)
        if state is None:
            state = self.states[request.request_id] = RequestState(request, self._chain(request))
        return state

    def _chain(self, request: Any) -> KeyChain | None:
        reason = support.refused_request(request)
        if reason is None:
            return KeyChain(self.root, self.chunk_tokens, support.salt_of(request), self.objects_per_chunk)
        if reason not in self._told:
            self._told.add(reason)
            self._log.warning("maru.request_not_cached", reason=reason)
        return None
