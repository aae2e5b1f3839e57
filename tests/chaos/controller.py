"""Starts servers and clients on one small pool, ends and stops them at the worst moments, and takes stock."""

from __future__ import annotations

import heapq
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from attrs import asdict, define, evolve, frozen

from maru_core.client import MaruHandler
from maru_core.config import MaruConfig
from maru_core.errors import Unavailable
from maru_core.host import PluginHost
from maru_core.protocol import Presence
from tests.chaos import pool
from tests.chaos.client import Plan
from tests.chaos.server import MOVING, OPERATIONS, STARTING
from tests.chaos.stamps import KEYS, SPACES, difference, key_of, namespace, verified
from tests.chaos.tally import FATAL, counts_in, totals

ROOT = Path(__file__).parents[2]
#: Seconds within which a server must serve, and within which a client may find it again.
_START = 60.0
_BACK = 20.0
_EVENTS = ("client kills", "client stops", "server kills", "server stops", "resets", "warm starts", "found again")
_EVENTS += ("checks", "quarantines seen", "torn headers")


@frozen(kw_only=True)
class Scale:
    """How much of everything. Times in seconds, sizes in bytes.

    ``reset_chance`` and ``inspect_chance``: of a reset just before a server is killed, and of a look at everything when
    the next one serves, each per round; ``again_chance``: of another server in between, which dies while it starts.
    ``quota``: most that one of the two namespaces may take. ``upper``: size of a pool of host memory that is
    written to first; the one of ``pool_size`` is a file that stands in for a CXL device then, and objects move.

    ``patience`` replaces the server's (60 s), so that ``stop`` is beyond every timer: requests (``request_timeout``),
    pings (1 s), the sweep for dead clients (0.5 s) and the patience. ``calm``: work between two server kills.
    """

    clients: int = 6
    pool_size: int = 4 << 20
    granule: int = 4096
    request_timeout: float = 0.5
    patience: float = 2.0
    stop: float = 3.0
    calm: float = 3.0
    kills_per_round: int = 6
    stops_per_round: int = 2
    stop_chance: float = 0.0005
    fork_chance: float = 0.001
    reset_chance: float = 0.3
    inspect_chance: float = 0.5
    again_chance: float = 0.3
    quota: int | None = None
    upper: int | None = None

    @property
    def operations(self) -> tuple[str, ...]:
        """Inside which servers can be killed."""
        return (*OPERATIONS, *(MOVING if self.upper else ()))


class ChaosError(AssertionError):
    """Something that must hold does not."""


@define(eq=False)
class Process:
    """A client, named by a descriptor that cannot come to mean another process."""

    slot: int
    plan: Plan
    pid: int
    descriptor: int

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return not select.select([self.descriptor], [], [], 0)[0]

    @property
    def is_stopped(self) -> bool:
        """Whether SIGSTOP holds it."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2][0] == "T"
        except OSError:
            return False

    def send(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.descriptor, number)

    def wait(self, seconds: float) -> bool:
        """Whether it ends within so many seconds."""
        return bool(select.select([self.descriptor], [], [], seconds)[0])


class Chaos:
    """One pool, one server at a time, some clients. A context manager that ends all of them.

    ``warm``: a server that comes back must serve what was READY before. ``events`` counts what was done.
    """

    def __init__(self, folder: Path, scale: Scale, seed: int, *, warm: bool) -> None:
        self._folder = folder
        self._scale = scale
        self._chance = random.Random(seed)
        self._warm = warm
        self._url = f"ipc://{folder}/server.sock"
        self._numbers = 0
        self._clients: list[Process] = []
        self._due: list[tuple[float, int, Process]] = []
        self._server: subprocess.Popen[bytes] | None = None
        self._nursery: subprocess.Popen[str] | None = None
        self._observers: dict[str, MaruHandler] = {}
        self.events = dict.fromkeys((*_EVENTS, *(f"server kills in {moment}" for moment in STARTING)), 0)
        self.kills_inside = dict.fromkeys(scale.operations, 0)
        self.problems: list[str] = []
        self.starts: list[float] = []

    # -- life ------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Chaos:
        (self._folder / "tallies").mkdir()
        (self._folder / "pools").mkdir()
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "MARU_PLUGINS": "none"}
        with (self._folder / "clients.log").open("ab") as log:
            self._nursery = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.nursery"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=ROOT,
                env=environ,
            )
        try:
            self.start_server("reserve")
            self._observe()
            for slot in range(self._scale.clients):
                self._spawn(slot)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for client in self._clients:
            client.send(signal.SIGKILL)
            os.close(client.descriptor)
        self._clients = []
        self._look_away()
        for process in (self._nursery, self._server):
            if process is None:
                continue
            if process.stdin is not None:
                process.stdin.close()
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def _observe(self) -> None:
        host = PluginHost.with_plugins({}, built_ins=True)
        for space in SPACES:
            config = MaruConfig(server_url=self._url, request_timeout=2)
            self._observers[space] = MaruHandler.connect(config, namespace(space), host=host, name="observer")

    def _look_away(self) -> None:
        for handler in self._observers.values():
            handler.close()
        self._observers = {}

    def start_server(self, operation: str) -> None:
        """Start a server that can be told to die inside ``operation``, and wait until it serves."""
        begin = time.monotonic()
        server = self._launch(operation)
        while self._serving() != server.pid:
            if server.poll() is not None or time.monotonic() - begin > _START:
                log_text = (self._folder / "server.log").read_text()[-3000:]
                raise ChaosError(f"the server did not come back ({server.returncode}): {log_text}")
            time.sleep(0.01)
        self.starts.append(time.monotonic() - begin)

    def _launch(self, operation: str) -> subprocess.Popen[bytes]:
        scale = self._scale
        command = [sys.executable, "-m", "tests.chaos.server", "--kill-in", operation]
        command += ["--told", str(self._folder / "server-kills"), "--seed", str(self._chance.randrange(1 << 30))]
        command += ["--patience", str(scale.patience), "--", "serve", "--runtime-dir", str(self._folder)]
        command += ["--url", self._url, "--pool-path", str(self._folder / "pools"), "--idle-exit", "120"]
        command += ["--pool-size", str(scale.pool_size), "--granule", str(scale.granule)]
        if scale.upper is not None:
            command += ["--storage-backend", "mixed", "--cpu-pool-size", str(scale.upper), "--promote"]
            command += ["--cxl-pool-path", str(self._folder / "pools")]
        if scale.quota is not None:
            command += ["--namespace-quota", str(scale.quota)]
        with (self._folder / "server.log").open("ab") as log:
            environ = {**os.environ, "PYTHONPATH": str(ROOT), "MARU_PLUGINS": "none"}
            self._server = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=log, stderr=log)
        return self._server

    def _start_in_vain(self, moment: str) -> None:
        """A server that dies while it recovers, or while clients resume; or soon afterwards if that comes first."""
        paths = pool.find_pools(self._folder / "pools")
        left = pool.survey_all(paths)
        epochs = {namespace(space).digest: observer.weights_epoch for space, observer in self._observers.items()}
        server = self._launch(moment)
        before = self._told_kills()
        begin = time.monotonic()
        served = None
        while server.poll() is None and time.monotonic() - begin < _START:
            if served is None and self._serving() == server.pid:
                served = time.monotonic()
            if served is not None and time.monotonic() - served > 1:
                break
            self._work(0.02)
        server.kill()
        server.wait()
        self.events["server kills"] += 1
        self.events[f"server kills in {moment}"] += len(self._told_kills()) - len(before)
        if served is None:
            # Nobody asked it for anything, so it may have changed nothing.
            ready = {(h.digest, h.key) for h in left.ready if h.weights_epoch == epochs[h.digest]}
            lost = ready - {(h.digest, h.key) for h in pool.survey_all(paths).ready}
            if lost:
                self.problems.append(f"{len(lost)} of {len(ready)} READY objects are gone after a kill in {moment}")

    def _serving(self) -> int | None:
        with suppress(OSError, ValueError, KeyError):
            pid: int = json.loads((self._folder / "server.json").read_text())["pid"]
            return pid
        return None

    def _spawn(self, slot: int) -> None:
        """The client of a ``slot``, which says what it does; the one of slot 0 cannot prove its death, and lives on."""
        assert self._nursery is not None
        assert self._nursery.stdin is not None
        assert self._nursery.stdout is not None
        self._numbers += 1
        scale = self._scale
        plan = Plan(
            url=self._url,
            folder=str(self._folder),
            number=self._numbers,
            space=SPACES[slot % len(SPACES)],
            writes=(0.5, 0.2, 0.8, 0.05)[slot % 4],
            seed=self._chance.randrange(1 << 30),
            request_timeout=scale.request_timeout,
            stop_chance=scale.stop_chance,
            fork_chance=scale.fork_chance,
        )
        if slot == 0:
            plan = evolve(plan, remote=True, fork_chance=0.0)
        print(json.dumps(asdict(plan)), file=self._nursery.stdin, flush=True)
        pid = int(self._nursery.stdout.readline())
        self._clients.append(Process(slot, plan, pid, os.pidfd_open(pid)))

    # -- what happens ----------------------------------------------------------------------------------------------

    def round(self, operation: str) -> None:
        """Work, kills and stops of clients, then a server that dies inside ``operation``, and one that follows it."""
        scale, chance = self._scale, self._chance
        acts: list[Callable[[], None]] = [self._kill] * scale.kills_per_round + [self._stop] * scale.stops_per_round
        acts += [self._reset] * (chance.random() < 0.3) + [self._stop_server] * (chance.random() < 0.15)
        chance.shuffle(acts)
        for act in acts:
            act()
            self._work(chance.uniform(0.3, 1.7) * scale.calm / len(acts))
        self.take_stock()
        if chance.random() < scale.reset_chance:
            self._reset()
        self._kill_server(operation)

    def _work(self, seconds: float) -> None:
        """Let everybody work; continue in time who is stopped, replace who has ended."""
        end = time.monotonic() + seconds
        while (now := time.monotonic()) < end:
            self._tend(now)
            time.sleep(min(0.05, end - now))

    def _tend(self, now: float) -> None:
        while self._due and self._due[0][0] <= now:
            _, _, client = heapq.heappop(self._due)
            if client.plan.remote:
                self._look_for_quarantine()
            client.send(signal.SIGCONT)
        waiting = {client.pid for *_, client in self._due}
        for client in list(self._clients):
            if not client.is_alive:
                if client.plan.remote:
                    self.problems.append("a client that nobody killed has ended")
                self._replace(client)
            elif client.pid not in waiting and client.is_stopped:
                # It stopped itself, in the middle of something.
                self._continue_later(client)

    def _look_for_quarantine(self) -> None:
        """What a client without proof was writing when it fell silent is kept for it, and counted as such."""
        observer = self._observers.get(SPACES[0])
        with suppress(Unavailable):
            if observer is not None:
                self.events["quarantines seen"] += any(one["quarantined"] for one in observer.server_stats()["pools"])

    def _continue_later(self, client: Process) -> None:
        self.events["client stops"] += 1
        self._numbers += 1  # equal times are told apart
        heapq.heappush(self._due, (time.monotonic() + self._scale.stop, self._numbers, client))

    def _replace(self, client: Process) -> None:
        self._clients.remove(client)
        self._due = [item for item in self._due if item[2] is not client]
        heapq.heapify(self._due)
        os.close(client.descriptor)
        self._spawn(client.slot)

    def _kill(self) -> None:
        victim = self._chance.choice([client for client in self._clients if not client.plan.remote])
        victim.send(signal.SIGKILL)
        if not victim.wait(5):
            raise ChaosError(f"client {victim.pid} cannot be killed")
        self.events["client kills"] += 1
        self._replace(victim)

    def _stop(self) -> None:
        stopped = {client.pid for *_, client in self._due}
        free = [client for client in self._clients if client.pid not in stopped]
        if free:
            client = self._chance.choice(free)
            client.send(signal.SIGSTOP)
            self._continue_later(client)

    def _stop_server(self) -> None:
        assert self._server is not None
        self.events["server stops"] += 1
        before = self._expired()
        self._server.send_signal(signal.SIGSTOP)
        time.sleep(self._scale.stop)
        self._server.send_signal(signal.SIGCONT)
        self._work(1.2)
        expired = self._expired() - before
        # Clients that were killed shortly before may be found dead now; nobody else.
        if expired > self._scale.kills_per_round + 2:
            self.problems.append(f"{expired} sessions expired because the server was stopped")

    def _expired(self) -> int:
        """Sessions that ended by themselves so far; one that had not even attached holds nothing and opens another."""
        log = (self._folder / "server.log").read_text()
        return sum("session expired" in line and "attached=True" in line for line in log.splitlines())

    def _reset(self) -> None:
        observer = self._observers[self._chance.choice(SPACES)]
        with suppress(Unavailable):
            before = observer.weights_epoch
            after = observer.reset()
            self.events["resets"] += 1
            if after <= before:
                self.problems.append(f"a reset answered weights epoch {after} after {before}")

    # -- servers ---------------------------------------------------------------------------------------------------

    def _kill_server(self, operation: str) -> None:
        server = self._server
        assert server is not None
        before = self._told_kills()
        server.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + 20
        while server.poll() is None and time.monotonic() < deadline:
            self._work(0.02)
        if server.poll() is None:
            self.problems.append(f"no server died inside {operation} within 20 s")
            server.kill()
        server.wait()
        told = self._told_kills()
        if len(told) == len(before) + 1:
            self.kills_inside[told[-1].split()[0]] += 1
        elif server.returncode != -signal.SIGKILL:
            self.problems.append(f"the server ended by itself with {server.returncode}")
        self.events["server kills"] += 1
        if self._chance.random() < self._scale.again_chance:
            self._start_in_vain(self._chance.choice(list(STARTING)))
        inspect = self._chance.random() < self._scale.inspect_chance
        if inspect:
            # Nobody may say hello before the stock was taken: until then nothing may be evicted.
            for client in self._clients:
                client.send(signal.SIGSTOP)
        paths = pool.find_pools(self._folder / "pools")
        dead = pool.survey_all(paths)
        self.events["torn headers"] += dead.torn
        epochs = {space: observer.weights_epoch for space, observer in self._observers.items()}
        if inspect:
            # Whoever knows the weights epoch tells it to a server that has forgotten it.
            self._look_away()
        following = self._scale.operations
        self.start_server(following[(following.index(operation) + 1) % len(following)])
        warm = pool.identities(paths) == dead.identity
        if warm:
            self.events["warm starts"] += 1
        elif self._warm:
            self.problems.append(f"cold start after a kill inside {told[-1] if told else operation}")
        if inspect:
            if warm:
                self._find_again(dead, epochs, told[-1] if told else operation)
            self._observe()
            for client in self._clients:
                if client.pid not in {other.pid for *_, other in self._due}:
                    client.send(signal.SIGCONT)
        self.take_stock()

    def _told_kills(self) -> list[str]:
        path = self._folder / "server-kills"
        return path.read_text().splitlines() if path.exists() else []

    def _find_again(self, dead: pool.Found, epochs: dict[str, int], kill: str) -> None:
        """Everything that was READY is found at once, and every byte of it is right."""
        host = PluginHost.with_plugins({}, built_ins=True)
        for space in SPACES:
            config = MaruConfig(server_url=self._url, request_timeout=5)
            digest = namespace(space).digest
            with MaruHandler.connect(config, namespace(space), host=host, name="newcomer") as handler:
                weights = handler.weights_epoch
                if weights < epochs[space]:
                    self.problems.append(f"weights epoch of {space} fell from {epochs[space]} to {weights} ({kill})")
                numbers = {key_of(space, number): number for number in range(KEYS)}
                keys = [h.key for h in dead.ready if h.digest == digest and h.weights_epoch == weights]
                presences = handler.probe(keys)
                missing = [numbers[k] for k, p in zip(keys, presences, strict=True) if p != Presence.READY]
                self.events["found again"] += len(keys) - len(missing)
                if missing:
                    self.problems.append(
                        f"{len(missing)} of {len(keys)} READY objects of {space} were not found again ({kill}): "
                        f"{missing[:5]}; {handler.server_stats()['counters']}"
                    )
                for at in range(0, len(keys), 16):
                    part = keys[at : at + 16]
                    self._check_bytes(handler, space, [numbers[key] for key in part], part, weights, kill)

    def _check_bytes(
        self, handler: MaruHandler, space: str, numbers: Sequence[int], keys: Sequence[bytes], weights: int, kill: str
    ) -> None:
        lease = handler.acquire(keys, leading=False)
        located = handler.adopt(lease.epoch, lease.entries, lease.generations, lease.lengths)
        for index, number in enumerate(numbers):
            if lease.statuses[index] != Presence.READY:
                continue
            problem = difference(bytes(located.view(index)), space, number, weights)
            if problem is not None or not verified(located, index):
                self.problems.append(
                    f"object {number} of {space} after a kill inside {kill}: {problem or 'torn header'}"
                )
        handler.release(lease)

    # -- stock -----------------------------------------------------------------------------------------------------

    def _stats(self) -> dict[str, Any]:
        deadline = time.monotonic() + _BACK
        while True:
            try:
                return self._observers[SPACES[0]].server_stats()
            except Unavailable as error:
                if time.monotonic() > deadline:
                    raise ChaosError(f"the server is away for over {_BACK} s: {error}") from error
                time.sleep(0.02)

    def take_stock(self) -> dict[str, Any]:
        """Every granule is used, free, reserved or in quarantine, at any time; the STATS that say so."""
        stats = self._stats()
        for one in stats["pools"]:
            parts = one["used"] + one["free"] + one["reserved"] + one["quarantined"]
            if parts != one["capacity"] or one["leased"] > one["used"]:
                self.problems.append(f"the pool does not add up: {one}")
        if stats["counters"]["internal_errors"]:
            self.problems.append(f"{stats['counters']['internal_errors']} internal errors: {self._faults()}")
        self.events["checks"] += 1
        return stats

    def _faults(self) -> str:
        """Where the server's log says that something was raised."""
        log = (self._folder / "server.log").read_text()
        return " | ".join(line.strip() for line in log.splitlines() if '  File "' in line or "Error" in line)[:3000]

    def hits(self) -> int:
        """Verified hits of all clients so far."""
        return totals(self._folder / "tallies")["hits"]

    def _done_by(self, client: Process) -> int:
        """What a client has counted so far that takes a server."""
        counts = counts_in(self._folder / "tallies" / str(client.plan.number))
        return sum(count for name, count in counts.items() if name not in ("away", "self_stops", "forks", "cancelled"))

    def finish(self) -> dict[str, int]:
        """Let every client close, and see that nothing is left; the sums of what all clients counted."""
        self._work(0.5)
        # Who cannot prove its death has to say goodbye, and for that it must have found the last server.
        remote = next(client for client in self._clients if client.plan.remote)
        before, deadline = self._done_by(remote), time.monotonic() + _BACK
        while self._done_by(remote) == before:
            if time.monotonic() > deadline:
                raise ChaosError(f"client {remote.plan} does nothing with the last server for over {_BACK} s")
            self._work(0.1)
        for client in self._clients:
            client.send(signal.SIGCONT)
            client.send(signal.SIGTERM)
        for client in self._clients:
            # One that stops itself meanwhile is continued.
            deadline = time.monotonic() + 15
            while not client.wait(0.1):
                client.send(signal.SIGCONT)
                if time.monotonic() > deadline:
                    raise ChaosError(f"client {client.plan} does not end")
        deadline = time.monotonic() + 8
        while True:
            pools = self.take_stock()["pools"]
            left = {name: sum(one[name] for one in pools) for name in ("reserved", "leased", "quarantined")}
            if not any(left.values()):
                break
            if time.monotonic() > deadline:
                self.problems.append(f"all clients are gone, but this is left: {left}")
                break
            time.sleep(0.1)
        sums = totals(self._folder / "tallies")
        for name in FATAL:
            if sums[name]:
                told = [line for line in (self._folder / "told").read_text().splitlines() if f" {name}: " in line]
                self.problems.append(f"{name}: {sums[name]}, the first: {told[0] if told else '?'}")
        return sums


def operations(scale: Scale) -> Iterator[str]:
    """The operations in the order in which servers die inside them, again and again."""
    while True:
        yield from scale.operations
