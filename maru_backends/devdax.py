"""Device-DAX as the kernel describes it: which devices there are, their size, alignment, mode and node, from sysfs.

``fstat`` says 0 for the size of such a device, and ``mmap`` answers everything that is not to its liking with EINVAL;
what it likes is written in sysfs. Everything here only reads, and takes the root of sysfs as an argument.
"""

from __future__ import annotations

import mmap
import os
import re
import stat
from pathlib import Path
from typing import Final, Literal

from attrs import frozen

from maru_core.errors import BackendError
from maru_core.sizes import format_size

SYSFS: Final = Path("/sys")
DEV: Final = Path("/dev")
#: What the kernel aligns to where it does not say, and what a file that stands in for a device is aligned to.
DEFAULT_ALIGN: Final = 2 << 20
#: Devices below this are refused by some kernels and hold next to nothing.
SMALL: Final = 256 << 20

Mode = Literal["devdax", "system-ram", "disabled", "unknown"]
#: Mode by the driver that has the device.
_MODES: Final[dict[str, Mode]] = {"device_dax": "devdax", "dax": "devdax", "kmem": "system-ram"}
_NAME: Final = re.compile(r"dax[0-9]+\.[0-9]+")
_NUMBER: Final = re.compile(r"-?(?:(?P<decimal>[0-9]+)|(?:0[xX])?[0-9a-fA-F]+)")
#: Numbers are below this: sizes of what can be mapped.
_END_OF_NUMBERS: Final = 1 << 63
#: Bytes of a file of sysfs that are looked at.
_MOST_TEXT: Final = 64


@frozen
class DaxDevice:
    """One device. ``size`` and ``align`` in bytes; nodes are ``None`` where the kernel has none for it.

    ``align_said``: False when the kernel does not tell, so that DEFAULT_ALIGN or that of its region is assumed.
    """

    name: str
    path: str
    size: int
    align: int
    align_said: bool
    mode: Mode
    numa_node: int | None
    target_node: int | None

    @property
    def capacity(self) -> int:
        """Bytes that can be mapped: whole alignments."""
        return self.size // self.align * self.align

    @property
    def problem(self) -> str | None:
        """Why no pool can be made of it, and the remedy; ``None`` when one can."""
        if self.mode == "system-ram":
            return (
                f"{self.name} is system memory (mode system-ram), which belongs to every process: "
                f"`daxctl reconfigure-device --mode=devdax --force {self.name}` makes it a device again"
            )
        if self.mode == "disabled":
            return (
                f"no driver has {self.name}: `modprobe device_dax`, then "
                f"`daxctl enable-device {self.name}` or `daxctl reconfigure-device --mode=devdax {self.name}`"
            )
        if self.mode == "unknown":
            return (
                f"{self.name} has a driver that Maru does not know: "
                f"`daxctl reconfigure-device --mode=devdax --force {self.name}` gives it the right one"
            )
        if self.align % mmap.PAGESIZE:
            return (
                f"{self.name} is aligned to {self.align} bytes, which are no whole pages: make it anew with "
                f"`ndctl create-namespace -f -e namespaceX.Y -m devdax --align=2M`, or see why sysfs says so"
            )
        if not self.size:
            return f"{self.name} has no memory: `daxctl create-device` gives a device what its region has left"
        if not self.capacity:
            return (
                f"{self.name} has {format_size(self.size)} ({self.size} bytes), less than one alignment of "
                f"{format_size(self.align)}: make it anew with `ndctl create-namespace -f -e namespaceX.Y -m devdax "
                f"--align=2M` or a larger --size"
            )
        return None

    @property
    def doubts(self) -> list[tuple[str, str]]:
        """What works, but hardly as it was meant, each with its remedy, which may be empty."""
        found = []
        if self.align < DEFAULT_ALIGN:
            found.append(
                (
                    f"{self.name} is aligned to {format_size(self.align)}: it is mapped in small pages, which is slow",
                    "`ndctl create-namespace -f -e namespaceX.Y -m devdax --align=2M`",
                )
            )
        if self.size < SMALL:
            found.append(
                (
                    f"{self.name} has {format_size(self.size)}: little for a pool, and some kernels refuse to map it",
                    "`ndctl create-namespace -f -e namespaceX.Y -m devdax --size=SIZE` makes a larger one",
                )
            )
        if not self.align_said:
            found.append(
                (f"this kernel does not tell the alignment of {self.name}: {self.align} bytes are assumed", "")
            )
        return found

    def describe(self) -> str:
        """What one has to know of it, in a line."""
        node = "" if self.numa_node is None else f", node {self.numa_node}"
        target = "" if self.target_node in (None, self.numa_node) else f", target node {self.target_node}"
        assumed = "" if self.align_said else " (assumed)"
        return (
            f"{self.path}: {format_size(self.size)} ({self.size} bytes), align {format_size(self.align)}{assumed}, "
            f"mode {self.mode}{node}{target}"
        )


def discover(sysfs: Path = SYSFS, dev: Path = DEV) -> list[DaxDevice]:
    """Every device that the kernel knows, by number; those that cannot be used are among them."""
    names: dict[str, Path] = {}
    for folder in (sysfs / "bus/dax/devices", sysfs / "class/dax"):
        try:
            for entry in folder.iterdir():
                names.setdefault(entry.name, entry)
        except OSError:
            continue  # no DAX in this kernel, or one without a class or bus of it
    found = sorted((name for name in names if _NAME.fullmatch(name)), key=_numbers)
    return [_read(name, names[name], str(dev / name)) for name in found]


def _size(folder: Path, path: str) -> int:
    size = _number(folder / "size")
    if size is None or size < 0:
        raise BackendError(f"cannot use {path}: {folder}/size is missing or no number")
    return size


def find(path: str | os.PathLike[str], sysfs: Path = SYSFS) -> DaxDevice:
    """The device whose node is at ``path``, links followed; raises BackendError when it is none, or says nothing.

    Whether it can be used is for its ``problem`` to say. The node itself is not opened.
    """
    real = os.path.realpath(path)
    try:
        status = os.stat(real)
    except OSError as error:
        raise BackendError(_absent(str(path), real, error, sysfs)) from error
    if stat.S_ISBLK(status.st_mode):
        raise BackendError(_block_device(str(path), status.st_rdev, sysfs))
    if not stat.S_ISCHR(status.st_mode):
        raise BackendError(f"{path} is no device")
    return of_number(status.st_rdev, real, sysfs)


def of_number(number: int, path: str, sysfs: Path = SYSFS) -> DaxDevice:
    """The device with this device number, whose node is at ``path``; raises BackendError when it is not of DAX."""
    digits = f"{os.major(number)}:{os.minor(number)}"
    entry = sysfs / "dev/char" / digits
    folder = Path(os.path.realpath(entry))
    if not folder.is_dir():
        raise BackendError(
            f"{path} is character device {digits}, of which {sysfs} says nothing: is {sysfs} mounted in this "
            f"container, and is the node one of this kernel's?"
        )
    subsystem = os.path.basename(os.path.realpath(folder / "subsystem"))
    if subsystem != "dax" and not _NAME.fullmatch(folder.name):
        raise BackendError(f"{path} is character device {digits} ({folder.name}), which is not a DAX device")
    _size(folder, path)
    return _read(folder.name, folder, path)


def _read(name: str, folder: Path, path: str) -> DaxDevice:
    folder = Path(os.path.realpath(folder))
    align = _number(folder / "align")
    said = align is not None and align > 0
    if not align or align < 0:
        # Older kernels tell it of the region that the device is in, or not at all.
        align = _number(folder.parent / "dax_region/align") or _number(folder / "device/dax_region/align")
    align = align if align is not None and align > 0 else DEFAULT_ALIGN
    numa, target = _number(folder / "numa_node"), _number(folder / "target_node")
    return DaxDevice(
        name=name,
        path=path,
        size=max(0, _number(folder / "size") or 0),
        align=align,
        align_said=said,
        mode=_mode(folder),
        numa_node=None if numa is None or numa < 0 else numa,
        target_node=None if target is None or target < 0 else target,
    )


def _mode(folder: Path) -> Mode:
    driver = folder / "driver"
    if driver.is_symlink() or driver.exists():
        return _MODES.get(os.path.basename(os.path.realpath(driver)).replace("-", "_"), "unknown")
    # Before devices had drivers of their own there was a class, and one mode.
    of_class = os.path.basename(os.path.dirname(os.path.realpath(folder / "subsystem"))) == "class"
    return "devdax" if of_class else "disabled"


def _absent(path: str, real: str, error: OSError, sysfs: Path) -> str:
    name = os.path.basename(real)
    known = discover(sysfs)
    if any(device.name == name for device in known):
        return (
            f"cannot use {path}: {error.strerror}, although the kernel has {name}: is udev running, and is the node "
            f"given to this container (`--device {DEV}/{name}`)?"
        )
    return f"cannot use {path}: {error.strerror}; {listed(known)}"


def listed(devices: list[DaxDevice]) -> str:
    """What is there, as the end of an error."""
    if not devices:
        return "this kernel has no DAX device (`maru doctor`, `daxctl list`)"
    lines = [f"  {device.describe()}" + (f"\n    {device.problem}" if device.problem else "") for device in devices]
    return "\n".join(["DAX devices of this host:", *lines])


def _block_device(path: str, number: int, sysfs: Path) -> str:
    """A namespace in another mode has a block device in place of ours."""
    entry = sysfs / "dev/block" / f"{os.major(number)}:{os.minor(number)}" / "device"
    folder = Path(os.path.realpath(entry))
    name = _text(folder / "namespace") or folder.name
    if not name.startswith("namespace"):
        name = "namespaceX.Y"
    return (
        f"{path} is a block device: its memory is in fsdax, sector or raw mode, and a pool needs devdax; "
        f"`ndctl create-namespace --force --reconfig={name} --mode=devdax --align=2M` turns it into one and destroys "
        f"what is on it"
    )


def _number(path: Path) -> int | None:
    """A number as sysfs has it, decimal or hexadecimal; ``None`` when it is not there, or is none that could be."""
    found = _NUMBER.fullmatch(_text(path))
    if found is None:
        return None
    number = int(found[0], 10 if found["decimal"] else 16)
    return number if abs(number) < _END_OF_NUMBERS else None


def _text(path: Path) -> str:
    """What a file of sysfs says; empty when it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(_MOST_TEXT).decode("ascii", errors="replace").strip()
    except OSError:
        return ""


def _numbers(name: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", name)))
