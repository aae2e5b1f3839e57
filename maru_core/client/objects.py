"""What the high-level calls hand out: room to write into, and stored bytes to read."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import TracebackType

import structlog

from maru_core.client.keycalls import KeyCalls, Located
from maru_core.client.values import Grants, Lease, StoreResult
from maru_core.errors import MaruError
from maru_core.protocol import CommitStatus, ReserveStatus

REFUSALS = {
    ReserveStatus.PRESENT: StoreResult.PRESENT,
    ReserveStatus.BUSY: StoreResult.BUSY,
    ReserveStatus.NO_ROOM: StoreResult.NO_ROOM,
    ReserveStatus.REFUSED: StoreResult.REFUSED,
}


class Allocation:
    """Room for one object. As a context manager: commits at the end, gives the room back when the block raises.

    ``refusal`` says why there is no room to write into (``None``: there is). Use it from one thread.
    """

    def __init__(self, calls: KeyCalls, grants: Grants, index: int, on_dropped: Callable[[], None]) -> None:
        self._on_dropped = on_dropped
        status = ReserveStatus(grants.statuses[index])
        self.refusal: StoreResult | None = REFUSALS.get(status)
        self._calls = calls
        self._grants = grants
        self._index = index
        self._view: memoryview | None = None
        self._open = self.refusal is None
        if self._open:
            self._view = calls.view(grants.epoch, grants.entries[index], grants.lengths[index])

    @property
    def view(self) -> memoryview:
        """The writable bytes; raises MaruError when refused, or after commit or abort."""
        if self._view is None:
            state = "committed or aborted" if self.refusal is None else f"refused ({self.refusal.value})"
            raise MaruError(f"there are no bytes to write: this allocation is {state}")
        return self._view

    def commit(self) -> StoreResult:
        """Make what was written visible. The view ends first: stored bytes never change.

        Raises MaruError while something else (a numpy array, say) still shows the view, and what ``commit`` of the
        handler raises; the room is given back then.
        """
        if self.refusal is not None:
            return self.refusal
        self._end()
        statuses = self._calls.commit(self._grants, [self._index])
        return StoreResult.STORED if statuses[0] == CommitStatus.OK else StoreResult.REFUSED

    def abort(self) -> None:
        """Give the room back. Idempotent. Raises MaruError while something else still shows the view."""
        if self._open:
            self._end()
            self._calls.abort(self._grants, [self._index])

    @property
    def is_open(self) -> bool:
        """Whether there is room that was neither committed nor given back."""
        return self._open

    def _end(self) -> None:
        view = self.view
        try:
            view.release()
        except BufferError:
            raise MaruError(
                "something still shows this allocation's view (an array made from it?) and could write after the "
                "pages belong to others; drop it first"
            ) from None
        self._view = None
        self._open = False

    def __enter__(self) -> Allocation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            if self._open:
                self.commit()
        else:
            self.abort()

    def __del__(self) -> None:
        # Slices of the view may live on and be written through, so the pages are not given back behind their back.
        if getattr(self, "_open", False):
            self._on_dropped()
            structlog.get_logger(__name__).warning(
                "allocation dropped without commit or abort; its pages stay reserved until the process ends",
                length=self._grants.lengths[self._index],
            )


class SharedLease:
    """One lease over several objects, given back when the last of its ``count`` holders lets go. Thread-safe."""

    def __init__(self, release: Callable[[Lease], None], lease: Lease, count: int) -> None:
        self._release = release
        self._lease = lease
        self._tokens = list(range(count))

    def let_go(self) -> None:
        """One holder less. Taking a token is atomic and token 0 is the last, so exactly one call releases."""
        if self._tokens.pop() == 0:
            self._release(self._lease)


class Retrieved:
    """One stored object, leased: its bytes stay in place until ``close``, the end of the ``with``, or collection.

    The lease lasts while ``view`` itself is alive; slices of it do not extend it.
    """

    def __init__(self, located: Located, index: int, view: memoryview, shared: SharedLease) -> None:
        self._located = located
        self._index = index
        self._view: memoryview | None = view
        self._finalizer = weakref.finalize(view, shared.let_go)
        # At exit the goodbye of the handler ends all leases at once.
        self._finalizer.atexit = False

    @property
    def view(self) -> memoryview:
        """The bytes, read-only and without a copy; raises MaruError after ``close``."""
        if self._view is None:
            raise MaruError("this object was closed and its lease given back; retrieve it again")
        return self._view

    def verify(self) -> bool:
        """Whether what was read up to now is the object that was asked for. False after ``close``."""
        return self._view is not None and self._located.verify_one(self._index)

    def close(self) -> None:
        """Give the lease back. Idempotent."""
        view, self._view = self._view, None
        if view is not None:
            self._finalizer()
            try:
                view.release()
            except BufferError:
                structlog.get_logger(__name__).debug("a closed object is still shown by another buffer")

    def __enter__(self) -> Retrieved:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        return self._located.lengths[self._index]
