"""The loader with an engine that loads by layer, on the fake driver: requests go on early, and every byte is right."""

from __future__ import annotations

import time
from contextlib import closing, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from cases import Case
from fake_device import FakeDriver, aligned, compiler, registered
from paged_forms import Size
from structlog.testing import capture_logs
from test_held import Pools
from test_kernel import TIGHT
from test_torch_copy import layers_of

from maru_core.contracts import LoadsByLayer
from maru_integrations.vllm.answers import Answers
from maru_integrations.vllm.copies import ChunkShape
from maru_integrations.vllm.loader import Loader
from maru_integrations.vllm.metadata import LoadOp, LoadResult
from maru_integrations.vllm.moving import Link
from maru_integrations.vllm.releasing import LoaderSettings
from maru_integrations.vllm.streams import HostLane
from maru_transfer.held import held
from maru_transfer.layerwise import LayerwiseTransfer

CHUNKS = 6
CASE = Case(
    Size(L=3, NB=2 * CHUNKS, BS=4, NH=2, HS=4),
    8,
    list(range(2 * CHUNKS))[::-1],
    [(n, 8 * n, 8 * n + 8) for n in range(CHUNKS)],
)


@pytest.mark.skipif(compiler() is None, reason="needs a C compiler")
@pytest.mark.parametrize("damaged", [None, 4])
def test_a_request_is_released_early_by_the_engine_that_open_link_hands_out(tmp_path, damaged: int | None) -> None:
    """With a damaged object nobody is, and what comes before it is loaded as a whole."""
    driver = FakeDriver.build(tmp_path)
    target, source = CASE.engine("planes-first NHD", None), CASE.engine("planes-first NHD", 3)
    stored = CASE.stored(target)
    buffers = []
    for array in CASE.objects(source):
        buffers.append(registered(driver, aligned(array.nbytes)))
        buffers[-1][:] = array.tobytes()
    sound = [number != damaged for number in range(CHUNKS)]
    located = SimpleNamespace(
        views=lambda: buffers,
        reading=nullcontext,
        check=lambda indices: [sound[index] for index in indices],
        verify=lambda: [True] * CHUNKS,
    )
    handler: Any = SimpleNamespace(adopt=lambda *columns: located)
    pools: Any = Pools()
    pools.close = lambda: None
    transfer = held(driver.transfer(layers_of(target), target.paged, stored, TIGHT, LayerwiseTransfer), pools)
    assert isinstance(transfer, LoadsByLayer)
    answers = Answers()
    loader = Loader(
        lambda: Link(handler, transfer, stored),
        ChunkShape(4, 8, stored.nbytes),
        answers,
        HostLane(),
        LoaderSettings(release_after=1, num_layers=3, log_timing=True),
        pytest.fail,
    )
    columns: dict[str, Any] = dict.fromkeys(("entries", "generations", "lengths", "keys"), range(CHUNKS))
    op = LoadOp(
        load_id=1,
        request_id="r",
        parked=True,
        epoch=1,
        chunk=0,
        first=0,
        last=8 * CHUNKS,
        blocks=CASE.block_ids,
        overlap=True,
        **columns,
    )
    received: list[str] = []
    results: list[LoadResult] = []
    with closing(transfer), closing(loader), capture_logs() as logs:
        loader.submit([op])
        deadline = time.monotonic() + 10
        while not results:
            assert time.monotonic() < deadline
            received += answers.take_finished()[1]
            failed = answers.take_failed_blocks()
            message = answers.take_metadata()
            results += message.loads if message else []
        early = [entry["early"] for entry in logs if entry["event"] == "maru.load"]
        assert received == ["r"]
        assert not pools.users
        good = CHUNKS if damaged is None else damaged
        assert results == [LoadResult(1, good)]
        assert early == ([True] if damaged is None else [])
        assert failed == set(CASE.block_ids[2 * good :])
        for chunk in range(good):
            for engine in (target, source):
                seen = engine.naive_object(CASE.block_ids, chunk, 8 * chunk, 8 * chunk + 8, 8)
                np.testing.assert_array_equal(seen.tobytes(), bytes(buffers[chunk]))
