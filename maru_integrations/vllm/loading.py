"""Loads that workers were told to do and have not answered. No I/O."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import define, field

from maru_core.client import Lease


@define(eq=False)
class Outstanding:
    """One load: the lease that covers it, and where it goes.

    Objects are those of chunks ``[chunk, end_chunk)``; the lease starts at ``lease_chunk``. Tokens ``[first, last)``
    are loaded into a request with block table ``blocks``, which may run before the load has ended if ``overlap``.
    ``disowned``: the request has lost those blocks, so its answer concerns nobody.
    """

    lease: Lease
    request_id: str
    lease_chunk: int
    chunk: int
    end_chunk: int
    first: int
    last: int
    blocks: list[int]
    overlap: bool = False
    disowned: bool = False


@define
class Loads:
    """Every load from its plan to its one answer, and the blocks of requests that went meanwhile.

    Invariant: what a request computed on a load is known until that load and all that began before have been answered.
    """

    _ids: int = field(default=0, init=False)
    #: Number of the newest load when the last step was planned.
    _planned: int = field(default=0, init=False)
    _outstanding: dict[int, Outstanding] = field(factory=dict, init=False)
    #: Number of the newest load when a request went, and its block table.
    _departed: list[tuple[int, list[int]]] = field(factory=list, init=False)
    _cancelled: list[int] = field(factory=list, init=False)

    def number(self) -> int:
        """A new load's id."""
        self._ids += 1
        return self._ids

    def begin(self, load_id: int, load: Outstanding) -> None:
        """The load goes to the workers."""
        self._outstanding[load_id] = load

    def end(self, load_id: int) -> Outstanding | None:
        """The load was answered; ``None`` when it is not known."""
        return self._outstanding.pop(load_id, None)

    def of(self, request_id: str) -> Outstanding | None:
        """The load of a request that has no answer yet. A request has one at most."""
        for load in self._outstanding.values():
            if load.request_id == request_id and not load.disowned:
                return load
        return None

    def disown(self, request_ids: Iterable[str]) -> list[str]:
        """These have lost their blocks; those of them with a load into those that has to be stopped.

        A load that was planned since the last step goes to blocks that they were given after that.
        """
        chosen = set(request_ids)
        stopped = []
        for load_id, load in self._outstanding.items():
            if load.request_id in chosen and not load.disowned and load_id <= self._planned:
                load.disowned = True
                self._cancelled.append(load_id)
                stopped.append(load.request_id)
        return stopped

    def step_planned(self) -> list[Outstanding]:
        """All loads so far go to the workers with this step; those that are new, in their order."""
        before, self._planned = self._planned, self._ids
        if before == self._ids:
            return []
        return [load for load_id, load in self._outstanding.items() if load_id > before]

    def depart(self, request_id: str, blocks: list[int]) -> None:
        """The request is gone: nobody waits for its load, which still has to be answered."""
        for load_id, load in self._outstanding.items():
            if load.request_id == request_id and not load.disowned:
                self._cancelled.append(load_id)
        if self._outstanding:
            self.remember(blocks)

    def remember(self, blocks: list[int]) -> None:
        """Nobody else knows any more which blocks come after one that may turn out to be bad in this step."""
        self._departed.append((self._ids, blocks))

    def take_cancelled(self) -> list[int]:
        """Loads to be stopped since this was last asked."""
        cancelled, self._cancelled = self._cancelled, []
        return [load_id for load_id in cancelled if load_id in self._outstanding]

    def departed(self) -> list[list[int]]:
        """Block tables of requests that went while a load was under way that may still turn out to be bad."""
        return [blocks for _, blocks in self._departed]

    def forget_departed(self) -> None:
        """Drop tables that no outstanding load can concern."""
        if not self._departed:
            return
        oldest = min(self._outstanding, default=self._ids + 1)
        self._departed = [item for item in self._departed if item[0] >= oldest]

    @property
    def tokens_ahead(self) -> int:
        """Tokens of all loads under way."""
        return sum(load.last - load.first for load in self._outstanding.values())

    @property
    def is_empty(self) -> bool:
        """Whether every load was answered, and nothing is remembered of requests that are gone."""
        return not self._outstanding and not self._departed

    def __len__(self) -> int:
        return len(self._outstanding)
