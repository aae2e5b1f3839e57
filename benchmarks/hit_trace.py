"""Inside an engine of vLLM in one process: when what happens to a request, what our hooks cost, and a made-up bus.

``worker_extension_cls="benchmarks.hit_trace.HitTrace"`` adds methods to vLLM's worker, for ``collective_rpc``. Times
are of ``time.perf_counter``, which all processes of a machine share. Watching costs a few microseconds per event, so it
is off until it is asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from attrs import define, evolve, field, frozen

from benchmarks.beside_python import sleep_outside
from maru_core.brake import Brake
from maru_core.geometry import ChunkCopy
from maru_transfer.prepared import prepare

#: Hooks of the connector whose time is counted.
HOOKS = (
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished_all_groups",
    "get_kv_connector_stats",
    "handle_preemptions",
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_finished",
    "get_block_ids_with_load_errors",
    "build_connector_worker_meta",
)


@define
class Bus:
    """A transfer that takes as long as so many bytes on a bus would, in one call without the interpreter's lock.

    What it wraps moves the real bytes, which should be few. Implements ``Transfer``, ``PreparesLoads`` and, for a
    transfer that does, ``LoadsByLayer``. Nothing yields in between: meant for loads of one size.
    """

    inner: Any
    seconds_per_copy: float
    layers: int = 1
    #: Begin and end of everything that was moved.
    log: list[tuple[float, float]] = field(factory=list)

    def load(self, block_ids: Sequence[int], copies: Sequence[ChunkCopy]) -> None:
        """As :meth:`store`."""
        self.timed(len(copies), lambda: self.inner.load(block_ids, copies))

    def store(self, block_ids: Sequence[int], copies: Sequence[ChunkCopy]) -> None:
        """Move them, and sleep until it is over."""
        self.timed(len(copies), lambda: self.inner.store(block_ids, copies))

    def prepare_load(self, block_ids: Sequence[int], copies: Sequence[ChunkCopy]) -> OnBus:
        """Planned by what is wrapped."""
        return OnBus(self, prepare(self.inner, block_ids, copies), len(copies))

    def begin_load(self, block_ids: Sequence[int], copies: Sequence[ChunkCopy]) -> LayersOnBus:
        """Its layers arrive one after another, each with its share of the time."""
        inner = self.inner.begin_load(block_ids, copies)
        return LayersOnBus(self, inner, self.layers, time.perf_counter(), len(copies) * self.seconds_per_copy)

    def close(self) -> None:
        """Close what is wrapped."""
        self.inner.close()

    def timed(self, copies: int, move: Callable[[], Any]) -> Any:
        """Do it, and what is left of the time asleep."""
        begin = time.perf_counter()
        result = move()
        left = begin + copies * self.seconds_per_copy - time.perf_counter()
        if left > 0:
            sleep_outside(left)
        self.log.append((begin, time.perf_counter()))
        return result


@frozen
class OnBus:
    """Implements PreparedCopies."""

    bus: Bus
    inner: Any
    count: int

    def run(self, brake: Brake, least: int) -> int:
        """All of it."""
        done: int = self.bus.timed(self.count, lambda: self.inner.run(brake, self.count))
        return done

    def close(self) -> None:
        """Let go of the buffers."""
        self.inner.close()


@define
class LayersOnBus:
    """Implements LayeredLoad: each layer is there when its bytes are, and its time on the bus is over."""

    bus: Bus
    inner: Any
    layers: int
    begun: float
    seconds: float

    def layers_done(self) -> int:
        """By the clock."""
        elapsed = time.perf_counter() - self.begun
        return min(int(self.inner.layers_done()), int(elapsed / self.seconds * self.layers))

    def wait_layer(self, layer: int) -> None:
        """As on the host."""
        self.inner.wait_layer(layer)
        self._wait(layer + 1)

    def finish(self) -> None:
        """Also when it was cancelled."""
        self.inner.finish()
        self._wait(self.layers)
        self.bus.log.append((self.begun, time.perf_counter()))

    def cancel(self) -> None:
        """What is on the bus goes on."""
        self.inner.cancel()

    def _wait(self, layers: int) -> None:
        left = self.begun + self.seconds * layers / self.layers - time.perf_counter()
        if left > 0:
            sleep_outside(left)


@define
class Cost:
    """Of one hook."""

    calls: int = 0
    seconds: float = 0.0
    longest: float = 0.0

    def add(self, seconds: float) -> None:
        """One call."""
        self.calls += 1
        self.seconds += seconds
        self.longest = max(self.longest, seconds)


class Watch:
    """Replaces methods until :meth:`end`. What is noted of a request: :data:`benchmarks.stages.STAGES`."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self.stages: dict[str, dict[str, float]] = {}
        self.asked: dict[str, int] = {}
        self.costs: dict[str, Cost] = {}
        #: When each step's results were taken, and its tokens.
        self.steps: list[tuple[float, int]] = []

    def note(self, request_id: str, stage: str, when: float | None = None) -> None:
        """Of several the first counts."""
        self.stages.setdefault(request_id, {}).setdefault(stage, time.perf_counter() if when is None else when)

    def around(
        self, owner: Any, name: str, after: Callable[..., None], before: Callable[..., None] | None = None
    ) -> None:
        """Call ``before(*arguments)`` ahead of each call and ``after(begin, result, *arguments)`` behind it."""
        original = getattr(owner, name)
        own = name in vars(owner)

        def watched(*arguments: Any, **more: Any) -> Any:
            if before is not None:
                before(*arguments)
            begin = time.perf_counter()
            result = original(*arguments, **more)
            after(begin, result, *arguments)
            return result

        setattr(owner, name, watched)
        self._undo.append(lambda: setattr(owner, name, original) if own else delattr(owner, name))

    def cost(self, name: str, begin: float) -> None:
        """Count one call that ends now."""
        self.costs.setdefault(name, Cost()).add(time.perf_counter() - begin)

    def end(self) -> None:
        """Put everything back."""
        while self._undo:
            self._undo.pop()()

    def begin(self) -> None:
        """Watch vLLM and us. Fails where a name is gone."""
        from vllm.v1.core.sched.scheduler import Scheduler

        from maru_integrations.vllm.connector import MaruKVConnector

        self.around(Scheduler, "add_request", lambda at, _r, _s, request: self.note(request.request_id, "arrived", at))
        self.around(Scheduler, "update_from_output", self._computed)
        for name in HOOKS:
            self.around(MaruKVConnector, name, self._counted(name))
        self._watch_loads()

    def _counted(self, name: str) -> Callable[..., None]:
        def after(begin: float, result: Any, _connector: Any, *arguments: Any) -> None:
            self.cost(name, begin)
            if name == "get_num_new_matched_tokens":
                request_id = arguments[0].request_id
                self.asked[request_id] = self.asked.get(request_id, 0) + 1
                self.note(request_id, "asked", begin)
                if result[0] is not None:
                    self.note(request_id, "answered")
            elif name == "update_state_after_alloc" and not arguments[2]:
                self.note(arguments[0].request_id, "scheduled")
            elif name == "update_connector_output":
                self._all(arguments[0].finished_recving or (), "noticed")

        return after

    def _watch_loads(self) -> None:
        from maru_integrations.vllm.answers import Answers
        from maru_integrations.vllm.loadqueue import LoadQueue

        self.around(LoadQueue, "add", lambda _b, _r, _q, op, *_: self.note(op.request_id, "queued"))
        self.around(LoadQueue, "take", lambda _b, job, _q: job and self.note(job.op.request_id, "begun"))
        self.around(LoadQueue, "begin_copy", lambda _b, _r, _q, job, *_: self.note(job.op.request_id, "copying"))
        self.around(LoadQueue, "end_copy", lambda _b, _r, _q, job: self.note(job.op.request_id, "copied"))
        self.around(Answers, "load_ended", lambda _b, _r, _a, op, *_: self.note(op.request_id, "proven"))
        self.around(Answers, "take_finished", lambda _b, result, _a: self._all(result[1], "told"))

    def _computed(self, begin: float, _result: Any, scheduler: Any, planned: Any, *_: Any) -> None:
        self.steps.append((begin, planned.total_num_scheduled_tokens))
        for request in scheduler.running:
            if request.num_output_tokens:
                self.note(request.request_id, "computed")

    def _all(self, request_ids: Iterable[str], stage: str) -> None:
        for request_id in request_ids:
            self.note(request_id, stage)


class HitTrace:
    """Mixed into vLLM's worker, hence the names."""

    def maru_pace(self, milliseconds_per_object: float) -> None:
        """From now on loads and stores take so long; 0: as long as they take."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        worker = get_kv_transfer_group()._worker
        link = worker.connect()
        for name in ("transfer", "storing"):
            transfer = getattr(link, name)
            transfer = transfer.inner if isinstance(transfer, Bus) else transfer
            if milliseconds_per_object and transfer is not None:
                transfer = Bus(transfer, milliseconds_per_object / 1e3, len(worker._hooks.index))
            setattr(link, name, transfer)

    def maru_spare(self, spares: bool) -> None:
        """From now on as with ``maru_overlap_spare_decodes``, or without it. Not while a load is under way."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        from maru_integrations.vllm.overlap import LoadsInUse

        loader = get_kv_transfer_group()._worker._loader
        releases = loader._releases
        releases._settings = evolve(releases._settings, spares_decodes=spares)
        self._maru_waits = watch = Watch()
        for name in ("wait_layer", "settle"):
            watch.around(LoadsInUse, name, lambda begin, _result, *_: watch.cost("wait", begin))

    def maru_waited(self) -> float:
        """Seconds that steps have waited for loads since then."""
        self._maru_waits.end()
        cost = self._maru_waits.costs.get("wait")
        return 0.0 if cost is None else cost.seconds

    def maru_bus(self) -> list[tuple[float, float]]:
        """When loads were on the bus since this was last asked."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        transfer = get_kv_transfer_group()._worker.connect().transfer
        if not isinstance(transfer, Bus):
            return []
        log, transfer.log = transfer.log, []
        return log

    def maru_watch(self) -> None:
        """From now on note everything."""
        self._maru_watch = Watch()
        self._maru_watch.begin()

    def maru_watched(self) -> dict[str, Any]:
        """Stop, and tell what was noted."""
        watch = self._maru_watch
        watch.end()
        return {
            "stages": watch.stages,
            "asked": watch.asked,
            "costs": {name: [cost.calls, cost.seconds, cost.longest] for name, cost in watch.costs.items()},
            "steps": watch.steps,
        }
