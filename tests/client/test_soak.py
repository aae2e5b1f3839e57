"""Processes that store and read while the server and other clients are killed and stopped."""

from __future__ import annotations

import json
import os
import random
import signal
import time

import pytest

from maru_core.client import MaruHandler
from tests.client.real import Folder
from tests.waiting import eventually

pytestmark = pytest.mark.slow

#: Every byte tells key, writer and position, so bytes of a neighbour, of two writers, or torn ones show.
CLIENT = """
import hashlib, json, random
from maru_core.errors import Unavailable
number, seconds = int(sys.argv[1]), float(sys.argv[2])
def stamped(key, writer, size):
    seed = hashlib.sha256(f"{key}/{writer}".encode()).digest()
    return (b"".join(p.to_bytes(4, "big") + seed[:28] for p in range(-(-size // 32))))[:size]
handler = connect(pool_size="1M", request_timeout=0.4)
chance = random.Random(number)
count = dict(stored=0, read=0, wrong=0, longest=0.0)
print("ready", file=sys.stderr, flush=True)
end = time.monotonic() + seconds
# However slow the machine: some of everything is done.
while time.monotonic() < end or (min(count['read'], count['stored']) <= 50 and time.monotonic() < end + 60):
    key = chance.randrange(60)
    size = 1000 + key * 150
    start = time.monotonic()
    try:
        if chance.random() < 0.5:
            if chance.random() < 0.1:
                handler.delete(str(key))
            with handler.alloc(str(key), size) as room:
                if room.refusal is None:
                    data = bytes([number]) + stamped(key, number, size - 1)
                    room.view[: size // 2] = data[: size // 2]
                    time.sleep(0.02 * (chance.random() < 0.05))
                    room.view[size // 2 :] = data[size // 2 :]
                    count["stored"] += 1
        else:
            found = handler.retrieve(str(key))
            if found is not None:
                copy = bytes(found.view)
                time.sleep(0.02 * (chance.random() < 0.05))
                again = bytes(found.view)
                verified = found.verify()
                found.close()
                count["read"] += verified
                if verified and not copy == again == copy[:1] + stamped(key, copy[0], size - 1):
                    count["wrong"] += 1
    except Unavailable:
        time.sleep(0.005)
    count["longest"] = max(count["longest"], time.monotonic() - start)
handler.close()
print(json.dumps(count), flush=True)
"""


def held(handler: MaruHandler) -> tuple[int, int, int]:
    pool = handler.stats()["pools"][0]
    return pool["reserved"], pool["leased"], pool["quarantined"]


def test_nothing_is_wrong_and_nothing_leaks_whoever_dies(folder: Folder) -> None:
    seconds = 5.0
    clients = [folder.run(CLIENT, str(number), str(seconds)) for number in range(2)]
    victim = folder.run(CLIENT, "7", "60")
    for process in (*clients, victim):
        assert process.stderr is not None
        assert "ready" in process.stderr.readline()
    chance = random.Random(5)
    end = time.monotonic() + seconds - 2
    turn = 0
    while time.monotonic() < end:
        time.sleep(chance.uniform(0.2, 0.5))
        turn += 1
        if turn % 4 == 1:
            server = folder.pid()
            os.kill(server, signal.SIGSTOP)
            time.sleep(0.6)
            os.kill(server, signal.SIGCONT)
        elif turn % 4 == 2:
            clients[0].send_signal(signal.SIGSTOP)
            time.sleep(0.3)
            clients[0].send_signal(signal.SIGCONT)
        elif turn % 4 == 3:
            os.kill(folder.pid(), signal.SIGKILL)
            time.sleep(1)
        else:
            victim.kill()
    victim.kill()
    counts = []
    for process in clients:
        out, err = process.communicate(timeout=90)
        assert process.returncode == 0, err
        counts.append(json.loads(out.strip().splitlines()[-1]))
    assert [count["wrong"] for count in counts] == [0, 0]
    assert all(count["read"] > 50 and count["stored"] > 50 for count in counts), counts
    assert all(count["longest"] < 2 for count in counts), counts
    observer = folder.connect()
    eventually(lambda: held(observer) == (0, 0, 0))
    pool = observer.stats()["pools"][0]
    assert pool["used"] + pool["free"] == pool["capacity"]
