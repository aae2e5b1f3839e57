"""The reference transfer engine: strided copies of any layout, on any device that torch knows.

Pages on the host are copied by :mod:`maru_transfer.host_copy`, pages on a device by
:mod:`maru_transfer.device_copy`; both are imported when the engine is opened, so that this module needs no torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import structlog
from attrs import frozen

from maru_core.contracts import Transfer
from maru_core.errors import TransferError
from maru_core.geometry import ObjectLayout, PagedLayout
from maru_transfer.plan import mismatch


@frozen
class TorchCopyEngine:
    """Copies natively or with NumPy views on the host, and with torch on a device; ``auto`` falls back to it.

    ``threads`` limits how many threads copy on the host at once; ``None`` takes the usable cores, four at most.
    """

    threads: int | None = None

    @property
    def name(self) -> str:
        """Equal to the plugin's entry-point name."""
        return "torch-copy"

    def is_available(self) -> bool:
        """Whether torch and NumPy can be imported."""
        return self.import_error() is None

    def import_error(self) -> str | None:
        """What is missing and how to get it; ``None`` when nothing is."""
        for module in ("numpy", "torch"):
            try:
                importlib.import_module(module)
            except (ImportError, OSError) as error:  # OSError: a shared library of torch that does not load
                return f"{module} cannot be imported ({error}); install it beside the engine: pip install {module}"
        return None

    def unsupported(self, paged: PagedLayout, stored: ObjectLayout, device: str) -> str | None:
        """Why the layout cannot be moved; every device is supported."""
        if paged.element_size not in (1, 2, 4, 8):
            return f"elements of {paged.element_size} bytes; torch-copy moves 1, 2, 4 or 8"
        return mismatch(paged, stored)

    def open(self, layers: Sequence[Any], paged: PagedLayout, stored: ObjectLayout) -> Transfer:
        """Bind to KV tensors in true layer order.

        Raises TransferError when the layout is unsupported, or a tensor's memory is smaller than the layout says.
        """
        problem = self.import_error()
        if problem is None and len(layers) != paged.num_layers:
            problem = f"{len(layers)} layers were given, the layout has {paged.num_layers}"
        if problem is None:
            problem = self.unsupported(paged, stored, layers[0].device.type)
        if problem:
            raise TransferError(problem)
        if layers[0].device.type == "cpu":
            from maru_transfer import host_library
            from maru_transfer.host_copy import HostTransfer

            library = host_library.load()
            if isinstance(library, str):
                structlog.get_logger().info("maru.copies_with_numpy", reason=library)
                return HostTransfer(layers, paged, stored, threads=self.threads)
            return HostTransfer(layers, paged, stored, threads=self.threads, library=library)
        from maru_transfer.device_copy import DeviceTransfer

        return DeviceTransfer(layers, paged, stored)
