"""Distributions as an installer leaves them on disk: modules and a dist-info folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent


def install(
    folder: Path,
    distribution: str,
    entries: Mapping[str, str],
    modules: Mapping[str, str],
    version: str = "1.0",
) -> str:
    """Put a distribution into ``folder`` and return the folder as a path entry.

    ``entries`` maps names of the group ``maru.plugins`` to values, ``modules`` module names to their source.
    """
    info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    lines = "".join(f"{name} = {value}\n" for name, value in entries.items())
    (info / "entry_points.txt").write_text(f"[maru.plugins]\n{lines}")
    for name, source in modules.items():
        (folder / f"{name}.py").write_text(dedent(source))
    return str(folder)


#: A plugin module with one backend called as the placeholder says.
BACKEND = """
    from maru_core.contracts import BackendProvision
    from maru_core.plugin import hookimpl

    @hookimpl
    def maru_storage_backends():
        return [BackendProvision("{name}", lambda: None)]
"""
