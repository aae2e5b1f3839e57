"""On a GPU: what a thread copies on its own stream comes after vLLM's, and is there when it says so."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from maru_integrations.vllm.streams import DeviceLane, lane_for

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

#: About half a second on any device of today, so that a thread starts meanwhile, also where other processes compute.
LONG = 1_000_000_000


def on_a_thread(work: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("fenced", [True, False])
def test_a_copy_comes_after_what_was_queued_before_the_fence(fenced: bool) -> None:
    """Without the fence it reads what was there before: so the test sees the difference."""
    device = torch.device("cuda", torch.cuda.current_device())
    lane = lane_for(device)
    assert isinstance(lane, DeviceLane)
    pages = torch.zeros(1 << 20, device=device)
    found: list[Any] = []
    torch.cuda.synchronize()
    # The first use of a kernel loads it, which waits for everything.
    torch.cuda._sleep(1)
    pages.fill_(1)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    pages.fill_(2)
    fence = lane.fence()

    def copy() -> None:
        with lane.entered():
            if fenced:
                lane.after(fence)
            seen = torch.empty_like(pages)
            seen.copy_(pages)
            lane.drain()
            found.append((float(seen.min()), float(seen.max())))

    on_a_thread(copy)
    torch.cuda.synchronize()
    assert found == [(2, 2) if fenced else (1, 1)]


def test_what_was_drained_is_seen_by_every_stream() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    lane = lane_for(device)
    pages = torch.zeros(1 << 20, device=device)
    torch.cuda.synchronize()

    def load() -> None:
        with lane.entered():
            torch.cuda._sleep(LONG)
            pages.fill_(3)
            lane.drain()

    on_a_thread(load)
    assert float(pages.sum()) == 3 * pages.numel()


def test_vllms_stream_is_left_alone() -> None:
    """Neither the thread's stream nor its device is the calling thread's afterwards."""
    device = torch.device("cuda", torch.cuda.current_device())
    before = torch.cuda.current_stream()
    lane = lane_for(device)
    inside: list[Any] = []

    def enter() -> None:
        with lane.entered():
            inside.append(torch.cuda.current_stream(device).cuda_stream)

    on_a_thread(enter)
    assert torch.cuda.current_stream() == before
    assert inside != [before.cuda_stream]
