"""Work for other threads that is done in any case: also where a process gets no more threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def share(pool: ThreadPoolExecutor, call: Callable[[], T]) -> Future[T]:
    """``call()`` on a thread of the pool; here and now where the pool takes nothing, such as when no thread starts.

    A pool that cannot start a thread has queued the work already: it may run at any time later, when its memory is
    somebody else's. So what is run here is never run there.
    """
    future: Future[T] = Future()
    try:
        pool.submit(_run, future, call)
    except RuntimeError:
        if future.cancel():  # else another of its threads has taken it
            future = Future()
            _run(future, call)
    return future


def _run(future: Future[T], call: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:  # noqa: BLE001 - whoever waits for the future is told
        future.set_exception(error)
    else:
        future.set_result(result)
