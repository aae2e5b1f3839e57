"""Whether the objects of a load are sound, found out by other threads while they are copied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Final

from attrs import frozen

from maru_core.processors import spare
from maru_transfer.helpers import share

#: Threads that read what is compared: some 6 GB/s each. That is a sixteenth of a load on average, of some loads twice
#: that, and its request should not wait for it longer than for the bus.
_MOST: Final = 4
#: Parts that each thread gets on average: which objects are read is anybody's guess, so equal parts are not.
_PARTS: Final = 4


def threads() -> int:
    """Of one loader."""
    return spare(_MOST)


@frozen(eq=False)
class Checking:
    """What is being found out, part by part in the order of the objects."""

    _parts: tuple[Future[list[bool]], ...]

    @classmethod
    def begin(cls, pool: ThreadPoolExecutor, check: Callable[[Sequence[int]], list[bool]], count: int) -> Checking:
        """``check(indices)`` says of each of ``count`` objects whether it is sound; threads of the pool call it."""
        workers = threads()
        step = max(1, -(-count // (1 if workers == 1 else workers * _PARTS)))
        ranges = (range(first, min(first + step, count)) for first in range(0, count, step))
        return cls(tuple(share(pool, partial(check, part)) for part in ranges))

    def done(self) -> bool:
        """Whether all is known."""
        return all(part.done() for part in self._parts)

    def result(self) -> list[bool]:
        """Of each object, whether it is sound. Waits until that is known; raises what finding out raised."""
        return [sound for part in self._parts for sound in part.result()]
