"""Copies bytes from pool to pool beside the loop, on a thread of its own.

The loop hands it moves and takes them back when they are over. It knows nothing of objects: the directory sees to it
that nobody else writes where it reads and writes.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Final

from maru_core import logs
from maru_core.contracts import Region
from maru_core.server.moves import Move

#: Bytes that are copied at a time. ``memmove`` lets other threads run, and a server that ends waits for one of these.
SLICE: Final = 1 << 20


class Mover:
    """``regions``: the pools, mapped, in the order of the directory's."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self._regions = list(regions)
        self._waiting: SimpleQueue[Move | None] = SimpleQueue()
        self._over: deque[tuple[Move, bool]] = deque()
        self._moving = 0
        self._ending = False
        self._told = False
        self._log = logs.get_logger(__name__)
        self._thread = threading.Thread(target=self._run, name="maru-mover", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether there are moves that :meth:`finished` has not returned yet."""
        return self._moving > 0

    def begin(self, move: Move) -> None:
        """Copy the bytes of ``move`` after those of all before it."""
        self._moving += 1
        self._waiting.put(move)

    def finished(self) -> tuple[Move, bool] | None:
        """The next move that is over, in the order in which they began, and whether its bytes are there."""
        if not self._over:
            return None
        self._moving -= 1
        return self._over.popleft()

    def close(self) -> None:
        """End the thread, within a slice; moves that are not over by then never will be. The pools may go then."""
        self._ending = True
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (move := self._waiting.get()) is not None and not self._ending:
            try:
                copied = self._copy(move)
            except Exception as error:  # noqa: BLE001 - the object stays where it is, and the next one is tried
                copied = False
                if not self._told:
                    self._told = True
                    self._log.error("an object could not be moved", pool=move.source_pool, exc_info=error)
            self._over.append((move, copied))

    def _copy(self, move: Move) -> bool:
        source, target = self._regions[move.source_pool], self._regions[move.target_pool]
        source.acquire(move.source_offset, move.length)
        for at in range(0, move.length, SLICE):
            if self._ending:
                return False
            _copy_bytes(
                target.buffer,
                move.target_offset + at,
                source.buffer,
                move.source_offset + at,
                min(SLICE, move.length - at),
            )
        target.publish(move.target_offset, move.length)
        return True


def _copy_bytes(target: memoryview, to: int, source: memoryview, start: int, count: int) -> None:
    """What ``target[to:to + count] = source[start:start + count]`` does, while other threads run.

    Raises ValueError when that is not all inside of both.
    """
    if min(to, start) < 0 or to + count > len(target) or start + count > len(source):
        raise ValueError(f"{count} bytes from {start} of {len(source)} do not fit at {to} of {len(target)}")
    # Views end with this call, so that the pools can be unmapped.
    ctypes.memmove(
        ctypes.byref(ctypes.c_char.from_buffer(target, to)),
        ctypes.byref(ctypes.c_char.from_buffer(source, start)),
        count,
    )
