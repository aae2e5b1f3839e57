"""A way to a server on which its answers take longer: bytes of a Unix socket, forwarded late."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_PART = 1 << 16


class Delayed:
    """Forwards connections at ``path`` to ``target``; what the server says arrives ``delay`` seconds later.

    Order is kept, also when the delay changes. Runs on a thread of its own; knows nothing of what is said.
    """

    def __init__(self, path: Path, target: Path) -> None:
        self.path = path
        self._target = target
        #: Seconds; may be set at any time, and holds for what is said from then on.
        self.delay = 0.0
        #: When the last of what the server has said so far arrives, on the monotonic clock.
        self._last = 0.0
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: asyncio.Server | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def start(self) -> None:
        """Listen."""
        self._thread.start()
        self._wait(self._listen())

    def close(self) -> None:
        """End all connections."""
        self._wait(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self.path.unlink(missing_ok=True)

    def settle(self) -> None:
        """Wait until nothing is on its way that was said under a longer delay: what comes behind it is as late."""
        while (left := self._last - time.monotonic()) > 0:
            time.sleep(left)

    def _wait(self, what: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(what, self._loop).result()

    async def _listen(self) -> None:
        self._listener = await asyncio.start_unix_server(self._connected, self.path)

    async def _end(self) -> None:
        if self._listener is not None:
            self._listener.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, onward = await asyncio.open_unix_connection(self._target)
        except OSError:  # the server is gone; whoever asks learns it as if it had asked there
            writer.close()
            return
        pumps = (self._pump(reader, onward, late=False), self._pump(there, writer, late=True))
        for pump in pumps:
            task = asyncio.ensure_future(pump)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, late: bool) -> None:
        """Until its source ends or its sink is gone; then the sink is closed."""
        parts: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def read() -> None:
            with suppress(OSError):
                while part := await reader.read(_PART):
                    due = time.monotonic() + (self.delay if late else 0.0)
                    self._last = max(self._last, due)
                    parts.put_nowait((due, part))
            parts.put_nowait((0.0, b""))

        reading = asyncio.ensure_future(read())
        try:
            while True:
                due, part = await parts.get()
                if not part:
                    break
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                writer.write(part)
                await writer.drain()
        except OSError:
            pass
        finally:
            reading.cancel()
            writer.close()


@contextmanager
def delayed(path: Path, target: Path) -> Iterator[Delayed]:
    """One that listens, for as long as the block."""
    proxy = Delayed(path, target)
    proxy.start()
    try:
        yield proxy
    finally:
        proxy.close()
