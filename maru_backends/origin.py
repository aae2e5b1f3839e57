"""Which host and boot this is, and which file or node a descriptor is of: what tells one memory's users apart."""

from __future__ import annotations

import hashlib
import os
import struct
import uuid
from pathlib import Path
from typing import Final

from attrs import frozen

ROOT: Final = Path("/")
#: Length in bytes of the ids here, and what stands for one that is not known.
ID_SIZE: Final = 16
UNKNOWN: Final = bytes(ID_SIZE)


@frozen
class Host:
    """Ids of 16 bytes; UNKNOWN where the host does not tell.

    ``identity`` stays over a reboot. Hosts that are copies of each other must differ in something that it is made of:
    the machine id, the name, or the id of the machine's firmware.
    """

    name: str
    identity: bytes
    boot: bytes

    @classmethod
    def current(cls, root: Path = ROOT) -> Host:
        """This host, as ``/etc``, ``/proc`` and ``/sys`` below ``root`` describe it."""
        name = os.uname().nodename
        machine = _text(root / "etc/machine-id") or _text(root / "var/lib/dbus/machine-id")
        identity = UNKNOWN
        if len(machine) == 32:  # not "uninitialized"
            parts = (machine, name, _text(root / "sys/class/dmi/id/product_uuid"))
            identity = hashlib.blake2b("\0".join(parts).encode(), digest_size=ID_SIZE, person=b"maru-cxl-host").digest()
        return cls(name, identity, boot_id(root))

    def is_this_boot(self, boot: bytes) -> bool:
        """Whether ``boot`` is known to be that of the kernel that runs now."""
        return boot == self.boot != UNKNOWN

    def was_rebooted_since(self, identity: bytes, boot: bytes) -> bool:
        """Whether ``boot`` is known to be an earlier one of this very host, of which no process can be left."""
        known = UNKNOWN not in (identity, boot, self.boot)
        return known and identity == self.identity and boot != self.boot


def boot_id(root: Path = ROOT) -> bytes:
    """Of the running kernel, the same in all its containers; UNKNOWN where a container does not show it."""
    try:
        return uuid.UUID(_text(root / "proc/sys/kernel/random/boot_id")).bytes
    except ValueError:
        return UNKNOWN


def place_of(fd: int) -> bytes:
    """Which file or node of this boot it is: locks reach exactly those that have the same one open."""
    status = os.fstat(fd)
    return struct.pack("<QQ", status.st_dev, status.st_ino)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""
