"""Whose a device is: a record in the first page of the pool, and what may be done with a device that has one.

A device is there before and after every server, and its memory is the same after a cold start. So a new pool may be
made only when nobody of the former one can still write to it. Locks prove that for this kernel and this node of the
device; the record tells where they reach, and whom to ask where they do not.
"""

from __future__ import annotations

import json
import os
import struct
import time
import zlib
from typing import Any, Final, Literal, get_args

from attrs import asdict, evolve, frozen

from maru_backends.origin import Host
from maru_core.pool_format import SUPERBLOCK_SIZE, Superblock

#: Two slots behind the superblock, written in turn: whenever a writer dies, one of them is whole.
SLOTS: Final = (1024, 2560)
SLOT_SIZE: Final = 1536
MAGIC: Final = b"MARUOWNR"
VERSION: Final = 1
#: magic, version, length of the text, sequence; text and CRC-32 of all that follow.
_HEAD: Final = struct.Struct("<8sIIQ")
_CRC: Final = struct.Struct("<I")
_MOST_NAME: Final = 128
#: In seconds since 1970, what can be shown as a date.
_END_OF_TIME: Final = 1e11
#: How an operator says that all who used a device have ended.
TAKE_OVER: Final = "start once with --take-over"

State = Literal["used", "left", "released"]


@frozen
class OwnerRecord:
    """Who has, or had, the pool. Ids in hexadecimal, ``started`` in seconds since 1970.

    ``state``: ``used`` until its server ends in order; ``left`` for the next server of ``owner``; ``released``.
    ``abroad``: hosts that are not coherent with this one may have mapped it. ``mapped``: when it was released, others
    on its host still had it mapped.
    """

    state: State
    owner: str
    pool: int
    host: str
    host_id: str
    boot_id: str
    place: str
    pid: int
    started: float
    abroad: bool
    mapped: bool = False

    @classmethod
    def of_this(cls, owner: str, pool: int, host: Host, place: bytes, *, abroad: bool) -> OwnerRecord:
        """What this process writes when it takes a device."""
        return cls(
            state="used",
            owner=owner[:_MOST_NAME],
            pool=pool,
            host=host.name[:_MOST_NAME],
            host_id=host.identity.hex(),
            boot_id=host.boot.hex(),
            place=place.hex(),
            pid=os.getpid(),
            started=time.time(),
            abroad=abroad,
        )

    def describe(self) -> str:
        """Who that is, for an operator."""
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.started))
        return f"process {self.pid} on host {self.host!r} (owner {self.owner!r}, pool {self.pool}, since {since})"


@frozen
class Known:
    """What the first page tells. ``sequence``: of the record, to be gone on with; ``damaged``: there was one once."""

    record: OwnerRecord | None
    sequence: int
    damaged: bool
    block: Superblock | None

    @property
    def is_free(self) -> bool:
        """Whether there is no pool, and there was none or its owner ended in order."""
        gone = self.record is None or self.record.state == "released"
        return gone and self.block is None and not self.damaged


def read_record(page: bytes) -> tuple[OwnerRecord | None, int, bool]:
    """The latest record in a first page, its sequence number, and whether something there is no whole record."""
    best: OwnerRecord | None = None
    sequence, damaged = 0, False
    for offset in SLOTS:
        slot = page[offset : offset + SLOT_SIZE]
        try:
            found = _unpack(slot)
        except (ValueError, TypeError, KeyError, RecursionError):
            damaged = True
            continue
        if found is not None and (best is None or found[1] > sequence):
            best, sequence = found
    return best, sequence, damaged and best is None


def pack_record(record: OwnerRecord, sequence: int) -> tuple[int, bytes]:
    """Offset in the first page and bytes of ``record``, which takes the place of the record before the last."""
    text = json.dumps(asdict(record)).encode()
    body = _HEAD.pack(MAGIC, VERSION, len(text), sequence) + text
    packed = body + _CRC.pack(zlib.crc32(body))
    assert len(packed) <= SLOT_SIZE, "names are cut before they are written"
    return SLOTS[sequence % len(SLOTS)], packed


def refusal(known: Known, host: Host, place: bytes, owner: str, path: str) -> str | None:
    """Why ``owner`` may not make a new pool there although it has the lock of the node; ``None`` when it may.

    ``host`` and ``place``: of the process that asks. Whether somebody of this kernel has it mapped by this node is for
    locks to tell. Everything that is refused here is allowed by the operator's word.
    """
    record = known.record
    if record is None:
        block = known.block
        if block is None and not known.damaged:
            return None
        if block is not None and host.is_this_boot(block.boot_id) and block.place == place:
            return None
        return f"{path} holds a pool whose owner it does not tell any more; if nothing on any host uses it, {TAKE_OVER}"
    if record.abroad:
        return (
            f"{path} was shared with other hosts by {record.describe()}, and nothing here tells whether processes "
            f"there still write to it; once all of them have ended, {TAKE_OVER}"
        )
    if host.is_this_boot(bytes.fromhex(record.boot_id)):
        if bytes.fromhex(record.place) == place:
            if record.state == "left" and record.owner != owner:
                return (
                    f"{path} was left for the next server of its runtime folder by {record.describe()}; start that "
                    f"one, or, to drop what it holds, {TAKE_OVER}"
                )
            return None
        reason = "it has another node of the same device, which locks do not reach (give containers the same node)"
    elif host.was_rebooted_since(bytes.fromhex(record.host_id), bytes.fromhex(record.boot_id)):
        return None
    else:
        reason = "no lock reaches from one host to another"
    if record.state == "released" and not record.mapped:
        return None
    state = "was released, but was still mapped, by" if record.state == "released" else "belongs to"
    return (
        f"{path} {state} {record.describe()}, and whether that still uses it cannot be told from here: {reason}; "
        f"stop it, or if it has ended with all that used the device, {TAKE_OVER}"
    )


def ended(record: OwnerRecord, *, mapped: bool) -> OwnerRecord:
    """What the owner writes when its pool is gone."""
    return evolve(record, state="released", mapped=mapped)


def left(record: OwnerRecord) -> OwnerRecord:
    """What the owner writes when it leaves its pool to the next server."""
    return evolve(record, state="left")


def _unpack(slot: bytes) -> tuple[OwnerRecord, int] | None:
    """``None`` when nothing is there; raises ValueError and the like when it is no whole record of this version."""
    magic, version, length, sequence = _HEAD.unpack_from(slot)
    if magic != MAGIC:
        return None
    end = _HEAD.size + length
    if version != VERSION or end + _CRC.size > len(slot):
        raise ValueError("another version, or longer than a slot")
    if slot[end : end + _CRC.size] != _CRC.pack(zlib.crc32(slot[:end])):
        raise ValueError("the checksum does not match")
    found = json.loads(slot[_HEAD.size : end])
    values = {name: _checked(name, kind, found[name]) for name, kind in _KINDS.items()}
    for name in ("host_id", "boot_id", "place"):
        bytes.fromhex(values[name])
    if values["state"] not in get_args(State) or not 0 <= values["started"] < _END_OF_TIME:
        raise ValueError("a value that cannot be")
    return OwnerRecord(**values), sequence


def _checked(name: str, kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{name} is {value!r}")
    return value


_KINDS: Final[dict[str, type]] = {
    **dict.fromkeys(("state", "owner", "host", "host_id", "boot_id", "place"), str),
    **dict.fromkeys(("pool", "pid"), int),
    **dict.fromkeys(("abroad", "mapped"), bool),
    "started": float,
}

assert SLOTS[-1] + SLOT_SIZE <= SUPERBLOCK_SIZE
