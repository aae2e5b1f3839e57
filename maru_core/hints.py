"""Calls of device hints, bounded: a hint may make a load faster, and can neither break it nor slow it down for long.

Two kinds of hooks. Those on the hot path (:data:`HOT`) run on the thread that loads, because handing them to another
one would cost more than they take. Python cannot interrupt them: one that hangs holds up the load that it was called
from, once; it is not called again, by other threads neither while it still hangs. All others run on a thread of their
own that the caller waits for, :attr:`Limits.wait` at most; one that takes longer is left behind.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from attrs import define, field, frozen

from maru_core.foreign import BoundedCall, pass_interrupt, show

#: Hooks that run on the thread that loads.
HOT: Final = ("maru_before_read", "maru_after_read")
#: Hooks that run while a handler works; the others run when the host is built.
HINTS: Final = ("maru_session_opened", "maru_region_mapped", *HOT, "maru_region_unmapping", "maru_hint_stats")
#: A call over its budget counts this much, one within it takes 1 away: slow now and then is a busy machine, slow once
#: in five calls is the hint.
_SLOW: Final = 4


@frozen
class Limits:
    """What a plugin's hints may take in one process, in seconds; beyond it none of them is called again."""

    #: A call on the hot path that takes longer is counted; one is given up that does so ``slow`` times.
    budget: float = 0.0002
    slow: int = 8
    #: A call on the hot path that takes as long as this ends it at once. Not less: where a container's share of the CPU
    #: is used up, any code stands still for tenths of a second.
    hang: float = 1.0
    #: Longest wait for a hook that is not on the hot path.
    wait: float = 2.0
    #: So many times it may raise, or answer what it may not.
    failures: int = 3


@define
class Health:
    """What was seen of one plugin's hints. ``longest`` in seconds; ``off`` says why they are not called any more."""

    calls: int = 0
    failures: int = 0
    slow: int = 0
    longest: float = 0.0
    off: str = ""
    score: int = 0

    def figures(self) -> dict[str, int | float | str]:
        """For stats."""
        return {
            "calls": self.calls,
            "failures": self.failures,
            "slow": self.slow,
            "longest_ms": round(self.longest * 1e3, 3),
            "off": self.off,
        }


@define(eq=False)
class Hint:
    """One plugin's implementation of one hint."""

    plugin: str
    hook: str
    function: Callable[..., Any]
    argnames: tuple[str, ...]
    #: When each thread that is in it now entered it.
    inside: dict[int, float] = field(factory=dict)


class HintCalls:
    """Calls hints and keeps count. Thread-safe.

    ``failed`` is told of a failure that does not end a plugin's hints, and which one it is; ``ended`` of the reason why
    they end. Either may raise, and then the caller of the hint gets that.
    """

    def __init__(
        self,
        limits: Limits,
        failed: Callable[[str, str, BaseException, int], None],
        ended: Callable[[str, str, BaseException | None], None],
    ) -> None:
        self._limits = limits
        self._failed = failed
        self._ended = ended
        self._lock = threading.Lock()
        self._health: dict[str, Health] = {}
        self._hints: dict[str, tuple[Hint, ...]] = dict.fromkeys(HINTS, ())

    def put(self, hook: str, hints: Sequence[Hint]) -> None:
        """From now on these are the implementations of ``hook``."""
        known = {hint.function: hint for hint in self._hints[hook]}
        self._hints[hook] = tuple(known.get(hint.function, hint) for hint in hints)
        for hint in hints:
            self._health.setdefault(hint.plugin, Health())

    def health(self) -> dict[str, dict[str, int | float | str]]:
        """By plugin: calls, failures, slow calls, the longest call in milliseconds, and why they are off."""
        return {plugin: health.figures() for plugin, health in list(self._health.items())}

    def hot(self, hook: str, arguments: Mapping[str, Any]) -> None:
        """Call every implementation of a hook on the hot path, here and now."""
        for hint in self._hints[hook]:
            self._call_hot(hint, [arguments[name] for name in hint.argnames])

    def cold(self, hook: str, arguments: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """Call every implementation of another hook; the plugins that answered in time, with their answers."""
        answers = []
        for hint in self._hints[hook]:
            started = time.perf_counter()
            given = [arguments[name] for name in hint.argnames]
            call = BoundedCall(f"maru-hint-{hint.plugin}", partial(hint.function, *given))
            over = not call.wait(self._limits.wait)
            self._count(hint, time.perf_counter() - started, hot=False)
            if over:
                self._end(hint.plugin, _too_long(hook, self._limits.wait, "was left behind"))
            elif call.error is not None:
                self.fail(hint.plugin, f"{hook} raised {show(call.error)}", call.error)
            else:
                answers.append((hint.plugin, call.answer))
        return answers

    def fail(self, plugin: str, reason: str, error: BaseException) -> None:
        """Count a failure; the last one that is allowed ends the plugin's hints. A real KeyboardInterrupt passes."""
        pass_interrupt(error)
        with self._lock:
            health = self._health.setdefault(plugin, Health())
            health.failures += 1
            count, off = health.failures, health.off
        if off:
            return
        if count < self._limits.failures:
            self._failed(plugin, f"{reason}; its hints end at {self._limits.failures} failures", error, count)
        else:
            self._end(plugin, f"{reason}; {count} failures in all", error)

    def _call_hot(self, hint: Hint, arguments: Sequence[Any]) -> None:
        limits, inside, ident = self._limits, hint.inside, threading.get_ident()
        started = time.perf_counter()
        if inside:
            longest = started - min(list(inside.values()), default=started)
            if longest >= limits.hang:
                self._end(hint.plugin, _too_long(hint.hook, longest, "has not come back on another thread"))
                return
        inside[ident] = started
        try:
            hint.function(*arguments)
        except BaseException as error:  # noqa: BLE001 - hints are foreign code; fail() lets an interrupt pass
            self.fail(hint.plugin, f"{hint.hook} raised {show(error)}", error)
        finally:
            inside.pop(ident, None)
            took = time.perf_counter() - started
            slow = self._count(hint, took, hot=True)
        if took >= limits.hang:
            self._end(hint.plugin, _too_long(hint.hook, took, "held up the load"))
        elif slow:
            text = f"{hint.hook} took more than {limits.budget * 1e3:g} ms again and again, {slow}"
            self._end(hint.plugin, f"{text}; {_REMEDY}")

    def _count(self, hint: Hint, took: float, *, hot: bool) -> str:
        """Note one call; what was seen, when it is too much."""
        health = self._health[hint.plugin]
        # Without the lock: on the hot path, and a count that is one too low hurts nobody.
        health.calls += 1
        if took > health.longest:
            health.longest = took
        if not hot:
            return ""
        if took <= self._limits.budget:
            if health.score:
                health.score -= 1
            return ""
        health.slow += 1
        health.score += _SLOW
        if health.score < _SLOW * self._limits.slow:
            return ""
        return f"{health.slow} times in {health.calls} calls, the longest {health.longest * 1e3:.1f} ms"

    def _end(self, plugin: str, reason: str, error: BaseException | None = None) -> None:
        with self._lock:
            health = self._health.setdefault(plugin, Health())
            if health.off:
                return
            health.off = reason
        for hook, hints in self._hints.items():
            self._hints[hook] = tuple(hint for hint in hints if hint.plugin != plugin)
        self._ended(plugin, reason, error)


_REMEDY: Final = "let a thread of the plugin's own do the work, or leave the plugin out of MARU_PLUGINS"


def _too_long(hook: str, took: float, what: str) -> str:
    return f"{hook} {what} after {took:.3g} s; {_REMEDY}"
