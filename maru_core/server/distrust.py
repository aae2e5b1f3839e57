"""An order of eviction that is foreign code, held at arm's length.

What a policy says decides which memory is given to somebody else. So what is held is noted here, too, and a victim that
is none - leased, of another namespace, named twice - is not believed. At the first such answer, and at the first
thing that is raised, the policy is dismissed in its whole pool: what was used longest ago goes from then on.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from maru_core import logs
from maru_core.contracts import EvictionPolicy, NewPolicy, PolicyFactory
from maru_core.foreign import pass_interrupt, show
from maru_core.server.eviction import LeastRecentlyUsed, least_recently_used

#: How many times in a row a policy may say that there is a victim, and then give none.
_MOST_EMPTY = 16


def distrusted(name: str, factory: PolicyFactory) -> PolicyFactory:
    """Policies of ``factory`` that cannot hurt; ``name`` is that of the policy, for the log."""

    def make(base: int, count: int, clock: Callable[[], float]) -> NewPolicy:
        new_policy, pool = factory(base, count, clock), _Pool(name, base, count)
        return lambda: DistrustedPolicy(new_policy, pool)

    return make


class _Wrong(Exception):
    """What a policy answered cannot be."""


class _Pool:
    """What is common to the policies of one pool: who holds what, and whether they are dismissed."""

    def __init__(self, name: str, base: int, count: int) -> None:
        self.dismissed = False
        self.policies = 0
        self.base = base
        #: By entry less ``base``: the number of the policy that holds it times two, plus one if it is parked; else 0.
        self.holder = array("Q", bytes(8 * count))
        #: How often each number other than 0 is in there.
        self.counts: Counter[int] = Counter()
        self._name = name
        self._new_order = least_recently_used(base, count)
        #: What takes the place of policies, by their number, until they ask for it.
        self._orders: dict[int, LeastRecentlyUsed] = {}

    def note(self, entries: Sequence[int], code: int) -> None:
        """``code`` is said of these from now on."""
        holder, counts, base = self.holder, self.counts, self.base
        for entry in entries:
            before, holder[entry - base] = holder[entry - base], code
            if before:
                counts[before] -= 1
                if not counts[before]:
                    del counts[before]
            if code:
                counts[code] += 1

    def check(self, victims: Sequence[int], count: int, code: int) -> list[int]:
        """The same as a list of its own; raises _Wrong unless these are victims, and at most ``count``."""
        found = list(victims)
        if len(found) > count:
            raise _Wrong(f"{len(found)} victims where {count} were asked for")
        end = self.base + len(self.holder)
        for entry in found:
            if type(entry) is not int or not self.base <= entry < end or self.holder[entry - self.base] != code:
                raise _Wrong(f"the victim {entry!r}, which is leased, gone or none of its own")
        if len(set(found)) < len(found):
            raise _Wrong(f"a victim twice, of {found}")
        return found

    def dismiss(self, error: BaseException) -> None:
        """No policy of this pool is asked again. Takes as long as a look at all entries, once."""
        if self.dismissed:
            return
        self.dismissed = True
        mine: dict[int, list[int]] = {}
        for entry, code in enumerate(self.holder, self.base):
            if code:
                mine.setdefault(code >> 1, []).append(entry)
        # What is parked has not gone for a reason that will be found again.
        for number, entries in mine.items():
            self._orders[number] = self._new()
            self._orders[number].add(entries)
        logs.get_logger(__name__).error(
            "the eviction policy failed and is not used any more: what was used longest ago goes first now",
            policy=self._name,
            first_entry=self.base,
            reason=str(error) if isinstance(error, _Wrong) else show(error),
            remedy="set another maru_eviction_policy, or tell those who made this one",
        )

    def take_order(self, number: int) -> LeastRecentlyUsed:
        """What the policy of this number is replaced by."""
        return self._orders.pop(number, None) or self._new()

    def _new(self) -> LeastRecentlyUsed:
        order = self._new_order()
        assert isinstance(order, LeastRecentlyUsed)
        return order


class DistrustedPolicy:
    """See the module; :class:`.EvictionPolicy` for what each method is for."""

    def __init__(self, new_policy: NewPolicy, pool: _Pool) -> None:
        pool.policies += 1
        self._pool = pool
        self._held = 2 * pool.policies
        self._order: LeastRecentlyUsed | None = None
        #: Whether the victims that are decided about come from ``_order``.
        self._popped = False
        #: How many times in a row there was no victim though there should have been one.
        self._empty = 0
        self._theirs: EvictionPolicy | None = None
        if not pool.dismissed:
            try:
                self._theirs = new_policy()
            except BaseException as error:  # noqa: BLE001 - see pass_interrupt
                pass_interrupt(error)
                pool.dismiss(error)

    def add(self, entries: Sequence[int]) -> None:
        self._pool.note(entries, self._held)
        self._tell(lambda policy: policy.add(entries), lambda order: order.add(entries))

    def moved_in(self, entries: Sequence[int]) -> None:
        self._tell(lambda policy: policy.moved_in(entries), lambda order: None)

    def touch(self, entries: Sequence[int]) -> None:
        self._pool.note(entries, self._held)
        self._tell(lambda policy: policy.touch(entries), lambda order: order.touch(entries))

    def remove(self, entries: Sequence[int]) -> None:
        self._pool.note(entries, 0)
        self._tell(lambda policy: policy.remove(entries), lambda order: order.remove(entries))

    def pop(self, count: int, before: int | None = None) -> list[int]:
        pool = self._pool
        victims: list[int] | None = None
        if not pool.dismissed:
            victims = self._ask(lambda policy: self._victims(policy, count, before))
            # A price on the scale of a policy that is no more says nothing.
            before = None
        if victims is None:
            victims = self._own().pop(count, before)
            self._popped = True
        pool.note(victims, 0)
        return victims

    def _victims(self, policy: EvictionPolicy, count: int, before: int | None) -> list[int]:
        victims = self._pool.check(policy.pop(count, before), count, self._held)
        if victims or not count:
            self._empty = 0
            return victims
        # Else nothing could be evicted any more, of other namespaces neither. What something is worth may have changed.
        worth, held = self._coldest(policy), self._pool.counts[self._held]
        self._empty += before is not None and worth is not None and worth < before
        if (before is None and held) or self._empty > _MOST_EMPTY:
            raise _Wrong(f"no victim of {held}, of which the next one is worth {worth}")
        return victims

    def put_back(self, entries: Sequence[int]) -> None:
        self._pool.note(entries, self._held)
        self._tell(
            lambda policy: policy.put_back(entries),
            lambda order: order.put_back(entries) if self._popped else order.add(entries),
        )

    def park(self, entry: int) -> None:
        self._pool.note((entry,), self._held + 1)
        self._tell(
            lambda policy: policy.park(entry),
            lambda order: order.park(entry) if self._popped else order.add((entry,)),
        )

    def unpark(self, entry: int) -> None:
        if self._pool.holder[entry - self._pool.base] == self._held + 1:
            self._pool.note((entry,), self._held)
        self._tell(lambda policy: policy.unpark(entry), lambda order: order.unpark(entry))

    def coldest(self) -> int | None:
        answer = self._ask(lambda policy: (self._coldest(policy),))
        return self._own().coldest() if answer is None else answer[0]

    def _coldest(self, policy: EvictionPolicy) -> int | None:
        worth, held = _worth(policy.coldest()), self._pool.counts[self._held]
        if (worth is None) == (held > 0):
            raise _Wrong(f"{worth} as the worth of the next victim of {held}")
        return worth

    def looked_up(self, keys: Sequence[bytes], found: int, entries: Sequence[int], after: bytes | None = None) -> None:
        self._tell(lambda policy: policy.looked_up(keys, found, entries, after), lambda order: None)

    def worth_of(self, keys: Sequence[bytes], parent: bytes | None) -> int | None:
        answer = self._ask(lambda policy: (_worth(policy.worth_of(keys, parent)),))
        return None if answer is None else answer[0]

    def stored(self, keys: Sequence[bytes], entries: Sequence[int], parent: bytes | None) -> None:
        self._tell(lambda policy: policy.stored(keys, entries, parent), lambda order: None)

    def _tell(self, policy: Callable[[EvictionPolicy], None], order: Callable[[LeastRecentlyUsed], None]) -> None:
        """Tell the policy, or what takes its place; that knows already what the policy failed to hear."""
        if self._pool.dismissed:
            order(self._own())
        else:
            self._ask(policy)

    def _ask(self, call: Callable[[EvictionPolicy], Any]) -> Any:
        """What the policy answers; ``None`` when it is dismissed, by this maybe."""
        if self._pool.dismissed or self._theirs is None:
            return None
        try:
            return call(self._theirs)
        except BaseException as error:  # noqa: BLE001 - see pass_interrupt
            pass_interrupt(error)
            self._pool.dismiss(error)
            return None

    def _own(self) -> LeastRecentlyUsed:
        if self._order is None:
            self._order = self._pool.take_order(self._held >> 1)
        return self._order


def _worth(value: object) -> int | None:
    if value is not None and type(value) is not int:
        raise _Wrong(f"{value!r} as a worth, which must be a whole number or None")
    return value
