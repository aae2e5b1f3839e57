"""Trees that look like ``/sys`` of a host with DAX devices."""

from __future__ import annotations

import os
from pathlib import Path


class FakeSysfs:
    """Add devices, then give :attr:`root` to what reads sysfs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for folder in ("bus/dax/devices", "bus/dax/drivers", "dev/char", "dev/block", "class", "devices"):
            (root / folder).mkdir(parents=True)

    def add(
        self,
        name: str,
        files: dict[str, str],
        *,
        driver: str | None = "device_dax",
        number: int | None = None,
        region: dict[str, str] | None = None,
    ) -> Path:
        """A device of the DAX bus; ``number``: of its node. ``region``: files of the region that it is in."""
        parent = self.root / "devices/platform" / f"region-of-{name}"
        folder = parent / name
        folder.mkdir(parents=True)
        for file, text in files.items():
            (folder / file).write_text(text + "\n")
        if region is not None:
            (parent / "dax_region").mkdir()
            for file, text in region.items():
                (parent / "dax_region" / file).write_text(text + "\n")
        (folder / "subsystem").symlink_to(self.root / "bus/dax")
        if driver is not None:
            (self.root / "bus/dax/drivers" / driver).mkdir(exist_ok=True)
            (folder / "driver").symlink_to(self.root / "bus/dax/drivers" / driver)
        (self.root / "bus/dax/devices" / name).symlink_to(folder)
        if number is not None:
            self.give_node(folder, number)
        return folder

    def give_node(self, folder: Path, number: int, kind: str = "char") -> None:
        """A device number for what is in ``folder``."""
        (self.root / "dev" / kind / f"{os.major(number)}:{os.minor(number)}").symlink_to(folder)
