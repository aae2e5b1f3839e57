"""What is known of each object, in plain packed columns, and which object precedes which.

Columns are indexed by an object's first entry. Batches go through them with comprehensions and slices, so that 64 keys
cost tens of microseconds.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence

from maru_core.pool_format import KEY_SIZE, State
from maru_core.protocol.messages import NO_ENTRY
from maru_core.server.arena import Arena

FREE, RESERVED, READY, RETIRING = (int(state) for state in State)
#: A replica: its header says READY, but it is in no index and in no prefix tree; what it is a copy of is.
REPLICA = 1 + max(State)

#: Neighbouring objects of one size: pool, granules per object, first entry, number of objects.
Run = tuple[Arena, int, int, int]


class Postponed:
    """Bookkeeping that no reply has to wait for. It is done before anybody looks at what it changes."""

    def __init__(self) -> None:
        self._acts: list[Callable[[], None]] = []

    def add(self, act: Callable[[], None]) -> None:
        """Do ``act`` later."""
        self._acts.append(act)

    def settle(self) -> None:
        """Do all that was put off. What one raises is raised, and the others are done the next time."""
        if self._acts:
            acts, self._acts = self._acts, []
            for done, act in enumerate(acts, 1):
                try:
                    act()
                except BaseException:
                    self._acts[:0] = acts[done:]
                    raise


class Objects:
    """Columns over the entries of all pools. ``total``: number of entries."""

    def __init__(self, arenas: Sequence[Arena]) -> None:
        self.arenas = list(arenas)
        self._bases = [arena.base for arena in self.arenas]
        self._single = self.arenas[0] if len(self.arenas) == 1 else None
        self.total = total = self.arenas[-1].end
        #: Each entry's own number: a slice of it is a column of entries in even steps.
        self.entry = array("I", range(total))
        self.state = bytearray(total)
        self.generation = array("I", bytes(4 * total))
        self.pages = array("I", bytes(4 * total))
        #: Indexed by *last* entry; leads back to the first.
        self.tail = array("I", bytes(4 * total))
        self.length = array("Q", bytes(8 * total))
        #: Number of the namespace.
        self.home = array("I", bytes(4 * total))
        self.readers = array("I", bytes(4 * total))
        self.children = array("I", bytes(4 * total))
        self.parent = array("I", [NO_ENTRY]) * total
        self.parent_generation = array("I", bytes(4 * total))
        #: Tag of the key (:func:`maru_core.server.index.tags_of`); the key itself is in the header.
        self.tag = array("I", bytes(4 * total))
        #: Links between pools: children that lie in another pool than their parent, by parent.
        self.cross: dict[int, set[int]] = {}
        #: The replica of an object in another pool, and the same the other way round.
        self.replica: dict[int, int] = {}
        self.original: dict[int, int] = {}

    def is_free(self, entry: int) -> bool:
        """Whether there is no object at ``entry``, which may be any number."""
        return entry >= self.total or self.state[entry] == FREE

    def arena_of(self, entry: int) -> Arena:
        """The pool that ``entry`` is in."""
        return self._single or self.arenas[bisect_right(self._bases, entry) - 1]

    def by_arena(self, entries: Sequence[int]) -> Iterable[tuple[Arena, Sequence[int]]]:
        """``entries`` grouped by pool, order kept; nothing for an empty list."""
        if not entries:
            return ()
        if self._single is not None:
            return ((self._single, entries),)
        groups: dict[int, list[int]] = {}
        for entry in entries:
            groups.setdefault(bisect_right(self._bases, entry) - 1, []).append(entry)
        return [(self.arenas[number], part) for number, part in groups.items()]

    def same_keys(self, entries: Sequence[int], packed: bytes) -> bool:
        """Whether these objects have these keys, ``packed`` as one column. :class:`~.index.KeyTable`"""
        found = self.steps(entries) if len(entries) > 1 else None
        if found is not None:
            return self.arena_of(entries[0]).headers.same_keys(found, packed)
        for at, entry in zip(range(0, len(packed), KEY_SIZE), entries, strict=True):
            if self.arena_of(entry).headers.key(entry) != packed[at : at + KEY_SIZE]:
                return False
        return True

    def steps(self, entries: Sequence[int]) -> slice | None:
        """The slice that names ``entries``, in this order, in every column; ``None`` when there is none.

        There is one when they lie in even steps inside one pool, as neighbours of one size do. They differ then.
        """
        count = len(entries)
        if not count:
            return None
        first, last = entries[0], entries[-1]
        step = entries[1] - first if count > 1 else 1
        if step <= 0 or last - first != step * (count - 1) or last >= self.total:
            return None
        if self._single is None and self.arena_of(first) is not self.arena_of(last):
            return None
        found = slice(first, last + 1, step)
        even = self.entry[found]
        return found if even == entries or even.tolist() == entries else None

    def pages_of(self, entries: Sequence[int]) -> int:
        """Granules that ``entries`` have in all."""
        found = self.steps(entries)
        pages = self.pages
        return sum(pages[found] if found is not None else [pages[entry] for entry in entries])

    def length_of(self, entries: Sequence[int]) -> int:
        """Bytes that ``entries`` have in all."""
        found = self.steps(entries)
        length = self.length
        return sum(length[found] if found is not None else [length[entry] for entry in entries])

    def fill(self, runs: Sequence[Run], tags: array[int], length: int, home: int) -> None:
        """Enter objects that were reserved just now."""
        done = 0
        for _, pages, start, pieces in runs:
            end = start + pieces * pages
            first = slice(start, end, pages)
            self.state[first] = bytes([RESERVED]) * pieces
            self.pages[first] = array("I", [pages]) * pieces
            self.tail[start + pages - 1 : end : pages] = self.entry[first]
            self.length[first] = array("Q", [length]) * pieces
            self.home[first] = array("I", [home]) * pieces
            self.children[first] = array("I", bytes(4 * pieces))
            self.parent[first] = array("I", [NO_ENTRY]) * pieces
            self.tag[first] = tags[done : done + pieces]
            done += pieces

    def link_chain(self, elder: int | None, entries: array[int], generations: array[int]) -> None:
        """Each of ``entries`` is the parent of the next, ``elder`` that of the first."""
        if not entries:
            return
        parent, parent_generation, children = self.parent, self.parent_generation, self.children
        head, last, count = entries[0], entries[-1], len(entries)
        if elder is not None:
            parent[head] = elder
            parent_generation[head] = self.generation[elder]
            children[elder] += 1
        found = self.steps(entries)
        if found is not None:
            step = found.step
            parent[head + step : last + 1 : step] = entries[:-1]
            parent_generation[head + step : last + 1 : step] = generations[:-1]
            children[head:last:step] = array("I", [1]) * (count - 1)
            return
        previous = head
        for entry, generation in zip(entries[1:], generations, strict=False):
            parent[entry] = previous
            parent_generation[entry] = generation
            children[previous] = 1
            previous = entry

    def link(
        self, keys: Sequence[bytes], parents: Sequence[bytes], elders: Sequence[int | None], entries: array[int]
    ) -> None:
        """Tell children from heads. A link leads to an object that was there before its child, so there is no cycle."""
        parent, generation = self.parent, self.generation
        parent_generation, children = self.parent_generation, self.children
        earlier: dict[bytes, int] = {}
        for key, name, elder, entry in zip(keys, parents, elders, entries, strict=False):
            if elder is None:
                elder = earlier.get(name)
            if elder is not None:
                parent[entry] = elder
                parent_generation[entry] = generation[elder]
                children[elder] += 1
            earlier[key] = entry

    def note_cross(self, entries: Iterable[int]) -> None:
        """Remember those of ``entries``, which were linked just now, whose parent lies in another pool."""
        if self._single is not None:
            return
        parent = self.parent
        low = high = 0
        for entry in entries:
            if not low <= entry < high:
                arena = self.arena_of(entry)
                low, high = arena.base, arena.end
            elder = parent[entry]
            if elder != NO_ENTRY and not low <= elder < high:
                self.cross.setdefault(elder, set()).add(entry)

    def is_top(self, entry: int) -> bool:
        """Whether all children of ``entry`` lie in other pools than itself; also when it has none."""
        return self.children[entry] == len(self.cross.get(entry, ()))

    def unlink(self, entry: int) -> None:
        """``entry`` leaves: its parent, if it is still the object it was, has a child less."""
        elder = self.parent[entry]
        if self.cross:
            self.cross.pop(entry, None)
        if elder != NO_ENTRY:
            self.parent[entry] = NO_ENTRY
            if self.generation[elder] == self.parent_generation[entry]:
                if self.cross:
                    self._uncross(elder, entry)
                self.drop_child(elder)

    def drop_child(self, elder: int) -> None:
        """``elder`` has a child less, and may be evicted after the last one."""
        self.children[elder] -= 1
        if not self.children[elder] or (self.cross and self.is_top(elder)):
            self.arena_of(elder).tenants.unpark(self.home[elder], elder)

    def relink(self, old: int, new: int) -> None:
        """The object at ``old``, all of whose children are in other pools, is at ``new`` from now on."""
        parent, parent_generation, generation = self.parent, self.parent_generation, self.generation
        children = self.cross.pop(old, set())
        for child in children:
            parent[child], parent_generation[child] = new, generation[new]
        self.children[new], self.children[old] = len(children), 0
        self.note_cross(children)
        elder = parent[old]
        parent[old] = NO_ENTRY
        if elder == NO_ENTRY or generation[elder] != parent_generation[old]:
            return
        if self.state[elder] not in (RESERVED, READY):
            return
        parent[new], parent_generation[new] = elder, generation[elder]
        self._uncross(elder, old)
        self.note_cross((new,))
        if self.is_top(elder):
            self.arena_of(elder).tenants.unpark(self.home[elder], elder)

    def pair(self, original: int, replica: int) -> None:
        """``replica`` is a copy of ``original`` from now on, whatever either was before."""
        self.state[original], self.state[replica] = READY, REPLICA
        self.replica[original], self.original[replica] = replica, original

    def part(self, replica: int) -> None:
        """``replica`` is no copy any more; its state is the caller's business."""
        del self.replica[self.original.pop(replica)]

    def _uncross(self, elder: int, child: int) -> None:
        links = self.cross.get(elder)
        if links is not None:
            links.discard(child)
            if not links:
                del self.cross[elder]
