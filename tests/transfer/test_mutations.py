"""Plans that are wrong on purpose: each mistake is seen by what checks plans, and by what checks the bytes of engines.

A mistake changes what a plan says, not the text that computes it, so that it stays the same mistake when that changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import test_plan
import test_slices
from attrs import evolve
from cases import Case
from fake_device import FakeDriver, compiler
from paged_forms import Size
from test_torch_copy import check_load, check_store

from maru_core.geometry import ObjectLayout, PagedLayout
from maru_transfer import device_copy, host_copy, plan, slices
from maru_transfer.cuda_library import Job
from maru_transfer.device_copy import DeviceTransfer
from maru_transfer.host_copy import HostTransfer
from maru_transfer.kernel import Tuning
from maru_transfer.plan import Piece
from maru_transfer.slices import Slicer

#: Chunks of which a row of one layer is 256 bytes, which is the least slot; the second begins and ends within a block.
CASE = Case(Size(L=3, NB=10, BS=4, NH=2, HS=4), 16, [6, 2, 8, 5, 1, 4, 9, 3], [(0, 0, 16), (1, 18, 31)])
LAYERWISE = evolve(CASE, parts=CASE.parts * 2, layers=[0, 2, 2, 1])
FORM = "planes-first NHD"
LAYERS = CASE.size.L


def off_by_one(_: int, piece: Piece, pieces: Sequence[Piece]) -> Piece:
    return evolve(piece, block=(piece.block + 1) % CASE.size.NB)


def without_slot(_: int, piece: Piece, pieces: Sequence[Piece]) -> Piece:
    return evolve(piece, slot=0)


def index_for_start(index: int, piece: Piece, pieces: Sequence[Piece]) -> Piece:
    return evolve(piece, token=index)


def from_the_part(_: int, piece: Piece, pieces: Sequence[Piece]) -> Piece:
    return evolve(piece, token=piece.token - pieces[0].token)


def of_the_next_layer(_: int, piece: Piece, pieces: Sequence[Piece]) -> Piece:
    return piece if piece.layer is None else evolve(piece, layer=(piece.layer + 1) % LAYERS)


PIECES: dict[str, tuple[Callable[[int, Piece, Sequence[Piece]], Piece], Case]] = {
    "a block off by one": (off_by_one, CASE),
    "the slot forgotten": (without_slot, CASE),
    "the run's index for the chunk's start": (index_for_start, CASE),
    "tokens counted from the part's first": (from_the_part, CASE),
    "a layer off by one": (of_the_next_layer, LAYERWISE),
}


def wrong_pieces(mistake: Callable[[int, Piece, Sequence[Piece]], Piece]) -> Callable[..., list[Piece]]:
    def plan_pieces(paged: PagedLayout, stored: ObjectLayout, block_ids: Any, copies: Any, **how: Any) -> list[Piece]:
        found = []
        for number in range(len(copies)):
            pieces = [p for p in plan.plan_pieces(paged, stored, block_ids, copies, **how) if p.copy == number]
            found += [mistake(index, piece, pieces) for index, piece in enumerate(pieces)]
        return found

    return plan_pieces


def replay(case: Case) -> None:
    """What test_plan does with a case of Hypothesis."""
    for test in (
        test_plan.test_replaying_a_plan_stores_what_the_naive_reader_reads,
        test_plan.test_replaying_a_plan_loads_exactly_the_slots_that_were_asked_for,
    ):
        test.hypothesis.inner_test(case=case, name=FORM)


ENGINES = {"host": HostTransfer, "device": DeviceTransfer}


@pytest.mark.parametrize("mistake", PIECES)
def test_wrong_pieces_are_seen(monkeypatch: pytest.MonkeyPatch, mistake: str) -> None:
    change, case = PIECES[mistake]
    for module in (test_plan, host_copy, device_copy):
        monkeypatch.setattr(module, "plan_pieces", wrong_pieces(change))
    with pytest.raises(AssertionError):
        replay(case)
    for engine in ENGINES.values():
        for check in (check_store, check_load):
            with pytest.raises(AssertionError):
                check(engine, FORM, case)


def rows_by(step: int) -> Callable[[Any, Job], Job]:
    """The pages' rows move on by so many, those of the objects stay: layers within a plane, or whole planes."""

    def change(segments: Any, job: Job) -> Job:
        if (segments["rows"] > 1).any():
            raise RuntimeError("rows that follow each other cannot each move on; make the slots smaller")
        segments["row"] = (segments["row"] + step) % (2 * LAYERS)
        return job

    return change


def index_for_the_start(segments: Any, job: Job) -> Job:
    segments["token"] = np.arange(len(segments))
    return job


def next_blocks(segments: Any, job: Job) -> Job:
    return evolve(job, blocks=np.roll(job.blocks, 1))


def objects_apart(segments: Any, job: Job) -> Job:
    """The object's rows move on, the pages' stay."""
    segments["host"][:-1] = segments["host"][1:]
    return job


JOBS: dict[str, Callable[[Any, Job], Job]] = {
    "a layer off by one": rows_by(1),
    "planes swapped": rows_by(LAYERS),
    "the slice's index for the chunk's start": index_for_the_start,
    "the next place's block": next_blocks,
    "the next slice's place in the object": objects_apart,
}


def wrong_slicer(mistake: Callable[[Any, Job], Job]) -> Callable[..., Any]:
    class Wrong(Slicer):
        def job(self, *arguments: Any, **how: Any) -> Job:
            job = super().job(*arguments, **how)
            return mistake(job.segments, job)

    return Wrong


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> FakeDriver:
    if compiler() is None:
        pytest.skip("needs a C compiler")
    return FakeDriver.build(tmp_path_factory.mktemp("mutations"))


def cut(case: Case = CASE) -> None:
    """What test_slices does with a case of Hypothesis, in slots for one row of a whole chunk."""
    test = test_slices.test_segments_cover_every_byte_once_and_slices_stay_within_limits
    test.hypothesis.inner_test(name=FORM, case=case, slot=256, way="staged")


def opener(driver: FakeDriver, seed: int) -> Callable[..., Any]:
    tuning = Tuning(slot_bytes=256, slots=2, window=2, burst=1, grid=1, direct_bytes=1 << 40, mapped_bytes=0)

    def open_(layers: Any, paged: Any, stored: Any) -> Any:
        driver.hooks.fake_reset(seed)
        return driver.transfer(layers, paged, stored, tuning)

    return open_


@pytest.mark.slow
@pytest.mark.parametrize("mistake", JOBS)
def test_wrong_slices_are_seen(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver, mistake: str) -> None:
    for module in (test_slices, slices):
        monkeypatch.setattr(module, "Slicer", wrong_slicer(JOBS[mistake]))
    with pytest.raises(AssertionError):
        cut()
    for check in (check_store, check_load):
        with pytest.raises(AssertionError):
            check(opener(driver, 1), FORM, CASE)


def test_what_is_right_passes(driver: FakeDriver) -> None:
    """The checks themselves are not at fault."""
    for case in (CASE, LAYERWISE):
        replay(case)
        for open_ in ENGINES.values():
            check_store(open_, FORM, case)
            check_load(open_, FORM, case)
    cut()
    check_store(opener(driver, 1), FORM, CASE)
    check_load(opener(driver, 1), FORM, CASE)
