"""Builds the native code when Maru is installed, and never fails an install: a hook of hatchling that calls CMake.

Each part (``host``, ``cuda``) is built or left out with a reason; both go into a ``_build_info.json`` in each package
that has a library. A wheel gets the libraries beside the modules that bind them, an editable install puts them into the
tree itself. ``python csrc/build.py`` does the latter, for a checkout that is used through ``PYTHONPATH``.

Not scikit-build-core: its editable installs, of either mode, put an import hook in front of ``PYTHONPATH``, so that a
second checkout of the same project cannot be used.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

#: Parts by name, with the library that each makes, in the package that binds it: targets ``maru_<name>`` of
#: CMakeLists.txt.
PARTS = {"host": Path("maru_backends/libmaru_host.so"), "cuda": Path("maru_transfer/libmaru_cuda.so")}
BUILD_INFO = "_build_info.json"
PACKAGES = sorted({library.parent for library in PARTS.values()})
SKIP = "MARU_SKIP_KV_OPS"
#: Seconds for one run of CMake.
TIMEOUT = 1800
_LONGEST_REASON = 600
_NO = ("", "0", "false", "no", "off")


class NativeBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Called by hatchling for wheels and editable installs."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """CMake and a build tool from the package index, where there is a compiler but not these."""
        if _skip_reason() or not _has_compiler():
            return []
        wanted = [] if shutil.which("cmake") else ["cmake>=3.20"]
        return wanted if shutil.which("ninja") or shutil.which("make") else [*wanted, "ninja>=1.11"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build, and tell hatchling what to pack."""
        root = Path(self.root)
        if version == "editable":
            info = build_in_place(root)
        else:
            # Lives until the wheel is written, see finalize.
            self._made = Path(tempfile.mkdtemp(prefix="maru-wheel-"))
            info = build(root, self._made)
            for package in PACKAGES:
                for path in (self._made / package).iterdir():
                    build_data["force_include"][str(path)] = str(package / path.name)
            if any(part["built"] for part in info.values()):
                build_data["pure_python"] = False
                # Not of one Python version: nothing in the libraries knows of Python.
                platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
                build_data["tag"] = f"py3-none-{platform}"
        for line in describe(info):
            self.app.display_info(line)

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was packed."""
        made = getattr(self, "_made", None)
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)


def build(root: Path, target: Path) -> dict[str, dict[str, Any]]:
    """Build every part of the tree ``root`` into the folder ``target``, and write there what was built."""
    for package in PACKAGES:
        (target / package).mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="maru-build-") as folder:
        info = {}
        for name, reason in _configure(root, Path(folder)).items():
            reason = reason or _make(Path(folder), name, target)
            info[name] = {"built": reason is None, "reason": reason}
    for package in PACKAGES:
        (target / package / BUILD_INFO).write_text(json.dumps(info, indent=2) + "\n")
    return info


def build_in_place(root: Path) -> dict[str, dict[str, Any]]:
    """:meth:`build` into the tree itself; what an earlier build left there is replaced or removed."""
    # Beside their final place, to be moved there in one step: processes may have the old ones mapped.
    with tempfile.TemporaryDirectory(prefix=".maru-build-", dir=root / PACKAGES[0]) as folder:
        info = build(root, Path(folder))
        for name in (*PARTS.values(), *(package / BUILD_INFO for package in PACKAGES)):
            made = Path(folder, name)
            if made.exists():
                made.replace(root / name)
            else:
                (root / name).unlink(missing_ok=True)
    return info


def describe(info: dict[str, dict[str, Any]]) -> list[str]:
    """A line per part."""
    return [
        f"maru: {name}: {'built' if part['built'] else 'left out: ' + part['reason']}" for name, part in info.items()
    ]


def _configure(root: Path, folder: Path) -> dict[str, str | None]:
    """For each part why it cannot be built, ``None`` when it can."""
    reason = _skip_reason()
    if reason is None and not _has_compiler():
        # Looked for here: CMake finds one outside of PATH, too, which the user may not want.
        reason = "no C compiler was found (CC, or cc, gcc, clang in PATH); install one and then Maru again"
    if reason is None and not shutil.which("cmake"):
        reason = "CMake was not found; install it (pip install cmake ninja) and then Maru again"
    if reason is None:
        generator = ["-G", "Ninja"] if shutil.which("ninja") else []
        reason = _run(["cmake", "-S", str(root), "-B", str(folder), *generator])
    if reason is not None:
        return dict.fromkeys(PARTS, reason)
    verdicts = {name: (folder / "parts" / name).read_text().splitlines() for name in PARTS}
    return {name: None if said == ["ready"] else _shortened(said) for name, said in verdicts.items()}


def _make(folder: Path, name: str, target: Path) -> str | None:
    """Build one part into ``target``; why not, if it fails."""
    reason = _run(["cmake", "--build", str(folder), "--target", f"maru_{name}"])
    if reason is None:
        try:
            shutil.copy(folder / "lib" / PARTS[name].name, target / PARTS[name])
        except OSError as error:
            return f"the library cannot be kept: {error}"
    return reason


def _run(command: Sequence[str]) -> str | None:
    """``None`` when it ends well, else what it said, shortened to the part about the error."""
    try:
        run = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]} did not run to its end: {error}"
    if run.returncode == 0:
        return None
    lines = (run.stdout + "\n" + run.stderr).splitlines()
    first = next((i for i, line in enumerate(lines) if re.search(r"\berror\b", line, re.IGNORECASE)), -8)
    return f"{' '.join(command[:2])} failed with {run.returncode}: {_shortened(lines[first:])}"


def _shortened(lines: Sequence[str]) -> str:
    return " | ".join(filter(None, map(str.strip, lines)))[:_LONGEST_REASON]


def _skip_reason() -> str | None:
    if os.environ.get(SKIP, "").lower() in _NO:
        return None
    return f"{SKIP} was set when Maru was installed; unset it and install again"


def _has_compiler() -> bool:
    return bool(os.environ.get("CC")) or any(shutil.which(name) for name in ("cc", "gcc", "clang"))


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in describe(build_in_place(Path(__file__).parents[1])))
