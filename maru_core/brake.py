"""How a copy that is under way is asked to end early, without a lock and without the interpreter."""

from __future__ import annotations

import ctypes
from enum import IntEnum


class Pull(IntEnum):
    """What is asked for; the numbers are those of enum maru_brake in ``csrc/maru.h``."""

    GO_ON = 0
    #: End when a fair part has been moved: somebody else would like a turn.
    YIELD = 1
    #: End as soon as possible: nobody wants the rest.
    STOP = 2


class Brake:
    """One number that any thread may set, and that a copy reads now and then, native code at :attr:`address`."""

    def __init__(self) -> None:
        self._word = ctypes.c_int32(Pull.GO_ON)
        #: Where the number lies, as long as this object exists.
        self.address = ctypes.addressof(self._word)

    @property
    def pull(self) -> Pull:
        """What is asked for now."""
        return Pull(self._word.value)

    @pull.setter
    def pull(self, pull: Pull) -> None:
        self._word.value = pull
