"""Which requests have lost their blocks since the last step. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import define, field

from maru_integrations.vllm import compat
from maru_integrations.vllm.requests import RequestState


@define
class Preemptions:
    """Those that vLLM names in a step, and those that it took the blocks from between two steps and does not name.

    The latter are found by how often each request has been preempted so far, with versions that do not name them all.
    """

    names_all: bool
    #: As of the last step, by request.
    _counts: dict[str, int] = field(factory=dict, init=False)
    #: Requests that have lost their blocks and ended since.
    _ended: list[str] = field(factory=list, init=False)

    def ended(self, request: Any) -> None:
        """The request is gone; a store of it may still be under way."""
        request_id = str(request.request_id)
        # Another of this name may come before the next step: it counts from nothing.
        before = self._counts.pop(request_id, 0)
        if not self.names_all and compat.times_preempted(request) > before:
            self._ended.append(request_id)

    def take(self, output: Any, states: Mapping[str, RequestState]) -> Sequence[str]:
        """For the scheduler output of a step that is about to run, each request once; ``states`` are all live ones."""
        named = compat.preempted(output)
        if self.names_all:
            return named
        before = self._counts
        self._counts = {request_id: compat.times_preempted(state.request) for request_id, state in states.items()}
        lost = [request_id for request_id, count in self._counts.items() if count > before.get(request_id, 0)]
        ended, self._ended = self._ended, []
        return tuple(dict.fromkeys([*named, *ended, *lost]))
