"""Who has lost its blocks since the last step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from maru_integrations.vllm.preemptions import Preemptions

NAMES = st.sampled_from("abcd")


class Lives(RuleBasedStateMachine):
    """Requests that come, end, and are preempted in a step, which names them, or between two, which names nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.preemptions = Preemptions(names_all=False)
        self.states: dict[str, Any] = {}
        self.named: set[str] = set()
        self.lost: set[str] = set()

    @rule(name=NAMES)
    def come(self, name: str) -> None:
        if name not in self.states and name not in self.lost:
            self.states[name] = SimpleNamespace(request=SimpleNamespace(request_id=name, num_preemptions=0))

    @rule(name=NAMES, named=st.booleans())
    def lose_blocks(self, name: str, named: bool) -> None:
        if name in self.states:
            self.states[name].request.num_preemptions += 1
            self.lost.add(name)
            self.named |= {name} if named else set()

    @rule(name=NAMES)
    def end(self, name: str) -> None:
        if name in self.states:
            self.preemptions.ended(self.states.pop(name).request)

    @rule()
    def step(self) -> None:
        found = self.preemptions.take(SimpleNamespace(preempted_req_ids=self.named), self.states)
        assert sorted(found) == sorted(self.lost), "all of them, each once"
        self.named, self.lost = set(), set()

    @invariant()
    def nothing_is_kept_of_who_is_gone(self) -> None:
        assert len(self.preemptions._ended) <= len(self.lost)


TestLives = Lives.TestCase


def test_a_request_of_the_name_of_one_that_ended_in_the_same_step_counts_from_nothing() -> None:
    preemptions = Preemptions(names_all=False)
    nobody = SimpleNamespace(preempted_req_ids=set())
    first, second = (SimpleNamespace(request=SimpleNamespace(request_id="b", num_preemptions=1)) for _ in range(2))
    assert preemptions.take(nobody, {"b": first}) == ("b",)  # type: ignore[dict-item]
    preemptions.ended(first.request)
    assert preemptions.take(nobody, {"b": second}) == ("b",)  # type: ignore[dict-item]


def test_a_version_that_names_them_all_is_believed() -> None:
    request = SimpleNamespace(request_id="a", num_preemptions=3)
    preemptions = Preemptions(names_all=True)
    preemptions.ended(request)
    assert preemptions.take(SimpleNamespace(preempted_req_ids={"b"}), {"a": SimpleNamespace(request=request)}) == ("b",)  # type: ignore[dict-item]
