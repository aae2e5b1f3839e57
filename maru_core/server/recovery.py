"""Rebuilds the directory from the header tables that a killed server left in memory.

Every header that holds is believed: READY objects are served again, RESERVED pages stay with the session that was
writing them, RETIRING ones stay until nobody can be reading them. A header whose CRC does not hold was being written
when the server died: nobody had been told of that object yet, or its writer had finished and was not told that it is
stored. Its pages are free, though not at once (:mod:`.withheld`). Of two READY objects with one key, which a move to
another pool leaves for an instant, the one in the pool that is written to first is served. Anything else that does not
fit together means that the table is not what a server leaves behind, and nothing of it is used.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from itertools import chain, groupby

from attrs import define

from maru_core.errors import BackendError
from maru_core.pool_format import KEY_SIZE, State
from maru_core.protocol.messages import NO_ENTRY
from maru_core.server.allocator import Allocator
from maru_core.server.arena import Arena
from maru_core.server.index import tags_of
from maru_core.server.moves import MOVER
from maru_core.server.namespaces import Namespaces, NamespaceState
from maru_core.server.objects import READY, RESERVED, RETIRING, Objects
from maru_core.server.removal import Removal
from maru_core.server.sessions import Session

#: Parents that are looked up at a time.
_LINKED = 512

#: Finds the session that was writing, by id; makes one that nobody can prove dead when its record is lost.
FindSession = Callable[[int, NamespaceState], Session]


@define
class Recovered:
    """How many objects of each kind were found, and how many headers were torn."""

    ready: int = 0
    reserved: int = 0
    #: Kept until nobody can read them: dropped, reset or deleted before.
    retiring: int = 0
    torn: int = 0
    #: Copies to another pool that were not finished, which are free at once.
    half_moved: int = 0


class Recovery:
    """Fills an empty directory; see the module."""

    def __init__(self, objects: Objects, namespaces: Namespaces, removal: Removal, find_session: FindSession) -> None:
        self._objects = objects
        self._namespaces = namespaces
        self._removal = removal
        self._find_session = find_session
        self._found = Recovered()
        #: By number of the namespace: entries that are in its index, and their parent keys as one column.
        self._parents: dict[int, tuple[array[int], bytearray]] = {}

    def run(self) -> Recovered:
        """Read every header table; raises BackendError when one is not what a server leaves behind."""
        for arena in self._objects.arenas:
            self._read(arena)
        self._link()
        for arena in self._objects.arenas:
            self._order(arena)
        return self._found

    def _read(self, arena: Arena) -> None:
        objects = self._objects
        objects.generation[arena.base : arena.end] = arena.headers.generations()
        gaps: list[tuple[int, int]] = []
        torn: list[int] = []
        behind = arena.base
        for entry, fields in arena.headers.scan():
            if fields is None:
                self._found.torn += 1
                arena.headers.clear(entry)
                torn.append(entry)
                continue
            state, generation, length, writer, _, digest, weights_epoch, parent, key = fields
            pages = arena.pages_for(length)
            if entry < behind or not 0 < pages <= arena.end - entry or state > RETIRING or not generation:
                raise BackendError(
                    f"the header of entry {entry} says state {state}, generation {generation}, {length} bytes, which "
                    f"cannot be: entries up to {behind} are taken, the pool ends at {arena.end}"
                )
            if state == RESERVED and writer == MOVER:
                # Half a copy of what is still where it was; whoever made it went with the server.
                arena.headers.change_state([entry], State.RESERVED, State.FREE)
                self._found.half_moved += 1
                continue
            if entry > behind:
                gaps.append(self._gap(arena, behind, entry, torn))
            behind = entry + pages
            namespace = self._namespaces.of_digest(digest)
            objects.pages[entry] = pages
            arena.sizes.add(pages)
            objects.tail[behind - 1] = entry
            objects.length[entry] = length
            objects.home[entry] = namespace.number
            objects.tag[entry] = tag = int.from_bytes(key[-4:], "little")
            namespace.taken[arena.number] += pages
            current = state != RETIRING and weights_epoch == namespace.weights_epoch
            current = current and namespace.index.enter(key, tag, entry)
            if state == RESERVED:
                self._reserved(arena, entry, namespace, writer, current)
            elif state == READY and current:
                self._ready(arena, entry, namespace)
            else:
                self._retiring(arena, entry, state)
            if current:
                entries, parents = self._parents.setdefault(namespace.number, (array("I"), bytearray()))
                entries.append(entry)
                parents += parent
        if behind < arena.end:
            gaps.append(self._gap(arena, behind, arena.end, torn))
        arena.free = Allocator.of_runs(arena.end - arena.base, [gap for gap in gaps if gap[1]])

    def _gap(self, arena: Arena, start: int, end: int, torn: list[int]) -> tuple[int, int]:
        """The free granules from ``start``, up to the first of the ``torn`` headers before ``end``; forgets those."""
        inside = [entry for entry in torn if start <= entry]
        torn.clear()
        if inside:
            self._removal.withheld.add(arena, inside[0], end - inside[0])
            end = inside[0]
        return start - arena.base, end - start

    def _ready(self, arena: Arena, entry: int, namespace: NamespaceState) -> None:
        objects = self._objects
        objects.state[entry] = READY
        arena.used += objects.pages[entry]
        arena.objects += 1
        namespace.objects += 1
        namespace.stored_bytes += objects.length[entry]
        self._found.ready += 1

    def _retiring(self, arena: Arena, entry: int, state: int) -> None:
        objects = self._objects
        if state != RETIRING:
            # Of an earlier weights epoch: the reset that hid it was not finished.
            arena.headers.change_state([entry], State(state), State.RETIRING)
        objects.state[entry] = RETIRING
        arena.used += objects.pages[entry]
        self._removal.keep(entry)
        self._found.retiring += 1

    def _reserved(self, arena: Arena, entry: int, namespace: NamespaceState, writer: int, current: bool) -> None:
        objects = self._objects
        session = self._find_session(writer, namespace)
        if session.namespace is not namespace:
            raise BackendError(f"session {writer} writes entry {entry} of a namespace that is not its own")
        objects.state[entry] = RESERVED
        (session.reserved if current else session.doomed).update((entry,))
        arena.reserved += objects.pages[entry]
        session.reserved_pages[arena.number] += objects.pages[entry]
        namespace.reserved[arena.number] += objects.pages[entry]
        self._found.reserved += 1

    def _order(self, arena: Arena) -> None:
        """Neither use nor age survived. Of a chain the head lies first, and is worth most."""
        state, home = self._objects.state, self._objects.home
        ready = [entry for entry in range(arena.end - 1, arena.base - 1, -1) if state[entry] == READY]
        for number, entries in groupby(ready, home.__getitem__):
            arena.tenants.add(number, list(entries))

    def _link(self) -> None:
        """Parents by their keys, but no cycle, which keys alone do not rule out: it could never be evicted."""
        objects = self._objects
        parent = objects.parent
        for number, (entries, parents) in self._parents.items():
            index = self._namespaces.by_number[number].index
            for at in range(0, len(entries), _LINKED):
                packed = bytes(parents[at * KEY_SIZE : (at + _LINKED) * KEY_SIZE])
                for entry, elder in zip(entries[at : at + _LINKED], index.find(packed, tags_of(packed)), strict=True):
                    if elder is not None and elder != entry:
                        parent[entry] = elder
        walk = array("I", bytes(4 * objects.total))
        linked = array("I", chain.from_iterable(entries for entries, _ in self._parents.values()))
        for number, entry in enumerate(linked, 1):
            while not walk[entry]:
                walk[entry] = number
                if parent[entry] == NO_ENTRY:
                    break
                if walk[parent[entry]] == number:
                    parent[entry] = NO_ENTRY
                    break
                entry = parent[entry]
        for entry in linked:
            elder = parent[entry]
            if elder != NO_ENTRY:
                objects.parent_generation[entry] = objects.generation[elder]
                objects.children[elder] += 1
        objects.note_cross(linked)
        self._parents.clear()
