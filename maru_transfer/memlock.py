"""The limit on memory that a process may lock, which is what registering a pool does: whether it is in the way."""

from __future__ import annotations

import resource
from contextlib import suppress
from pathlib import Path
from typing import Final

#: Capability whose holder may lock any amount, see capabilities(7).
_CAP_IPC_LOCK: Final = 14


def memlock_hint(size: int, status: Path = Path("/proc/self/status")) -> str | None:
    """What to do when this process may not lock ``size`` bytes; ``None`` when no limit is in the way."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY or limit >= size or _may_lock_any(status):
        return None
    return (
        f"this process may lock {limit} bytes (RLIMIT_MEMLOCK) of {size}: raise it with `ulimit -l unlimited`, "
        f"docker's `--ulimit memlock=-1`, or LimitMEMLOCK=infinity in the systemd unit"
    )


def _may_lock_any(status: Path) -> bool:
    with suppress(OSError, ValueError):
        for line in status.read_text().splitlines():
            if line.startswith("CapEff:"):
                return bool(int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1)
    return False
