"""Children that end with this process: each in a session of its own, all of them ended on the way out.

Ctrl-C in a terminal reaches the foreground process group only, so children get sessions of their own and are ended by
us, in order. This process adopts what they leave behind (child subreaper), so its descendants are all there is to end,
whatever sessions they have moved to.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from scripts.quickstart.segments import mapped_segments, remove_segments

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
#: Seconds that a process gets to end by itself after SIGTERM.
GRACE = 6.0
#: And whoever it started, after that.
_HELPERS_GRACE = 1.5
#: What their trackers of shared memory get after that.
_TRACKERS_GRACE = 3.0
#: Seconds for which processes are watched to tell whether they are idle, and the share of a processor that they then
#: take at most: each of vLLM's idle engines takes two percent.
_LOOK, _IDLE = 0.3, 0.15


class Interrupted(BaseException):
    """A signal asked for the end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Child:
    """One started command."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path, service: bool) -> None:
        self.name = name
        self.process = process
        self.log = log
        self.service = service
        self.segments: set[Path] = set()

    def returncode(self) -> int | None:
        """``None`` while it runs."""
        return self.process.poll()


class Processes:
    """Starts children and ends them. Use as a context manager, on the main thread.

    SIGINT, SIGTERM and SIGHUP raise Interrupted inside the block; leaving it by any way ends every descendant. A second
    signal while that goes on cuts the grace short.
    """

    def __init__(self, grace: float = GRACE) -> None:
        self._grace = grace
        self._children: list[Child] = []
        self._held = False
        self._pending: int | None = None
        self._ending = False
        self._hurry = False
        self._before: dict[int, Any] = {}
        self._prctl = ctypes.CDLL(None, use_errno=True).prctl

    def __enter__(self) -> Processes:
        self._prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        self._ending = True
        self._end_all()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def start(
        self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str], *, service: bool = False
    ) -> Child:
        """Start a command that writes into ``log``; raises OSError when there is no such program.

        A ``service`` is ended after those that are none.
        """
        with self._signals_held(), log.open("ab") as sink:
            process = subprocess.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                start_new_session=True,
                preexec_fn=self._end_with_parent,
            )
            child = Child(name, process, log, service)
            self._children.append(child)
        return child

    def remember_segments(self) -> None:
        """Note the shared memory of all children, for the case that one dies without removing its own."""
        for child in self._children:
            child.segments |= mapped_segments(session_members(child.process.pid))

    def are_idle(self) -> bool:
        """Whether all children together leave the processors alone. Looks for a fraction of a second."""
        before, start = self._busy_seconds(), time.monotonic()
        time.sleep(_LOOK)
        return self._busy_seconds() - before <= _IDLE * (time.monotonic() - start)

    def _busy_seconds(self) -> float:
        return sum(processor_seconds(pid) for child in self._children for pid in session_members(child.process.pid))

    def end(self, child: Child) -> None:
        """End one child and everything in its session."""
        self._end_together([child])

    def _end_all(self) -> None:
        # Whoever uses a service ends before it.
        for services in (False, True):
            self._end_together([child for child in self._children if child.service == services])
        self._end([], descendants)

    def _end_together(self, children: Sequence[Child]) -> None:
        self._end(children, lambda: [pid for child in children for pid in session_members(child.process.pid)])
        for child in children:
            child.process.wait()
            self._children.remove(child)

    def _end(self, children: Sequence[Child], members: Callable[[], list[int]]) -> None:
        segments = mapped_segments(members()).union(*(child.segments for child in children))
        for child in children:
            if child.process.poll() is None:
                _signal(child.process.pid, signal.SIGTERM)
        deadline = time.monotonic() + self._grace
        while members() and time.monotonic() < deadline and not self._hurry:
            self._reap(children)
            if all(child.process.returncode is not None for child in children):
                # Helpers see the end of their leader and clean up after it.
                deadline = min(deadline, time.monotonic() + _HELPERS_GRACE)
                children = ()
            time.sleep(0.02)
        tracked = time.monotonic() + _TRACKERS_GRACE
        while pids := members():
            segments |= mapped_segments(pids)
            # Python's resource trackers end when the others have, and remove what those have left in /dev/shm.
            others = [pid for pid in pids if not _is_tracker(pid)]
            for pid in others or (pids if time.monotonic() > tracked else []):
                _signal(pid, signal.SIGKILL)
            self._reap(children)
            time.sleep(0.01)
        self._reap(children)
        remove_segments(segments)

    def _reap(self, children: Sequence[Child]) -> None:
        for child in children:
            child.process.poll()
        known = {child.process.pid for child in self._children}
        for pid, stat in _processes():
            if stat.parent == os.getpid() and stat.state == "Z" and pid not in known:
                _wait(pid)

    def _end_with_parent(self) -> None:
        self._prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)

    @contextmanager
    def _signals_held(self) -> Iterator[None]:
        """No Interrupted between a fork and the note that there is a child now."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        if self._pending is not None:
            self._ending = True
            raise Interrupted(self._pending)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._ending:
            self._hurry = True
        elif self._held:
            self._pending = number
        else:
            self._ending = True
            raise Interrupted(number)


class _Stat:
    """What /proc says of one process."""

    __slots__ = ("parent", "session", "state")

    def __init__(self, text: str) -> None:
        # The name in parentheses may itself contain spaces and parentheses.
        fields = text[text.rindex(")") + 2 :].split()
        self.state, self.parent, self.session = fields[0], int(fields[1]), int(fields[3])


def _processes() -> Iterator[tuple[int, _Stat]]:
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                yield int(entry), _Stat(Path("/proc", entry, "stat").read_text())
            except (FileNotFoundError, ProcessLookupError):
                continue


def session_members(session: int) -> list[int]:
    """Living processes of a session."""
    return [pid for pid, stat in _processes() if stat.session == session and stat.state != "Z"]


def processor_seconds(pid: int) -> float:
    """Time that a process and its threads have run so far; 0 when it is gone."""
    try:
        text = Path("/proc", str(pid), "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    user, system = text[text.rindex(")") + 2 :].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def descendants() -> list[int]:
    """Living processes below this one."""
    found = dict(_processes())
    below: set[int] = {os.getpid()}
    while more := {pid for pid, stat in found.items() if stat.parent in below} - below:
        below |= more
    return [pid for pid in below - {os.getpid()} if found[pid].state != "Z"]


def _is_tracker(pid: int) -> bool:
    try:
        return b"multiprocessing.resource_tracker" in Path("/proc", str(pid), "cmdline").read_bytes()
    except OSError:  # gone meanwhile
        return False


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _wait(pid: int) -> None:
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return
