"""What a client that forked holds ends with the client itself: not earlier, not later than its children."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time

import pytest

from maru_core.protocol import CommitStatus, Presence, ReserveStatus
from tests.client.real import Folder
from tests.waiting import eventually

pytestmark = pytest.mark.slow

KEY = b"k" * 32
READ = b"r" * 32

#: Reserves and leases, forks, tells the child's way to end, and commits when told.
PARENT = """
h = connect()
way = sys.argv[1]
stored = h.reserve([b"r" * 32], 100)
h.view(stored.epoch, stored.entries[0], 100)[:] = b"r" * 100
h.commit(stored)
lease = h.acquire([b"r" * 32], leading=True)
grants = h.reserve([b"k" * 32], 5000)
view = h.view(grants.epoch, grants.entries[0], 5000)
child = os.fork()
if child == 0:
    if way == "return":
        sys.exit(0)
    elif way == "_exit":
        os._exit(0)
    elif way == "close":
        h.close()
        os._exit(0)
    elif way == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        signal.alarm(20)
        time.sleep(15)
        os._exit(0)
print("ready", child, flush=True)
if way != "lives on":
    os.waitpid(child, 0)
    print("ended", flush=True)
sys.stdin.readline()
view[:] = b"k" * 5000
print(h.commit(grants)[0], h.verify(lease.epoch, lease.entries, lease.generations, lease.lengths)[0], flush=True)
"""


def line_of(process: subprocess.Popen[str], word: str) -> str:
    """The next line that begins with a word."""
    assert process.stdout is not None
    while True:
        line = process.stdout.readline()
        assert line or process.poll() is None, process.stderr and process.stderr.read()
        if line.startswith(word):
            return line


@pytest.mark.parametrize("way", ["return", "_exit", "close", "killed"])
def test_the_end_of_a_child_frees_nothing_of_its_parent(folder: Folder, way: str) -> None:
    watcher = folder.connect()
    process = folder.run(PARENT, way, stdin=subprocess.PIPE)
    line_of(process, "ended")
    time.sleep(1.2)  # the server looks for dead owners every half second
    assert watcher.reserve([KEY], 5000).statuses == bytes([ReserveStatus.BUSY])
    pool = watcher.stats()["pools"][0]
    assert (pool["reserved"], pool["leased"]) == (8192, 4096)
    out, err = process.communicate("go\n", timeout=20)
    assert out.split() == [str(int(CommitStatus.OK)), "True"], err
    assert process.returncode == 0
    assert watcher.probe([KEY, READ]) == bytes([Presence.READY] * 2)
    eventually(lambda: watcher.stats()["pools"][0]["leased"] == 0)


def test_a_child_that_lives_on_holds_nothing_of_its_dead_parent(folder: Folder) -> None:
    watcher = folder.connect()
    process = folder.run(PARENT, "lives on", stdin=subprocess.PIPE)
    child = int(line_of(process, "ready").split()[1])
    assert watcher.stats()["pools"][0]["reserved"] == 8192
    process.kill()
    process.wait()
    descriptor = os.pidfd_open(child)
    try:
        eventually(lambda: watcher.stats()["pools"][0]["reserved"] == 0)
        eventually(lambda: watcher.stats()["pools"][0]["leased"] == 0)
        assert not select.select([descriptor], [], [], 0)[0], "the child lives"
        assert watcher.reserve([KEY], 5000).statuses == bytes([ReserveStatus.NEW])
    finally:
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        os.close(descriptor)
