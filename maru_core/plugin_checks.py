"""Is this plugin one? Checks of what foreign code hands to the host; each raises PluginError that shows the value."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

import pluggy

from maru_core.contracts import BackendProvision, EngineProvision, PolicyProvision
from maru_core.errors import PluginError

Provision = TypeVar("Provision", BackendProvision, EngineProvision, PolicyProvision)

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def check_implementations(manager: pluggy.PluginManager, plugin: object) -> None:
    """Refuse a registered plugin without hooks, with hook wrappers, or with coroutine hooks."""
    callers = manager.get_hookcallers(plugin)
    if not callers:
        raise PluginError(f"{plugin!r} implements no hook; mark its functions with maru_core.plugin.hookimpl")
    for caller in callers:
        for implementation in caller.get_hookimpls():
            if implementation.plugin is not plugin:
                continue
            if implementation.hookwrapper or implementation.wrapper:
                raise PluginError(f"{caller.name} is a hook wrapper; plugins may not wrap each other's hooks")
            if inspect.iscoroutinefunction(implementation.function):
                raise PluginError(f"{caller.name} is a coroutine function; hooks are called, never awaited")


def check_provisions(hook: str, answer: object, kind: type[Provision]) -> tuple[Provision, ...]:
    """The answer of a provide hook as a tuple; ``None`` is empty."""
    if answer is None:
        return ()
    if not isinstance(answer, Sequence) or isinstance(answer, str | bytes):
        raise PluginError(f"{hook} returned {answer!r}; expected a sequence of {kind.__name__}, or None")
    for item in answer:
        if not isinstance(item, kind):
            raise PluginError(f"{hook} returned {item!r} in its sequence; expected {kind.__name__}")
        if not isinstance(item.name, str) or not _NAME.fullmatch(item.name):
            raise PluginError(f"{hook} offers the name {item.name!r}; expected letters, digits, '.', '_' and '-'")
        if not callable(item.factory):
            raise PluginError(f"{hook} offers {item.name} with {item.factory!r} as its factory; expected a callable")
        diagnose = getattr(item, "diagnose", None)
        if diagnose is not None and not callable(diagnose):
            raise PluginError(f"{hook} offers {item.name} with {diagnose!r} as its diagnose; expected a callable")
    return tuple(answer)


def check_figures(plugin: str, answer: object) -> dict[str, int | float | str]:
    """The answer of ``maru_hint_stats``: plain values under names that start with the plugin's own."""
    if answer is None:
        return {}
    if not isinstance(answer, Mapping):
        raise PluginError(f"maru_hint_stats returned {answer!r}; expected a mapping of names to plain values, or None")
    starts = (plugin, plugin.replace("-", "_"))
    for name, value in answer.items():
        if not isinstance(name, str) or not name.startswith(starts):
            raise PluginError(f"maru_hint_stats names a figure {name!r}; expected a name that starts with {plugin!r}")
        if not isinstance(value, int | float | str):
            raise PluginError(f"maru_hint_stats returned {value!r} for {name}; expected a number or text")
    return dict(answer)


def check_methods(what: str, made: Any, methods: Sequence[str]) -> None:
    """Refuse an object of a factory that lacks a method of its contract."""
    missing = [method for method in methods if not callable(getattr(made, method, None))]
    if missing:
        raise PluginError(f"{what} is {made!r}, which lacks {', '.join(missing)} of maru_core.contracts")
