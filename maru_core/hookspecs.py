"""Every hook, typed and documented: moment, process, thread, whether it may block, and what ``None`` means.

Four families: *provide storage backends*, *provide transfer engines*, *provide orders of eviction*, *device hints*. A
hint never changes what is stored or loaded: it is told what is about to happen and may make it faster.

Processes: *server* is ``maru serve``; *client* is any process with a handler (with vLLM: the engine core and each
worker). Hints run in clients only.

The host bounds every hint, see :class:`maru_core.hints.Limits`: a plugin whose hints fail three times, or take too
long, gets none of them called again in that process, with one warning. ``before_read`` and ``after_read`` have 0.2 ms,
and one call of 1 s is the last; each other hint is waited for at most 2 s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pluggy

from maru_core.contracts import BackendProvision, EngineProvision, PolicyProvision, ReadExtent, Region
from maru_core.plugin import NAME

hookspec = pluggy.HookspecMarker(NAME)


@hookspec
def maru_storage_backends() -> Sequence[BackendProvision] | None:
    """Offer storage backends.

    Runs once per host, when the host is built, in every process, on the thread that builds it. Must not block nor
    import anything heavy: a factory does that when the backend is first used. ``None``: nothing to offer.
    """


@hookspec
def maru_transfer_engines() -> Sequence[EngineProvision] | None:
    """Offer transfer engines.

    Runs once per host, when the host is built, in every process, on the thread that builds it. Must not block nor
    import anything heavy (torch least of all). ``None``: nothing to offer.
    """


@hookspec
def maru_eviction_policies() -> Sequence[PolicyProvision] | None:
    """Offer orders of eviction.

    Runs once per host, when the host is built, in every process, on the thread that builds it. Must not block nor
    import anything heavy: the factory of the policy that is chosen does that, in the server. ``None``: nothing to
    offer.
    """


@hookspec
def maru_session_opened(name: str, role: str) -> None:
    """A handler got its session.

    Runs in the client, on a thread that the one that connected waits for, after every (re)connection. ``name`` is the
    engine's name for logs, ``role`` what the session is for (``scheduler``, ``worker``, ``client``). May block for some
    milliseconds.
    """


@hookspec
def maru_region_mapped(region: Region) -> None:
    """A pool was mapped.

    Runs in the client, once per region, on a thread that the one that mapped it waits for, before the first read or
    write. May block for some milliseconds: population and placement checks start here, on a thread of the plugin's own.
    """


@hookspec
def maru_before_read(region: Region, extents: Sequence[ReadExtent]) -> None:
    """These extents of ``region`` are about to be read.

    Runs in the client, on the thread that loads, on the hot path: it must return within microseconds. Extents are
    sorted by offset. A read may still be given up after this call. Engines' loads are announced; a ``memoryview`` that
    :meth:`MaruHandler.retrieve` hands out is not, because nobody knows when it will be read.
    """


@hookspec
def maru_after_read(region: Region, extents: Sequence[ReadExtent]) -> None:
    """The read announced by ``maru_before_read`` ended, well or not.

    Runs in the client, on the thread that loaded, on the hot path: it must return within microseconds.
    """


@hookspec
def maru_region_unmapping(region: Region) -> None:
    """A pool is about to be unmapped; forget the region.

    Runs in the client, once per mapped region, on a thread that the one that closes it waits for. May block for some
    milliseconds. Memory that the plugin still shows with a ``memoryview`` stays mapped until it lets go.
    """


@hookspec
def maru_hint_stats() -> Mapping[str, int | float | str] | None:
    """Contribute figures to the handler's stats, each name starting with the plugin's own.

    Runs in the client, on a thread that the one that asked for stats waits for. Must not block. ``None``: nothing to
    report.
    """
