"""Loads whose requests compute while later layers still arrive: what vLLM's thread must wait for, and when.

A load is *released* when enough of its layers are there and its request was reported as received. vLLM takes note of
that with a later step; from then on any request may read those blocks (they are in vLLM's prefix cache), so every step
waits, layer by layer, for every load that is in use and has not ended.

One that fails then is copied once more, as a whole, and the step goes on when that has ended: with asynchronous
scheduling vLLM cannot take back what is computed on a load that failed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence

from attrs import define, field

from maru_core import logs
from maru_core.contracts import LayeredLoad
from maru_core.foreign import pass_interrupt, show
from maru_integrations.vllm.metadata import LoadOp


@define(eq=False)
class _Underway:
    op: LoadOp
    load: LayeredLoad
    #: vLLM has been told, and has taken note.
    in_use: bool = False
    #: Its layers failed, and it is copied once more.
    repeated: bool = False
    ended: threading.Event = field(factory=threading.Event)


class LoadsInUse:
    """Shared by the loader thread (:meth:`begin`, :meth:`repeat`, :meth:`end`) and vLLM's thread (the rest).

    Invariant: whatever a step reads of a load in use was written by a copy that ended well, or its blocks are reported
    as failed with that step.
    """

    def __init__(self, queues: bool = False) -> None:
        """``queues``: of the :class:`maru_integrations.vllm.streams.Lane` of the loads."""
        self._lock = threading.Lock()
        self._loads: dict[int, _Underway] = {}
        self._queues = queues
        #: Where work is queued: loads behind a layer of which this step has queued something.
        self._behind: dict[int, _Underway] = {}

    @property
    def is_empty(self) -> bool:
        """Whether none is under way: asked before each layer of each step."""
        return not self._loads

    def begin(self, op: LoadOp, load: LayeredLoad) -> None:
        """A load is under way."""
        with self._lock:
            self._loads[op.load_id] = _Underway(op, load)

    def repeat(self, load_id: int) -> None:
        """Its layers failed, which ones is not known, and nothing is under way any more; it will be copied again.

        Ignores loads that have ended meanwhile.
        """
        with self._lock:
            underway = self._loads.get(load_id)
            if underway is not None:
                underway.repeated = True

    def end(self, load_id: int) -> None:
        """It touches no page any more, and it has been answered. Ignores loads that are not under way."""
        with self._lock:
            underway = self._loads.pop(load_id, None)
        if underway is not None:
            underway.ended.set()

    def use(self, request_ids: Collection[str]) -> None:
        """vLLM knows that these requests were received: steps read their blocks from now on."""
        with self._lock:
            for underway in self._loads.values():
                if underway.op.request_id in request_ids:
                    underway.in_use = True

    def ops(self) -> list[LoadOp]:
        """Loads whose blocks a step may read while they still arrive."""
        return [underway.op for underway in self._in_use()]

    def wait_layer(self, layer: int, timeout: float) -> bool:
        """What the calling thread's stream runs later comes after that layer of all loads in use.

        One that raises is waited for until it has ended, copied again or not, and been answered; whatever it raises,
        the others are waited for. Whether that is so after ``timeout`` seconds; it returns when one load takes that
        long. May be asked again.
        """
        failed = []
        for underway in self._in_use():
            try:
                underway.load.wait_layer(layer)
            except BaseException as error:  # noqa: BLE001 - a plugin's code, see pass_interrupt
                pass_interrupt(error)
                failed.append(underway)
            else:
                if self._queues:
                    self._behind[underway.op.load_id] = underway
        return all(underway.ended.wait(timeout) for underway in failed)

    def settle(self, timeout: float) -> bool:
        """Wait until every load in use has ended and been answered: only then is it known what a step has read.

        Whether that is so after ``timeout`` seconds; it returns when one load takes that long.
        """
        return all(underway.ended.wait(timeout) for underway in self._in_use())

    def take_undefined(self) -> list[LoadOp]:
        """Loads that the step may have read before they were there, however they ended. Ask when it has settled.

        Something was queued behind layers that failed later: it has run, or will, whatever was copied again since.
        """
        if not self._behind:
            return []
        behind, self._behind = self._behind, {}
        return [underway.op for underway in behind.values() if underway.repeated]

    def drain(self, unwanted: Callable[[LoadOp], bool], timeout: float) -> bool:
        """Stop these loads and wait until none of their pages is written to: the blocks are somebody else's next.

        Whether that is so after ``timeout`` seconds; it returns when one load takes that long. May be asked again.
        """
        with self._lock:
            chosen = [underway for underway in self._loads.values() if unwanted(underway.op)]
        for underway in chosen:
            stop(underway.load)
        return all(underway.ended.wait(timeout) for underway in chosen)

    def stop(self) -> None:
        """Stop every load, without waiting."""
        with self._lock:
            loads = list(self._loads.values())
        for underway in loads:
            stop(underway.load)

    def _in_use(self) -> list[_Underway]:
        # What is in use was begun before this thread heard of it, so it is seen.
        if not self._loads:
            return []
        with self._lock:
            return [underway for underway in self._loads.values() if underway.in_use]


def stop(load: LayeredLoad) -> None:
    """Cancel it. What cannot be stopped goes on to its end, for which everybody waits anyway."""
    try:
        load.cancel()
    except BaseException as error:  # noqa: BLE001 - a plugin's code, see pass_interrupt
        pass_interrupt(error)
        logs.get_logger(__name__).warning("maru.load_not_stopped", load=type(load).__name__, error=show(error))


class LayerHooks:
    """Whether vLLM calls a hook before each layer, which it does not where it replays one graph of the whole model.

    Trusted only after a step in which every layer's hook was called, and never again after one in which that was
    expected and did not happen.
    """

    def __init__(self, layer_names: Sequence[str]) -> None:
        #: True layer index by name.
        self.index = {name: index for index, name in enumerate(layer_names)}
        self._seen: set[int] = set()
        self._proven = False
        self._failed = False
        self._expected = False

    @property
    def trusted(self) -> bool:
        """Whether the next step with hooks can be relied on."""
        return self._proven and not self._failed

    def begin_step(self, whole_graph: bool, needed: bool) -> bool:
        """A step begins that may replay one graph for all layers; ``needed``: loads are in use.

        Returns whether every layer must be waited for now, because hooks may not come.
        """
        self._seen.clear()
        self._expected = needed and not whole_graph and self.trusted
        return needed and not self._expected

    def called(self, name: str) -> int | None:
        """The hook of a layer was called: its true index, ``None`` for one whose KV is not ours."""
        index = self.index.get(name)
        if index is not None:
            self._seen.add(index)
        return index

    def end_step(self) -> bool:
        """The step's forward pass is over. Whether it may have read layers that had not arrived."""
        complete = len(self._seen) == len(self.index)
        if complete:
            self._proven = True
        missed = self._expected and not complete
        if missed:
            self._failed = True
        self._seen.clear()
        self._expected = False
        return missed
