"""Debian packages, downloaded and unpacked into the cache folder instead of being installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from attrs import frozen

#: What the host needs; what of it the host has already is not downloaded.
HOST_PACKAGES: Final = ("qemu-system-x86", "debootstrap", "cpio")
#: Depends on the generic kernel of the day. The cloud kernel lacks the drivers of memory devices.
KERNEL_PACKAGE: Final = "linux-image-amd64"

_KERNEL: Final = re.compile(r"linux-image-\d[\w.+-]*-amd64")
#: Seconds for one command; a mirror that hangs must not hang the tests.
_PATIENCE: Final = 600


class NotRun(Exception):
    """The machines cannot be built here; the message says why. No failure of what they are to test."""


def command(arguments: Sequence[str | os.PathLike[str]], environ: Mapping[str, str] | None = None) -> str:
    """Run one step of the building and return what it printed; raises NotRun with its last lines."""
    shown = " ".join(map(str, arguments))
    try:
        done = subprocess.run(
            arguments,
            env={**os.environ, "DEBIAN_FRONTEND": "noninteractive", **(environ or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_PATIENCE,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotRun(f"{shown}: {error}") from error
    if done.returncode:
        raise NotRun(f"{shown}: exit code {done.returncode}: {' | '.join(done.stdout.strip().splitlines()[-3:])}")
    return done.stdout


@frozen
class Tools:
    """Programs that were unpacked below ``root``, and how to start them there."""

    root: Path

    def path(self, name: str) -> Path:
        """A program, wherever in the tree it lies; the host's own when it was installed already. Raises NotRun."""
        for folder in ("usr/bin", "bin", "usr/sbin", "sbin"):
            found = self.root / folder / name
            if found.is_file():
                return found
        installed = shutil.which(name)
        if installed is None:
            raise NotRun(f"{name} is neither in {self.root} nor on this host")
        return Path(installed)

    def data(self, *names: str) -> list[Path]:
        """The folders of these names below ``usr`` that are there, in the tree and on the host."""
        return [base / name for base in (self.root / "usr", Path("/usr")) for name in names if (base / name).is_dir()]

    @property
    def environ(self) -> dict[str, str]:
        """For programs of the tree: where their libraries, modules and scripts are."""
        triple = "x86_64-linux-gnu"
        found = {"LD_LIBRARY_PATH": f"{self.root}/usr/lib/{triple}:{self.root}/lib/{triple}"}
        modules = self.root / "usr/lib" / triple / "qemu"
        if modules.is_dir():
            found["QEMU_MODULE_DIR"] = str(modules)
        scripts = self.root / "usr/share/debootstrap"
        if scripts.is_dir():
            found["DEBOOTSTRAP_DIR"] = str(scripts)
        return found


def fetch_tools(target: Path) -> Tools:
    """Unpack the host's tools and what they depend on below ``target``; raises NotRun."""
    archives = target.parent / "archives"
    (archives / "partial").mkdir(parents=True, exist_ok=True)
    command(
        [
            *("apt-get", "install", "--yes", "--no-install-recommends", "--download-only"),
            *("-o", f"Dir::Cache::archives={archives}", "-o", "APT::Keep-Downloaded-Packages=true"),
            *("-o", "APT::Sandbox::User=root"),
            *HOST_PACKAGES,
        ]
    )
    for package in archives.glob("*.deb"):
        command(["dpkg", "-x", package, target])
    shutil.rmtree(archives)
    target.mkdir(exist_ok=True)
    return Tools(target)


def fetch_kernel(target: Path) -> None:
    """Unpack the generic kernel of the distribution below ``target``; raises NotRun."""
    names = _KERNEL.findall(command(["apt-cache", "depends", KERNEL_PACKAGE]))
    if not names:
        raise NotRun(f"{KERNEL_PACKAGE} names no kernel; is this a Debian for amd64?")
    archives = target.parent / "kernel-archive"
    archives.mkdir(exist_ok=True)
    # `apt-get download` writes into the current folder.
    command(["sh", "-c", f"cd '{archives}' && apt-get download -o APT::Sandbox::User=root {names[-1]}"])
    (package,) = archives.glob("*.deb")
    command(["dpkg", "-x", package, target])
    shutil.rmtree(archives)
