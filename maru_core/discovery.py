"""What plugins are installed: entry points, read from metadata without importing anything."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any, Final

from attrs import field, frozen

from maru_core.errors import PluginError
from maru_core.plugin import NAME

GROUP: Final = f"{NAME}.plugins"
#: The distribution that Maru itself is.
DISTRIBUTION: Final = "maru-kv"
#: First-party backends and engines, as in pyproject.toml. They are part of Maru: always registered, whatever
#: ``MARU_PLUGINS`` says, and also when Maru runs from a source tree that no installer has seen.
BUILT_INS: Final[Mapping[str, str]] = {
    "cpu": "maru_backends.cpu",
    "cxl": "maru_backends.cxl",
    "mixed": "maru_backends.mixed",
    "kernel": "maru_transfer.kernel_plugin",
    "layerwise": "maru_transfer.layerwise_plugin",
    "torch-copy": "maru_transfer.torch_copy_plugin",
    "eviction": "maru_core.eviction_plugin",
}


@frozen
class Candidate:
    """One entry point that could be loaded. ``location`` is the folder that holds the distribution's metadata."""

    name: str
    value: str
    distribution: str
    version: str
    location: str
    built_in: bool = False
    #: What is wrong with the metadata itself; such a candidate bears the name of its distribution.
    damage: str = ""
    entry_point: metadata.EntryPoint = field(init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "entry_point", metadata.EntryPoint(self.name, self.value, GROUP))

    @property
    def label(self) -> str:
        """``name (distribution version, location)`` for messages."""
        return f"{self.name} ({' '.join(filter(None, (self.distribution, self.version)))}, {self.location})"

    def load(self) -> Any:
        """Import the module and return it, or the object in it; raises whatever the import raises."""
        if self.damage:
            raise PluginError(self.damage)
        return self.entry_point.load()


def system_path() -> Sequence[str]:
    """Where Python looks for distributions."""
    return sys.path


#: What :func:`candidates` searches unless told; ``maru_core.testing`` puts an empty path here.
search_path = system_path


def candidates(path: Sequence[str] | None = None) -> tuple[Candidate, ...]:
    """Every entry point of the group on ``path`` (``None``: the system's), built-ins first, then in a fixed order.

    Names may repeat: the first is the one to use. Of several copies of one distribution, the first on the path counts,
    as it does for imports.
    """
    found = list(installed(search_path() if path is None else path))
    built_in: list[Candidate] = []
    for name, value in BUILT_INS.items():
        own = [c for c in found if c.name == name and c.value == value and c.distribution == DISTRIBUTION]
        found = [candidate for candidate in found if candidate not in own]
        version, location = (own[0].version, own[0].location) if own else ("", "source tree")
        built_in.append(Candidate(name, value, DISTRIBUTION, version, location, built_in=True))
    found.sort(key=lambda c: (c.name, c.distribution, c.value))
    return (*built_in, *found)


def installed(path: Sequence[str]) -> Iterator[Candidate]:
    """The entry points of the group in the metadata of installed distributions."""
    seen: set[str] = set()
    for distribution in metadata.distributions(path=list(path)):
        name = canonical(distribution.metadata["Name"]) if "Name" in distribution.metadata else ""
        if not name or name in seen:
            continue
        seen.add(name)
        location = str(distribution.locate_file(""))
        try:
            entries = [entry for entry in distribution.entry_points if entry.group == GROUP]
        except Exception as error:  # noqa: BLE001 - which one depends on the damage and on Python's version
            damage = f"entry_points.txt cannot be read: {error}"
            yield Candidate(name, "", name, distribution.version, location, damage=damage)
            continue
        for entry in entries:
            yield Candidate(entry.name, entry.value, name, distribution.version, location)


def canonical(name: str) -> str:
    """A distribution's name as package indexes compare it."""
    return name.lower().replace("_", "-").replace(".", "-")
