"""What a guest boots from: kernel, initial file system, root folder, and this checkout with what it needs."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Final

from attrs import frozen

from scripts.vm.packages import PATIENCE, Archive, NotRun, Tools, command, fetch_kernel, fetch_tools

ROOT: Final = Path(__file__).resolve().parent.parent.parent
HERE: Final = Path(__file__).resolve().parent
SUITE: Final = "bookworm"
#: Beside the minimal system.
GUEST_PACKAGES: Final = ("ndctl", "daxctl", "python3", "kmod", "iproute2")
#: What the tests inside need beside Maru's own dependencies.
TEST_PACKAGES: Final = ("hypothesis", "pytest", "pytest-timeout", "pytest-xdist")
#: Drivers that a guest loads, in this order; what they depend on comes along.
DRIVERS: Final = (
    *("virtio_pci", "9pnet_virtio", "9p", "virtio_net", "virtio_rng"),
    *("nfit", "nd_pmem", "dax_pmem", "device_dax"),
)
#: Of the minimal system, what no test needs: a guest keeps its whole root in memory.
USELESS: Final = (
    *("var/cache/apt", "var/lib/apt", "var/lib/dpkg/info", "var/log"),
    *("usr/share/doc", "usr/share/locale", "usr/share/man", "usr/share/perl5", "usr/share/i18n", "usr/share/info"),
    *("usr/lib/x86_64-linux-gnu/gconv", "usr/lib/x86_64-linux-gnu/perl-base", "usr/lib/apt"),
    *("usr/lib/udev/hwdb.d", "usr/share/zoneinfo"),
)
#: Of the checkout, what a guest gets.
CHECKOUT: Final = (
    *("maru_core", "maru_backends", "maru_transfer", "maru_integrations", "maru_plugins_dax"),
    *("tests", "scripts", "csrc", "pyproject.toml"),
)
#: Written last: what was built, so that a change of this file or an interruption builds again.
STAMP: Final = "built"


@frozen
class Image:
    """A finished build in ``folder``."""

    folder: Path

    @property
    def kernel(self) -> Path:
        (found,) = (self.folder / "kernel" / "boot").glob("vmlinuz-*")
        return found

    @property
    def initramfs(self) -> Path:
        """The system and, behind it, the checkout: the whole root, which a guest keeps in memory."""
        return self.folder / "initramfs"

    @property
    def root(self) -> Path:
        return self.folder / "root"

    @property
    def tools(self) -> Tools:
        return Tools(self.folder / "tools")


def cache_folder() -> Path:
    """Where the machines are built: ``$MARU_CACHE/vm``, by default ``.cache/vm`` of the repository.

    Below pytest, which takes Maru's settings away, the former is called ``MARU_TEST_CACHE``.
    """
    chosen = os.environ.get("MARU_TEST_CACHE") or os.environ.get("MARU_CACHE")
    return Path(chosen or ROOT / ".cache").absolute() / "vm"


@contextmanager
def prepared() -> Iterator[Image]:
    """The image, built if need be, with this checkout in it, for the caller alone. Raises NotRun."""
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise NotRun(f"another run uses {folder}; wait for it, or set MARU_CACHE") from None
        image = Image(folder)
        if not is_built(image):
            build(image)
        lay_checkout(image)
        yield image


def recipe() -> str:
    """Identifies how images are built now."""
    digest = hashlib.sha256(repr((SUITE, GUEST_PACKAGES, DRIVERS, requirements())).encode())
    for name in ("packages.py", "image.py"):
        digest.update((HERE / name).read_bytes())
    return digest.hexdigest()


def is_built(image: Image) -> bool:
    """Whether the folder holds what would be built now."""
    try:
        return (image.folder / STAMP).read_text() == recipe()
    except OSError:
        return False


def build(image: Image) -> None:
    """Make everything new; raises NotRun when this host cannot."""
    check_host()
    for name in (STAMP, "root", "tools", "kernel", "system", "initramfs", "archive"):
        remove(image.folder / name)
    say("downloading the emulator and a kernel")
    archive = Archive(image.folder / "archive")
    archive.refresh()
    tools = fetch_tools(archive, image.tools.root)
    fetch_kernel(archive, image.folder / "kernel")
    say(f"making a root folder of {SUITE} (one to two minutes)")
    included = f"--include={','.join(GUEST_PACKAGES)}"
    mirror = archive.mirror(SUITE)
    command(
        [
            *(tools.path("debootstrap"), "--variant=minbase", included, SUITE, image.root),
            *(() if mirror is None else (mirror,)),
        ],
        tools.environ,
    )
    remove(archive.folder)
    say("putting drivers and Python packages into it")
    install_drivers(image)
    install_python(image)
    for name in USELESS:
        remove(image.root / name)
    pack(image, "", image.folder / "system")
    (image.folder / STAMP).write_text(recipe())


def check_host() -> None:
    """Raises NotRun when images cannot be made here."""
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        raise NotRun(f"the machines are for Linux on x86_64, this is {sys.platform} on {os.uname().machine}")
    if os.geteuid():
        raise NotRun("only root can make the root folder (debootstrap)")
    for name in ("apt-get", "apt-cache", "dpkg", "setpriv"):
        if shutil.which(name) is None:
            raise NotRun(f"there is no {name}; only a Debian can build the machines")


def install_drivers(image: Image) -> None:
    """Copy the drivers with what they depend on, and the list of them that the guest reads."""
    kernel = image.folder / "kernel"
    (modules,) = (kernel / "lib" / "modules").iterdir()
    # The whole folder is there for a moment: only the guest's depmod can tell what depends on what.
    inside = image.root / "usr" / "lib" / "modules" / modules.name
    shutil.copytree(modules, inside, symlinks=True)
    command(["chroot", image.root, "depmod", modules.name])
    needs = dict(line.split(":", 1) for line in (inside / "modules.dep").read_text().splitlines())
    by_name = {re.sub(r"\.ko.*", "", Path(path).name).replace("-", "_"): path for path in needs}
    # What has no file is built into this kernel.
    drivers = [driver for driver in DRIVERS if driver in by_name]
    wanted = {path for driver in drivers for path in (by_name[driver], *needs[by_name[driver]].split())}
    for path in needs.keys() - wanted:
        (inside / path).unlink()
    command(["chroot", image.root, "depmod", modules.name])
    (image.root / "etc" / "maru-drivers").write_text(" ".join(drivers) + "\n")
    for useless in modules.parent, kernel / "usr":
        remove(useless)


def pack(image: Image, folder: str, target: Path) -> None:
    """Write a folder of the root as an archive that the kernel unpacks; raises NotRun."""
    top = image.root / folder
    listing = sorted(str(path.relative_to(image.root)) for path in (top, *top.rglob("*")))
    with target.open("wb") as packed:
        done = subprocess.run(
            [image.tools.path("cpio"), "--create", "--format=newc", "--quiet", "--owner=0:0"],
            cwd=image.root,
            input="\n".join(listing).encode(),
            stdout=packed,
            env={**os.environ, **image.tools.environ},
        )
    if done.returncode:
        raise NotRun(f"cpio could not write {target}: exit code {done.returncode}")


def requirements() -> list[str]:
    """What Maru's metadata asks for, extras left out, and what the tests need; raises NotRun."""
    try:
        asked = metadata.requires("maru-kv") or []
    except metadata.PackageNotFoundError as error:
        raise NotRun("Maru is not installed in this environment; run scripts/setup-env.sh") from error
    return [*(line for line in asked if "extra ==" not in line), *TEST_PACKAGES]


def install_python(image: Image) -> None:
    """Unpack wheels for the guest's Python, whatever this one is."""
    (python,) = (image.root / "usr" / "lib").glob("python3.*")
    version = python.name.removeprefix("python")
    target = image.root / "opt" / "python"
    command(
        [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--target", target),
            *("--only-binary=:all:", "--implementation=cp", f"--python-version={version}"),
            *(f"--platform=manylinux{form}_x86_64" for form in ("2014", "_2_17", "_2_28", "_2_34")),
            *requirements(),
        ]
    )
    # Found by every Python of the guest, whatever environment a test gives it.
    places = image.root / "usr" / "local" / "lib" / python.name / "dist-packages"
    places.mkdir(parents=True, exist_ok=True)
    (places / "maru.pth").write_text("/opt/maru\n/opt/python\n")
    compile_inside(image, "/opt/python")


def lay_checkout(image: Image) -> None:
    """Copy this checkout to where guests look for it."""
    target = image.root / "opt" / "maru"
    remove(target)
    target.mkdir(parents=True)
    for name in CHECKOUT:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy(source, target / name)
    compile_inside(image, "/opt/maru")
    pack(image, "opt/maru", image.folder / "checkout")
    with image.initramfs.open("wb") as whole:
        for name in ("system", "checkout"):
            with (image.folder / name).open("rb") as part:
                shutil.copyfileobj(part, whole, 1 << 20)
    remove(image.folder / "checkout")


def compile_inside(image: Image, folder: str) -> None:
    """Compile with the guest's own Python: emulated, it would take minutes.

    A file that cannot be compiled is no reason not to run: the tests fail when they import it.
    """
    arguments = ["chroot", str(image.root), "python3", "-m", "compileall", "-q", folder]
    subprocess.run(arguments, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, timeout=PATIENCE)


def remove(path: Path) -> None:
    """Remove a file or folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def say(text: str) -> None:
    """Tell what takes a while."""
    print(f"vm: {text}", file=sys.stderr, flush=True)
