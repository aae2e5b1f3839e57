"""The wire protocol: the only thing that server and client share."""

from maru_core.protocol.messages import (
    MAX_KEYS,
    MAX_MESSAGE,
    NO_ENTRY,
    AdminVerb,
    Code,
    CommitStatus,
    Op,
    PoolDescriptor,
    Presence,
    ReserveStatus,
)
from maru_core.protocol.version import PROTOCOL_VERSION

__all__ = [
    "MAX_KEYS",
    "MAX_MESSAGE",
    "NO_ENTRY",
    "PROTOCOL_VERSION",
    "AdminVerb",
    "Code",
    "CommitStatus",
    "Op",
    "PoolDescriptor",
    "Presence",
    "ReserveStatus",
]
