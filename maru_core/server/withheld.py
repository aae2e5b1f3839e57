"""Pages behind a torn header: free as far as anybody can see, and yet nobody is sure.

A header is torn when the server was killed while it wrote it, and then nobody uses the pages. But memory that was
damaged looks the same, and the header may have been of an object that somebody still writes or reads. So the pages, up
to the next object, are given to nobody until all earlier sessions have said what they use; what one of them says that
lies in there stays with that session to its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from maru_core.server.arena import Arena

#: Pool, first entry, granules.
_Run = tuple[Arena, int, int]


class Withheld:
    """Counted as used."""

    def __init__(self) -> None:
        self._runs: list[_Run] = []
        self._claimed: dict[int, list[_Run]] = {}

    def __iter__(self) -> Iterator[_Run]:
        """All of them."""
        yield from self._runs
        for runs in self._claimed.values():
            yield from runs

    def add(self, arena: Arena, start: int, pages: int) -> None:
        """Withhold ``pages`` granules from entry ``start`` on, which the allocator does not have."""
        arena.used += pages
        self._runs.append((arena, start, pages))

    def claim(self, session: int, entries: Iterable[int]) -> None:
        """``session`` says that it uses these."""
        if not self._runs:
            return
        wanted = set(entries)
        for run in self._runs[:]:
            if not wanted.isdisjoint(range(run[1], run[1] + run[2])):
                self._runs.remove(run)
                self._claimed.setdefault(session, []).append(run)

    def end(self, session: int) -> None:
        """Give back what ``session`` had claimed."""
        self._give(self._claimed.pop(session, []))

    def give_unclaimed(self) -> None:
        """All have said what they use: the others are free."""
        runs, self._runs = self._runs, []
        self._give(runs)

    def _give(self, runs: Iterable[_Run]) -> None:
        for arena, start, pages in runs:
            arena.used -= pages
            arena.free.give(start - arena.base, pages)
