"""What runs in a guest: one handler, told by words of the command line what to do; prints a line of JSON for each.

``python3 -m tests.vm.node URL KEYS VERB [ARGUMENT...]`` with the verbs of :data:`VERBS`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from maru_core.client import MaruHandler, StoreResult
from maru_core.client.objects import Retrieved
from maru_core.config import MaruConfig
from maru_core.errors import MaruError
from maru_core.host import PluginHost
from maru_core.namespace import Namespace
from tests.vm.stamps import difference, size_of, stamped

NAMESPACE = Namespace.of({"model": "two hosts"})
#: Deadline of one request in seconds; the machines are slow, and one of them may be gone.
DEADLINE = 5.0
#: Seconds that :func:`keep_asking` pauses between two requests.
_PAUSE = 0.2


def connect(url: str, keys: str) -> MaruHandler:
    """A handler of the server at ``url``."""
    config = MaruConfig(server_url=url, keys=keys, request_timeout=DEADLINE, connect_timeout=30.0)
    host = PluginHost.with_plugins({}, built_ins=True)
    return MaruHandler.connect(config, NAMESPACE, host=host, name=os.uname().nodename)


def tell(**facts: object) -> None:
    """Print a line that the host reads."""
    print(json.dumps(facts), flush=True)


def write(handler: MaruHandler, name: str, count: str) -> None:
    """Store a set of objects."""
    results = {}
    for number in range(int(count)):
        results[number] = handler.store(f"{name}-{number}", stamped(f"{name}-{number}", size_of(number)))
    tell(stored=sum(result is StoreResult.STORED for result in results.values()))


def read(handler: MaruHandler, name: str, count: str) -> None:
    """Retrieve a set of objects and compare every byte."""
    exact, missing, wrong = 0, 0, []
    for number in range(int(count)):
        found = handler.retrieve(f"{name}-{number}")
        if found is None:
            missing += 1
            continue
        reason = judge(found, f"{name}-{number}", size_of(number))
        exact += reason is None
        wrong += [reason] if reason is not None else []
    tell(exact=exact, missing=missing, wrong=wrong)


def judge(found: Retrieved, name: str, size: int) -> str | None:
    """What is wrong with an object, which is given back; ``None`` when every byte is right."""
    with found:
        reason = difference(found.view, name, size)
        return reason if found.verify() else f"{name}: gone while it was read ({reason})"


def hold(handler: MaruHandler, name: str, leased: str, reserved: str, size: str) -> None:
    """Hold leases on objects of a set, and reservations that are half written, until the machine dies."""
    leases = [handler.retrieve(f"{name}-{number}") for number in range(int(leased))]
    allocations = [handler.alloc(f"open-{number}", int(size)) for number in range(int(reserved))]
    for allocation in allocations:
        allocation.view[: int(size) // 2] = bytes(int(size) // 2)
    session = handler.stats()["sessions"]
    tell(leased=sum(lease is not None for lease in leases), reserved=len(allocations), sessions=session)
    while True:
        time.sleep(60)


def keep_asking(handler: MaruHandler, name: str, count: str, until: str) -> None:
    """Ask for objects of a set, and store others, until the file ``until`` is there; then tell what happened.

    A request that is refused because no server answers is a miss, as an engine counts it.
    """
    hits, misses, stored, longest, wrong, number = 0, 0, 0, 0.0, [], 0
    tell(asking=True)
    while not os.path.exists(until):
        key = f"{name}-{number % int(count)}"
        started = time.monotonic()
        try:
            found = handler.retrieve(key)
        except MaruError:
            found = None
        longest = max(longest, time.monotonic() - started)
        if found is None:
            misses += 1
        else:
            reason = judge(found, key, size_of(number % int(count)))
            hits += 1
            wrong += [reason] if reason is not None else []
        started = time.monotonic()
        with suppress(MaruError):
            stored += handler.store(f"{name}-again-{number}", b"some bytes") is StoreResult.STORED
        longest = max(longest, time.monotonic() - started)
        number += 1
        time.sleep(_PAUSE)
        tell(hits=hits, misses=misses, stored=stored, longest=round(longest, 3), wrong=wrong)


VERBS: Mapping[str, Callable[..., None]] = {"write": write, "read": read, "hold": hold, "ask": keep_asking}


def main(url: str, keys: str, verb: str, *arguments: str) -> None:
    """Connect, and carry out one verb."""
    with connect(url, keys) as handler:
        VERBS[verb](handler, *arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
