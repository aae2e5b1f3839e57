"""Where settings come from: a mapping, the environment, former names; what nobody knows is refused or warned of."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Set
from typing import Any, Final

from maru_core import discovery, logs
from maru_core.errors import ConfigError

PREFIX: Final = "maru_"
ENVIRON_PREFIX: Final = "MARU_"
#: Variables that start like a setting and are read elsewhere: by PluginSettings, the build, or scripts and benchmarks.
OTHER_VARIABLES: Final = frozenset(
    {"MARU_PLUGINS", "MARU_PLUGINS_STRICT", "MARU_SKIP_KV_OPS", "MARU_CUDA_ARCHITECTURES", "MARU_CACHE"}
)
#: Begins names of variables that tell tests what they may use; no setting of Maru's is called so.
TEST_PREFIX: Final = "MARU_TEST_"
#: Names that settings had before; they still work and warn.
FORMER_NAMES: Final[Mapping[str, str]] = {
    "maru_enable_deferred_loading": "maru_async_load",
    "maru_enable_write_behind": "maru_async_store",
    "maru_enable_layerwise_overlap": "maru_overlap_load_with_compute",
}


def collect(
    names: Set[str], extra: Mapping[str, Any], environ: Mapping[str, str], options: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """What is set of the settings ``names``, raw and by name, and by key (with prefix) where each value came from.

    ``extra``, ``environ`` and ``options`` are those of :meth:`maru_core.config.MaruConfig.from_mapping`.
    """
    log = logs.get_logger(__name__)
    known = {PREFIX + name for name in names}
    given = {key: value for key, value in extra.items() if isinstance(key, str) and _as_key(key).startswith(PREFIX)}
    for key in given:
        if key not in known and key not in FORMER_NAMES:
            raise ConfigError(f"unknown setting {key}; the nearest is {_nearest(_as_key(key), known)}")
    variables = {
        name.lower(): value
        for name, value in environ.items()
        if name.startswith(ENVIRON_PREFIX) and name == name.upper() and value != "" and not _is_read_elsewhere(name)
    }
    unknown = [key for key in sorted(variables) if key not in known and key not in FORMER_NAMES]
    owned = _plugin_prefixes() if unknown else ()
    for key in unknown:
        if not key.startswith(owned):
            log.warning("unknown_variable", variable=key.upper(), nearest=_nearest(key, known).upper())
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for layer, spell, source in ((given, str, "extra config"), (variables, str.upper, "environment")):
        for key, value in _renamed(layer, spell).items():
            if key in known and key not in sources and value is not None:
                values[key.removeprefix(PREFIX)] = value
                sources[key] = options.get(key, source) if layer is given else source
    return values, sources


def spelt(key: str, source: str | None) -> str:
    """How a setting is called where it was set."""
    if source is not None and source.startswith("--"):
        return source
    return key.upper() if source == "environment" else key


def _as_key(key: str) -> str:
    """What was meant by a key that is spelt as a variable or an option is: ``MARU_POOL_SIZE``, ``maru-pool-size``."""
    return key.strip().lower().replace("-", "_")


def _is_read_elsewhere(variable: str) -> bool:
    return variable in OTHER_VARIABLES or variable.startswith(TEST_PREFIX)


def _renamed(layer: Mapping[str, Any], spell: Callable[[str], str]) -> dict[str, Any]:
    """``layer`` with former names replaced, each with a warning; a current name wins over a former one."""
    current = {key: value for key, value in layer.items() if key not in FORMER_NAMES}
    for former, key in FORMER_NAMES.items():
        if former in layer:
            ignored = key in current
            current.setdefault(key, layer[former])
            logs.get_logger(__name__).warning("former_setting", setting=spell(former), use=spell(key), ignored=ignored)
    return current


def _plugin_prefixes() -> tuple[str, ...]:
    """How settings of installed plugins start, such as ``maru_dax_``; built-ins have no settings of their own."""
    names = {candidate.name for candidate in discovery.candidates()}.difference(discovery.BUILT_INS)
    return tuple(f"{PREFIX}{re.sub('[^a-z0-9]', '_', name.lower())}_" for name in names)


def _nearest(key: str, known: set[str]) -> str:
    return difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.0)[0]
