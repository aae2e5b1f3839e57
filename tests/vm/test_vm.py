"""Machines with a real ``/dev/dax``: the tests of devices inside of one, and two hosts on one memory.

Everything here is slow, so the machines are shared: a test goes on where the one before it ended. They run in the order
of this file, in one process, with ``scripts/test-vm.sh``.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
from attrs import define, field

from maru_backends import native
from scripts.vm.guest import Device, Guest, Job, running
from scripts.vm.image import Image, prepared
from scripts.vm.packages import NotRun
from tests.vm.node import DEADLINE

pytestmark = [pytest.mark.vm, pytest.mark.timeout(900)]

MIB: Final = 1 << 20
#: Usable bytes of the devices before the kernel takes its part.
SIZES: Final = (128 * MIB, 64 * MIB)
PORT: Final = 5555
ADDRESSES: Final = {"a": "10.0.0.1", "b": "10.0.0.2"}
#: Objects of one set, see :mod:`tests.vm.stamps`.
COUNT: Final = 12
#: Objects that the host that dies holds leases on, and reservations of this many bytes each.
LEASED, RESERVED, RESERVED_SIZE = 3, 4, 1 * MIB
#: Seconds that an emulated processor may take beside waiting.
SLACK: Final = 4.0
#: Seconds after which something hangs for certain; nearly all takes less than ten, on quiet cores.
PATIENCE: Final = 150.0


@define
class World:
    """The machines, and what runs in them."""

    image: Image
    folder: Path
    devices: list[Device]
    _stack: ExitStack
    _ends: dict[str, ExitStack] = field(factory=dict)
    guests: dict[str, Guest] = field(factory=dict)
    #: The one that is shared.
    server: Job | None = None

    def boot(self, name: str, devices: int) -> Guest:
        """Start a machine with the first devices; it ends with the world."""
        end = self._stack.enter_context(ExitStack())
        guest = end.enter_context(
            running(
                self.image,
                self.folder / name,
                name,
                self.devices[:devices],
                address=f"{ADDRESSES[name]}/24",
                peer="b" if name == "a" else "a",
            )
        )
        self._ends[name], self.guests[name] = end, guest
        return guest

    def kill(self, name: str) -> None:
        """As a power cut would."""
        del self.guests[name]
        self._ends.pop(name).close()

    def give_keys(self, source: str, target: str) -> None:
        """Let the machine ``target`` have a client's key of the server in ``source``, and where that is."""
        given = self.guests[target].folder / "jobs" / f"keys-{source}"
        shutil.copytree(self.guests[source].folder / "jobs" / "given", given)
        self.guests[target].run(
            f"mkdir -m 700 /tmp/keys-{source} && install -m 600 /jobs/keys-{source}/* /tmp/keys-{source}"
        )

    def node(self, name: str, server: str, *words: object) -> Job:
        """Start a handler in a machine, see :mod:`tests.vm.node`."""
        address = f"tcp://{ADDRESSES[server]}:{PORT}"
        return self.guests[name].start(
            f"exec python3 -m tests.vm.node {address} /tmp/keys-{server} {' '.join(map(str, words))}"
        )

    def ask(self, name: str, server: str, *words: object) -> dict[str, Any]:
        """What a handler in a machine tells at its end."""
        return last(self.node(name, server, *words).wait(PATIENCE))


def last(output: str) -> dict[str, Any]:
    """The last line of JSON in what a handler printed."""
    # The very last one may not be complete yet.
    found = [line for line in output.splitlines() if line.startswith("{") and line.endswith("}")]
    assert found, output
    told: dict[str, Any] = json.loads(found[-1])
    return told


def serve(guest: Guest, *options: str) -> Job:
    """Start a server that any host reaches, on the first device."""
    return guest.start(
        f"exec python3 -m maru_core.cli serve --runtime-dir /tmp/runtime --url tcp://{ADDRESSES[guest.name]}:{PORT} "
        f"--keys /tmp/keys --storage-backend cxl --cxl-pool-path /dev/dax0.0 --granule 64K {' '.join(options)}"
    )


def make_keys(guest: Guest) -> None:
    """Make keys of a server in a machine, and lay out what other machines may have of them."""
    guest.run(
        "python3 -m maru_core.cli keygen /tmp/keys && mkdir /jobs/given && "
        f"cp /tmp/keys/client.key /tmp/keys/server.pub /jobs/given && cp -r /tmp/keys /tmp/keys-{guest.name}"
    )


def status(guest: Guest) -> dict[str, Any]:
    """What the server in a machine tells its operator."""
    told: dict[str, Any] = json.loads(
        guest.run("python3 -m maru_core.cli status --runtime-dir /tmp/runtime --keys /tmp/keys --timeout 20 --json")
    )
    return told


def sessions(guest: Guest, of: str) -> list[dict[str, Any]]:
    """The sessions of handlers in the machine ``of``."""
    told = json.loads(
        guest.run(
            "python3 -m maru_core.cli admin --runtime-dir /tmp/runtime --keys /tmp/keys --timeout 20 sessions --json"
        )
    )
    return [session for session in told if session["name"] == of]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Machines and devices, none of which runs yet."""
    with ExitStack() as stack:
        try:
            image = stack.enter_context(prepared())
        except NotRun as reason:
            pytest.skip(f"not run: {reason}")
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="maru-vm-")))
        devices = [Device.make(folder / f"memory-{number}", size) for number, size in enumerate(SIZES)]
        yield World(image, folder, devices, stack)


@pytest.fixture(scope="module")
def a(world: World) -> Guest:
    """A machine with two DAX devices."""
    guest = world.boot("a", 2)
    for number in range(2):
        guest.run(f"ndctl create-namespace --force --mode=devdax --align=2M --reconfig=namespace{number}.0")
    return guest


@pytest.fixture(scope="module")
def pair(world: World, a: Guest) -> World:
    """A server in machine a, and machine b on the same memory. Never called before the tests of one machine ended."""
    if native.load() is None:
        pytest.skip(f"not run: hosts share a pool only where caches can be flushed, and {native.why_not()}")
    make_keys(a)
    world.server = serve(a)
    world.server.says("serving", PATIENCE)
    world.boot("b", 1)
    world.give_keys("a", "b")
    return world


def test_the_contract_and_servers_on_a_device(a: Guest) -> None:
    output = a.run(
        "export MARU_TEST_DAX=/dev/dax0.0 MARU_TEST_DAX_2=/dev/dax1.0; "
        "python3 -m pytest -q -p no:cacheprovider -rs --durations=10 -m device tests/backends tests/vm/test_device.py",
        540,
    )
    assert " passed" in output
    assert "skipped" not in output, output


def test_what_one_host_stores_the_other_reads_byte_exact(pair: World) -> None:
    for writer, reader in ("ab", "ba"):
        assert pair.ask(writer, "a", "write", f"of-{writer}", COUNT) == {"stored": COUNT}
        for name in (reader, writer):
            told = pair.ask(name, "a", "read", f"of-{writer}", COUNT)
            assert told == {"exact": COUNT, "missing": 0, "wrong": []}
    pool = status(pair.guests["a"])["pools"][0]
    assert (pool["backend"], pool["location"], pool["objects"]) == ("cxl", "/dev/dax0.0", 2 * COUNT)


def test_after_a_killed_server_both_hosts_go_on(pair: World) -> None:
    asking = {name: pair.node(name, "a", "ask", f"of-{name}", COUNT, "/tmp/killed") for name in "ab"}
    for job in asking.values():
        job.says('"hits"', PATIENCE)
    assert pair.server is not None
    pair.server.kill()
    pair.server = serve(pair.guests["a"])
    pair.server.says("serving", PATIENCE)
    for name, job in asking.items():
        hits = last(job.output)["hits"]
        pair.guests[name].until(partial(has_hits, job, hits + 3), PATIENCE, "it does not find its objects again", job)
        pair.guests[name].run("touch /tmp/killed")
        told = last(job.wait(PATIENCE))
        assert told["wrong"] == []
        assert told["longest"] < DEADLINE + SLACK


def has_hits(job: Job, count: int) -> bool:
    """Whether a handler that goes on asking has found so many objects."""
    return bool(last(job.output)["hits"] >= count)


def test_pages_of_a_host_that_died_stay_until_the_operator_says_so(pair: World) -> None:
    a = pair.guests["a"]
    held = last(pair.node("b", "a", "hold", "of-a", LEASED, RESERVED, RESERVED_SIZE).says("{", PATIENCE))
    assert (held["leased"], held["reserved"]) == (LEASED, RESERVED)
    asking = pair.node("a", "a", "ask", "of-b", COUNT, "/tmp/enough")
    asking.says('"hits"', PATIENCE)
    pair.kill("b")

    # It is back before anybody is told that it died, with handlers that work beside what the dead ones hold.
    pair.boot("b", 1)
    pair.give_keys("a", "b")
    assert pair.ask("b", "a", "read", "of-a", COUNT) == {"exact": COUNT, "missing": 0, "wrong": []}
    assert pair.ask("b", "a", "write", "reborn", COUNT) == {"stored": COUNT}
    assert pair.ask("a", "a", "read", "reborn", COUNT) == {"exact": COUNT, "missing": 0, "wrong": []}

    held_bytes = RESERVED * RESERVED_SIZE

    def is_quarantined() -> bool:
        pool = status(a)["pools"][0]
        assert pool["quarantined"] in (0, held_bytes)
        assert pool["quarantined"] + pool["reserved"] >= held_bytes
        assert pool["leased"] > 0
        return bool(pool["quarantined"] == held_bytes)

    a.until(is_quarantined, PATIENCE, "what the dead host reserved is not quarantined")
    (dead,) = [session for session in sessions(a, "b") if session["reserved"]]
    assert not dead["proof"]
    assert dead["reserved"] == held_bytes
    a.run("touch /tmp/enough")
    told = last(asking.wait(PATIENCE))
    assert told["wrong"] == []
    assert told["misses"] == 0
    assert told["stored"] > 0
    before = status(a)["pools"][0]

    a.run(
        "python3 -m maru_core.cli admin --runtime-dir /tmp/runtime --keys /tmp/keys --timeout 20 "
        f"forget {dead['session']:016x}"
    )
    after = status(a)["pools"][0]
    assert (after["quarantined"], after["leased"], after["reserved"]) == (0, 0, 0)
    assert after["free"] == before["free"] + held_bytes
    assert sessions(a, "b") == []


def test_a_host_whose_server_died_with_another_host_has_misses(pair: World) -> None:
    asking = pair.node("b", "a", "ask", "of-b", COUNT, "/tmp/enough")
    asking.says('"hits": 2', PATIENCE)
    reading = pair.node("b", "a", "hold", "of-b", LEASED, 0, 0)
    reading.says("{", PATIENCE)
    pair.kill("a")
    asking.says('"misses": 4', PATIENCE)
    assert asking.code is None, "it goes on asking"

    b = pair.guests["b"]
    make_keys(b)
    # Handlers let go of the memory by themselves, but not of what somebody reads.
    assert "still map" in serve(b, "--take-over").wait(PATIENCE, code=1)
    reading.kill()
    b.run("touch /tmp/enough")
    told = last(asking.wait(PATIENCE))
    assert told["wrong"] == []
    assert told["longest"] < DEADLINE + SLACK

    refused = serve(b).wait(PATIENCE, code=1)
    assert "/dev/dax0.0 was shared with other hosts by process" in refused
    assert "on host 'a'" in refused
    assert "--take-over" in refused
    serve(b, "--take-over").says("serving", PATIENCE)
    assert pair.ask("b", "b", "read", "of-b", COUNT) == {"exact": 0, "missing": COUNT, "wrong": []}
    assert pair.ask("b", "b", "write", "anew", COUNT) == {"stored": COUNT}
    assert pair.ask("b", "b", "read", "anew", COUNT) == {"exact": COUNT, "missing": 0, "wrong": []}
