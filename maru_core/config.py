"""Every setting: the only reader of the environment and of vLLM's ``kv_connector_extra_config``.

A value is taken from the mapping, then from the environment variable ``MARU_<NAME>``, then from the default. It is
parsed once into a frozen :class:`MaruConfig`; nothing else in Maru looks at raw settings. Kinds of values:
:mod:`maru_core.setting_kinds`; where they are looked for: :mod:`maru_core.setting_sources`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

from attrs import Attribute, field, fields, frozen

from maru_core.address import Address
from maru_core.errors import ConfigError
from maru_core.setting_kinds import (
    BOOLEAN,
    COUNT,
    ENGINES,
    GRANULE,
    LABEL,
    LISTEN,
    NAME,
    NAMES,
    OFF_OR_AUTO,
    PATH,
    PATHS,
    POOL_SIZE,
    POSITIVE,
    SECONDS,
    SECONDS_OR_NEVER,
    SHARE,
    URL,
    VERIFY,
    VISIBILITY,
    Kind,
    parse_boolean,
)
from maru_core.setting_sources import ENVIRON_PREFIX, FORMER_NAMES, PREFIX, collect, spelt
from maru_core.sizes import parse_size

__all__ = ["ENVIRON_PREFIX", "FORMER_NAMES", "PREFIX", "MaruConfig", "PluginSettings", "needs_keys", "settings"]


def _setting(default: Any, kind: Kind, text: str, unit: str = "") -> Any:
    """A field with what the documentation says about it. ``None`` as default: nothing is set."""
    return field(default=default, metadata={"kind": kind, "help": text, "unit": unit, "default": default})


@frozen(kw_only=True)
class MaruConfig:
    """All settings of one handler, server or connector; sizes in bytes, times in seconds.

    Values are checked however the object is made: anything ill-typed or out of range raises ConfigError with the key,
    the value and what was expected. ``sources`` tells for each key that is not at its default where it came from.
    """

    server_url: str = _setting(
        "auto", URL, "Address of the metadata server. `auto` finds this user's server on this host or starts one."
    )
    runtime_dir: str | None = _setting(
        None, PATH, "Folder of the server's lock, socket and log. Not set: `/tmp/maru-<uid>`."
    )
    keys: str | None = _setting(
        None,
        PATH,
        "Keys for `tcp://` addresses, made by `maru keygen`: for a server their folder, for a client that folder or "
        "its key file, with `server.pub` beside it. Not used for `ipc://`.",
    )
    metrics: str | None = _setting(
        None,
        LISTEN,
        "Where a server that an operator starts answers `GET /metrics` for Prometheus, to anybody who can reach it. "
        "Not set: nowhere.",
    )
    storage_backend: str = _setting("cpu", NAME, "Kind of memory that pools are made of, by plugin name.")
    eviction_policy: str = _setting(
        "reuse", NAME, "Which object goes first when a pool is full, by policy: `reuse`, `lru`, or a plugin's."
    )
    pool_size: int = _setting(
        "4G",
        POOL_SIZE,
        "Size of the pool, per host, headers included, when this engine starts the server. Otherwise, "
        "if it is set at all, the most that the namespace may take of the pool that is there: the largest value among "
        "its engines counts.",
    )
    pool_path: str | None = _setting(
        None,
        PATH,
        "Where the backend puts pools: for `cpu` a folder (tmpfs, hugetlbfs; not set: `/dev/shm`), for `cxl` a device.",
    )
    cpu_pool_size: int | None = _setting(
        None, POOL_SIZE, "Size of the `cpu` pool when it is to differ from `maru_pool_size`."
    )
    cxl_pool_size: int | None = _setting(
        None, POOL_SIZE, "Size of the `cxl` pool when it is to differ from `maru_pool_size`."
    )
    cxl_pool_path: str | None = _setting(
        None,
        PATHS,
        "Devices that `cxl` pools are made of, one pool each, such as `/dev/dax0.0,/dev/dax1.0`; a file or folder "
        "stands in for a device during development. Not set: `maru_pool_path` if the backend is `cxl`, else the only "
        "device.",
    )
    write_order: tuple[str, ...] = _setting(
        "cpu,cxl", NAMES, "Backends that `mixed` puts together, in the order in which new objects are placed."
    )
    read_order: tuple[str, ...] = _setting(
        (),
        NAMES,
        "Backends of `mixed` in the order in which an object is read that is in several. Not set: `maru_write_order`.",
    )
    demote: bool = _setting(
        True,
        BOOLEAN,
        "With several pools: move what is used least to the next one ahead of time rather than evict it from this one.",
    )
    promote: bool = _setting(
        False, BOOLEAN, "With several pools: copy what is read often from a later pool into an earlier one."
    )
    visibility: Literal["auto", "host", "hosts"] = _setting(
        "auto",
        VISIBILITY,
        "Who reads and writes the pools. `host`: one coherent host. `hosts`: hosts that share memory without being "
        "coherent, for which caches are written back and emptied. `auto`: `hosts` when the server listens where other "
        "hosts reach it, for pools that they can map (`cxl`, not `cpu`).",
    )
    cache_namespace: str = _setting(
        "", LABEL, "Added to the identity of everything stored: engines share only what has the same value."
    )
    engine_id: str = _setting("", LABEL, "Name of this engine in logs and stats; never part of a key.")
    instance_id: str = _setting("", LABEL, "Name of this instance in logs and stats; never part of a key.")
    chunk_size: int | None = _setting(
        None, GRANULE, "Allocation granule of the pool. Not set: derived from the KV geometry.", "bytes"
    )
    kv_chunk_tokens: int = _setting(
        256, POSITIVE, "Tokens in one stored chunk; aligned to the engine's block size with a warning.", "tokens"
    )
    eager_map: bool = _setting(True, BOOLEAN, "Map every pool at start rather than at its first use.")
    pin_pools: bool = _setting(
        True,
        BOOLEAN,
        "Register mapped pools with the GPU's driver, in the background, so that the GPU copies from and to them by "
        "itself. Only engines with a GPU do; where it cannot be done they go on without, slower.",
    )
    transfer_engine: str = _setting(
        "auto",
        NAME,
        "How bytes move between pages and pools, by engine. `auto`: the best that supports the layout and can be used "
        "here; the log says which, and why not the others.",
    )
    transfer_exclude: tuple[str, ...] = _setting(
        (), ENGINES, "Engines that `auto` does not take, to compare with and without one. Not set: it may take any."
    )
    use_layerwise: bool = _setting(
        False,
        BOOLEAN,
        "Store one object per chunk and layer, `[2, chunk_tokens, hidden]`, instead of one per chunk. Engines share "
        "with those that do the same, and not with others.",
    )
    async_load: bool = _setting(False, BOOLEAN, "Park a request that hits and load between steps.")
    async_store: bool = _setting(False, BOOLEAN, "Store after the prompt is complete, off the step's critical path.")
    overlap_load_with_compute: bool = _setting(
        False, BOOLEAN, "Compute early layers while later ones load; needs `maru_async_load`."
    )
    overlap_release_after_layers: int = _setting(
        1, POSITIVE, "Layers that must be loaded before an overlapped request is released to compute.", "layers"
    )
    overlap_spare_decodes: bool = _setting(
        True,
        BOOLEAN,
        "While other requests compute, hold an overlapped request until its step will hardly wait for the load, since "
        "they would wait with it. Off: release it as soon as `maru_overlap_release_after_layers` layers are there.",
    )
    load_admission_window: int = _setting(
        0, COUNT, "Most loads of parked requests in flight at a time; 0: no limit.", "requests"
    )
    load_timeout: float = _setting(
        10.0,
        SECONDS_OR_NEVER,
        "Deadline of the load of one parked request, from when the worker hears of it; what is not there by then is "
        "computed. Not for a load whose request computes already (`maru_overlap_load_with_compute`). 0: none. Also how "
        "long a hit waits for loads to give back what it may lease (`maru_lease_share`); 0: `maru_lookup_timeout`.",
        "seconds",
    )
    store_timeout: float = _setting(
        30.0,
        SECONDS_OR_NEVER,
        "How long a store with `maru_async_store` may take, 2 GiB of it where it is larger, before it is told to stop. "
        "A transfer engine that goes on for a second longer is stuck: the blocks are given back, and nothing is stored "
        "until it returns. 0: no limit, blocks are kept for as long as it takes.",
        "seconds",
    )
    load_or_compute: Literal["off", "auto"] = _setting(
        "off",
        OFF_OR_AUTO,
        "`auto`: compute a hit that would take longer to load, by the measured speeds of loads and of prefill and the "
        "loads that are ahead. `off`: load every hit.",
    )
    verify: Literal["off", "sample", "full"] = _setting(
        "sample",
        VERIFY,
        "Which objects get a checksum when they are stored and have it compared when they are read: none, one of 16, "
        "or all. A mismatch is a miss.",
    )
    log_timing: bool = _setting(False, BOOLEAN, "Log how long each load and store took.")
    connect_timeout: float = _setting(10.0, SECONDS, "Longest wait for the first session.", "seconds")
    request_timeout: float = _setting(2.0, SECONDS, "Deadline of one request to the server.", "seconds")
    lookup_timeout: float = _setting(
        0.5, SECONDS, "Deadline of one scheduler lookup over all its attempts; then it is a miss.", "seconds"
    )
    idle_exit: float = _setting(
        300.0,
        SECONDS_OR_NEVER,
        "A server that `auto` started ends this long after its last session; 0: never.",
        "seconds",
    )
    lease_share: float = _setting(
        0.5,
        SHARE,
        "Largest share of a pool's bytes that one session may hold leases on. Hits that need more together are "
        "loaded one after the other.",
        "fraction",
    )
    dma_grace: float = _setting(
        1.0,
        SECONDS_OR_NEVER,
        "How long the server keeps the pages of an engine that died while its devices may still be moving bytes.",
        "seconds",
    )
    sources: Mapping[str, str] = field(factory=dict, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        for attribute in settings():
            value = getattr(self, attribute.name)
            if value is not None:
                source = self.sources.get(PREFIX + attribute.name)
                object.__setattr__(self, attribute.name, _parse(attribute, value, source))
            elif attribute.default is not None:
                raise _ill_typed(attribute, value, None)
        if self.server_url != "auto" and self.keys is None and not Address.parse(self.server_url).is_local:
            raise ConfigError(needs_keys(self.server_url))
        if self.transfer_engine in self.transfer_exclude:
            raise ConfigError(
                f"maru_transfer_engine asks for {self.transfer_engine!r}, which maru_transfer_exclude excludes; "
                "unset one of them"
            )

    @classmethod
    def from_mapping(
        cls,
        extra: Mapping[str, Any],
        environ: Mapping[str, str],
        *,
        options: Mapping[str, str] | None = None,
    ) -> MaruConfig:
        """Build from vLLM's extra config (or any mapping) and the environment.

        ``options``: where ``extra`` is from a command line, the option (``--name``) of each of its keys.
        Keys without the prefix ``maru_`` belong to others and are ignored; an unknown one with it, in capitals or with
        hyphens, too, raises ConfigError that names the nearest. An unknown ``MARU_*`` variable is only warned of, and
        those that start like ``MARU_DAX_`` belong to the plugin of that name, if one is installed.
        """
        names = {attribute.name for attribute in settings()}
        values, sources = collect(names, extra, environ, options or {})
        return cls(**values, sources=sources)

    @property
    def runtime_path(self) -> str:
        """The runtime folder: ``runtime_dir``, else the folder of this user."""
        return self.runtime_dir or f"/tmp/maru-{os.getuid()}"

    def pool_size_of(self, backend: str) -> int | None:
        """Bytes of the pools of ``backend``: its own setting, else ``pool_size``.

        ``None``, for ``cxl`` only: nothing was set, so whole devices.
        """
        own = {"cpu": self.cpu_pool_size, "cxl": self.cxl_pool_size}.get(backend)
        if own is None and backend == "cxl" and not self._says_pool_size:
            return None
        return self.pool_size if own is None else own

    def size_setting_of(self, backend: str) -> str:
        """What was set to get :meth:`pool_size_of`, as whoever set it spells it: an option, a variable, or a key."""
        own = f"{backend}_pool_size" if backend in ("cpu", "cxl") else "pool_size"
        whole = backend == "cxl" and self.pool_size_of(backend) is None
        key = PREFIX + (own if whole or getattr(self, own) is not None else "pool_size")
        return spelt(key, self.sources.get(key))

    def pool_path_of(self, backend: str) -> str | None:
        """Where ``backend`` makes its pools: its own setting, else ``pool_path``; ``None`` for its default."""
        if backend != "cxl":
            return self.pool_path
        return self.cxl_pool_path or (self.pool_path if self.storage_backend == "cxl" else None)

    def quota_wish(self) -> int:
        """Bytes that the namespace shall be able to hold at a server that is there already; 0: nothing was set."""
        members = self.write_order if self.storage_backend == "mixed" else (self.storage_backend,)
        own = {"cpu": self.cpu_pool_size, "cxl": self.cxl_pool_size}
        if not self._says_pool_size and not any(own.get(name) for name in members):
            return 0
        sizes = [self.pool_size_of(name) for name in members]
        # One whole device of unknown size: then there is no limit to wish for.
        return 0 if None in sizes else sum(size for size in sizes if size is not None)

    @property
    def _says_pool_size(self) -> bool:
        default = parse_size(fields(MaruConfig).pool_size.default)
        return self.pool_size != default or PREFIX + "pool_size" in self.sources

    def describe(self) -> dict[str, tuple[Any, str]]:
        """The effective value of every key and its source: ``extra config``, ``environment``, ``default``
        or an option."""
        return {
            PREFIX + attribute.name: (
                getattr(self, attribute.name),
                self.sources.get(PREFIX + attribute.name, "default"),
            )
            for attribute in settings()
        }


@frozen
class PluginSettings:
    """Which installed plugins may be imported. ``allowed`` is ``None`` for all of them, empty for none.

    ``strict`` makes every plugin problem fatal.
    """

    allowed: tuple[str, ...] | None = None
    strict: bool = False

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> PluginSettings:
        """Read ``MARU_PLUGINS`` and ``MARU_PLUGINS_STRICT``; raises ConfigError when the latter is not a boolean."""
        names = tuple(
            dict.fromkeys(name for part in environ.get("MARU_PLUGINS", "").split(",") if (name := part.strip()))
        )
        allowed = None if not names else () if names == ("none",) else names
        strict = environ.get("MARU_PLUGINS_STRICT", "") or "0"
        try:
            return cls(allowed, parse_boolean(strict))
        except ValueError:
            raise ConfigError(f"MARU_PLUGINS_STRICT is {strict!r}; expected {BOOLEAN.expected}") from None

    def allows(self, name: str) -> bool:
        """Whether the plugin ``name`` may be imported."""
        return self.allowed is None or name in self.allowed


def needs_keys(url: str) -> str:
    """What is wrong with an address that other hosts can reach, when there are no keys."""
    return (
        f"maru_server_url {url}: an address that is not loopback is only used with keys; make some with "
        f"`maru keygen DIR` and set maru_keys to DIR (for a server: `maru serve --keys DIR`)"
    )


def settings() -> tuple[Attribute[Any], ...]:
    """The fields of MaruConfig that users set, in order; ``metadata`` has kind, help, unit and default."""
    return tuple(attribute for attribute in fields(MaruConfig) if "kind" in attribute.metadata)


def _parse(attribute: Attribute[Any], value: object, source: str | None) -> Any:
    try:
        return attribute.metadata["kind"].parse(value)
    except (ValueError, OverflowError):
        raise _ill_typed(attribute, value, source) from None


def _ill_typed(attribute: Attribute[Any], value: object, source: str | None) -> ConfigError:
    origin = "" if source is None or source.startswith("--") else f" (from the {source})"
    shown = spelt(PREFIX + attribute.name, source)
    return ConfigError(f"{shown} is {value!r}{origin}; expected {attribute.metadata['kind'].expected}")
