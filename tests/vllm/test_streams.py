"""Copies on a lane: what comes before and after them, whatever fails."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from maru_integrations.vllm.streams import HostLane, on_lane


class NotingLane(HostLane):
    """Notes what is asked of it; ``fails``: what raises."""

    def __init__(self, fails: str = "") -> None:
        self.noted: list[str] = []
        self.fails = fails

    def note(self, what: str) -> bool:
        self.noted.append(what)
        if what == self.fails:
            raise RuntimeError("injected")
        return True

    def after(self, fence: Any) -> None:
        assert fence == "fence"
        self.note("after")

    def drain(self) -> None:
        self.note("drain")


def copy_on(lane: NotingLane) -> None:
    with on_lane(lane, "fence", lambda: lane.note("begin"), lambda: [lane.note("end"), None][1]) as allowed:
        assert allowed
        lane.note("copy")


def test_a_copy_comes_after_its_fence_and_has_run_before_it_counts_as_over() -> None:
    lane = NotingLane()
    copy_on(lane)
    assert lane.noted == ["begin", "after", "copy", "drain", "end"]


@pytest.mark.parametrize("fails", ["after", "copy", "drain"])
def test_whatever_fails_what_was_queued_has_run_before_it_counts_as_over(fails: str) -> None:
    lane = NotingLane(fails)
    with pytest.raises(RuntimeError, match="injected"):
        copy_on(lane)
    assert lane.noted[-2:] == ["drain", "end"]


def test_a_copy_that_may_not_be_made_touches_nothing() -> None:
    lane = NotingLane()
    with on_lane(lane, "fence", lambda: False, lambda: pytest.fail("nothing was begun")) as allowed:
        assert not allowed
    assert not lane.noted
