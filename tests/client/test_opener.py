"""What follows a new session is never in its way."""

from __future__ import annotations

import threading
from typing import Any
from unittest.mock import Mock

from maru_core.client.opener import SessionOpener
from maru_core.client.regions import Regions
from maru_core.config import MaruConfig
from maru_core.host import PluginHost
from maru_core.namespace import Namespace
from maru_core.population import Population
from tests.threads import no_more_threads


def test_pools_are_mapped_where_no_thread_can_populate_them() -> None:
    host = PluginHost.with_plugins({})
    opener = SessionOpener(MaruConfig(), Namespace.of({}), host, "worker", "", False, None, None)
    session: Any = Mock()
    with no_more_threads():
        opener._map(session)
    session.regions.map_all.assert_called_once()


def test_populating_without_a_thread_ends_at_once() -> None:
    regions = Regions([], PluginHost.with_plugins({}), bytes(16))
    regions._mapped[0] = region = Mock()
    region.descriptor.size = 10
    with no_more_threads():
        regions.populate()
    region.populate.assert_not_called()


def test_a_population_with_fewer_threads_than_it_wants_is_whole() -> None:
    done: list[int] = []
    region: Any = Mock()
    region.descriptor.size = 10
    region.populate = lambda offset, length: done.append(offset)
    start, started = threading.Thread.start, []

    def once(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    threading.Thread.start = once  # type: ignore[method-assign]
    try:
        population = Population(region, step=2, threads=3)
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]
    assert population.reach(10, timeout=60)
    assert done == [0, 2, 4, 6, 8]
