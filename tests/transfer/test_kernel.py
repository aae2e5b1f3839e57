"""The kernel engine against the naive reader, on a fake driver that runs everything as late as it may."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from attrs import evolve, frozen
from cases import Case, cases
from fake_device import FakeDriver, compiler, registered
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paged_forms import FORMS, Size
from test_torch_copy import check_load, check_store

from maru_transfer.kernel import KernelTransfer, Tuning

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C compiler")

SIZE = Size(L=3, NB=9, BS=4, NH=2, HS=4)
CASE = Case(SIZE, 8, [6, 2, 3, 5, 1, 4], [(0, 0, 8), (1, 8, 16), (2, 17, 23)])
#: So little that every request takes many slices, and slots are used again and again.
TIGHT = Tuning(slot_bytes=256, slots=3, window=3, burst=1, grid=3, direct_bytes=1 << 40, mapped_bytes=0)


@pytest.fixture(scope="module")
def driver(tmp_path_factory) -> FakeDriver:
    return FakeDriver.build(tmp_path_factory.mktemp("kernel"))


@frozen(eq=False)
class Registering:
    """A transfer of which every buffer is registered when it comes, in ``pieces``; 0: not at all."""

    driver: FakeDriver
    transfer: KernelTransfer
    pieces: int

    def load(self, block_ids, copies) -> None:
        self._register(copies)
        self.transfer.load(block_ids, copies)

    def store(self, block_ids, copies) -> None:
        self._register(copies)
        self.transfer.store(block_ids, copies)

    def close(self) -> None:
        self.transfer.close()

    def _register(self, copies) -> None:
        for copy in copies if self.pieces else ():
            registered(self.driver, copy.buffer, self.pieces)


#: (tuning, pieces in which buffers are registered)
WAYS: dict[str, tuple[Tuning, int]] = {
    "bounced": (TIGHT, 0),
    "staged": (TIGHT, 1),
    "staged across registrations": (TIGHT, 3),
    "direct": (evolve(TIGHT, direct_bytes=1), 1),
    "direct across registrations": (evolve(TIGHT, direct_bytes=1, window=2, burst=2), 2),
    "mapped": (evolve(TIGHT, mapped_bytes=1 << 40), 1),
    "one slice": (evolve(TIGHT, slot_bytes=1 << 20, slots=1, window=1), 1),
    "one by one": (evolve(TIGHT, one_by_one=True, window=2, burst=2), 2),
}


def opener(driver: FakeDriver, way: str, seed: int = 1) -> Callable[..., Any]:
    tuning, pieces = WAYS[way]

    def open_(layers, paged, stored) -> Registering:
        driver.hooks.fake_reset(seed)
        return Registering(driver, driver.transfer(layers, paged, stored, tuning), pieces)

    return open_


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases(), seed=st.integers(0, 1000))
def test_stored_objects_hold_what_the_naive_reader_reads(driver, way: str, name: str, case: Case, seed: int):
    check_store(opener(driver, way, seed), name, case)
    assert driver.counts()["misaligned"] == 0


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases(), seed=st.integers(0, 1000))
def test_loading_writes_exactly_the_slots_that_were_asked_for(driver, way: str, name: str, case: Case, seed: int):
    check_load(opener(driver, way, seed), name, case)
    assert driver.counts()["misaligned"] == 0
