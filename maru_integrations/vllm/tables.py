"""Block tables of live requests, as vLLM's steps change them, and who loses its blocks. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from attrs import define, field

from maru_integrations.vllm import compat
from maru_integrations.vllm.loading import Loads
from maru_integrations.vllm.preemptions import Preemptions
from maru_integrations.vllm.promises import Promises
from maru_integrations.vllm.quarantine import Quarantine
from maru_integrations.vllm.requests import RequestState
from maru_integrations.vllm.storing import Stores

#: A request of a step, how many of its tokens were computed before, and how many this step computes for certain.
Scheduled: TypeAlias = tuple[RequestState, int, int]


@define(eq=False)
class Tables:
    """Follows each step that is about to run. ``states``: all live requests.

    Invariant: a request that loses its blocks is stopped from reading and writing them, and starts over.
    """

    states: Mapping[str, RequestState]
    preemptions: Preemptions
    loads: Loads
    stores: Stores
    promises: Promises
    quarantine: Quarantine
    _preempted: list[str] = field(factory=list, init=False)

    def follow(self, output: Any) -> tuple[list[Scheduled], bool]:
        """Take over what the step does to block tables.

        Who is scheduled; and whether another connector, beside this one, loads what this step reads: that may fail,
        which is told after the step.
        """
        preempted = self.preemptions.take(output, self.states)
        if preempted:
            self._take_away(preempted)
        planned, elsewhere = self.loads.step_planned(), False
        scheduled: list[Scheduled] = []
        for new in output.scheduled_new_reqs:
            state = self.states.get(new.req_id)
            if state is not None:
                state.blocks = compat.group_block_ids(new.block_ids)[0]
                scheduled.append((state, new.num_computed_tokens, _certain(output, new.req_id)))
                elsewhere = elsewhere or new.num_computed_tokens > state.expected
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            state = self.states.get(request_id)
            if state is None:
                continue
            fresh = cached.new_block_ids[index]
            if fresh is not None:
                ids, resumed = compat.group_block_ids(fresh)[0], compat.resumed(cached, index)
                state.blocks = ids if resumed else state.blocks + ids
                elsewhere = elsewhere or (resumed and cached.num_computed_tokens[index] > state.expected)
            scheduled.append((state, cached.num_computed_tokens[index], _certain(output, request_id)))
        bad = self.quarantine.bad
        if bad.written:
            for state, computed, count in scheduled:
                bad.overwrite(state.blocks, computed, computed + count)
        if self.quarantine.has_outdated:
            parked = [(self.states[load.request_id], load.first) for load in planned if load.request_id in self.states]
            self.quarantine.outdate_sharers([*parked, *((state, computed) for state, computed, _ in scheduled)])
        return scheduled, elsewhere and compat.loads_within(output)

    def take_preempted(self) -> list[str]:
        """Requests that lose blocks in this step which stores may read or loads write to."""
        preempted, self._preempted = self._preempted, []
        return preempted

    def _take_away(self, preempted: Sequence[str]) -> None:
        """These requests have lost their blocks. One of them may have been given new ones in the same step."""
        stopped = [*self.stores.detach(preempted), *self.loads.disown(preempted)]
        self._preempted += dict.fromkeys(stopped)  # each once
        for request_id in preempted:
            state = self.states.get(request_id)
            if state is not None:
                self.quarantine.blocks_lost(state)
                if self.loads.of(request_id) is not None:
                    known = state.known
                    state.start_over()
                    state.known = known
                    continue
            self.promises.withdraw(request_id, state)
            if state is not None:
                state.start_over()


def _certain(output: Any, request_id: str) -> int:
    return int(output.num_scheduled_tokens.get(request_id, 0)) - compat.draft_tokens(output, request_id)
