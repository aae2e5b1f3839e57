"""Programs that send a server whatever should not be sent, and one that works beside them.

``python -m tests.fuzz.attackers KIND URL SEED RATE ENOUGH`` prints a line when it has done ``ENOUGH`` (replies got,
connections made, lookups done), runs on until its standard input ends, then prints JSON.
"""

from __future__ import annotations

import json
import os
import random
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgpack
import zmq

from maru_core import logs
from maru_core.client import MaruHandler
from maru_core.config import MaruConfig
from maru_core.errors import MaruError
from maru_core.host import PluginHost
from maru_core.protocol import MAX_MESSAGE, Presence
from tests.chaos.stamps import difference, key_of, name_of, namespace, stamped
from tests.fuzz.messages import HTTP, Speaker
from tests.server.raw import RawClient, Refused

#: Connections below ZeroMQ that are left open half-way, at most.
_OPEN = 200
#: The start of a ZMTP 3.0 greeting, the whole of it with the NULL mechanism, and a READY command of a DEALER.
_SIGNATURE = b"\xff\0\0\0\0\0\0\0\x01\x7f"
_GREETING = _SIGNATURE + b"\x03\0" + b"NULL".ljust(20, b"\0") + bytes(32)
_READY_BODY = b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER\x08Identity\0\0\0\0"
_READY = b"\x04" + bytes([len(_READY_BODY)]) + _READY_BODY

#: Told how much has been done so far; whether that is all.
Done = Callable[[int], bool]


def talk(url: str, chance: random.Random, rate: float, done: Done) -> dict[str, Any]:
    """Messages over ZeroMQ, well-formed and wrong ones, in one frame or in several, from honest and odd sockets."""
    context = zmq.Context()
    sent = answered = 0
    client = speaker = None
    waiting: dict[int, list[Any]] = {}
    begin = time.monotonic()
    while not done(answered):
        if client is None:
            client = RawClient(context, url)
            client.socket.setsockopt(zmq.SNDTIMEO, 1000)
            with suppress(TimeoutError, Refused):
                client.hello(bytes([0x90]))
            speaker = Speaker(chance, client.epoch, client.session, weights=client.weights_epoch)
            if not sent:
                for frame in speaker.largest():
                    client.socket.send(frame)
        assert speaker is not None
        try:
            way = chance.random()
            if way < 0.3:
                message = speaker.good()
                waiting[message[1]] = message
                client.socket.send(msgpack.packb(message))
            elif way < 0.93:
                client.socket.send(speaker.bad())
            else:
                frames = [speaker.bad() for _ in range(chance.choice([2, 3, 20]))]
                client.socket.send_multipart([b"", *frames] if chance.random() < 0.5 else frames)
            sent += 1
        except zmq.Again:
            client.close()
            client = None
            continue
        while client.socket.poll(0):
            reply = msgpack.unpackb(client.socket.recv())
            answered += 1
            speaker.learn(waiting.pop(reply[0], []), reply)
        if len(waiting) > 1000:
            waiting.clear()
        if chance.random() < 0.002:
            client.close()
            client = None
        elif chance.random() < 0.002:
            _odd_socket(context, url, chance)
        ahead = sent / rate - (time.monotonic() - begin)
        if ahead > 0:
            time.sleep(ahead)
    if client is not None:
        client.close()
    context.destroy(0)
    return {"messages": sent, "replies": answered}


def _odd_socket(context: zmq.Context[Any], url: str, chance: random.Random) -> None:
    """A peer of a kind that the server does not expect."""
    kind = chance.choice([zmq.PUSH, zmq.REQ, zmq.SUB, zmq.PAIR, zmq.ROUTER])
    with context.socket(kind) as odd:
        odd.setsockopt(zmq.LINGER, 5)
        odd.connect(url)
        with suppress(zmq.ZMQError):
            odd.send(chance.randbytes(50), zmq.NOBLOCK)


def burrow(url: str, chance: random.Random, rate: float, done: Done) -> dict[str, Any]:
    """Bytes below ZeroMQ: no greeting, half of one, a whole one and then nonsense; connections by the thousand."""
    path = url.removeprefix("ipc://")
    left_open: deque[socket.socket] = deque()
    connections = 0
    begin = time.monotonic()
    while not done(connections):
        plain = socket.socket(socket.AF_UNIX)
        plain.settimeout(1)
        try:
            plain.connect(path)
            connections += 1
            plain.sendall(_nonsense(chance))
        except OSError:
            plain.close()  # refused on the way: fine
            continue
        if chance.random() < 0.3:
            left_open.append(plain)
            if len(left_open) > _OPEN:
                left_open.popleft().close()
        else:
            plain.close()
        ahead = connections / rate - (time.monotonic() - begin)
        if ahead > 0:
            time.sleep(ahead)
    for plain in left_open:
        plain.close()
    return {"connections": connections}


def _nonsense(chance: random.Random) -> bytes:
    way = chance.randrange(9)
    if way == 0:
        return b""
    if way == 1:
        return chance.randbytes(chance.choice([1, 10, 64, 1000]))
    if way == 2:
        return HTTP
    if way == 3:
        return _SIGNATURE[: chance.randint(1, 10)]
    if way == 4:
        return _GREETING[: chance.randint(11, 64)]
    if way == 5:
        return _GREETING + chance.randbytes(chance.choice([1, 30, 300]))
    if way == 6:
        return _GREETING + _READY + chance.randbytes(chance.choice([1, 30, 300]))
    if way == 7:  # a message that is announced and never comes, of a size within the limit or not
        size = chance.choice([100, MAX_MESSAGE, MAX_MESSAGE + 1, 1 << 40, (1 << 64) - 1])
        return _GREETING + _READY + b"\x02" + struct.pack(">Q", size) + bytes(50)
    frame = chance.randbytes(chance.randrange(200))
    return _GREETING + _READY + bytes([chance.choice([0, 1]), len(frame)]) + frame


def work(url: str, chance: random.Random, rate: float, done: Done) -> dict[str, Any]:
    """An honest client: looks up 64 keys again and again, stores and reads in between, and checks every byte."""
    logs.setup("error")
    config = MaruConfig(server_url=url)
    times: list[float] = []
    wrong = failed = read = 0
    keys = [key_of("red", number) for number in range(64)]
    with MaruHandler.connect(config, namespace("red"), host=PluginHost.with_plugins({}, built_ins=True)) as handler:
        while not done(len(times)):
            begin = time.perf_counter()
            try:
                handler.probe(keys)
                times.append(time.perf_counter() - begin)
                if chance.random() < 0.1:
                    number = chance.randrange(64)
                    handler.store(name_of(number), stamped("red", number, 0).data)
                    lease = handler.acquire([keys[number]], leading=True)
                    if lease.statuses[0] == Presence.READY:
                        copy = bytes(handler.view(lease.epoch, lease.entries[0], lease.lengths[0]))
                        verified = handler.verify(lease.epoch, lease.entries, lease.generations, lease.lengths)[0]
                        read += 1
                        wrong += not verified or difference(copy, "red", number, 0) is not None
                    handler.release(lease)
            except MaruError:
                failed += 1
            time.sleep(1 / rate)
    times.sort()
    return {
        "calls": len(times),
        "failed": failed,
        "read": read,
        "wrong": wrong,
        "median_ms": times[len(times) // 2] * 1e3,
        "p99_ms": times[int(len(times) * 0.99)] * 1e3,
        "max_ms": times[-1] * 1e3,
    }


KINDS = {"talk": talk, "burrow": burrow, "work": work}


def main() -> None:
    """See the module."""
    kind, url, seed, rate, enough = sys.argv[1:]
    over, told = threading.Event(), threading.Event()

    def done(count: int) -> bool:
        if count >= int(enough) and not told.is_set():
            told.set()
            print("enough", flush=True)
        return over.is_set()

    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    if kind != "work":
        os.nice(5)  # the machine's processors go to server and client first; what is measured is the server's doing
    print(json.dumps(KINDS[kind](url, random.Random(int(seed)), float(rate), done)), flush=True)


if __name__ == "__main__":
    main()
