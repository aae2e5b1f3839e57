"""What the workers made of their loads and stores: leases that end with them, and what is to be done again."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import define, field

from maru_core import logs
from maru_core.client import MaruHandler
from maru_integrations.vllm.loading import Loads
from maru_integrations.vllm.matching import Matcher
from maru_integrations.vllm.metadata import REFUSED, LoadResult, MaruWorkerMetadata
from maru_integrations.vllm.parking import Parking
from maru_integrations.vllm.requests import RequestState
from maru_integrations.vllm.resets import Resets
from maru_integrations.vllm.stats import MaruStats
from maru_integrations.vllm.storing import Stores
from maru_integrations.vllm.worth import Worth


@define(eq=False)
class Outcomes:
    """Takes the answers that come with a step's result. ``states``: all live requests; ``objects_per_chunk`` of a load.

    Invariants: the lease of a load ends with its answer; a request whose load failed is promised nothing again, and
    nobody the object that was at fault.
    """

    handler: MaruHandler
    objects_per_chunk: int
    states: Mapping[str, RequestState]
    matcher: Matcher
    parking: Parking
    loads: Loads
    stores: Stores
    resets: Resets
    worth: Worth | None
    stats: MaruStats
    _log: logs.Log = field(factory=lambda: logs.get_logger(__name__), init=False)

    def take(self, answers: MaruWorkerMetadata) -> None:
        """All that a step's workers have to say."""
        for result in answers.loads:
            self._load_ended(result)
        for request_id, chunk in answers.unsaved.items():
            self._plan_again(request_id, chunk)
        for stored in answers.stored:
            for request_id, chunk in self.stores.ended(stored):
                self._plan_again(request_id, chunk)
        if answers.load_bytes:
            self.stats.count("load_bytes", answers.load_bytes)
            if self.worth is not None:
                self.worth.link.measure(answers.load_bytes, answers.load_seconds)
        for reason, count in answers.dropped.items():
            self.stats.count("dropped", count, reason)
        if REFUSED in answers.dropped:
            self.resets.store_refused()

    def _plan_again(self, request_id: str, chunk: int) -> None:
        state = self.states.get(request_id)
        if state is not None:
            state.next_chunk = min(state.next_chunk, chunk)

    def _load_ended(self, result: LoadResult) -> None:
        done = self.loads.end(result.load_id)
        if done is None:
            return
        self.matcher.give_back(done.lease)
        if done.disowned:
            return
        self.parking.end_load(done.request_id)
        objects = self.objects_per_chunk
        if result.good >= (done.end_chunk - done.chunk) * objects:
            self.stats.count("loads")
            return
        self.stats.count("loads_failed", reason=result.reason)
        if not result.reason:
            index = (done.chunk - done.lease_chunk) * objects + result.good
            lease = done.lease
            self.matcher.remember_bad(lease.keys[index], lease.entries[index], lease.generations[index])
        good = result.good // objects  # a chunk counts with all of its objects only
        # Its share is kept until it has the blocks to run, also when vLLM takes its blocks back. It cannot be preempted
        # before, and vLLM 0.22.1 asks a more important one first, which would be parked on the blocks that this one
        # needs; later versions go on reserving all of its blocks, and let nobody else load into those. Whoever had got
        # its share meanwhile would wait for vLLM, and this one for the share.
        state = self.states.get(done.request_id)
        if state is None:
            self.loads.remember(done.blocks)
            return
        state.failed = True
        state.known = range(done.chunk, done.chunk + good)
        state.next_chunk = min(state.next_chunk, done.chunk + good)
        self._log.warning(
            "maru.load_failed", request=done.request_id, chunk=done.chunk + good, reason=result.reason or "bad object"
        )
