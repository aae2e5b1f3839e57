"""Keys, and an address of this host that is not loopback."""

from __future__ import annotations

import socket
from pathlib import Path

from maru_core.access import ClientKeys, make_keys
from maru_core.namespace import Namespace


def own_address() -> str:
    """An address of this host that is not loopback, where it has one; no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def free_port(host: str) -> int:
    """A port that nobody used a moment ago."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def tenants(folder: Path) -> dict[str, ClientKeys]:
    """Keys in ``folder``: ``red`` and ``blue`` are bound to namespaces of their names, ``free`` to none."""
    made = folder / "keys"
    make_keys(made, ["red"], ["red"])
    make_keys(made, ["blue"], ["blue", "shared"])
    make_keys(made, ["free"])
    return {name: ClientKeys.load(made / f"{name}.key") for name in ("red", "blue", "free")}


def descriptor(operator: str | None) -> bytes:
    """A namespace's descriptor with this ``maru_cache_namespace``, or without one."""
    facts = {"model": "test"} if operator is None else {"model": "test", "operator": operator}
    return Namespace.of(facts).descriptor
