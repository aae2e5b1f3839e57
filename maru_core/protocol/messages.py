"""What goes over the wire, and its limits. ``docs/protocol.md`` tells the same in prose.

One ZeroMQ frame per message, one msgpack array per frame, no maps on hot paths, nothing that runs code.

Request: ``[op, request_id, epoch, session, *arguments]``. Reply: ``[request_id, epoch, code, *results]``, where code 0
is success and any other is followed by one text. ``epoch`` is the server's (random, 63 bits, new at every start); a
request with another epoch is answered ``STALE_EPOCH`` and *not* executed. ``HELLO`` and ``PING`` are sent with epoch 0
when the client does not know it yet. ``session`` is a random 63-bit id that HELLO hands out.

Lists of keys and numbers travel packed: ``keys`` is n x 32 bytes; columns of numbers are little-endian ``u32`` or
``u64`` arrays (:mod:`maru_core.protocol.codec`). Every reply answers every key of its request, in order; a column of
another length is an error for the whole batch.

==========  ==========================================================  ==============================================
op          arguments                                                   results
==========  ==========================================================  ==============================================
HELLO       version, role, [pid, host, name], namespace descriptor,     session, lock path, weights epoch, [pool…],
            quota, resume                                               [max message bytes], [server version, pid]
ATTACH      proof held (bool), DMA (bool)                               —
RESERVE     weights epoch, keys, parents, length or u64[n]              ReserveStatus u8[n], entry u32[n],
                                                                        generation u32[n]
COMMIT      entry u32[n], generation u32[n], checksum u64[n] or empty   CommitStatus u8[n]
ABORT       entry u32[n], generation u32[n]                             CommitStatus u8[n]
PROBE       weights epoch, keys                                         Presence u8[n]
ACQUIRE     weights epoch, keys, leading only (bool)                    lease, Presence u8[n], entry u32[n],
                                                                        generation u32[n], length u64[n]
RELEASE     lease u64[n]                                                CommitStatus u8[n]
DELETE      weights epoch, keys                                         Presence u8[n] (what was there before)
RESET       weights epoch                                               new weights epoch
CANCEL      request id u64[n]                                           —
STATS       —                                                           one map of plain values
PING        —                                                           —
BYE         —                                                           —
ADMIN       credential, verb, …                                         of the verb, see ``docs/protocol.md``
REPORT      entry u32[n], generation u32[n]                             CommitStatus u8[n]
==========  ==========================================================  ==============================================

``quota`` of HELLO is the most that the client wants its namespace to hold, in bytes (0: no wish). ``resume`` is empty,
or a part of what the client still uses of the session that it had with the server before this one: ``[session, attempt,
part, last (bool), entry u32[n], generation u32[n], lease u64[m], size u32[m], entry u32[k], generation u32[k]]``,
reservations and then leases, whose sizes (never 0) add up to k; n + k is at most MAX_RESUME. Parts are numbered from 0;
``attempt`` is the same number in all parts of one listing and another in the next. A lease may go on in the next part.
If that server's memory lives on in this one, each reply names the same session, which holds exactly what all parts list
once the last is answered; otherwise a new one, which holds nothing, and the remaining parts are not sent.

``DMA`` of ATTACH says that devices may move this client's bytes by themselves, and so for a moment after it died.

``parents`` of RESERVE is empty, or n keys (NO_KEY for none), or one key: then the keys are a chain, each the parent of
the next, and this is the parent of the first.

A session may reserve and acquire only after ATTACH. The client first takes an exclusive ``flock`` on the file at
``lock path``, which is how the server proves its death later; ``proof held`` is False where it cannot (another host).

An *entry* numbers an allocation granule over all pools; :class:`PoolDescriptor` turns it into an offset.
``lease`` is 0 when nothing was found. A lease is given back as a whole.
"""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import Any, Final

from attrs import frozen

from maru_core.errors import ProtocolError
from maru_core.pool_format import HEADER_SIZE, SUPERBLOCK_SIZE

#: Largest frame either side accepts, in bytes: 100,000 keys and their parents fit. Clients split longer batches.
MAX_MESSAGE: Final = 8 * 1024 * 1024
#: Most keys in one request; further bounds the memory that one message may make the server allocate.
MAX_KEYS: Final = 112_000
#: Most reservations and leased objects that one part of a HELLO lists.
MAX_RESUME: Final = 32_768
#: Longest namespace descriptor and other text, in bytes.
MAX_TEXT: Final = 16 * 1024
#: Most items of one array that are no column, such as pools.
MAX_ARRAY: Final = 64
#: Longest role, host and name of a client, in bytes: each record of a session must stay small.
MAX_NAME: Final = 1024
#: ``entry`` of a key that has no location.
NO_ENTRY: Final = 0xFFFF_FFFF


class Op(IntEnum):
    """Operations, by number on the wire."""

    HELLO = 1
    ATTACH = 2
    RESERVE = 3
    COMMIT = 4
    ABORT = 5
    PROBE = 6
    ACQUIRE = 7
    RELEASE = 8
    DELETE = 9
    RESET = 10
    CANCEL = 11
    STATS = 12
    PING = 13
    BYE = 14
    ADMIN = 15
    REPORT = 16


class AdminVerb(str, Enum):
    """Second argument of ADMIN; the verb's own arguments follow it."""

    NAMESPACES = "namespaces"
    SESSIONS = "sessions"
    RESET = "reset"
    QUOTA = "quota"
    EVICT = "evict"
    FORGET = "forget"
    STOP = "stop"


#: What RESET of administration has in place of a digest when it is about every namespace.
EVERYTHING: Final = "all"


class Code(IntEnum):
    """First result of a reply."""

    OK = 0
    #: The message is not understood or over a limit; the text says why. Nothing was executed.
    BAD_REQUEST = 1
    #: Other protocol version; the text names both.
    VERSION = 2
    #: The server restarted since; nothing was executed.
    STALE_EPOCH = 3
    #: The session is unknown, closed, or not attached.
    NO_SESSION = 4
    #: The request was cancelled by id before it arrived; nothing was executed.
    CANCELLED = 5
    #: A fault inside the server; the request may be partly executed and should be cancelled.
    INTERNAL = 6
    #: Not with this key, or not with this credential; the text says why. Nothing was executed.
    FORBIDDEN = 7


class ReserveStatus(IntEnum):
    """Answer of RESERVE for one key."""

    NEW = 0  #: pages are yours until COMMIT, ABORT, or the end of the session
    PRESENT = 1  #: already stored: do not copy
    BUSY = 2  #: another session is writing it: do not copy
    NO_ROOM = 3  #: nothing could be evicted: skip
    REFUSED = 4  #: the weights epoch is stale, or the length is impossible


class CommitStatus(IntEnum):
    """Answer of COMMIT, ABORT, RELEASE and REPORT for one item. All of them are idempotent."""

    OK = 0
    #: Not (or no longer) held by this session, or of a generation before a reset: it is not visible.
    UNKNOWN = 1


class Presence(IntEnum):
    """Answer of PROBE, ACQUIRE and DELETE for one key."""

    ABSENT = 0
    READY = 1
    WRITING = 2  #: being written by somebody; a miss for a reader
    BUSY = 3  #: there, but this session leases its share of the pool already


@frozen
class PoolDescriptor:
    """What a client needs to map one pool. Sizes and offsets in bytes; ``identity`` as in the pool's superblock.

    ``flush``: hosts that are not coherent with each other share it, so that caches are written back after a write and
    emptied before a read.
    """

    pool: int
    backend: str
    location: str
    identity: bytes
    size: int
    granule: int
    entry_base: int
    entry_count: int
    table_offset: int
    data_offset: int
    flush: bool = False

    @property
    def is_possible(self) -> bool:
        """Whether superblock, header table and data lie behind one another within the pool."""
        ends = (self.table_offset + self.entry_count * HEADER_SIZE, self.data_offset + self.entry_count * self.granule)
        ordered = SUPERBLOCK_SIZE <= self.table_offset <= ends[0] <= self.data_offset <= ends[1] <= self.size
        return ordered and min(self.granule, self.entry_count) > 0 and self.entry_base >= 0

    def data_at(self, entry: int) -> int:
        """Offset in the pool of the data of ``entry`` (a number over all pools)."""
        return self.data_offset + (entry - self.entry_base) * self.granule

    def header_at(self, entry: int) -> int:
        """Offset in the pool of the header of ``entry``."""
        return self.table_offset + (entry - self.entry_base) * HEADER_SIZE

    def to_wire(self) -> list[Any]:
        """The array that HELLO carries."""
        return [
            self.pool,
            self.backend,
            self.location,
            self.identity,
            self.size,
            self.granule,
            self.entry_base,
            self.entry_count,
            self.table_offset,
            self.data_offset,
            self.flush,
        ]

    @classmethod
    def from_wire(cls, raw: object) -> PoolDescriptor:
        """Check and decode what HELLO carried; raises ProtocolError."""
        kinds = (int, str, str, bytes, int, int, int, int, int, int, bool)
        if not isinstance(raw, list) or len(raw) != len(kinds):
            raise ProtocolError(f"a pool descriptor must be an array of {len(kinds)}, got {raw!r}")
        for value, kind in zip(raw, kinds, strict=True):
            if type(value) is not kind:
                raise ProtocolError(f"pool descriptor: expected {kind.__name__}, got {value!r}")
        return cls(*raw)
