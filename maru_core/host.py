"""The plugin host: which plugins are loaded, what they provide, and typed, guarded calls of their hooks.

A plugin cannot hurt its host. Whatever it raises, at import or at registration, is logged once with its name and
distribution, its hooks are not called, and Maru goes on. Hints may fail a few times and have a time budget, see
:mod:`maru_core.hints`. ``MARU_PLUGINS_STRICT=1`` turns each of these into a PluginError. Only KeyboardInterrupt passes,
because that one is the user's.
"""

from __future__ import annotations

import difflib
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal

import pluggy
from attrs import evolve, frozen

from maru_core import discovery, hookspecs, logs
from maru_core.config import PluginSettings
from maru_core.contracts import (
    BackendProvision,
    EngineProvision,
    NewPolicy,
    PolicyFactory,
    PolicyProvision,
    ReadExtent,
    Region,
    StorageBackend,
    TransferEngine,
)
from maru_core.discovery import Candidate
from maru_core.errors import BackendError, ConfigError, MaruError, PluginError, TransferError
from maru_core.foreign import pass_interrupt, show
from maru_core.hints import HINTS, Hint, HintCalls, Limits
from maru_core.plugin import NAME
from maru_core.plugin_checks import Provision, check_figures, check_implementations, check_methods, check_provisions

Status = Literal["active", "not selected", "duplicate", "failed"]

#: Seconds that a plugin may take to be imported and registered before that is a warning: every process pays them.
_SLOW_START: Final = 1.0
#: Of several plugins with one name, the one that has it.
_CLAIMS: Final = ("active", "failed")
_BACKEND_METHODS: Final = ("plan_pools", "create_pool", "adopt_pool", "map_region")
_ENGINE_METHODS: Final = ("is_available", "import_error", "unsupported", "open")
_POLICY_METHODS: Final = (
    *("add", "moved_in", "touch", "remove", "pop", "put_back", "park", "unpark", "coldest"),
    *("looked_up", "worth_of", "stored"),
)


@frozen
class PluginInfo:
    """What became of one plugin. ``reason`` says why it is not active; ``provides`` lists ``backend cpu`` and so on.

    ``hints``: the device hints that it gives, by hook. ``note``: what is worth telling about an active one.
    """

    name: str
    distribution: str
    version: str
    location: str
    status: Status
    reason: str = ""
    provides: tuple[str, ...] = ()
    built_in: bool = False
    hints: tuple[str, ...] = ()
    note: str = ""


class PluginHost:
    """Plugins of one process, as an object: build as many as you like. Thread-safe once built."""

    def __init__(self, settings: PluginSettings, limits: Limits = Limits()) -> None:  # noqa: B008 - frozen
        """An empty host; use :meth:`discover` or :meth:`with_plugins`. ``limits``: what hints may take."""
        self._settings = settings
        self._log = logs.get_logger(__name__)
        self._lock = threading.RLock()
        self._manager = pluggy.PluginManager(NAME)
        self._manager.add_hookspecs(hookspecs)
        self._infos: list[PluginInfo] = []
        self._backends: dict[str, BackendProvision] = {}
        self._engines: dict[str, EngineProvision] = {}
        self._policies: dict[str, PolicyProvision] = {}
        #: By kind (``backend``, ``engine``, ``eviction``) and name: the plugin that provides it, and the object once it
        #: is made.
        self._providers: dict[tuple[str, str], PluginInfo] = {}
        self._made: dict[tuple[str, str], Any] = {}
        self._hints: Final = HintCalls(limits, self._hint_failed, self._fail)
        #: Whether a hook on the hot path is worth the call; looked up once.
        self._listens: dict[str, bool] = dict.fromkeys(HINTS, False)

    @classmethod
    def discover(cls, settings: PluginSettings, *, path: Sequence[str] | None = None) -> PluginHost:
        """Load the built-ins and every installed plugin that ``settings`` allows; others are never imported.

        ``path`` is where to look for distributions, ``None`` for ``sys.path``. Raises PluginError in strict mode only.
        """
        host = cls(settings)
        found = discovery.candidates(path)
        host._warn_of_missing(found)
        for candidate in found:
            host._load(candidate)
        return host

    @classmethod
    def with_plugins(
        cls,
        plugins: Mapping[str, object],
        *,
        built_ins: bool = False,
        strict: bool = False,
        limits: Limits = Limits(),  # noqa: B008 - frozen
    ) -> PluginHost:
        """A host of these plugin objects (or modules), by name; nothing installed is looked at."""
        host = cls(PluginSettings(allowed=(), strict=strict), limits)
        if built_ins:
            for name, value in discovery.BUILT_INS.items():
                host._load(Candidate(name, value, discovery.DISTRIBUTION, "", "source tree", built_in=True))
        for name, plugin in plugins.items():
            info = PluginInfo(name, "given", "", type(plugin).__name__, "active")
            if host._claim(info):
                host._register(info, plugin)
        return host

    def report(self) -> list[PluginInfo]:
        """Every plugin that was found, with what became of it, in the order of registration."""
        with self._lock:
            return [
                evolve(info, provides=self._provided_by(info.name), hints=self._hints_of(info)) for info in self._infos
            ]

    def backends(self) -> dict[str, BackendProvision]:
        """Storage backends by name."""
        with self._lock:
            return dict(self._backends)

    def backend(self, name: str) -> StorageBackend:
        """The storage backend ``name``, made at its first use; raises BackendError with the known names."""
        made: StorageBackend = self._make("backend", name, self._backends, _BACKEND_METHODS, BackendError)
        return made

    def engines(self) -> dict[str, EngineProvision]:
        """Transfer engines by name, those that ``auto`` prefers first."""
        with self._lock:
            return dict(sorted(self._engines.items(), key=lambda item: (-item[1].rank, item[0])))

    def engine(self, name: str) -> TransferEngine:
        """The transfer engine ``name``, made at its first use; raises TransferError with the known names."""
        made: TransferEngine = self._make("engine", name, self._engines, _ENGINE_METHODS, TransferError)
        return made

    def policies(self) -> dict[str, PolicyProvision]:
        """Orders of eviction by name."""
        with self._lock:
            return dict(self._policies)

    def policy(self, name: str, guard: Callable[[str, PolicyFactory], PolicyFactory] | None = None) -> PolicyFactory:
        """What makes the eviction policy ``name``; raises ConfigError with the nearest of the known names.

        The result raises ConfigError when the plugin's factory fails. ``guard``: what to put around a policy that does
        not come with Maru; it is given the name as well.
        """
        with self._lock:
            if name not in self._policies:
                nearest = difflib.get_close_matches(name, sorted(self._policies), n=1, cutoff=0.0)
                near = f"; the nearest is {nearest[0]}" if nearest else ""
                raise ConfigError(self._unknown("eviction policy", name, self._policies) + near)
            provision, provider = self._policies[name], self._providers["eviction", name]

        def make(base: int, count: int, clock: Callable[[], float]) -> NewPolicy:
            try:
                made = provision.factory(base, count, clock)
                check_methods(f"eviction policy {name}", made(), _POLICY_METHODS)
            except BaseException as error:
                pass_interrupt(error)
                text = f"eviction policy {name} of plugin {provider.name} ({provider.distribution}) failed"
                raise ConfigError(f"{text}: {show(error)}") from error
            return made

        return make if provider.built_in or guard is None else guard(name, make)

    def session_opened(self, name: str, role: str) -> None:
        """See :func:`maru_core.hookspecs.maru_session_opened`."""
        self._hints.cold("maru_session_opened", {"name": name, "role": role})

    def region_mapped(self, region: Region) -> None:
        """See :func:`maru_core.hookspecs.maru_region_mapped`."""
        self._hints.cold("maru_region_mapped", {"region": region})

    @property
    def hears_reads(self) -> bool:
        """Whether any hint is told of reads; while not, nobody needs to put extents together."""
        return self._listens["maru_before_read"] or self._listens["maru_after_read"]

    def before_read(self, region: Region, extents: Sequence[ReadExtent]) -> None:
        """See :func:`maru_core.hookspecs.maru_before_read`."""
        if self._listens["maru_before_read"]:
            self._hints.hot("maru_before_read", {"region": region, "extents": extents})

    def after_read(self, region: Region, extents: Sequence[ReadExtent]) -> None:
        """See :func:`maru_core.hookspecs.maru_after_read`."""
        if self._listens["maru_after_read"]:
            self._hints.hot("maru_after_read", {"region": region, "extents": extents})

    def region_unmapping(self, region: Region) -> None:
        """See :func:`maru_core.hookspecs.maru_region_unmapping`."""
        self._hints.cold("maru_region_unmapping", {"region": region})

    def hint_stats(self) -> dict[str, int | float | str]:
        """Figures of all plugins, see :func:`maru_core.hookspecs.maru_hint_stats`."""
        merged: dict[str, int | float | str] = {}
        for plugin, answer in self._hints.cold("maru_hint_stats", {}):
            try:
                merged.update(check_figures(plugin, answer))
            except PluginError as error:
                self._hints.fail(plugin, str(error), error)
        return merged

    def hint_health(self) -> dict[str, dict[str, int | float | str]]:
        """What this host saw of each plugin's hints: calls, failures, slow calls, and why they are off."""
        return self._hints.health()

    def _provided_by(self, plugin: str) -> tuple[str, ...]:
        return tuple(f"{kind} {name}" for (kind, name), info in self._providers.items() if info.name == plugin)

    def _hints_of(self, info: PluginInfo) -> tuple[str, ...]:
        if info.status != "active":
            return ()
        return tuple(
            hook
            for hook in HINTS
            if any(i.plugin_name == info.name for i in getattr(self._manager.hook, hook).get_hookimpls())
        )

    def _warn_of_missing(self, found: Iterable[Candidate]) -> None:
        names = {candidate.name for candidate in found}
        missing = [name for name in self._settings.allowed or () if name not in names]
        if missing:
            listed = [candidate.label for candidate in found]
            if self._settings.strict:
                raise PluginError(f"MARU_PLUGINS names {missing}, which match nothing; found: {'; '.join(listed)}")
            self._log.warning("plugins_not_found", missing=missing, found=listed)

    def _load(self, candidate: Candidate) -> None:
        """Import and register one candidate, when it is allowed and its name is free."""
        info = PluginInfo(
            candidate.name,
            candidate.distribution,
            candidate.version,
            candidate.location,
            "active",
            built_in=candidate.built_in,
        )
        if not candidate.built_in and not self._settings.allows(candidate.name):
            self._infos.append(evolve(info, status="not selected", reason="not in MARU_PLUGINS"))
            return
        if not self._claim(info):
            return
        started = time.perf_counter()
        try:
            plugin = candidate.load()
        except BaseException as error:  # noqa: BLE001 - a plugin may raise SystemExit at import; see pass_interrupt
            pass_interrupt(error)
            self._fail(candidate.name, f"importing {candidate.value} failed: {show(error)}", error)
            return
        self._register(info, plugin)
        took = time.perf_counter() - started
        if took > _SLOW_START and not candidate.built_in:
            self._note_slow_start(candidate, took)

    def _note_slow_start(self, candidate: Candidate, took: float) -> None:
        note = f"importing and registering it took {took:.1f} s, in every process; let a factory import what is heavy"
        with self._lock:
            for index, info in enumerate(self._infos):
                if info.name == candidate.name and info.status == "active":
                    self._infos[index] = evolve(info, note=note)
        self._log.warning("plugin_slow", plugin=candidate.name, distribution=candidate.distribution, reason=note)

    def _claim(self, info: PluginInfo) -> bool:
        """Enter ``info`` in the list; False when an earlier plugin has the name."""
        holder = next((i for i in self._infos if i.name == info.name and i.status in _CLAIMS), None)
        if holder is None:
            self._infos.append(info)
            return True
        reason = f"the name is taken by {holder.distribution} ({holder.location})"
        self._infos.append(evolve(info, status="duplicate", reason=reason))
        self._problem("plugin_skipped", info, reason)
        return False

    def _register(self, info: PluginInfo, plugin: object) -> None:
        """Validate the plugin and take what it provides; on any problem nothing of it stays."""
        try:
            self._manager.register(plugin, info.name)
            self._manager.check_pending()
            check_implementations(self._manager, plugin)
            backends = self._provided(plugin, "maru_storage_backends", BackendProvision)
            engines = self._provided(plugin, "maru_transfer_engines", EngineProvision)
            policies = self._provided(plugin, "maru_eviction_policies", PolicyProvision)
        except BaseException as error:  # noqa: BLE001 - hooks are foreign code; see pass_interrupt
            pass_interrupt(error)
            self._fail(info.name, show(error), error)
            return
        self._add(info, "backend", backends, self._backends)
        self._add(info, "engine", engines, self._engines)
        self._add(info, "eviction", policies, self._policies)
        self._collect_hints()

    def _provided(self, plugin: object, hook: str, kind: type[Provision]) -> tuple[Provision, ...]:
        for implementation in getattr(self._manager.hook, hook).get_hookimpls():
            if implementation.plugin is plugin:
                return check_provisions(hook, implementation.function(), kind)
        return ()

    def _add(self, info: PluginInfo, kind: str, provisions: Iterable[Provision], known: dict[str, Provision]) -> None:
        for provision in provisions:
            holder = self._providers.setdefault((kind, provision.name), info)
            if known.setdefault(provision.name, provision) is not provision:
                reason = f"{kind} {provision.name} is already provided by {holder.name} ({holder.distribution})"
                self._problem("provision_skipped", info, reason)

    def _make(
        self,
        kind: str,
        name: str,
        known: Mapping[str, BackendProvision] | Mapping[str, EngineProvision],
        methods: Sequence[str],
        error_type: type[MaruError],
    ) -> Any:
        with self._lock:
            if (kind, name) in self._made:
                return self._made[kind, name]
            if name not in known:
                raise error_type(self._unknown(kind, name, known))
            provider = self._providers[kind, name]
            try:
                made = known[name].factory()
                check_methods(f"{kind} {name}", made, methods)
            except error_type:
                raise
            except BaseException as error:
                pass_interrupt(error)
                text = f"{kind} {name} of plugin {provider.name} ({provider.distribution}) failed: {show(error)}"
                raise error_type(text) from error
            self._made[kind, name] = made
            return made

    def _unknown(self, kind: str, name: str, known: Mapping[str, object]) -> str:
        for info in self._infos:
            if info.name == name and info.reason:
                return (
                    f"{kind} {name!r} is not there: plugin {name} ({info.distribution}) is {info.status}: {info.reason}"
                )
        return f"there is no {kind} {name!r}; known are {', '.join(sorted(known)) or 'none'}, see `maru plugins`"

    def _collect_hints(self) -> None:
        """Look the hint implementations up once, so that a hook that nobody implements costs nothing."""
        for hook in HINTS:
            found = [
                Hint(implementation.plugin_name, hook, implementation.function, tuple(implementation.argnames))
                for implementation in reversed(getattr(self._manager.hook, hook).get_hookimpls())
            ]
            self._hints.put(hook, found)
            self._listens[hook] = bool(found)

    def _hint_failed(self, name: str, reason: str, error: BaseException, count: int) -> None:
        """Tell about a failure after which a plugin's hints go on: the first one; the others are only counted."""
        if count > 1 and not self._settings.strict:
            return
        with self._lock:
            info = next(i for i in self._infos if i.name == name and i.status in _CLAIMS)
        self._problem("plugin_hint_failed", info, reason, error)

    def _fail(self, name: str, reason: str, error: BaseException | None = None) -> None:
        """Stop calling a plugin and tell about it, once. What it provides and others use already stays."""
        with self._lock:
            index = next(i for i, info in enumerate(self._infos) if info.name == name and info.status in _CLAIMS)
            info = self._infos[index]
            if info.status == "failed":
                return
            self._infos[index] = evolve(info, status="failed", reason=reason)
            if self._manager.has_plugin(name):
                self._manager.unregister(name=name)
            self._collect_hints()
        self._problem("plugin_failed", info, reason, error)

    def _problem(self, event: str, info: PluginInfo, reason: str, error: BaseException | None = None) -> None:
        if self._settings.strict:
            label = f"{info.name} ({info.distribution} {info.version}, {info.location})"
            raise PluginError(f"plugin {label}: {reason}; fatal because MARU_PLUGINS_STRICT is set") from error
        self._log.warning(event, plugin=info.name, distribution=info.distribution, version=info.version, reason=reason)
