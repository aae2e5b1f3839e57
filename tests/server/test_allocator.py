"""The allocator against a list of granules."""

from __future__ import annotations

from itertools import pairwise

import hypothesis.strategies as st
from hypothesis import given, settings

from maru_core.server.allocator import Allocator
from tests.budgets import examples


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 6), st.integers(1, 5), st.integers(0, 99)), max_size=40))
def test_granules_are_taken_once_and_join_when_they_return(steps):
    allocator = Allocator(40)
    taken: list[tuple[int, int]] = []
    for take, pages, count, pick in steps:
        if take:
            free_runs = allocator.runs()
            runs = allocator.take(pages, count)
            for start, pieces in runs:
                taken += [(start + piece * pages, pages) for piece in range(pieces)]
            wanted = pages * count
            fitting = [length for _, length in free_runs if length >= wanted]
            if fitting:
                assert len(runs) == 1, "a run that fits was not used"
                assert (runs[0][0], min(fitting)) in free_runs, "not the best fit"
            assert sum(pieces for _, pieces in runs) == min(count, sum(length // pages for _, length in free_runs))
        elif taken:
            start, length = taken.pop(pick % len(taken))
            begin, size = allocator.give(start, length)
            assert (begin, size) in allocator.runs()
            assert begin <= start < start + length <= begin + size
        used = [granule for start, length in taken for granule in range(start, start + length)]
        free = [granule for start, length in allocator.runs() for granule in range(start, start + length)]
        assert sorted(used + free) == list(range(40))
        assert allocator.free == len(free)
        runs = allocator.runs()
        assert all(a + length < b for (a, length), (b, _) in pairwise(runs)), "runs not joined"
        for start, length in runs:
            assert allocator.run_at(start) == allocator.run_at(start + length - 1) == length
