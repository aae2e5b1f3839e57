"""Namespaces as the server sees them: an index of keys, a weights epoch and a share of the pools each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from attrs import define, field

from maru_core.errors import ProtocolError
from maru_core.namespace import digest_of
from maru_core.server.index import KeyIndex, KeyTable

if TYPE_CHECKING:
    from maru_core.server.sessions import Session

#: Namespaces that one server remembers; those that hold nothing and were never reset are forgotten first.
MAX_NAMESPACES = 10_000
#: Of them, those that clients with one and the same key have opened first.
MAX_OF_KEY = 256


@define(eq=False)
class NamespaceState:
    """Objects that may share bytes. ``index`` maps a key to the first entry of its RESERVED or READY object."""

    number: int
    #: ``None`` when it was recovered and nobody has opened it yet.
    descriptor: bytes | None
    digest: bytes
    index: KeyIndex
    #: Granules per pool that objects of this namespace take, RESERVED ones included, and the share of those.
    taken: list[int]
    reserved: list[int]
    weights_epoch: int = 0
    #: Indexes that a reset took away and whose objects are not all dropped yet.
    draining: list[KeyIndex] = field(factory=list)
    #: READY objects and their lengths in bytes.
    objects: int = 0
    stored_bytes: int = 0
    sessions: dict[int, Session] = field(factory=dict)
    #: The most bytes that any session wished for; 0: none did.
    wished: int = 0
    #: Bytes that the operator set for this very namespace.
    ordered: int | None = None
    #: Bytes of granules that may be taken; ``None`` where there is no other limit than the pools.
    quota: int | None = None
    #: Public key (text) of the client that opened it first; empty without keys, and for one that was recovered.
    opener: str = ""

    def forget(self, tag: int, entry: int) -> None:
        """Take ``entry``, whose key has ``tag``, out of whichever index still has it."""
        if not self.index.remove(tag, entry):
            any(old.remove(tag, entry) for old in self.draining)

    def forget_all(self, tags: Sequence[int], entries: Sequence[int]) -> None:
        """:meth:`forget` for many."""
        for tag, entry in self.index.remove_all(tags, entries):
            self.forget(tag, entry)


class Namespaces:
    """All namespaces by digest, and by the number that the directory's columns hold.

    ``capacities``: bytes of granules per pool. ``epochs``: weights epochs that are known from before, by digest.
    ``default_quota``: bytes that a namespace may take when nothing else was ordered for it. ``on_forget`` is told the
    number of a namespace that is forgotten.
    """

    def __init__(
        self,
        table: KeyTable,
        capacities: Sequence[int],
        epochs: Mapping[bytes, int] | None = None,
        *,
        default_quota: int | None = None,
        on_forget: Callable[[int], None] = lambda number: None,
    ) -> None:
        self._table = table
        self._pools = len(capacities)
        self._whole = sum(capacities)
        self._epochs = dict(epochs or {})
        self._default_quota = default_quota
        self._on_forget = on_forget
        self._by_digest: dict[bytes, NamespaceState] = {}
        self.by_number: dict[int, NamespaceState] = {}
        self._next = 0
        self._opened: dict[str, dict[bytes, NamespaceState]] = {}

    def __iter__(self) -> Iterator[NamespaceState]:
        return iter(self._by_digest.values())

    def open(self, descriptor: bytes, opener: str = "") -> NamespaceState:
        """Find or make the namespace; raises ProtocolError when there are too many, in all or of ``opener``."""
        digest = digest_of(descriptor)
        if opener and digest not in self._by_digest:
            opened = self._opened.setdefault(opener, {})
            if len(opened) >= MAX_OF_KEY and not self._forget_one(opened.values()):
                raise ProtocolError(
                    f"{MAX_OF_KEY} namespaces of this client's key are in use; it may have no further one"
                )
            state = opened[digest] = self.of_digest(digest)
            state.opener = opener
        else:
            state = self.of_digest(digest)
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
        if len(self._by_digest) >= MAX_NAMESPACES and not self._forget_one(self._by_digest.values()):
            raise ProtocolError(f"{MAX_NAMESPACES} namespaces are in use; this server takes no further one")
        nothing = [0] * self._pools
        state = NamespaceState(
            self._next, None, digest, self.new_index(), nothing, list(nothing), self._epochs.get(digest, 0)
        )
        self._decide(state)
        self._next += 1
        self._by_digest[digest] = self.by_number[state.number] = state
        return state

    def unknown(self) -> NamespaceState:
        """One that is not among these: of a session that has not said which is its own. Holds nothing."""
        nothing = [0] * self._pools
        return NamespaceState(-1, None, b"", self.new_index(), nothing, list(nothing))

    def epochs(self) -> dict[bytes, int]:
        """Every weights epoch other than 0, by digest."""
        current = {state.digest: state.weights_epoch for state in self if state.weights_epoch}
        return self._epochs | current

    def new_index(self) -> KeyIndex:
        """An empty index."""
        return KeyIndex(self._table)

    def wish(self, state: NamespaceState, quota: int) -> None:
        """A session wants ``state`` to hold up to ``quota`` bytes (0: no wish). The largest wish ever counts."""
        if quota > state.wished:
            state.wished = quota
            self._decide(state)

    def order(self, state: NamespaceState, quota: int | None) -> None:
        """The operator lets ``state`` hold ``quota`` bytes, whatever its sessions wish; ``None``: as any other."""
        state.ordered = quota
        self._decide(state)

    def _decide(self, state: NamespaceState) -> None:
        if state.ordered is not None:
            quota = state.ordered
        else:
            most = self._whole if self._default_quota is None else self._default_quota
            quota = min(state.wished or self._whole, most)
        state.quota = quota if quota < self._whole else None

    def _forget_one(self, among: Iterable[NamespaceState]) -> bool:
        for state in among:
            if not (
                state.weights_epoch
                or len(state.index)
                or state.draining
                or any(state.taken)
                or state.sessions
                or state.ordered is not None
            ):
                del self._by_digest[state.digest]
                del self.by_number[state.number]
                if state.opener:
                    del self._opened[state.opener][state.digest]
                self._on_forget(state.number)
                return True
        return False
