"""What the high-level calls hand out: room to write into, and stored bytes to read."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

from maru_core import logs
from maru_core.client.keycalls import KeyCalls
from maru_core.client.located import Located
from maru_core.client.values import Grants, StoreResult
from maru_core.errors import MaruError
from maru_core.protocol import CommitStatus, ReserveStatus

REFUSALS = {
    ReserveStatus.PRESENT: StoreResult.PRESENT,
    ReserveStatus.BUSY: StoreResult.BUSY,
    ReserveStatus.NO_ROOM: StoreResult.NO_ROOM,
    ReserveStatus.REFUSED: StoreResult.REFUSED,
}


class Shown:
    """Bytes of a pool behind an object of their own, so that it can be told whether anything still shows them.

    Slices of ``view``, arrays and other buffers made from it all keep that object alive, and nothing else does;
    ``memoryview.release`` alone counts direct exports only. ``watch`` is given that object, and ``keep`` lives with it.
    """

    def __init__(
        self,
        view: memoryview,
        *,
        readonly: bool = False,
        watch: Callable[[object], None] | None = None,
        keep: object = None,
    ) -> None:
        exporter = (ctypes.c_ubyte * len(view)).from_buffer(view)
        if keep is not None:
            exporter.keep = keep  # type: ignore[attr-defined]
        self._exporter = weakref.ref(exporter)
        self._readonly = readonly
        self.view: memoryview | None = self._show(exporter)
        if watch is not None:
            watch(exporter)

    def end(self) -> bool:
        """Take the view back; False, with ``view`` shown again, when something else still shows the bytes."""
        self.hide()
        exporter = self._exporter()
        if exporter is None:
            return True
        self.view = self._show(exporter)
        return False

    def hide(self) -> None:
        """Drop our own view, whoever else shows the bytes."""
        view, self.view = self.view, None
        if view is not None:
            with suppress(BufferError):  # an export of the view itself, which keeps the object alive as well
                view.release()

    def _show(self, exporter: ctypes.Array[ctypes.c_ubyte]) -> memoryview:
        view = memoryview(exporter).cast("B")
        return view.toreadonly() if self._readonly else view


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
        self._shown: Shown | None = None
        self._open = False
        if self.refusal is None:
            self._shown = Shown(calls.room(grants, index))
            self._open = True

    @property
    def view(self) -> memoryview:
        """The writable bytes; raises MaruError when refused, or after commit or abort."""
        view = None if self._shown is None else self._shown.view
        if view is None:
            state = "committed or aborted" if self.refusal is None else f"refused ({self.refusal.value})"
            raise MaruError(f"there are no bytes to write: this allocation is {state}")
        return view

    def commit(self) -> StoreResult:
        """Make what was written visible. The view ends first: stored bytes never change.

        Raises MaruError while something else (a slice, a numpy array) still shows the view: drop it and commit again.
        Raises what ``commit`` of the handler raises, too; the room is given back then.
        """
        if self.refusal is not None:
            return self.refusal
        self._end()
        try:
            statuses = self._calls.commit(self._grants, [self._index], checksums=True)
        except BaseException:
            # Again, in case it was interrupted before it did so itself.
            self._calls.abort(self._grants, [self._index])
            self._open = False
            raise
        self._open = False
        return StoreResult.STORED if statuses[0] == CommitStatus.OK else StoreResult.REFUSED

    def abort(self) -> None:
        """Give the room back. Idempotent. Raises MaruError while something else still shows the view."""
        if self._open:
            self._end()
            self._calls.abort(self._grants, [self._index])
            self._open = False

    @property
    def is_open(self) -> bool:
        """Whether there is room that was neither committed nor given back."""
        return self._open

    def _end(self) -> None:
        """Take the view back. May be repeated until the room is stored or given back: a signal may come in between."""
        if not self._open:
            raise MaruError("this allocation was committed or aborted before")
        if self._shown is not None and not self._shown.end():
            raise MaruError(
                "something still shows this allocation's view (a slice of it, an array made from it?) and could write "
                "after the pages belong to others; drop it first"
            )
        self._shown = None

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
            logs.get_logger(__name__).warning(
                "allocation dropped without commit or abort; its pages stay reserved until the process ends",
                length=self._grants.lengths[self._index],
            )


class Retrieved:
    """One stored object, leased: its bytes stay in place until ``close``, the end of the ``with``, or collection.

    Slices of ``view`` and arrays made from it hold the lease as well, until the last of them is gone.
    """

    def __init__(
        self, located: Located, index: int, view: memoryview, watch: Callable[[object], None], keep: object
    ) -> None:
        self._located = located
        self._index = index
        self._shown = Shown(view, readonly=True, watch=watch, keep=keep)

    @property
    def view(self) -> memoryview:
        """The bytes, read-only and without a copy; raises MaruError after ``close``."""
        view = self._shown.view
        if view is None:
            raise MaruError("this object was closed and its lease given back; retrieve it again")
        return view

    def verify(self) -> bool:
        """Whether what was read up to now is the object that was asked for. False after ``close``.

        Looks at the header; with ``maru_verify`` ``full`` compares the checksum once more.
        """
        return self._shown.view is not None and self._located.check_again(self._index)

    def close(self) -> None:
        """Give the lease back, now or when the last buffer made from ``view`` is gone. Idempotent."""
        self._shown.hide()

    def __enter__(self) -> Retrieved:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        return self._located.lengths[self._index]
