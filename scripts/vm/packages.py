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
PATIENCE: Final = 300


class NotRun(Exception):
    """The machines cannot be built here; the message says why. No failure of what they are to test."""


def command(
    arguments: Sequence[str | os.PathLike[str]], environ: Mapping[str, str] | None = None, folder: Path | None = None
) -> str:
    """Run one step of the building, in ``folder``, and return what it printed; raises NotRun with its last lines."""
    shown = " ".join(map(str, arguments))
    try:
        done = subprocess.run(
            arguments,
            cwd=folder,
            env={**os.environ, "DEBIAN_FRONTEND": "noninteractive", **(environ or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=PATIENCE,
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


@frozen
class Archive:
    """Debian's package archive as this host reaches it, with lists of our own below ``folder``."""

    folder: Path

    def refresh(self) -> None:
        """Read the lists anew; raises NotRun."""
        (self.folder / "lists" / "partial").mkdir(parents=True, exist_ok=True)
        (self.folder / "packages" / "partial").mkdir(parents=True, exist_ok=True)
        self.apt("apt-get", "update")

    def apt(self, *arguments: str) -> str:
        """Carry out a command that changes nothing of the host; raises NotRun."""
        return command(
            [
                *arguments,
                *("-o", f"Dir::State::lists={self.folder / 'lists'}"),
                *("-o", f"Dir::Cache={self.folder}", "-o", f"Dir::Cache::archives={self.folder / 'packages'}"),
                # Hooks of the host would look after its own files.
                *("-o", "APT::Update::Post-Invoke-Success::=true", "-o", "APT::Keep-Downloaded-Packages=true"),
                *("-o", "APT::Sandbox::User=root"),
            ],
            folder=self.folder / "packages",
        )

    def mirror(self, suite: str) -> str | None:
        """Where the host gets a suite from; ``None`` when it gets none of that name."""
        lines = self.apt("apt-get", "indextargets", "--format", "$(RELEASE) $(SITE)", "Created-By: Packages")
        sites = [line.split(" ", 1)[1] for line in lines.splitlines() if line.split(" ")[0] == suite]
        return sites[0] if sites else None

    def unpack(self, target: Path) -> None:
        """Unpack what was downloaded below ``target``, and forget it; raises NotRun."""
        target.mkdir(exist_ok=True)
        for package in (self.folder / "packages").glob("*.deb"):
            command(["dpkg", "-x", package, target])
            package.unlink()


def fetch_tools(archive: Archive, target: Path) -> Tools:
    """Unpack the host's tools, and what they need that the host has not, below ``target``; raises NotRun."""
    archive.apt("apt-get", "install", "--yes", "--no-install-recommends", "--download-only", *HOST_PACKAGES)
    archive.unpack(target)
    return Tools(target)


def fetch_kernel(archive: Archive, target: Path) -> None:
    """Unpack the generic kernel of the distribution below ``target``; raises NotRun."""
    names = _KERNEL.findall(archive.apt("apt-cache", "depends", KERNEL_PACKAGE))
    if not names:
        raise NotRun(f"{KERNEL_PACKAGE} names no kernel; is this a Debian for amd64?")
    archive.apt("apt-get", "download", names[-1])
    archive.unpack(target)
