"""Advice to the kernel about mapped memory, through ctypes, so that other threads run meanwhile."""

from __future__ import annotations

import ctypes
import errno
import mmap
import platform
from collections.abc import Sequence
from typing import Final

from attrs import frozen

MADV_WILLNEED: Final = 3
MADV_HUGEPAGE: Final = 14
#: Since Linux 5.14: enter pages into the page tables, as a read of each would. A read, because a write would make the
#: kernel note every page as changed, which takes three times as long.
MADV_POPULATE_READ: Final = 22
#: Since Linux 6.1: make a huge page of these bytes now.
MADV_COLLAPSE: Final = 25

PAGE: Final = mmap.PAGESIZE
HUGE_PAGE: Final = 2 << 20
#: move_pages(2), which the C library does not have, by machine.
_MOVE_PAGES: Final = {"x86_64": 279, "aarch64": 239}


@frozen
class Kernel:
    """The calls. Each returns an error number, 0 when it worked, and never raises."""

    libc: ctypes.CDLL

    @classmethod
    def load(cls) -> Kernel:
        """The C library of this process."""
        return cls(ctypes.CDLL(None, use_errno=True))

    def advise(self, view: memoryview, start: int, length: int, advice: int) -> int:
        """madvise(2) for the whole pages in which these bytes of ``view`` lie; they stay mapped meanwhile."""
        start, length = max(0, start), min(length, len(view) - max(0, start))
        if length <= 0:
            return 0
        anchor = ctypes.c_char.from_buffer(view)
        address = ctypes.addressof(anchor) + start
        first = address // PAGE * PAGE
        size = ctypes.c_size_t(address + length - first)
        if self.libc.madvise(ctypes.c_void_p(first), size, ctypes.c_int(advice)) == 0:
            return 0
        return ctypes.get_errno() or errno.EINVAL

    def nodes(self, view: memoryview, offsets: Sequence[int]) -> list[int]:
        """The NUMA node of the page at each offset; negative where the kernel does not say."""
        number = _MOVE_PAGES.get(platform.machine())
        if number is None or not offsets:
            return [-errno.ENOSYS] * len(offsets)
        anchor = ctypes.c_char.from_buffer(view)
        base = ctypes.addressof(anchor)
        pages = (ctypes.c_void_p * len(offsets))(*[base + offset for offset in offsets])
        found = (ctypes.c_int * len(offsets))(*[-errno.ENOENT] * len(offsets))
        count = ctypes.c_ulong(len(offsets))
        if self.libc.syscall(ctypes.c_long(number), 0, count, pages, None, found, 0) != 0:
            return [-(ctypes.get_errno() or errno.EINVAL)] * len(offsets)
        return list(found)


def huge_aligned(view: memoryview) -> bool:
    """Whether the mapping starts where a huge page can."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) % HUGE_PAGE == 0
