"""The real ``maru serve``, which on SIGUSR1 ends itself with SIGKILL inside one of its operations, at any instruction.

What belongs to a start (``recover``: the header table is read; ``resume``: clients say what they still use) needs no
signal.

``python -m tests.chaos.server --kill-in OPERATION --told FILE --seed N [--patience SECONDS] -- serve OPTION…``

Nothing in the server knows of this. Calls of the operation are wrapped here; once armed, one call is watched to learn
how many instructions of the server's own code it takes, and in a later one the process dies at a random one of them.
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import re
import signal
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import maru_core.server
from maru_core import pool_format
from maru_core.cli import main as maru
from maru_core.server import sessions
from maru_core.server.directory import Directory

#: Where each operation begins. Eviction is a part of the first two.
OPERATIONS = {
    "reserve": ("reserve",),
    "commit": ("commit",),
    "release": ("release",),
    "evict": ("reserve", "make_ahead"),
}
#: The same where objects move between several pools.
MOVING = {"move": ("next_move", "finish_move")}
#: The same for what happens once per start, without being told.
STARTING = {"recover": ("recover",), "resume": ("unlisted", "give_back", "resume_lease", "thaw")}
#: More instructions than it takes to recover a pool of a thousand granules.
_OF_RECOVERY = 80_000
_FOLDER = str(Path(maru_core.server.__file__).parent)
_EVICTING = re.compile(r"_?(evict|make_room|clear_around|mark_free|hide|retire|give)")


class Assassin:
    """Watches calls and ends the process inside one. ``told`` gets a line that says where."""

    def __init__(self, operation: str, told: Path, chance: random.Random) -> None:
        self._operation = operation
        self._told = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._chance = chance
        self.armed = operation in STARTING
        self._seen = 0
        #: Most instructions of a call so far, and the one of this call at which to end.
        self._usual = _OF_RECOVERY if operation == "recover" else 0
        self._fatal = 0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, watched while armed."""

        @functools.wraps(function)
        def watched(*arguments: Any, **options: Any) -> Any:
            if not self.armed:
                return function(*arguments, **options)
            self._seen = 0
            self._fatal = self._choose()
            sys.settrace(self._enter)
            try:
                return function(*arguments, **options)
            finally:
                sys.settrace(None)
                self._usual = max(self._usual, self._seen)

        return watched

    def _choose(self) -> int:
        if self._operation == "recover":
            # There is only one call, and nobody knows how long it is: small numbers as likely as large ones.
            return round(self._usual ** self._chance.random())
        return self._chance.randint(1, self._usual) if self._usual else 0

    def _enter(self, frame: types.FrameType, event: str, argument: object) -> Any:
        name = frame.f_code.co_filename
        if not (name.startswith(_FOLDER) or name == pool_format.__file__):
            return None
        if self._operation == "evict" and not _is_evicting(frame):
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return self._step

    def _step(self, frame: types.FrameType, event: str, argument: object) -> Any:
        if event == "opcode":
            self._seen += 1
            if self._seen == self._fatal:
                where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
                os.write(self._told, f"{self._operation} {where}\n".encode())
                os.kill(os.getpid(), signal.SIGKILL)
        return self._step


def _is_evicting(frame: types.FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename.startswith(_FOLDER):
        if _EVICTING.match(frame.f_code.co_name) and frame.f_code.co_name != "make_ahead":
            return True
        frame = frame.f_back
    return False


def main() -> None:
    """Serve until told to end, or until the end comes by itself."""
    split = sys.argv.index("--")
    parser = argparse.ArgumentParser()
    parser.add_argument("--kill-in", choices=[*OPERATIONS, *MOVING, *STARTING], required=True)
    parser.add_argument("--told", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--patience", type=float, default=sessions.PATIENCE)
    options = parser.parse_args(sys.argv[1:split])
    sessions.PATIENCE = options.patience
    assassin = Assassin(options.kill_in, options.told, random.Random(options.seed))
    for name in (OPERATIONS | MOVING | STARTING)[options.kill_in]:
        setattr(Directory, name, assassin.wrap(getattr(Directory, name)))

    def arm(number: int, frame: types.FrameType | None) -> None:
        assassin.armed = True

    signal.signal(signal.SIGUSR1, arm)
    maru(sys.argv[split + 1 :])


if __name__ == "__main__":
    main()
