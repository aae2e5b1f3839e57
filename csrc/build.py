"""Builds the native code when Maru is installed, and never fails an install: a hook of hatchling that calls CMake.

Each part (``host``, ``copy``, ``cuda``) is built, or left out with a reason and a remedy; what became of it goes into a
``_build_info.json`` in each package that has a library. A wheel gets the libraries beside the modules that bind them,
an editable install puts them into the tree itself. ``python csrc/build.py`` does the latter, for a checkout that is
used through ``PYTHONPATH``.

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
from typing import Any, NamedTuple

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

#: Parts by name, with the library that each makes, in the package that binds it: targets ``maru_<name>`` of
#: CMakeLists.txt.
PARTS = {
    "host": Path("maru_backends/libmaru_host.so"),
    "copy": Path("maru_transfer/libmaru_copy.so"),
    "cuda": Path("maru_transfer/libmaru_cuda.so"),
}
BUILD_INFO = "_build_info.json"
PACKAGES = sorted({library.parent for library in PARTS.values()})
SKIP = "MARU_SKIP_KV_OPS"
#: Seconds for one run of CMake.
TIMEOUT = 1800
_LONGEST_REASON = 600
_NO = ("", "0", "false", "no", "off")


class Refusal(NamedTuple):
    """Why something is not built, and what to do for it."""

    reason: str
    remedy: str


AGAIN = "and install Maru again"
#: When the compilers are there and fail at our code.
REMEDIES = {
    "host": f"set CC to another C compiler, {AGAIN}",
    "copy": f"set CC to another C compiler, {AGAIN}",
    "cuda": f"set CUDACXX to the nvcc of another toolkit, or NVCC_CCBIN to a C++ compiler that it takes, {AGAIN}",
}


class NativeBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Called by hatchling for wheels and editable installs."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """CMake and a build tool from the package index, where there is a compiler but not these."""
        if _obstacle(cmake=False) is not None:
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
        refused = _configure(root, Path(folder))
        info = {}
        for name in PARTS:
            no = refused[name] or _make(Path(folder), name, target)
            info[name] = {
                "built": no is None,
                "reason": None if no is None else no.reason,
                "remedy": None if no is None else no.remedy,
                **_facts(Path(folder), name),
            }
            if no is None:
                info[name]["bytes"] = (target / PARTS[name]).stat().st_size
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
    lines = []
    for name, part in info.items():
        if part["built"]:
            code = f", for compute capability {part['architectures']}" if "architectures" in part else ""
            lines.append(f"maru: {name}: built ({part['bytes'] // 1024} KiB{code})")
        else:
            lines.append(f"maru: {name}: left out: {part['reason']}; {part['remedy']}")
    return lines


def _configure(root: Path, folder: Path) -> dict[str, Refusal | None]:
    """For each part why it cannot be built, ``None`` when it can."""
    no = _obstacle(cmake=True)
    if no is None:
        generator = ["-G", "Ninja"] if shutil.which("ninja") else []
        reason = _run(["cmake", "-S", str(root), "-B", str(folder), *generator])
        no = reason and Refusal(reason, f"mend that, or set {SKIP}=1, {AGAIN}")
    if no is not None:
        return dict.fromkeys(PARTS, no)
    return {name: _verdict(folder / "parts" / name) for name in PARTS}


def _verdict(file: Path) -> Refusal | None:
    said = _lines(file)
    if said == ["ready"]:
        return None
    return Refusal(_shortened(said), _shortened(_lines(file.with_name(f"{file.name}.remedy"))))


def _facts(folder: Path, name: str) -> dict[str, str]:
    """What CMake found out about a part."""
    file = folder / "parts" / f"{name}.facts"
    lines = _lines(file) if file.exists() else []
    return {key: value for key, _, value in (line.partition("=") for line in lines)}


def _lines(file: Path) -> list[str]:
    # What compilers say and variables hold is in any encoding.
    return file.read_text(encoding="utf-8", errors="replace").splitlines()


def _make(folder: Path, name: str, target: Path) -> Refusal | None:
    """Build one part into ``target``; why not, if it fails."""
    reason = _run(["cmake", "--build", str(folder), "--target", f"maru_{name}"])
    if reason is None:
        try:
            shutil.copy(folder / "lib" / PARTS[name].name, target / PARTS[name])
        except OSError as error:
            return Refusal(f"the library cannot be kept: {error}", f"make room, {AGAIN}")
    return reason and Refusal(reason, REMEDIES[name])


def _run(command: Sequence[str]) -> str | None:
    """``None`` when it ends well, else what it said, shortened to the part about the error."""
    try:
        run = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]} did not run to its end: {error}"
    if run.returncode == 0:
        return None
    lines = (run.stdout + "\n" + run.stderr).splitlines()
    first = next((i for i, line in enumerate(lines) if re.search(r"\b(error|fatal)\b", line, re.IGNORECASE)), -8)
    return f"{' '.join(command[:2])} failed with {run.returncode}: {_shortened(lines[first:])}"


def _shortened(lines: Sequence[str]) -> str:
    return " | ".join(filter(None, map(str.strip, lines)))[:_LONGEST_REASON]


def _obstacle(*, cmake: bool) -> Refusal | None:
    """Why nothing can be built; with ``cmake`` also for want of it."""
    if os.environ.get(SKIP, "").lower() not in _NO:
        return Refusal(f"{SKIP} was set when Maru was installed", f"unset it {AGAIN}")
    if not os.environ.get("CC") and not any(shutil.which(name) for name in ("cc", "gcc", "clang")):
        # Looked for here: CMake finds one outside of PATH, too, which the user may not want.
        return Refusal("no C compiler was found (CC, or cc, gcc, clang in PATH)", f"install one, {AGAIN}")
    if cmake and not shutil.which("cmake"):
        return Refusal("CMake was not found", f"install it (pip install cmake ninja), {AGAIN}")
    return None


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in describe(build_in_place(Path(__file__).parents[1])))
