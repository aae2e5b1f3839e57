"""Namespaces as the server sees them: an index of keys and a weights epoch each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
    descriptor: bytes
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
    """All namespaces by descriptor, and by the number that the directory's columns hold."""

    def __init__(self) -> None:
        self._by_descriptor: dict[bytes, NamespaceState] = {}
        self.by_number: dict[int, NamespaceState] = {}
        self._next = 0

    def __iter__(self) -> Iterator[NamespaceState]:
        return iter(self._by_descriptor.values())

    def open(self, descriptor: bytes) -> NamespaceState:
        """Find or make the namespace; raises ProtocolError when there are too many."""
        known = self._by_descriptor.get(descriptor)
        if known is not None:
            return known
        if len(self._by_descriptor) >= MAX_NAMESPACES and not self._forget_one():
            raise ProtocolError(f"{MAX_NAMESPACES} namespaces are in use; this server takes no further one")
        state = NamespaceState(self._next, descriptor, digest_of(descriptor))
        self._next += 1
        self._by_descriptor[descriptor] = self.by_number[state.number] = state
        return state

    def _forget_one(self) -> bool:
        for state in self._by_descriptor.values():
            if not (state.weights_epoch or len(state.index) or state.draining or state.objects or state.sessions):
                del self._by_descriptor[state.descriptor]
                del self.by_number[state.number]
                return True
        return False
