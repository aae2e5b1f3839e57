"""What the C library's allocator keeps of memory that was freed."""

from __future__ import annotations

import ctypes
from typing import Final

#: From malloc.h.
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
#: Blocks of this size, in bytes, go back to the system as soon as they are freed.
_LARGE: Final = 1 << 20


def give_back_large_blocks() -> bool:
    """Have large blocks returned to the system once they are freed; whether the C library can do that.

    Left alone, glibc keeps tens of megabytes after the first large message, because it takes the sizes that it saw for
    what will be needed again.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # not glibc
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGE)) and bool(mallopt(_M_TRIM_THRESHOLD, _LARGE))
