"""Checks of what arrives, before anything is executed. Every failure is a ProtocolError that says what was wrong."""

from __future__ import annotations

from array import array
from typing import Any

from attrs import frozen

from maru_core.errors import ProtocolError
from maru_core.pool_format import KEY_SIZE
from maru_core.protocol.codec import describe, unpack_u32, unpack_u64
from maru_core.protocol.messages import MAX_KEYS, MAX_NAME, MAX_RESUME, MAX_TEXT, Code

_U64 = 1 << 64


class Refusal(Exception):
    """An answer other than OK that is no malformed request."""

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(text)
        self.code = code


@frozen
class Resume:
    """A part of what a client still uses of an earlier ``session``: reservations, and leases of ``sizes`` objects."""

    session: int
    attempt: int
    part: int
    last: bool
    entries: array[int]
    generations: array[int]
    leases: array[int]
    sizes: array[int]
    held: array[int]
    held_generations: array[int]


@frozen
class Hello:
    """Arguments of HELLO."""

    version: int
    role: str
    name: str
    descriptor: bytes
    quota: int
    resume: Resume | None


def is_u64(value: object) -> bool:
    """Whether ``value`` is a number that fits 64 bits (a bool is not)."""
    return type(value) is int and 0 <= value < _U64


def arguments(arguments: list[Any], count: int) -> list[Any]:
    """The arguments themselves when there are ``count`` of them."""
    if len(arguments) != count:
        raise ProtocolError(f"expected {count} arguments, got {len(arguments)}")
    return arguments


def hello(raw: list[Any]) -> Hello:
    """Check HELLO beyond its version, which the caller looks at first."""
    version, role, who, descriptor, quota, resume = arguments(raw, 6)
    if type(role) is not str or not isinstance(who, list) or len(who) != 3:
        raise ProtocolError("HELLO needs a role (text) and [pid, host, name]")
    pid, host, name = who
    if not is_u64(pid) or type(host) is not str or type(name) is not str:
        raise ProtocolError("HELLO needs [pid (number), host (text), name (text)]")
    if any(len(text.encode("utf-8", "surrogatepass")) > MAX_NAME for text in (role, host, name)):
        raise ProtocolError(f"role, host and name of a client have at most {MAX_NAME} bytes each")
    if type(descriptor) is not bytes or not 0 < len(descriptor) <= MAX_TEXT:
        raise ProtocolError(f"a namespace descriptor is 1 to {MAX_TEXT} bytes, got {describe(descriptor)}")
    return Hello(version, role, name, descriptor, number(quota, "quota"), _resume(resume))


def _resume(raw: object) -> Resume | None:
    if type(raw) is not list or len(raw) not in (0, 10):
        raise ProtocolError(f"what a session resumes is an empty array or one of 10, got {describe(raw)}")
    if not raw:
        return None
    entries, generations = handles(raw[4], raw[5])
    leases = unpack_u64(raw[6])
    sizes = unpack_u32(raw[7], len(leases))
    held, held_generations = handles(raw[8], raw[9])
    # The rest costs little, whoever asks, only when this was looked at first.
    if len(entries) + len(held) > MAX_RESUME:
        raise ProtocolError(
            f"{len(entries) + len(held)} items to resume in one part, the limit is {MAX_RESUME}; send more parts"
        )
    if len(sizes) > len(held) or 0 in sizes or sum(sizes) != len(held):
        raise ProtocolError(f"{len(sizes)} leases, none of them empty, must list all of {len(held)} objects")
    return Resume(
        number(raw[0], "session"),
        number(raw[1], "attempt"),
        number(raw[2], "part"),
        flag(raw[3], "last"),
        entries,
        generations,
        leases,
        sizes,
        held,
        held_generations,
    )


def number(value: object, what: str) -> int:
    """A number of 64 bits."""
    if type(value) is int and 0 <= value < _U64:
        return value
    raise ProtocolError(f"{what} must be a number of 64 bits, got {describe(value)}")


def flag(value: object, what: str) -> bool:
    """A bool, and nothing that is only like one."""
    if type(value) is bool:
        return value
    raise ProtocolError(f"{what} must be true or false, got {describe(value)}")


def key_count(blob: object) -> int:
    """Number of keys in a packed column that is not split yet."""
    if type(blob) is not bytes or len(blob) % KEY_SIZE:
        raise ProtocolError(f"keys must be bytes, a multiple of {KEY_SIZE}, got {describe(blob)}")
    return within_limit(len(blob) // KEY_SIZE)


def within_limit(count: int) -> int:
    """``count`` unless it is over MAX_KEYS."""
    if count > MAX_KEYS:
        raise ProtocolError(f"{count} items in one request, the limit is {MAX_KEYS}; split the batch")
    return count


def column_slice(blob: bytes, at: int, count: int) -> bytes:
    """Keys ``at .. at+count-1`` of a packed column, fewer at its end, as a column."""
    return blob[at * KEY_SIZE : (at + count) * KEY_SIZE] if at or len(blob) > count * KEY_SIZE else blob


def lengths(value: object, count: int) -> int | array[int]:
    """One length for all keys, or a column of ``count``."""
    return number(value, "length") if type(value) is int else unpack_u64(value, count)


def handles(entries: object, generations: object) -> tuple[array[int], array[int]]:
    """Parallel columns of first entries and generations."""
    column = unpack_u32(entries)
    return column, unpack_u32(generations, within_limit(len(column)))
