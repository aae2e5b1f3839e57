"""Namespaces as the server sees them: an index of keys and a weights epoch each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from attrs import define, field

from maru_core.errors import ProtocolError
from maru_core.namespace import digest_of
from maru_core.server.index import KeyIndex

if TYPE_CHECKING:
    from maru_core.server.sessions import Session

#: Namespaces that one server remembers; those that hold nothing and were never reset are forgotten first.
MAX_NAMESPACES = 10_000


@define(eq=False)
class NamespaceState:
    """Objects that may share bytes. ``index`` maps a key to the first entry of its RESERVED or READY object."""

    number: int
    #: ``None`` when it was recovered and nobody has opened it yet.
    descriptor: bytes | None
    digest: bytes
    weights_epoch: int = 0
    index: KeyIndex = field(factory=KeyIndex)
    #: Indexes that a reset took away and whose objects are not all dropped yet.
    draining: list[KeyIndex] = field(factory=list)
    #: READY objects and their lengths in bytes.
    objects: int = 0
    stored_bytes: int = 0
    sessions: dict[int, Session] = field(factory=dict)

    def forget(self, key: bytes, entry: int) -> None:
        """Take ``entry`` out of whichever index still has it under ``key``."""
        if not self.index.remove(key, entry):
            any(old.remove(key, entry) for old in self.draining)

    def forget_all(self, keys: Iterable[bytes], entries: Iterable[int]) -> None:
        """:meth:`forget` for many."""
        for key, entry in self.index.remove_all(keys, entries):
            self.forget(key, entry)


class Namespaces:
    """All namespaces by digest, and by the number that the directory's columns hold.

    ``epochs``: weights epochs that are known from before, by digest.
    """

    def __init__(self, epochs: Mapping[bytes, int] | None = None) -> None:
        self._epochs = dict(epochs or {})
        self._by_digest: dict[bytes, NamespaceState] = {}
        self.by_number: dict[int, NamespaceState] = {}
        self._next = 0

    def __iter__(self) -> Iterator[NamespaceState]:
        return iter(self._by_digest.values())

    def open(self, descriptor: bytes) -> NamespaceState:
        """Find or make the namespace; raises ProtocolError when there are too many."""
        state = self.of_digest(digest_of(descriptor))
        if state.descriptor is None:
            state.descriptor = descriptor
        elif state.descriptor != descriptor:
            raise ProtocolError(f"another namespace has the digest {state.digest.hex()}; change the cache namespace")
        return state

    def of_digest(self, digest: bytes) -> NamespaceState:
        """Find or make the namespace of this digest; raises ProtocolError when there are too many."""
        known = self._by_digest.get(digest)
        if known is not None:
            return known
        if len(self._by_digest) >= MAX_NAMESPACES and not self._forget_one():
            raise ProtocolError(f"{MAX_NAMESPACES} namespaces are in use; this server takes no further one")
        state = NamespaceState(self._next, None, digest, self._epochs.get(digest, 0))
        self._next += 1
        self._by_digest[digest] = self.by_number[state.number] = state
        return state

    def epochs(self) -> dict[bytes, int]:
        """Every weights epoch other than 0, by digest."""
        current = {state.digest: state.weights_epoch for state in self if state.weights_epoch}
        return self._epochs | current

    def _forget_one(self) -> bool:
        for state in self._by_digest.values():
            if not (state.weights_epoch or len(state.index) or state.draining or state.objects or state.sessions):
                del self._by_digest[state.digest]
                del self.by_number[state.number]
                return True
        return False
