"""Native code that is wrong on purpose: each mistake makes at least one of the engines' tests fail."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import layered_scene as scene
import numpy as np
import pytest
import test_kernel as kernel
import test_layerwise as layerwise
from attrs import evolve
from cases import Case
from fake_device import FakeDriver, compiler
from layered_checks import FORMATS, check_layered_load
from test_torch_copy import check_load, check_store, layers_of

from maru_core.errors import TransferError

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C compiler")

#: What is changed where, and what that breaks: of both engines, and of loads by layer.
KERNEL = {
    "a layer off by one": (
        "place.h",
        "layer = which - plane * p->layers.divisor;",
        "layer = (which + 1 - plane * p->layers.divisor) % p->layers.divisor;",
    ),
    "planes swapped": ("place.h", "&p->plane[plane]", "&p->plane[1 - plane]"),
    "the chunk's start for the run's": ("place.h", "blocks[s->block + place]", "blocks[place]"),
    "slots not counted from the first token": ("place.h", "(s->slot + token, p->block_size)", "(token, p->block_size)"),
    "a direct copy of the wrong layer": (
        "cuda_copies.c",
        "layer = which % g->layers;",
        "layer = (which + 1) % g->layers;",
    ),
    "a run of blocks that do not follow": ("cuda_copies.c", "== job->blocks[place] + 1)", "> job->blocks[place])"),
    "no wait for the caller's stream": (
        "cuda_lanes.c",
        "if (pages->submitted < pages->slots) DO(pages, StreamWaitEvent, pages->lane[slot], began, 0);",
        "(void)slot, (void)began;",
    ),
    "the caller does not wait": (
        "cuda_jobs.c",
        "STEP(maru_await_pages(pages, caller, pages->submitted - 1 - k));",
        "(void)caller;",
    ),
    "nobody waits for what is loaded": (
        "cuda_jobs.c",
        "pages->finished = brake != NULL || job->direction == MARU_STORE;",
        "pages->finished = 1;",
    ),
    "an end before the other lanes'": ("cuda_jobs.c", "n < pages->slots && until", "n < 1 && until"),
    "an end before a slice that none has given way to": (
        "cuda_jobs.c",
        "n + 1 == pages->slots && pages->gave_way[(until - 1) % MARU_MOST_WINDOW]",
        "n + 1 == pages->slots",
    ),
    "a slice that waits for none in another lane": (
        "cuda_lanes.c",
        "DO(pages, StreamWaitEvent, pages->lane[slot], pages->crossed[before], 0);",
        "(void)slot;",
    ),
    "a copy that does not give way to another": ("cuda_lanes.c", "if (pages->way[turn] == MARU_MAPPED &&", "if (1 ||"),
    "a copy that does not give way to a kernel": ("cuda_lanes.c", "if (pages->way[turn] == MARU_MAPPED &&", "if ("),
    "a kernel that does not give way to a copy": ("cuda_lanes.c", "&& pages->way[before] == MARU_MAPPED)", ")"),
    "a kernel that gives way to another": ("cuda_lanes.c", "&& pages->way[before] == MARU_MAPPED)", "&& 0)"),
    "a bounce buffer that is used too early": (
        "cuda_jobs.c",
        "if (job->segments[i].way == MARU_BOUNCED) STEP(retire(pages, pages->slots - 1));",
        "",
    ),
    "copies across registrations": ("cuda_copies.c", "if (stop > end) stop = end;", "stop = end;"),
    "a kernel that takes the slot for the object": (
        "cuda_launch.c",
        "if (way == MARU_MAPPED)",
        "if (way == MARU_MAPPED && s->way == way)",
    ),
    "objects that may be reused before a kernel has read them": (
        "cuda_lanes.c",
        """  if (way == MARU_MAPPED) STEP(maru_place_slice(pages, slot, first, last, way));
  STEP(cross(pages, slot));
""",
        """  STEP(cross(pages, slot));
  if (way == MARU_MAPPED) STEP(maru_place_slice(pages, slot, first, last, way));
""",
    ),
    "pages that are written straight before they may": (
        "cuda_lanes.c",
        "if (!staged) STEP(open_pages(pages, slot));",
        "",
    ),
}
LAYERWISE = {
    "an end before the pages are written": (
        "cuda_jobs.c",
        "if (!status && pages->followed) status = arrive(pages);",
        "(void)arrive;",
    ),
    "a layer's event before its last slice": (
        "cuda_jobs.c",
        "STEP(maru_complete_layers(pages, slot, job->segments[i].layers));",
        "STEP(maru_complete_layers(pages, slot, job->segments[i].layers"
        " + (job->segments[i].layers < pages->layers->count)));",
    ),
    "a wait for the layer before": (
        "cuda_layers.c",
        "layers->arrived[layer], 0);\n  maru_leave",
        "layers->arrived[layer - !!layer], 0);\n  maru_leave",
    ),
    "no wait for slices in other lanes": (
        "cuda_lanes.c",
        "STEP(maru_await_pages(pages, pages->lane[slot], slice));",
        "(void)slot;",
    ),
    "no order after the caller's stream": (
        "cuda_layers.c",
        "TRY(EventRecord, layers->began, stream);",
        "(void)driver, (void)stream;",
    ),
    "the event before the placement": (
        "cuda_lanes.c",
        "pages->layers ? comes_before_a_layer(pages, next) : last",
        "pages->layers ? comes_before_a_layer(pages, next) && 0 : last",
    ),
    "an event only for the slice before": (
        "cuda_lanes.c",
        "++ahead >= pages->slots) return 0;",
        "++ahead >= 2) return 0;",
    ),
    "an event that looks at its own slice only": (
        "cuda_lanes.c",
        "++ahead >= pages->slots) return 0;",
        "++ahead) return 0;",
    ),
    "layers done that are only submitted": (
        "cuda_layers.c",
        "if (result == CU_ERROR_NOT_READY_) break;",
        "result = 0;",
    ),
    "the next row for the next plane": ("place.h", "s->row + row * s->step", "s->row + row"),
    "the next row of the object": (
        "cuda_copies.c",
        "take_rows(job, s->host, s->pitch,",
        "take_rows(job, s->host, packed,",
    ),
    "a folded copy across registrations": (
        "cuda_batch.c",
        "|| host_of(batch, more) >= run->end) return 0;",
        ") return 0;",
    ),
    "a lane that waits for no slice that is moved straight": (
        "cuda_lanes.c",
        "if (k + 1 == pages->slots && pages->gave_way[last] && maru",
        "(void)last;\n    if (maru",
    ),
    "a layer's event before a slice that none has given way to": (
        "cuda_lanes.c",
        "pages->gave_way[last] && maru",
        "pages->gave_way[last] < 2 && maru",
    ),
    "the end of a placement that there was not": (
        "cuda_lanes.c",
        "pages->crossed[slice % MARU_MOST_WINDOW]\n",
        "pages->placed[maru_slot_of(pages, slice)]\n",
    ),
    "copies of a slice that a kernel has moved": ("cuda_lanes.c", "  pages->batch.whole = 0;\n", ""),
    "an event that two will use": ("cuda_layers.c", "layers->arrived[k] != last)", "layers->arrived[k] != NULL)"),
    "one pitch for both sides": (
        "cuda_batch.c",
        "copy.target_pitch = run->target_pitch;",
        "copy.target_pitch = run->source_pitch;",
    ),
    "rows at a distance that is not theirs": ("cuda_batch.c", "if (before && (target", "if (before > 1 && (target"),
    "a row that is lost between two runs": ("cuda_batch.c", "source, more->rows++;", "source;"),
    "a row that is made longer and not moved": ("cuda_batch.c", "more->source -= run->bytes, ", ""),
    "a longer row that is made of two registrations": (
        "cuda_batch.c",
        "host_of(batch, more) < run->end;",
        "(host_of(batch, more) || 1);",
    ),
}


@pytest.fixture(autouse=True)
def _slices_of_one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the tests of loads by layer."""
    monkeypatch.setattr("maru_transfer.flow.LEAST_SLICE", 1)


def check_kernel(driver: FakeDriver, seeds: int = 20) -> None:
    case = Case(evolve(kernel.SIZE, BS=3), 8, [1, 3, 2, 5, 6, 7, 4, 8], [(1, 9, 15), (0, 0, 8), (2, 16, 23)])
    for lanes in (2, 3):
        kernel.check_crossing(driver, lanes, seeds)
    for seed in range(seeds):
        for way in kernel.WAYS:
            check_store(kernel.opener(driver, way, seed), "planes-first NHD", kernel.CASE, kernel.wrap(way))
            check_load(kernel.opener(driver, way, seed), "planes-first NHD", kernel.CASE, kernel.wrap(way))
            check_store(kernel.opener(driver, way, seed), "packed per head", case, kernel.wrap(way))
            for test in (
                kernel.test_a_store_is_ordered_after_what_is_on_the_callers_stream,
                kernel.test_a_load_is_ordered_between_what_was_on_the_stream_and_what_comes,
            ):
                test.hypothesis.inner_test(driver, way, seed)


CHECKED = (
    "staged, all at once",
    "staged in batches",
    "folded across registrations",
    "scattered in part",
    "scattered, two lanes",
)


def check_layerwise(driver: FakeDriver, seeds: int = 40) -> None:
    for form, gap in product(FORMATS, (False, True)):
        layerwise.check_folding(driver, form, gap=gap)
    for form in FORMATS:
        layerwise.test_layers_of_one_slice_share_an_event_and_loads_use_events_again(driver, form)
    for seed, form in product(range(seeds), FORMATS):
        layerwise.check_places(driver, form, seed)
        for way in CHECKED:
            for name in ("planes-first NHD", "packed per head"):
                driver.hooks.fake_reset(seed)
                tuning, pieces = scene.WAYS[way]
                case = scene.EVEN if tuning.scattered else scene.CASE
                open_, wrap = scene.opener(driver, way), scene.wrap(driver, pieces)
                check_layered_load(open_, layers_of, wrap, name, case, form, seed)
            order = list(np.random.default_rng(seed).permutation(scene.SIZE.L))
            layerwise.test_who_waits_for_a_layer_reads_it_and_nobody_waits_for_more.hypothesis.inner_test(
                driver, way, form, seed, order
            )
        layerwise.test_pages_are_written_after_what_the_callers_stream_had_to_do_with_them.hypothesis.inner_test(
            driver, form, seed
        )
        layerwise.test_layers_that_count_as_done_are_there.hypothesis.inner_test(driver, form, seed)


Check = Callable[..., None]
MISTAKES = [
    pytest.param(check, mistake, id=f"{engine}: {name}")
    for engine, check, table in (("kernel", check_kernel, KERNEL), ("layerwise", check_layerwise, LAYERWISE))
    for name, mistake in table.items()
]


@pytest.mark.slow
@pytest.mark.parametrize(("check", "mistake"), MISTAKES)
def test_a_mistake_in_the_native_code_is_caught(tmp_path: Path, check: Check, mistake: tuple[str, str, str]) -> None:
    driver = FakeDriver.with_mistake(tmp_path, *mistake)
    with pytest.raises((AssertionError, TransferError)):
        check(driver)


@pytest.mark.parametrize("check", [check_kernel, check_layerwise])
def test_what_catches_mistakes_finds_none_in_the_code_as_it_is(tmp_path: Path, check: Check) -> None:
    check(FakeDriver.build(tmp_path), seeds=5)
