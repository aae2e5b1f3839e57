"""Which pools a server is asked for, in which granules, and in which order they are read."""

from __future__ import annotations

from collections.abc import Sequence

from maru_core.config import MaruConfig
from maru_core.contracts import PoolPlan, PoolWish
from maru_core.errors import ConfigError

#: The backend that puts the pools of others together.
MIXED = "mixed"
#: Allocation granules that are derived from the length of objects, in bytes.
_MAX_GRANULE = 2 * 1024 * 1024
_MIN_GRANULE = 4096


def granule_for(object_bytes: int) -> int:
    """Largest power of two, 4 KiB to 2 MiB, that wastes at most a hundredth of an object; 4 KiB when none does."""
    granule = _MAX_GRANULE
    while granule > _MIN_GRANULE and -(-object_bytes // granule) * granule - object_bytes > object_bytes // 100:
        granule //= 2
    return granule


def pool_wish(config: MaruConfig) -> PoolWish:
    """What ``config`` asks its storage backend for."""
    if config.storage_backend != MIXED:
        return _wish_of(config, config.storage_backend)
    if MIXED in config.write_order:
        raise ConfigError("maru_write_order names mixed; it lists the backends that mixed puts together")
    return PoolWish(MIXED, None, None, tuple(_wish_of(config, name) for name in config.write_order))


def read_order(config: MaruConfig, plans: Sequence[PoolPlan]) -> tuple[int, ...]:
    """Numbers of the pools in the order in which they are read where an object is in several.

    Backends that ``maru_read_order`` does not name come last, in the order of ``plans``. Raises ConfigError for one
    that has no pool.
    """
    names = [plan.backend for plan in plans]
    for name in config.read_order:
        if name not in names:
            raise ConfigError(
                f"maru_read_order names {name}, there are pools of {', '.join(dict.fromkeys(names))} only"
            )
    ranks = {name: rank for rank, name in enumerate(config.read_order)}
    return tuple(sorted(range(len(names)), key=lambda number: (ranks.get(names[number], len(ranks)), number)))


def _wish_of(config: MaruConfig, backend: str) -> PoolWish:
    setting = config.size_setting_of(backend)
    return PoolWish(backend, config.pool_size_of(backend), config.pool_path_of(backend), size_setting=setting)
