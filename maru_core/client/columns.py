"""Reply columns into values, with every check: length, known status, location inside a pool. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from maru_core.errors import ProtocolError
from maru_core.pool_format import KEY_SIZE
from maru_core.protocol import CommitStatus, Presence, ReserveStatus
from maru_core.protocol.codec import column_u8, unpack_u32, unpack_u64
from maru_core.protocol.messages import PoolDescriptor

_NEW = int(ReserveStatus.NEW)
_READY = int(Presence.READY)
_MAX_RESERVE = max(ReserveStatus)
_MAX_COMMIT = max(CommitStatus)
_MAX_PRESENCE = max(Presence)
_KEY_SIZES = {KEY_SIZE}


def join_keys(keys: Sequence[bytes]) -> bytes:
    """The packed column of ``keys``; raises ProtocolError unless each has 32 bytes, TypeError for what has none."""
    try:
        if set(map(len, keys)) != _KEY_SIZES and keys:
            wrong = next(key for key in keys if len(key) != KEY_SIZE)
            raise ProtocolError(f"a key must have {KEY_SIZE} bytes, got {len(wrong)}")
        return b"".join(keys)
    except TypeError as error:
        raise TypeError(f"a key must be {KEY_SIZE} bytes: {error}") from None


def expect_results(results: list[Any], count: int, op: str) -> None:
    """Raise ProtocolError unless a reply to ``op`` has ``count`` results."""
    if len(results) != count:
        raise ProtocolError(f"a reply to {op} must have {count} results, got {len(results)}")


def statuses_of(blob: object, count: int, highest: int) -> bytes:
    """A checked status column: one known status per key."""
    statuses = column_u8(blob, count)
    if statuses.count(0) < count and max(statuses) > highest:
        raise ProtocolError(f"unknown status {max(statuses)} in a reply, the highest known is {highest}")
    return statuses


def reserved(
    results: list[Any], lengths: Sequence[int], uniform: bool, pools: Sequence[PoolDescriptor]
) -> tuple[bytes, array[int], array[int]]:
    """Statuses, entries and generations of a RESERVE reply. ``uniform``: all lengths are equal."""
    expect_results(results, 3, "RESERVE")
    count = len(lengths)
    statuses = column_u8(results[0], count)
    entries = unpack_u32(results[1], count)
    generations = unpack_u32(results[2], count)
    if statuses.count(_NEW) < count:
        statuses_of(statuses, count, _MAX_RESERVE)
        uniform = False
    _check_places(statuses, _NEW, entries, lengths, uniform, pools)
    return statuses, entries, generations


def acquired(
    results: list[Any], count: int, pools: Sequence[PoolDescriptor]
) -> tuple[int, bytes, array[int], array[int], array[int]]:
    """Lease id, statuses, entries, generations and lengths of an ACQUIRE reply."""
    expect_results(results, 5, "ACQUIRE")
    lease = results[0]
    if type(lease) is not int or lease < 0:
        raise ProtocolError(f"a lease must be a number, got {lease!r}")
    statuses = column_u8(results[1], count)
    entries = unpack_u32(results[2], count)
    generations = unpack_u32(results[3], count)
    lengths = unpack_u64(results[4], count)
    ready = statuses.count(_READY)
    if ready and not lease:
        raise ProtocolError("a reply to ACQUIRE grants keys without a lease")
    if ready < count:
        statuses_of(statuses, count, _MAX_PRESENCE)
    uniform = ready == count > 0 and lengths == lengths[:1] * count
    _check_places(statuses, _READY, entries, lengths, uniform, pools)
    return lease, statuses, entries, generations, lengths


def commit_statuses(results: list[Any], count: int) -> bytes:
    """The CommitStatus column of a COMMIT reply."""
    expect_results(results, 1, "COMMIT")
    return statuses_of(results[0], count, _MAX_COMMIT)


def presences(results: list[Any], count: int, op: str) -> bytes:
    """The only column of a reply to ``op``, a checked Presence for each key."""
    expect_results(results, 1, op)
    return statuses_of(results[0], count, _MAX_PRESENCE)


def single_number(results: list[Any]) -> int:
    """The result of RESET, checked."""
    expect_results(results, 1, "RESET")
    if type(results[0]) is not int or results[0] < 0:
        raise ProtocolError(f"a weights epoch must be a number, got {results[0]!r}")
    return results[0]


def single_map(results: list[Any]) -> dict[str, Any]:
    """The result of STATS, checked."""
    expect_results(results, 1, "STATS")
    if type(results[0]) is not dict:
        raise ProtocolError(f"stats must be a map, got {type(results[0]).__name__}")
    return results[0]


def _check_places(
    statuses: bytes,
    granted: int,
    entries: array[int],
    lengths: Sequence[int],
    uniform: bool,
    pools: Sequence[PoolDescriptor],
) -> None:
    """Raise ProtocolError when a granted object does not lie wholly inside one pool.

    ``uniform``: all are granted, at one length. In one pool this usual case needs no loop.
    """
    if not entries:
        return
    if uniform and len(pools) == 1:
        pool = pools[0]
        base, pages = pool.entry_base, max(1, -(-lengths[0] // pool.granule))
        if max(entries) + pages <= base + pool.entry_count and (not base or min(entries) >= base):
            return
    for index, status in enumerate(statuses):
        if status == granted:
            check_place(entries[index], lengths[index], pools)


def check_place(entry: int, length: int, pools: Sequence[PoolDescriptor]) -> PoolDescriptor:
    """The pool that holds ``length`` bytes from ``entry`` on; raises ProtocolError when none does."""
    for pool in pools:
        if pool.entry_base <= entry < pool.entry_base + pool.entry_count:
            if 0 <= length <= (pool.entry_base + pool.entry_count - entry) * pool.granule:
                return pool
            break
    held = ", ".join(f"{pool.entry_base}..{pool.entry_base + pool.entry_count - 1}" for pool in pools)
    raise ProtocolError(
        f"entry {entry} with {length} bytes lies outside the pools, which have entries {held or 'none'}"
    )
